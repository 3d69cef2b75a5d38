"""Packing: alignment by hand, round trip, padding, and reassembly of context-parallel slices."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_experts import stored

from megatron_daro.config.actor import pack_multiples
from megatron_daro.data.packing import (
    collect_responses,
    context_parallel_slice,
    pack,
)
from megatron_daro.errors import DataError
from megatron_daro.types import Sequences, StepBatch


def make_batch(shapes: list[tuple[int, int]], seed: int = 0, old: bool = True) -> StepBatch:
    """shapes: (prompt tokens, response tokens) per sample."""
    rng = np.random.default_rng(seed)
    prompts = np.array([p for p, _ in shapes], dtype=np.int64)
    responses = np.array([r for _, r in shapes], dtype=np.int64)
    num, num_response = len(shapes), int(responses.sum())
    return StepBatch(
        tokens_T=rng.integers(1, 1000, int((prompts + responses).sum())).astype(np.int32),
        lengths_N=prompts + responses,
        prompt_lengths_N=prompts,
        loss_mask_R=rng.integers(0, 2, num_response).astype(np.uint8),
        rollout_logprobs_R=-rng.random(num_response).astype(np.float32) - 0.1,
        rewards_N=rng.random(num).astype(np.float32),
        correct_N=rng.integers(0, 2, num).astype(np.uint8),
        bins_N=rng.integers(0, 5, num),
        group_ids_N=np.arange(num),
        advantages_N=rng.normal(size=num).astype(np.float32),
        truncated_N=np.zeros(num, dtype=np.uint8),
        rollouts_per_prompt=4,
        old_logprobs_R=-rng.random(num_response).astype(np.float32) - 0.1 if old else None,
    )


def test_two_samples_by_hand():
    batch = StepBatch(
        tokens_T=np.array([10, 11, 12, 13, 14, 20, 21, 22], dtype=np.int32),
        lengths_N=np.array([5, 3]),
        prompt_lengths_N=np.array([2, 1]),
        loss_mask_R=np.array([1, 1, 0, 1, 1], dtype=np.uint8),
        rollout_logprobs_R=np.array([-1, -2, -3, -4, -5], dtype=np.float32),
        rewards_N=np.zeros(2, np.float32),
        correct_N=np.zeros(2, np.uint8),
        bins_N=np.array([1, 2]),
        group_ids_N=np.array([0, 1]),
        advantages_N=np.array([0.5, -0.5], dtype=np.float32),
        truncated_N=np.zeros(2, np.uint8),
        rollouts_per_prompt=4,
    )
    packed = pack(batch, [1, 0], sequence_multiple=4, total_multiple=8)
    assert packed.tokens_T.tolist() == [20, 21, 22, 0, 10, 11, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0]
    assert packed.labels_T.tolist() == [21, 22, 0, 0, 11, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0, 0]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert packed.mask_T.tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert packed.rollout_logprobs_T.tolist() == [-4, -5, 0, 0, 0, -1, -2, -3] + [0] * 8
    assert packed.sample_T.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1]
    assert packed.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 8
    assert packed.sample_indices.tolist() == [1, 0]
    assert packed.old_logprobs_T is None
    assert packed.rollout_logprobs_T[packed.response_slots_P].tolist() == [-4, -5, -1, -2, -3]


def test_no_padding_unless_asked():
    batch = make_batch([(3, 5), (1, 1), (4, 9)])
    packed = pack(batch, [0, 1, 2])
    assert len(packed.tokens_T) == batch.lengths_N.sum()
    assert (packed.sample_T >= 0).all()
    np.testing.assert_array_equal(packed.tokens_T.numpy(), batch.tokens_T)


shapes_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 17)), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(shapes_strategy, st.integers(1, 8), st.integers(1, 8), st.randoms(use_true_random=False))
def test_round_trip_over_micro_batches(shapes, sequence_multiple, total_multiple, random):
    batch = make_batch(shapes)
    order = list(range(len(shapes)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    micro_batches = [part for part in (order[:cut], order[cut:]) if part]
    packs = [
        pack(batch, part, sequence_multiple=sequence_multiple, total_multiple=total_multiple) for part in micro_batches
    ]
    num_response = len(batch.loss_mask_R)
    for name in ("rollout_logprobs", "old_logprobs"):
        column = collect_responses([(getattr(p, f"{name}_T"), p) for p in packs], num_response)
        np.testing.assert_array_equal(column, getattr(batch, f"{name}_R"))
    mask = collect_responses([(p.mask_T, p) for p in packs], num_response)
    np.testing.assert_array_equal(mask, batch.loss_mask_R)
    labels = collect_responses([(p.labels_T, p) for p in packs], num_response)
    responses = [t for i, t in enumerate(_split(batch)) for t in t[batch.prompt_lengths_N[i] :]]
    np.testing.assert_array_equal(labels, np.array(responses, dtype=np.float32))
    for packed in packs:
        _check_structure(batch, packed, sequence_multiple, total_multiple)


def _split(batch):
    return np.split(batch.tokens_T, np.cumsum(batch.lengths_N)[:-1])


def _check_structure(batch, packed, sequence_multiple, total_multiple):
    assert len(packed.tokens_T) % sequence_multiple == 0 and len(packed.tokens_T) % total_multiple == 0
    lengths = packed.cu_seqlens.diff()
    assert (lengths % sequence_multiple == 0).all() and (lengths > 0).all()
    assert int(packed.cu_seqlens[-1]) == len(packed.tokens_T)
    assert int(lengths.max()) == packed.max_seqlen
    samples = _split(batch)
    for place, sample in enumerate(packed.sample_indices.tolist()):
        start = int(packed.cu_seqlens[place])
        own = slice(start, start + int(batch.lengths_N[sample]))
        np.testing.assert_array_equal(packed.tokens_T[own].numpy(), samples[sample])
        np.testing.assert_array_equal(packed.labels_T[own][:-1].numpy(), samples[sample][1:])
        assert (packed.sample_T[own] == place).all()
        assert packed.positions_T[own].tolist() == list(range(len(samples[sample])))
    padding = packed.sample_T < 0
    assert (packed.mask_T[padding] == 0).all() and (packed.labels_T[padding] == 0).all()
    assert int(packed.mask_T.sum()) == int(batch.trained_tokens_N[packed.sample_indices].sum())


def slots_of(cu_seqlens, rank, cp_size):
    """Of the 2 x cp_size chunks of each sequence the one of the rank's number from the start and from the end."""
    if cp_size == 1:
        return list(range(int(cu_seqlens[-1])))
    found = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        size = (end - start) // (2 * cp_size)
        for chunk in (rank, 2 * cp_size - 1 - rank):
            found += range(start + chunk * size, start + (chunk + 1) * size)
    return found


