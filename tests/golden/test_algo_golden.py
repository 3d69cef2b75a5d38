"""Regression lock of the losses: changing one of these numbers changes training.

One fixed step of four groups (K = 4) through the package as the actor uses it: bins, advantages, token objective,
coefficients, weights. The step is made of small fractions, so no random generator is involved. The losses were checked
against the slow reference of tests/unit/algo when they were written down. Tolerance 1e-12 relative: exp() may differ in
the last digit between maths libraries.
"""

from __future__ import annotations

import pytest
import torch
from lab_names import configured

from megatron_daro.algo.difficulty import bin_sums, pass_rate_bins
from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.weighting import ALGORITHMS, Samples, StepTotals, make_algorithm
from megatron_daro.config import DaroSection

K = 4
CORRECT_N = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
IDS_N = torch.arange(4).repeat_interleave(4)
LENGTHS_N = torch.tensor([2, 3, 4, 5, 1, 6, 2, 3, 4, 4, 2, 7, 1, 2, 3, 1])
T_ = int(LENGTHS_N.sum())
STEPS_T = torch.arange(T_, dtype=torch.float64)
LOGPROBS_T = -(STEPS_T % 7 + 1) / 8
OLD_T = LOGPROBS_T + (STEPS_T % 5 - 2) / 8
ROLLOUT_T = OLD_T + (STEPS_T % 3 - 1) / 16

# policy loss, squared norm of the gradient by the log-probs, for weights of 1
GOLDEN = {
    "dapo": (0.17279785364451483, 0.021636697581958693),
    "daro": (0.4224750234022461, 0.18219912808355926),
    "dr_grpo": (0.02407188708579029, 0.0004921216359558909),
    "grpo": (0.1486061541342828, 0.016002501531616652),
    "grpo_sequence": (-0.007435481656979576, 0.013117775683881226),
    "lite_ppo": (0.12728978803418756, 0.01376066145998336),
    "rloo": (0.08216537458616416, 0.0057336326282676035),
    "dgpo": (0.19478636297563445, 0.02478558820017052),
    "f_grpo": (0.054941183086072445, 0.0031914125643448706),
    "fade": (0.035462535790402976, 0.0013154545190184692),
    "ha_dw": (0.10802531188679376, 0.032401185204411154),
    "kimi": (0.21718749999999998, 0.036461181640625),
    "lambda_grpo": (0.14860615413428271, 0.01600250153161665),
    "maxrl": (0.13317344143062965, 0.0158226179945634),
    "mgpo": (0.12539744171434425, 0.01314628983595152),
}
SURROGATES = {"kimi": ObjectiveSettings(trust_region="mirror", mirror_tau=0.1)}
GOLDEN_WEIGHTS = {
    ("log", "abs"): [1.0, 1.6461892613701772, 1.6467179777714358, 1.6400571981929761, 1.0],
    ("log", "signed"): [1.0, 1.6461892613701772, 1.6498185300561814, 1.6400571981929761, 1.0],
    ("log", "token"): [1.0, 1.4173753675505183, 1.0246430493958483, 0.9401226883560273, 1.0],
    ("linear", "abs"): [1.0, 1.4925999817194588, 1.4930162147543649, 1.4883432294421948, 1.0],
    ("linear", "signed"): [1.0, 1.4925999817194588, 1.4957788066359423, 1.4883432294421948, 1.0],
    ("linear", "token"): [1.0, 1.383536148805822, 1.0332573939124758, 0.956349695399515, 1.0],
}
GOLDEN_SUMS = {
    "none": {
        "loss": 0.17279785364451483,
        "tokens": 50.0,
        "ratio": 50.78471555410568,
        "clip_high": 5.0,
        "clip_low": 4.0,
        "dual_clip": 0.0,
        "corrected": 0.0,
        "logprob_abs_diff": 2.0625,
        "mismatch_kl": 0.06451480661922293,
        "entropy": 24.625,
        "kl_ref": 1.7012708343870753,
    },
    "tis": {
        "loss": 0.1743587946126473,
        "tokens": 50.0,
        "ratio": 50.78471555410568,
        "clip_high": 5.0,
        "clip_low": 4.0,
        "dual_clip": 0.0,
        "corrected": 17.0,
        "logprob_abs_diff": 2.0625,
        "mismatch_kl": 0.06451480661922293,
        "entropy": 24.625,
        "kl_ref": 1.7012708343870753,
    },
    "mis": {
        "loss": 0.1452888372905955,
        "tokens": 50.0,
        "ratio": 50.78471555410568,
        "clip_high": 5.0,
        "clip_low": 4.0,
        "dual_clip": 0.0,
        "corrected": 16.0,
        "logprob_abs_diff": 2.0625,
        "mismatch_kl": 0.06451480661922293,
        "entropy": 24.625,
        "kl_ref": 1.7012708343870753,
    },
    "gspo": {
        "loss": 0.16808974410114874,
        "tokens": 50.0,
        "ratio": 50.16161906269764,
        "clip_high": 0.0,
        "clip_low": 0.0,
        "dual_clip": 0.0,
        "corrected": 0.0,
        "logprob_abs_diff": 2.0625,
        "mismatch_kl": 0.06451480661922293,
        "entropy": 24.625,
        "kl_ref": 1.7012708343870753,
    },
}


