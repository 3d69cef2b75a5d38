"""Bins, counts, predicted losses and DARO's weights."""

from __future__ import annotations

import json
import math

import algo_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.difficulty import bin_sums, pass_rate_bins, predicted_bin_loss, token_counts
from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError

K = 4
COUNTS = torch.tensor([5, 10, 20, 40, 7])


def test_bins_and_counts_by_hand():
    ids_N = torch.tensor([9, -3, 9, -3])
    bins_N = pass_rate_bins(torch.tensor([1, 0, 1, 1]), ids_N, 2)
    assert bins_N.tolist() == [2, 1, 2, 1]
    assert bins_N.dtype == torch.int64
    assert token_counts(bins_N, torch.tensor([3, 4, 5, 0]), 2).tolist() == [0, 4, 8]
    assert pass_rate_bins(torch.empty(0), torch.empty(0, dtype=torch.long), 2).shape == (0,)


@given(seed=st.integers(0, 10**6), k=st.integers(2, 6), num_groups=st.integers(1, 6))
@settings(deadline=None)
def test_bins_and_counts_equal_slow_reference(seed, k, num_groups):
    samples = reference.random_step(seed, num_groups=num_groups, k=k)
    correct_N = torch.tensor([bool(s.correct) for s in samples])
    lengths_N = torch.tensor([len(s.tokens) for s in samples])
    bins_N = pass_rate_bins(correct_N, torch.tensor([s.group for s in samples]), k)
    assert bins_N.tolist() == reference.bins(samples)
    counts = [sum(len(s.tokens) for s, b in zip(samples, bins_N.tolist(), strict=True) if b == j) for j in range(k + 1)]
    assert token_counts(bins_N, lengths_N, k).tolist() == counts


def test_incomplete_and_overfull_groups_are_named():
    with pytest.raises(AlgorithmError, match=r"group 3 has 1, group 8 has 3"):
        pass_rate_bins(torch.zeros(6), torch.tensor([8, 1, 8, 1, 8, 3]), 2)


def test_bins_refuse_rewards_and_other_k():
    with pytest.raises(AlgorithmError, match="verdict"):
        pass_rate_bins(torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 2)
    with pytest.raises(AlgorithmError, match="rollouts_per_prompt"):
        pass_rate_bins(torch.zeros(1), torch.zeros(1, dtype=torch.long), 1)
    with pytest.raises(AlgorithmError, match=r"0\.\.4"):
        token_counts(torch.tensor([0, 4]), torch.tensor([1, 1]), 2)


@given(
    right=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    wrong=st.lists(st.integers(1, 50), min_size=1, max_size=7),
)
@settings(deadline=None)
def test_predicted_loss_is_the_on_policy_loss(right, wrong):
    """L_k of real advantages and the real surrogate at ratio 1, against the closed formula."""
    correct_N = torch.tensor([1.0] * len(right) + [0.0] * len(wrong), dtype=torch.float64)
    lengths_N = torch.tensor(right + wrong)
    advantages_N = group_advantages(correct_N, torch.zeros(len(correct_N), dtype=torch.long), eps=0.0)
    zeros_T = torch.zeros(int(lengths_N.sum()), dtype=torch.float64)
    measured = clipped_token_loss(zeros_T, zeros_T, advantages_N.repeat_interleave(lengths_N)).mean()
    mu = len(right) / len(correct_N)
    predicted = predicted_bin_loss(mu, sum(right) / len(right), sum(wrong) / len(wrong))
    torch.testing.assert_close(measured, predicted, rtol=1e-10, atol=1e-12)


def test_predicted_loss_figures_of_the_design():
    assert predicted_bin_loss(0.5, 100, 150).item() == pytest.approx(0.20, abs=1e-12)
    assert predicted_bin_loss(1 / 8, 100, 150).item() == pytest.approx(0.115, abs=5e-4)
    assert predicted_bin_loss(0.3, 70, 70).item() == 0.0
    edge = predicted_bin_loss(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([math.nan, 9.0, 0.0]), torch.zeros(3))
    assert edge.tolist() == [0.0, 0.0, 0.0]


