"""The lab's closed-form world: its formulas against sampling and enumeration, and that a run can be repeated."""

from __future__ import annotations

import dataclasses
import math

import arms
import closed_critic
import closed_run
import lab
import pytest
import torch
from closed_world import MAX_TOKENS, Dials, Policy, make_problems, sample_answers, token_logprobs

from megatron_daro.algo.difficulty import predicted_bin_loss
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config.algorithm import CriticSection
from megatron_daro.errors import ConfigError

SMALL = Dials(groups=8, rollouts=4, steps=6, problems=40, held_out=30)


@pytest.fixture(scope="module")
def world():
    noise = torch.Generator().manual_seed(3)
    problems = make_problems(60, (0.6, 0.8), noise)
    policy = Policy(60, 1.5)
    with torch.no_grad():
        for parameter in policy.parameters[:4]:
            parameter += 0.3 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    return policy, problems, noise


def by_hand(policy, problems, answers, i):
    """The log-prob of answer i, choice by choice, and its verdict."""
    p, m = int(answers.problem_N[i]), int(answers.strategy_N[i])
    kind = int(problems.type_P[p])
    total = float(torch.log_softmax(policy.strategy_TM[kind], 0)[m])
    right = True
    for j in range(problems.used_PMJ.shape[2]):
        if not problems.used_PMJ[p, m, j]:
            continue
        s = int(problems.skill_PMJ[p, m, j])
        rule = float(problems.sign_PMJ[p, m, j]) * float(policy.skill_S[s] + policy.fine_TS[kind, s])
        chance = 1 / (1 + math.exp(-(rule + float(policy.own_P[p]) - float(problems.hardness_PM[p, m]))))
        good = bool(answers.good_NJ[i, j])
        right &= good
        total += math.log(chance if good else 1 - chance)
    more = 1 / (1 + math.exp(-float(policy.extra_2[int(right)])))
    total += int(answers.extra_N[i]) * math.log(more)
    return total + (math.log(1 - more) if answers.stopped_N[i] else 0.0), right


def test_logprobs_and_verdicts_of_answers_are_those_of_their_choices(world):
    policy, problems, noise = world
    answers = sample_answers(policy, problems, torch.arange(60).repeat(3), noise)
    with torch.no_grad():
        logprobs_T = token_logprobs(policy, problems, answers)
    sums_N = torch.zeros(180, dtype=torch.float64).index_add(0, answers.sample_T, logprobs_T)
    assert torch.equal(torch.bincount(answers.sample_T), answers.lengths_N)
    for i in range(0, 180, 7):
        with torch.no_grad():
            logprob, right = by_hand(policy, problems, answers, i)
        assert float(sums_N[i]) == pytest.approx(logprob, rel=1e-12)
        assert bool(answers.right_N[i]) == right


def test_advantages_of_ppo_are_the_products_for_each_token(world):
    """With lambda 1 the reward less the value; a critic at 0 has the same advantage for all tokens of an answer."""
    policy, problems, noise = world
    answers = sample_answers(policy, problems, torch.arange(60), noise)
    critic = closed_critic.Critic(problems, CriticSection(), 0.1)
    with torch.no_grad():
        critic.own_P += torch.randn(60, generator=noise, dtype=torch.float64)
        values_T = critic.values(answers)
    algorithm = make_algorithm("ppo", rollouts_per_prompt=4, max_response_tokens=MAX_TOKENS, whiten=False)
    groups_N = torch.arange(60) // 4
    rewards_N = answers.right_N.double()
    columns = critic.columns(algorithm, answers, values_T, (rewards_N, groups_N * 0 + 1, groups_N))
    torch.testing.assert_close(columns.advantages_T, rewards_N[answers.sample_T] - values_T)
    torch.testing.assert_close(columns.targets_T, rewards_N[answers.sample_T])
    before = (values_T - columns.targets_T).square().mean()
    critic.learn(answers, columns)
    assert (critic.values(answers) - columns.targets_T).square().mean() < before


def test_the_policy_rests_while_the_critic_is_pretrained():
    run = closed_run.ClosedRun(SMALL, "vc_ppo", 0.05, 0)
    first = [p.detach().clone() for p in run.policy.parameters]
    run.critic.pretrain_steps = 2
    for _ in range(2):
        run.one_batch()
    assert all(torch.equal(a, b) for a, b in zip(first, run.policy.parameters, strict=True))
    assert bool(run.critic.table.any())
    run.one_batch()
    assert not all(torch.equal(a, b) for a, b in zip(first, run.policy.parameters, strict=True))


