"""Rules of models with latent attention: what of a run was never compared with it, and is refused."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.hardware import Hardware, Version
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.transports import sglang_transports

_CUTS_CONTEXT: Version = (0, 17)
"""Megatron-core whose latent attention takes packed sequences that ranks share."""


def latent(config: Config, shape: ModelShape | None, hardware: Hardware, core: Version | None) -> Iterator[Problem]:
    """Yield what a model with latent attention cannot have. Args: core: version of Megatron-core, where it is known."""
    if shape is None or shape.latent is None:
        return
    sglang, actor, model = config.engine.sglang, config.actor, "with latent attention"
    if actor.precision == "fp8":
        yield wrong(config, "actor.precision", f"bf16, fp32 {model}", "set actor.precision=bf16", beside="model.path")
    if actor.context_parallel > 1 and hardware.kind == "gpu" and core and core < _CUTS_CONTEXT:
        allowed = f"1 {model} and Megatron-core {'.'.join(map(str, core))}; more from 0.17 on"
        fix = "set actor.context_parallel=1, or install a newer Megatron-core (docs/gpu.md)"
        yield wrong(config, "actor.context_parallel", allowed, fix, beside="model.path")
    if config.lora.rank:
        yield wrong(config, "lora.rank", f"0 {model}: adapters have no place there", "set lora.rank=0")
    if config.engine.kind != "sglang":
        return
    if actor.routing_replay:
        allowed = f"false {model}: SGLang may add shared experts to those that it reports"
        yield wrong(config, "actor.routing_replay", allowed, "remove it", beside="model.path")
    if sglang.transport.shard_plan:
        ways = sglang_transports(lambda way: not way.shard_plan and not way.adapters)
        fix = "set engine.sglang.sync=distributed"
        yield wrong(config, "engine.sglang.sync", f"{ways} {model}", fix, beside="model.path")
    if sglang.fp8_blocks:
        allowed = f"false {model}: SGLang makes other matrices of the blocks of its keys and values"
        yield wrong(config, "engine.sglang.fp8_blocks", allowed, "set engine.sglang.fp8_blocks=false")
