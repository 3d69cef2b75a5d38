"""Servers that compute in fp8: which arguments make SGLang quantize the policy's weights at each update, and where.

Place in the data flow: called by checks.py. Facts are those of SGLang 0.5.23: with `load_format: flash_rl` it casts the
bf16 weights of every update into the fp8 ones it has; without that, parameters that it quantized at its start have
lost what loads them, and the first update fails. It does so for dense Qwen2 and Qwen3 models and refuses others.
Refuses quantized servers that could not follow the policy.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config

_ARGUMENTS = "engine.sglang.arguments"
_BOTH = "{quantization: fp8, load_format: flash_rl}"
_FAMILIES = ("qwen2", "qwen3")


def server_precision(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """Return what keeps servers that quantize from taking the policy's weights."""
    sglang = config.engine.sglang
    quantization, load_format = (sglang.named_arguments.get(name) for name in ("quantization", "load_format"))
    if config.engine.kind != "sglang" or (quantization is None and load_format != "flash_rl"):
        return
    if (quantization, load_format) != ("fp8", "flash_rl"):
        got = f"quantization {show(quantization)} with load_format {show(load_format)}"
        allowed = f"{_BOTH}, or neither: servers that quantize in another way cannot take the policy's weights"
        yield Problem(_ARGUMENTS, got, allowed, f"set {_ARGUMENTS}={_BOTH}, or remove both")
        return
    if shape and shape.family not in _FAMILIES:
        got = f"{_BOTH} with a model of type {shape.family}"
        allowed = f"models of type {' or '.join(_FAMILIES)}: SGLang quantizes the updates of no other"
        yield Problem(_ARGUMENTS, got, allowed, "remove both: servers then compute in bf16", also=("model.path",))
    if sglang.sync == "disk":
        allowed = f"distributed or tensor with {_BOTH}: weights from files would be quantized twice"
        yield Problem("engine.sglang.sync", "disk", allowed, "set engine.sglang.sync=distributed", also=(_ARGUMENTS,))
    if config.actor.precision == "fp32":
        fix = "set actor.precision=bf16, or remove both arguments"
        yield Problem(_ARGUMENTS, f"{_BOTH} with actor.precision fp32", "actor.precision bf16 or fp8", fix)
    if hardware.fp8 is False:
        found = "no GPU" if hardware.kind == "cpu" else f"a GPU of compute capability {hardware.capability:g}"
        allowed = "GPUs of compute capability 8.9 or newer"
        yield Problem(_ARGUMENTS, f"{_BOTH} on {found}", allowed, "remove both: servers then compute in bf16")
