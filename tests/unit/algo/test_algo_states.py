"""Algorithms with a state: what they learn by hand, over JSON and back, and what they refuse."""

from __future__ import annotations

import json
import math

import algo_reference as reference
import pytest
import torch
from lab_names import configured

from megatron_daro.algo.algorithm import Samples, StepStats, StepTotals
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError, NonFiniteError

STATEFUL = ["ha_dw", "fade", "lambda_grpo"]


def build(name, k=4, **options):
    return make_algorithm(configured(name), rollouts_per_prompt=k, max_response_tokens=8, **options)


def step_stats(pass_rate, *, entropy=1.0, slope=0.0, k=4):
    """A step of 100 groups of K with this share of right answers, in bins 0 and K."""
    rollouts = torch.zeros(k + 1, dtype=torch.int64)
    rollouts[-1] = round(100 * pass_rate) * k
    rollouts[0] = 100 * k - rollouts[-1]
    zeros = torch.zeros(k + 1, 1, dtype=torch.float64)
    sums = {"loss_sums": zeros, "abs_loss_sums": zeros, "lambda_slope": torch.tensor([slope], dtype=torch.float64)}
    return StepStats(StepTotals(rollouts[:, None], rollouts), sums, entropy)


def test_ha_dw_follows_the_pass_rates_as_its_equations_say():
    algorithm = build("ha_dw", window=3, rate=2.0)
    anchors = []
    for observed in (0.2, 0.4, 0.6):  # the mean of what was seen, until three steps have passed
        algorithm.learn(step_stats(observed))
        anchors.append(algorithm.state_dict()["anchor"])
    assert anchors == pytest.approx([0.2, 0.3, 0.4], rel=1e-15)
    # eq. 9 to 11: mean 0.3, deviation sqrt((0.01 + 0 + 0.01) / 3); eq. 8 with y = 1
    eta = 2.0 * math.sqrt(0.02 / 3)
    algorithm.learn(step_stats(1.0))
    assert algorithm.state_dict()["anchor"] == pytest.approx((1 - eta) * 0.4 + eta, rel=1e-12)
    assert algorithm.state_dict()["anchors"] == pytest.approx([0.3, 0.4, (1 - eta) * 0.4 + eta], rel=1e-12)
    for _ in range(400):
        algorithm.learn(step_stats(0.7))
    # A constant pass rate narrows the deviation, so the anchor comes to rest near it, not necessarily on it.
    before = algorithm.state_dict()["anchor"]
    algorithm.learn(step_stats(0.7))
    assert algorithm.state_dict()["anchor"] == pytest.approx(before, abs=1e-4)


def test_ha_dw_expects_its_own_pass_rate_in_the_first_step():
    bins_N, lengths_N = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3]), torch.ones(8, dtype=torch.long)
    samples = Samples(bins_N, lengths_N, torch.tensor([1.0, -1, -1, -1, 1, 1, 1, -1]))
    got = build("ha_dw", scale=1.0).coefficients(samples, StepTotals.of(bins_N, lengths_N, 4))
    hard, easy = math.exp(0.25) / 8, math.exp(-0.25) / 8  # C = 1/2
    assert got.tolist() == pytest.approx([hard, easy, easy, easy, easy, easy, easy, hard], rel=1e-12)


def test_fade_schedules_by_hand():
    algorithm = build("fade", rate=0.5)
    assert (algorithm.power, algorithm.wrong_scale) == (1.5, 1.0)  # p = 1/2: 3/2
    algorithm.learn(step_stats(0.0, entropy=0.8))  # p = 1/4: 9/2, at most 3; target 0.4
    assert (algorithm.power, algorithm.wrong_scale) == (3.0, 1.0)
    algorithm.learn(step_stats(1.0, entropy=0.1))  # p = 5/8: 3 * 3/8 * 4/5 = 0.9, at least 1; H = 0.45
    assert (algorithm.power, algorithm.wrong_scale) == (1.0, 1.0)
    algorithm.learn(step_stats(1.0, entropy=0.0))  # H = 0.225: 1 + 0.225 - 0.4
    assert algorithm.wrong_scale == pytest.approx(0.825, rel=1e-12)
    assert build("fade", target_entropy=9.0).wrong_scale == 1.0  # no entropy seen yet
    low = build("fade", target_entropy=9.0)
    low.learn(step_stats(0.5))
    assert low.wrong_scale == 0.3


