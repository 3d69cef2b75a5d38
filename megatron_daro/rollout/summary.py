"""Metrics of the groups of a batch and of its steps: accuracy, length, bins, predicted loss, staleness.

Groups and the built batch -> metrics, merged by the controller with what the policy reports. It measures samples only
and knows no losses but the predicted one.

To add a metric of groups: write a function of them here, put it into GROUP_METRICS, and its key into docs/metrics.md;
metrics.jsonl, TensorBoard and the report's table then have it. It measures all groups of the batch (surplus belongs to
the batch that takes it), so each step of the batch has the same number. Metrics of one step's groups alone belong in
`step_metrics`; those that each of several environments has too, in _OF_ENVIRONMENTS.

Shape letters: N samples, K rollouts per prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb

import numpy as np

from megatron_daro.algo.difficulty import predicted_bin_loss
from megatron_daro.errors import DataError
from megatron_daro.rollout.minibatches import MiniBatch
from megatron_daro.rollout.sampled_batch import SampledBatch
from megatron_daro.types import Group, Rollout, StepBatch, Verdict

GroupMetrics = Callable[[Sequence[Group]], Mapping[str, float]]
"""Returns key -> number for the complete groups that were sampled for a batch, including filtered and dropped ones."""


def _correctness(groups: Sequence[Group]) -> dict[str, float]:
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    return {
        "accuracy/mean": _mean(verdict.correct for verdict in verdicts),
        "reward/mean": _mean(verdict.reward for verdict in verdicts),
    }


def _responses(groups: Sequence[Group]) -> dict[str, float]:
    """Measure generated tokens, and what ended the answers."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.generated_length for rollout in rollouts]
    return {
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_fraction": _mean(rollout.finish_reason == "length" for rollout in rollouts),
        "response/repetition_fraction": _mean(rollout.finish_reason == "repetition" for rollout in rollouts),
    }


