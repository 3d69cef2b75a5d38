"""The token objective: corrections, regularizers, what is reported, masks, and context-parallel parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_daro.algo.objective import ObjectiveSettings, TokenObjective, kl_terms, token_objective
from megatron_daro.errors import AlgorithmError

NAN = float("nan")
EVERYTHING = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "dual_clip": 3.0}
CORRECTIONS = [
    {"correction": "none"},
    {"correction": "tis", "correction_cap": 1.1},
    {"correction": "tis", "correction_cap": 1.1, "correction_level": "sequence"},
    {"correction": "mis", "correction_low": 0.9, "correction_high": 1.1},
    {"correction": "mis", "correction_low": 0.9, "correction_high": 1.1, "correction_level": "sequence"},
    {"trust_region": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    {"trust_region": "gspo", "correction": "tis", "correction_cap": 1.1, "correction_level": "sequence"},
    {"trust_region": "cispo", "clip_high": 0.1, "dual_clip": None},
    {"trust_region": "reinforce", "dual_clip": None},
    {"trust_region": "mirror", "mirror_tau": 0.3, "dual_clip": None},
    {"trust_region": "sapo", "sapo_positive": 2.0, "sapo_negative": 3.0, "dual_clip": None},
]


class Tokens:
    """Random packed tokens of three samples; some are masked."""

    def __init__(self, seed: int = 0, size: int = 24) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise() -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.logprobs = noise() - 3
        self.old = self.logprobs + 0.3 * noise()
        self.rollout = self.old + 0.2 * noise()
        self.ref = self.logprobs + 0.5 * noise()
        self.entropy = noise().abs()
        self.sample = torch.arange(size) * 3 // size
        self.advantages = torch.tensor([1.5, -0.5, -1.0], dtype=torch.float64)[self.sample]
        self.mask = torch.rand(size, generator=generator) < 0.8

    def objective(self, settings: ObjectiveSettings, part=slice(None), *, logprobs=None, **options) -> TokenObjective:
        """The objective of some of the tokens."""
        logprobs = self.logprobs if logprobs is None else logprobs
        columns = {
            "old_logprobs_T": self.old[part],
            "rollout_logprobs_T": self.rollout[part],
            "ref_logprobs_T": self.ref[part],
            "advantages_T": self.advantages[part],
            "mask_T": self.mask[part],
            "sample_T": self.sample[part],
            "num_samples": 3,
        }
        return token_objective(logprobs[part], self.entropy[part], settings=settings, **{**columns, **options})


def test_by_hand():
    """Two samples of two tokens; log ratios 0, ln 2, 0, ln 0.5; engine ratios 1, 3, 1, 1."""
    logprobs_T = torch.tensor([-1.0, -1.0, -2.0, -2.0], dtype=torch.float64, requires_grad=True)
    old_T = logprobs_T.detach() - torch.tensor([1.0, 2.0, 1.0, 0.5]).double().log()
    result = token_objective(
        logprobs_T,
        torch.tensor([1.0, 2.0, 3.0, 4.0]).double(),
        old_logprobs_T=old_T,
        rollout_logprobs_T=old_T - torch.tensor([1.0, 3.0, 1.0, 1.0]).double().log(),
        ref_logprobs_T=logprobs_T.detach() - 0.5,
        advantages_T=torch.tensor([1.0, 1.0, -1.0, -1.0]).double(),
        mask_T=torch.tensor([1, 1, 1, 1]),
        sample_T=torch.tensor([0, 0, 1, 1]),
        num_samples=2,
        settings=ObjectiveSettings(
            correction="tis", correction_cap=2.0, kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01
        ),
    )
    assert result.loss_T.tolist() == pytest.approx([-1.0, -2.56, 1.0, 0.8])
    assert result.sample_losses_M.tolist() == pytest.approx([-3.56, 1.8])
    assert result.sample_sums_M["abs_loss_sums"].tolist() == pytest.approx([3.56, 1.8])
    assert result.regularizer_T.tolist() == pytest.approx([0.0025, -0.0075, -0.0175, -0.0275])
    sums = {name: value.item() for name, value in result.sums.items()}
    mismatch_kl = 3 - 1 - math.log(3)
    assert sums == pytest.approx(
        {
            "tokens": 4,
            "ratio": 4.5,
            "clip_high": 1,
            "clip_low": 1,
            "dual_clip": 0,
            "entropy": 10,
            "kl_ref": 0.5,
            "logprob_abs_diff": math.log(3),
            "mismatch_kl": mismatch_kl,
            "corrected": 1,
        }
    )
    assert result.maxima["logprob_abs_diff"].item() == pytest.approx(math.log(3))
    result.loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0])


def literal_loss(tokens: Tokens, options: dict, logprobs: torch.Tensor) -> torch.Tensor:
    """The objective sample by sample, from the formulas, with gradients through everything (gspo's mean included)."""
    total = torch.zeros((), dtype=torch.float64)
    kind, region, level = (
        options.get("correction", "none"),
        options.get("trust_region", "clip"),
        options.get("correction_level", "token"),
    )
    low, high = options.get("clip_low", 0.2), options.get("clip_high", 0.28)
    for m in range(3):
        own = (tokens.sample == m) & tokens.mask
        difference = logprobs[own] - tokens.old[own]
        ratio = difference.mean().exp().expand(int(own.sum())) if region == "gspo" else difference.exp()
        engine = tokens.old[own] - tokens.rollout[own]
        engine = (engine.mean().expand_as(engine) if level == "sequence" else engine).exp()
        weight = torch.ones_like(engine)
        if kind == "tis":
            weight = torch.minimum(engine, torch.tensor(options["correction_cap"], dtype=torch.float64))
        if kind == "mis":
            keep = (engine >= options["correction_low"]) & (engine <= options["correction_high"])
            weight = engine * keep
        for t, advantage in enumerate(tokens.advantages[own]):
            if region == "cispo":  # as printed: the log-prob itself, times a constant
                one = two = -min(float(ratio[t].detach()), 1 + high) * advantage * logprobs[own][t]
            elif region == "mirror":
                one = two = -(advantage - options["mirror_tau"] * difference.detach().sum()) * logprobs[own][t]
            elif region == "reinforce":
                one = two = -advantage * logprobs[own][t]
            elif region == "sapo":
                tau = options["sapo_positive"] if advantage > 0 else options["sapo_negative"]
                one = two = -4 / tau / (1 + torch.exp(-tau * (ratio[t] - 1))) * advantage
            else:
                one, two = -ratio[t] * advantage, -ratio[t].clamp(1 - low, 1 + high) * advantage
            total = total + weight[t] * torch.maximum(one, two)
    return total


@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_value_and_gradient_equal_the_literal_formula(options, seed):
    tokens = Tokens(seed)
    one, other = (tokens.logprobs.clone().requires_grad_() for _ in range(2))
    loss = tokens.objective(ObjectiveSettings(**options), logprobs=one).loss_T.sum()
    expected = literal_loss(tokens, options, other)
    if options.get("trust_region") not in (
        "cispo",
        "sapo",
        "reinforce",
        "mirror",
    ):  # their values are shifted, not their gradients
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_corrections_change_something_here(options):
    """The oracle above would pass on settings that never bite."""
    result = Tokens(1).objective(ObjectiveSettings(**options))
    assert (result.sums["corrected"].item() > 0) == (options.get("correction", "none") != "none")
    plain = Tokens(1).objective(ObjectiveSettings())
    assert torch.equal(result.loss_T, plain.loss_T) == (options == {"correction": "none"})


@pytest.mark.parametrize("region", ["clip", "gspo", "cispo", "sapo", "reinforce"])
def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_gradient_flows(region):
    tokens = Tokens(2)
    logprobs = tokens.logprobs.clone().requires_grad_()
    settings_ = ObjectiveSettings(trust_region=region)
    result = tokens.objective(settings_, logprobs=logprobs, old_logprobs_T=None)
    assert torch.equal(result.loss_T.detach(), torch.where(tokens.mask, -tokens.advantages, 0))
    assert result.sums["ratio"].item() == result.sums["tokens"].item() == tokens.mask.sum().item()
    result.loss_T.sum().backward()
    assert torch.equal(logprobs.grad, torch.where(tokens.mask, -tokens.advantages, 0))


@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_masked_nan_reaches_nothing(options):
    """Every column, the sample ids included, holds rubbish where the mask is not set."""
    clean, dirty = Tokens(3), Tokens(3)
    for name in ("logprobs", "old", "rollout", "ref", "entropy", "advantages"):
        setattr(dirty, name, torch.where(dirty.mask, getattr(dirty, name), NAN))
    dirty.sample = torch.where(dirty.mask, dirty.sample, -99)
    results, gradients = [], []
    for tokens in (clean, dirty):
        logprobs = tokens.logprobs.clone().requires_grad_()
        tokens.entropy = tokens.entropy.clone().requires_grad_()
        result = tokens.objective(ObjectiveSettings(**{**EVERYTHING, **options}), logprobs=logprobs)
        (result.sample_losses_M.sum() + result.regularizer_T.sum()).backward()
        results.append(result)
        gradients.append((logprobs.grad, tokens.entropy.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)
    for field in ("loss_T", "regularizer_T", "sample_losses_M"):
        assert torch.equal(getattr(results[0], field), getattr(results[1], field)), field
    assert [r.tolist() for r in results[0].sample_sums_M.values()] == [
        r.tolist() for r in results[1].sample_sums_M.values()
    ]
    assert results[0].sums == results[1].sums
    assert results[0].maxima == results[1].maxima


@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_micro_batches_of_whole_samples_add_up(options):
    tokens = Tokens(4)
    settings_ = ObjectiveSettings(**{**EVERYTHING, **options})
    whole = tokens.objective(settings_)
    parts = [tokens.objective(settings_, tokens.sample == m) for m in range(3)]
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts), value, rtol=1e-12, atol=1e-12)
    assert max(p.maxima["logprob_abs_diff"] for p in parts) == whole.maxima["logprob_abs_diff"]
    torch.testing.assert_close(sum(p.sample_losses_M for p in parts), whole.sample_losses_M, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_context_parallel_parts_add_up_with_a_reduction_without_gradient(options):
    """Two halves of every sample; `sample_reduce` plays the all-reduce with sums noted in a first pass."""
    tokens, settings_ = Tokens(5), ObjectiveSettings(**{**EVERYTHING, **options})
    halves = [torch.arange(24) % 2 == half for half in (0, 1)]
    noted: list[list[torch.Tensor]] = [[], []]
    for rank, half in enumerate(halves):
        tokens.objective(settings_, half, sample_reduce=lambda x, rank=rank: noted[rank].append(x) or x)
    sequences = (options.get("trust_region") == "gspo") + (options.get("correction_level") == "sequence")
    sums = options.get("trust_region") == "mirror"
    assert len(noted[0]) == len(noted[1]) == 2 * sequences + sums
    one, other = (tokens.logprobs.clone().requires_grad_() for _ in range(2))
    whole = tokens.objective(settings_, logprobs=one)
    total = 0
    for half in halves:
        reduced = iter([a + b for a, b in zip(*noted, strict=True)])
        total = (
            total
            + tokens.objective(
                settings_, half, logprobs=other, sample_reduce=lambda _, reduced=reduced: next(reduced)
            ).sample_losses_M
        )
    torch.testing.assert_close(total, whole.sample_losses_M, rtol=1e-12, atol=1e-12)
    whole.sample_losses_M.sum().backward()
    total.sum().backward()
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [torch.zeros(24, dtype=torch.bool), torch.zeros(24, dtype=torch.uint8)])
@pytest.mark.parametrize("options", CORRECTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_nothing_to_train_is_zero_with_a_gradient(options, mask):
    tokens = Tokens(6)
    tokens.mask = mask
    logprobs = tokens.logprobs.clone().requires_grad_()
    result = tokens.objective(ObjectiveSettings(**{**EVERYTHING, **options}), logprobs=logprobs)
    result.sample_losses_M.sum().backward()
    assert torch.equal(logprobs.grad, torch.zeros(24).double())
    assert all(value.item() == 0 for value in (*result.sums.values(), *result.maxima.values()))


def test_an_empty_micro_batch():
    empty = torch.empty(0, requires_grad=True)
    result = token_objective(
        empty,
        None,
        old_logprobs_T=None,
        rollout_logprobs_T=empty.detach(),
        ref_logprobs_T=None,
        advantages_T=empty.detach(),
        mask_T=empty.detach().bool(),
        sample_T=empty.detach().long(),
        num_samples=0,
        settings=ObjectiveSettings(trust_region="gspo"),
    )
    assert result.sample_losses_M.shape == (0,)
    assert result.maxima["logprob_abs_diff"].item() == 0.0


def test_reports_only_what_was_measured_and_carries_no_gradient():
    tokens = Tokens(7)
    logprobs = tokens.logprobs.clone().requires_grad_()
    bare = tokens.objective(ObjectiveSettings(), logprobs=logprobs, rollout_logprobs_T=None, ref_logprobs_T=None)
    assert set(bare.sums) == {"tokens", "ratio", "clip_high", "clip_low", "dual_clip", "entropy"}
    assert bare.maxima == {}
    full = tokens.objective(ObjectiveSettings(**EVERYTHING), logprobs=logprobs)
    assert set(full.sums) - set(bare.sums) == {"kl_ref", "logprob_abs_diff", "mismatch_kl", "corrected"}
    for value in (*full.sums.values(), *full.maxima.values(), *full.sample_sums_M.values()):
        assert value.dtype == torch.float64
        assert not value.requires_grad


def test_where_the_old_policy_is_the_engines_the_current_one_is_told_from_it():
    tokens = Tokens()
    tokens.old = tokens.rollout
    plain, told = (tokens.objective(ObjectiveSettings(old_is_rollout=own)) for own in (False, True))
    assert torch.equal(plain.loss_T, told.loss_T) and plain.sums["logprob_abs_diff"] == 0
    apart = (tokens.logprobs - tokens.rollout)[tokens.mask].abs()
    assert told.sums["logprob_abs_diff"].item() == pytest.approx(apart.sum().item())
    assert told.maxima["logprob_abs_diff"].item() == pytest.approx(apart.max().item())


@pytest.mark.parametrize("options", CORRECTIONS)
def test_only_the_policys_own_log_probs_and_entropies_get_a_gradient(options):
    """Whatever the other columns carry: a reference or old log-probs from a pass that forgot `no_grad`."""
    tokens = Tokens()
    columns = [tokens.logprobs, tokens.entropy, tokens.old, tokens.rollout, tokens.ref, tokens.advantages]
    own, entropy, *others = (column.requires_grad_() for column in columns)
    result = tokens.objective(ObjectiveSettings(**EVERYTHING | options), logprobs=own)
    (result.loss_T.sum() + result.regularizer_T.sum()).backward()
    assert own.grad.abs().sum() > 0 and entropy.grad.abs().sum() > 0
    assert [column.grad for column in others] == [None] * 4
    reported = [*result.sample_sums_M.values(), *result.sums.values(), *result.maxima.values()]
    assert not any(values.requires_grad for values in reported)


def test_kl_estimators_by_hand_and_their_gradients():
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.8], dtype=torch.float64)
    d = [0.5, -0.2]
    expected = {
        "k1": (d, [1.0, 1.0]),
        "k2": ([x * x / 2 for x in d], d),
        "k3": ([math.exp(-x) - 1 + x for x in d], [1 - math.exp(-x) for x in d]),
    }
    for estimator, (values, slopes) in expected.items():
        terms = kl_terms(logprobs, ref, estimator)
        (gradient,) = torch.autograd.grad(terms.sum(), logprobs)
        assert terms.tolist() == pytest.approx(values)
        assert gradient.tolist() == pytest.approx(slopes)


