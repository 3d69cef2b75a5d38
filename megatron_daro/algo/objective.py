"""The token objective of one micro-batch: surrogate, off-policy correction, KL, entropy, and reported sums.

Log-probs of packed tokens (current, old, rollout, reference) become token losses and sums; the actor multiplies the
sums per sample by the algorithm's coefficients (algorithm.py). Everything reported is a sum or a maximum, never a mean,
so that micro-batches and ranks add up exactly. Values at positions that are not trained have no effect, even if they
are NaN.

Trust regions: PPO's clip (surrogate.py), GSPO (the same clip with the sequence's ratio, corrections.py), CISPO's
clipped weight, SAPO's soft gate, and none at all (REINFORCE); "mirror" is that of kimi. The losses of CISPO, SAPO and
REINFORCE are shifted so that at ratio 1 they are -A, as PPO's is, while the gradients are the papers'; so sums of token
losses mean the same under each. The KL to a reference has three estimators and coefficient 0 by default, as in DAPO and
Dr. GRPO.

Shape letters: T tokens of this micro-batch, including at least the trained ones; M its samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_daro.algo.corrections import (
    Correction,
    CorrectionLevel,
    CorrectionWeights,
    SampleReduce,
    masked_importance_weights,
    rollout_ratio,
    sample_sums,
    sample_totals,
    sequence_log_ratio,
    truncated_importance_weights,
)
from megatron_daro.algo.surrogate import (
    MAX_LOG_RATIO,
    check_clip_range,
    clip_fractions,
    clipped_ratio_loss,
    importance_ratio,
)
from megatron_daro.errors import AlgorithmError

TrustRegion = Literal["clip", "gspo", "cispo", "sapo", "reinforce", "mirror"]
KIMI_TAU = 0.1
"""Chosen here; the paper does not print it."""


def cispo_loss(ratio: Tensor, advantages: Tensor, clip_high: float = 0.28) -> Tensor:
    """Return -sg(min(ratio, 1 + clip_high)) A log pi, shifted: no token loses its gradient, its weight is bounded.

    Args:
        ratio: importance ratios with gradient, any shape. advantages: broadcastable.
        clip_high: 0 or more. There is no lower bound: the paper sets it so low that it never clips.

    Returns:
        Losses, common shape: value -min(ratio, 1 + clip_high) A, whose gradient is that value times d log pi.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    weight = ratio.detach().clamp(max=1 + clip_high)
    # ratio / sg(ratio) is 1 with the gradient of log pi.
    return -weight * advantages * (ratio / ratio.detach())


def reinforce_loss(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return -A log pi, shifted: value -A, and the gradient of the log-prob times -A at every ratio.

    Args:
        ratio: importance ratios with gradient, any shape; only the gradient of the log-probs is taken from them.
            advantages: broadcastable.

    Returns:
        Losses, common shape.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992), with A as the reward less a baseline.
    """
    return -advantages * (ratio / ratio.detach())


def mirror_weights(advantages_T: Tensor, log_ratio_T: Tensor, tau: float) -> Tensor:
    """Return A - tau * log(pi / pi_old), with the sequence's log ratio: the factor of the log-probs' gradient.

    It is minus the derivative with respect to the log ratio of (A - tau * log ratio)^2 / (2 tau), the squared surrogate
    with the group's mean reward in place of tau log Z.

    Args:
        advantages_T: reward less the group's mean, per token. log_ratio_T: the sum of log ratios over each token's
            sequence, detached.

    Source: Kimi k1.5, arXiv 2501.12599, eq. 3.
    """
    return advantages_T - tau * log_ratio_T


def sapo_loss(ratio: Tensor, advantages: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """Return -A (1 + 4/tau (sigmoid(tau (ratio - 1)) - 1/2)), with tau by the sign of A.

    Its derivative with respect to the ratio is -A at ratio 1 and goes smoothly to 0 on both sides, faster for a larger
    tau.

    Args:
        ratio: importance ratios, any shape. advantages: broadcastable.
        positive, negative: tau for A > 0 and for A <= 0, both above 0.

    Returns:
        Losses, common shape.

    Source: SAPO, arXiv 2511.20347.
    """
    # Tensors with the ratio's dtype and device: plain numbers would give fp32.
    temperature = torch.where(advantages > 0, torch.full_like(ratio, positive), torch.full_like(ratio, negative))
    gate = 4 / temperature * (torch.sigmoid(temperature * (ratio - 1)) - 0.5)
    return -advantages * (1 + gate)


def check_temperatures(positive: float, negative: float) -> None:
    """Raise AlgorithmError unless SAPO's temperatures are finite numbers above 0."""
    for name, value in (("sapo_positive", positive), ("sapo_negative", negative)):
        if not 0 < value < float("inf"):
            raise AlgorithmError(f"{name}: got {value}, allowed is a number above 0")