def _conversations(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return turn_metrics(rollouts, [verdict for group in groups for verdict in group.verdicts])


GROUP_METRICS: tuple[GroupMetrics, ...] = (_correctness, _responses, _conversations)
"""Measured in every run."""


def step_metrics(minibatch: MiniBatch, columns: StepBatch, steps_per_batch: int) -> dict[str, float]:
    """Measure the groups of one optimizer step. The bins of a batch's first step include its filtered groups."""
    metrics = group_bins((*minibatch.groups, *minibatch.filtered), columns.rollouts_per_prompt)
    metrics |= length_metrics(columns)
    metrics |= _divergence(minibatch.groups)
    metrics["rollout/epoch"] = float(minibatch.epoch)
    metrics["rollout/generated_tokens"] = float(minibatch.generated_tokens)
    return metrics | {
        "rollout/staleness_mean": mean_staleness(minibatch.groups, minibatch.batch_version, steps_per_batch)
    }


def _divergence(groups: Iterable[Group]) -> dict[str, float]:
    """Return the mean of log p(policy) - log p(teacher), which estimates the reverse KL divergence, over the trained
    tokens of the rollouts that a teacher has read; nothing if there are none."""
    rollouts = [r for group in groups for r in group.rollouts if r.teacher_logprobs is not None]
    parts = [(r.logprobs - r.teacher_logprobs)[r.loss_mask == 1] for r in rollouts]
    return {"distill/reverse_kl": _mean(np.concatenate(parts))} if parts else {}


def batch_metrics(
    batch: SampledBatch, rollouts_per_prompt: int, environment_of_source: Mapping[str, str]
) -> dict[str, float]:
    """Measure every complete group of the batch (surplus belongs to the batch that takes it), and what sampling it
    cost.

    Filtered groups count: without them, dynamic sampling would push the accuracy towards one half.

    Args:
        batch: the sampled batch. rollouts_per_prompt: K. environment_of_source: data source -> environment, of a run
            with several.

    Returns:
        What GROUP_METRICS give, `rollout/rounds`, `throughput/rollout_tokens_per_s`, the batch's counters, and what
        `environment_metrics` says.
    """
    groups, metrics = sampled_groups(batch, rollouts_per_prompt), {"rollout/rounds": float(batch.rounds)}
    for measure in GROUP_METRICS:
        metrics |= measure(groups)
    if batch.rollout_s > 0:
        metrics["throughput/rollout_tokens_per_s"] = batch.generated_tokens / batch.rollout_s
    metrics |= {key: float(value) for key, value in batch.counters.items()}
    return metrics | environment_metrics(groups, environment_of_source)


def sampled_groups(batch: SampledBatch, rollouts_per_prompt: int) -> list[Group]:
    """Return the complete groups that were sampled for a batch, including filtered and dropped ones."""
    return [g for g in (*batch.groups, *batch.filtered, *batch.dropped) if len(g.rollouts) == rollouts_per_prompt]


def environment_metrics(groups: Sequence[Group], environment_of_source: Mapping[str, str]) -> dict[str, float]:
    """Return accuracy, reward and length of each of several environments, and the number of its groups."""
    metrics: dict[str, float] = {}
    for name in sorted(set(environment_of_source.values())):
        own = [group for group in groups if environment_of_source.get(group.prompt.source) == name]
        metrics[f"environments/{name}/groups"] = float(len(own))
        for measure, key, short in _OF_ENVIRONMENTS if own else ():
            metrics[f"environments/{name}/{short}"] = measure(own)[key]
    return metrics


_OF_ENVIRONMENTS = (
    (_correctness, "accuracy/mean", "accuracy"),
    (_correctness, "reward/mean", "reward"),
    (_responses, "response/length_mean", "length_mean"),
    (_responses, "response/truncated_fraction", "truncated_fraction"),
)


_OVERFLOW = ("context_overflow", "out_of_room")


def turn_metrics(rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Measure turns, observed tokens, rewards and the limits that ended conversations; nothing for single answers."""
    turns = [[generated for _, generated in rollout.turns if generated] for rollout in rollouts if rollout.turns]
    if not turns:
        return {}
    reasons = [verdict.reason for rollout, verdict in zip(rollouts, verdicts, strict=True) if rollout.turns]
    observed = [rollout.response_length - rollout.generated_length for rollout in rollouts if rollout.turns]
    return {
        "environment/turns_mean": _mean(len(generated) for generated in turns),
        "environment/turns_max": float(max(len(generated) for generated in turns)),
        "environment/observed_tokens_mean": _mean(observed),
        "environment/max_turns_fraction": _mean(reason == "max_turns" for reason in reasons),
        "environment/max_tokens_fraction": _mean(reason == "max_tokens" for reason in reasons),
        "environment/context_overflow_fraction": _mean(reason in _OVERFLOW for reason in reasons),
    } | _reward_metrics(verdicts)


def _reward_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the mean of each named reward over the conversations that got it."""
    by_name: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, value in verdict.rewards:
            by_name.setdefault(name, []).append(value)
    return {f"environment/reward/{name}": _mean(values) for name, values in sorted(by_name.items())}


def group_bins(groups: Iterable[Group], rollouts_per_prompt: int) -> dict[str, float]:
    """Count complete groups by bin: `difficulty/groups/{k}` for every k in 0..K."""
    bins = Counter(group.bin for group in groups)
    return {f"difficulty/groups/{k}": float(bins[k]) for k in range(rollouts_per_prompt + 1)}


def length_metrics(batch: StepBatch) -> dict[str, float]:
    """Return the mean trained tokens of right and wrong answers per bin, and the loss that they predict.

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


def mean_staleness(groups: Sequence[Group], version: int, steps_per_batch: int) -> float:
    """Return how far the groups' weights are behind a policy of this version, on average, in batches as
    max_staleness."""
    return _mean(version - group.weight_version for group in groups) / steps_per_batch


def _mean(values: Iterable[float]) -> float:
    values_N = np.asarray(list(values), dtype=np.float64)
    return float(values_N.mean()) if len(values_N) else 0.0


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that k of the samples, drawn without replacement, include a right one.

    The unbiased estimate of Chen et al. (arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k). In integers, with
    one correctly rounded division at the end, so it is exact for any n.

    Args:
        samples: n. correct: c of them are right. k: drawn.

    Raises:
        DataError: k is not between 1 and n, or c not between 0 and n.
    """
    if not 1 <= k <= samples:
        raise DataError(f"pass@{k}: got {samples} samples of a problem; allowed: 1 to {samples}; ask for more samples")
    if not 0 <= correct <= samples:
        raise DataError(f"pass@{k}: got {correct} right answers of {samples}; allowed: 0 to {samples}")
    return (comb(samples, k) - comb(samples - correct, k)) / comb(samples, k)
