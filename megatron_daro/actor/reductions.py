"""Sums over ranks, a function for each group of ranks: a loss is exact only if each sum uses the right one.

Data-parallel ranks have different samples. Context-parallel ranks have the same samples, and compute different tokens
of them. Tensor-parallel ranks have the same results for each token. Only the last pipeline stage has a loss.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.megatron import parallel_state


def sum_over_data_parallel(values: Tensor) -> Tensor:
    """Sum values of each shard's samples over data-parallel ranks. Returns float64 on the host.

    Context-parallel ranks hold the same samples, so the sum does not run over them.
    """
    total = values.detach().to(device.current(), torch.float64, copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def sum_over_context(values: Tensor) -> Tensor:
    """Sum what each rank computed for its tokens over the context-parallel ranks that share the samples; no gradient
    passes."""
    total = values.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


def reduced_on_all_stages(values: Tensor, over: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce what the last stage computed over data- and context-parallel ranks, in place, and broadcast it to the
    other stages. Collective."""
    dist.all_reduce(values, op=over, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def finite_on_all_ranks(value: float) -> bool:
    """Whether the value is finite on every rank of the world: a norm may have been taken over some ranks only."""
    flag = torch.tensor([float(math.isfinite(value))], device=device.current())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item() > 0)