KlEstimator = Literal["k1", "k2", "k3"]
KlMean = Literal["tokens", "rollouts"]


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) per sampled token.

    With d = logprobs - ref_logprobs: k1 is d (unbiased; as a loss its expected gradient is zero), k2 is d^2/2 (its
    gradient is that of the KL), k3 is exp(-d) - 1 + d (unbiased and never negative). Where -d is above 20, k3 continues
    along its tangent: the slope stays at 1 - exp(20), which is finite and still pulls towards the reference.

    Args:
        logprobs: log-probs of the tokens that were sampled from the policy, natural log; gradient flows.
        ref_logprobs: their log-probs under the reference; no gradient flows.
        estimator: "k1", "k2" or "k3".

    Returns:
        Terms, common shape.

    Raises:
        AlgorithmError: unknown estimator.

    Source: J. Schulman, "Approximating KL divergence" (2020); GRPO arXiv 2402.03300 eq. 4 uses k3.
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits: near d = 0 the three terms cancel to d^2/2.
        exponent = -difference
        tangent = torch.where(exponent > MAX_LOG_RATIO, (exponent - MAX_LOG_RATIO) * math.exp(MAX_LOG_RATIO), 0)
        return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + tangent + difference
    raise AlgorithmError(f"estimator: got {estimator!r}, allowed are {', '.join(get_args(KlEstimator))}")


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """Options of the token objective.

    clip_low, clip_high, dual_clip: see `surrogate.clipped_ratio_loss`.
    kl_coefficient, entropy_coefficient: weights of the mean KL and entropy per trained token.
    kl_mean: "tokens" is the mean over tokens; "rollouts" the mean over rollouts of the mean KL of their tokens (the
        caller then passes kl_scales_T).
    reward_kl_coefficient: factor of the KL that the caller subtracts from rewards, with reward_kl_per_token from those
        of each token; neither is read here.
    correction: "none"; "tis" multiplies by the rollout ratio, at most correction_cap; "mis" multiplies by the ratio, or
        by 0 if it is outside [correction_low, correction_high].
    correction_level: what has a rollout ratio, "token" or "sequence".
    trust_region: "clip" is PPO's; "gspo" the same with the sequence's ratio (its clip range is usually near 4e-4);
        "cispo" reads only clip_high; "sapo" reads its temperatures sapo_positive and sapo_negative; "reinforce" has
        none; "mirror" reads mirror_tau, the weight of Kimi k1.5's relative entropy to the old policy.
    old_is_rollout: the old log-probs are the engine's, so the engine's are compared with those of the current policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_mean: KlMean = "tokens"
    reward_kl_coefficient: float = 0.0
    reward_kl_per_token: bool = False
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    correction: Correction = "none"
    correction_cap: float = 2.0
    correction_low: float = 0.5
    correction_high: float = 2.0
    correction_level: CorrectionLevel = "token"
    trust_region: TrustRegion = "clip"
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    mirror_tau: float = KIMI_TAU
    old_is_rollout: bool = False

    def __post_init__(self) -> None:
        check_clip_range(self.clip_low, self.clip_high, self.dual_clip)
        check_temperatures(self.sapo_positive, self.sapo_negative)
        if self.dual_clip is not None and self.trust_region not in ("clip", "gspo"):
            raise AlgorithmError(
                f"dual_clip: got {self.dual_clip} with trust_region {self.trust_region!r}, which does not read it; "
                "allowed is None, or trust_region 'clip' or 'gspo'"
            )
        if self.trust_region == "gspo" and self.correction != "none" and self.correction_level == "token":
            raise AlgorithmError(
                f"correction_level: got 'token' with trust_region 'gspo' and correction {self.correction!r}: tokens of "
                "one sequence would have one ratio and different weights; allowed is 'sequence'"
            )
        choices = {
            "kl_estimator": KlEstimator,
            "kl_mean": KlMean,
            "correction": Correction,
            "correction_level": CorrectionLevel,
            "trust_region": TrustRegion,
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in get_args(allowed):
                names = ", ".join(get_args(allowed))
                raise AlgorithmError(f"{field}: got {getattr(self, field)!r}, allowed are {names}")
        for field in ("kl_coefficient", "reward_kl_coefficient"):
            if not getattr(self, field) >= 0:
                raise AlgorithmError(f"{field}: got {getattr(self, field)}, allowed is 0 or more")
        if not 0 < self.mirror_tau < math.inf:
            raise AlgorithmError(f"mirror_tau: got {self.mirror_tau}, allowed is a number above 0")
        if not self.correction_cap > 0:
            raise AlgorithmError(f"correction_cap: got {self.correction_cap}, allowed is a number above 0")
        if self.correction == "mis" and not 0 <= self.correction_low <= 1 <= self.correction_high:
            raise AlgorithmError(
                f"correction_low, correction_high: got {self.correction_low}, {self.correction_high}, "
                "allowed is 0 <= low <= 1 <= high (a ratio of 1 must stay)"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TokenObjective:
    """Terms per token (0 where the mask is not set), and reported sums.

    loss_T: policy loss, correction included.
    regularizer_T: kl_coefficient * KL (times its scale) - entropy_coefficient * entropy; the caller sums it and
        multiplies by `Algorithm.regularizer_coefficient`.
    sample_losses_M: float64 [M], sum of loss_T per sample, with gradient; the caller multiplies by
        `Algorithm.coefficients`.
    sample_sums_M: float64 [M], detached: sums per sample of |loss_T| and |A|, named as in `algorithm.StepStats.sums`.
    sums: detached float64 0-dim sums over the tokens whose mask is set: "tokens", "ratio", "clip_high", "clip_low",
        "dual_clip", "entropy"; with reference log-probs "kl_ref"; with rollout log-probs "logprob_abs_diff",
        "mismatch_kl", "corrected".
    maxima: with rollout log-probs "logprob_abs_diff".
    """

    loss_T: Tensor
    regularizer_T: Tensor
    sample_losses_M: Tensor
    sample_sums_M: dict[str, Tensor]
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def token_objective(
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    *,
    old_logprobs_T: Tensor | None,
    rollout_logprobs_T: Tensor | None,
    ref_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    sample_T: Tensor,
    num_samples: int,
    settings: ObjectiveSettings,
    kl_scales_T: Tensor | None = None,
    sample_reduce: SampleReduce | None = None,
) -> TokenObjective:
    """Compute everything that a micro-batch contributes, token by token.

    Args:
        logprobs_T: [T], current policy, with gradient.
        entropy_T: [T], or None for zeros (then entropy_coefficient must be 0).
        old_logprobs_T: [T], or None for an on-policy step: the current log-probs, detached, so the ratio is exactly 1.
        rollout_logprobs_T: [T], the engine's; may be None with correction "none".
        ref_logprobs_T: [T]; may be None with kl_coefficient 0.
        advantages_T: [T], each token's own advantage, or its sample's.
        mask_T: [T], true (or 1) where the token is trained.
        sample_T: int64 [T], sample of the token, 0..M-1 (any value where the mask is not set).
        num_samples: M.
        settings: the options.
        kl_scales_T: [T], factor of each token's KL before it is averaged over all tokens; None: 1.
        sample_reduce: sums a float64 [M] tensor over the context-parallel ranks that share these samples; no gradient
            passes through it (see `corrections.sequence_log_ratio`). Called with the trust regions "gspo" and "mirror",
            and with sequence-level corrections.

    Returns:
        A TokenObjective.

    Raises:
        AlgorithmError: shapes differ, or log-probs that the settings need are missing.
    """
    optional = (entropy_T, old_logprobs_T, rollout_logprobs_T, ref_logprobs_T)
    _check_shapes(logprobs_T, *optional, advantages_T, mask_T, sample_T, kl_scales_T)
    _check_needed(settings, entropy_T, rollout_logprobs_T, ref_logprobs_T)
    kept_T = mask_T.bool()
    where = (kept_T, sample_T, num_samples)
    # Select inputs, not outputs: a NaN times 0 is still NaN, in value and in gradient.
    logprobs_T, advantages_T = _select(kept_T, logprobs_T), _select(kept_T, advantages_T.detach())
    entropies_T, old_T, rollout_T, reference_T = (None if x is None else _select(kept_T, x) for x in optional)
    old_T = logprobs_T.detach() if old_T is None else old_T.detach()
    ratio_T = _ratio(settings, logprobs_T, old_T, where, sample_reduce)
    signal_T = advantages_T
    if settings.trust_region == "mirror":
        log_ratio_T = sample_totals((logprobs_T - old_T).detach(), *where, sample_reduce)
        signal_T = mirror_weights(advantages_T, log_ratio_T, settings.mirror_tau)
    loss_T, clipped = _surrogate(settings, ratio_T, signal_T)
    sums = {"tokens": kept_T, "ratio": ratio_T, **clipped}
    maxima: dict[str, Tensor] = {}
    if rollout_T is not None:
        correction = _correction(settings, old_T, rollout_T, where, sample_reduce)
        loss_T = loss_T * correction.weight_T
        own_T = logprobs_T.detach() if settings.old_is_rollout else old_T
        sums |= {"corrected": correction.changed_T, **_mismatch(own_T, rollout_T)}
        maxima["logprob_abs_diff"] = _masked_max(sums["logprob_abs_diff"], kept_T)
    zeros_T = torch.zeros_like(logprobs_T)
    kl_T = zeros_T if reference_T is None else kl_terms(logprobs_T, reference_T, settings.kl_estimator)
    entropies_T = zeros_T if entropies_T is None else entropies_T
    scaled_kl_T = kl_T if kl_scales_T is None else kl_T * _select(kept_T, kl_scales_T)
    sums |= {"entropy": entropies_T} | ({} if reference_T is None else {"kl_ref": kl_T})
    return TokenObjective(
        loss_T=loss_T,
        regularizer_T=_weighted(settings.kl_coefficient, scaled_kl_T)
        - _weighted(settings.entropy_coefficient, entropies_T),
        sample_losses_M=sample_sums(loss_T, *where),
        sample_sums_M={
            "abs_loss_sums": sample_sums(loss_T.detach().abs(), *where),
            "advantage_sums": sample_sums(advantages_T.abs(), *where),
        },
        sums={name: _masked_sum(values_T, kept_T) for name, values_T in sums.items()},
        maxima=maxima,
    )


def _weighted(coefficient: float, term_T: Tensor) -> Tensor:
    """Return a term times its coefficient. With coefficient 0 the term is detached: a zero gradient of the entropy
    would still cost the backward pass of the output layer one more product."""
    return coefficient * (term_T if coefficient else term_T.detach())


def _select(kept_T: Tensor, values_T: Tensor) -> Tensor:
    """Return the values where the mask is set, 0 elsewhere."""
    return torch.where(kept_T, values_T, 0)


def _ratio(
    settings: ObjectiveSettings,
    logprobs_T: Tensor,
    old_T: Tensor,
    where: tuple[Tensor, Tensor, int],
    sample_reduce: SampleReduce | None,
) -> Tensor:
    """Return the importance ratio that the trust region uses: the token's, or its sequence's (gspo)."""
    match settings.trust_region:
        case "clip" | "sapo":
            return importance_ratio(logprobs_T, old_T)
        case "gspo":
            log_ratio_T = sequence_log_ratio(logprobs_T, old_T, *where, sample_reduce)
            return importance_ratio(log_ratio_T, torch.zeros_like(old_T))
        case "cispo" | "mirror" | "reinforce":
            # The factor of the gradient of log pi is bounded without the limit on the ratio, so the gradient flows at
            # every ratio.
            return importance_ratio(logprobs_T, old_T).detach() * (logprobs_T - logprobs_T.detach()).exp()


def _surrogate(settings: ObjectiveSettings, ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses, and masks of the tokens whose gradient was removed or bounded."""
    nowhere_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    unbounded = dict.fromkeys(("clip_high", "clip_low", "dual_clip"), nowhere_T)
    match settings.trust_region:
        case "clip" | "gspo":
            clip = (settings.clip_low, settings.clip_high, settings.dual_clip)
            return clipped_ratio_loss(ratio_T, advantages_T, *clip), clip_fractions(ratio_T, advantages_T, *clip)
        case "cispo":
            above_T = (ratio_T > 1 + settings.clip_high) & (advantages_T != 0)
            return cispo_loss(ratio_T, advantages_T, settings.clip_high), unbounded | {"clip_high": above_T}
        case "sapo":
            return sapo_loss(ratio_T, advantages_T, settings.sapo_positive, settings.sapo_negative), unbounded
        case "reinforce" | "mirror":
            return reinforce_loss(ratio_T, advantages_T), unbounded


