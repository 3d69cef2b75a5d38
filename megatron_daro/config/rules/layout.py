"""Rules of the layout: ranks and engines fit on the GPUs, and the model divides over the ranks.

Without them Megatron would stop in the middle of a start, and not say which option to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import THIS_MACHINE, Hardware
from megatron_daro.config.model_shape import ExpertShape, ModelShape
from megatron_daro.config.placement import demand_of, misfit
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.stages import (
    FIRST_STAGE,
    LAST_STAGE,
    STAGE_OPTIONS,
    counted,
    names_every_stage,
    stage_layers,
)

PARALLEL = "actor.tensor_parallel actor.pipeline_parallel actor.context_parallel actor.data_parallel"
_OF_ENGINES = "engine.kind engine.sglang.urls engine.sglang.tensor_parallel"
_OF_EXPERTS = "actor.tensor_parallel actor.context_parallel actor.data_parallel actor.expert_tensor_parallel"
_LEAST_PROCESS_BYTES = 256 * 2**20
"""A worker needs more than this as soon as it has imported torch."""
_LEAST_VERIFIER_BYTES = 64 * 2**20


def layout_text(actor: ActorSection) -> str:
    """Return the parallel sizes as one line."""
    parts = (actor.tensor_parallel, actor.pipeline_parallel, actor.context_parallel, actor.data_parallel)
    experts = f", EP {actor.expert_parallel}" if actor.expert_parallel > 1 else ""
    return "TP {} * PP {} * CP {} * DP {} = ".format(*parts) + f"{actor.world_size} ranks{experts}"


def world(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Yield why the ranks alone do not fit on the GPUs, and a number of nodes without their number of GPUs."""
    if config.cluster.nodes > 1 and config.cluster.gpus_per_node is None:
        allowed = "1 where cluster.gpus_per_node is unset: the nodes are those of the Ray cluster, or this machine"
        yield wrong(config, "cluster.nodes", allowed, "set cluster.gpus_per_node", beside="cluster.gpus_per_node")
    if hardware.kind != "gpu":
        return
    got = layout_text(config.actor)
    if config.actor.world_size > hardware.count:
        allowed = f"at most {hardware.count} ranks: one per GPU of {hardware.place}"
        fix = "lower the product of the parallel sizes, or run where there are more GPUs (section cluster)"
        yield wrong(config, "actor", allowed, fix, beside=PARALLEL, got=got)
    elif why := misfit(demand_of(config, engines=False), hardware.per_node):
        fix = "choose a tensor_parallel that divides the GPUs of a node"
        allowed = f"what {hardware.place} can hold ({why})"
        yield wrong(config, "actor.tensor_parallel", allowed, fix, beside=PARALLEL, got=got)


