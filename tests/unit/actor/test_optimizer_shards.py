"""An optimizer's state in shards: runs of a flattened array as boxes of it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.actor.optimizer_shards import flat_boxes

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
