"""The family: every row against the slow reference, the "equals" of the table, and splits of the step."""

from __future__ import annotations

import json
import math

import algo_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_names import configured

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.difficulty import bin_sums, pass_rate_bins
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.algo.weighting import (
    ALGORITHMS,
    Grpo,
    SampleAlgorithm,
    Samples,
    StepStats,
    StepTotals,
    make_algorithm,
)
from megatron_daro.errors import AlgorithmError, CheckpointError

LONGEST = 6


class Step:
    """A random step as tensors: samples [N] and their tokens end to end [T]."""

    def __init__(self, seed: int, num_groups: int, k: int) -> None:
        self.k = k
        self.samples = reference.random_step(seed, num_groups=num_groups, k=k, longest=LONGEST)
        self.rewards_N = torch.tensor([s.reward for s in self.samples], dtype=torch.float64)
        self.ids_N = torch.tensor([s.group for s in self.samples])
        self.lengths_N = torch.tensor([len(s.tokens) for s in self.samples])
        self.bins_N = pass_rate_bins(self.rewards_N > 0.5, self.ids_N, k)
        self.totals = StepTotals.of(self.bins_N, self.lengths_N, k)
        same_NN = self.ids_N[:, None] == self.ids_N[None]
        self.groups_NK = torch.stack([self.lengths_N[same] for same in same_NN])
        pairs = [pair for s in self.samples for pair in s.tokens]
        self.logprobs_T = torch.tensor([p[0] for p in pairs], dtype=torch.float64)
        self.old_T = torch.tensor([p[1] for p in pairs], dtype=torch.float64)
        self.sample_T = torch.repeat_interleave(torch.arange(len(self.samples)), self.lengths_N)

    def parts(self, advantages_N: torch.Tensor, part: torch.Tensor | slice = slice(None)) -> Samples:
        """Some of the samples, as an algorithm sees them."""
        return Samples(self.bins_N[part], self.lengths_N[part], advantages_N[part], self.groups_NK[part])

    def loss_sums(self, advantages_N: torch.Tensor, logprobs_T: torch.Tensor) -> torch.Tensor:
        """Sum of token losses per sample [N]."""
        losses_T = clipped_token_loss(logprobs_T, self.old_T, advantages_N[self.sample_T])
        return torch.zeros(len(self.samples), dtype=torch.float64).index_add(0, self.sample_T, losses_T)

    def loss(self, algorithm, advantages_N: torch.Tensor, logprobs_T: torch.Tensor) -> torch.Tensor:
        """The policy loss of the whole step at once."""
        coefficients_N = algorithm.coefficients(self.parts(advantages_N), self.totals)
        return (coefficients_N * self.loss_sums(advantages_N, logprobs_T)).sum()


def build(name: str, k: int, **options):
    """An algorithm as the actor builds it."""
    return make_algorithm(configured(name), rollouts_per_prompt=k, max_response_tokens=LONGEST, **options)


def somewhere(name: str, k: int):
    """The algorithm in a state that is not the one it starts in, the one of the slow reference."""
    if name == "daro":
        return trained_daro(k)
    algorithm = build(name, k)
    states = {
        "ha_dw": {"anchor": reference.ANCHOR, "anchors": [0.2, reference.ANCHOR]},
        # 3 (1 - p) / (2 p) = 2.5 at p = 3/8; 1 + H - target = 0.6
        "fade": {"solved": 3 / 8, "entropy": 0.5, "target_entropy": 0.9},
        "lambda_grpo": {"lambda": reference.LAMBDA},
    }
    algorithm.load_state_dict({**algorithm.state_dict(), **states.get(name, {})})
    return algorithm


def trained_daro(k: int, **options):
    """A daro whose weights all differ."""
    daro = build("daro", k, learning_rate=0.3, **options)
    counts = torch.ones(k + 1, dtype=torch.long)
    for _ in range(3):
        daro.difficulty.update(torch.linspace(0.3, 3.0, k + 1), counts, torch.linspace(0.3, 3.0, k + 1))
        daro.difficulty.update(
            torch.linspace(0.3, 3.0, k + 1), counts.index_fill(0, torch.tensor([1]), 0), torch.ones(k + 1)
        )
    return daro


