"""The safetensors back end of checkpoints: boxes that overlap, any sharding into any other, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.actor import sharded_state as fmt
from megatron_daro.convert import daro_format
from megatron_daro.errors import CheckpointError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.core import CheckpointingException

GLOBAL = (6, 8)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    """`save` is collective: a gloo world of this process alone, without a port."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard_of(whole, offset, shape, key="w", replica_id=0):
    """A ShardedTensor of a box of the whole tensor, built by hand."""
    box = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    return fmt.ShardedTensor(
        key, whole[box].clone(), whole.dtype, tuple(shape), tuple(whole.shape), tuple(offset), None, replica_id
    )


def cuts_to_boxes(cuts, shape):
    """The boxes between the cuts of each axis: a complete sharding."""
    edges = [sorted({0, size, *(c % size for c in axis)}) for axis, size in zip(cuts, shape, strict=True)]
    spans = [list(itertools.pairwise(e)) for e in edges]
    return [((a, b), (c - a, d - b)) for a, c in spans[0] for b, d in spans[1]]


def save(directory, items):
    fmt.collect_shards({str(i): item for i, item in enumerate(items)}, directory).write()


def load(directory, items):
    state = fmt.read_shards({str(i): item for i, item in enumerate(items)}, directory)
    return [state[str(i)] for i in range(len(items))]


interval = st.tuples(st.integers(0, 9), st.integers(0, 6))
box = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(interval, min_size=n, max_size=n)] * 2))


@settings(max_examples=300)
@given(box)
def test_overlap_is_numpys(boxes):
    """Numbered cells of a large array: both pairs of slices must pick exactly the cells that the boxes share."""
    want, have = boxes
    whole = np.arange(16 ** len(want)).reshape((16,) * len(want))
    wanted = whole[tuple(slice(o, o + s) for o, s in want)]
    held = whole[tuple(slice(o, o + s) for o, s in have)]
    shared = np.intersect1d(wanted, held)
    got = fmt.common_box(*zip(*want, strict=True), *zip(*have, strict=True))
    if got is None:
        assert shared.size == 0
        return
    theirs, ours = got
    np.testing.assert_array_equal(held[theirs], wanted[ours])
    np.testing.assert_array_equal(np.sort(wanted[ours].ravel()), shared)
    assert shared.size > 0


cut = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=30, deadline=None)
@given(saved=st.tuples(cut, cut), loaded=st.tuples(cut, cut), dtype=st.sampled_from(["float32", "bfloat16", "int64"]))
def test_any_sharding_loads_into_any_other(tmp_path_factory, saved, loaded, dtype):
    directory = tmp_path_factory.mktemp("shards")
    whole = torch.arange(48).reshape(GLOBAL).to(getattr(torch, dtype))
    save(directory, [shard_of(whole, *b) for b in cuts_to_boxes(saved, GLOBAL)])
    wanted = [shard_of(whole, *b) for b in cuts_to_boxes(loaded, GLOBAL)]
    expected = [item.data.clone() for item in wanted]
    for item in wanted:
        item.data = torch.zeros_like(item.data)
    for got, want in zip(load(directory, wanted), expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_a_prepended_axis(tmp_path):
    """Megatron stacks layers this way: a [4] tensor is row 1 of a global [3, 4]."""
    rows = torch.arange(12.0).reshape(3, 4)
    items = [
        fmt.ShardedTensor.from_rank_offsets("layers", rows[i].clone(), (0, i, 3), prepend_axis_num=1) for i in range(3)
    ]
    save(tmp_path, items)
    (got,) = load(
        tmp_path, [fmt.ShardedTensor.from_rank_offsets("layers", torch.zeros(4), (0, 1, 3), prepend_axis_num=1)]
    )
    assert torch.equal(got, rows[1])


def test_only_main_replicas_are_written(tmp_path):
    whole = torch.arange(48.0).reshape(GLOBAL)
    save(tmp_path, [shard_of(whole, (0, 0), GLOBAL), shard_of(whole * 0, (0, 0), GLOBAL, replica_id=1)])
    assert len(json.loads((tmp_path / daro_format.INDEX_FILE).read_text())["shards"]) == 1
    (got,) = load(tmp_path, [shard_of(whole * 0, (0, 0), GLOBAL)])
    assert torch.equal(got, whole)


def extra_state(value):
    return fmt.ShardedObject("extra", value, (1,), (0,))


@pytest.mark.parametrize("state_B", [torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)])
def test_extra_state_comes_back_as_the_tensor_it_was(tmp_path, state_B):
    """Transformer Engine takes back a uint8 tensor, empty where it was empty, and refuses anything else as a pickle."""
    save(tmp_path, [extra_state(state_B)])
    (got,) = load(tmp_path, [extra_state(torch.empty(0, dtype=torch.uint8))])
    assert got.dtype is torch.uint8
    assert torch.equal(got, state_B)


@pytest.mark.parametrize("content", [b"state \x00\xff", b""])
def test_bytes_come_back_as_bytes(tmp_path, content):
    save(tmp_path, [extra_state(io.BytesIO(content))])
    (got,) = load(tmp_path, [extra_state(None)])
    assert got.getvalue() == content


