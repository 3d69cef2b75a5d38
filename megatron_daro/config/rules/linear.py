"""Rules of models with linear attention: what of a run their layers do not have, and is refused."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.transports import sglang_transports


def linear(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield what a model with linear attention cannot have."""
    if shape is None or shape.linear is None:
        return
    actor, model = config.actor, "with linear attention"
    if shape.linear.key_heads % actor.tensor_parallel:
        allowed = f"a divisor of the {shape.linear.key_heads} key heads of linear attention"
        yield wrong(config, "actor.tensor_parallel", allowed, "choose one that also divides the attention heads")
    if actor.precision == "fp8":
        yield wrong(config, "actor.precision", f"bf16, fp32 {model}", "set actor.precision=bf16", beside="model.path")
    if actor.context_parallel > 1:
        allowed = f"1 {model}, whose state runs over a whole sequence"
        yield wrong(config, "actor.context_parallel", allowed, "set actor.context_parallel=1", beside="model.path")
    if config.lora.rank:
        yield wrong(config, "lora.rank", f"0 {model}: adapters have no place there", "set lora.rank=0")
    if config.engine.kind != "sglang":
        return
    if config.engine.sglang.transport.shard_plan:
        ways = sglang_transports(lambda way: not way.shard_plan and not way.adapters)
        fix = "set engine.sglang.sync=distributed"
        yield wrong(config, "engine.sglang.sync", f"{ways} {model}", fix, beside="model.path")
    if config.engine.sglang.fp8_blocks:
        fix = "set engine.sglang.fp8_blocks=false"
        yield wrong(config, "engine.sglang.fp8_blocks", f"false {model}", fix, beside="model.path")
