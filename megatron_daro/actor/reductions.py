"""Sums over ranks, a function for each group of ranks: which one it is decides whether a loss is exact.

Data-parallel ranks have other samples. Context-parallel ranks have the same samples, and compute other tokens of them.
Tensor-parallel ranks know the same of each token. Of the pipeline's stages the last alone has a loss.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.megatron import parallel_state


def sum_over_data_parallel(values: Tensor) -> Tensor:
    """Return float64 on the host: the sum of what each shard says of its samples, over data-parallel ranks.

    Context-parallel ranks hold the same samples, so the sum does not run over them.
    """
    total = values.detach().to(device.current(), torch.float64, copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def sum_over_context(values: Tensor) -> Tensor:
    """Return the sum of what each rank computed of its tokens, over the context-parallel ranks that share the samples;
    no gradient passes."""
    total = values.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


def reduced_on_all_stages(values: Tensor, over: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce what the last stage computed of its tokens over data- and context-parallel ranks, in place, and give it to
    the other stages. Collective."""
    dist.all_reduce(values, op=over, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def finite_on_all_ranks(value: float) -> bool:
    """Return the same answer on every rank of the world: a norm may be taken over a part of it only."""
    flag = torch.tensor([float(math.isfinite(value))], device=device.current())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item() > 0)