@settings(deadline=None, max_examples=60)
@given(shapes_strategy, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.booleans())
def test_context_parallel_slices_reassemble_to_the_whole(shapes, cp_size, tp_size, sequence_parallel):
    batch = make_batch(shapes)
    sequence_multiple, total_multiple = pack_multiples(tp_size, cp_size, sequence_parallel)
    packed = pack(batch, range(len(shapes)), sequence_multiple=sequence_multiple, total_multiple=total_multiple)
    slices = [context_parallel_slice(packed, rank, cp_size) for rank in range(cp_size)]
    for part in slices:
        assert len(part.tokens_T) == len(packed.tokens_T) // cp_size
        assert len(part.tokens_T) % (tp_size if sequence_parallel else 1) == 0
        assert torch.equal(part.cu_seqlens, packed.cu_seqlens) and part.max_seqlen == packed.max_seqlen
    slots_T = torch.tensor([slot for rank in range(cp_size) for slot in slots_of(packed.cu_seqlens, rank, cp_size)])
    assert slots_T.sort().values.tolist() == list(range(len(packed.tokens_T)))
    for name in ("tokens_T", "labels_T", "positions_T", "mask_T", "sample_T", "rollout_logprobs_T", "old_logprobs_T"):
        joined = torch.cat([getattr(part, name) for part in slices])[slots_T.argsort()]
        assert torch.equal(joined, getattr(packed, name)), name
    column = collect_responses([(part.rollout_logprobs_T, part) for part in slices], len(batch.loss_mask_R))
    np.testing.assert_array_equal(column, batch.rollout_logprobs_R)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_sequences_without_columns_of_a_loss_are_packed_like_the_batch_that_has_them(cp_size):
    batch = make_batch([(2, 3), (1, 4)])
    sequences = Sequences(**{field.name: getattr(batch, field.name) for field in fields(Sequences)})
    mine, theirs = (
        context_parallel_slice(pack(one.select([1, 0]), [1, 0], sequence_multiple=4), cp_size - 1, cp_size).to("cpu")
        for one in (sequences, batch)
    )
    absent = {field.name for field in fields(mine) if getattr(mine, field.name) is None}
    assert {"rollout_logprobs_T", "old_logprobs_T"} <= absent
    for name in {field.name for field in fields(mine)} - absent:
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), name)


