"""Rules of models whose layers are of another kind: what these do not have, or were never compared with, is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_daro.config.hardware import Hardware, Version
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.transports import sglang_transports

_CUTS_CONTEXT: Version = (0, 17)
"""Megatron-core whose latent attention takes packed sequences that ranks share."""


@dataclass(frozen=True, slots=True)
class _Option:
    """asked: whether a run asks for it. allowed, fix: for the user of a model that does not have it."""

    asked: Callable[[Config], object]
    allowed: str
    fix: str


def _served(config: Config) -> bool:
    return config.engine.kind == "sglang"


_OPTIONS: Mapping[str, _Option] = {
    "actor.precision": _Option(lambda c: c.actor.precision == "fp8", "bf16, fp32", "set actor.precision=bf16"),
    "actor.routing_replay": _Option(lambda c: _served(c) and c.actor.routing_replay, "false", "remove it"),
    "engine.sglang.sync": _Option(
        lambda c: _served(c) and c.engine.sglang.transport.shard_plan,
        sglang_transports(lambda way: not way.shard_plan and not way.adapters),
        "set engine.sglang.sync=distributed",
    ),
    "engine.sglang.fp8_blocks": _Option(
        lambda c: _served(c) and c.engine.sglang.fp8_blocks, "false", "set engine.sglang.fp8_blocks=false"
    ),
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """name: for messages. of: whether a model has such layers. lacks: field of `_OPTIONS` -> why, where that can be
    said in a few words."""

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


def layers(config: Config, shape: ModelShape | None, hardware: Hardware, core: Version | None) -> Iterator[Problem]:
    """Yield what the layers of a model do not have. Args: core: version of Megatron-core, where it is known."""
    if shape is None:
        return
    for kind in _KINDS:
        for field, why in kind.lacks.items() if kind.of(shape) else ():
            option = _OPTIONS[field]
            if option.asked(config):
                yield wrong(config, field, f"{option.allowed} with {kind.name}{why}", option.fix, beside="model.path")
    actor = config.actor
    if shape.latent and actor.context_parallel > 1 and hardware.kind == "gpu" and core and core < _CUTS_CONTEXT:
        allowed = f"1 with latent attention and Megatron-core {'.'.join(map(str, core))}; more from 0.17 on"
        fix = "set actor.context_parallel=1, or install a newer Megatron-core (docs/gpu.md)"
        yield wrong(config, "actor.context_parallel", allowed, fix, beside="model.path")
