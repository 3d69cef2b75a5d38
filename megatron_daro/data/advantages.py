"""The rewards and advantages that the driver computes, over whole groups, before the batch is split over ranks:

    shaped_rewards            the verdicts' rewards, plus what answers gain or lose by their length and repetition
    Algorithm.advantages      an advantage for each rollout, from these rewards
    with_turn_advantages      replaces it by an advantage for each token, from the rewards of turns
    with_teacher_advantages   combines either with an advantage for each token, from what a teacher said

Ranks compute what needs the columns of their forward passes, at every step before its loss (actor/advantages.py): a KL
in the rewards, from which the advantages of rollouts are computed again, and an algorithm's own advantages of tokens,
perhaps from a critic's values. Options that would set advantages in both places are refused (config/rules/algorithm.py,
runtime/run_algorithm.py).

Shape letters: N samples, R response tokens of all samples, U turns of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_daro.algo.advantages import AdvantageStd, group_advantages, length_rewards, overlong_penalty
from megatron_daro.errors import DataError
from megatron_daro.types import Rollout, StepBatch, Verdict


def shaped_rewards(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    group_ids_N: np.ndarray,
    *,
    overlong: tuple[int, int] | None,
    length_weight: float,
    repetition_penalty: float,
) -> np.ndarray:
    """Return the rewards of training, float32 [N].

    Args:
        overlong: (max_tokens, cache_tokens) of DAPO's soft length penalty; None: no penalty.
        length_weight, repetition_penalty: see `build_step_batch`.
    """
    rewards_N = np.array([v.reward for v in verdicts], dtype=np.float32)
    generated_N: np.ndarray = np.array([r.generated_length for r in rollouts], dtype=np.int64)
    if length_weight:
        correct_N = np.array([v.correct for v in verdicts], dtype=np.uint8)
        shorter_N = length_rewards(generated_N, correct_N, group_ids_N)
        rewards_N = (rewards_N + length_weight * shorter_N).astype(np.float32)
    if repetition_penalty:
        repeating_N = np.array([r.finish_reason == "repetition" for r in rollouts])
        rewards_N = (rewards_N - repetition_penalty * repeating_N).astype(np.float32)
    return rewards_N if overlong is None else rewards_N + overlong_penalty(generated_N, *overlong)


def with_turn_advantages(batch: StepBatch, rollouts: Sequence[Rollout], std: AdvantageStd) -> StepBatch:
    """Return the batch with token advantages: the sum of the normalised rewards of the token's turn and of all later
    ones.

    Source: process supervision, DeepSeekMath (arXiv 2402.03300, section 4.1.3).
    """
    rewards = [_turn_rewards(r, float(reward)) for r, reward in zip(rollouts, batch.rewards_N, strict=True)]
    ids_U = np.repeat(batch.group_ids_N, [len(one) for one in rewards])
    normal_U = group_advantages(torch.from_numpy(np.concatenate(rewards)), torch.from_numpy(ids_U), std).numpy()
    ends = np.cumsum([len(one) for one in rewards]).tolist()
    parts = []
    for rollout, start, end in zip(rollouts, [0, *ends[:-1]], ends, strict=True):
        parts.append(np.repeat(np.cumsum(normal_U[start:end][::-1])[::-1], _turn_lengths(rollout)))
    return _with_token_advantages(batch, np.concatenate(parts))


def with_teacher_advantages(
    batch: StepBatch, rollouts: Sequence[Rollout], coefficient: float, reward_weight: float
) -> StepBatch:
    """Return the batch with the advantages of distillation, 0 where nothing is trained.

    A token's is coefficient * (log p(teacher) - log p(policy)) + reward_weight * its advantage without distillation.

    Raises:
        DataError: the teacher has not read a rollout.

    Source: https://thinkingmachines.ai/blog/on-policy-distillation/.
    """
    untaught = next((r for r in rollouts if r.teacher_logprobs is None and r.response_length), None)
    if untaught is not None:
        raise DataError(
            f"algorithm.distill: group {untaught.group_id} rollout {untaught.index} has no log-probs of the teacher; "
            "allowed: rollouts that it has read; fix: replay or resume a run with algorithm.distill, or leave its urls "
            "empty"
        )
    teacher_R = np.concatenate([np.zeros(0, np.float32), *(r.teacher_logprobs for r in rollouts if r.response_length)])
    own_R = batch.token_advantages_R
    if own_R is None:
        own_R = np.repeat(batch.advantages_N, batch.response_lengths_N)
    return _with_token_advantages(batch, coefficient * (teacher_R - batch.rollout_logprobs_R) + reward_weight * own_R)


def _with_token_advantages(batch: StepBatch, advantages_R: np.ndarray) -> StepBatch:
    """Return the batch with these token advantages, set to 0 where nothing is trained."""
    return replace(batch, token_advantages_R=np.where(batch.loss_mask_R == 1, advantages_R, 0).astype(np.float32))


def _turn_rewards(rollout: Rollout, reward: float) -> np.ndarray:
    """Return the rewards of the turns. Their sum is `reward`: the last one gets the difference, such as a penalty."""
    by_turn = np.array([one.reward for one in rollout.reports] or [0.0])
    by_turn[-1] += reward - by_turn.sum()
    return by_turn


def _turn_lengths(rollout: Rollout) -> list[int]:
    """Return how many response tokens belong to each entry of `_turn_rewards`."""
    if not rollout.reports:
        return [rollout.response_length]
    lengths = [seen + made for seen, made in rollout.turns if made]
    lengths[-1] += rollout.response_length - sum(lengths)  # what was observed after the last answer
    return lengths
