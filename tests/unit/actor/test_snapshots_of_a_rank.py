"""Snapshots of one rank: going back bit for bit, files that a checkpoint of the same moment equals, and refusals."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from equal_checkpoints import assert_same_tensors
from policy_tasks import everything, uneven_split
from single_rank import policy_of, with_passes
from small_models import random_batch

from megatron_daro.actor import checkpoint, host_memory, shards, snapshot, snapshot_files
from megatron_daro.actor.double_buffer import DoubleBuffer, Slot, num_bytes
from megatron_daro.actor.host_memory import bytes_of
from megatron_daro.convert.daro_format import DaroPieces, write_index
from megatron_daro.errors import CheckpointError, WorkerError

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


def test_files_of_a_snapshot_are_the_checkpoint(model, tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 10_000)
    policy, slot = policy_of(model, PPO, optimizer={"warmup_steps": 3}), Slot()
    step(policy, 0, 1)
    policy.start_snapshot(slot, 1, movable=True).wait()  # the catalogue is made once, the rest each time
    step(policy, 1, 2)
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    policy.train_state.begun = True
    policy.start_snapshot(slot, 2, movable=True).wait()
    end = everything(policy)
    step(policy, 2, 3)
    index = snapshot_files.write(slot, tmp_path / "moved", 0)
    assert list(index) == [".", "critic"]
    for folder, stored in index.items():
        assert {one.file for one in stored} == {"shard_00000.safetensors"}
        write_index(tmp_path / "moved" / folder, stored)
        assert_same_tensors(tmp_path / "moved" / folder, tmp_path / "saved" / folder)
    again = policy_of(model, PPO, to_be_restored=True, optimizer={"warmup_steps": 3})
    again.load_moved(tmp_path / "moved")
    assert again.train_state.begun is True
    after = everything(again)
    assert [name for name, value in end.items() if not np.array_equal(after[name], value)] == []
    assert again.train_state.algorithm.state_dict() == policy.train_state.algorithm.state_dict()


def test_another_rank_writes_its_shard_and_nothing_that_all_have(model, tmp_path):
    policy, slot = policy_of(model, {"name": "daro"}), Slot()
    policy.start_snapshot(slot, 1, movable=True).wait()
    (stored,) = snapshot_files.write(slot, tmp_path / "deep" / "moved", 12).values()
    assert [path.name for path in (tmp_path / "deep" / "moved").iterdir()] == ["shard_00012.safetensors"]
    assert [one.name for one in stored] == [str(number) for number in range(len(stored))]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: the state of rank 12 could not be written: "):
        snapshot_files.write(slot, tmp_path / "file", 12)


def test_an_optimizer_that_is_not_split_has_no_boxes_of_its_own(model):
    policy = policy_of(model, {"name": "daro"}, optimizer={"distributed": False})
    with pytest.raises(CheckpointError, match=r"not split over the data-parallel ranks: actor\.optimizer\.distributed"):
        policy.start_snapshot(Slot(), 1, movable=True)
    policy.start_snapshot(Slot(), 1).wait()


def test_a_tensor_elsewhere_is_named(model):
    box = shards.OwnBox("layer.weight", torch.zeros(2), (0,), (2,), (2,))
    with pytest.raises(CheckpointError, match=r"^layer\.weight lies on cpu, outside of what snapshots have; fix: "):
        snapshot_files.catalogue_of([box], {}, {}, {"weights": [torch.zeros(2).untyped_storage()]})


def catalogue(boxes):
    return snapshot_files.Catalogue(tuple(boxes), {}, {})


def test_a_box_is_where_the_catalogue_says_over_the_ends_of_blocks():
    """Two storages of 12 and 20 bytes in blocks of 8, 16 and 24; the box begins at the second number of the second."""
    first, second = torch.arange(3.0), torch.arange(10.0, 15.0)
    storages = {"optimizer": [], "weights": [first.untyped_storage(), second.untyped_storage()]}
    box = shards.OwnBox("w", second[1:], (4,), (4,), (9,))
    (placed,) = snapshot_files.catalogue_of([box], {}, {}, storages).boxes
    assert (placed.kind, placed.storage, placed.start, placed.dtype) == ("weights", 1, 4, torch.float32)
    assert (placed.key, placed.offset, placed.shape, placed.global_shape) == ("w", (4,), (4,), (9,))
    data = torch.cat([first, second]).view(torch.uint8)
    blocks = [data[:8], data[8:24], torch.cat([data[24:], torch.full((16,), 255, dtype=torch.uint8)])]
    slot = Slot(1, {"weights": (12, 20)}, {"weights": blocks})
    assert snapshot_files._values(slot, placed).tolist() == [11, 12, 13, 14]
    slot.blocks["weights"] = blocks[:2]
    with pytest.raises(CheckpointError, match=r"^w: 8 of 16 bytes are in the snapshot: it is torn"):
        snapshot_files._values(slot, placed)


def test_a_model_without_parts_on_a_rank_makes_no_file(tmp_path):
    model = {"catalogue": catalogue([]), "objects": {}}
    assert snapshot_files._write_model(Slot(1), model, tmp_path / "shard") == []
    assert not list(tmp_path.iterdir())


def test_objects_come_after_the_boxes_with_their_bytes(tmp_path):
    named = snapshot_files.Catalogue((), {("0", "a._extra_state"): "a/shard_0_1"}, {})
    bytes_B = torch.tensor([3, 4, 5], dtype=torch.uint8)
    model = {"catalogue": named, "objects": {("0", "a._extra_state"): bytes_B}}
    (stored,) = snapshot_files._write_model(Slot(1), model, tmp_path / "shard_00000.safetensors")
    assert (stored.key, stored.name, stored.offset, stored.shape, stored.global_shape) == (
        *("a/shard_0_1", "0", (0,)),
        *((3,), (3,)),
    )
    write_index(tmp_path, [stored])
    assert DaroPieces(tmp_path).read("a/shard_0_1", [0], [3]).tolist() == [3, 4, 5]


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


def test_fields_are_set_by_name_and_copied():
    model, value = SimpleNamespace(begun=False), {"a": [1]}
    snapshot.put_fields(model, {"begun": True, "value": value})
    value["a"].append(2)
    assert model.begun is True and model.value == {"a": [1]}


def test_small_parts_are_copies(model):
    policy = policy_of(model, {"name": "daro"})
    step(policy, 0, 1)
    _, objects, _ = checkpoint.parts_of_save(policy.train_state)
    parts = checkpoint.small_parts(policy.train_state, objects)
    assert parts["common"]["scheduler"]["num_steps"] == 1
    before = str(parts["common"])
    step(policy, 1, 2)
    assert str(parts["common"]) == before and parts["objects"].keys() == objects.keys()


def test_the_generators_of_the_gpu_and_of_the_host_go_back_apart(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "of the GPU")
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    states, number = snapshot._random_states(), torch.rand(1)
    snapshot._set_random_states(states)
    assert given == ["of the GPU"] and torch.equal(torch.rand(1), number)
