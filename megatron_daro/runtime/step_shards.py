"""Splits a step's samples over data-parallel ranks, and joins the shards' columns in the batch's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import ObjectRef

from megatron_daro.config.actor import ActorSection
from megatron_daro.data.schedule import CostModel, schedule
from megatron_daro.types import Sequences


@dataclass(slots=True, eq=False)
class Shard:
    """What one data-parallel rank computes.

    rows: row numbers in the batch. reference: to these rows in the object store. micro_batches: row numbers within the
    shard. columns: names of StepBatch -> references to columns that were computed for this shard since.
    """

    rows: tuple[int, ...]
    reference: ObjectRef[Sequences]
    micro_batches: tuple[tuple[int, ...], ...]
    columns: dict[str, Any] = field(default_factory=dict)


def shards_of(batch: Sequences, actor: ActorSection, cost: CostModel) -> list[Shard]:
    """Return the batch split over data-parallel ranks, each part put once into the object store.

    Args:
        batch: all samples of an optimizer step, or of a pass.
        actor: how many ranks, and the token budget of a micro-batch.
        cost: what a sample costs; it is balanced over the ranks.

    Raises:
        DataError: the batch does not split.
    """
    sequence_multiple, total_multiple = actor.pack_multiples
    plan = schedule(
        batch.lengths_N,
        actor.data_parallel,
        actor.micro_batch_tokens,
        contexts_N=batch.contexts_of(range(len(batch))),
        cost=cost,
        sequence_multiple=sequence_multiple,
        total_multiple=total_multiple,
    )
    numbered = [renumbered(micro_batches) for micro_batches in plan]
    return [Shard(rows, ray.put(batch.select(rows)), local) for rows, local in numbered]


def renumbered(micro_batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the rows of one rank in the order of its micro-batches, and the micro-batches with rows renumbered from 0
    in this order."""
    rows = tuple(row for micro_batch in micro_batches for row in micro_batch)
    local, start = [], 0
    for micro_batch in micro_batches:
        local.append(tuple(range(start, start + len(micro_batch))))
        start += len(micro_batch)
    return rows, tuple(local)


def joined_column(batch: Sequences, shards: Sequence[Shard], parts: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return a response column of the batch from those of its shards.

    Args:
        batch: what the shards were made of.
        shards: one per data-parallel rank.
        parts: data-parallel rank -> float32 [R of its shard].

    Returns:
        float32 [R] in the batch's own order.
    """
    lengths_N = batch.response_lengths_N
    starts_N = np.cumsum(lengths_N) - lengths_N
    out = np.empty(int(lengths_N.sum()), dtype=np.float32)
    for rank, shard in enumerate(shards):
        position = 0
        for row in shard.rows:
            length = int(lengths_N[row])
            out[starts_N[row] : starts_N[row] + length] = parts[rank][position : position + length]
            position += length
    return out
