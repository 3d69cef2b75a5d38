"""Checks that span sections, files and hardware: whatever can be known to fail before anything starts.

They run after validation and before placement. Each looks at one subject; all are run and all problems reported
together. Warnings do not stop a run. Among them are the rules of `engine.colocate`, where servers and ranks take
turns on the same GPUs: nothing may have both compute at once, transports must be able to join two processes of one
GPU, and the pieces of both must cover the same GPUs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_daro.config import check_engine, check_training, megatron_options, precision
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.check_critic import critic
from megatron_daro.config.check_distill import distill
from megatron_daro.config.check_segments import segments
from megatron_daro.config.hardware import (
    THIS_MACHINE,
    Hardware,
    demand_of,
    detect,
    hardware_of,
    misfit,
    nccl_of_both_ends,
)
from megatron_daro.config.model_files import ModelFiles, megatron_problems, read_model
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.precision import server_precision
from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config

_FIELD = "engine.colocate"


def colocation(config: Config) -> Iterator[Problem]:
    """Yield each thing that keeps servers and ranks from taking turns."""
    if not config.engine.colocate:
        return
    sglang = config.engine.sglang
    if config.engine.kind != "sglang" or sglang.urls:
        got = "true with " + ("servers that run already" if sglang.urls else f"engine.kind {config.engine.kind}")
        fix, also = "set engine.kind=sglang without urls, or remove it", ("engine.kind", "engine.sglang.urls")
        yield Problem(_FIELD, got, "true with SGLang servers that the run starts", fix, also=also)
        return
    if sglang.sync in ("distributed", "shards"):
        got = f"{sglang.sync} with engine.colocate, where a rank and a server's rank share a GPU"
        allowed = "tensor or disk: NCCL takes no two processes of one GPU into a group, and TCP is for other hosts"
        yield Problem("engine.sglang.sync", got, allowed, "set engine.sglang.sync=tensor", also=(_FIELD,))
    if config.rollout.max_staleness > 0:
        got = f"{config.rollout.max_staleness} with engine.colocate"
        allowed = "0: nothing is generated while a batch is trained"
        yield Problem("rollout.max_staleness", got, allowed, "set rollout.max_staleness=0", also=(_FIELD,))
    if config.trainer.replace_lost_ranks:
        got = "true with engine.colocate, where a lost rank would come back to a GPU that servers have"
        fix = "set trainer.replace_lost_ranks=false"
        yield Problem("trainer.replace_lost_ranks", got, "false with engine.colocate", fix, also=(_FIELD,))
    yield from _arguments(config)
    yield from _sizes(config)


def communication(config: Config) -> Iterator[Problem]:
    """Yield what would give a server another way to hand out its GPU's memory than the ranks have."""
    sglang, name = config.engine.sglang, "NCCL_CUMEM_ENABLE"
    if config.engine.kind != "sglang" or sglang.urls or sglang.sync != "distributed":
        return
    if name in sglang.env and sglang.env[name] != nccl_of_both_ends(os.environ)[name]:
        allowed = "unset: both ends of a broadcast need the same, so it is a matter of the whole job"
        fix = f"remove it, and set {name}={sglang.env[name]} in the environment of the job"
        yield Problem("engine.sglang.env", f"{name}: {sglang.env[name]!r}", allowed, fix)
    if sglang.named_arguments.get("enable_symm_mem") and nccl_of_both_ends(os.environ)[name] != "1":
        allowed = f"unset, or {name}=1 for the whole job: with it SGLang sets {name}=1 in the servers"
        fix = f"remove it, or set {name}=1 in the environment of the job"
        yield Problem("engine.sglang.arguments", "enable_symm_mem with sync distributed", allowed, fix)


