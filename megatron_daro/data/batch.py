"""Batch assembly: scored groups become the columns of one optimizer step.

Groups (rollouts and verdicts, filtered already) -> StepBatch -> schedule -> packing. Bins come from the verdicts'
`correct`, never from the shaped reward; advantages from the shaped one (advantages.py). Refuses groups that are not
exactly K finished rollouts with as many verdicts, and records whose columns do not fit. Non-finite log-probabilities
pass: if the loss is not finite because of them, the policy does not take the step.

Shape letters: N samples, K rollouts per prompt, T tokens of all samples, R response tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from megatron_daro.algo.advantages import overlong_filter
from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.config.algorithm import PASSES, Overlong
from megatron_daro.data.advantages import shaped_rewards, with_teacher_advantages, with_turn_advantages
from megatron_daro.errors import DataError
from megatron_daro.types import Group, Rollout, StepBatch


def build_step_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    overlong: Overlong = "none",
    max_tokens: int = 0,
    cache_tokens: int = 0,
    length_weight: float = 0.0,
    repetition_penalty: float = 0.0,
    teacher: tuple[float, float] | None = None,
    by_turn: bool = False,
    environments: Mapping[str, int] | None = None,
) -> StepBatch:
    """Return the batch of all rollouts, groups in the given order, rollouts in index order.

    Args:
        groups: complete groups, each group id once; a divisor over the batch spans all of them.
        algorithm: makes the advantages, and knows K.
        overlong: "penalty" adds DAPO's soft length penalty to the rewards; "filter" sets the loss mask of truncated
            rollouts to 0 (they still count in the pass rate and in the group's mean); "both" does both.
        max_tokens: generated tokens beyond which the penalty is -1; what an environment showed does not count.
        cache_tokens: generated tokens before max_tokens over which the penalty falls. A penalty needs both.
        length_weight: factor of Kimi's length reward, which is added to the rewards.
        repetition_penalty: what is taken from the reward of an answer that repeats itself.
        teacher: factors of log p(teacher) - log p(policy) and of the algorithm's advantage, whose sum is a token's own
            advantage. Source: https://thinkingmachines.ai/blog/on-policy-distillation/. None: no distillation.
        by_turn: rewards of turns are normalised over all turns of a group, and a token's advantage is the sum of the
            normalised rewards of its turn and of all later ones. Source: process supervision, DeepSeekMath (arXiv
            2402.03300, section 4.1.3).
        environments: data source -> number of its environment. None: the run has only one.

    Returns:
        The batch; old_logprobs_R and ref_logprobs_R are None, and group_lengths_NK unless the algorithm needs them.

    Raises:
        DataError: no groups, an incomplete group, an aborted rollout, a repeated id, columns that do not fit, a source
            without an environment, a rollout that the teacher has not read, or an unknown `overlong`.
        AlgorithmError: a reward is not finite, or another option is out of range.
    """
    if overlong not in get_args(Overlong):
        raise DataError(f"overlong: got {overlong!r}, allowed are {', '.join(get_args(Overlong))}")
    rollouts_per_prompt = algorithm.rollouts_per_prompt
    _check_groups(groups, rollouts_per_prompt)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    group_ids_N = np.repeat(np.array([g.group_id for g in groups], dtype=np.int64), rollouts_per_prompt)
    correct_N = np.array([v.correct for v in verdicts], dtype=np.uint8)
    truncated_N = np.array([r.finish_reason == "length" for r in rollouts], dtype=np.uint8)
    rewards_N = shaped_rewards(
        rollouts,
        verdicts,
        group_ids_N,
        overlong=(max_tokens, cache_tokens) if overlong in ("penalty", "both") else None,
        length_weight=length_weight,
        repetition_penalty=repetition_penalty,
    )
    rewards, group_ids = torch.from_numpy(rewards_N), torch.from_numpy(group_ids_N)
    batch = StepBatch.of(
        rollouts,
        rollout_logprobs_R=np.concatenate([np.asarray(r.logprobs, dtype=np.float32) for r in rollouts]),
        rewards_N=rewards_N,
        correct_N=correct_N,
        bins_N=pass_rate_bins(torch.from_numpy(correct_N), group_ids, rollouts_per_prompt).numpy(),
        group_ids_N=group_ids_N,
        advantages_N=algorithm.advantages(rewards, group_ids).float().numpy(),
        truncated_N=truncated_N,
        rollouts_per_prompt=rollouts_per_prompt,
        environments_N=None if not environments else _environments(groups, environments, rollouts_per_prompt),
    )
    if overlong in ("filter", "both"):
        batch = replace(batch, loss_mask_R=overlong_filter(batch.loss_mask_R, batch.response_lengths_N, truncated_N))
    if by_turn:
        batch = with_turn_advantages(batch, rollouts, algorithm.std)
    if teacher is not None:
        batch = with_teacher_advantages(batch, rollouts, *teacher)
    return _with_group_lengths(batch) if algorithm.needs_group_lengths else batch


PASSED = tuple(f"{name}_R" for name in PASSES)
"""Columns of a StepBatch that come from forward passes over it."""


def with_columns_of(batch: StepBatch, earlier: Sequence[StepBatch]) -> StepBatch:
    """Return the batch with the columns that forward passes have given to other batches of the same rollouts.

    Args:
        batch: whole groups, each of them in one of `earlier`, in any order.
        earlier: batches that all have the same columns of `PASSED`.
    """
    size, parts = batch.rollouts_per_prompt, dict[int, tuple[StepBatch, slice]]()
    for one in earlier:
        ends = np.cumsum(one.response_lengths_N)[size - 1 :: size].tolist()
        for group_id, start, end in zip(one.group_ids_N[::size].tolist(), [0, *ends[:-1]], ends, strict=True):
            parts[group_id] = one, slice(start, end)
    found = [parts[group_id] for group_id in batch.group_ids_N[::size].tolist()]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(one, name)[where] for one, where in found])
        for name in PASSED
        if getattr(earlier[0], name) is not None
    }
    assert all(len(column_R) == len(batch.loss_mask_R) for column_R in columns.values()), "other rollouts"
    return replace(batch, **columns)


def _with_group_lengths(batch: StepBatch) -> StepBatch:
    """Return the batch, whose groups stand one after the other, with `group_lengths_NK`."""
    lengths_GK = batch.trained_tokens_N.reshape(-1, batch.rollouts_per_prompt)
    return replace(batch, group_lengths_NK=np.repeat(lengths_GK, batch.rollouts_per_prompt, axis=0))


def _environments(groups: Sequence[Group], numbers: Mapping[str, int], rollouts_per_prompt: int) -> np.ndarray:
    """Return each sample's environment number, int64 [N]. Raises DataError: a source has no environment."""
    if strange := sorted({group.prompt.source for group in groups} - numbers.keys()):
        raise DataError(
            f"environments: got problems of the data source {strange[0]!r}; allowed: {', '.join(numbers)}; fix: name "
            "it in the sources of an environment"
        )
    return np.repeat(np.array([numbers[group.prompt.source] for group in groups], np.int64), rollouts_per_prompt)


def _check_groups(groups: Sequence[Group], rollouts_per_prompt: int) -> None:
    if not groups:
        raise DataError("build_step_batch: got no groups; a training step needs at least one")
    seen: set[int] = set()
    for group in groups:
        name = f"group {group.group_id} (prompt {group.prompt.id})"
        if group.group_id in seen:
            raise DataError(f"{name} is given twice; a mini-batch has each group once")
        seen.add(group.group_id)
        if len(group.rollouts) != rollouts_per_prompt or len(group.verdicts) != rollouts_per_prompt:
            raise DataError(
                f"{name} has {len(group.rollouts)} rollouts and {len(group.verdicts)} verdicts, exactly "
                f"{rollouts_per_prompt} are needed; complete the group or drop it and count it"
            )
        if [r.index for r in group.rollouts] != list(range(rollouts_per_prompt)):
            raise DataError(
                f"{name} has rollout indices {[r.index for r in group.rollouts]}, each index once, in order"
            )
        for rollout in group.rollouts:
            _check_rollout(rollout, name)


def _check_rollout(rollout: Rollout, group: str) -> None:
    name = f"{group}, rollout {rollout.index}"
    if not rollout.is_finished:
        raise DataError(
            f"{name} is not finished; only finished rollouts are trained: request it again or drop the group"
        )
    if not 1 <= rollout.prompt_length <= len(rollout.tokens):
        raise DataError(
            f"{name} has prompt_length {rollout.prompt_length} of {len(rollout.tokens)} tokens; at least one prompt "
            "token is needed and no more than there are"
        )
    if wrong := misaligned_columns(rollout):
        raise DataError(f"{name} has {rollout.response_length} response tokens, but {' and '.join(wrong)}; {ALIGNED}")


ALIGNED = "allowed: the prompt, then one log-prob and one mask entry per response token"


def misaligned_columns(rollout: Rollout) -> list[str]:
    """Describe the columns whose length differs from that of the tokens that they belong to."""
    columns = rollout.response_columns
    wrong = [f"{name} has {len(column)}" for name, column in columns.items() if len(column) != rollout.response_length]
    if rollout.routed_experts is not None and len(rollout.routed_experts) != len(rollout.tokens):
        wrong.append(f"of all {len(rollout.tokens)} tokens routed_experts has {len(rollout.routed_experts)}")
    return wrong
