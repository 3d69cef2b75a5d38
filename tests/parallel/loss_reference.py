"""Every term of the loss written out sample by sample with transformers' model; autograd does the rest.

The slow reference of test_loss_terms.py. Uses nothing of megatron_daro.algo but its names of options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from small_models import ROLLOUTS
from torch import Tensor

from megatron_daro.types import StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Gradients by Hugging Face name, loss parts, and means over the trained tokens under the metrics' names."""

    gradients: dict[str, np.ndarray]
    policy_loss: float
    regularizer: float
    loss_sums: np.ndarray
    abs_loss_sums: np.ndarray
    metrics: dict[str, float]


@dataclass(slots=True, eq=False)
class _Sample:
    """The trained tokens of one sample."""

    logp: Tensor
    entropy: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor | None
    advantage: float
    bin: int


def reference(model: torch.nn.Module, batch: StepBatch, algorithm: Mapping[str, Any]) -> Reference:
    """Gradient and parts of the loss that the algorithm section describes; all advantages and columns of the batch."""
    samples = [_trained_tokens(model, batch.select([i])) for i in range(len(batch))]
    tokens_per_bin = np.zeros(ROLLOUTS + 1)
    for sample in samples:
        tokens_per_bin[sample.bin] += len(sample.logp)
    total = tokens_per_bin.sum()
    policy = regularizer = torch.zeros((), dtype=torch.float64)
    loss_sums, abs_loss_sums, seen = np.zeros(ROLLOUTS + 1), np.zeros(ROLLOUTS + 1), []
    for sample in samples:
        losses, numbers = _token_losses(sample, algorithm)
        loss_sums[sample.bin] += float(losses.detach().sum())
        abs_loss_sums[sample.bin] += float(losses.detach().abs().sum())
        mixed = 0 < sample.bin < ROLLOUTS
        factor = 1 / total if algorithm["name"] == "grpo" else (1 / tokens_per_bin[sample.bin] if mixed else 0.0)
        factor = 1 / len(samples) if algorithm["name"] == "kimi" else factor
        policy = policy + factor * losses.double().sum()
        regularizer = regularizer + _entropy_and_kl(sample, algorithm, numbers, total, len(samples))
        seen.append(numbers)
    model.zero_grad()
    (policy + regularizer).backward()
    columns = {name: torch.cat([s[name].detach().double() for s in seen]) for name in seen[0]}
    metrics = {name: float(values.mean()) for name, values in columns.items()}
    metrics["mismatch/logprob_abs_max"] = float(columns["mismatch/logprob_abs_mean"].max())
    return Reference(
        gradients={name: p.grad.clone().numpy() for name, p in model.named_parameters()},
        policy_loss=float(policy.detach()),
        regularizer=float(regularizer.detach()),
        loss_sums=loss_sums,
        abs_loss_sums=abs_loss_sums,
        metrics=metrics,
    )


