"""What the losses of a step need: rewards with the KL in them, advantages per token, a critic's targets.

Columns of the passes -> the algorithm's own methods (`advantages` gets the samples of all data-parallel ranks; the
others get this rank's, and a function that sums over the ranks) -> a shard with advantages, before its forward pass.
Refuses columns that were not computed, and values that are not finite, on every rank alike.

Legend: N samples, R response tokens of this shard.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_daro.actor.megatron import parallel_state
from megatron_daro.actor.reductions import sum_over_data_parallel
from megatron_daro.algo.corrections import sample_sums
from megatron_daro.algo.objective import ObjectiveSettings, kl_terms
from megatron_daro.algo.weighting import Algorithm, TokenColumns
from megatron_daro.errors import AlgorithmError, NonFiniteError
from megatron_daro.types import StepBatch


def with_advantages(algorithm: Algorithm, batch: StepBatch, settings: ObjectiveSettings) -> StepBatch:
    """Return this rank's shard with what the losses of the step need. Collective over the data-parallel group.

    Raises:
        AlgorithmError: advantages per token do not fit the batch, a column was not computed, or tokens have rewards but
            the algorithm has one advantage per rollout. NonFiniteError: a reward, advantage or target is not finite;
            raised on every rank.
    """
    token_rewards_R = None
    if settings.reward_kl_coefficient > 0 and settings.reward_kl_per_token:
        token_rewards_R = -settings.reward_kl_coefficient * _kl_of_tokens(batch, settings)
    elif settings.reward_kl_coefficient > 0:
        batch = with_kl_in_reward(algorithm, batch, settings)
    if algorithm.token_columns is not None:
        return with_token_advantages(algorithm, batch, token_rewards_R)
    if token_rewards_R is not None:
        raise AlgorithmError(
            f"kl.place: got 'token_reward' with algorithm {algorithm.name}, which has one advantage for all tokens of "
            "a rollout; allowed is 'reward', or an algorithm with a critic"
        )
    return batch


def with_kl_in_reward(algorithm: Algorithm, batch: StepBatch, settings: ObjectiveSettings) -> StepBatch:
    """Return this rank's shard with coefficient * KL, summed over an answer's trained tokens, subtracted from each
    reward, and with new advantages from the rewards of the whole step. Collective over the data-parallel group.

    The KL is that of the weights that the batch began with, from the columns of its passes; no gradient flows.

    Raises:
        AlgorithmError: a column was not computed. NonFiniteError: a reward is not finite with the KL; raised on every
            rank.

    Source: R - beta * sum of log(pi / pi_ref) as in RLOO, arXiv 2402.14740, eq. 1, with the estimator of the options.
    """
    mask_R = torch.from_numpy(batch.loss_mask_R.astype(bool))
    sample_R = torch.arange(len(batch)).repeat_interleave(torch.from_numpy(batch.response_lengths_N))
    kl_N = sample_sums(_kl_of_tokens(batch, settings), mask_R, sample_R, len(batch))
    rewards_N = torch.from_numpy(batch.rewards_N).double() - settings.reward_kl_coefficient * kl_N
    (rewards, group_ids), own = _of_the_step(rewards_N, torch.from_numpy(batch.group_ids_N).double())
    if wrong := int((~rewards.isfinite()).sum()):
        raise NonFiniteError(
            f"kl.place reward: {wrong} of the step's {len(rewards)} rewards are not finite with the KL"
        )
    advantages = algorithm.advantages(rewards, group_ids.long())[own]
    return replace(batch, rewards_N=rewards_N.float().numpy(), advantages_N=advantages.float().numpy())


def _kl_of_tokens(batch: StepBatch, settings: ObjectiveSettings) -> Tensor:
    """Return each token's KL, float64 [R], 0 where nothing is trained. Raises AlgorithmError: a column was not
    computed."""
    old_R, ref_R = batch.old_logprobs_R, batch.ref_logprobs_R
    if old_R is None or ref_R is None:
        place = "token_reward" if settings.reward_kl_per_token else "reward"
        raise AlgorithmError(
            f"kl.place: got {place!r}, but {'old' if old_R is None else 'ref'}_logprobs were not computed for this "
            "batch; let `Policy.prepare` see the batch before it is trained"
        )
    mask_R = torch.from_numpy(batch.loss_mask_R.astype(bool))
    old, ref = (torch.where(mask_R, torch.from_numpy(values_R).double(), 0.0) for values_R in (old_R, ref_R))
    return kl_terms(old, ref, settings.kl_estimator)


def _of_the_step(*columns_N: Tensor) -> tuple[list[Tensor], slice]:
    """Gather columns [N] of the samples of all data-parallel ranks; return them, and where this rank's are in them."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    sizes = torch.zeros(size, dtype=torch.float64)
    sizes[rank] = len(columns_N[0])
    sizes = sum_over_data_parallel(sizes).long()
    start = int(sizes[:rank].sum())
    own = slice(start, start + len(columns_N[0]))
    together = torch.zeros(len(columns_N), int(sizes.sum()), dtype=torch.float64)
    together[:, own] = torch.stack(columns_N)
    return list(sum_over_data_parallel(together)), own