def processes(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Yield why ranks, engines and verifiers do not fit together."""
    engine, ranks, demand = config.engine, config.actor.world_size, demand_of(config)
    ranks_fit = not misfit(demand_of(config, engines=False), hardware.per_node)
    if hardware.kind == "gpu" and ranks_fit and (why := misfit(demand, hardware.per_node)):
        got = f"{engine.replicas}, with which actor and engine need {demand.gpus} GPUs"
        fix = "lower engine.replicas or the parallel sizes, or run where there are more GPUs"
        allowed = f"what {hardware.place} can hold ({why})"
        yield wrong(config, "engine.replicas", allowed, fix, beside=f"{PARALLEL} {_OF_ENGINES}", got=got)
    if hardware.place != THIS_MACHINE or hardware.memory_bytes is None:
        return
    memory = f"{hardware.memory_bytes / 2**30:.0f} GiB of memory"
    allowed = f"what fits into {memory}, models not counted"
    if ranks * _LEAST_PROCESS_BYTES > hardware.memory_bytes:
        got, fix = f"{layout_text(config.actor)} of at least 256 MiB each", "lower the product of the parallel sizes"
        yield wrong(config, "actor", allowed, fix, beside=PARALLEL, got=got)
    elif demand.processes * _LEAST_PROCESS_BYTES > hardware.memory_bytes:
        got = f"{engine.replicas}, and {ranks} ranks: {demand.processes} processes of at least 256 MiB each"
        fix = "lower engine.replicas or the parallel sizes"
        yield wrong(config, "engine.replicas", allowed, fix, beside=f"{PARALLEL} {_OF_ENGINES}", got=got)
    if config.reward.workers * _LEAST_VERIFIER_BYTES > hardware.memory_bytes:
        allowed = f"what fits into {memory}, 64 MiB each at least"
        yield wrong(config, "reward.workers", allowed, "use as many as there are free cores")


def division(actor: ActorSection, shape: ModelShape) -> Iterator[Problem]:
    """Yield sizes of the model that the layout does not divide."""
    refuse = partial(wrong, {"actor": actor})
    tensor = ("actor.tensor_parallel", actor.tensor_parallel)
    yield from _divides(*tensor, shape.heads, "attention heads")
    if shape.kv_heads % actor.tensor_parallel and actor.tensor_parallel % shape.kv_heads:
        allowed = f"a divisor or a multiple of the model's {shape.kv_heads} key-value heads"
        yield refuse("actor.tensor_parallel", allowed, "choose one that also divides the heads", beside="model.path")
    if shape.linear:
        if shape.linear.key_heads % actor.tensor_parallel:
            allowed = f"a divisor of the {shape.linear.key_heads} key heads of linear attention"
            fix = "choose one that also divides the attention heads"
            yield refuse("actor.tensor_parallel", allowed, fix, beside="model.path")
        if actor.context_parallel > 1:
            allowed = "1 with linear attention, whose state runs over a whole sequence"
            yield refuse("actor.context_parallel", allowed, "set actor.context_parallel=1", beside="model.path")
    if shape.expert_layers < shape.layers:
        yield from _divides(*tensor, shape.ffn, "MLP columns (intermediate_size)")
    yield from _stages(actor, shape.layers)
    if shape.experts:
        yield from _experts(actor, shape.experts)
        if shape.biases and actor.expert_tensor_size > 1:
            allowed, fix = "1: Megatron-core cuts no experts with biases", "set actor.expert_tensor_parallel=1"
            got = f"{actor.expert_tensor_size} (unset, it is tensor_parallel without expert_parallel)"
            yield refuse("actor.expert_tensor_parallel", allowed, fix, beside="model.path", got=got)
    elif actor.expert_parallel > 1:
        yield refuse("actor.expert_parallel", "1: the model has no experts", "remove it", beside="model.path")
    if not shape.experts and actor.expert_tensor_parallel is not None:
        yield refuse(
            "actor.expert_tensor_parallel", "unset: the model has no experts", "remove it", beside="model.path"
        )


def sequence_parallel(config: Config) -> Iterator[Problem]:
    """Yield sequence parallelism without tensor-parallel ranks to divide the work over."""
    if config.actor.sequence_parallel and config.actor.tensor_parallel == 1:
        allowed, fix = "true only with tensor_parallel > 1", "leave it unset: it follows tensor_parallel"
        yield wrong(config, "actor.sequence_parallel", allowed, fix, beside="actor.tensor_parallel")


def _divides(field: str, size: int, count: int, what: str) -> Iterator[Problem]:
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
        got = f"{size}, which does not divide the model's {count} {what}"
        yield Problem(field, got, f"one of {divisors}", "choose a divisor", also=("model.path",))


def _stages(actor: ActorSection, layers: int) -> Iterator[Problem]:
    """Yield why the layers do not divide over the stages, or the layers of a stage over its virtual parts."""
    stages, virtual = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    options = {name: value for name, value in actor.megatron.items() if name in STAGE_OPTIONS and value}
    refuse, named = partial(wrong, {"actor": actor}), " ".join(f"actor.megatron.{name}" for name in options)
    counts = stage_layers(layers, stages, options)
    if counts is None and not options:
        yield from _divides("actor.pipeline_parallel", stages, layers, "layers")
    elif counts is None:
        allowed = f"numbers, or account_for_*, that leave the same of the {layers} layers for each other stage"
        fix = f"change or remove {named.replace(' ', ', ')}"
        yield refuse("actor.pipeline_parallel", allowed, fix, beside=f"{named} model.path")
    if virtual == 1:
        return
    field, beside = "actor.virtual_pipeline_parallel", "actor.pipeline_parallel"
    if stages == 1:
        yield refuse(field, "1 without pipeline stages", "remove it", beside=beside)
    elif names_every_stage(stages, options):
        allowed, fix = "1, or one of the two numbers", f"remove actor.megatron.{LAST_STAGE}"
        yield refuse(field, allowed, fix, beside=f"{beside} actor.megatron.{FIRST_STAGE} actor.megatron.{LAST_STAGE}")
    else:
        for count in sorted({count for count in counted(counts or [], options) if count % virtual}):
            allowed = f"a divisor of the {count} layers of a stage"
            fix = "choose one of them, or another pipeline_parallel"
            yield refuse(field, allowed, fix, beside=f"{beside} {named} model.path")


def _experts(actor: ActorSection, experts: ExpertShape) -> Iterator[Problem]:
    """Yield why the experts do not divide over the ranks."""
    refuse, tensor, cut = partial(wrong, {"actor": actor}), actor.tensor_parallel, actor.expert_tensor_size
    yield from _divides("actor.expert_parallel", actor.expert_parallel, experts.number, "experts")
    cut_field = "actor.tensor_parallel" if cut == tensor else "actor.expert_tensor_parallel"
    yield from _divides(cut_field, cut, experts.ffn, "columns of an expert")
    yield from _divides("actor.tensor_parallel", tensor, experts.shared_ffn, "columns of shared experts")
    group, ranks = actor.expert_group_size, tensor * actor.context_parallel * actor.data_parallel
    got = f"{actor.expert_parallel}; with ETP {cut} experts need groups of {group} ranks"
    if ranks % group:
        allowed, fix = f"ETP * EP that divides TP * CP * DP = {ranks}", "raise actor.data_parallel or lower it"
        yield refuse("actor.expert_parallel", allowed, fix, beside=_OF_EXPERTS, got=got)
    elif group % tensor and tensor % group:
        allowed = f"ETP * EP that is a divisor or a multiple of TP {tensor}"
        yield refuse("actor.expert_parallel", allowed, "use powers of 2", beside=_OF_EXPERTS, got=got)
    if tensor > 1 and not actor.use_sequence_parallel:
        allowed = "true: Megatron-core trains experts under tensor parallelism with it only"
        yield refuse("actor.sequence_parallel", allowed, "leave it unset", beside="actor.tensor_parallel")