def _arguments(config: Config) -> Iterator[Problem]:
    """Yield options of SGLang and Megatron under which memory cannot be given back."""
    given = config.engine.sglang.named_arguments
    field = "engine.sglang.arguments"
    if given.get("quantization") is not None:
        allowed = "servers in bf16: what a quantized one keeps beside its weights would be lost with its memory"
        fix = "remove quantization and load_format"
        yield Problem(field, "quantization with engine.colocate", allowed, fix, also=(_FIELD,))
    if given.get("enable_memory_saver") is False:
        allowed = "true or unset with engine.colocate: without it a server keeps its memory"
        fix = "remove enable_memory_saver"
        yield Problem(field, "enable_memory_saver: false", allowed, fix, also=(_FIELD,))
    if given_to_megatron := config.actor.megatron.get("nccl_ub"):
        got, allowed = f"{show(given_to_megatron)} with engine.colocate", "nothing: memory that NCCL registered stays"
        yield Problem("actor.megatron.nccl_ub", got, allowed, "remove it", also=(_FIELD,))


def _sizes(config: Config) -> Iterator[Problem]:
    """Every GPU has one rank of the actor and one of a server, and pieces fit into each other."""
    ranks, size, servers = config.actor.world_size, config.engine.sglang.tensor_parallel, config.engine.replicas
    group = config.actor.tensor_parallel
    if size % group and group % size:
        got = f"{size}, with an actor.tensor_parallel of {group}"
        allowed = (
            "a divisor or a multiple of it with engine.colocate, so that a server's GPUs are those of whole groups"
        )
        fix = f"set engine.sglang.tensor_parallel={group}"
        yield Problem("engine.sglang.tensor_parallel", got, allowed, fix, also=(_FIELD, "actor.tensor_parallel"))
    elif ranks % size:
        got = f"{size}, which does not divide the {ranks} ranks of the actor"
        fix = f"set engine.sglang.tensor_parallel={group}"
        yield Problem(
            "engine.sglang.tensor_parallel", got, f"a divisor of {ranks} with engine.colocate", fix, also=(_FIELD,)
        )
    elif servers * size != ranks:
        got = f"{servers} x {size} GPUs, with {ranks} ranks of the actor on the same GPUs"
        allowed = f"{ranks // size} with engine.colocate, one server's rank for each rank of the actor"
        fix = f"set engine.replicas={ranks // size}"
        yield Problem("engine.replicas", got, allowed, fix, also=(_FIELD, "engine.sglang.tensor_parallel"))