def _trained_tokens(model: torch.nn.Module, sample: StepBatch) -> _Sample:
    tokens, prompt = torch.tensor(sample.tokens_T, dtype=torch.long), int(sample.prompt_lengths_N[0])
    kept = torch.tensor(sample.loss_mask_R).bool()
    distribution = torch.log_softmax(model(tokens[None]).logits[0, prompt - 1 : -1], -1)
    logp = distribution.gather(1, tokens[prompt:, None])[:, 0]

    def column(values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.tensor(values)[kept]

    old = column(sample.old_logprobs_R)
    return _Sample(
        logp=logp[kept],
        entropy=-(distribution.exp() * distribution).sum(-1)[kept],
        old=logp[kept].detach() if old is None else old,
        rollout=column(sample.rollout_logprobs_R),
        ref=column(sample.ref_logprobs_R),
        advantage=float(sample.advantages_N[0]),
        bin=int(sample.bins_N[0]),
    )


def _token_losses(sample: _Sample, algorithm: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    low, high, dual = 0.2, 0.28, algorithm.get("dual_clip")
    correction = algorithm.get("correction", {"kind": "none"})
    log_ratio = sample.logp - sample.old
    region = algorithm.get("trust_region", "clip")
    if region == "gspo" and len(log_ratio):
        log_ratio = log_ratio.mean().expand(len(log_ratio))  # the direct form: gradient through the mean itself
    rho, advantage = log_ratio.exp(), sample.advantage
    losses = -torch.min(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage)
    high_clipped, low_clipped = (rho > 1 + high) & (advantage > 0), (rho < 1 - low) & (advantage < 0)
    if algorithm["name"] == "kimi":  # as printed: (r - mean - tau log ratio of the answer) times that of log pi
        moved = (sample.logp - sample.old).detach().double().sum()
        losses = -(advantage - algorithm["options"]["tau"] * moved).float() * (1 + sample.logp - sample.logp.detach())
        high_clipped = low_clipped = torch.zeros(len(rho), dtype=torch.bool)
    if region == "reinforce":  # as printed: the log-prob itself; its value is not that of the others
        losses = -advantage * (1 + sample.logp - sample.logp.detach())
        high_clipped = low_clipped = torch.zeros(len(rho), dtype=torch.bool)
    if region == "cispo":
        losses = -rho.detach().clamp(max=1 + high) * advantage * (1 + sample.logp - sample.logp.detach())
        high_clipped, low_clipped = rho > 1 + high, torch.zeros(len(rho), dtype=torch.bool)
    if region == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        losses = -advantage * (1 + 4 / tau * (torch.sigmoid(tau * (rho - 1)) - 0.5))
        high_clipped = low_clipped = torch.zeros(len(rho), dtype=torch.bool)
    dual_clipped = torch.zeros(len(rho), dtype=torch.bool)
    if dual is not None and advantage < 0:
        dual_clipped = rho.detach() > dual
        losses = losses.clamp(max=-dual * advantage)
    weight, changed = _correction(sample, correction)
    difference = sample.old - sample.rollout
    return losses * weight, {
        "ratio/mean": rho,
        "ratio/clip_fraction_high": high_clipped,
        "ratio/clip_fraction_low": low_clipped,
        "ratio/dual_clip_fraction": dual_clipped,
        "policy/entropy": sample.entropy,
        "policy/kl_reference": _kl(sample, algorithm.get("kl", {}).get("estimator", "k3")),
        "mismatch/logprob_abs_mean": difference.abs(),
        "mismatch/kl": difference.exp() - 1 - difference,
        "mismatch/corrected_fraction": changed,
    }


def _correction(sample: _Sample, correction: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    ones, nothing = torch.ones(len(sample.old)), torch.zeros(len(sample.old), dtype=torch.bool)
    if correction["kind"] == "none" or not len(sample.old):
        return ones, nothing
    log_ratio = sample.old - sample.rollout
    if correction["level"] == "sequence":
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    ratio = log_ratio.exp()
    if correction["kind"] == "tis":
        return ratio.clamp(max=correction["cap"]), ratio > correction["cap"]
    inside = (ratio >= correction["low"]) & (ratio <= correction["high"])
    return torch.where(inside, ratio, 0.0), ~inside


def _kl(sample: _Sample, estimator: str) -> Tensor:
    if sample.ref is None:
        return torch.zeros(len(sample.logp))
    d = sample.logp - sample.ref
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


def _entropy_and_kl(
    sample: _Sample, algorithm: Mapping[str, Any], numbers: Mapping[str, Tensor], total: float, rollouts: int
) -> Tensor:
    section, kl = algorithm.get("kl", {}), numbers["policy/kl_reference"].double().sum()
    by_rollout = section.get("mean") == "rollouts"
    kl = kl / (max(len(sample.logp), 1) * rollouts) if by_rollout else kl / total
    entropy = sample.entropy.double().sum() / total
    return section.get("coefficient", 0.0) * kl - algorithm.get("entropy_coefficient", 0.0) * entropy
