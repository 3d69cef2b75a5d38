"""The lab's own algorithms: DARO's weights over kernels, by lengths and gradient norms, and where each comes to rest.

What FADE and lambda-GRPO are is tested beside the package's algorithms, in tests/unit/algo.
"""

from __future__ import annotations

import json

import pytest
import torch
from lab_algorithms import CellWeights, CountWeights, gaussian_basis
from lab_names import CONFIGURED

from megatron_daro.algo.algorithm import Samples, StepStats, StepTotals
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError

K = 8
COUNTS = torch.tensor([30, 400, 300, 0, 200, 90, 250, 100, 60])
MEASURES = torch.tensor([9.0, 0.9, 0.5, 9.0, 0.4, 0.45, 0.6, 1.3, 9.0], dtype=torch.float64)
"""What is measured of each bin; 0, 3 and 8 take no part."""
PRESENT = [1, 2, 4, 5, 6, 7]
SUMS = {"loss_sums": MEASURES * COUNTS, "token_counts": COUNTS}


def iterated(weights, steps=6000):
    for _ in range(steps):
        weights.update(**SUMS)
    return weights.weights


def test_the_gradients_norm_is_equal_over_the_bins_at_rest():
    """w_k sqrt(Q_k) / N_k, the estimated norm of a bin's part of the gradient, is the mean of sqrt(Q_k) / N_k."""
    squares = torch.tensor([3.0, 400.0, 90.0, 7.0, 50.0, 10.0, 300.0, 2.0, 5.0], dtype=torch.float64)
    weights = CellWeights(K, magnitude="gradient", clamp=(0.01, 100.0))
    sums = {"loss_sums": torch.zeros(K + 1), "token_counts": COUNTS, "gradient_squares": squares}
    weights.settle(**sums)
    norms = squares.sqrt() / COUNTS
    of_bins = weights.coefficients(COUNTS) * squares.sqrt()
    torch.testing.assert_close(of_bins[PRESENT], norms[PRESENT].mean().expand(len(PRESENT)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("half_life", [None, 20.0])
def test_the_gradients_norm_comes_to_rest_at_its_inverse(half_life):
    weights = CellWeights(K, magnitude="gradient", half_life=half_life, learning_rate=0.003)
    sums = {"loss_sums": torch.zeros(K + 1), "token_counts": COUNTS, "gradient_squares": (MEASURES * COUNTS).square()}
    for _ in range(6000):
        weights.update(**sums)
    want = MEASURES[PRESENT].mean() / MEASURES
    got = weights.weights
    torch.testing.assert_close(got[PRESENT], want[PRESENT], rtol=2e-3 if half_life is None else 1e-9, atol=0)


def test_the_gradients_norm_without_its_sums_is_refused():
    with pytest.raises(AlgorithmError, match="gradient_squares"):
        CellWeights(K, magnitude="gradient").update(torch.ones(K + 1), COUNTS)


@pytest.mark.parametrize("kernels", [2, 4, 7])
def test_kernels_come_to_rest_where_the_mean_within_each_is_one(kernels):
    """Sum over present bins of phi_j (w_k m_k - 1) = 0 for every kernel j: the derivative of the convex sum."""
    weights = CellWeights(K, kernels=kernels, learning_rate=0.003, magnitude="signed")
    got = iterated(weights)
    basis = gaussian_basis(K, kernels)[:, PRESENT]
    inside = basis.sum(dim=1) >= 0.1
    rest = basis @ (got * MEASURES - 1)[PRESENT]
    assert rest[inside].abs().max() < 5e-3
    settled = CellWeights(K, kernels=kernels, magnitude="signed")
    settled.settle(**SUMS)
    assert (basis @ (settled.weights * MEASURES - 1)[PRESENT])[inside].abs().max() < 1e-9
    torch.testing.assert_close(got[PRESENT], settled.weights[PRESENT], rtol=1e-2, atol=0)


def daro(**options):
    return make_algorithm(CONFIGURED["daro_cells"], rollouts_per_prompt=4, max_response_tokens=64, **options)


BINS_N = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3, 0, 4])
LENGTHS_N = torch.tensor([2, 10, 9, 4, 30, 3, 10, 0, 5, 50])
EDGES = (10, 20)


def totals_of(algorithm):
    classes_N = algorithm.classes_of(Samples(BINS_N, LENGTHS_N, torch.zeros(10)))
    return StepTotals.of_classes(BINS_N, LENGTHS_N, classes_N, 4, len(algorithm.classes[1]))


def test_coefficients_by_pass_rate_and_length_by_hand():
    algorithm = daro(length_edges=EDGES)
    totals = totals_of(algorithm)
    assert totals.tokens_per_cell.tolist() == [[5, 0, 0], [15, 10, 0], [0, 0, 0], [3, 10, 30], [0, 0, 50]]
    assert totals.tokens_per_bin.tolist() == [5, 25, 0, 43, 50]
    back = StepTotals.from_vector(totals.vector().double(), 3)
    assert torch.equal(back.tokens_per_cell, totals.tokens_per_cell) and back.num_rollouts == 10
    got = algorithm.bin_coefficients(BINS_N, LENGTHS_N, totals)
    want = [1 / 15, 1 / 10, 1 / 15, 1 / 15, 1 / 30, 1 / 3, 1 / 10, 0, 0, 0]
    assert got.tolist() == pytest.approx(want, rel=1e-15)


