"""The split of a batch: which data-parallel rank computes which samples, in which micro-batches.

Lengths of samples -> Schedule -> each rank packs its own micro-batches.
All ranks get the same number of micro-batches, since they meet in collective calls once per micro-batch under expert or
pipeline parallelism. The driver makes the split, a pure function of the lengths.
Refuses a sample that does not fit the token budget. It never drops or repeats a sample.

Method: samples go to ranks longest first, each to the rank with the least cost; exchanges between the heaviest and the
lightest rank reduce the remaining imbalance. Within a rank the same rule fills micro-batches; where it overruns the
budget, best-fit packing is used; where that needs more micro-batches, all ranks get more. A rank that has fewer samples
than other ranks have micro-batches, which happens in short batches only, gets empty ones, which train nothing.

Shape letters: N samples, D data-parallel ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import DataError

_BALANCED = 1e-3
_MAX_EXCHANGES = 64
_MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a sequence of L tokens, linear * L + quadratic * L ** 2, in any unit; attention is the quadratic part."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if min(self.linear, self.quadratic) < 0 or self.linear + self.quadratic <= 0:
            raise DataError(
                f"CostModel: got linear {self.linear} and quadratic {self.quadratic}; neither may be negative and one "
                "must be above 0"
            )

    def of(self, lengths_C: np.ndarray) -> np.ndarray:
        """Return the cost of each sequence, float64 [C]."""
        lengths = lengths_C.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths * lengths

    @classmethod
    def transformer(cls, *, num_parameters: float, num_layers: int, attention_width: int) -> CostModel:
        """Count floating-point operations of forward and backward.

        Args:
            num_parameters: active parameters per token, without the input embedding.
            num_layers: layers with attention.
            attention_width: heads times head dimension, which is the mean of those of keys and of values.

        Returns:
            6 * parameters per token, and 6 * layers * width per token pair (causal: half of 12).
        """
        return cls(linear=6.0 * num_parameters, quadratic=6.0 * num_layers * attention_width)

    @classmethod
    def of_model(cls, shape: ModelShape) -> CostModel:
        """Return the same for a model, with the parameters that a token is multiplied with: those of an untied input
        embedding and of experts that are not chosen for the token do not count. A layer with a window costs the same
        for each token."""
        lookup = 0 if shape.tie else shape.vocab * shape.hidden
        cost = cls.transformer(
            num_parameters=shape.num_active_parameters - lookup,
            num_layers=shape.layers - len(shape.windowed) - len(shape.linear_layers),
            attention_width=shape.heads * (shape.head_dim + shape.value_dim) // 2,
        )
        return replace(cost, linear=cost.linear + local_operations(shape))


LINEAR_CHUNK = 64
"""Tokens that linear attention takes at once."""


def local_operations(shape: ModelShape) -> float:
    """Return the floating-point operations, forward and backward, per token: of its scores in layers with a window; and
    in layers with linear attention of its share of the state and of the scores of its chunk."""
    windows = 12.0 * len(shape.windowed) * shape.window * shape.heads * shape.head_dim
    if shape.linear is None:
        return windows
    key, value = shape.linear.key, shape.linear.value
    of_a_head = 3 * key * value + LINEAR_CHUNK * (5 * key + 3 * value) / 2
    return windows + 6.0 * len(shape.linear.layers) * shape.linear.value_heads * of_a_head


Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""[d][m]: the sample indices of micro-batch m of rank d, ascending; none where it is empty.

The micro-batches of a rank are ordered small, large, small: in a pipeline the first and the last run alone.
"""


