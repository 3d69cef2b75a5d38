"""The checks of a configuration against itself, its files and the hardware.

They run after validation and before placement. Each check looks at one subject; all checks are run, and all problems
are reported together. The rules themselves are in rules/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from megatron_daro.config import precision
from megatron_daro.config.hardware import THIS_MACHINE, Hardware, detect, hardware_of
from megatron_daro.config.megatron_options import option_problems
from megatron_daro.config.model_files import megatron_problems, read_model
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem
from megatron_daro.config.rules import advice, algorithm, data, engine, layers, layout, rollout, trainer, unread
from megatron_daro.config.rules.lora import lora_problems, merging
from megatron_daro.config.sections import Config


@dataclass(frozen=True, slots=True)
class CheckReport:
    """passed: (subject, what was found) of each check without problems. warnings, problems: those of all checks."""

    passed: tuple[tuple[str, str], ...]
    warnings: tuple[Problem, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Check:
    """found: the values of this run that the check is about, in a few words."""

    subject: str
    found: str
    problems: Iterable[Problem]
    warnings: Iterable[Problem] = ()


def check(config: Config, hardware: Hardware | None = None) -> CheckReport:
    """Run every check.

    Args:
        config: a resolved configuration.
        hardware: what the run may use, if section `cluster` does not say it. None: that of this machine.

    Returns:
        The report.

    Raises:
        ConfigError: as `detect`.
    """
    passed, warnings, problems = [], list[Problem](), list[Problem]()
    for one in _checks(config, hardware_of(config.cluster) or hardware or detect()):
        own_problems = list(one.problems)
        problems += own_problems
        warnings += one.warnings
        passed += [] if own_problems else [(one.subject, one.found)]
    return CheckReport(tuple(passed), tuple(warnings), tuple(problems))


def _checks(config: Config, hardware: Hardware) -> list[_Check]:
    actor, model = config.actor, read_model(config.model.path)
    shape = model.shape  # None where config.json could not be read, which is a problem of its own
    # Ranks have the same versions of packages as this environment.
    surroundings = replace(precision.installed(here=hardware.place == THIS_MACHINE), capability=hardware.capability)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    harmless = list(unread.warned(config))
    return [
        _Check(
            "model files",
            str(config.model.path),
            [*model.problems, *megatron_problems(config.model.megatron_weights)],
            advice.model(shape),
        ),
        _Check(
            "data files",
            f"{len(config.data.train)} for training, {len(config.data.eval)} for evaluation",
            data.data(config),
        ),
        _Check("world size", layout.layout_text(actor), layout.world(config, hardware), advice.world(config, hardware)),
        _Check("processes", _processes_text(config), layout.processes(config, hardware)),
        _Check(
            "model division",
            _division_text(shape),
            chain(
                layout.division(actor, shape) if shape else (),
                layout.sequence_parallel(config),
                layers.layers(config, shape, hardware, surroundings.megatron, served=config.engine.kind == "sglang"),
            ),
        ),
        _Check("batch", _batch_text(config), rollout.batch(config)),
        _Check(
            "sequence budget",
            f"{longest} tokens of prompt and response in micro-batches of {actor.micro_batch_tokens}",
            rollout.lengths(config, shape),
        ),
        _Check(
            "precision",
            f"{precision.precision_text(actor)} on {hardware.count} {hardware.kind}s of {hardware.place}",
            precision.fp8_problems(actor, shape, surroundings),
        ),
        _Check(
            "adapters",
            f"rank {config.lora.rank}" if config.lora.rank else "none",
            lora_problems(config, shape),
            merging(config, shape),
        ),
        _Check(
            "Megatron options",
            f"{len(actor.megatron)} handed on under upstream's names",
            option_problems(actor.megatron),
        ),
        _Check(
            "sampling",
            f"K {config.rollout.rollouts_per_prompt}, temperature {config.rollout.temperature:g}",
            chain(rollout.sampling(config, model), rollout.segments(config)),
            advice.sampling(config),
        ),
        _Check(
            "algorithm",
            config.algorithm.name,
            chain(
                algorithm.loss(config),
                algorithm.daro(config),
                algorithm.overlong(config),
                algorithm.critic(config, shape, hardware, surroundings),
                algorithm.distill(config),
            ),
            advice.algorithm(config),
        ),
        _Check(
            "engine",
            config.engine.kind,
            chain(
                engine.engine(config),
                engine.servers(config),
                engine.transport(config, hardware),
                engine.colocate(config),
                engine.rotary_base(config, shape),
                engine.fp8_blocks(config, shape, hardware),
                engine.flash_rl(config, shape, hardware),
                engine.routing_replay(config, shape),
            ),
        ),
        _Check(
            "run",
            f"{config.trainer.steps} steps from seed {config.trainer.seed}",
            chain(
                trainer.steps(config),
                trainer.reward(config),
                trainer.environments(config),
                trainer.packages(config, hardware),
            ),
        ),
        _Check("unread options", str(len(harmless) or "none"), unread.refused(config), harmless),
    ]


def _processes_text(config: Config) -> str:
    servers = len(config.engine.sglang.urls) or config.engine.replicas
    return f"{config.actor.world_size} ranks, {servers} engines ({config.engine.kind})"


def _division_text(shape: ModelShape | None) -> str:
    if shape is None:
        return "shape unknown"
    experts = f", {shape.experts.number} experts" if shape.experts else ""
    return f"{shape.layers} layers, {shape.heads} heads, {shape.kv_heads} key-value heads{experts}"


def _batch_text(config: Config) -> str:
    samples, epochs = config.rollout.batch_rollouts, config.trainer.epochs_per_batch
    repeated = f", {epochs} epochs" if epochs > 1 else ""
    most = (
        -(-config.rollout.prompts_per_batch // config.trainer.minibatches_per_batch)
        * config.rollout.rollouts_per_prompt
    )
    return f"{samples} samples a batch, {most} a mini-batch{repeated}"
