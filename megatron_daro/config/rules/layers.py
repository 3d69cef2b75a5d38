"""Rules for models with special layers: refuse options that these layers do not support, or with which their results
were never compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_daro.config.hardware import Hardware, Version
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.transports import sglang_transports

_CUTS_CONTEXT: Version = (0, 17)
"""First Megatron-core whose latent attention takes packed sequences under context parallelism."""


@dataclass(frozen=True, slots=True)
class _Option:
    """asked: returns whether a run uses the option. allowed, fix: texts for the user, if the model does not support it.
    served: whether the option concerns only a model that SGLang serves."""

    asked: Callable[[Config], object]
    allowed: str
    fix: str
    served: bool = True


_OPTIONS: Mapping[str, _Option] = {
    "actor.precision": _Option(
        lambda c: c.actor.precision == "fp8", "bf16, fp32", "set actor.precision=bf16", served=False
    ),
    "actor.routing_replay": _Option(lambda c: c.actor.routing_replay, "false", "remove it"),
    "engine.sglang.sync": _Option(
        lambda c: c.engine.sglang.transport.shard_plan,
        sglang_transports(lambda way: not way.shard_plan and not way.adapters),
        "set engine.sglang.sync=distributed",
    ),
    "engine.sglang.fp8_blocks": _Option(
        lambda c: c.engine.sglang.fp8_blocks, "false", "set engine.sglang.fp8_blocks=false"
    ),
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """name: for messages. of: returns whether a model has such layers. lacks: field of `_OPTIONS` -> the reason, as
    text to append; it may be empty."""

    name: str
    of: Callable[[ModelShape], object]
    lacks: Mapping[str, str]


_KINDS = (
    _Kind(
        "latent attention",
        lambda shape: shape.latent,
        {
            "actor.precision": "",
            "actor.routing_replay": ": SGLang may add shared experts to those that it reports",
            "engine.sglang.sync": "",
            "engine.sglang.fp8_blocks": ": SGLang makes other matrices of the blocks of its keys and values",
        },
    ),
    _Kind(
        "linear attention",
        lambda shape: shape.linear,
        {
            "actor.precision": "",
            "engine.sglang.sync": "",
            "engine.sglang.fp8_blocks": "",
        },
    ),
    _Kind(
        "attention sinks or norms after attention and MLP",
        lambda shape: shape.local_layers,
        {"actor.precision": ": these layers are Megatron's own, not Transformer Engine's"},
    ),
)


def layers(
    config: Config, shape: ModelShape | None, hardware: Hardware, core: Version | None, *, served: bool
) -> Iterator[Problem]:
    """Yield options that the layers of a model do not support.

    Args:
        core: version of Megatron-core, if it is known. served: whether SGLang serves the model; it does not serve a
            critic.
    """
    if shape is None:
        return
    actor, sections = config.actor, {"actor": config.actor, "engine": config.engine}
    for kind in _KINDS:
        for field, why in kind.lacks.items() if kind.of(shape) else ():
            option = _OPTIONS[field]
            if (served or not option.served) and option.asked(config):
                allowed = f"{option.allowed} with {kind.name}{why}"
                yield wrong(sections, field, allowed, option.fix, beside="model.path")
    if shape.latent and actor.context_parallel > 1 and hardware.kind == "gpu" and core and core < _CUTS_CONTEXT:
        allowed = f"1 with latent attention and Megatron-core {'.'.join(map(str, core))}; more from 0.17 on"
        fix = "set actor.context_parallel=1, or install a newer Megatron-core (docs/gpu.md)"
        yield wrong(sections, "actor.context_parallel", allowed, fix, beside="model.path")
