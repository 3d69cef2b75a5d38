"""CISPO and SAPO by hand, and what they may not be combined with."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_daro.algo.objective import ObjectiveSettings, cispo_loss, sapo_loss, token_objective
from megatron_daro.errors import AlgorithmError


def value_and_slope(loss, ratio, advantage, **options):
    """(loss, derivative by log pi) of one token at a given ratio."""
    logprob = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    result = loss(logprob.exp(), torch.tensor(advantage, dtype=torch.float64), **options)
    result.backward()
    return result.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (1.5, 2.0, 1.28), (1.5, -2.0, 1.28), (0.5, 2.0, 0.5), (0.01, -2.0, 0.01), (3.0, 0.0, 1.28)],
)
def test_cispo_bounds_the_weight_and_drops_no_token(ratio, advantage, weight):
    got = value_and_slope(cispo_loss, ratio, advantage)
    assert got == pytest.approx((-weight * advantage, -weight * advantage), abs=1e-12)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05), (-2.0, 3.0), (0.5, 0.2)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 1.7])
def test_sapo_by_hand(ratio, advantage, tau):
    sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
    value = -advantage * (1 + 4 / tau * (sigmoid - 0.5))
    slope = -advantage * 4 * sigmoid * (1 - sigmoid) * ratio  # eq. 5: the gate, times d ratio / d log pi = ratio
    options = {"positive": tau, "negative": 9.0} if advantage > 0 else {"positive": 9.0, "negative": tau}
    assert value_and_slope(sapo_loss, ratio, advantage, **options) == pytest.approx((value, slope), rel=1e-12)


@pytest.mark.parametrize("loss", [cispo_loss, sapo_loss])
def test_at_ratio_one_both_are_plain_policy_gradients(loss):
    assert value_and_slope(loss, 1.0, -1.5) == pytest.approx((1.5, 1.5), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trust_region": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"trust_region": "sapo", "dual_clip": 3.0}, "dual_clip"),
        ({"trust_region": "gspo", "correction": "mis"}, "correction_level: got 'token'"),
        ({"trust_region": "ppo"}, "trust_region: got 'ppo'"),
        ({"sapo_positive": 0.0}, "sapo_positive"),
        ({"sapo_negative": math.inf}, "sapo_negative"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, said):
    with pytest.raises(AlgorithmError, match=said):
        ObjectiveSettings(**options)


@pytest.mark.parametrize("shift", [25.0, -25.0])
@pytest.mark.parametrize("trust_region", ["reinforce", "cispo", "mirror"])
def test_no_ratio_takes_the_gradient_away(trust_region, shift):
    logprobs_T = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    objective = token_objective(
        logprobs_T,
        None,
        old_logprobs_T=logprobs_T.detach() - shift,
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=torch.tensor([1.5], dtype=torch.float64),
        mask_T=torch.ones(1, dtype=torch.bool),
        sample_T=torch.zeros(1, dtype=torch.int64),
        num_samples=1,
        settings=ObjectiveSettings(trust_region=trust_region),
    )
    objective.sample_losses_M.sum().backward()
    weight = 1.28 if shift > 0 else math.exp(-20)  # CISPO's, of a ratio that is limited to exp(-20)
    want = {"reinforce": 1.5, "cispo": 1.5 * weight, "mirror": 1.5 - 0.1 * shift}
    assert logprobs_T.grad.item() == pytest.approx(-want[trust_region], rel=1e-12)
