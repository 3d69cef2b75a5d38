"""One rank of a case: runs a small model through Megatron's own schedule, with the function under test as its loss.

Case and function -> gradients of this rank, in float64, reduced as Megatron reduces them, and a trace of each
micro-batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.parallel import Layout, initialize, shutdown
from megatron_daro.algo.difficulty import bin_sums, token_counts
from megatron_daro.errors import AlgorithmError
from megatron_daro.workshop.check_loss.cases import Case
from megatron_daro.workshop.check_loss.outcomes import Trace
from megatron_daro.workshop.check_loss.precision import Precision
from megatron_daro.workshop.check_loss.records import LossBatch, LossFunction, StepInfo
from megatron_daro.workshop.check_loss.samples import StepSamples, local_positions, step_samples
from megatron_daro.workshop.check_loss.token_model import HIDDEN, TokenModel

device.prepare()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

TIMEOUT_S = 30


def join(case: Case, rank: int = 0, init_method: str | None = None) -> None:
    """Join the process group of a case's layout; without `init_method`, a group of this process alone."""
    sizes = {"tensor": case.tensor, "pipeline": case.pipeline, "context": case.context, "data": case.data}
    layout = Layout(**sizes, expert=max(case.expert, 1))
    initialize(layout, rank=rank, init_method=init_method, seed=1, timeout_s=TIMEOUT_S)


def run_case(case: Case, function: LossFunction, traces: list[Trace] | None = None) -> dict[str, Tensor]:
    """Return this rank's gradients after forward, backward and Megatron's reduction.

    Args:
        traces: a list to which ranks of the last stage add one for each micro-batch.

    Raises:
        AlgorithmError: the function returned something that Megatron's schedules do not take.
    """
    samples = step_samples(case)
    config = TransformerConfig(
        num_layers=case.pipeline,
        hidden_size=HIDDEN,
        num_attention_heads=case.tensor,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        context_parallel_size=case.context,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron requires it with variable lengths, even without experts
        calculate_per_token_loss=case.per_token,
        finalize_model_grads_func=finalize_model_grads,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp, TokenModel(config, case.seed, case.expert))
    model.zero_grad_buffer()
    mine = case.schedule[parallel_state.get_data_parallel_rank()]
    traced = [] if traces is None else traces
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, function, case, samples, _step_info(case, samples), traced),
        data_iterator=iter(mine),
        model=[model],
        num_microbatches=case.num_micro_batches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
    if case.expert > 1 and "experts" in gradients:
        gradients[f"experts {parallel_state.get_expert_model_parallel_rank()}"] = gradients.pop("experts")
    return gradients


