"""Snapshots of one rank: going back bit for bit, and refusals."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from policy_tasks import everything, uneven_split
from single_rank import policy_of, with_passes
from small_models import random_batch

from megatron_daro.actor import host_memory, snapshot
from megatron_daro.actor.double_buffer import DoubleBuffer, Slot, num_bytes
from megatron_daro.actor.host_memory import bytes_of
from megatron_daro.errors import WorkerError

PPO = {"name": "ppo", "critic": {"learning_rate": 1e-3}}
KL = {"name": "daro", "kl": {"coefficient": 0.1}}

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


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(PPO, {}), (KL, {"precision": "bf16", "optimizer": {"schedule": "cosine", "warmup_steps": 2}})],
    ids=["ppo", "daro_bf16"],
)
def test_a_step_after_going_back_is_the_step(model, algorithm, options):
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


def test_a_snapshot_has_copies_which_training_does_not_reach(model):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    step(policy, 0, 1)
    policy.start_snapshot(slot, 1).wait()
    rest = slot.rest["models"][0]
    assert rest["fields"] == {"begun": False} and rest["scheduler"]["num_steps"] == 1
    kept = (json.dumps(rest["algorithm"]), str(rest["groups"]), str(rest["scheduler"]), str(rest["on_host"]))
    step(policy, 1, 2)
    assert kept == (json.dumps(rest["algorithm"]), str(rest["groups"]), str(rest["scheduler"]), str(rest["on_host"]))
    assert all("params" not in group and "lr" in group for group in rest["groups"])


def test_a_snapshot_is_taken_in_the_same_memory_again(model, monkeypatch):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 10_000)  # several blocks of each kind
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    step(policy, 0, 1)
    policy.start_snapshot(slot, 1).wait()
    before = {kind: [id(block) for block in blocks] for kind, blocks in slot.blocks.items()}
    assert before.keys() == {"weights", "optimizer"} and all(len(blocks) > 2 for blocks in before.values())
    for kind, sizes in slot.layout.items():
        whole = torch.cat([bytes_of(storage) for storage in policy._memory.storages(kind)])
        assert len(whole) == sum(sizes) and torch.equal(torch.cat(slot.blocks[kind])[: len(whole)], whole)
    policy.start_snapshot(slot, 2).wait()
    assert {kind: [id(block) for block in blocks] for kind, blocks in slot.blocks.items()} == before


def test_what_does_not_fit_is_refused(model):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    policy.start_snapshot(slot, 3).wait()
    slot.serial = None
    with pytest.raises(WorkerError, match=r"^snapshot None: .* it is torn, or of another layout; --resume goes on"):
        policy.restore(slot)
    slot.serial, layout = 3, slot.layout
    slot.layout = {**layout, "weights": layout["weights"][:-1]}
    lacking, whole = sum(layout["weights"][:-1]), sum(layout["weights"])
    with pytest.raises(WorkerError, match=rf"'weights': {lacking}.* but this rank has .*'weights': {whole}"):
        policy.restore(slot)


def test_a_snapshot_that_fails_is_told_to_whoever_waits(model, monkeypatch):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()

    def fails(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(snapshot, "extended", fails)
    pending = policy.start_snapshot(slot, 1)
    with pytest.raises(WorkerError, match=r"^the snapshot of a rank failed: MemoryError: no room; fix: lower trainer"):
        pending.wait()
    assert slot.serial is None
    with pytest.raises(WorkerError):
        policy.start_snapshot(slot, 2)
    policy.end_background_work()  # says nothing, but waits


def test_before_an_update_the_snapshot_is_whole(model, monkeypatch):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    copy, seen = snapshot.PendingSnapshot._copy, []
    monkeypatch.setattr(snapshot.PendingSnapshot, "wait", lambda self: seen.append(self._serial))
    policy.start_snapshot(slot, 5)
    for calls in (lambda: step(policy, 0, 1), lambda: policy.offload(("gradients",)), lambda: policy.restore(slot)):
        seen.clear()
        while slot.serial is None:
            policy._pending_snapshot._thread.join()
        calls()
        assert seen == [5]
    assert copy is snapshot.PendingSnapshot._copy


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


def test_the_generators_of_the_gpu_and_of_the_host_go_back_apart(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "of the GPU")
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    states, number = snapshot._random_states(), torch.rand(1)
    snapshot._set_random_states(states)
    assert given == ["of the GPU"] and torch.equal(torch.rand(1), number)