NAMES = sorted({*ALGORITHMS, "fade", "lambda_grpo"})
STEPS = {"seed": st.integers(0, 10**6), "num_groups": st.integers(1, 6), "k": st.integers(2, 5)}


@pytest.mark.parametrize("name", NAMES)
@given(**STEPS)
@settings(max_examples=40, deadline=None)
def test_loss_and_gradient_equal_slow_reference(name, seed, num_groups, k):
    step = Step(seed, num_groups, k)
    algorithm = somewhere(name, k)
    weights = [1.0] * (k + 1) if algorithm.weights is None else algorithm.weights.tolist()
    logprobs_T = step.logprobs_T.clone().requires_grad_()
    advantages_N = algorithm.advantages(step.rewards_N, step.ids_N)
    loss = step.loss(algorithm, advantages_N, logprobs_T)
    loss.backward()
    expected, gradients, sums = reference.step_loss(name, step.samples, k, LONGEST, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    flat = torch.tensor([g for row in gradients for g in row], dtype=torch.float64)
    torch.testing.assert_close(logprobs_T.grad, flat, rtol=1e-9, atol=1e-12)
    measured = bin_sums(step.loss_sums(advantages_N, step.logprobs_T), step.bins_N, k)
    torch.testing.assert_close(measured, torch.tensor(sums, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_every_coefficient_by_hand():
    """K = 2; bins 0, 1, 1, 2 per group; tokens 4 | 1, 3 and 2, 0 | 6; all 16, kept 6, rollouts 8."""
    bins_N = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    lengths_N = torch.tensor([2, 2, 1, 3, 2, 0, 3, 3])
    totals = StepTotals.of(bins_N, lengths_N, 2)
    assert (totals.tokens, totals.mixed_tokens, totals.num_rollouts) == (16, 6, 8)
    mean = [1 / 16] * 5 + [0.0] + [1 / 16] * 2
    kept = [0.0, 0.0, 1 / 6, 1 / 6, 1 / 6, 0.0, 0.0, 0.0]
    expected = {
        "grpo": mean,
        "lite_ppo": mean,
        "rloo": mean,
        "grpo_sequence": [1 / 16, 1 / 16, 1 / 8, 1 / 24, 1 / 16, 0.0, 1 / 24, 1 / 24],
        "kimi": [1 / 8] * 5 + [0.0] + [1 / 8] * 2,
        "dr_grpo": [1 / 48] * 5 + [0.0] + [1 / 48] * 2,
        "dapo": kept,
        "daro": kept,
        # 1/mu = 2 at 1/2, 1 at 1, none at 0; 1 - mu; 2^-1 at both ends; 1 / (2 mu (1 - mu)) = 2, one bin: softmax 1
        "maxrl": [0.0, 0.0, 1 / 8, 1 / 8, 1 / 8, 0.0, 1 / 16, 1 / 16],
        "f_grpo": [1 / 16, 1 / 16, 1 / 32, 1 / 32, 1 / 32, 0.0, 0.0, 0.0],
        "mgpo": [1 / 32, 1 / 32, 1 / 16, 1 / 16, 1 / 16, 0.0, 1 / 32, 1 / 32],
        "dgpo": [2 * x for x in kept],
    }
    assert set(expected) == {name for name, cls in ALGORITHMS.items() if not issubclass(cls, SampleAlgorithm)}
    for name, values in expected.items():
        got = build(name, 2).bin_coefficients(bins_N, lengths_N, totals)
        assert got.tolist() == pytest.approx(values, rel=1e-15), name


@given(**STEPS)
@settings(max_examples=40, deadline=None)
def test_lite_ppo_and_dr_grpo_equal_weights_of_sqrt_mu_one_minus_mu(seed, num_groups, k):
    """Exact with eps 0: their advantage is the group-std one times sqrt(mu(1-mu)), over a constant."""
    step = Step(seed, num_groups, k)
    mu_N = step.bins_N.double() / k
    grouped_N = group_advantages(step.rewards_N, step.ids_N, eps=0.0)
    weighted_N = grouped_N * (mu_N * (1 - mu_N)).sqrt()
    batch_std = step.rewards_N.std(correction=0)
    constants = {"lite_ppo": batch_std if batch_std > 0 else 1.0, "dr_grpo": 1.0}
    for name, constant in constants.items():
        algorithm = build(name, k)
        own_N = group_advantages(step.rewards_N, step.ids_N, std=algorithm.advantage_std, eps=0.0)
        own = step.loss(algorithm, own_N, step.logprobs_T)
        family = step.loss(algorithm, weighted_N / constant, step.logprobs_T)
        torch.testing.assert_close(own, family, rtol=1e-10, atol=1e-13)


@given(**STEPS)
@settings(max_examples=40, deadline=None)
def test_daro_equals_a_plain_token_sum_with_scaled_advantages(seed, num_groups, k):
    """Homogeneity: moving w_k / N_k into the advantage changes neither the value nor the gradient."""
    step, daro = Step(seed, num_groups, k), trained_daro(k)
    advantages_N = daro.advantages(step.rewards_N, step.ids_N)
    counts = step.totals.tokens_per_bin.double()
    scale = torch.where(counts > 0, daro.weights / counts.clamp(min=1), 0.0)
    scale[0] = scale[-1] = 0.0
    one, other = (step.logprobs_T.clone().requires_grad_() for _ in range(2))
    step.loss(daro, advantages_N, one).backward()
    plain = step.loss_sums(advantages_N * scale[step.bins_N], other).sum()
    plain.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(step.loss(daro, advantages_N, step.logprobs_T), plain.detach(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
@given(parts=st.integers(1, 5), **STEPS)
@settings(max_examples=20, deadline=None)
def test_split_and_order_do_not_matter(name, parts, seed, num_groups, k):
    """Micro-batches in any order, with totals added up from the parts, give the loss of the whole."""
    step = Step(seed, num_groups, k)
    algorithm = somewhere(name, k)
    advantages_N = algorithm.advantages(step.rewards_N, step.ids_N)
    sums_N = step.loss_sums(advantages_N, step.logprobs_T)
    order = torch.randperm(len(sums_N), generator=torch.Generator().manual_seed(seed))
    splits = [order[p::parts] for p in range(parts)]
    of_parts = [StepTotals.of(step.bins_N[part], step.lengths_N[part], k) for part in splits]
    totals = StepTotals.from_vector(sum(t.vector() for t in of_parts))
    loss, bin_loss = 0.0, torch.zeros(k + 1, dtype=torch.float64)
    for part in splits:
        coefficients = algorithm.coefficients(step.parts(advantages_N, part), totals)
        loss += (coefficients * sums_N[part]).sum().item()
        bin_loss += bin_sums(sums_N[part], step.bins_N[part], k)
    assert loss == pytest.approx(step.loss(algorithm, advantages_N, step.logprobs_T).item(), rel=1e-10, abs=1e-13)
    torch.testing.assert_close(bin_loss, bin_sums(sums_N, step.bins_N, k), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dapo", "daro"])
def test_denominator_of_a_micro_batch_would_inflate_the_loss_by_their_number(name):
    """The bug a peer shipped: N_k of the micro-batch. Identical micro-batches show the factor exactly."""
    bins_N, lengths_N = torch.tensor([1, 1, 2, 2] * 3), torch.tensor([2, 3, 1, 4] * 3)
    sums_N = torch.tensor([0.5, -1.0, 2.0, 0.25] * 3, dtype=torch.float64)
    algorithm, totals = build(name, 4), StepTotals.of(bins_N, lengths_N, 4)
    whole = (algorithm.bin_coefficients(bins_N, lengths_N, totals) * sums_N).sum()
    right = wrong = 0.0
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        local = StepTotals.of(bins_N[part], lengths_N[part], 4)
        right += (algorithm.bin_coefficients(bins_N[part], lengths_N[part], totals) * sums_N[part]).sum().item()
        wrong += (algorithm.bin_coefficients(bins_N[part], lengths_N[part], local) * sums_N[part]).sum().item()
    assert whole.item() != 0.0
    assert right == pytest.approx(whole.item(), rel=1e-12)
    assert wrong == pytest.approx(3 * whole.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dapo", "daro"])
def test_what_a_subclass_makes_of_bin_and_length_is_trained(name):
    class Doubled(ALGORITHMS[name]):
        def bin_coefficients(self, bins_N, lengths_N, totals):
            return 2 * super().bin_coefficients(bins_N, lengths_N, totals)

    bins_N, lengths_N = torch.tensor([1, 1]), torch.tensor([2, 3])
    samples, totals = Samples(bins_N, lengths_N, torch.tensor([1.0, -1.0])), StepTotals.of(bins_N, lengths_N, 2)
    one, two = (kind(rollouts_per_prompt=2, max_response_tokens=LONGEST) for kind in (ALGORITHMS[name], Doubled))
    assert two.coefficients(samples, totals).tolist() == (2 * one.coefficients(samples, totals)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_tokens_give_finite_coefficients(name):
    bins_N, lengths_N = torch.tensor([1, 1, 0, 0]), torch.zeros(4, dtype=torch.long)
    algorithm, totals = build(name, 2), StepTotals.of(bins_N, lengths_N, 2)
    samples = Samples(bins_N, lengths_N, torch.tensor([1.0, -1.0, 0.0, 0.0]), torch.zeros(4, 2, dtype=torch.long))
    assert algorithm.coefficients(samples, totals).tolist() == [0.0] * 4
    assert algorithm.regularizer_coefficient(totals) == 0.0
    assert algorithm.extra_loss(totals) == 0.0
    one_token = StepTotals(torch.tensor([[0], [1], [0]]), torch.tensor([0, 1, 0]))
    assert algorithm.regularizer_coefficient(one_token) == 1.0
    empty = torch.empty(0, dtype=torch.long)
    nothing = Samples(empty, empty, torch.empty(0), torch.empty(0, 2, dtype=torch.long))
    assert algorithm.coefficients(nothing, totals).shape == (0,)
    assert algorithm.coefficients(nothing, StepTotals.of(empty, empty, 2)).shape == (0,)


def test_totals_survive_the_way_through_one_vector():
    totals = StepTotals.of(torch.tensor([1, 2, 1]), torch.tensor([3, 5, 0]), 2)
    vector = totals.vector()
    assert vector.tolist() == [0, 3, 5, 0, 2, 1] and vector.dtype == torch.int64
    back = StepTotals.from_vector(vector.double())
    assert back.tokens_per_bin.tolist() == [0, 3, 5] and back.tokens_per_bin.dtype == torch.int64
    assert (back.num_rollouts, back.tokens, back.mixed_tokens) == (3, 8, 3)
    assert back.rollouts_per_bin.tolist() == [0, 2, 1] and back.pass_rate == pytest.approx((2 * 1 + 1 * 2) / 2 / 3)


def test_daro_reports_its_barrier_and_options_reach_the_weights():
    daro = trained_daro(4, scale="mean", clamp=(0.5, 1.3))
    totals = StepTotals(torch.tensor([[3], [2], [0], [5], [1]]), torch.tensor([4, 4, 0, 4, 4]))
    expected = -(math.log(daro.weights[1]) + math.log(daro.weights[3])) / 2
    assert daro.extra_loss(totals) == pytest.approx(expected, rel=1e-12)
    assert daro.regularizer_coefficient(totals) == 1 / 11
    assert daro.clamped == daro.difficulty.clamped > 0
    assert daro.difficulty.scale == "mean"


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trip_and_foreign_states(name):
    saved = somewhere(name, 4)
    fresh = build(name, 4)
    fresh.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert fresh.state_dict() == saved.state_dict()
    other = "grpo" if name != "grpo" else "daro"
    with pytest.raises(CheckpointError, match=f"'{other}'.*'{name}'"):
        fresh.load_state_dict(build(other, 4).state_dict())


def test_other_k_and_torn_states_are_refused():
    with pytest.raises(CheckpointError, match="rollouts_per_prompt"):
        build("daro", 4).load_state_dict(build("daro", 8).state_dict())
    with pytest.raises(CheckpointError, match="rollouts_per_prompt"):
        build("daro", 4).load_state_dict({"algorithm": "daro"})


@pytest.mark.parametrize("name", NAMES)
def test_options_are_checked_by_every_algorithm(name):
    with pytest.raises(AlgorithmError, match="learning_rat"):
        build(name, 4, learning_rat=0.1)
    with pytest.raises(AlgorithmError, match="rollouts_per_prompt"):
        build(name, 1)
    with pytest.raises(AlgorithmError, match="max_response_tokens"):
        make_algorithm(configured(name), rollouts_per_prompt=4, max_response_tokens=0)
    assert make_algorithm(configured(name), rollouts_per_prompt=2, max_response_tokens=1).max_response_tokens == 1


def test_std_override_and_rloo():
    rewards_N, ids_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    assert build("grpo", 4, std="sample").advantages(rewards_N, ids_N)[0].item() == pytest.approx(1.5, rel=1e-5)
    assert build("rloo", 4).advantages(rewards_N, ids_N)[0].item() == 1.0
    with pytest.raises(AlgorithmError, match=r"std: got 'sample'"):
        build("rloo", 4, std="sample")
    assert build("rloo", 4, std="none").remarks == build("lite_ppo", 4).remarks == ()
    for name in ("dr_grpo", "lite_ppo"):
        (remark,) = build(name, 4, std="sample").remarks
        assert name in remark


@pytest.mark.parametrize("name", NAMES)
def test_group_filter_takes_the_place_of_the_own_one(name):
    own = {1, 2, 3} if name in ("dapo", "daro") else {0, 1, 2, 3, 4}
    assert build(name, 4).kept_bins == own
    assert build(name, 4, group_filter="none").kept_bins == {0, 1, 2, 3, 4}
    assert build(name, 4, group_filter="pass_rate").kept_bins == {1, 2, 3}
    for kind in ("auto", "none", "pass_rate"):
        assert build(name, 4, group_filter=kind).keep(torch.tensor([0, 2])).dtype == torch.bool


class Unnamed(Grpo):
    """An algorithm that somebody brings along and forgot to name."""

    name = None


def test_an_algorithm_of_ones_own_is_imported_by_its_path():
    assert type(build("megatron_daro.algo.weighting:Dapo", 4)) is ALGORITHMS["dapo"]
    for wrong, said in {
        "gpro": "got 'gpro'",
        "no.such.module:Toy": "no.such.module:Toy.*PYTHONPATH",
        "megatron_daro.algo.weighting:Toy": "weighting:Toy",
        "megatron_daro.algo.weighting:StepTotals": "subclass of Algorithm",
        f"{__name__}:Unnamed": "`name`",
    }.items():
        with pytest.raises(AlgorithmError, match=said):
            build(wrong, 4)


LEARN = {"daro", "ha_dw"}


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - LEARN))
def test_the_others_have_no_weights_and_ignore_updates(name):
    algorithm = build(name, 4)
    before = algorithm.state_dict()
    totals = StepTotals.of(torch.ones(4, dtype=torch.int64), torch.ones(4), 4)
    algorithm.learn(StepStats.of_bins(totals, torch.ones(5), torch.ones(5)))
    assert algorithm.weights is None
    assert algorithm.clamped == 0
    assert algorithm.state_dict() == before
