"""Checks that the model divides over the layout: heads, layers over the stages, experts.

Called by checks.py; each function yields every problem it finds. The same rules hold when
Megatron builds the model, which would stop in the middle of a start and not say which option to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import ExpertShape, ModelShape
from megatron_daro.config.problems import Problem, show

FIRST_STAGE, LAST_STAGE = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_MEGATRON = "actor.megatron"
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_RANKS = ("actor.tensor_parallel", "actor.context_parallel", "actor.data_parallel", "actor.expert_tensor_parallel")


def division_problems(actor: ActorSection, shape: ModelShape) -> Iterator[Problem]:
    """Return what of the model the layout cannot divide."""
    tensor = ("actor.tensor_parallel", actor.tensor_parallel)
    yield from _divides(*tensor, shape.heads, "attention heads")
    if shape.kv_heads % actor.tensor_parallel and actor.tensor_parallel % shape.kv_heads:
        got = f"{actor.tensor_parallel}, but the model has {shape.kv_heads} key-value heads"
        allowed = f"a divisor or a multiple of {shape.kv_heads}"
        yield Problem("actor.tensor_parallel", got, allowed, "choose one that also divides the heads", ("model.path",))
    if shape.expert_layers < shape.layers:
        yield from _divides(*tensor, shape.ffn, "MLP columns (intermediate_size)")
    yield from _stage_problems(actor, shape.layers)
    yield from _expert_problems(actor, shape.experts) if shape.experts else _dense_problems(actor)


def _divides(field: str, size: int, count: int, what: str) -> Iterator[Problem]:
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
        got = f"{size}, which does not divide the model's {count} {what}"
        yield Problem(field, got, f"one of {divisors}", "choose a divisor", also=("model.path",))


def stage_layers(layers: int, stages: int, options: Mapping[str, object]) -> list[int] | None:
    """Return the layers of each pipeline stage; None where they do not divide, or an option is no number of layers.

    Args:
        layers: of the model. stages: of the pipeline. options: of `actor.megatron`; those that name stages count.
    """
    first, last = options.get(FIRST_STAGE), options.get(LAST_STAGE)
    given = [count for count in (first, last) if count is not None]
    if any(type(count) is not int or count < 1 for count in given):
        return None
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    if given and (any(extra) or stages < 2):
        return None
    middle, left = stages - len(given), layers + sum(extra) - sum(count for count in given if isinstance(count, int))
    if left < 0 or (left if middle == 0 else left % middle):
        return None
    counts = [left // middle if middle else 0] * stages
    counts[0] = first if isinstance(first, int) else counts[0] - extra[0]
    counts[-1] = last if isinstance(last, int) else counts[-1] - extra[1]
    return counts if min(counts) >= 0 else None


def part_layers(layers: int, stages: int, virtual: int, options: Mapping[str, object]) -> list[list[range]] | None:
    """Return for each pipeline stage the layers of each of its virtual parts; None where they do not divide, or where
    Megatron-core cannot say which they are.

    Args:
        layers, stages, options: of `stage_layers`. virtual: parts of a stage; part i of stage p is at i * stages + p.
    """
    counts = stage_layers(layers, stages, options)
    if counts is None or any(count % virtual for count in _counted(counts, options)):
        return None
    if virtual > 1 and _names_every_stage(stages, options):
        return None
    each = [count // virtual for count in _counted(counts, options)]
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    parts: list[list[range]] = [[] for _ in counts]
    at = 0
    for part in range(virtual):
        for stage, size in enumerate(each):
            # The embedding and the loss, where they count as layers, are in the first and the last part of all.
            size -= extra[0] * (part == stage == 0) + extra[1] * (part == virtual - 1 and stage == stages - 1)
            parts[stage].append(range(at, at + size))
            at += size
    return parts


def _names_every_stage(stages: int, options: Mapping[str, object]) -> bool:
    """Whether both of two stages have their number of layers. Megatron-core (0.16 to 0.19) then divides what is left by
    the number of other stages, none, where stages have virtual parts."""
    return stages == 2 and all(options.get(name) is not None for name in (FIRST_STAGE, LAST_STAGE))


def _counted(counts: list[int], options: Mapping[str, object]) -> list[int]:
    """Return what is divided over the parts of each stage: its layers, and what is accounted as one."""
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    return [n + extra[0] * (i == 0) + extra[1] * (i == len(counts) - 1) for i, n in enumerate(counts)]


def _stage_problems(actor: ActorSection, layers: int) -> Iterator[Problem]:
    stages, named = actor.pipeline_parallel, {n: v for n, v in actor.megatron.items() if n in _STAGE_OPTIONS and v}
    if not named:
        yield from _divides("actor.pipeline_parallel", stages, layers, "layers")
    elif stage_layers(layers, stages, named) is None:
        options = ", ".join(f"{name} {show(value)}" for name, value in named.items())
        got = f"{stages} with {options}, which does not divide the model's {layers} layers"
        allowed = "numbers that leave the same number of layers, 1 or more, for each other stage"
        fix = "change the layers of the first or last stage (of two stages give one)"
        also = ("model.path", *(f"{_MEGATRON}.{name}" for name in named))
        yield Problem("actor.pipeline_parallel", got, allowed, fix, also=also)
    yield from _virtual_stage_problems(actor, layers, named)


def _virtual_stage_problems(actor: ActorSection, layers: int, options: Mapping[str, object]) -> Iterator[Problem]:
    field, virtual, stages = "actor.virtual_pipeline_parallel", actor.virtual_pipeline_parallel, actor.pipeline_parallel
    if virtual > 1 and stages == 1:
        got = f"{virtual} with pipeline_parallel 1"
        yield Problem(field, got, "1 without pipeline stages", "remove it", also=("actor.pipeline_parallel",))
    elif virtual > 1 and _names_every_stage(stages, options):
        got, allowed = f"{virtual} with {FIRST_STAGE} and {LAST_STAGE} of two stages", "1, or one of the two numbers"
        yield Problem(field, got, allowed, f"remove actor.megatron.{LAST_STAGE}", also=("actor.pipeline_parallel",))
    elif virtual > 1:
        counts = _counted(stage_layers(layers, stages, options) or [], options)
        for count in sorted({count for count in counts if count % virtual}):
            got = f"{virtual}, but a stage has {count} layers"
            fix = "choose one of them, or another pipeline_parallel"
            also = ("actor.pipeline_parallel", "model.path", *(f"{_MEGATRON}.{name}" for name in options))
            yield Problem(field, got, f"a divisor of {count}", fix, also=also)


_STAGE_OPTIONS = (FIRST_STAGE, LAST_STAGE, *_ACCOUNTED)


def _dense_problems(actor: ActorSection) -> Iterator[Problem]:
    if actor.expert_parallel > 1:
        got = f"{actor.expert_parallel}, but the model has no experts"
        yield Problem("actor.expert_parallel", got, "1", "remove it", also=("model.path",))
    if actor.expert_tensor_parallel is not None:
        got = f"{actor.expert_tensor_parallel}, but the model has no experts"
        yield Problem("actor.expert_tensor_parallel", got, "nothing", "remove it", also=("model.path",))


def _expert_problems(actor: ActorSection, experts: ExpertShape) -> Iterator[Problem]:
    tensor, cut = actor.tensor_parallel, actor.expert_tensor_size
    yield from _divides("actor.expert_parallel", actor.expert_parallel, experts.number, "experts")
    cut_field = "actor.tensor_parallel" if cut == tensor else "actor.expert_tensor_parallel"
    yield from _divides(cut_field, cut, experts.ffn, "columns of an expert")
    group, ranks = actor.expert_group_size, tensor * actor.context_parallel * actor.data_parallel
    if ranks % group:
        got = f"{actor.expert_parallel}; with ETP {cut} experts need groups of {group} ranks"
        allowed = f"ETP * EP that divides TP * CP * DP = {ranks}"
        yield Problem("actor.expert_parallel", got, allowed, "raise actor.data_parallel or lower it", also=_RANKS)
    elif group % tensor and tensor % group:
        got = f"{actor.expert_parallel}; with ETP {cut} experts have groups of {group} ranks"
        allowed = f"ETP * EP that is a divisor or a multiple of TP {tensor}"
        yield Problem("actor.expert_parallel", got, allowed, "use powers of 2", also=_RANKS)
    if tensor > 1 and not actor.use_sequence_parallel:
        got = f"false with tensor_parallel {tensor} and experts"
        allowed = "true: Megatron-core trains experts under tensor parallelism with it only"
        yield Problem("actor.sequence_parallel", got, allowed, "leave it unset", also=("actor.tensor_parallel",))