def test_kl_estimators_agree_with_the_kl_of_two_distributions():
    """Expectation over the policy's own distribution, exactly: k1 and k3 give the KL; k2's gradient is the KL's."""
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.3, 0.1], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    kl = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (policy.detach().exp() * kl_terms(policy, reference, estimator)).sum()
        torch.testing.assert_close(mean.detach(), kl.detach(), rtol=1e-12, atol=1e-12)
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    k2 = (policy.detach().exp() * kl_terms(policy, reference, "k2")).sum()
    (gradient,) = torch.autograd.grad(k2, logits, retain_graph=True)
    torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-12)
    assert torch.equal(kl_terms(policy, policy.detach(), "k3"), torch.zeros(3).double())


@given(distance=st.one_of(st.floats(-1e4, 1e4), st.floats(-21, -19), st.floats(19, 21)))
@example(distance=-19.477433482356524)
@settings(deadline=None)
def test_k3_pulls_towards_the_reference_however_far_it_is(distance):
    """Finite, never negative, and its slope has the sign of the distance; exact up to 20, bounded beyond."""
    logprobs = torch.tensor([distance], dtype=torch.float64, requires_grad=True)
    term = kl_terms(logprobs, torch.zeros(1, dtype=torch.float64), "k3")
    (slope,) = torch.autograd.grad(term.sum(), logprobs)
    assert torch.isfinite(term).all() and torch.isfinite(slope).all() and term.item() >= 0
    assert slope.item() == pytest.approx(1 - math.exp(min(-distance, 20)), rel=1e-12, abs=1e-8)
    assert distance == 0 or slope.item() * distance >= 0
    if distance > -20:
        assert term.item() == pytest.approx(math.exp(-distance) - 1 + distance, rel=1e-9, abs=1e-9)


