"""One optimizer step: advantages per token, forward and backward over the micro-batches, the update, the metrics.

TrainBatch shard + micro-batches -> StepResult, the same on every rank.
Refuses to update from an advantage, loss or gradient that is not finite: model, optimizer, schedule and weights stay as
they were and the result says so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.forward import MicroBatches, OutputSettings, packed_micro_batches, run_schedule
from megatron_daro.actor.loss import StepLoss, StepSums
from megatron_daro.actor.optimizer import UpdateReport, update
from megatron_daro.algo.corrections import segment_sums
from megatron_daro.algo.objective import ObjectiveSettings, kl_terms
from megatron_daro.algo.weighting import Algorithm, TokenColumns
from megatron_daro.errors import AlgorithmError, NonFiniteError
from megatron_daro.types import StepResult, TrainBatch

device.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(slots=True, eq=False)
class TrainState:
    """What a train step changes, together: the parts of the model on this rank, their optimizer and schedule, the
    algorithm's weights."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    algorithm: Algorithm


def compute_gradients(
    train_state: TrainState,
    batch: TrainBatch,
    micro_batches: MicroBatches,
    settings: ObjectiveSettings,
    output: OutputSettings,
) -> StepSums:
    """Forward and backward of a whole step; gradients end up summed over all ranks, in the main gradient buffers.

    Raises:
        AlgorithmError: advantages per token that do not fit the batch. NonFiniteError: some are not finite; on every
            rank.
    """
    if settings.reward_kl_coefficient > 0:
        batch = with_kl_in_reward(train_state.algorithm, batch, settings)
    if train_state.algorithm.token_columns is not None:
        batch = with_token_advantages(train_state.algorithm, batch)
    chunks, last = train_state.chunks, train_state.chunks[-1].module
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    train_state.optimizer.zero_grad()
    packs = packed_micro_batches(last.config, batch, micro_batches, vocab_size=output.vocab_size)
    loss = StepLoss(train_state.algorithm, settings, output, batch)
    run_schedule(chunks, packs, partial(loss.micro_batch, last), forward_only=False)
    return loss.reduce()


def with_kl_in_reward(algorithm: Algorithm, batch: TrainBatch, settings: ObjectiveSettings) -> TrainBatch:
    """Return this rank's shard with rewards that are less by coefficient times the KL of each answer's trained tokens,
    summed, and the advantages of these rewards over the whole step. Collective over the data-parallel group.

    The KL is that of the weights that the batch began with, from the columns of its passes; no gradient flows.

    Raises:
        AlgorithmError: a column was not computed. NonFiniteError: a reward is not finite then; on every rank.

    Source: R - beta * sum of log(pi / pi_ref) as in RLOO, arXiv 2402.14740, eq. 1, with the estimator of the options.
    """
    old_R, ref_R = batch.old_logprobs_R, batch.ref_logprobs_R
    if old_R is None or ref_R is None:
        raise AlgorithmError(
            f"kl.place: got 'reward', but {'old' if old_R is None else 'ref'}_logprobs were not computed for this "
            "batch; let `Policy.prepare` see the batch before it is trained"
        )
    mask_R = torch.from_numpy(batch.loss_mask_R.astype(bool))
    old, ref = (torch.where(mask_R, torch.from_numpy(values_R).double(), 0.0) for values_R in (old_R, ref_R))
    sample_R = torch.arange(len(batch)).repeat_interleave(torch.from_numpy(batch.response_lengths_N))
    kl_N = segment_sums(kl_terms(old, ref, settings.kl_estimator), mask_R, sample_R, len(batch))
    rewards_N = torch.from_numpy(batch.rewards_N).double() - settings.reward_kl_coefficient * kl_N
    (rewards, group_ids), own = _of_the_step(rewards_N, torch.from_numpy(batch.group_ids_N).double())
    if wrong := int((~rewards.isfinite()).sum()):
        raise NonFiniteError(
            f"kl.place reward: {wrong} of the step's {len(rewards)} rewards are not finite with the KL"
        )
    advantages = algorithm.advantages(rewards, group_ids.long())[own]
    return replace(batch, rewards_N=rewards_N.float().numpy(), advantages_N=advantages.float().numpy())


