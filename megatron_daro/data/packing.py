"""Packing: the samples of one micro-batch end to end in one row ("thd" layout), and the way back.

Sequences + one micro-batch of the schedule -> PackedMicroBatch -> model -> values_T -> response columns. Every column
stands at the position that *predicts*: position t sees token t and its label is token t + 1. So the log-probability a
model returns at t is that of `labels_T[t]`, and nothing has to be shifted afterwards.
Refuses samples without a prompt token (their first response token has no position that predicts it), repeated or
unknown sample indices, and multiples below one. It never truncates and never drops a token.

Shape letters: M samples of the micro-batch, T packed tokens with padding, R response tokens of the batch, P response
tokens of this micro-batch (of this context-parallel slice), J those of them that are trained, C sequences of the
samples (one for each sample, or several where an agent rewrote its history: `Sequences.contexts_N`), G the same, and
one more where the end is padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_daro.errors import DataError
from megatron_daro.types import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class PackedMicroBatch:
    """One micro-batch as position-aligned columns.

    tokens_T, labels_T, positions_T int64 (labels are 0 where there is nothing to predict); positions start at 0 in
    every sequence. mask_T float32, 1 where the label is a trained response token. sample_T int64, index into
    sample_indices, -1 on padding. cu_seqlens int32 [G + 1], boundaries of the whole (unsliced) pack with padding
    included; max_seqlen the longest sequence. sample_indices int64 [M], rows of the batch. response_slots_P int64:
    where in T the response tokens are predicted; batch_slots_P int64: where they stand in the batch's R.
    trained_slots_J int64: where mask_T is set, computed on the CPU, since on a GPU the host would have to wait for it.
    rollout_logprobs_T, old_logprobs_T, ref_logprobs_T, token_advantages_T, values_T, value_targets_T float32, 0 outside
    responses: the batch's _R columns of these names; None where the batch has none. routed_experts_TLK int16 [T,
    layers, experts of a token], -1 on padding and where they are unknown. context_parallel_size: into how many slices
    the pack was cut; the T columns are one of them.
    """

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    mask_T: Tensor
    sample_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    sample_indices: Tensor
    response_slots_P: Tensor
    batch_slots_P: Tensor
    trained_slots_J: Tensor
    rollout_logprobs_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    token_advantages_T: Tensor | None = None
    values_T: Tensor | None = None
    value_targets_T: Tensor | None = None
    routed_experts_TLK: Tensor | None = None
    context_parallel_size: int = 1

    def __len__(self) -> int:
        return len(self.sample_indices)

    def silent(self) -> PackedMicroBatch:
        """Return the same tokens with nothing to train or to report, to fill up a schedule."""
        none = {name: getattr(self, name)[:0] for name in ("response_slots_P", "batch_slots_P", "trained_slots_J")}
        return replace(self, mask_T=torch.zeros_like(self.mask_T), **none)

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return the same micro-batch on another device. A GPU copies from pinned memory, and the host does not wait
        for it."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
        if torch.device(device).type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


def pack(
    batch: Sequences,
    indices: Sequence[int],
    *,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
) -> PackedMicroBatch:
    """Put samples end to end.

    Args:
        batch: where the samples are.
        indices: rows of the batch, in the order wanted; none for a micro-batch of padding alone, which trains and
            reports nothing.
        sequence_multiple: tokens; each sequence is padded at its end to a multiple of it (2 * CP for context parallel).
        total_multiple: tokens; the pack is padded to a multiple of it by one more sequence (TP * CP under sequence
            parallel).

    Returns:
        The micro-batch on the CPU.

    Raises:
        DataError: repeated or unknown indices, a sample without prompt, a multiple below 1.
    """
    indices_M = _checked_indices(batch, indices, sequence_multiple, total_multiple)
    lengths_M, prompts_M = batch.lengths_N[indices_M], batch.prompt_lengths_N[indices_M]
    lengths_C = np.array([n for row in batch.contexts_of(indices_M.tolist()) for n in row], dtype=np.int64)
    padded_C = -(-lengths_C // sequence_multiple) * sequence_multiple
    step = math.lcm(sequence_multiple, total_multiple)
    used = int(padded_C.sum())
    total = max(-(-used // step), 1) * step
    padded_G = np.append(padded_C, total - used) if total > used else padded_C
    positions_T = _within(padded_G)

    token_slots = np.repeat(np.cumsum(padded_C) - padded_C, lengths_C) + _within(lengths_C)
    sample_T = np.full(total, -1, dtype=np.int64)
    sample_T[token_slots] = np.repeat(np.arange(len(indices_M)), lengths_M)
    tokens_T = np.zeros(total, dtype=np.int64)
    tokens_T[token_slots] = batch.tokens_T[_flat_slots(batch.lengths_N, indices_M)]
    labels_T = np.zeros(total, dtype=np.int64)
    predicts = np.flatnonzero((sample_T[:-1] >= 0) & (sample_T[:-1] == sample_T[1:]) & (positions_T[1:] > 0))
    labels_T[predicts] = tokens_T[predicts + 1]

    responses_M = lengths_M - prompts_M
    # Where the preceding token stands. That of the first token of a later sequence, which is never trained, is in
    # another sequence.
    before_P = np.repeat(np.cumsum(lengths_M) - responses_M - 1, responses_M) + _within(responses_M)
    response_slots_P = token_slots[before_P]
    batch_slots_P = _flat_slots(batch.response_lengths_N, indices_M)

    columns: dict[str, Any] = {}
    for name in (field.name.removesuffix("_R") for field in fields(batch) if field.name.endswith("_R")):
        column_R = getattr(batch, f"{name}_R")
        columns[f"{name}_T"] = None if column_R is None else _spread(column_R, batch_slots_P, response_slots_P, total)
    mask_T = columns.pop("loss_mask_T")
    return PackedMicroBatch(
        tokens_T=torch.from_numpy(tokens_T),
        labels_T=torch.from_numpy(labels_T),
        positions_T=torch.from_numpy(positions_T),
        mask_T=mask_T,
        sample_T=torch.from_numpy(sample_T),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(padded_G)]).astype(np.int32)),
        max_seqlen=int(padded_G.max()),
        sample_indices=torch.from_numpy(indices_M),
        response_slots_P=torch.from_numpy(response_slots_P),
        batch_slots_P=torch.from_numpy(batch_slots_P),
        trained_slots_J=_trained_slots(mask_T),
        routed_experts_TLK=_routed_experts(batch, indices_M, token_slots, total),
        **columns,
    )


def _routed_experts(batch: Sequences, indices_M: np.ndarray, token_slots: np.ndarray, total: int) -> Tensor | None:
    """Read the experts of the samples from their files; None if no sample of the batch has any."""
    experts_N = batch.routed_experts_N or ()
    shape = next((experts.shape[1:] for experts in experts_N if experts), None)
    if shape is None:
        return None
    experts_TLK = np.full((total, *shape), -1, dtype=np.int16)
    at = 0
    for sample in indices_M.tolist():
        experts, length = experts_N[sample], int(batch.lengths_N[sample])
        if experts is not None:
            experts_TLK[token_slots[at : at + length]] = experts.read()
        at += length
    return torch.from_numpy(experts_TLK)


def collect_responses(parts: Iterable[tuple[Tensor, PackedMicroBatch]], num_response_tokens: int) -> np.ndarray:
    """Collect the response column of a batch from the values of its micro-batches.

    Args:
        parts: (values_T, micro-batch) pairs; each response token of the batch in at most one of them.
        num_response_tokens: R of the batch the micro-batches were packed from.

    Returns:
        float32 [R], in the batch's order; NaN where no part had the token, so that a gap cannot pass for a value.
    """
    column_R = np.full(num_response_tokens, np.nan, dtype=np.float32)
    for values_T, packed in parts:
        values_P = values_T.detach()[packed.response_slots_P]
        column_R[packed.batch_slots_P.cpu().numpy()] = values_P.float().cpu().numpy()
    return column_R


def context_parallel_slice(packed: PackedMicroBatch, cp_rank: int, cp_size: int) -> PackedMicroBatch:
    """Return the tokens one context-parallel rank computes.

    Each sequence is cut into 2 * cp_size equal chunks and rank r holds chunks r and 2 * cp_size - 1 - r, so that causal
    attention costs every rank the same. cu_seqlens and max_seqlen stay those of the whole pack, as Megatron's thd rope
    and Transformer Engine expect.

    Args:
        packed: a whole micro-batch, packed with sequence_multiple a multiple of 2 * cp_size.
        cp_rank: 0 .. cp_size - 1.
        cp_size: number of context-parallel ranks.

    Returns:
        A micro-batch with T / cp_size tokens.

    Raises:
        DataError: rank out of range, already sliced, or a sequence that cannot be cut.

    Source: chunk order of megatron.core get_batch_on_this_cp_rank and rope_utils._get_thd_freqs_on_this_cp_rank.
    """
    if cp_size == 1 and cp_rank == 0:
        return packed
    keep = _slice_slots(packed, cp_rank, cp_size)
    names = [field.name for field in fields(packed) if field.name.endswith(("_T", "_TLK"))]
    columns: dict[str, Any] = {name: getattr(packed, name) for name in names}
    columns = {name: None if column is None else column[keep] for name, column in columns.items()}
    new_slot_T = torch.full_like(packed.sample_T, -1)
    new_slot_T[keep] = torch.arange(len(keep), device=keep.device)
    response_slots = new_slot_T[packed.response_slots_P]
    here = response_slots >= 0
    return replace(
        packed,
        **columns,
        response_slots_P=response_slots[here],
        batch_slots_P=packed.batch_slots_P[here],
        trained_slots_J=_trained_slots(packed.mask_T[keep]),
        context_parallel_size=cp_size,
    )


def _slice_slots(packed: PackedMicroBatch, cp_rank: int, cp_size: int) -> Tensor:
    """Return the slots of the whole pack that this rank holds, ascending, int64 [T / CP]."""
    if packed.context_parallel_size != 1:
        raise DataError(
            f"context_parallel_slice: this micro-batch is already one of {packed.context_parallel_size} slices; pass "
            "the whole micro-batch"
        )
    if not 0 <= cp_rank < cp_size:
        raise DataError(f"context_parallel_slice: cp_rank must be in 0..{cp_size - 1}, got {cp_rank}")
    lengths_G = packed.cu_seqlens.diff().long()
    if bool((lengths_G % (2 * cp_size)).any()):
        raise DataError(
            f"context_parallel_slice: sequence lengths must be multiples of 2 * cp_size = {2 * cp_size}, got "
            f"{lengths_G.tolist()[:8]}; pack with sequence_multiple={2 * cp_size}"
        )
    chunk_T = packed.positions_T // (lengths_G // (2 * cp_size)).repeat_interleave(lengths_G)
    return torch.nonzero((chunk_T == cp_rank) | (chunk_T == 2 * cp_size - 1 - cp_rank)).squeeze(1)


def _checked_indices(
    batch: Sequences, indices: Sequence[int], sequence_multiple: int, total_multiple: int
) -> np.ndarray:
    indices_M = np.asarray(indices, dtype=np.int64)
    if sequence_multiple < 1 or total_multiple < 1:
        raise DataError(f"pack: multiples must be at least 1, got sequence {sequence_multiple}, total {total_multiple}")
    if indices_M.size == 0:
        return indices_M
    if indices_M.min() < 0 or indices_M.max() >= len(batch):
        raise DataError(
            f"pack: sample indices must be in 0..{len(batch) - 1}, got {indices_M.min()}..{indices_M.max()}"
        )
    if len(np.unique(indices_M)) != len(indices_M):
        raise DataError("pack: a sample index is repeated; each sample may stand in one micro-batch only once")
    if (batch.prompt_lengths_N[indices_M] < 1).any():
        bad = int(indices_M[batch.prompt_lengths_N[indices_M] < 1][0])
        raise DataError(
            f"pack: sample {bad} has no prompt token, so nothing predicts its first response token; add a BOS"
        )
    return indices_M


def _within(lengths: np.ndarray) -> np.ndarray:
    """Return 0 .. length - 1 for each run, end to end."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


def _flat_slots(lengths_N: np.ndarray, indices_M: np.ndarray) -> np.ndarray:
    """Return where the elements of the chosen samples stand in a flat ragged column."""
    starts_N = np.cumsum(lengths_N) - lengths_N
    chosen_M = lengths_N[indices_M]
    return np.repeat(starts_N[indices_M], chosen_M) + _within(chosen_M)


def _spread(values_R: np.ndarray, batch_slots_P: np.ndarray, response_slots_P: np.ndarray, total: int) -> Tensor:
    column_T = np.zeros(total, dtype=np.float32)
    column_T[response_slots_P] = values_R[batch_slots_P]
    return torch.from_numpy(column_T)


def _trained_slots(mask_T: Tensor) -> Tensor:
    return mask_T.nonzero().squeeze(1)