def test_coefficients_by_hand():
    counts = torch.tensor([5, 10, 0, 40, 7])
    assert DifficultyWeights(K).coefficients(counts).tolist() == [0.0, 1 / 10, 0.0, 1 / 40, 0.0]
    assert DifficultyWeights(K, scale="mean").coefficients(counts).tolist() == [0.0, 1 / 20, 0.0, 1 / 80, 0.0]
    for together in ("batch", "shared"):
        weights = DifficultyWeights(K, normalizer=together)
        assert weights.coefficients(counts).tolist() == [0.0, 1 / 50, 0.0, 1 / 50, 0.0]
    assert DifficultyWeights(K).coefficients(torch.tensor([3, 0, 0, 0, 3])).tolist() == [0.0] * 5


@pytest.mark.parametrize("parameter", ["log", "linear"])
@pytest.mark.parametrize("magnitude", ["abs", "signed", "token"])
@pytest.mark.parametrize("normalizer", ["bin", "batch", "shared"])
def test_updates_equal_adam_written_out(parameter, magnitude, normalizer):
    """30 steps with bins that come and go, every option that enters the gradient."""
    generator = torch.Generator().manual_seed(0)
    weights = DifficultyWeights(
        K, parameter=parameter, magnitude=magnitude, normalizer=normalizer, learning_rate=0.05, clamp=(0.5, 1.5)
    )
    slow = [reference.AdamWeight(parameter=parameter, learning_rate=0.05, clamp=(0.5, 1.5)) for _ in range(K + 1)]
    for _ in range(30):
        counts = torch.randint(1, 9, (K + 1,), generator=generator) * torch.randint(0, 2, (K + 1,), generator=generator)
        spread = torch.tensor([1.0, 0.2, 1.0, 4.0, 1.0], dtype=torch.float64)
        sums = torch.randn(K + 1, generator=generator, dtype=torch.float64) * spread * counts
        abs_sums = sums.abs() + 0.1 * counts
        weights.update(sums, counts, abs_sums)
        kept = int(counts[1:K].sum())
        for k in range(1, K):
            if counts[k] > 0:
                value = {"abs": abs(sums[k].item()), "signed": sums[k].item(), "token": abs_sums[k].item()}[magnitude]
                slow[k].update(value / (counts[k].item() if normalizer != "batch" else kept))
    expected = torch.tensor([w.w for w in slow], dtype=torch.float64)
    assert len(set(expected.tolist())) > 2
    torch.testing.assert_close(weights.weights, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("parameter", ["log", "linear"])
def test_weight_gradient_is_that_of_the_written_loss(parameter):
    """Autograd of w_k L_k - ln w_k in the parameter, against the first Adam moment (0.1 * gradient)."""
    weights = DifficultyWeights(K, parameter=parameter, magnitude="signed", learning_rate=0.3)
    sums = torch.tensor([0.0, 3.0, -8.0, 90.0, 0.0], dtype=torch.float64)
    weights.update(sums, COUNTS)
    before = weights.state_dict()
    value = torch.tensor(before["values"], dtype=torch.float64, requires_grad=True)
    w = value.exp() if parameter == "log" else value
    loss = (w * sums / COUNTS - w.log())[1:K].sum()
    loss.backward()
    weights.update(sums, COUNTS)
    first = torch.tensor(weights.state_dict()["first_moments"], dtype=torch.float64)
    gradient = (first - 0.9 * torch.tensor(before["first_moments"], dtype=torch.float64)) / 0.1
    torch.testing.assert_close(gradient, value.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("parameter", ["log", "linear"])
@pytest.mark.parametrize("magnitude", ["abs", "signed", "token"])
def test_rest_point_is_w_times_loss_equals_one(parameter, magnitude):
    weights = DifficultyWeights(K, parameter=parameter, magnitude=magnitude, learning_rate=0.02)
    losses = torch.tensor([0.0, 0.4, 1.0, 4.0, 0.0], dtype=torch.float64)
    for _ in range(3000):
        weights.update(losses * COUNTS, COUNTS, losses * COUNTS)
    torch.testing.assert_close((weights.weights * losses)[1:K], torch.ones(K - 1).double(), rtol=1e-3, atol=0)
    assert weights.clamped == 0


def test_abs_magnitude_rests_where_a_negative_loss_has_magnitude_one_and_signed_runs_to_the_clamp():
    sums = torch.tensor([0.0, -4.0, -10.0, -80.0, 0.0])
    absolute = DifficultyWeights(K, learning_rate=0.05)
    signed = DifficultyWeights(K, learning_rate=0.05, magnitude="signed")
    for _ in range(1000):
        absolute.update(sums, COUNTS)
        signed.update(sums, COUNTS)
    torch.testing.assert_close(absolute.weights[1:K], torch.tensor([2.5, 2.0, 0.5]).double(), rtol=1e-3, atol=0)
    assert signed.weights[1:K].tolist() == [10.0] * 3
    assert (absolute.clamped, signed.clamped) == (0, 3)


def test_absent_and_edge_bins_are_untouched():
    weights = DifficultyWeights(K, learning_rate=0.1)
    weights.update(torch.tensor([1.0, 2, 3, 4, 5]), COUNTS)
    before = weights.state_dict()
    weights.update(torch.tensor([9.0, 9, 9, 9, 9]), torch.tensor([8, 0, 8, 0, 8]))
    after = weights.state_dict()
    for field in ("values", "first_moments", "second_moments", "steps"):
        unchanged = [a == b for a, b in zip(before[field], after[field], strict=True)]
        assert unchanged == [True, True, False, True, True], field
    assert after["steps"] == [0, 1, 2, 1, 0]


def test_nothing_present_changes_nothing_even_with_nan_there():
    weights = DifficultyWeights(K)
    before = weights.state_dict()
    weights.update(torch.full((K + 1,), math.nan), torch.tensor([3, 0, 0, 0, 2]))
    assert weights.state_dict() == before


@given(seed=st.integers(0, 10**6), factor=st.sampled_from([2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_bin_normalizer_does_not_see_how_many_tokens_a_bin_has(seed, factor):
    sums = torch.randn(K + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain, larger = DifficultyWeights(K), DifficultyWeights(K)
    plain.update(sums, COUNTS)
    larger.update(sums * factor, COUNTS * factor)
    assert plain.state_dict() == larger.state_dict()


def test_non_finite_sums_are_refused_and_change_nothing():
    weights = DifficultyWeights(K)
    before = weights.state_dict()
    with pytest.raises(NonFiniteError, match=r"cells \[2\]"):
        weights.update(torch.tensor([0.0, 1.0, math.inf, 1.0, 0.0]), COUNTS)
    assert weights.state_dict() == before


def test_token_magnitude_needs_absolute_sums():
    with pytest.raises(AlgorithmError, match="abs_loss_sums"):
        DifficultyWeights(K, magnitude="token").update(torch.zeros(K + 1), COUNTS)


@pytest.mark.parametrize("parameter", ["log", "linear"])
def test_state_survives_json_and_continues_bit_for_bit(parameter):
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(K + 1, generator=generator, dtype=torch.float64) * 50 for _ in range(20)]
    unbroken, first = DifficultyWeights(K, parameter=parameter), DifficultyWeights(K, parameter=parameter)
    for sums in steps:
        unbroken.update(sums, COUNTS)
    for sums in steps[:9]:
        first.update(sums, COUNTS)
    resumed = DifficultyWeights(K, parameter=parameter)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for sums in steps[9:]:
        resumed.update(sums, COUNTS)
    assert torch.equal(resumed.weights, unbroken.weights)
    assert resumed.state_dict() == unbroken.state_dict()


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    weights = DifficultyWeights(K)
    before = weights.state_dict()
    with pytest.raises(CheckpointError, match=r"rollouts_per_prompt: .*8.*4"):
        weights.load_state_dict(DifficultyWeights(8).state_dict())
    with pytest.raises(CheckpointError, match="parameter"):
        weights.load_state_dict(DifficultyWeights(K, parameter="linear").state_dict())
    for torn in (
        {"values": [0.5] * 4},
        {"values": [0.5] * 4 + [math.nan]},
        {"steps": None},
        {"steps": [0, 0, -1, 0, 0]},
    ):
        with pytest.raises(CheckpointError, match=next(iter(torn))):
            weights.load_state_dict({**before, "first_moments": [1.0] * 5, **torn})
    assert weights.state_dict() == before


def test_narrower_clamp_pulls_a_loaded_state_in():
    wide = DifficultyWeights(K, learning_rate=1.0)
    wide.update(torch.zeros(K + 1), COUNTS)
    narrow = DifficultyWeights(K, clamp=(0.5, 2.0))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.weights[1:K].tolist() == pytest.approx([2.0] * 3)
    assert narrow.clamped == 3
    assert narrow.state_dict()["values"][1:K] == pytest.approx([math.log(2.0)] * 3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"parameter": "exp"}, "parameter"),
        ({"magnitude": "max"}, "magnitude"),
        ({"normalizer": "token"}, "normalizer"),
        ({"scale": "none"}, "scale"),
        ({"clamp": (0.0, 10.0)}, "clamp"),
        ({"clamp": (2.0, 10.0)}, "clamp"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.5, 0.9)}, "betas"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_refuses_options_out_of_range(options, field):
    with pytest.raises(AlgorithmError, match=f"^{field}"):
        DifficultyWeights(K, **options)


def test_a_learning_rate_of_zero_leaves_the_weights_alone():
    weights = DifficultyWeights(K, learning_rate=0.0)
    weights.update(torch.ones(K + 1), COUNTS)
    assert weights.weights.tolist() == [1.0] * 5


@pytest.mark.parametrize(("scale", "counts"), [("sum", [0, 4, 0, 0, 0]), ("mean", [0, 4, 0, 0, 0]), ("mean", COUNTS)])
def test_barrier_by_hand(scale, counts):
    weights, counts = DifficultyWeights(K, scale=scale), torch.as_tensor(counts)
    weights.update(torch.tensor([0.0, 2.0, 1.0, 0.5, 0.0]), counts)
    logs = [float(weights.weights[k].log()) for k in range(1, K) if counts[k]]
    assert logs[0] != 0
    expected = -sum(logs) / (len(logs) if scale == "mean" else 1)
    assert weights.barrier(counts) == pytest.approx(expected, abs=1e-15)


def test_shapes_are_checked():
    weights = DifficultyWeights(K)
    with pytest.raises(AlgorithmError, match=r"token_counts: .*\(4,\)"):
        weights.coefficients(torch.ones(4))
    with pytest.raises(AlgorithmError, match="loss_sums"):
        weights.update(torch.ones(4), COUNTS)
    with pytest.raises(AlgorithmError, match="token_counts"):
        weights.coefficients(-COUNTS)
    assert bin_sums(torch.ones(2), torch.tensor([0, 1], dtype=torch.int16), K).tolist() == [1, 1, 0, 0, 0]
    with pytest.raises(AlgorithmError, match="3"):
        bin_sums(torch.ones(3), torch.zeros(2, dtype=torch.long), K)


def test_weights_are_a_copy_and_carry_no_gradient():
    weights = DifficultyWeights(K)
    weights.weights.fill_(7.0)
    assert weights.weights.tolist() == [1.0] * 5
    sums = torch.ones(K + 1, requires_grad=True)
    weights.update(sums, COUNTS)
    assert not weights.weights.requires_grad
    assert not weights.coefficients(COUNTS).requires_grad


@pytest.mark.parametrize(("correct", "groups"), [([1, 0], [0, 0, 0]), ([[1, 0]], [[0, 0]])])
def test_verdicts_and_groups_are_two_vectors_of_one_length(correct, groups):
    with pytest.raises(AlgorithmError, match="shapes"):
        pass_rate_bins(torch.tensor(correct), torch.tensor(groups), 2)