def run_step(algorithm, settings: ObjectiveSettings | None = None):
    """(loss, gradient [T], sums per bin, |sums| per bin, totals, objective) of the fixed step."""
    bins_N = pass_rate_bins(CORRECT_N, IDS_N, K)
    totals = StepTotals.of(bins_N, LENGTHS_N, K)
    sample_T = torch.repeat_interleave(torch.arange(16), LENGTHS_N)
    logprobs_T = LOGPROBS_T.clone().requires_grad_()
    advantages_N = algorithm.advantages(CORRECT_N.double(), IDS_N)
    groups_NK = LENGTHS_N.reshape(-1, K).repeat_interleave(K, dim=0)
    objective = token_objective(
        logprobs_T,
        -LOGPROBS_T,
        old_logprobs_T=OLD_T,
        rollout_logprobs_T=ROLLOUT_T,
        ref_logprobs_T=LOGPROBS_T + 0.25,
        advantages_T=advantages_N[sample_T],
        mask_T=torch.ones(T_, dtype=torch.bool),
        sample_T=sample_T,
        num_samples=16,
        settings=settings or ObjectiveSettings(),
    )
    samples = Samples(bins_N, LENGTHS_N, advantages_N, groups_NK)
    loss = (algorithm.coefficients(samples, totals) * objective.sample_losses_M).sum()
    loss.backward()
    sums = bin_sums(objective.sample_losses_M.detach(), bins_N, K)
    return (
        loss.item(),
        logprobs_T.grad,
        sums,
        bin_sums(objective.sample_sums_M["abs_loss_sums"], bins_N, K),
        totals,
        objective,
    )


def build(name: str, **options):
    return make_algorithm(configured(name), rollouts_per_prompt=K, max_response_tokens=8, **options)


@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *GOLDEN}))
def test_loss_and_gradient_norm(name):
    loss, gradient_T, *_ = run_step(build(name), SURROGATES.get(name))
    assert (loss, gradient_T.square().sum().item()) == pytest.approx(GOLDEN[name], rel=1e-12)


@pytest.mark.parametrize("magnitude", ["abs", "signed", "token"])
@pytest.mark.parametrize("parameter", ["log", "linear"])
def test_weights_after_five_updates(parameter, magnitude):
    daro = build("daro", parameter=parameter, magnitude=magnitude, learning_rate=0.1)
    for _ in range(5):
        _, _, sums, abs_sums, totals, _ = run_step(daro)
        daro.difficulty.update(sums, totals.tokens_per_bin, abs_sums)
    assert daro.weights.tolist() == pytest.approx(GOLDEN_WEIGHTS[parameter, magnitude], rel=1e-12)


@pytest.mark.parametrize("correction", ["none", "tis", "mis", "gspo"])
def test_reported_sums(correction):
    which = {"trust_region": "gspo"} if correction == "gspo" else {"correction": correction}
    settings = ObjectiveSettings(**which, correction_cap=1.05, correction_low=0.95, correction_high=1.2)
    loss, *_, objective = run_step(build("dapo"), settings)
    got = {"loss": loss} | {name: value.item() for name, value in objective.sums.items()}
    assert got == pytest.approx(GOLDEN_SUMS[correction], rel=1e-12)


def test_defaults_of_the_product():
    """Each of these is what a run without the option trains with."""
    daro = DaroSection()
    assert (daro.learning_rate, daro.betas, daro.clamp) == (0.01, (0.9, 0.999), (0.1, 10.0))
    assert (daro.parameter, daro.magnitude, daro.normalizer, daro.scale) == ("log", "abs", "bin", "sum")
    settings = ObjectiveSettings()
    assert (settings.clip_low, settings.clip_high, settings.dual_clip) == (0.2, 0.28, None)
    assert (settings.kl_coefficient, settings.entropy_coefficient, settings.correction) == (0.0, 0.0, "none")
    assert (settings.correction_cap, settings.correction_low, settings.correction_high) == (2.0, 0.5, 2.0)
    assert (settings.correction_level, settings.kl_estimator) == ("token", "k3")