def _correction(
    settings: ObjectiveSettings,
    old_T: Tensor,
    rollout_T: Tensor,
    where: tuple[Tensor, Tensor, int],
    sample_reduce: SampleReduce | None,
) -> CorrectionWeights:
    """Return the factor of each token's loss."""
    if settings.correction == "none":
        return CorrectionWeights(torch.ones_like(old_T), torch.zeros_like(old_T, dtype=torch.bool))
    level = settings.correction_level
    ratio_T = rollout_ratio(old_T, rollout_T, *where, level=level, sample_reduce=sample_reduce)
    if settings.correction == "tis":
        return truncated_importance_weights(ratio_T, settings.correction_cap)
    return masked_importance_weights(ratio_T, settings.correction_low, settings.correction_high)


def _mismatch(own_T: Tensor, rollout_T: Tensor) -> dict[str, Tensor]:
    """Return how far the trainer's log-probs are from the engine's; the KL is KL(rollout || trainer), by k3."""
    return {"logprob_abs_diff": (own_T - rollout_T).abs(), "mismatch_kl": kl_terms(rollout_T, own_T, "k3")}


def _masked_sum(values_T: Tensor, kept_T: Tensor) -> Tensor:
    """Return the sum in float64, so that its digits do not depend on the number of micro-batches."""
    return torch.where(kept_T, values_T.detach().to(torch.float64), 0.0).sum()