def test_pass_rates_are_the_frequencies_of_right_answers(world):
    policy, problems, noise = world
    draws = 3000
    answers = sample_answers(policy, problems, torch.arange(60).repeat_interleave(draws), noise)
    seen_P = answers.right_N.reshape(60, draws).double().mean(1)
    exact_P = policy.pass_rates(problems, held_out=False).detach()
    off = (seen_P - exact_P) / (exact_P * (1 - exact_P) / draws).sqrt().clamp(min=1e-3)
    assert float(off.abs().max()) < 4.5


def test_the_first_policy_has_the_spectrum_and_the_lengths_that_were_asked_for():
    noise = torch.Generator().manual_seed(0)
    problems = make_problems(400, (0.4, 1.2), noise)
    policy = Policy(400, 1.5)
    assert torch.allclose(policy.pass_rates(problems, held_out=True), problems.first_P)
    assert float(problems.first_P.mean()) == pytest.approx(0.25, abs=0.04)
    # Of one strategy to a problem: harder problems have longer chains, so lengths are compared within problems.
    answers = sample_answers(policy, problems, torch.arange(400).repeat_interleave(200), noise)
    lengths, right = (x.reshape(400, 200).double() for x in (answers.lengths_N, answers.right_N))
    mixed = (right.sum(1) > 20) & (right.sum(1) < 180)
    means = [(lengths * x).sum(1)[mixed] / x.sum(1)[mixed] for x in (1 - right, right)]
    assert float((means[0] / means[1]).mean()) == pytest.approx(1.5, abs=0.1)


def test_the_mean_gradient_of_the_surrogate_is_that_of_the_exact_pass_rate():
    """dr_grpo: A = R - mean over K, so the expectation is (1 - 1/K) times the gradient of the mean pass rate."""
    dials = Dials(spectrum=(2.0, 2.0), groups=60, rollouts=8, problems=60, held_out=1)
    run = closed_run.ClosedRun(dials, "dr_grpo", 0.0, seed=1)
    rounds, summed = 60, torch.zeros(arms_parameters(run).shape, dtype=torch.float64)
    for _ in range(rounds):
        run.step(run.sample())
        summed += arms_parameters(run, gradient=True)
    run.optimizer.zero_grad()
    run.policy.pass_rates(run.problems, held_out=False).mean().backward()
    exact = -arms_parameters(run, gradient=True) * (1 - 1 / 8) / MAX_TOKENS
    found = summed / rounds
    assert float(found @ exact / found.norm() / exact.norm()) > 0.98
    assert float(found.norm() / exact.norm()) == pytest.approx(1.0, abs=0.05)


def arms_parameters(run, gradient=False):
    """Skills and strategies in one vector."""
    chosen = run.policy.parameters[:2]
    return torch.cat([(p.grad if gradient else p.detach()).flatten() for p in chosen])


def test_with_a_frozen_policy_the_weights_of_daro_rest_where_the_theory_says():
    dials = Dials(spectrum=(1.0, 1.0), wrong_length=2.5, groups=256, rollouts=4, problems=512, held_out=1)
    run = closed_run.ClosedRun(dials, "daro", 0.0, seed=2)
    run.algorithm = make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=MAX_TOKENS, learning_rate=0.1)
    lengths = {k: [] for k in (1, 2, 3)}
    for _ in range(60):
        batch = run.sample()
        run.step(batch)
        answers = batch.answers
        for k in lengths:
            lengths[k].append(
                [answers.lengths_N[(batch.bins_N == k) & (answers.right_N == v)].double().mean() for v in (True, False)]
            )
    for k, pairs in lengths.items():
        right, wrong = torch.tensor(pairs).mean(0)
        assert float(run.algorithm.weights[k] * predicted_bin_loss(k / 4, right, wrong)) == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize("arm", ["grpo", "daro"])
def test_equal_arguments_give_equal_numbers_bit_for_bit(arm):
    first, again = (closed_run.run_arm(SMALL, arm, 0.05, 7, every=3) for _ in range(2))
    assert first.records == again.records and len(first.records) == 3
    other = closed_run.run_arm(SMALL, arm, 0.05, 8, every=3)
    assert other.records[0]["accuracy"] != first.records[0]["accuracy"]


def test_arms_of_a_seed_start_from_the_same_policy_and_problems():
    starts = {closed_run.run_arm(SMALL, arm, 0.05, 7).records[0]["accuracy"] for arm in ("grpo", "dapo", "daro_token")}
    assert len(starts) == 1


def test_filters_cost_answers_and_several_updates_cost_none():
    plain = closed_run.run_arm(SMALL, "grpo", 0.05, 7).records[-1]
    assert plain["answers"] == 6 * 8 * 4
    assert closed_run.run_arm(SMALL, "dapo", 0.05, 7).records[-1]["answers"] > plain["answers"]
    several = Dials(groups=8, rollouts=4, steps=6, problems=40, held_out=30, updates=2)
    assert closed_run.run_arm(several, "grpo", 0.05, 7).records[-1]["answers"] == 3 * 8 * 4


