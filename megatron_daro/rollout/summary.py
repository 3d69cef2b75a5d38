"""What the groups of a step say in numbers: accuracy, length, bins, predicted loss, staleness.

Place in the data flow: groups and the built batch -> metrics, merged by the controller with what the policy reports.
Keys are those of the run directory's contract. It measures samples only and knows no losses but the predicted one.

Shape letters: N samples, K rollouts per prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_daro.algo.difficulty import predicted_bin_loss
from megatron_daro.rollout.sampled_batch import SampledBatch
from megatron_daro.rollout.update_plan import Update
from megatron_daro.types import Group, TrainBatch


def update_metrics(
    batch: SampledBatch, update: Update, columns: TrainBatch, updates_per_batch: int
) -> dict[str, float]:
    """All of the below for one optimizer step: `columns` are those of `update`, which is of `batch`."""
    size = columns.rollouts_per_prompt
    metrics = sample_metrics(batch, size) | group_bins((*update.groups, *update.filtered), size)
    metrics |= length_metrics(columns)
    return metrics | {"rollout/staleness_mean": mean_staleness(update.groups, update.version, updates_per_batch)}


def sample_metrics(batch: SampledBatch, rollouts_per_prompt: int) -> dict[str, float]:
    """Accuracy, reward and response lengths over every complete group that was sampled for the batch.

    Filtered groups count: without them, dynamic sampling would push the accuracy towards one half.

    Args:
        batch: the sampled batch.
        rollouts_per_prompt: K.

    Returns:
        `accuracy/mean`, `reward/mean`, `response/length_mean`, `response/length_max`, `response/truncated_fraction`,
        `rollout/rounds` and `throughput/rollout_tokens_per_s`.
    """
    seen = [g for g in (*batch.groups, *batch.filtered, *batch.dropped) if len(g.rollouts) == rollouts_per_prompt]
    rollouts = [rollout for group in seen for rollout in group.rollouts]
    verdicts = [verdict for group in seen for verdict in group.verdicts]
    lengths = [rollout.response_length for rollout in rollouts]
    metrics = {
        "accuracy/mean": _mean(verdict.correct for verdict in verdicts),
        "reward/mean": _mean(verdict.reward for verdict in verdicts),
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_fraction": _mean(rollout.finish_reason == "length" for rollout in rollouts),
        "rollout/rounds": float(batch.rounds),
    }
    if batch.rollout_s > 0:
        metrics["throughput/rollout_tokens_per_s"] = batch.response_tokens / batch.rollout_s
    return metrics | {key: float(value) for key, value in batch.counters.items()}


def group_bins(groups: Iterable[Group], rollouts_per_prompt: int) -> dict[str, float]:
    """`difficulty/groups/{k}` for every k in 0..K."""
    bins = Counter(group.bin for group in groups if len(group.rollouts) == rollouts_per_prompt)
    return {f"difficulty/groups/{k}": float(bins[k]) for k in range(rollouts_per_prompt + 1)}


def length_metrics(batch: TrainBatch) -> dict[str, float]:
    """Mean trained tokens of right and wrong answers per bin, and the loss that they predict.

    Args:
        batch: the batch as it is trained (after overlong filtering).

    Returns:
        `difficulty/length_right/{k}`, `difficulty/length_wrong/{k}` and `difficulty/predicted_loss/{k}` for the bins
        0 < k < K that are present.
    """
    metrics = {}
    tokens_N, size = batch.trained_tokens_N, batch.rollouts_per_prompt
    for k in range(1, size):
        bin_N = batch.bins_N == k
        if not bin_N.any():
            continue
        right = float(tokens_N[bin_N & (batch.correct_N == 1)].mean())
        wrong = float(tokens_N[bin_N & (batch.correct_N == 0)].mean())
        metrics[f"difficulty/length_right/{k}"] = right
        metrics[f"difficulty/length_wrong/{k}"] = wrong
        metrics[f"difficulty/predicted_loss/{k}"] = float(predicted_bin_loss(k / size, right, wrong))
    return metrics


def mean_staleness(groups: Sequence[Group], version: int, updates_per_batch: int) -> float:
    """Mean age of the groups' weights at a policy of this version, in batches (the unit of max_staleness)."""
    return _mean(version - group.weight_version for group in groups) / updates_per_batch


def _mean(values: Iterable[float]) -> float:
    values_N = np.asarray(list(values), dtype=np.float64)
    return float(values_N.mean()) if len(values_N) else 0.0