def _of_the_step(*columns_N: Tensor) -> tuple[list[Tensor], slice]:
    """Return columns [N] of this rank's samples as those of all data-parallel ranks, and where its own are in them."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    sizes = torch.zeros(size, dtype=torch.float64)
    sizes[rank] = len(columns_N[0])
    sizes = _sum_over_data_parallel(sizes).long()
    start = int(sizes[:rank].sum())
    own = slice(start, start + len(columns_N[0]))
    together = torch.zeros(len(columns_N), int(sizes.sum()), dtype=torch.float64)
    together[:, own] = torch.stack(columns_N)
    return list(_sum_over_data_parallel(together)), own


def with_token_advantages(algorithm: Algorithm, batch: TrainBatch) -> TrainBatch:
    """Return this rank's shard with the algorithm's advantages per token. Collective over the data-parallel group.

    Raises:
        AlgorithmError: a column was not computed, or what came back is no floating tensor [R]. NonFiniteError: trained
            tokens have advantages that are not finite; on every rank, also where they are another rank's.
    """
    tokens = _token_columns(algorithm, batch)
    try:
        values_R: object = algorithm.token_advantages(tokens)
    except Exception as error:  # a user's class may raise anything
        raise AlgorithmError(
            f"algorithm {algorithm.name}, token_advantages: {type(error).__name__}: {error}; fix the class"
        ) from error
    if not isinstance(values_R, Tensor) or not values_R.is_floating_point() or values_R.shape != tokens.mask_R.shape:
        got = f"{values_R.dtype} {list(values_R.shape)}" if isinstance(values_R, Tensor) else type(values_R).__name__
        raise AlgorithmError(
            f"algorithm {algorithm.name}, token_advantages: got {got}, allowed is a floating tensor "
            f"[{len(tokens.mask_R)}], one number for each response token of these {len(batch)} samples"
        )
    kept_R = torch.where(tokens.mask_R, values_R.detach().cpu().float(), 0.0)
    wrong_R = ~kept_R.isfinite()
    total = int(_sum_over_data_parallel(wrong_R.sum().double()))
    if total:
        raise NonFiniteError(
            f"algorithm {algorithm.name}, token_advantages: {total} of the step's trained tokens have an advantage "
            f"that is not finite, {int(wrong_R.sum())} of them on this rank"
        )
    return replace(batch, token_advantages_R=kept_R.numpy())


def _token_columns(algorithm: Algorithm, batch: TrainBatch) -> TokenColumns:
    mask_R = torch.from_numpy(batch.loss_mask_R.astype(bool))

    def column(name: str) -> Tensor:
        values_R: np.ndarray | None = getattr(batch, f"{name}_R")
        if values_R is None:
            raise AlgorithmError(
                f"algorithm {algorithm.name}, token_columns: got {name!r}, which was not computed for this batch; "
                "let `Policy.prepare` see the batch before it is trained"
            )
        return torch.where(mask_R, torch.from_numpy(values_R).double(), 0.0)

    return TokenColumns(
        mask_R=mask_R,
        columns={name: column(name) for name in algorithm.token_columns or ()},
        lengths_N=torch.from_numpy(batch.response_lengths_N),
        rewards_N=torch.from_numpy(batch.rewards_N).double(),
        advantages_N=torch.from_numpy(batch.advantages_N).double(),
        bins_N=torch.from_numpy(batch.bins_N),
        group_ids_N=torch.from_numpy(batch.group_ids_N),
        truncated_N=torch.from_numpy(batch.truncated_N.astype(bool)),
        sum_over_step=_sum_over_data_parallel,
    )


def _sum_over_data_parallel(values: Tensor) -> Tensor:
    """Context-parallel ranks hold the same samples, so the sum does not run over them."""
    total = values.detach().to(device.prepare(), torch.float64, copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def train_step(
    train_state: TrainState,
    batch: TrainBatch,
    micro_batches: MicroBatches,
    settings: ObjectiveSettings,
    output: OutputSettings,
    *,
    step: int,
    before_update: Callable[[], None],
) -> StepResult:
    """One optimizer step on this rank's shard; every rank calls it with the same number of micro-batches.

    `before_update` is called when the gradients are there and before anything changes.

    Returns:
        Metrics of the whole step. `skipped` with a reason if an advantage, the loss or the gradient was not finite.
    """
    started = time.perf_counter()
    if batch.opens_batch:
        train_state.algorithm.begin_batch()
    try:
        sums = compute_gradients(train_state, batch, micro_batches, settings, output)
    except NonFiniteError as error:  # on every rank, before anything was done
        return StepResult(step=step, metrics={}, skipped=True, reason=str(error))
    forward_backward_s = time.perf_counter() - started
    weights_before = train_state.algorithm.cell_weights
    extra_loss = train_state.algorithm.extra_loss(sums.totals)
    before_update()
    report = update(train_state.optimizer, train_state.scheduler, allowed=sums.finite)
    if report.applied:
        train_state.algorithm.learn(sums.step_stats)
    metrics = _metrics(sums, report, extra_loss) | {"timing/forward_backward_s": forward_backward_s}
    if weights_before is not None:
        metrics |= _weight_metrics(weights_before)
        metrics["difficulty/clamped"] = float(train_state.algorithm.clamped)
    reason = "" if report.applied else _reason(sums, report)
    return StepResult(step=step, metrics=metrics, skipped=not report.applied, reason=reason)


def _weight_metrics(weights: Tensor) -> dict[str, float]:
    """Metrics of difficulty weights [K+1, L]: per pass rate, and where they differ by length also per class."""
    means, (num_bins, classes) = weights.mean(dim=1), weights.shape
    found = {f"difficulty/weight/{k}": float(means[k]) for k in range(1, num_bins - 1)}
    if classes > 1:
        names = {f"difficulty/weight_by_length/{k}/{c}": (k, c) for k in range(1, num_bins - 1) for c in range(classes)}
        found |= {name: float(weights[where]) for name, where in names.items()}
    return found


def _reason(sums: StepSums, report: UpdateReport) -> str:
    what = "the gradient norm" if sums.finite else "the loss"
    return f"{what} was not finite (loss {sums.policy_loss}, gradient norm {report.grad_norm})"


def _metrics(sums: StepSums, report: UpdateReport, extra_loss: float) -> dict[str, float]:
    """Metric keys of docs/metrics.md that the train part knows."""
    tokens = max(sums.token_sums["tokens"], 1.0)
    mean = {name: value / tokens for name, value in sums.token_sums.items()}
    metrics = {
        "loss/policy": sums.policy_loss,
        "loss/total": sums.policy_loss + sums.regularizer + extra_loss,
        "loss/grad_norm": report.grad_norm,
        "optimizer/learning_rate": report.learning_rate,
        "ratio/mean": mean["ratio"],
        "ratio/clip_fraction_high": mean["clip_high"],
        "ratio/clip_fraction_low": mean["clip_low"],
        "ratio/dual_clip_fraction": mean["dual_clip"],
        "policy/entropy": mean["entropy"],
        "policy/kl_reference": mean["kl_ref"],
        "mismatch/logprob_abs_mean": mean["logprob_abs_diff"],
        "mismatch/logprob_abs_max": sums.max_logprob_diff,
        "mismatch/kl": mean["mismatch_kl"],
        "mismatch/corrected_fraction": mean["corrected"],
    }
    counts = sums.totals.tokens_per_bin.tolist()
    for k, count in enumerate(counts):
        metrics[f"difficulty/tokens/{k}"] = float(count)
        if count:
            metrics[f"difficulty/loss/{k}"] = float(sums.loss_sums[k]) / count
    return metrics