def _step_info(case: Case, samples: StepSamples) -> StepInfo:
    used = [i for rank in case.schedule for micro_batch in rank for i in micro_batch]
    own = [i for micro_batch in case.schedule[parallel_state.get_data_parallel_rank()] for i in micro_batch]
    masks = [samples.columns[i].mask_R[_held(case, samples, i)] for i in own]
    counts, rows = torch.tensor([len(mask) for mask in masks]), torch.tensor(own)
    return StepInfo(
        num_micro_batches=case.num_micro_batches,
        rank_advantages_T=samples.advantages_N[rows].repeat_interleave(counts),
        rank_rewards_T=samples.rewards_N[rows].repeat_interleave(counts),
        rank_mask_T=torch.cat(masks),
        tokens=int(samples.lengths_N[used].sum()),
        samples=len(used),
        tokens_per_bin=token_counts(samples.bins_N[used], samples.lengths_N[used], case.group),
        rollouts_per_bin=bin_sums(torch.ones_like(samples.bins_N[used]), samples.bins_N[used], case.group),
        rollouts_per_prompt=case.group,
        calculate_per_token_loss=case.per_token,
        data_parallel=case.data,
        context_parallel=case.context,
        tensor_parallel=case.tensor,
        data_group=parallel_state.get_data_parallel_group(),
        data_and_context_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        context_group=parallel_state.get_context_parallel_group(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
    )


def _own_positions(case: Case, samples: StepSamples, sample: int) -> Tensor:
    """Return the response positions whose log-probs this rank computes."""
    return local_positions(samples.columns[sample], parallel_state.get_context_parallel_rank(), case.context)


def _held(case: Case, samples: StepSamples, sample: int) -> Tensor:
    """Return the response positions that this rank's batch holds."""
    return torch.arange(case.responses[sample]) if case.whole else _own_positions(case, samples, sample)


def _forward_step(
    function: LossFunction,
    case: Case,
    samples: StepSamples,
    step: StepInfo,
    traces: list[Trace],
    source: Iterator[tuple[int, ...]],
    model: torch.nn.Module,
) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
    micro_batch = next(source)
    places = [_own_positions(case, samples, i) for i in micro_batch]
    extra = max(case.padding, 0 if sum(map(len, places)) else 1)  # a rank without tokens still takes part
    pad = torch.zeros(extra, dtype=torch.int64)
    inputs = [samples.columns[i].inputs_R[p] for i, p in zip(micro_batch, places, strict=True)]
    labels = [samples.columns[i].labels_R[p] for i, p in zip(micro_batch, places, strict=True)]
    labels_T = torch.cat([*labels, pad])

    def loss(output: Tensor) -> tuple[Any, ...]:
        logprobs_T = -vocab_parallel_cross_entropy(output, labels_T[:, None])[:, 0].double()  # from float32
        trace = _trace(case, samples, micro_batch, places, logprobs_T, len(traces))
        traces.append(trace)
        held = places
        if case.whole:
            held = [_held(case, samples, i) for i in micro_batch]
            logprobs_T = _gathered(places, held, logprobs_T)
        batch = _batch(case, samples, micro_batch, held, len(logprobs_T) - sum(map(len, held)), logprobs_T)
        with Precision(widen=case.precise) as precision:
            result = _checked(function(batch, step))
        trace.types = tuple(sorted(precision.types))
        trace.returned = float(result[1]) if len(result) == 3 else None
        return result

    return model(torch.cat([*inputs, pad])), loss


def _trace(
    case: Case,
    samples: StepSamples,
    micro_batch: tuple[int, ...],
    places: list[Tensor],
    logprobs_T: Tensor,
    number: int,
) -> Trace:
    """Return the trace of a micro-batch, whose coefficients the backward pass will set."""
    extra = torch.full((len(logprobs_T) - sum(map(len, places)),), -1)
    columns = [samples.columns[i] for i in micro_batch]
    old_T = torch.cat([*(c.old_R[p] for c, p in zip(columns, places, strict=True)), extra.double()])
    masks = [c.mask_R[p] for c, p in zip(columns, places, strict=True)]
    pairs = list(zip(micro_batch, places, strict=True))
    trace = Trace(
        data=parallel_state.get_data_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch=number,
        samples_T=torch.cat([*(torch.full_like(p, i) for i, p in pairs), extra]),
        positions_T=torch.cat([*places, extra]),
        mask_T=torch.cat([*masks, torch.zeros(len(extra), dtype=torch.bool)]),
        old_T=old_T,
        advantages_T=torch.cat([*(samples.advantages_N[i].expand(len(p)) for i, p in pairs), extra.double()]),
        coefficients_T=torch.zeros(len(logprobs_T), dtype=torch.float64),
    )

    def keep(gradient: Tensor) -> None:
        trace.coefficients_T = gradient.detach().clone()

    if logprobs_T.requires_grad:
        logprobs_T.register_hook(keep)
    return trace


def _gathered(places: list[Tensor], held: list[Tensor], logprobs_T: Tensor) -> Tensor:
    """Return the log-probs of whole samples, of which only this rank's own have a gradient. Collective over
    context-parallel ranks."""
    starts = torch.tensor([0, *(len(p) for p in held)]).cumsum(0)
    total = int(starts[-1])
    index = torch.cat([p + start for p, start in zip(places, starts[:-1], strict=True)])
    own_T = torch.zeros(max(total, 1), dtype=torch.float64).index_add(0, index, logprobs_T[: len(index)])
    all_T = own_T.detach().clone()
    dist.all_reduce(all_T, group=parallel_state.get_context_parallel_group())
    whole_T = own_T + (all_T - own_T.detach())
    return torch.cat([whole_T[:total], logprobs_T[len(index) :]])


def _batch(
    case: Case, samples: StepSamples, micro_batch: tuple[int, ...], places: list[Tensor], extra: int, logprobs_T: Tensor
) -> LossBatch:
    def column(values: list[Tensor], fill: float) -> Tensor:
        return torch.cat([*values, torch.full((extra,), fill, dtype=values[0].dtype)])

    rows = torch.tensor(micro_batch, dtype=torch.int64)
    columns = [samples.columns[i] for i in micro_batch]
    counts = torch.tensor([len(p) for p in places])
    mask_T = column([c.mask_R[p] for c, p in zip(columns, places, strict=True)], False)
    old_T = column([c.old_R[p] for c, p in zip(columns, places, strict=True)], -2.0)
    ref_T = column([c.ref_R[p] for c, p in zip(columns, places, strict=True)], -2.0)
    if case.on_policy:
        old_T = logprobs_T.detach().clone()
    if case.poison:
        old_T, ref_T = torch.where(mask_T, old_T, torch.nan), torch.where(mask_T, ref_T, torch.nan)
    sequence_T = column([torch.arange(len(rows)).repeat_interleave(counts)], 0)
    return LossBatch(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_T,
        ref_logprobs_T=ref_T,
        advantages_T=samples.advantages_N[rows][sequence_T],
        rewards_T=samples.rewards_N[rows][sequence_T],
        mask_T=mask_T,
        sequence_T=sequence_T,
        lengths_M=samples.lengths_N[rows],
        bins_M=samples.bins_N[rows],
        sample_ids_M=rows,
    )


def _checked(result: object) -> tuple[Any, ...]:
    """Return the function's result in the form that the schedule takes."""
    if isinstance(result, Tensor):
        return result, {}
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], Tensor):
        raise AlgorithmError(
            f"loss function: returned {type(result).__name__}, allowed are loss, (loss, report) and (loss, number of "
            "tokens, report), as Megatron's schedules take them"
        )
    if len(result) == 3:
        tokens = torch.as_tensor(result[1])
        return result[0], tokens.to(torch.int), result[2]
    return result


