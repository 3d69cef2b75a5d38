"""Micro-batches through the pipeline: packing, Megatron's schedule, and log-probabilities at the trained positions.

Shard + micro-batch indices -> packed micro-batches -> hidden states -> per-token log-probabilities and
entropy, which actor/loss.py turns into a loss, and `response_column` into the column of a pass.

Legend: T packed tokens of a micro-batch on this CP rank, I selected positions of them, P positions of its response
tokens, D hidden, R response tokens of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.compat import HiddenStateGPTModel, PipelineMessages, schedule_groups
from megatron_daro.actor.logprobs import check_tokens, vocab_parallel_logprobs
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    PackedSeqParams,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_forward_backward_func,
    parallel_state,
)
from megatron_daro.actor.reductions import sum_over_context
from megatron_daro.actor.routing_replay import check_numbers, replay_routing
from megatron_daro.config.actor import pack_multiples
from megatron_daro.data.packing import PackedMicroBatch, collect_responses, context_parallel_slice, pack
from megatron_daro.data.schedule import interleaved_group
from megatron_daro.types import Sequences

MicroBatches = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How log-probabilities are computed: arguments of `vocab_parallel_logprobs`."""

    vocab_size: int
    temperature: float = 1.0
    chunk_tokens: int | None = None
    kernel: str = "auto"