def test_each_cell_comes_to_rest_at_its_own_inverse_and_only_where_it_has_tokens():
    algorithm = daro(length_edges=EDGES, learning_rate=0.003)
    totals = totals_of(algorithm)
    measures = torch.linspace(0.4, 2.0, 15, dtype=torch.float64).reshape(5, 3)
    step_stats = StepStats(totals, {"loss_sums": measures * totals.tokens_per_cell}, 0.0)
    for _ in range(5000):
        algorithm.learn(step_stats)
    present = totals.tokens_per_cell > 0
    present[0] = present[-1] = False
    weights = algorithm.cell_weights
    torch.testing.assert_close(weights[present], 1 / measures[present], rtol=2e-3, atol=0)
    assert (weights[~present] == 1).all()
    torch.testing.assert_close(algorithm.weights, weights.mean(dim=1))


@pytest.mark.parametrize("magnitude", ["abs", "signed", "token", "gradient", "advantage"])
def test_daro_learns_from_each_cell_of_pass_rate_and_length(magnitude):
    cells = torch.arange(1, 16).reshape(5, 3)
    names = ("loss_sums", "abs_loss_sums", "advantage_sums", "gradient_squares")
    sums = {name: (cells + 100.0 * place).double() for place, name in enumerate(names)}
    step_stats = StepStats(StepTotals(cells + 7, torch.full((5,), 8)), sums, 1.0)
    options = {"magnitude": magnitude, "half_life": 1, "clamp": (1e-4, 1e4)}  # Adam's first step is as long everywhere
    algorithm, plain = daro(length_edges=(3, 5), **options), CellWeights(4, length_classes=3, **options)
    algorithm.learn(step_stats)
    flat = {name: values.flatten() for name, values in sums.items()}
    plain.update(token_counts=step_stats.totals.tokens_per_cell.flatten(), **flat)
    assert algorithm.difficulty.weights.tolist() == plain.weights.tolist()
    assert len(set(plain.weights.tolist())) > 9


FORMS = [
    {"kernels": 3},
    {"kernels": 2, "half_life": 7.0, "length_edges": EDGES},
    {"length_edges": EDGES, "magnitude": "advantage"},
    {"magnitude": "gradient"},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_states_continue_over_json_bit_for_bit_and_other_forms_are_refused(options):
    whole, first = daro(**options), daro(**options)
    totals = totals_of(first)

    def learn(algorithm, step):
        names = ("loss_sums", "abs_loss_sums", "advantage_sums", "gradient_squares")
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
    if set(options) != {"magnitude"}:
        plain = make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=64)
        for other in (daro(), plain):
            with pytest.raises(CheckpointError, match=r"kernels|averages|length_edges|length_classes"):
                other.load_state_dict(whole.state_dict())
        with pytest.raises(CheckpointError, match=r"kernels|averages|length_edges"):
            daro(**options).load_state_dict(daro().state_dict())


def test_a_state_of_plain_daro_is_taken_over():
    plain = make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=64, learning_rate=0.3)
    plain.difficulty.update(torch.linspace(0.3, 3.0, 5), torch.ones(5))
    cells = daro()
    cells.load_state_dict(plain.state_dict())
    assert cells.weights.tolist() == plain.weights.tolist() != [1.0] * 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": 4}, "kernels: got 4"),
        ({"kernels": 1}, "kernels: got 1"),
        ({"parameter": "linear", "kernels": 2}, "parameter"),
        ({"length_edges": (5, 5)}, "length_edges"),
        ({"length_edges": (0,)}, "length_edges"),
        ({"length_edges": (9, 5)}, "length_edges"),
    ],
)
def test_forms_without_a_meaning_are_refused(options, said):
    with pytest.raises(AlgorithmError, match=said):
        daro(**options)


def stats(groups):
    """A step of so many groups of each bin, ten tokens an answer."""
    rollouts = torch.tensor(groups) * K
    totals = StepTotals((rollouts * 10)[:, None], rollouts)
    return StepStats(totals, {}, 0.0)


@pytest.mark.parametrize("kind", ["sqrt", "ucb"])
def test_seldom_pass_rates_weigh_more_and_the_mean_weight_is_one(kind):
    algorithm = CountWeights(rollouts_per_prompt=K, max_response_tokens=16, kind=kind)
    step = stats([0, 15, 8, 3, 0, 0, 0, 0, 0])
    algorithm.learn(step)
    heights = algorithm.heights
    if kind == "sqrt":
        torch.testing.assert_close(heights[:4], torch.tensor([1.0, 1 / 4, 1 / 3, 1 / 2], dtype=torch.float64))
    else:  # 9 ones and 26 groups
        bonus = (2 * torch.tensor(35.0, dtype=torch.float64).log() / 16).sqrt()
        torch.testing.assert_close(heights[1], 4 * 0.125 * 0.875 + bonus)
    bins = torch.tensor([1] * 15 * K + [2] * 8 * K + [3] * 3 * K)
    samples = Samples(bins, torch.full_like(bins, 10), torch.ones(len(bins)))
    coefficients = algorithm.coefficients(samples, step.totals)
    torch.testing.assert_close((coefficients * 10).sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(coefficients[0] / coefficients[-1], heights[1] / heights[3])
    again = CountWeights(rollouts_per_prompt=K, max_response_tokens=16, kind=kind)
    again.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert torch.equal(again.heights, heights)


def test_options_and_states_of_count_weights_that_are_refused():
    sizes = {"rollouts_per_prompt": K, "max_response_tokens": 16}
    with pytest.raises(AlgorithmError, match="kind: got 'cube'"):
        CountWeights(**sizes, kind="cube")
    with pytest.raises(AlgorithmError, match="width: got -1"):
        CountWeights(**sizes, width=-1)
    algorithm = CountWeights(**sizes)
    with pytest.raises(CheckpointError, match="counts"):
        algorithm.load_state_dict(algorithm.state_dict() | {"counts": [1.0]})
