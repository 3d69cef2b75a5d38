"""One optimizer step: gradients of policy and critic, an update of both or of neither (at first of the critic
alone, with `critic.pretrain_steps`), and the metrics.

  StepBatch shard -> advantages (advantages.py)
    -> the critic's gradients -> the policy's: loss.py over the schedule of forward.py, reduced over all ranks
    -> wait for saves and snapshots that still read the weights
    -> check of the gradients -> the algorithm learns, and the policy is updated -> the critic is updated
    -> StepResult: the same on every rank, but for times

Refuses to update from an advantage, loss, loss sum, entropy or gradient that is not finite: model, optimizer and
schedule stay as they were, the algorithm learns nothing from the step, and the result says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.advantages import with_advantages
from megatron_daro.actor.forward import MicroBatches, OutputSettings, packed_micro_batches, run_schedule
from megatron_daro.actor.loss import MEANS, StepLoss, StepSums
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    MegatronOptimizer,
    OptimizerParamScheduler,
    TransformerConfig,
)
from megatron_daro.actor.optimizer import GradientCheck, apply_update, check_gradients
from megatron_daro.algo.objective import ObjectiveSettings
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.errors import NonFiniteError
from megatron_daro.types import StepBatch, StepResult, TrainedName


@dataclass(slots=True, eq=False)
class TrainedModel:
    """The parts of a model on this rank, their optimizer and schedule."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def begin_step(self) -> None:
        """Switch to training mode and set the gradients to 0, for the passes that add to them."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


@dataclass(slots=True, eq=False)
class TrainState(TrainedModel):
    """Everything of the policy that a train step changes: the model, and what the algorithm has learned.

    begun: a batch of rollouts has begun, and the policy was not updated from it yet.
    """

    algorithm: Algorithm
    begun: bool = False


class OwnTime:
    """How long a rank's own passes take, without the reduction of gradients, which waits for other replicas. With
    experts that several replicas share, it contains waiting for these."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    @contextmanager
    def measured(self, config: TransformerConfig) -> Iterator[None]:
        """Measure from here until the schedule calls the hook of the model's configuration that reduces gradients."""
        reduce_gradients = config.finalize_model_grads_func

        def marked(*arguments: object, **options: object) -> None:
            self._mark()
            reduce_gradients(*arguments, **options)

        config.finalize_model_grads_func = marked
        try:
            self._mark()
            yield
        finally:
            config.finalize_model_grads_func = reduce_gradients

    def _mark(self) -> None:
        if device.current().type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> float:
        """Return what was measured; 0 if nothing was. Call it after the host has waited for the step."""
        if len(self._marks) != 2:
            return 0.0
        begin, end = self._marks
        if isinstance(begin, float):
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1000


@dataclass(frozen=True, slots=True)
class CriticReport:
    """The critic's part of a step before any update; the same on every rank, but for times. fit: whether the critic may
    be updated."""

    fit: bool
    grad_norm: float
    metrics: dict[str, float]


class StepCritic(Protocol):
    """What a step needs of a critic; see `actor.critic.Critic`."""

    pretrain_steps: int

    def gradients(self, batch: StepBatch, micro_batches: MicroBatches) -> CriticReport:
        """Run forward and backward."""

    def apply(self, report: CriticReport) -> dict[str, float]:
        """Update the critic."""


class GiveDevice(Protocol):
    """Gives the device to a model; see `actor.host_memory.TakingTurns`."""

    def __call__(self, model: TrainedName, *, keep_gradients: bool = False) -> None:
        """Give it the device."""


def _both_have_it(model: TrainedName, *, keep_gradients: bool = False) -> None:
    """Change nothing: both models stay on the device."""


def forward_backward(
    train_state: TrainState,
    batch: StepBatch,
    micro_batches: MicroBatches,
    settings: ObjectiveSettings,
    output: OutputSettings,
    own_time: OwnTime,
) -> StepSums:
    """Compute the gradients of a whole step, summed over all ranks, in the main gradient buffers. Collective.

    Args:
        train_state: its gradients are set to 0 first. batch: this rank's shard, from `with_advantages`. own_time:
            measures the passes.
    """
    chunks, last = train_state.chunks, train_state.chunks[-1].module
    train_state.begin_step()
    packs = packed_micro_batches(last.config, batch, micro_batches, vocab_size=output.vocab_size)
    loss = StepLoss(train_state.algorithm, settings, output, batch)
    with own_time.measured(last.config):  # replicas start together: `StepLoss` has just summed totals
        run_schedule(chunks, packs, partial(loss.micro_batch, last), forward_only=False)
    return loss.reduce()


