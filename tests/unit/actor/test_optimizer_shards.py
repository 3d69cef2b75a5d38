"""An optimizer's state in shards: runs of a flattened array as boxes of it, who saves what, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.actor import shards
from megatron_daro.actor.shards import flat_boxes
from megatron_daro.errors import CheckpointError

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=200)
@given(shapes, st.data())
def test_boxes_of_a_run_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    found = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].ravel() for box in boxes]
    assert np.concatenate([np.array([], int), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_box_of_a_stacked_tensor_is_one_of_the_whole():
    tensor = SimpleNamespace(prepend_axis_num=1, global_offset=(5, 10, 20), global_shape=(8, 40, 50))
    assert shards._global(tensor, (1, 2), (3, 4)) == ((5, 11, 22), (1, 3, 4), (8, 40, 50))


@pytest.mark.parametrize(("replica", "main"), [((0, 0, 3), True), ((0, 1, 0), False), ((1, 0, 0), False)])
def test_data_parallel_ranks_have_runs_of_their_own(replica, main):
    assert shards._is_main(SimpleNamespace(replica_id=replica)) is main


def test_a_part_that_is_no_run_of_a_parameter_is_named():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    fine = ShardedTensor.from_rank_offsets("a", torch.zeros(3, 4))
    assert [at for at, _ in shards._places({"a": fine})[fine.data]] == [0]
    across = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4).t())
    with pytest.raises(
        CheckpointError, match=r"^w: a part of it is no run of its elements; its optimizer state is not"
    ):
        shards._places({"w": across})


def test_optimizers_that_are_chained_are_saved_by_number():
    called = []
    parts = [SimpleNamespace(state_dict=lambda n=n: {"optimizer": n}) for n in range(2)]
    chained = SimpleNamespace(chained_optimizers=parts, _synchronize_steps=lambda: called.append(1))
    kind = {"param_state_sharding_type": "fully_reshardable"}
    assert shards.common_state(chained) == {0: {"optimizer": 0, **kind}, 1: {"optimizer": 1, **kind}} and called == [1]
    assert shards.common_state(parts[1]) == {"optimizer": 1, **kind}