def _masked_max(values_T: Tensor, kept_T: Tensor) -> Tensor:
    """Return the largest of the values, which are not negative; 0 if there are no tokens."""
    values_T = torch.where(kept_T, values_T.detach().to(torch.float64), 0.0)
    return values_T.max() if values_T.numel() else values_T.sum()


def _check_shapes(logprobs_T: Tensor, *others_T: Tensor | None) -> None:
    names = (
        "entropy_T",
        "old_logprobs_T",
        "rollout_logprobs_T",
        "ref_logprobs_T",
        "advantages_T",
        "mask_T",
        "sample_T",
        "kl_scales_T",
    )
    for name, other_T in zip(names, others_T, strict=True):
        if other_T is not None and (other_T.shape != logprobs_T.shape or logprobs_T.ndim != 1):
            raise AlgorithmError(
                f"{name}: got shape {tuple(other_T.shape)} beside logprobs_T of {tuple(logprobs_T.shape)}, "
                "allowed are vectors with one entry per packed token"
            )


def _check_needed(
    settings: ObjectiveSettings, entropy_T: Tensor | None, rollout_T: Tensor | None, reference_T: Tensor | None
) -> None:
    if settings.correction in ("tis", "mis") and rollout_T is None:
        raise AlgorithmError(
            f"rollout_logprobs_T: got None, but correction {settings.correction!r} compares with the engine's "
            "log-probs; hand them in, or set the correction to 'none'"
        )
    if settings.kl_coefficient != 0 and reference_T is None:
        raise AlgorithmError(
            f"ref_logprobs_T: got None, but kl_coefficient is {settings.kl_coefficient}; "
            "compute the reference's log-probs, or set kl_coefficient to 0"
        )
    if settings.entropy_coefficient != 0 and entropy_T is None:
        raise AlgorithmError(
            f"entropy_T: got None, but entropy_coefficient is {settings.entropy_coefficient}; "
            "compute the entropy with its gradient, or set entropy_coefficient to 0"
        )