def test_zigzag_by_hand():
    packed = pack(make_batch([(4, 4), (2, 6)]), [0, 1], sequence_multiple=4)
    first, second = (context_parallel_slice(packed, rank, 2) for rank in range(2))
    assert first.positions_T.tolist() == [0, 1, 6, 7, 0, 1, 6, 7]
    assert second.positions_T.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]


def test_a_gap_is_nan_not_zero():
    batch = make_batch([(2, 3), (2, 2)])
    packed = pack(batch, [1])
    column = collect_responses([(packed.rollout_logprobs_T, packed)], 5)
    assert np.isnan(column[:3]).all() and np.isfinite(column[3:]).all()


@pytest.mark.parametrize("batch", [make_batch([(2, 3), (2, 2)]), make_batch([(2, 3)]).select([])])
def test_a_pack_of_no_sample_is_padding_which_trains_and_reports_nothing(batch):
    empty = pack(batch, [], sequence_multiple=4, total_multiple=8)
    assert empty.tokens_T.tolist() == [0] * 8 and empty.cu_seqlens.tolist() == [0, 8] and len(empty) == 0
    assert not empty.mask_T.any() and len(empty.trained_slots_J) == 0
    parts = [context_parallel_slice(empty, rank, 2) for rank in range(2)]
    assert [len(part.tokens_T) for part in parts] == [4, 4]
    responses = int(batch.response_lengths_N.sum())
    assert np.isnan(collect_responses([(part.rollout_logprobs_T, part) for part in parts], responses)).all()
    assert pack(batch, []).tokens_T.tolist() == [0], "the least that a model computes"


def test_a_silent_pack_computes_the_same_and_reports_nothing():
    packed = pack(make_batch([(2, 3), (2, 2)]), [0, 1], total_multiple=4)
    silent = packed.silent()
    assert torch.equal(silent.tokens_T, packed.tokens_T) and len(silent) == 2
    assert not silent.mask_T.any() and len(silent.trained_slots_J) == 0
    column = collect_responses([(silent.rollout_logprobs_T, silent), (packed.rollout_logprobs_T, packed)], 5)
    assert np.isfinite(column).all()
    assert np.isnan(collect_responses([(silent.rollout_logprobs_T, silent)], 5)).all()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_experts_stand_with_their_tokens(cp_size, tmp_path):
    """Token ids are written into the experts: each slot of a pack has those of its own token, padding has none."""
    batch = make_batch([(2, 3), (1, 4), (3, 2)])
    experts_TLK = batch.tokens_T[:, None, None].astype(np.int16) + np.array([[[0, 1]], [[2, 3]]], np.int16)[:, 0]
    batch = replace(batch, routed_experts_N=stored(experts_TLK, batch.lengths_N, tmp_path))
    packed = pack(batch, [2, 0], sequence_multiple=4, total_multiple=8)
    for rank in range(cp_size):
        part = context_parallel_slice(packed, rank, cp_size)
        is_token = part.sample_T >= 0
        assert (part.routed_experts_TLK[~is_token] == -1).all() and is_token.any()
        assert torch.equal(part.routed_experts_TLK[is_token][:, 1, 1].long(), part.tokens_T[is_token] + 3)
    partly = replace(batch, routed_experts_N=(None, *batch.routed_experts_N[1:]))
    of_first = pack(partly, [0, 2]).routed_experts_TLK[: batch.lengths_N[0]]
    assert (of_first == -1).all(), "the engine told nothing of this sample"