def under_torchrun(case: Case, function: LossFunction) -> None:
    """Run a case in the processes of torchrun and print, on rank 0, how far its gradients are from the reference.

    Rank 0 then runs the reference alone, in a process group of its own.
    """
    rank = int(os.environ["RANK"])
    join(case, rank, "env://")
    outcome = whole_gradients(case, run_case(case, function))
    shutdown()
    if rank:
        return
    reference = case.reference()
    join(reference)
    wanted = run_case(reference, function)
    shutdown()
    for name, gradient in wanted.items():
        size = float(gradient.abs().max())
        print(f"{name}: largest difference {float((outcome[name] - gradient).abs().max()):.3e}, gradient {size:.3e}")


def whole_gradients(case: Case, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the gradients of all stages, tensor-parallel and expert-parallel ranks, on every rank. Collective."""
    parts: list[Any] = [None] * case.world_size
    dist.all_gather_object(parts, own)
    return joined(case, parts)


def joined(case: Case, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole gradients from those of all ranks, in rank order (tensor-parallel ranks fastest, stages slowest)."""
    first, last = parts[0], parts[-case.tensor :]
    whole = {"embedding": first["embedding"], "output": torch.cat([part["output"] for part in last])}
    if case.expert == 1:
        whole["experts"] = first["experts"]
    elif case.expert:
        held = {name: rows for part in parts for name, rows in part.items() if name.startswith("experts ")}
        whole["experts"] = torch.cat([held[f"experts {i}"] for i in range(case.expert)])
    return whole
