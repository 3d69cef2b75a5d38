"""What a checked function gets: one micro-batch, and what a host knows about the whole step.

Shape letters: T tokens that this rank holds, M samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

LossFunction = Callable[["LossBatch", "StepInfo"], tuple[Any, ...]]
"""(loss, report) or (loss, number of tokens, report), as Megatron's schedules want it."""


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One micro-batch on one rank, packed: the samples' response positions end to end, then padding.

    Under context parallelism a rank holds two chunks of each sample, as Megatron's zigzag splits it; some may be empty.
    In cases of whole samples it holds all of each sample, as verl's Megatron engine gathers them, but only its own
    chunks have a gradient. logprobs_T: float64, of the sampled tokens, with gradient, the same on every tensor-parallel
    rank. old_logprobs_T, ref_logprobs_T (of the reference policy), advantages_T, rewards_T: float64. mask_T: bool,
    which tokens are trained; where it is false the other columns have values too, and in some cases NaN. sequence_T:
    int64, 0..M-1. lengths_M: int64, trained tokens of the whole sample, over all context-parallel ranks. bins_M: int64,
    right answers of each sample's group. sample_ids_M: int64, place in the step.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    ref_logprobs_T: Tensor
    advantages_T: Tensor
    rewards_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor
    lengths_M: Tensor
    bins_M: Tensor
    sample_ids_M: Tensor

    def __len__(self) -> int:
        return len(self.lengths_M)


@dataclass(frozen=True, slots=True, eq=False)
class StepInfo:
    """What a host knows about the whole optimizer step before its first micro-batch.

    num_micro_batches: on this rank. rank_advantages_T, rank_rewards_T, rank_mask_T: columns of all its micro-batches,
    end to end in their order and without padding, for statistics before the first micro-batch. tokens, samples: trained
    tokens and samples of all data-parallel ranks. tokens_per_bin, rollouts_per_bin: int64 [K+1], trained tokens and
    samples per number of right answers. data_parallel, context_parallel, tensor_parallel: sizes. data_group,
    data_and_context_group, context_group, tensor_group: process groups.
    """

    num_micro_batches: int
    rank_advantages_T: Tensor
    rank_rewards_T: Tensor
    rank_mask_T: Tensor
    tokens: int
    samples: int
    tokens_per_bin: Tensor
    rollouts_per_bin: Tensor
    rollouts_per_prompt: int
    calculate_per_token_loss: bool
    data_parallel: int
    context_parallel: int
    tensor_parallel: int
    data_group: dist.ProcessGroup
    data_and_context_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