def test_later_updates_of_a_batch_compare_with_the_policy_that_sampled(monkeypatch):
    several = Dials(groups=8, rollouts=4, steps=4, problems=40, held_out=30, updates=4)
    seen = []
    original = closed_run.token_objective

    def spy(logprobs_T, *rest, **named):
        result = original(logprobs_T, *rest, **named)
        seen.append(float((logprobs_T - named["old_logprobs_T"]).abs().max()))
        return result

    monkeypatch.setattr(closed_run, "token_objective", spy)
    closed_run.run_arm(several, "grpo", 0.1, 7)
    assert seen[0] == 0.0 and len(seen) == 4 and min(seen[1:]) > 0.05


def test_a_mistaken_verifier_changes_rewards_and_not_accuracy():
    run = closed_run.ClosedRun(dataclasses.replace(SMALL, false_wrong=0.4, false_right=0.2), "grpo", 0.05, 7)
    answers = sample_answers(run.policy, run.problems, torch.arange(40).repeat(100), run.noise)
    judged = run.judge(answers)
    assert float((~judged[answers.right_N]).double().mean()) == pytest.approx(0.4, abs=0.04)
    assert float(judged[~answers.right_N].double().mean()) == pytest.approx(0.2, abs=0.04)


def test_a_run_that_diverges_says_so_and_keeps_what_it_had():
    run = closed_run.run_arm(SMALL, "grpo", 1e308, 7, every=1)
    assert run.ended.startswith("diverged") and len(run.records) >= 1
    assert all(math.isfinite(r["accuracy"]) for r in run.records)


def test_dials_without_meaning_and_unknown_arms_are_refused():
    for wrong in (
        {"spectrum": (0.0, 1.0)},
        {"wrong_length": 0.5},
        {"false_right": 0.5},
        {"updates": 3},
        {"step_tokens": 0},
        {"step_tokens": 2, "gradients": "exact"},
        {"gradients": "some"},
    ):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: got"):
            Dials(**wrong)
    with pytest.raises(ConfigError, match="arm: got 'gpro'"):
        arms.options_of("gpro")


def test_every_arm_is_an_algorithm_of_the_product_and_a_command_line():
    from megatron_daro.config import AlgorithmSection

    for arm in arms.arm_names():
        algorithm, _ = arms.build(arm, rollouts=4, max_tokens=16)
        name = AlgorithmSection.model_validate(arms.options_of(arm)).name
        assert name in (algorithm.name, f"lab_algorithms:{type(algorithm).__name__}")
    assert arms.command_line("ladder_token") == ["algorithm.name=grpo", "algorithm.overlong.kind=both"]
    assert arms.command_line("daro_token") == ["algorithm.name=daro", "algorithm.daro.magnitude=token"]


EXACT = Dials(spectrum=(0.7, 1.0), wrong_length=2.0, rollouts=4, groups=60, problems=60, held_out=1, gradients="exact")


@pytest.mark.parametrize(
    ("arm", "mistakes"),
    [
        ("grpo", {}),
        ("daro_gradient", {}),
        ("daro_shared_half_life", {"false_wrong": 0.2, "false_right": 0.1}),
        ("ha_dw", {}),
        ("dgpo", {}),
    ],
)
def test_an_exact_step_is_the_mean_of_a_large_sample(arm, mistakes):
    """One step from the same policy with weights that are not all 1, against ten steps of 100 groups to each problem:
    the differences are as large as the spread of the ten lets expect."""
    exact = closed_run.ClosedRun(dataclasses.replace(EXACT, **mistakes), arm, 0.0, seed=4)
    dials = dataclasses.replace(EXACT, groups=60 * 100, gradients="sampled", refills=0, **mistakes)
    sampled = closed_run.ClosedRun(dials, arm, 0.0, seed=4)
    state, found, weights = learnt(exact.algorithm), [], []
    exact.one_batch()
    for _ in range(10):
        sampled.algorithm.load_state_dict(state)
        sampled.one_batch()
        found.append(arms_parameters(sampled, gradient=True))
        weights.append(sampled.algorithm.weights if sampled.algorithm.weights is not None else torch.ones(5))
    spread = torch.stack(found).std(0) / math.sqrt(10)
    off = (torch.stack(found).mean(0) - arms_parameters(exact, gradient=True)) / spread
    assert float(off.square().mean()) < 2.2, "1.3 is expected of ten steps, and 32 numbers"
    assert float(arms_parameters(exact, gradient=True).norm() / spread.norm()) > 10
    if exact.algorithm.weights is not None:
        torch.testing.assert_close(exact.algorithm.weights, torch.stack(weights).mean(0), rtol=1e-2, atol=0)
        assert exact.algorithm.weights[1:4].unique().numel() == 3