def test_to_moves_every_tensor():
    packed = pack(make_batch([(2, 3)]), [0]).to("meta")
    assert packed.tokens_T.device.type == "meta" and packed.old_logprobs_T.device.type == "meta"
    assert packed.ref_logprobs_T is None


@pytest.mark.parametrize(
    ("indices", "kwargs", "words"),
    [
        ([0, 0], {}, "index"),
        ([2], {}, "2"),
        ([-1], {}, "-1"),
        ([0], {"sequence_multiple": 0}, "0"),
    ],
)
def test_refusals(indices, kwargs, words):
    with pytest.raises(DataError, match=words):
        pack(make_batch([(2, 3), (2, 2)]), indices, **kwargs)


def test_sample_without_prompt_is_refused_by_number():
    with pytest.raises(DataError, match="sample 1"):
        pack(make_batch([(2, 3), (0, 2)]), [0, 1])


def test_slice_refusals():
    packed = pack(make_batch([(2, 3)]), [0])
    with pytest.raises(DataError, match="sequence_multiple=4"):
        context_parallel_slice(packed, 0, 2)
    whole = pack(make_batch([(2, 3)]), [0], sequence_multiple=4)
    with pytest.raises(DataError, match="2"):
        context_parallel_slice(whole, 2, 2)
    with pytest.raises(DataError, match="slice"):
        context_parallel_slice(context_parallel_slice(whole, 0, 2), 0, 2)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=5), st.sampled_from([1, 2, 3]))
def test_sequences_of_one_sample_are_packed_as_samples_of_their_own_and_count_as_one(shapes, cp_size):
    """Another sample stands before and behind it. What a later sequence begins with is not trained."""
    sequence_multiple, total_multiple = pack_multiples(1, cp_size, False)
    apart = make_batch([(2, 3), *shapes, (1, 2)])
    ends = np.cumsum([2 + 3, *(sum(shape) for shape in shapes), 1 + 2])
    fillers = [np.zeros(prompt, np.uint8) for prompt, _ in shapes]
    parts = np.split(np.arange(len(apart.loss_mask_R)), np.cumsum(apart.response_lengths_N)[:-1])

    def of_one(column_R):
        inner = [np.concatenate([filler, column_R[part]]) for filler, part in zip(fillers, parts[1:-1], strict=True)]
        inner[0] = inner[0][shapes[0][0] :]
        return np.concatenate([column_R[parts[0]], *inner, column_R[parts[-1]]]).astype(column_R.dtype)

    lengths = [int(ends[0]), int(ends[-2] - ends[0]), int(ends[-1] - ends[-2])]
    together = replace(
        apart.select([0, 1, len(apart) - 1]),
        tokens_T=apart.tokens_T,
        lengths_N=np.array(lengths),
        prompt_lengths_N=np.array([2, shapes[0][0], 1]),
        loss_mask_R=of_one(apart.loss_mask_R),
        rollout_logprobs_R=of_one(apart.rollout_logprobs_R),
        old_logprobs_R=of_one(apart.old_logprobs_R),
        contexts_N=((), tuple(sum(shape) for shape in shapes), ()),
    )
    together = together.select([1, 2, 0]).select([2, 0, 1])
    one, each = (
        pack(batch, range(len(batch)), sequence_multiple=sequence_multiple, total_multiple=total_multiple)
        for batch in (together, apart)
    )
    for rank in range(cp_size):
        mine, theirs = (context_parallel_slice(packed, rank, cp_size) for packed in (one, each))
        for name in ("tokens_T", "labels_T", "positions_T", "mask_T", "cu_seqlens"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        kept = mine.mask_T == 1
        for name in ("rollout_logprobs_T", "old_logprobs_T"):
            assert torch.equal(getattr(mine, name)[kept], getattr(theirs, name)[kept]), name
        inner = (theirs.sample_T > 0) & (theirs.sample_T <= len(shapes))
        assert torch.equal(mine.sample_T == 1, inner)
    assert one.max_seqlen == each.max_seqlen
    column = collect_responses([(one.rollout_logprobs_T, one)], len(together.loss_mask_R))
    np.testing.assert_array_equal(column, together.rollout_logprobs_R)