def train_step(
    train_state: TrainState,
    batch: StepBatch,
    micro_batches: MicroBatches,
    settings: ObjectiveSettings,
    output: OutputSettings,
    *,
    step: int,
    before_update: Callable[[], None],
    critic: StepCritic | None = None,
    give_device: GiveDevice = _both_have_it,
) -> StepResult:
    """Do one optimizer step on this rank's shard; every rank calls this with the same number of micro-batches.

    `before_update` is called after the gradients are computed and before anything is updated. Policy and critic are
    updated together or not at all, but in the first `pretrain_steps` steps only the critic is. `give_device` is called
    with the model that computes next, where policy and critic take turns on the device; the critic's gradients are kept
    while the policy has it.

    Returns:
        Metrics of the whole step. `skipped` with a reason if an advantage, the loss or the gradient was not finite.
    """
    if batch.opens_batch:
        train_state.begun = True
        train_state.algorithm.begin_batch()
    try:
        batch = with_advantages(train_state.algorithm, batch, settings)
    except NonFiniteError as error:  # raised on every rank, before anything else is done
        return StepResult({}, skipped=True, reason=str(error))
    give_device("critic")
    critic_report = critic.gradients(batch, micro_batches) if critic else None
    give_device("policy", keep_gradients=True)
    began, own_time = time.perf_counter(), OwnTime()
    sums = forward_backward(train_state, batch, micro_batches, settings, output, own_time)
    forward_backward_s = time.perf_counter() - began
    weights_before = train_state.algorithm.cell_weights
    extra_loss = train_state.algorithm.extra_loss(sums.totals)
    before_update()
    fresh_moments = train_state.begun and train_state.algorithm.resets_optimizer
    check = check_gradients(train_state.optimizer, allowed=sums.finite and (critic_report is None or critic_report.fit))
    learning_rate = 0.0
    if check.fit and (critic is None or step > critic.pretrain_steps):
        train_state.algorithm.learn(sums.step_stats)  # first: if it refuses the sums, the weights stay as they are
        learning_rate = apply_update(
            train_state.optimizer, train_state.scheduler, check.grad_norm, fresh_moments=fresh_moments
        )
        train_state.begun = False
    metrics = _metrics(sums, check, learning_rate, extra_loss) | {"timing/forward_backward_s": forward_backward_s}
    if critic is not None and critic_report is not None:
        metrics |= critic_report.metrics
        if check.fit:
            give_device("critic")
            metrics |= critic.apply(critic_report)
    if weights_before is not None:
        metrics |= _weight_metrics(weights_before, *train_state.algorithm.classes)
        metrics["difficulty/clamped"] = float(train_state.algorithm.clamped)
    reason = "" if check.fit else _reason(sums, check, critic_report)
    return StepResult(metrics, skipped=not check.fit, reason=reason, own_s=own_time.seconds())


def _weight_metrics(weights: Tensor, classed_by: str, classes: Sequence[str]) -> dict[str, float]:
    """Return metrics of difficulty weights [K+1, L]: per pass rate, and with several classes also per class."""
    means, num_bins = weights.mean(dim=1), len(weights)
    metrics = {f"difficulty/weight/{k}": float(means[k]) for k in range(1, num_bins - 1)}
    if len(classes) > 1:
        cells = [(k, c, name) for k in range(1, num_bins - 1) for c, name in enumerate(classes)]
        metrics |= {f"difficulty/weight_by_{classed_by}/{k}/{name}": float(weights[k, c]) for k, c, name in cells}
    return metrics


def _reason(sums: StepSums, check: GradientCheck, critic_report: CriticReport | None) -> str:
    loss, grad_norm = sums.policy_loss, check.grad_norm
    if critic_report is not None and not critic_report.fit:
        loss, grad_norm = critic_report.metrics["critic/loss"], critic_report.grad_norm
        what = "the critic's loss or gradient norm"
    else:
        what = "the gradient norm" if sums.finite else "the loss, the entropy, or a sum of token losses or advantages,"
    return f"{what} was not finite (loss {loss}, gradient norm {grad_norm})"


def _metrics(sums: StepSums, check: GradientCheck, learning_rate: float, extra_loss: float) -> dict[str, float]:
    """Return the metrics of docs/metrics.md that follow from the policy's sums and update."""
    tokens = max(sums.token_sums["tokens"], 1.0)
    metrics = {
        "loss/policy": sums.policy_loss,
        "loss/total": sums.policy_loss + sums.regularizer + extra_loss,
        "loss/grad_norm": check.grad_norm,
        "optimizer/learning_rate": learning_rate,
        "mismatch/logprob_abs_max": sums.max_logprob_diff,
    }
    metrics |= {metric: sums.token_sums[name] / tokens for name, metric in MEANS.items()}
    counts = sums.totals.tokens_per_bin.tolist()
    for k, count in enumerate(counts):
        metrics[f"difficulty/tokens/{k}"] = float(count)
        if count:
            metrics[f"difficulty/loss/{k}"] = float(sums.loss_sums[k]) / count
    return metrics