def test_k3_is_continuous_where_its_tangent_begins():
    near, far = (kl_terms(torch.tensor([-x]).double(), torch.zeros(1), "k3").item() for x in (20 - 1e-9, 20 + 1e-9))
    assert near == pytest.approx(far, rel=1e-8)


@pytest.mark.parametrize(
    ("options", "missing", "field"),
    [
        ({"correction": "tis"}, {"rollout_logprobs_T": None}, "rollout_logprobs_T"),
        ({"correction": "mis"}, {"rollout_logprobs_T": None}, "rollout_logprobs_T"),
        ({"kl_coefficient": 0.1}, {"ref_logprobs_T": None}, "ref_logprobs_T"),
        ({}, {"mask_T": torch.ones(3)}, "mask_T"),
        ({}, {"old_logprobs_T": torch.ones(24, 1)}, "old_logprobs_T"),
    ],
)
def test_refuses_missing_or_misshapen_columns(options, missing, field):
    with pytest.raises(AlgorithmError, match=f"^{field}"):
        Tokens().objective(ObjectiveSettings(**options), **missing)


def test_entropy_bonus_needs_entropies():
    tokens = Tokens()
    tokens.entropy = torch.zeros(24)
    columns = {"old_logprobs_T": None, "rollout_logprobs_T": None, "ref_logprobs_T": None, "num_samples": 3}
    columns |= {"advantages_T": tokens.advantages, "mask_T": tokens.mask, "sample_T": tokens.sample}
    chosen = ObjectiveSettings(entropy_coefficient=0.01)
    with pytest.raises(AlgorithmError, match="entropy_T"):
        token_objective(tokens.logprobs, None, settings=chosen, **columns)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"correction": "is"}, "correction"),
        ({"correction_cap": 0.0}, "correction_cap"),
        ({"correction": "mis", "correction_low": 1.2}, "correction_low"),
        ({"correction": "mis", "correction_low": -0.1}, "correction_low"),
        ({"correction": "mis", "correction_high": 0.9}, "correction_low, correction_high"),
        ({"correction_level": "batch"}, "correction_level"),
    ],
)
def test_refuses_settings_out_of_range(options, field):
    with pytest.raises(AlgorithmError, match=f"^{field}"):
        ObjectiveSettings(**options)


@pytest.mark.parametrize(("coefficient", "has_gradient"), [(0.0, False), (0.01, True)])
def test_without_a_coefficient_nothing_goes_back_through_the_entropy(coefficient, has_gradient):
    """Zeros would cost as much as a gradient: what computes the entropy takes the dearer branch for them."""
    tokens = Tokens()
    tokens.entropy = tokens.entropy.clone().requires_grad_()
    logprobs = tokens.logprobs.clone().requires_grad_()
    objective = tokens.objective(ObjectiveSettings(entropy_coefficient=coefficient), logprobs=logprobs)
    (objective.sample_losses_M.sum() + objective.regularizer_T.sum()).backward()
    assert (tokens.entropy.grad is not None) is has_gradient
    assert logprobs.grad is not None and bool(logprobs.grad.any())