def test_fade_comes_to_rest_at_the_pass_rate_and_entropy_of_a_constant_run():
    algorithm = build("fade", rate=0.1, target_entropy=0.9)
    for _ in range(600):
        algorithm.learn(step_stats(0.45, entropy=0.6))
    assert algorithm.power == pytest.approx(3 * 0.55 / 0.9, rel=1e-9)
    assert algorithm.wrong_scale == pytest.approx(0.7, rel=1e-9)


def test_lambda_weights_by_hand():
    """Lengths 1, 3 of K = 2: z = -1, 1; h = 8/9, 10/9; with lambda 1 the weights are 2 softmax(8/9, 10/9)."""
    bins_N, lengths_N = torch.tensor([1, 1]), torch.tensor([1, 3])
    samples = Samples(bins_N, lengths_N, torch.tensor([1.0, -1.0]), torch.tensor([[1, 3], [1, 3]]))
    totals = StepTotals.of(bins_N, lengths_N, 2)
    algorithm = build("lambda_grpo", 2)
    assert algorithm.coefficients(samples, totals).tolist() == pytest.approx([0.25, 0.25], rel=1e-15)
    # at lambda 0 the weights are 1 and their slopes ln h less the mean of ln h, over the N = 4 tokens
    spread = (math.log(10 / 9) - math.log(8 / 9)) / 2 / 4
    assert algorithm.coefficient_slopes(samples, totals).tolist() == pytest.approx([-spread, spread], rel=1e-12)
    algorithm.load_state_dict({**algorithm.state_dict(), "lambda": 1.0})
    share = 1 / (1 + math.exp(2 / 9))
    assert algorithm.coefficients(samples, totals).tolist() == pytest.approx([share / 2, (1 - share) / 2], rel=1e-12)


def test_lambda_slopes_are_the_derivative_of_the_coefficients():
    samples = reference.random_step(5, num_groups=6, k=4)
    algorithm = build("lambda_grpo")
    algorithm.load_state_dict({**algorithm.state_dict(), "lambda": reference.LAMBDA})
    bins_N = torch.tensor(reference.bins(samples))
    lengths_N = torch.tensor([len(s.tokens) for s in samples])
    groups_NK = torch.tensor([[len(o.tokens) for o in samples if o.group == s.group] for s in samples])
    parts = Samples(bins_N, lengths_N, torch.zeros(len(samples)), groups_NK)
    got = algorithm.coefficient_slopes(parts, StepTotals.of(bins_N, lengths_N, 4))
    tokens = int(lengths_N.sum())
    want = [reference.lambda_factor(samples, i, 4)[1] / tokens if s.tokens else 0.0 for i, s in enumerate(samples)]
    assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-9)