_LEAST_PROCESS_BYTES = 256 * 2**20
"""A worker that has imported torch and done nothing yet has more."""
_MOST_ROLLOUTS = 2**22
"""Columns of one batch, as the driver holds them, stay within memory."""
_LEAST_VERIFIER_BYTES = 64 * 2**20
_PARALLEL = ("actor.tensor_parallel", "actor.pipeline_parallel", "actor.context_parallel", "actor.data_parallel")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """passed: (subject, what was found) of each check without problems; warnings and problems as found."""

    passed: tuple[tuple[str, str], ...]
    warnings: tuple[Problem, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Context:
    """What the checks look at."""

    config: Config
    hardware: Hardware
    model: ModelFiles

    @property
    def shape(self) -> ModelShape | None:
        """None where config.json could not be read, which is a problem of its own."""
        return self.model.shape


def check(config: Config, hardware: Hardware | None = None) -> CheckReport:
    """Run every check.

    Args:
        config: a resolved configuration.
        hardware: what the run may use, unless the section `cluster` says it; that of this machine if not given.

    Returns:
        The report; nothing is raised.
    """
    context = _Context(config, hardware_of(config.cluster) or hardware or detect(), read_model(config.model.path))
    passed, warnings, problems = [], [], []
    for subject, find, warn, describe in _CHECKS:
        own_problems = list(find(context))
        problems += own_problems
        warnings += list(warn(context))
        passed += [] if own_problems else [(subject, describe(context))]
    return CheckReport(tuple(passed), tuple(warnings), tuple(problems))


def _nothing(context: _Context) -> Iterator[Problem]:
    return iter(())


def _layout_text(context: _Context) -> str:
    actor = context.config.actor
    parts = (actor.tensor_parallel, actor.pipeline_parallel, actor.context_parallel, actor.data_parallel)
    experts = f", EP {actor.expert_parallel}" if actor.expert_parallel > 1 else ""
    return "TP {} * PP {} * CP {} * DP {} = ".format(*parts) + f"{actor.world_size} ranks{experts}"


def _world_problems(context: _Context) -> Iterator[Problem]:
    hardware, got = context.hardware, _layout_text(context)
    if hardware.kind == "cpu":
        return
    if context.config.actor.world_size > hardware.count:
        fix = "lower the product of the parallel sizes, or run where there are more GPUs (section cluster)"
        allowed = f"at most {hardware.count} ranks: one per GPU of {hardware.place}"
        yield Problem("actor", got, allowed, fix, also=_PARALLEL)
    elif why := misfit(demand_of(context.config, engines=False), hardware.per_node):
        fix = "choose a tensor_parallel that divides the GPUs of a node"
        yield Problem("actor.tensor_parallel", got, f"what {hardware.place} can hold ({why})", fix, also=_PARALLEL)


def _world_warnings(context: _Context) -> Iterator[Problem]:
    actor, hardware = context.config.actor, context.hardware
    demand, got = demand_of(context.config), _layout_text(context)
    room = (hardware.count - (demand.gpus - actor.world_size)) // actor.world_size
    if hardware.kind == "gpu" and room > 1:
        fix = f"set actor.data_parallel={actor.data_parallel * room}, or more engine.replicas, to use more GPUs"
        yield Problem("actor", got, f"up to {actor.world_size * room} ranks beside the engines", fix, also=_PARALLEL)
    if hardware.kind == "cpu" and actor.world_size > hardware.count:
        fix = "use fewer ranks, or expect them to share cores"
        yield Problem("actor", got, f"{hardware.count} CPU cores are on {hardware.place}", fix, also=_PARALLEL)


def _process_problems(context: _Context) -> Iterator[Problem]:
    """Ranks and engines have room together."""
    engine, hardware, demand = context.config.engine, context.hardware, demand_of(context.config)
    also = (*_PARALLEL, "engine.kind", "engine.sglang.urls", "engine.sglang.tensor_parallel")
    alone = demand_of(context.config, engines=False)
    if hardware.kind == "gpu" and not misfit(alone, hardware.per_node) and (why := misfit(demand, hardware.per_node)):
        got = f"{engine.replicas}, with which actor and engine need {demand.gpus} GPUs"
        allowed = f"what {hardware.place} can hold ({why})"
        fix = "lower engine.replicas or the parallel sizes, or run where there are more GPUs"
        yield Problem("engine.replicas", got, allowed, fix, also=also)
    if hardware.place != THIS_MACHINE or hardware.memory_bytes is None:
        return
    memory = f"{hardware.memory_bytes / 2**30:.0f} GiB of memory"
    if demand.processes * _LEAST_PROCESS_BYTES > hardware.memory_bytes:
        got = f"{engine.replicas}, and {context.config.actor.world_size} ranks: {demand.processes} processes"
        allowed = f"what fits into {memory}, models not counted"
        yield Problem("engine.replicas", f"{got} of at least 256 MiB each", allowed, "lower engine.replicas", also=also)
    workers = context.config.reward.workers
    if workers * _LEAST_VERIFIER_BYTES > hardware.memory_bytes:
        allowed = f"what fits into {memory}, 64 MiB each at least"
        yield Problem("reward.workers", str(workers), allowed, "use as many as there are free cores")


def _process_text(context: _Context) -> str:
    engine = context.config.engine
    servers = len(engine.sglang.urls) or engine.replicas
    return f"{context.config.actor.world_size} ranks, {servers} engines ({engine.kind})"


def _division_problems(context: _Context) -> Iterator[Problem]:
    actor, shape = context.config.actor, context.shape
    if shape:
        yield from check_training.division_problems(actor, shape)
    if actor.sequence_parallel and actor.tensor_parallel == 1:
        fix = "leave it unset: it follows tensor_parallel"
        yield Problem(
            "actor.sequence_parallel", "true with tensor_parallel 1", "true only with tensor_parallel > 1", fix,
            also=("actor.tensor_parallel",),
        )  # fmt: skip


def _division_text(context: _Context) -> str:
    shape = context.shape
    if shape is None:
        return "shape unknown"
    experts = f", {shape.experts.number} experts" if shape.experts else ""
    return f"{shape.layers} layers, {shape.heads} heads, {shape.kv_heads} key-value heads{experts}"


def _batch_problems(context: _Context) -> Iterator[Problem]:
    rollout, actor, updates = context.config.rollout, context.config.actor, context.config.trainer.updates_per_batch
    samples = rollout.batch_rollouts
    also = ("rollout.prompts_per_step", "rollout.rollouts_per_prompt", "trainer.updates_per_batch")
    if samples > _MOST_ROLLOUTS:
        got = f"{rollout.prompts_per_step} with {rollout.rollouts_per_prompt} rollouts per prompt: {samples} rollouts"
        allowed = f"at most {_MOST_ROLLOUTS} rollouts a batch"
        yield Problem("rollout.prompts_per_step", got, allowed, "lower one of the two", also=also[1:2])
    product = f"prompts_per_step {rollout.prompts_per_step} * rollouts_per_prompt {rollout.rollouts_per_prompt}"
    if samples % updates:
        got = f"{updates}, which does not divide {product} = {samples} samples"
        fix = "choose a divisor, or change rollout.prompts_per_step"
        yield Problem("trainer.updates_per_batch", got, f"a divisor of {samples}", fix, also=also)
    elif samples // updates < actor.data_parallel:
        got = f"{actor.data_parallel}, but an update has {samples // updates} samples ({product}, {updates} updates)"
        fix = "raise rollout.prompts_per_step or lower actor.data_parallel"
        yield Problem("actor.data_parallel", got, f"at most {samples // updates}", fix, also=also)


def _batch_text(context: _Context) -> str:
    config = context.config
    samples, epochs = config.rollout.batch_rollouts, config.trainer.epochs_per_batch
    often = f", {epochs} epochs" if epochs > 1 else ""
    return f"{samples} samples a batch, {samples // config.trainer.updates_per_batch} an update{often}"


def _budget_problems(context: _Context) -> Iterator[Problem]:
    config, shape = context.config, context.shape
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    budget, multiple = config.actor.micro_batch_tokens, config.actor.sequence_multiple
    lengths = ("data.max_prompt_tokens", "rollout.max_response_tokens")
    need = f"max_prompt_tokens {prompt} + max_response_tokens {response} = {prompt + response}"
    if prompt + response > budget:
        fix = f"set actor.micro_batch_tokens={-(-(prompt + response) // multiple) * multiple}, or shorten the sequences"
        yield Problem("actor.micro_batch_tokens", f"{budget}, but {need}", f">= {prompt + response}", fix, also=lengths)
    if budget % multiple:
        got = f"{budget}, which is not a multiple of {multiple} (TP with sequence parallel * 2 CP)"
        fix = f"set actor.micro_batch_tokens={-(-budget // multiple) * multiple}"
        yield Problem("actor.micro_batch_tokens", got, f"a multiple of {multiple}", fix, also=_PARALLEL[:3])
    if shape and prompt + response > shape.max_positions:
        got = f"{need} tokens"
        allowed = f"at most {shape.max_positions}, the model's max_position_embeddings"
        fix = "lower rollout.max_response_tokens or data.max_prompt_tokens"
        yield Problem("rollout.max_response_tokens", got, allowed, fix, also=(*lengths, "model.path"))


def _budget_text(context: _Context) -> str:
    config = context.config
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return f"{longest} tokens of prompt and response in micro-batches of {config.actor.micro_batch_tokens}"


def _surroundings(context: _Context) -> precision.Surroundings:
    """Return what fp8 would run on: the run's GPUs, and the versions of this environment, which its ranks have too."""
    hardware = context.hardware
    return replace(precision.installed(here=hardware.place == THIS_MACHINE), capability=hardware.capability)


def _precision_problems(context: _Context) -> Iterator[Problem]:
    actor = context.config.actor
    if actor.precision != "fp8":
        return
    surroundings = _surroundings(context)
    if problem := precision.problem(actor.fp8_recipe, surroundings):
        yield problem
    if context.shape:
        if problem := precision.experts_problem(context.shape, surroundings):
            yield problem
        yield from precision.shape_problems(actor, context.shape)


def _precision_warnings(context: _Context) -> Iterator[Problem]:
    actor, default = context.config.actor, ActorSection()
    names = ("fp8_recipe", "fp8_format", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    for name in names if actor.precision != "fp8" else ():
        if (value := getattr(actor, name)) != getattr(default, name):
            allowed = "no effect: it says how fp8 is computed"
            fix = "set actor.precision=fp8, or remove it"
            yield Problem(f"actor.{name}", f"{value} with precision {actor.precision}", allowed, fix)


def _precision_text(context: _Context) -> str:
    hardware = context.hardware
    named = precision.precision_text(context.config.actor)
    return f"{named} on {hardware.count} {hardware.kind}s of {hardware.place}"


def _megatron_problems(context: _Context) -> Iterator[Problem]:
    given = context.config.actor.megatron
    return megatron_options.option_problems(given, megatron_options.upstream_names()) if given else iter(())


_Find = Callable[[_Context], Iterator[Problem]]
_CHECKS: tuple[tuple[str, _Find, _Find, Callable[[_Context], str]], ...] = (
    (
        "model files",
        lambda c: itertools.chain(c.model.problems, megatron_problems(c.config.model.megatron_weights)),
        lambda c: check_training.model_warnings(c.shape),
        lambda c: str(c.config.model.path),
    ),
    (
        "data files",
        lambda c: check_training.data_files(c.config),
        _nothing,
        lambda c: check_training.data_text(c.config),
    ),
    ("world size", _world_problems, _world_warnings, _layout_text),
    ("processes", _process_problems, _nothing, _process_text),
    ("model division", _division_problems, _nothing, _division_text),
    ("batch", _batch_problems, _nothing, _batch_text),
    ("sequence budget", _budget_problems, _nothing, _budget_text),
    ("precision", _precision_problems, _precision_warnings, _precision_text),
    (
        "Megatron options",
        _megatron_problems,
        _nothing,
        lambda c: f"{len(c.config.actor.megatron)} handed on under upstream's names",
    ),
    (
        "sampling",
        lambda c: itertools.chain(check_training.sampling(c.config, c.model), segments(c.config)),
        lambda c: check_training.sampling_warnings(c.config),
        lambda c: f"K {c.config.rollout.rollouts_per_prompt}, temperature {c.config.rollout.temperature:g}",
    ),
    (
        "algorithm",
        lambda c: itertools.chain(check_training.algorithm(c.config), critic(c.config, c.shape), distill(c.config)),
        lambda c: check_training.algorithm_warnings(c.config),
        lambda c: c.config.algorithm.name,
    ),
    (
        "engine",
        lambda c: itertools.chain(
            check_engine.engine(c.config, c.hardware),
            colocation(c.config),
            communication(c.config),
            check_engine.routing_replay(c.config, c.shape),
            server_precision(c.config, c.shape, c.hardware),
        ),
        _nothing,
        lambda c: c.config.engine.kind,
    ),
    ("seeds", lambda c: check_engine.server_seeds(c.config), _nothing, lambda c: str(c.config.trainer.seed)),
    ("run", lambda c: check_training.run(c.config), _nothing, lambda c: f"{c.config.trainer.steps} steps"),
)
