"""The token loss: hand-computed cases, gradients, homogeneity, masks, extreme ratios."""

from __future__ import annotations

import math

import algo_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.algo.surrogate import clip_fractions, clipped_token_loss, importance_ratio
from megatron_daro.errors import AlgorithmError

ZERO = torch.zeros((), dtype=torch.float64)


def _loss(ratio: float, advantage: float, **options) -> tuple[float, float]:
    """(loss, gradient by logprob) of one token at a given ratio."""
    logprob = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    loss = clipped_token_loss(logprob, ZERO, torch.tensor(advantage, dtype=torch.float64), **options)
    loss.backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # above 1.28 with A > 0: clipped
        (0.5, 2.0, -1.0, -1.0),  # below 0.8 with A > 0: the minimum takes the unclipped term
        (1.0, -2.0, 2.0, 2.0),
        (1.5, -2.0, 3.0, 3.0),  # above with A < 0: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below with A < 0: clipped at 0.8
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_every_case_by_hand(ratio, advantage, loss, gradient):
    got_loss, got_gradient = _loss(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_gradient == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(5.0, -2.0, 6.0, 0.0), (2.9, -2.0, 5.8, 5.8), (5.0, 2.0, -2.56, 0.0), (0.5, -2.0, 1.6, 0.0)],
)
def test_dual_clip_bounds_only_negative_advantages(ratio, advantage, loss, gradient):
    got = _loss(ratio, advantage, dual_clip=3.0)
    assert got == pytest.approx((loss, gradient), abs=1e-12)


@given(
    difference=st.floats(-2, 2),
    advantage=st.floats(-3, 3),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
)
@settings(deadline=None)
def test_equals_slow_reference(difference, advantage, low, high):
    logprob = torch.tensor(difference, dtype=torch.float64, requires_grad=True)
    loss = clipped_token_loss(logprob, ZERO, torch.tensor(advantage, dtype=torch.float64), low, high)
    expected, slope = reference.token_loss(difference, 0.0, advantage, low, high)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    at_the_kink = min(abs(math.exp(difference) - 1 - high), abs(math.exp(difference) - 1 + low)) < 1e-9
    if not at_the_kink:
        loss.backward()
        assert logprob.grad.item() == pytest.approx(slope, rel=1e-12, abs=1e-12)


@given(seed=st.integers(0, 10**6), factor=st.floats(0.01, 50), dual=st.sampled_from([None, 3.0]))
@settings(deadline=None)
def test_homogeneous_of_degree_one_in_the_advantage(seed, factor, dual):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = (torch.randn(20, generator=generator).double() for _ in range(3))
    scaled = clipped_token_loss(logprobs, old, advantages * factor, dual_clip=dual)
    plain = clipped_token_loss(logprobs, old, advantages, dual_clip=dual)
    torch.testing.assert_close(scaled, plain * factor, rtol=1e-12, atol=1e-12)


def test_any_common_shape():
    logprobs, old = torch.randn(2, 3), torch.randn(2, 3)
    rows = clipped_token_loss(logprobs, old, torch.tensor([[1.0], [-1.0]]))
    flat = clipped_token_loss(logprobs.flatten(), old.flatten(), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]))
    assert torch.equal(rows.flatten(), flat)


def test_no_gradient_into_old_logprobs_or_advantages():
    logprobs, old, advantages = (torch.randn(4, requires_grad=True) for _ in range(3))
    clipped_token_loss(logprobs, old, advantages).sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


def test_masked_nan_reaches_neither_loss_nor_gradient():
    nan = float("nan")
    logprobs = torch.tensor([-1.0, nan, -2.0], requires_grad=True)
    loss = clipped_token_loss(
        logprobs, torch.tensor([-1.0, 0.0, nan]), torch.tensor([2.0, nan, 1.0]), mask=torch.tensor([1, 0, 0])
    )
    loss.sum().backward()
    assert torch.equal(loss.detach(), torch.tensor([-2.0, 0.0, 0.0]))
    assert torch.equal(logprobs.grad, torch.tensor([-2.0, 0.0, 0.0]))


@pytest.mark.parametrize("difference", [-1e4, 1e4, float("inf")])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_stay_finite(difference, advantage):
    logprob = torch.tensor(difference, requires_grad=True)
    loss = clipped_token_loss(logprob, torch.tensor(0.0), torch.tensor(advantage))
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(logprob.grad.item())


@pytest.mark.parametrize(("difference", "moves"), [(19.9, True), (20.1, False), (1e4, False)])
def test_a_ratio_beyond_the_limit_has_no_gradient_even_where_the_advantage_is_negative(difference, moves):
    logprob = torch.tensor(difference, dtype=torch.float64, requires_grad=True)
    loss = clipped_token_loss(logprob, ZERO, torch.tensor(-1.0, dtype=torch.float64))
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(min(difference, 20)))
    assert logprob.grad.item() == pytest.approx(math.exp(difference) if moves else 0.0)


def test_clip_fractions_mark_where_the_gradient_is_gone():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 4.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    marks = clip_fractions(ratio, advantages, dual_clip=3.0)
    assert marks["clip_high"].tolist() == [True, False, False, False, False, False]
    assert marks["clip_low"].tolist() == [False, False, False, True, False, False]
    assert marks["dual_clip"].tolist() == [False, False, False, False, True, False]
    logprobs = ratio.log().requires_grad_()
    clipped_token_loss(logprobs, torch.zeros(6), advantages, dual_clip=3.0).sum().backward()
    assert torch.equal(logprobs.grad == 0, marks["clip_high"] | marks["clip_low"] | marks["dual_clip"])


def test_ratio_of_equal_logprobs_is_exactly_one():
    logprobs = torch.randn(100)
    assert torch.equal(importance_ratio(logprobs, logprobs), torch.ones(100))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"clip_low": 1.5}, "clip_low"), ({"clip_high": -0.1}, "clip_high"), ({"dual_clip": 1.0}, "dual_clip")],
)
def test_refuses_clip_ranges_without_a_meaning(options, field):
    with pytest.raises(AlgorithmError, match=field):
        clipped_token_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), **options)
