"""Overlong answers: the penalty at its corners, and the filter that leaves verdicts alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.algo.advantages import overlong_filter, overlong_penalty
from megatron_daro.errors import AlgorithmError


def test_penalty_of_the_dapo_recipe_by_hand():
    lengths_N = torch.tensor([0, 16384, 17408, 18432, 20480, 20481, 10**6])
    assert overlong_penalty(lengths_N).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=20), longest=st.integers(1, 100), share=st.floats(0, 1)
)
@settings(deadline=None)
def test_penalty_equals_the_three_cases(lengths, longest, share):
    cache = max(1, round(longest * share))
    got = overlong_penalty(np.array(lengths), longest, cache)
    for n, penalty in zip(lengths, got, strict=True):
        expected = 0.0 if n <= longest - cache else ((longest - cache) - n) / cache if n <= longest else -1.0
        assert penalty == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cache", [0, 101])
def test_penalty_refuses_a_cache_without_a_meaning(cache):
    with pytest.raises(AlgorithmError, match="cache_tokens"):
        overlong_penalty(torch.tensor([5]), 100, cache)


def test_filter_zeroes_exactly_the_truncated_rollouts():
    mask_R = np.array([1, 0, 1, 1, 1, 1], dtype=np.uint8)
    got = overlong_filter(mask_R, np.array([3, 0, 1, 2]), np.array([0, 1, 1, 0], dtype=np.uint8))
    assert got.tolist() == [1, 0, 1, 0, 1, 1]
    assert got.dtype == np.uint8
    assert mask_R.tolist() == [1, 0, 1, 1, 1, 1]
    kept = overlong_filter(torch.ones(2), torch.tensor([1, 1]), torch.tensor([False, True]))
    assert torch.equal(kept, torch.tensor([1.0, 0.0]))


def test_narrow_whole_numbers_do_not_overflow():
    """Lengths and flags come in whatever dtype a recorded batch has."""
    assert overlong_penalty(np.array([250, 100], dtype=np.uint8), 300, 100).tolist() == [-0.5, 0.0]
    lengths, truncated = np.array([2, 1], dtype=np.uint8), np.array([1, 0], dtype=np.uint8)
    assert overlong_filter(np.ones(3), lengths, truncated).tolist() == [0, 0, 1]


def test_numpy_stays_numpy_and_torch_stays_torch():
    assert isinstance(overlong_penalty(np.array([1])), np.ndarray)
    assert isinstance(overlong_penalty(torch.tensor([1])), torch.Tensor)
    assert overlong_penalty(np.array([1])).dtype == np.float32


def test_filter_refuses_columns_of_different_samples():
    with pytest.raises(AlgorithmError, match="loss_mask_R: got 3"):
        overlong_filter(np.ones(3), np.array([1, 1]), np.array([0, 0]))
    with pytest.raises(AlgorithmError, match=r"2 .*1"):
        overlong_filter(np.ones(2), np.array([1, 1]), np.array([0]))
