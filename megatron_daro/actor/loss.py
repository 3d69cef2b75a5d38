"""The distributed loss of one optimizer step: token sums per pass rate, reduced over all ranks.

StepBatch shard + packed micro-batches -> global totals (one all-reduce) -> per micro-batch X = sum of coefficient *
token losses, plus KL and entropy with their own coefficients -> loss sums per bin, from which the algorithm learns (one
all-reduce of all sums of the step, another of maxima).

Why gradients are exact for every layout: every coefficient already has its global denominator, so the loss of the step
is the plain sum of X over micro-batches, data-parallel and context-parallel ranks, and its gradient is the plain sum of
their gradients. Megatron-core rescales in three places, and each is switched off or cancels:
  1. The schedule (`forward_step_calc_loss`): for a 3-tuple (loss, num_tokens, report) with `calculate_per_token_loss`
     it divides nothing. (A 2-tuple would be multiplied by CP and divided by the number of micro-batches.)
  2. DistributedDataParallel: with `calculate_per_token_loss` its gradient scaling factor is 1, so the reduction over
     DP x CP is a sum.
  3. finalize_model_grads divides by num_tokens, unless it is None, which actor/compat.py passes.

Legend: K rollouts per prompt (bins 0..K), N samples of this shard, M samples of a micro-batch, T its packed tokens of
this CP rank, J those of them that are trained, the only ones that the objective sees; D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.compat import HiddenStateGPTModel
from megatron_daro.actor.forward import OutputSettings, position_logprobs
from megatron_daro.actor.megatron import parallel_state
from megatron_daro.actor.reductions import reduced_on_all_stages, sum_over_context, sum_over_data_parallel
from megatron_daro.algo.algorithm import CELL_SUMS
from megatron_daro.algo.objective import ObjectiveSettings, TokenObjective, token_objective
from megatron_daro.algo.weighting import Algorithm, Samples, StepStats, StepTotals
from megatron_daro.data.packing import PackedMicroBatch
from megatron_daro.types import StepBatch

MEANS: Mapping[str, str] = {
    "ratio": "ratio/mean",
    "clip_high": "ratio/clip_fraction_high",
    "clip_low": "ratio/clip_fraction_low",
    "dual_clip": "ratio/dual_clip_fraction",
    "entropy": "policy/entropy",
    "kl_ref": "policy/kl_reference",
    "logprob_abs_diff": "mismatch/logprob_abs_mean",
    "mismatch_kl": "mismatch/kl",
    "corrected": "mismatch/corrected_fraction",
}
"""By name of a sum in algo.objective.TokenObjective, the metric under which a step reports its mean over trained
tokens."""
TOKEN_SUMS = ("tokens", *MEANS)
"""Sums that a step adds up over its tokens, in the order of the reduced vector."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """Sums of one optimizer step over all ranks; the same on every rank.

    step_stats: what the algorithm learns from, totals included. policy_loss: the sum of X without KL and entropy.
    regularizer: the part of KL and entropy. token_sums: by name. max_logprob_diff: over all tokens.
    """

    step_stats: StepStats
    policy_loss: float
    regularizer: float
    token_sums: Mapping[str, float]
    max_logprob_diff: float

    @property
    def finite(self) -> bool:
        """Whether the loss and what the algorithm learns from are finite; other `token_sums` are not checked."""
        sums = torch.cat([values.reshape(-1) for values in self.step_stats.sums.values()])
        numbers = self.step_stats.entropy, self.policy_loss, self.regularizer
        return bool(torch.isfinite(sums).all()) and all(map(math.isfinite, numbers))

    @property
    def totals(self) -> StepTotals:
        """Tokens and rollouts of the step."""
        return self.step_stats.totals

    @property
    def loss_sums(self) -> Tensor:
        """float64 [K+1], sums of token losses per bin."""
        return self.step_stats.per_bin("loss_sums")


def global_totals(batch: StepBatch, classes_N: Tensor | None = None, num_classes: int = 1) -> StepTotals:
    """Return the trained tokens per bin (and class) and the rollouts of the whole optimizer step. Collective over the
    data-parallel group."""
    lengths_N, size = torch.tensor(batch.trained_tokens_N), batch.rollouts_per_prompt
    classes_N = torch.zeros_like(lengths_N) if classes_N is None else classes_N
    own = StepTotals.of_classes(torch.tensor(batch.bins_N), lengths_N, classes_N, size, num_classes)
    return StepTotals.from_vector(sum_over_data_parallel(own.vector()), num_classes)


class StepLoss:
    """The loss of one optimizer step on one rank: `micro_batch` for each micro-batch, then `reduce` once."""

    def __init__(
        self,
        algorithm: Algorithm,
        settings: ObjectiveSettings,
        output: OutputSettings,
        batch: StepBatch,
    ) -> None:
        """Sum the totals of the step. Collective over the data-parallel group.

        Args:
            algorithm: holds the weights w; read here, not changed.
            settings, output: how token losses and log-probabilities are computed.
            batch: this rank's shard of the step.
        """
        self._settings, self._output = settings, output
        samples, on = _samples(batch), device.current()
        classes_N, num_classes = algorithm.classes_of(samples), len(algorithm.classes[1])
        self.totals = global_totals(batch, classes_N, num_classes)
        self._cells_N = (samples.bins_N * num_classes + classes_N).to(on)
        self._advantages_N = samples.advantages_N.to(on)
        self._coefficients_N = algorithm.coefficients(samples, self.totals).to(on)
        self._regularizer_coefficient = algorithm.regularizer_coefficient(self.totals)
        self._kl_scales_N = (
            _kl_scales(samples.lengths_N, self.totals).to(on) if settings.kl_mean == "rollouts" else None
        )
        self._num_bins = batch.rollouts_per_prompt + 1
        cells = self._num_bins * num_classes
        # One vector, so that one reduction is enough; the other three are views of its parts.
        sizes = [len(CELL_SUMS) * cells, 2, len(TOKEN_SUMS)]
        self._sums = torch.zeros(sum(sizes), dtype=torch.float64, device=on)
        cell_sums, self._loss_parts, self._token_sums = self._sums.split(sizes)
        self._cell_sums = cell_sums.view(len(CELL_SUMS), cells)
        self._max_logprob_diff = torch.zeros((), dtype=torch.float64, device=on)

    def micro_batch(
        self, model: HiddenStateGPTModel, packed: PackedMicroBatch, hidden_T1D: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return X of one micro-batch, as Megatron's schedule wants it: (loss, number of tokens, report).

        The number of tokens is 0 because nothing may be divided by it (see the module's docstring).
        """
        positions_J = packed.trained_slots_J
        logprobs_J, entropy_J = position_logprobs(
            model, hidden_T1D, packed.labels_T[positions_J], positions_J, self._output
        )
        objective = token_objective(
            logprobs_J,
            entropy_J,
            old_logprobs_T=_at(packed.old_logprobs_T, positions_J),
            rollout_logprobs_T=_at(packed.rollout_logprobs_T, positions_J),
            ref_logprobs_T=_at(packed.ref_logprobs_T, positions_J),
            advantages_T=self._advantages(packed, positions_J),
            mask_T=packed.mask_T[positions_J],
            sample_T=packed.sample_T[positions_J],
            num_samples=len(packed),
            settings=self._settings,
            kl_scales_T=None if self._kl_scales_N is None else _of_samples(self._kl_scales_N, packed, positions_J),
            sample_reduce=sum_over_context if parallel_state.get_context_parallel_world_size() > 1 else None,
        )
        policy = (self._coefficients_N[packed.sample_indices] * objective.sample_losses_M).sum()
        regularizer = self._regularizer_coefficient * objective.regularizer_T.sum(dtype=torch.float64)
        self._accumulate(packed, objective, policy.detach(), regularizer.detach())
        loss = (policy + regularizer).to(torch.float32)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    def _advantages(self, packed: PackedMicroBatch, positions_J: Tensor) -> Tensor:
        """Return float32 [J]: each token's own advantage if the batch has these, else its sample's."""
        if packed.token_advantages_T is not None:
            return packed.token_advantages_T[positions_J]
        return _of_samples(self._advantages_N, packed, positions_J)

    def _accumulate(
        self, packed: PackedMicroBatch, objective: TokenObjective, policy: Tensor, regularizer: Tensor
    ) -> None:
        cells_M = self._cells_N[packed.sample_indices]
        by_name = {"loss_sums": objective.sample_losses_M.detach(), **objective.sample_sums_M}
        for name, sums_M in by_name.items():
            self._cell_sums[CELL_SUMS.index(name)].index_add_(0, cells_M, sums_M)
        self._loss_parts += torch.stack([policy, regularizer])
        for name, value in objective.sums.items():
            self._token_sums[TOKEN_SUMS.index(name)] += value
        if "logprob_abs_diff" in objective.maxima:
            self._max_logprob_diff = torch.maximum(self._max_logprob_diff, objective.maxima["logprob_abs_diff"])

    def reduce(self) -> StepSums:
        """Reduce over data- and context-parallel ranks and broadcast from the last pipeline stage. Collective."""
        reduced_on_all_stages(self._sums)
        reduced_on_all_stages(self._max_logprob_diff, dist.ReduceOp.MAX)
        cells = self._cell_sums.cpu().view(len(CELL_SUMS), self._num_bins, -1)
        token_sums = dict(zip(TOKEN_SUMS, self._token_sums.tolist(), strict=True))
        entropy = token_sums["entropy"] / max(token_sums["tokens"], 1.0)
        policy, regularizer = self._loss_parts.tolist()
        return StepSums(
            step_stats=StepStats(self.totals, dict(zip(CELL_SUMS, cells, strict=True)), entropy),
            policy_loss=policy,
            regularizer=regularizer,
            token_sums=token_sums,
            max_logprob_diff=float(self._max_logprob_diff),
        )


