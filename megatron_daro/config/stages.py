"""Which layers each pipeline stage and each of its virtual parts hold, as Megatron-core divides them."""

from __future__ import annotations

from collections.abc import Mapping

FIRST_STAGE, LAST_STAGE = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
STAGE_OPTIONS = (FIRST_STAGE, LAST_STAGE, *_ACCOUNTED)
"""Options of `actor.megatron` that say how layers are divided over stages."""


def stage_layers(layers: int, stages: int, options: Mapping[str, object]) -> list[int] | None:
    """Return the number of layers of each pipeline stage; None if the layers do not divide evenly, an option is not a
    number of layers, or options exclude each other.

    Args:
        layers: of the model. stages: of the pipeline. options: of `actor.megatron`; only STAGE_OPTIONS are read.
    """
    first, last = options.get(FIRST_STAGE), options.get(LAST_STAGE)
    given = [count for count in (first, last) if count is not None]
    if any(type(count) is not int or count < 1 for count in given):
        return None
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    if given and (any(extra) or stages < 2):
        return None
    other_stages = stages - len(given)
    other_layers = layers + sum(extra) - sum(count for count in given if isinstance(count, int))
    if other_layers < 0 or (other_layers % other_stages if other_stages else other_layers):
        return None
    counts = [other_layers // other_stages if other_stages else 0] * stages
    counts[0] = first if isinstance(first, int) else counts[0] - extra[0]
    counts[-1] = last if isinstance(last, int) else counts[-1] - extra[1]
    return counts if min(counts) >= 0 else None


def part_layers(layers: int, stages: int, virtual: int, options: Mapping[str, object]) -> list[list[range]] | None:
    """Return, for each pipeline stage, the layers of each of its virtual parts; None if the layers do not divide
    evenly, or if Megatron-core cannot compute the division.

    Args:
        layers, stages, options: as in `stage_layers`. virtual: parts per stage; in the order of layers, part i of stage
            p is at i * stages + p.
    """
    counts = stage_layers(layers, stages, options)
    if counts is None or any(count % virtual for count in counted(counts, options)):
        return None
    if virtual > 1 and names_every_stage(stages, options):
        return None
    each = [count // virtual for count in counted(counts, options)]
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    parts: list[list[range]] = [[] for _ in counts]
    at = 0
    for part in range(virtual):
        for stage, size in enumerate(each):
            # If the embedding and the loss count as layers, they are in the very first and the very last part.
            size -= extra[0] * (part == stage == 0) + extra[1] * (part == virtual - 1 and stage == stages - 1)
            parts[stage].append(range(at, at + size))
            at += size
    return parts


def names_every_stage(stages: int, options: Mapping[str, object]) -> bool:
    """Return whether options set the number of layers for both of two stages. With virtual parts, Megatron-core (0.16
    to 0.19) then divides the remaining layers by the number of remaining stages, which is 0."""
    return stages == 2 and all(options.get(name) is not None for name in (FIRST_STAGE, LAST_STAGE))


def counted(counts: list[int], options: Mapping[str, object]) -> list[int]:
    """Return, for each stage, what is divided over its parts: its layers, and the embedding or loss if they count as
    layers."""
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    return [n + extra[0] * (i == 0) + extra[1] * (i == len(counts) - 1) for i, n in enumerate(counts)]