def with_token_advantages(algorithm: Algorithm, batch: StepBatch, token_rewards_R: Tensor | None = None) -> StepBatch:
    """Return this rank's shard with the algorithm's advantages per token, and with the critic's targets if there is
    one. Collective over the data-parallel group. Args: token_rewards_R: see `TokenColumns`.

    Raises:
        AlgorithmError: a column was not computed, or the algorithm failed or did not return a floating tensor [R].
            NonFiniteError: advantages or targets of trained tokens are not finite; raised on every rank, whichever rank
            has them.
    """
    tokens = _token_columns(algorithm, batch, token_rewards_R)
    batch = replace(batch, token_advantages_R=_made_per_token(algorithm, "token_advantages", tokens, "an advantage"))
    if "values" not in tokens.columns:
        return batch
    return replace(batch, value_targets_R=_made_per_token(algorithm, "value_targets", tokens, "a target of the critic"))


def _made_per_token(algorithm: Algorithm, method: str, tokens: TokenColumns, what: str) -> np.ndarray:
    """Return what a method of the algorithm computes, checked: float32 [R], 0 where nothing is trained. Collective;
    raises the same errors as `with_token_advantages`."""
    try:
        values_R: object = getattr(algorithm, method)(tokens)
    except Exception as error:  # a user's class may raise anything
        raise AlgorithmError(
            f"algorithm {algorithm.name}, {method}: {type(error).__name__}: {error}; fix the class"
        ) from error
    if not isinstance(values_R, Tensor) or not values_R.is_floating_point() or values_R.shape != tokens.mask_R.shape:
        got = f"{values_R.dtype} {list(values_R.shape)}" if isinstance(values_R, Tensor) else type(values_R).__name__
        raise AlgorithmError(
            f"algorithm {algorithm.name}, {method}: got {got}, allowed is a floating tensor "
            f"[{len(tokens.mask_R)}], one number for each response token of these {len(tokens.lengths_N)} samples"
        )
    kept_R = torch.where(tokens.mask_R, values_R.detach().cpu().float(), 0.0)
    wrong_R = ~kept_R.isfinite()
    total = int(sum_over_data_parallel(wrong_R.sum().double()))
    if total:
        raise NonFiniteError(
            f"algorithm {algorithm.name}, {method}: {total} of the step's trained tokens have {what} "
            f"that is not finite, {int(wrong_R.sum())} of them on this rank"
        )
    return kept_R.numpy()


def _token_columns(algorithm: Algorithm, batch: StepBatch, token_rewards_R: Tensor | None) -> TokenColumns:
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
        sum_over_step=sum_over_data_parallel,
        token_rewards_R=token_rewards_R,
    )
