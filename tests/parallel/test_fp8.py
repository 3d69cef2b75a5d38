"""fp8 without a GPU: what a recipe's cast keeps of a matrix, and what that does to losses, bins and DARO's weights."""

from __future__ import annotations

import policy_tasks
import pytest
import torch
from fp8_reference import BLOCKS, E4M3, E5M2, cast
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_batch, save_model
from test_gradients_exact import layouts

RECIPES = list(BLOCKS)
# Bits of the mantissa, and the smallest step near zero.
MANTISSA = {E4M3: 3, E5M2: 2}
# Of ten steps, as parts of the largest value of bf16; measured: 0.009, 0.034, 0.0006.
BOUNDS = {"loss/policy": 0.03, "difficulty/loss/": 0.1, "difficulty/weight/": 0.002}


def matrix(rows, columns, seed, spread=4.0):
    """Values over many powers of ten, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, columns, generator=generator) * spread
    return torch.randn(rows, columns, generator=generator) * torch.exp2(size)


@settings(max_examples=60, deadline=None)
@given(
    recipe=st.sampled_from(RECIPES),
    rows=st.integers(1, 140),
    columns=st.integers(1, 300),
    seed=st.integers(0, 999),
    weight=st.booleans(),
    dtype=st.sampled_from([E4M3, E5M2]),
)
def test_the_error_is_half_a_step_of_the_type(recipe, rows, columns, seed, weight, dtype):
    value = matrix(rows, columns, seed)
    error = (cast(value, recipe, weight=weight, dtype=dtype) - value).abs()
    rounding = value.abs() * 2.0 ** -(MANTISSA[dtype] + 1)
    # Below the type's normal numbers the step is constant; a scale that is a power of two wastes less than one bit.
    finest = 2 * value.abs().max() / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
    assert (error <= torch.maximum(rounding, finest * 2.0 ** -(MANTISSA[dtype] + 1)) * (1 + 1e-5)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weight", [False, True])
def test_zeros_stay_zero_and_padding_changes_nothing(recipe, weight):
    assert torch.equal(cast(torch.zeros(40, 200), recipe, weight=weight), torch.zeros(40, 200))
    value = matrix(40, 200, 1)
    padded = torch.zeros(128, 256)
    padded[:40, :200] = value
    assert torch.equal(cast(padded, recipe, weight=weight)[:40, :200], cast(value, recipe, weight=weight))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe):
    """An infinity becomes the largest number or stays, and a NaN stays a NaN: never a harmless small value."""
    value = matrix(4, 64, 2)
    value[1, 3], value[2, 5] = torch.inf, torch.nan
    kept = cast(value, recipe)
    assert kept[1, 3] >= torch.finfo(E4M3).max and kept[2, 5].isnan()


def test_a_large_value_costs_its_own_block_only():
    value = matrix(4, 256, 3, spread=0.0)
    with_peak = value.clone()
    with_peak[0, 0] = 1e9
    for recipe, block in (("blockwise", 128), ("mxfp8", 32)):
        plain, beside = cast(value, recipe), cast(with_peak, recipe)
        assert torch.equal(plain[0, block:], beside[0, block:]) and torch.equal(plain[1:], beside[1:])
        assert (beside[0, 1:block] == 0).all(), "the block itself has lost its other values"
    assert (cast(with_peak, "tensorwise")[1:] == 0).all(), "one scale for all: everything else is gone"


def test_losses_bins_and_weights_stay_near_those_of_bf16(rank_pool, tmp_path):
    """Ten steps on one batch: the policy loss, each bin's mean loss, and each weight."""
    save_model("qwen2", tmp_path)
    options = {"path": tmp_path, "batch": random_batch(), "recipes": RECIPES, "num_steps": 10}
    (found,) = rank_pool.run(policy_tasks.steps_in_simulated_fp8, layouts()["single"], **options)
    plain = found.pop("bf16")
    for recipe, steps in found.items():
        assert steps != plain, "nothing was quantised"
        for name, bound in BOUNDS.items():
            pairs = [(a[key], b[key]) for a, b in zip(plain, steps, strict=True) for key in a if key.startswith(name)]
            worst = max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)
            assert worst <= bound, f"{recipe}, {name}: {worst:.3g} of its largest value, allowed {bound}"