def packed_micro_batches(
    config: TransformerConfig, batch: Sequences, micro_batches: MicroBatches, *, vocab_size: int
) -> list[PackedMicroBatch]:
    """Return this rank's micro-batches on its device, sliced for context parallelism, padded as the model needs it.

    Everything is checked before the data goes to a GPU, so that the host never has to wait for it.

    Raises:
        DataError: a token outside the vocabulary, or an expert that the model does not have.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    recipe = config.fp8_recipe if config.fp8 else None
    sequence_multiple, total_multiple = pack_multiples(tensor, context, config.sequence_parallel, recipe)
    rank = parallel_state.get_context_parallel_rank()
    packs = []
    for indices in micro_batches:
        whole = pack(batch, indices, sequence_multiple=sequence_multiple, total_multiple=total_multiple)
        check_tokens(whole.tokens_T, vocab_size)
        check_numbers(whole, config.num_moe_experts or 0)
        packs.append(context_parallel_slice(whole, rank, context).to(device.current()))
    return packs


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    packs: Sequence[PackedMicroBatch],
    on_hidden: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's forward-backward schedule over the micro-batches.

    Args:
        chunks: the parts of the model on this rank.
        packs: one per micro-batch; the same number on every rank.
        on_hidden: called on the last stage: `on_hidden(packed, hidden_T1D)` returns what Megatron expects of a loss
            function; with `forward_only`, anything.

    Returns:
        Per micro-batch the report of `on_hidden`, or with `forward_only` all that it returned; empty on other stages.
    """
    schedule, config = get_forward_backward_func(), chunks[0].module.config
    longest = max(len(packed.tokens_T) for packed in packs)
    if len(chunks) > 1:
        packs = interleaved(config, packs)
    messages, pipeline = None, dict[str, Any]()
    if config.pipeline_model_parallel_size > 1:
        messages = PipelineMessages(config, [len(packed.tokens_T) for packed in packs], len(chunks))
        pipeline = {"p2p_communicator": messages, "pg_collection": schedule_groups()}
    reported = schedule(
        forward_step_func=partial(_forward_step, on_hidden),
        data_iterator=iter(packs) if len(chunks) == 1 else [iter(packs) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(packs),
        seq_length=longest,  # an upper bound; stages know the real lengths
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **pipeline,
    )
    if messages:
        messages.check_received(forward_only=forward_only)
    return reported


def interleaved(config: TransformerConfig, packs: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
    """Return the micro-batches, filled up with silent ones to a number that the interleaved schedule takes, and set the
    size of its groups in `config`."""
    count, group = interleaved_group(len(packs), config.pipeline_model_parallel_size)
    config.microbatch_group_size_per_vp_stage = group
    return [*packs, *[min(packs, key=lambda p: len(p.tokens_T)).silent()] * (count - len(packs))]


def _forward_step(
    on_hidden: Callable[..., Any], data: Iterator[PackedMicroBatch], model: DistributedDataParallel
) -> tuple[Tensor, Callable[..., Any]]:
    packed = next(data)
    replay_routing(model.module, packed)
    hidden = model(
        packed.tokens_T[None],
        packed.positions_T[None],
        None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
        ),
    )
    return hidden, lambda out, non_loss_data=False: on_hidden(packed, out)


def position_logprobs(
    model: HiddenStateGPTModel,
    hidden_T1D: Tensor,
    labels_I: Tensor,
    positions_I: Tensor,
    settings: OutputSettings,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute log-probability of the labels and entropy at chosen positions, the same on every tensor-parallel rank.

    Args:
        model: the unwrapped last stage.
        hidden_T1D: its output; under sequence parallelism this rank's T / TP tokens.
        labels_I: global vocabulary ids, long, of a pack that `packed_micro_batches` checked.
        positions_I: which of the T tokens, long, each once.
        with_entropy: False returns zeros for it.

    Returns:
        logprobs_I, entropy_I in nats, fp32, differentiable.
    """
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_T1D)
    weight = model.output_weight()
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    return vocab_parallel_logprobs(
        hidden.squeeze(1).index_select(0, positions_I),  # unlike hidden[positions_I], its gradient needs no sort
        weight,
        labels_I,
        group=parallel_state.get_tensor_model_parallel_group() if size > 1 else None,
        vocab_start=rank * weight.shape[0],
        vocab_size=settings.vocab_size,
        temperature=settings.temperature,
        chunk_tokens=settings.chunk_tokens,
        kernel=settings.kernel,
        with_entropy=with_entropy,
        labels_checked=True,
    )


def response_logprobs(
    chunks: Sequence[DistributedDataParallel],
    batch: Sequences,
    micro_batches: MicroBatches,
    settings: OutputSettings,
) -> np.ndarray | None:
    """Compute the log-probability of every response token under the current weights. See `response_column`."""
    last: HiddenStateGPTModel = chunks[-1].module

    def at(packed: PackedMicroBatch, hidden_T1D: Tensor, positions_P: Tensor) -> Tensor:
        labels_P = packed.labels_T[positions_P]
        return position_logprobs(last, hidden_T1D, labels_P, positions_P, settings, with_entropy=False)[0]

    return response_column(chunks, batch, micro_batches, at, vocab_size=settings.vocab_size)


def response_column(
    chunks: Sequence[DistributedDataParallel],
    batch: Sequences,
    micro_batches: MicroBatches,
    at: Callable[[PackedMicroBatch, Tensor, Tensor], Tensor],
    *,
    vocab_size: int,
) -> np.ndarray | None:
    """Compute one number for every response token from the last stage's hidden states, without gradient.

    Args:
        chunks, batch, micro_batches: parts of the model, shard, and its rows by micro-batch.
        at: (packed, hidden_T1D, positions_P) -> fp32 [P]; called on the last stage.
        vocab_size: token ids must be below it.

    Returns:
        float32 [R] in the batch's order on every rank of the last stage; None on other stages.
    """
    last: HiddenStateGPTModel = chunks[-1].module
    packs = packed_micro_batches(last.config, batch, micro_batches, vocab_size=vocab_size)

    def on_hidden(packed: PackedMicroBatch, hidden: Tensor) -> tuple[Tensor, PackedMicroBatch]:
        positions = packed.response_slots_P
        values_P = at(packed, hidden, positions)
        return torch.zeros(len(packed.tokens_T), device=hidden.device).index_copy(0, positions, values_P), packed

    was_training = last.training
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        parts = run_schedule(chunks, packs, on_hidden, forward_only=True)
    for chunk in chunks:
        chunk.train(was_training)
    if not parallel_state.is_pipeline_last_stage():
        return None
    return _join_context(collect_responses(parts, int(batch.response_lengths_N.sum())))


def _join_context(column_R: np.ndarray) -> np.ndarray:
    """Fill in the tokens that other context-parallel ranks computed; NaN stays where no rank computed a value."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return column_R
    own_R = torch.from_numpy(column_R).to(device.current())
    known_R = sum_over_context((~own_R.isnan()).float())
    values_R = sum_over_context(own_R.nan_to_num())
    return torch.where(known_R > 0, values_R, torch.nan).cpu().numpy()