def test_groups_that_an_arm_filters_are_in_no_exact_sum(monkeypatch):
    """Sampled runs never see them; an arm without a filter counts its groups of all right and all wrong answers."""
    told = {}
    for arm in ("dapo", "daro", "grpo", "daro_unfiltered"):
        run = closed_run.ClosedRun(EXACT, arm, 0.0, seed=4)
        monkeypatch.setattr(run.algorithm, "learn", lambda step_stats, arm=arm: told.update({arm: step_stats}))
        run.one_batch()
    for arm, step_stats in told.items():
        tokens_B, rollouts_B = step_stats.totals.tokens_per_bin, step_stats.totals.rollouts_per_bin
        filtered = arm in ("dapo", "daro")
        for ends in (tokens_B[[0, -1]], rollouts_B[[0, -1]]):
            assert bool((ends == 0).all()) if filtered else bool((ends > 0).all()), arm
        assert bool((tokens_B[1:-1] > 0).all())
    assert told["daro"].entropy != told["daro_unfiltered"].entropy


def learnt(algorithm):
    """The state after two steps of loss sums that differ by bin."""
    totals = closed_run.StepTotals.of(torch.arange(5), torch.full((5,), 10), 4)
    sums = dict.fromkeys(("loss_sums", "abs_loss_sums", "advantage_sums"), torch.tensor([[0.0, 1, 5, 20, 0]]).T)
    sums["gradient_squares"] = sums["loss_sums"].square()
    for _ in range(2):
        algorithm.learn(closed_run.StepStats(totals, sums, 0.4))
    return algorithm.state_dict()


def test_squares_of_the_gradient_are_of_every_token(monkeypatch):
    """Where the ratio is 1 the derivative of a token's loss by its log-prob is -A."""
    run, told = closed_run.ClosedRun(SMALL, "daro_gradient", 0.0, seed=4), []
    monkeypatch.setattr(run.algorithm, "learn", told.append)
    batch = run.sample()
    run.step(batch)
    squares_N = batch.advantages_N.square() * batch.answers.lengths_N
    want = [float(squares_N[batch.bins_N == k].sum()) for k in range(5)]
    assert told[0].per_bin("gradient_squares").tolist() == pytest.approx(want, rel=1e-12) and min(want[1:4]) > 0


def test_lambda_is_told_the_derivative_of_the_policy_loss(monkeypatch):
    """Lambda moves, nothing else: the losses of the answers stay, their coefficients change."""
    run, told, losses = closed_run.ClosedRun(SMALL, "lambda_grpo", 0.0, seed=4), [], []
    monkeypatch.setattr(run, "_descend", lambda loss: losses.append(float(loss.detach())))
    monkeypatch.setattr(run.algorithm, "learn", told.append)
    batch = run.sample()
    for exponent in (-1.701, -1.7, -1.699):
        run.algorithm.load_state_dict({**run.algorithm.state_dict(), "lambda": exponent})
        run.step(batch)
    slope = float(told[1].sums["lambda_slope"])
    assert slope == pytest.approx((losses[2] - losses[0]) / 2e-3, rel=1e-4) and abs(slope) > 1e-6


def test_fade_is_told_the_expected_entropy_and_pass_rate():
    exact = closed_run.ClosedRun(EXACT, "fade", 0.0, seed=4)
    exact.one_batch()
    dials = dataclasses.replace(EXACT, groups=60 * 400, gradients="sampled")
    sampled = closed_run.ClosedRun(dials, "fade", 0.0, seed=4)
    sampled.one_batch()
    want, got = (run.algorithm.state_dict() for run in (sampled, exact))
    assert [got[n] for n in ("entropy", "solved")] == pytest.approx([want[n] for n in ("entropy", "solved")], rel=1e-2)


@pytest.mark.parametrize("arm", ["lite_ppo", "grpo_sequence", "lambda_grpo"])
def test_an_arm_whose_expectation_is_no_formula_is_refused_and_left_out(arm):
    with pytest.raises(ConfigError, match=f"gradients: got 'exact' with arm {arm}"):
        closed_run.ClosedRun(EXACT, arm, 0.0, seed=4)
    plan = lab.parse([])[1]
    assert arm not in plan.arms_in("skewed_exact") and arm in plan.arms_in("skewed")
    assert {"daro", "ha_dw", "fade", "maxrl"} <= set(plan.arms_in("skewed_exact"))
