"""Advantages: hand-computed cases, the slow reference, and what must not matter."""

from __future__ import annotations

import math

import algo_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.algo.advantages import group_advantages, leave_one_out_advantages
from megatron_daro.errors import AlgorithmError, DaroError

STDS = ("population", "sample", "batch", "none")


def test_one_right_of_four_by_hand():
    rewards_N, ids_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    expected = {
        "population": [math.sqrt(3), *[-1 / math.sqrt(3)] * 3],
        "sample": [1.5, -0.5, -0.5, -0.5],
        "batch": [math.sqrt(3), *[-1 / math.sqrt(3)] * 3],
        "none": [0.75, -0.25, -0.25, -0.25],
    }
    for std, values in expected.items():
        torch.testing.assert_close(group_advantages(rewards_N, ids_N, std=std, eps=0.0), torch.tensor(values))
    torch.testing.assert_close(leave_one_out_advantages(rewards_N, ids_N), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def test_eps_is_added_to_the_standard_deviation():
    rewards_N, ids_N = torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 0])
    torch.testing.assert_close(group_advantages(rewards_N, ids_N, eps=0.5), torch.tensor([0.5, -0.5]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", STDS)
def test_equal_rewards_give_exactly_zero(std, dtype):
    # In float64 the mean of ten times 0.1 is not 0.1: rounding alone would give 1e-17 / 1e-6.
    values = [0.1] * 10 + [-0.7] * 10 + [1.0]
    rewards_N, ids_N = torch.tensor(values, dtype=dtype), torch.tensor([3] * 10 + [-1] * 10 + [99])
    assert torch.equal(group_advantages(rewards_N, ids_N, std=std, eps=0.0), torch.zeros(21, dtype=dtype))
    assert torch.equal(leave_one_out_advantages(rewards_N, ids_N), torch.zeros(21, dtype=dtype))


@pytest.mark.parametrize("std", STDS)
def test_all_rewards_equal_and_empty(std):
    ids_N = torch.tensor([0, 0, 1, 1])
    assert torch.equal(group_advantages(torch.ones(4), ids_N, std=std, eps=0.0), torch.zeros(4))
    assert group_advantages(torch.empty(0), torch.empty(0, dtype=torch.long), std=std).shape == (0,)


@given(seed=st.integers(0, 10**6), k=st.integers(2, 6), num_groups=st.integers(1, 5), std=st.sampled_from(STDS))
@settings(deadline=None)
def test_equals_slow_reference(seed, k, num_groups, std):
    samples = reference.random_step(seed, num_groups=num_groups, k=k)
    rewards_N = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    ids_N = torch.tensor([s.group for s in samples])
    expected = torch.tensor(reference.advantages(samples, std), dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards_N, ids_N, std=std), expected, rtol=1e-12, atol=1e-12)
    expected = torch.tensor(reference.advantages(samples, "leave_one_out"), dtype=torch.float64)
    torch.testing.assert_close(leave_one_out_advantages(rewards_N, ids_N), expected, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 10**6), std=st.sampled_from(STDS))
@settings(deadline=None)
def test_order_and_names_of_groups_do_not_matter(seed, std):
    generator = torch.Generator().manual_seed(seed)
    rewards_N = torch.randint(0, 2, (12,), generator=generator).double()
    ids_N = torch.arange(3).repeat_interleave(4)
    order_N = torch.randperm(12, generator=generator)
    plain = group_advantages(rewards_N, ids_N, std=std)
    renamed = group_advantages(rewards_N[order_N], 1000 - 7 * ids_N[order_N], std=std)
    torch.testing.assert_close(renamed, plain[order_N], rtol=1e-12, atol=1e-14)


def test_dtype_of_the_answer():
    ids_N = torch.tensor([0, 0])
    assert group_advantages(torch.tensor([1, 0]), ids_N).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0]).double(), ids_N).dtype == torch.float64
    assert leave_one_out_advantages(torch.tensor([True, False]), ids_N).dtype == torch.float32
    assert group_advantages(torch.empty(0), torch.empty(0, dtype=torch.long)).dtype == torch.float32


def test_differences_far_below_eps_are_divided_by_eps():
    rewards_N = torch.tensor([0.0, 2e-9], dtype=torch.float64)
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64) * 1e-9 / (1e-9 + 1e-6)
    torch.testing.assert_close(group_advantages(rewards_N, torch.tensor([0, 0])), expected, rtol=1e-9, atol=0)


def test_refuses_what_has_no_meaning():
    with pytest.raises(AlgorithmError, match=r"rewards_N\[1\].*nan.*group 5"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([4, 5]))
    with pytest.raises(AlgorithmError, match="shapes"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(DaroError, match="unbiased"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), std="unbiased")