def schedule(
    lengths_N: Sequence[int] | np.ndarray,
    data_parallel_size: int,
    token_budget: int,
    *,
    contexts_N: Sequence[Sequence[int]] | None = None,
    cost: CostModel | None = None,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
) -> Schedule:
    """Split samples over ranks and micro-batches.

    Args:
        lengths_N: tokens per sample, prompt and response, each at least 1.
        data_parallel_size: number of ranks.
        token_budget: most tokens of one micro-batch, padding included, over all context-parallel ranks. A sample of
            several contexts that exceeds it by padding alone has a micro-batch of its own.
        contexts_N: tokens of each sequence that a sample consists of; None: each sample is one sequence.
        cost: what is balanced; tokens where None. The budget is always in tokens.
        sequence_multiple: tokens; sequences are counted as `pack` pads them.
        total_multiple: tokens; micro-batches are counted as `pack` pads them.

    Returns:
        The schedule. The same arguments give the same schedule.

    Raises:
        DataError: no samples, or one above the budget.
    """
    lengths = np.asarray(lengths_N, dtype=np.int64)
    budget = token_budget // total_multiple * total_multiple if total_multiple > 0 else 0
    multiple = max(sequence_multiple, 1)
    _check(lengths, -(-lengths // multiple) * multiple, data_parallel_size, token_budget, budget)
    rows = contexts_N or [(length,) for length in lengths.tolist()]
    sample_C = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    padded_C = -(-np.array([tokens for row in rows for tokens in row]) // multiple) * multiple
    padded = np.bincount(sample_C, padded_C).astype(np.int64).clip(max=budget)
    costs = np.bincount(sample_C, (cost or CostModel()).of(padded_C))
    most = len(padded) // data_parallel_size  # micro-batches that every rank has a sample for
    micro_batches = max(1, -(-int(padded.sum()) // (budget * data_parallel_size)))
    while True:
        ranks = _balanced_ranks(costs, data_parallel_size, min(micro_batches, most))
        split = [_micro_batches(rank, padded, costs, min(micro_batches, len(rank)), budget) for rank in ranks]
        needed = max(len(parts) for parts in split)
        if needed == micro_batches or micro_batches >= most:
            return tuple(_in_pipeline_order([*parts, *[[]] * (needed - len(parts))], costs) for parts in split)
        micro_batches = min(needed, most)


def interleaved_group(micro_batches: int, stages: int) -> tuple[int, int]:
    """Return how many micro-batches Megatron's interleaved schedule is given, and the size of its groups.

    It needs at least as many micro-batches as stages, and so does each of its groups, the last one included. The
    smallest size that achieves this keeps the fewest activations. Where there are fewer micro-batches than stages, ones
    that train nothing are added.

    Args:
        micro_batches: of a step and rank, at least 1. stages: of the pipeline.
    """
    count = max(micro_batches, stages)
    rests = ((size, count % size) for size in range(stages, count + 1))
    return count, next(size for size, rest in rests if rest == 0 or rest >= stages)


def _check(lengths: np.ndarray, padded: np.ndarray, data_parallel_size: int, token_budget: int, budget: int) -> None:
    if data_parallel_size < 1:
        raise DataError(f"schedule: data_parallel_size must be at least 1, got {data_parallel_size}")
    if budget < 1:
        raise DataError(
            f"schedule: token_budget must be at least one total_multiple of tokens, got {token_budget}; "
            "raise actor.micro_batch_tokens"
        )
    if len(lengths) == 0:
        raise DataError("schedule: got no samples; pass at least one")
    if lengths.min() < 1:
        raise DataError(f"schedule: sample {int(lengths.argmin())} has {lengths.min()} tokens; at least 1 is needed")
    if padded.max() > budget:
        longest = int(padded.argmax())
        raise DataError(
            f"schedule: sample {longest} has {lengths[longest]} tokens ({padded[longest]} padded), above the budget of "
            f"{budget} tokens per micro-batch; raise actor.micro_batch_tokens or lower the length limits"
        )


def _descending(costs: np.ndarray) -> np.ndarray:
    """Return indices, most costly first, ties by index."""
    return np.argsort(-costs, kind="stable")


def _balanced_ranks(costs: np.ndarray, num_ranks: int, least: int) -> list[list[int]]:
    """Return each rank's samples: balanced cost, at least `least` samples per rank."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    owed, remaining = num_ranks * least, len(costs)
    for sample in _descending(costs).tolist():
        if remaining == owed:
            # Every sample left is needed by a rank that has too few: the other ranks get no more.
            heap = [entry for entry in heap if len(ranks[entry[1]]) < least]
            heapq.heapify(heap)
        load, rank = heapq.heappop(heap)
        owed -= len(ranks[rank]) < least
        remaining -= 1
        ranks[rank].append(sample)
        heapq.heappush(heap, (load + float(costs[sample]), rank))
    return _exchange(ranks, costs)


def _exchange(ranks: list[list[int]], costs: np.ndarray) -> list[list[int]]:
    """Swap one sample of the heaviest rank for one of the lightest, as long as that helps and the lightest has any."""
    loads = np.array([costs[rank].sum() for rank in ranks])
    for _ in range(_MAX_EXCHANGES):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = loads[heavy] - loads[light]
        if gap <= _BALANCED * loads.mean() or not ranks[light]:
            break
        ours = np.array(ranks[heavy])
        theirs = np.array(ranks[light])[np.argsort(costs[ranks[light]], kind="stable")]
        # The best partner of a sample costs half the gap less than it.
        places = np.searchsorted(costs[theirs], costs[ours] - gap / 2).clip(max=len(theirs) - 1)
        candidates = np.stack([places, (places - 1).clip(min=0)])
        moved = costs[ours] - costs[theirs[candidates]]
        side, mine = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        gain = float(moved[side, mine])
        if not 0 < gain < gap:
            break
        given, taken = int(ours[mine]), int(theirs[candidates[side, mine]])
        ranks[heavy][ranks[heavy].index(given)] = taken
        ranks[light][ranks[light].index(taken)] = given
        loads[heavy] -= gain
        loads[light] += gain
    return ranks


def _micro_batches(
    samples: Sequence[int], padded: np.ndarray, costs: np.ndarray, wanted: int, budget: int
) -> list[list[int]]:
    """Return `wanted` micro-batches within the budget, or more where best-fit packing needs more."""
    chosen = np.array(samples, dtype=np.int64)
    order = chosen[_descending(costs[chosen])].tolist()
    parts = _least_loaded_first(order, padded, costs, wanted, budget)
    return parts if parts is not None else _best_fit(order, padded, wanted, budget)


def _least_loaded_first(
    order: list[int], padded: np.ndarray, costs: np.ndarray, wanted: int, budget: int
) -> list[list[int]] | None:
    """Return balanced micro-batches; None where a sample finds no room. Empty ones are filled first."""
    parts: list[list[int]] = [[] for _ in range(wanted)]
    tokens = [0] * wanted
    heap = [(0.0, part) for part in range(wanted)]
    for sample in order:
        size = int(padded[sample])
        passed: list[tuple[float, int]] = []
        while heap and tokens[heap[0][1]] + size > budget and len(passed) <= _MAX_TRIES:
            passed.append(heapq.heappop(heap))
        if not heap or len(passed) > _MAX_TRIES:
            return None
        load, part = heap[0]
        parts[part].append(sample)
        tokens[part] += size
        heapq.heapreplace(heap, (load + float(costs[sample]), part))
        for entry in passed:
            heapq.heappush(heap, entry)
    return parts


def _best_fit(order: list[int], padded: np.ndarray, wanted: int, budget: int) -> list[list[int]]:
    """Pack by best-fit decreasing, then halve the largest micro-batches until there are `wanted`."""
    parts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for sample in sorted(order, key=lambda i: (-int(padded[i]), i)):
        size = int(padded[sample])
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            parts.append([])
            rooms_entry = (budget, len(parts) - 1)
        else:
            rooms_entry = rooms.pop(place)
        room, part = rooms_entry
        parts[part].append(sample)
        insort(rooms, (room - size, part))
    while len(parts) < wanted:
        largest = max((p for p in parts if len(p) > 1), key=lambda p: int(padded[p].sum()))
        parts.remove(largest)
        parts += [largest[0::2], largest[1::2]]
    return parts


def _in_pipeline_order(parts: Sequence[Sequence[int]], costs: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches with the small ones at both ends; samples are ascending within each."""
    tidy = [tuple(sorted(part)) for part in parts]
    tidy.sort(key=lambda part: (float(costs[list(part)].sum()), part))
    return tuple(tidy[0::2] + tidy[1::2][::-1])
