"""More of DARO's weights: measures and averages; and where each comes to rest."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_daro.algo.algorithm import StepStats, StepTotals
from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError

K = 8
COUNTS = torch.tensor([30, 400, 300, 0, 200, 90, 250, 100, 60])
MEASURES = torch.tensor([9.0, 0.9, 0.5, 9.0, 0.4, 0.45, 0.6, 1.3, 9.0], dtype=torch.float64)
"""What is measured of each bin; 0, 3 and 8 take no part."""
PRESENT = [1, 2, 4, 5, 6, 7]


def sums_of(magnitude):
    """Constant sums of a step under which every present bin k measures MEASURES[k]."""
    signs = torch.tensor([(-1.0) ** k for k in range(K + 1)], dtype=torch.float64)
    wanted = MEASURES * COUNTS
    sums = {"loss_sums": (signs if magnitude == "abs" else 1.0) * wanted, "token_counts": COUNTS}
    if magnitude == "token":
        sums |= {"loss_sums": torch.zeros(K + 1), "abs_loss_sums": wanted}
    if magnitude == "advantage":
        sums |= {"loss_sums": torch.zeros(K + 1), "advantage_sums": wanted}
    return sums


def iterated(weights, sums, steps=6000):
    for _ in range(steps):
        weights.update(**sums)
    return weights.weights


@pytest.mark.parametrize("magnitude", ["abs", "signed", "token", "advantage"])
@pytest.mark.parametrize("half_life", [None, 20.0])
def test_every_measure_comes_to_rest_at_its_inverse(magnitude, half_life):
    weights = DifficultyWeights(K, magnitude=magnitude, half_life=half_life, learning_rate=0.003)
    got, want = iterated(weights, sums_of(magnitude)), 1 / MEASURES
    torch.testing.assert_close(got[PRESENT], want[PRESENT], rtol=2e-3 if half_life is None else 1e-9, atol=0)
    assert got[[0, 3, K]].tolist() == [1.0, 1.0, 1.0]
    settled = DifficultyWeights(K, magnitude=magnitude, half_life=half_life)
    settled.settle(**sums_of(magnitude))
    torch.testing.assert_close(settled.weights[PRESENT], want[PRESENT], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("normalizer", "parts"), [("bin", "equal"), ("batch", "equal"), ("shared", "of the tokens")])
def test_at_rest_a_bins_part_of_the_loss_is_equal_or_its_share_of_the_tokens(normalizer, parts):
    weights = DifficultyWeights(K, normalizer=normalizer, clamp=(1e-3, 1e3))
    sums = sums_of("abs")
    weights.settle(**sums)
    found = (weights.coefficients(COUNTS) * sums["loss_sums"].abs())[PRESENT]
    shares = COUNTS[PRESENT] / COUNTS[PRESENT].sum()
    torch.testing.assert_close(found, torch.ones_like(found) if parts == "equal" else shares.double())


def test_after_one_half_life_an_average_has_come_half_way():
    weights = DifficultyWeights(K, half_life=5.0)
    iterated(weights, sums_of("abs"), steps=5)
    torch.testing.assert_close(1 / weights.weights[PRESENT], (1 + MEASURES[PRESENT]) / 2, rtol=1e-12, atol=0)


def daro(**options):
    return make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=64, **options)


BINS_N = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3, 0, 4])
LENGTHS_N = torch.tensor([2, 10, 9, 4, 30, 3, 10, 0, 5, 50])


@pytest.mark.parametrize("options", [{"half_life": 7.0}, {"magnitude": "advantage"}], ids=str)
def test_states_continue_over_json_bit_for_bit_and_other_forms_are_refused(options):
    whole, first = daro(**options), daro(**options)
    totals = StepTotals.of(BINS_N, LENGTHS_N, 4)

    def learn(algorithm, step):
        names = ("loss_sums", "abs_loss_sums", "advantage_sums")
        sums = {name: (step + 1.5 + i) * totals.tokens_per_cell.double() for i, name in enumerate(names)}
        algorithm.learn(StepStats(totals, sums, 0.0))

    for step in range(3):
        learn(whole, step)
        learn(first, step)
    second = daro(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(3, 6):
        learn(whole, step)
        learn(second, step)
    assert second.state_dict() == whole.state_dict() != first.state_dict()
    if "half_life" in options:
        with pytest.raises(CheckpointError, match="averages"):
            daro().load_state_dict(whole.state_dict())
        with pytest.raises(CheckpointError, match="averages"):
            daro(**options).load_state_dict(daro().state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"half_life": 0.0}, "half_life: got 0.0"),
        ({"half_life": math.inf}, "half_life"),
        ({"parameter": "linear", "half_life": 2.0}, "parameter: got 'linear' with half_life"),
        ({"magnitude": "norm"}, "magnitude: got 'norm'"),
    ],
)
def test_forms_without_a_meaning_are_refused(options, said):
    with pytest.raises(AlgorithmError, match=said):
        daro(**options)


@pytest.mark.parametrize(("magnitude", "missing"), [("advantage", "advantage_sums"), ("token", "abs_loss_sums")])
def test_a_measure_without_its_sums_is_refused(magnitude, missing):
    with pytest.raises(AlgorithmError, match=missing):
        DifficultyWeights(K, magnitude=magnitude).update(torch.ones(K + 1), COUNTS)


def test_masses_per_sample_are_those_of_the_trained_tokens():
    generator = torch.Generator().manual_seed(3)
    sample_T, mask_T = torch.arange(30) // 10, torch.rand(30, generator=generator) < 0.8
    advantages_M = torch.tensor([1.2, -0.7, 0.3], dtype=torch.float64)
    result = token_objective(
        torch.randn(30, generator=generator, dtype=torch.float64) - 2,
        None,
        old_logprobs_T=None,
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=advantages_M[sample_T],
        mask_T=mask_T,
        sample_T=sample_T,
        num_samples=3,
        settings=ObjectiveSettings(),
    )
    trained = torch.stack([mask_T[sample_T == m].sum() for m in range(3)])
    torch.testing.assert_close(result.sample_sums_M["advantage_sums"], advantages_M.abs() * trained, rtol=1e-12, atol=0)