def test_lambda_descends_the_policy_loss_by_adam():
    algorithm = build("lambda_grpo", learning_rate=0.1)
    for slope in (2.0, 2.0, 2.0):
        algorithm.learn(step_stats(0.5, slope=slope))
    assert algorithm.exponent == pytest.approx(-0.3, rel=1e-6)
    with pytest.raises(NonFiniteError, match="lambda"):
        algorithm.learn(step_stats(0.5, slope=math.nan))
    with pytest.raises(AlgorithmError, match="lambda_slope"):
        algorithm.learn(StepStats(step_stats(0.5).totals, {}, 0.0))
    assert algorithm.exponent == pytest.approx(-0.3, rel=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_over_json_continues_bit_for_bit(name):
    whole, first = build(name), build(name)
    steps = [step_stats(0.1 + 0.07 * i, entropy=1 - 0.05 * i, slope=(-0.6) ** i) for i in range(12)]
    for step in steps[:5]:
        whole.learn(step)
        first.learn(step)
    second = build(name)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps[5:]:
        whole.learn(step)
        second.learn(step)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("ha_dw", {"anchor": None}),
        ("ha_dw", {"anchor": math.nan}),
        ("ha_dw", {"anchors": [0.5, 2.0]}),
        ("ha_dw", {"early": "no"}),
        ("fade", {"solved": 1.5}),
        ("fade", {"solved": None}),
        ("fade", {"entropy": "low"}),
        ("lambda_grpo", {"lambda": math.inf}),
        ("lambda_grpo", {"adam": None}),
        ("lambda_grpo", {"adam": {"first_moments": [0.0], "second_moments": [-1.0], "steps": [1]}}),
        ("lambda_grpo", {"adam": {"first_moments": [0.0, 1.0], "second_moments": [1.0], "steps": [1]}}),
    ],
)
def test_torn_states_are_refused_and_change_nothing(name, changed):
    algorithm = build(name)
    algorithm.learn(step_stats(0.3, slope=1.0))
    before = algorithm.state_dict()
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        algorithm.load_state_dict({**before, **changed})
    assert algorithm.state_dict() == before


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("maxrl", {"gamma": 1.0}, "gamma"),
        ("f_grpo", {"gamma": -0.1}, "gamma: got -0.1"),
        ("mgpo", {"strength": -0.1}, "strength: got -0.1"),
        ("mgpo", {"target": 1.0}, "target: got 1.0"),
        ("dgpo", {"temperature": 0.0}, "temperature"),
        ("ha_dw", {"window": 1}, "window"),
        ("ha_dw", {"scale": 0.0}, "scale"),
        ("fade", {"rate": 0.0}, "rate"),
        ("fade", {"max_power": 0.5}, "max_power"),
        ("fade", {"target_entropy": -1.0}, "target_entropy"),
        ("lambda_grpo", {"spread": 0.6}, "spread: got 0.6"),
        ("lambda_grpo", {"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_options_out_of_range_are_refused(name, options, said):
    with pytest.raises(AlgorithmError, match=said):
        build(name, **options)


def test_fade_goes_on_from_a_step_in_which_all_was_right():
    algorithm = build("fade")
    state = {**algorithm.state_dict(), "solved": 1.0, "entropy": 0.5, "target_entropy": 0.9}
    algorithm.load_state_dict(state)
    assert algorithm.state_dict() == state


@pytest.mark.parametrize("name", STATEFUL)
def test_bin_and_length_alone_are_refused_where_they_are_not_enough(name):
    bins_N, lengths_N = torch.tensor([1]), torch.tensor([2])
    algorithm, totals = build(name), StepTotals.of(bins_N, lengths_N, 4)
    with pytest.raises(AlgorithmError, match="`coefficients`"):
        algorithm.bin_coefficients(bins_N, lengths_N, totals)
    if algorithm.needs_group_lengths:
        with pytest.raises(AlgorithmError, match="group_lengths_NK"):
            algorithm.coefficients(Samples(bins_N, lengths_N, torch.ones(1)), totals)


@pytest.mark.parametrize(("given", "target"), [(None, 0.4), (0.25, 0.25)])
def test_fade_resumes_with_the_saved_target_or_with_one_that_is_given_now(given, target):
    first = build("fade")
    first.learn(step_stats(0.5, entropy=0.8))
    resumed = build("fade", target_entropy=given)
    resumed.load_state_dict(first.state_dict())
    resumed.learn(step_stats(0.5, entropy=0.1))
    assert resumed.state_dict()["target_entropy"] == target
    assert resumed.wrong_scale == pytest.approx(max(0.3, min(1.0, 1 + 0.8 + 0.02 * (0.1 - 0.8) - target)))