def _samples(batch: StepBatch) -> Samples:
    """Return this shard's samples, as the algorithm sees them."""
    lengths_NK = batch.group_lengths_NK
    return Samples(
        bins_N=torch.tensor(batch.bins_N),
        lengths_N=torch.tensor(batch.trained_tokens_N),
        advantages_N=torch.tensor(batch.advantages_N),
        group_lengths_NK=None if lengths_NK is None else torch.tensor(lengths_NK),
        environments_N=None if batch.environments_N is None else torch.tensor(batch.environments_N),
    )


def _kl_scales(lengths_N: Tensor, totals: StepTotals) -> Tensor:
    """Return float64 [N]: trained tokens of the step / (rollouts of the step * trained tokens of the rollout). With
    these factors the mean over the step's tokens becomes a mean over rollouts of each one's mean over its tokens."""
    return totals.tokens / max(totals.num_rollouts, 1) / lengths_N.to(torch.float64).clamp(min=1)


def _of_samples(values_N: Tensor, packed: PackedMicroBatch, positions_J: Tensor) -> Tensor:
    """Return [J]: for each trained token the value of its sample."""
    return values_N[packed.sample_indices][packed.sample_T[positions_J]]


def _at(column_T: Tensor | None, positions_J: Tensor) -> Tensor | None:
    return None if column_T is None else column_T[positions_J]
