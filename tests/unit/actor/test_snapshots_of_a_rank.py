"""Snapshots of one rank: going back bit for bit, and refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from policy_tasks import everything, uneven_split
from single_rank import policy_of, with_passes
from small_models import random_batch

from megatron_daro.actor import snapshot
from megatron_daro.actor.double_buffer import DoubleBuffer, Slot, num_bytes
from megatron_daro.actor.host_memory import pieces_of
from megatron_daro.errors import WorkerError

pytestmark = pytest.mark.usefixtures("world")


def step(policy, seed, number):
    """The metrics of an optimizer step, without times."""
    batch = random_batch(seed=seed)
    micro_batches = uneven_split(len(batch), 2)
    metrics = policy.train_step(with_passes(policy, batch, micro_batches), micro_batches, step=number).metrics
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


def drawn():
    """The next number of each generator."""
    with snapshot.get_cuda_rng_tracker().fork():
        of_megatron = torch.rand(1).item()
    return torch.rand(2).tolist(), random.random(), np.random.rand(), of_megatron


def test_a_step_after_going_back_is_the_step(model):
    algorithm = {"name": "daro", "kl": {"coefficient": 0.1}}
    options = {"precision": "bf16", "optimizer": {"schedule": "cosine", "warmup_steps": 2}}
    policy, slot = policy_of(model, algorithm, **options), DoubleBuffer().open(None)
    step(policy, 0, 1)
    policy.train_state.begun = True
    policy.start_snapshot(slot, 7).wait()
    assert slot.serial == 7 and policy.snapshot_bytes == num_bytes(slot.layout)
    numbers, metrics, end = drawn(), step(policy, 1, 2), everything(policy)
    state = policy.train_state.algorithm.state_dict()
    assert policy.train_state.begun is False
    for _ in range(2):
        step(policy, 2, 3)
        policy.restore(slot)
        assert policy.train_state.begun is True
        assert drawn() == numbers and step(policy, 1, 2) == metrics
        assert policy.train_state.algorithm.state_dict() == state
        after = everything(policy)
        assert [name for name, value in end.items() if not np.array_equal(after[name], value)] == []
    again = policy_of(model, algorithm, to_be_restored=True, reference=policy.reference, **options)
    again.restore(slot)  # before its first step
    assert step(again, 1, 2) == metrics and again.reference is policy.reference


def test_a_snapshot_of_adapters_has_nothing_of_the_frozen_weights(model):
    options = {"lora": {"rank": 2}, "optimizer": {"learning_rate": 1e-2}}
    policy, slot = policy_of(model, {"name": "daro"}, **options), Slot()
    step(policy, 0, 1)
    policy.start_snapshot(slot, 3).wait()
    frozen = sum(p.nbytes for chunk in policy.chunks for p in chunk.parameters() if not p.requires_grad)
    assert 0 < sum(num_bytes(slot.layout).values()) < frozen
    metrics, end = step(policy, 1, 2), everything(policy)
    again = policy_of(model, {"name": "daro"}, to_be_restored=True, **options)
    again.restore(slot)
    assert step(again, 1, 2) == metrics
    after = everything(again)
    assert [name for name, value in end.items() if not np.array_equal(after[name], value)] == []


def test_what_does_not_fit_is_refused(model):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    policy.start_snapshot(slot, 3).wait()
    slot.serial = None
    with pytest.raises(WorkerError, match="snapshot None"):
        policy.restore(slot)
    slot.serial, layout = 3, slot.layout
    slot.layout = {**layout, "weights": layout["weights"][:-1]}
    lacking, whole = sum(layout["weights"][:-1]), sum(layout["weights"])
    with pytest.raises(WorkerError, match=rf"'weights': {lacking}.*'weights': {whole}"):
        policy.restore(slot)


def test_a_snapshot_that_fails_is_told_to_whoever_waits(model, monkeypatch):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()

    def fails(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(snapshot, "extended", fails)
    pending = policy.start_snapshot(slot, 1)
    with pytest.raises(WorkerError, match=r"MemoryError: no room"):
        pending.wait()
    assert slot.serial is None
    with pytest.raises(WorkerError):
        policy.start_snapshot(slot, 2)
    policy.end_background_work()  # says nothing, but waits


def test_bytes_of_tensors_fill_blocks_one_after_the_other():
    """A model is larger than a block."""
    storages = [torch.arange(size, dtype=torch.uint8).untyped_storage() for size in (5, 3, 0, 4)]
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in (2, 6, 6)]
    for piece, held in pieces_of(storages, blocks):
        held.copy_(piece)
    assert torch.cat(blocks).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0, 0]


class Scales(torch.nn.Module):
    """With a state of its own, as Transformer Engine's layers, and a buffer."""

    def __init__(self):
        super().__init__()
        self.amax = [1.0]
        self.register_buffer("count", torch.zeros(1))

    def get_extra_state(self):
        return self.amax

    def set_extra_state(self, state):
        self.amax = state


def test_buffers_and_extra_states_of_modules_go_back_too(model):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    scales = Scales()
    policy.chunks[0].add_module("scales", scales)
    policy.start_snapshot(slot, 1).wait()
    scales.amax[0], scales.count[0] = 5.0, 6.0
    for _ in range(2):  # what was put back is a copy
        policy.restore(slot)
        assert scales.amax == [1.0] and scales.count.tolist() == [0.0]
        scales.amax[0] = 7.0