@pytest.mark.parametrize(("value", "what"), [({"a": 1}, "dict"), (torch.zeros(2), "torch.float32")])
def test_an_object_of_another_type_is_refused(tmp_path, value, what):
    with pytest.raises(CheckpointError, match=rf"extra: .*{what}"):
        save(tmp_path, [extra_state(value)])


def test_a_missing_key_is_named(tmp_path):
    whole = torch.zeros(GLOBAL)
    save(tmp_path, [shard_of(whole, (0, 0), GLOBAL)])
    with pytest.raises(CheckpointError, match="other"):
        load(tmp_path, [shard_of(whole, (0, 0), GLOBAL, key="other")])


def test_a_hole_is_refused(tmp_path):
    whole = torch.ones(GLOBAL)
    save(tmp_path, [shard_of(whole, (0, 0), (6, 3)), shard_of(whole, (0, 4), (6, 4))])
    with pytest.raises(CheckpointError, match=r"w: 42 of 48"):
        load(tmp_path, [shard_of(whole, (0, 0), GLOBAL)])
    (got,) = load(tmp_path, [shard_of(whole, (0, 4), (6, 4))])
    assert torch.equal(got, torch.ones(6, 4)), "what does not touch the hole can still be read"


def test_pieces_that_overlap_do_not_hide_a_hole(tmp_path):
    """The left half twice and no right half: as many elements as asked for, but not those."""
    whole = torch.ones(GLOBAL)
    save(tmp_path, [shard_of(whole, (0, 0), (6, 4)), shard_of(whole, (0, 0), (6, 4))])
    with pytest.raises(CheckpointError, match=r"w: .*\(0, 0\) and \(0, 0\)"):
        load(tmp_path, [shard_of(whole, (0, 0), GLOBAL)])


def test_another_global_shape_is_refused(tmp_path):
    save(tmp_path, [shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)])
    with pytest.raises(CheckpointError, match=r"w: .*\(6, 8\).*\(6, 9\)"):
        load(tmp_path, [shard_of(torch.zeros(6, 9), (0, 0), (6, 8))])


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "shards": [["w", "f"]]}'])
def test_a_torn_index_is_named(tmp_path, text):
    save(tmp_path, [shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)])
    (tmp_path / daro_format.INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(tmp_path, [shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)])


@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_a_torn_file_is_named(tmp_path, damage):
    save(tmp_path, [shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)])
    file = tmp_path / "shard_00000.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 50 if damage == "short" else 0])
    with pytest.raises(CheckpointError, match=r"shard_00000\.safetensors"):
        load(tmp_path, [shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)])


def test_a_file_outside_the_checkpoint_is_not_opened(tmp_path):
    """An edited index must not make the reader open other files of the machine."""
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    whole = torch.ones(GLOBAL)
    save(inside, [shard_of(whole, (0, 0), GLOBAL)])
    (inside / "shard_00000.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = json.loads((inside / daro_format.INDEX_FILE).read_text())
    index["shards"][0][1] = "../elsewhere.safetensors"
    (inside / daro_format.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"elsewhere"):
        load(inside, [shard_of(whole, (0, 0), GLOBAL)])


def test_what_is_not_sharded_comes_back_beside_what_is(tmp_path):
    whole = torch.arange(48.0).reshape(GLOBAL)
    state = {"model": {"w": shard_of(whole, (0, 0), GLOBAL)}, "schedule": {"num_steps": 3, "lr": 0.5}}
    fmt.save_sharded(state, tmp_path).write()
    wanted = {"model": {"w": shard_of(whole * 0, (0, 0), GLOBAL)}, "schedule": {"num_steps": 0}}
    got = fmt.load_sharded(wanted, tmp_path)
    assert torch.equal(got["model"]["w"], whole)
    assert got["schedule"] == {"num_steps": 3, "lr": 0.5}


def test_a_box_with_two_main_replicas_is_not_saved(tmp_path):
    twice = {name: fmt.ShardedTensor.from_rank_offsets("w", torch.zeros(GLOBAL)) for name in "ab"}
    with pytest.raises(CheckpointingException, match="Invalid access pattern"):
        fmt.save_sharded(twice, tmp_path).write()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', "'torch_dist'"),
        ('{"sharded_backend": "daro_safetensors", "sharded_backend_version": 2}', "got 2"),
        ("", "metadata.json"),
    ],
)
def test_other_back_ends_and_versions_are_refused(tmp_path, metadata, message):
    fmt.save_sharded({"w": shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)}, tmp_path).write()
    (tmp_path / daro_format.METADATA_FILE).write_text(metadata)
    with pytest.raises(CheckpointError, match=message):
        fmt.load_sharded({}, tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "code"])
def test_a_torn_or_hostile_common_file_is_named(tmp_path, damage):
    fmt.save_sharded({"w": shard_of(torch.zeros(GLOBAL), (0, 0), GLOBAL)}, tmp_path).write()
    file = tmp_path / daro_format.COMMON_FILE
    if damage == "missing":
        file.unlink()
    elif damage == "code":
        torch.save({"run": TouchesAFile(tmp_path / "touched")}, file)
    else:
        file.write_bytes(file.read_bytes()[: 50 if damage == "short" else 0])
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        fmt.load_sharded({}, tmp_path)
    assert not (tmp_path / "touched").exists()


class TouchesAFile:
    """Its pickle runs code when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
