"""Servers that compute in fp8: which arguments make SGLang quantize the policy's weights at each update, and where.

Called by checks.py. Facts are those of SGLang 0.5.23. There are two ways. With
`load_format: flash_rl` it casts the bf16 weights of every update into the fp8 ones it has; without that, parameters
that it quantized at its start have lost what loads them, and the first update fails. It does so for dense Qwen2 and
Qwen3 models and refuses others. With `fp8_blocks` the policy sends blocks with their scales, of any family.
Refuses quantized servers that could not follow the policy.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config

FP8_BLOCK = 128
"""Rows and columns of the blocks that share a scale."""
_ARGUMENTS, _BLOCKS = "engine.sglang.arguments", "engine.sglang.fp8_blocks"
_BOTH = "{quantization: fp8, load_format: flash_rl}"
_FAMILIES = ("qwen2", "qwen3")
_OWNED = ("quantization", "load_format", "json_model_override_args")
# From there on SGLang rounds the scales to powers of two and packs them; the next update does not fit any more.
_PACKS_SCALES = 10.0


def server_precision(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """Return what keeps servers that quantize from taking the policy's weights."""
    if config.engine.kind != "sglang":
        return iter(())
    if config.engine.sglang.fp8_blocks:
        return _fp8_blocks(config, shape, hardware)
    return _quantized_updates(config, shape, hardware)


def _fp8_blocks(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """With engine.sglang.fp8_blocks."""
    sglang = config.engine.sglang
    off = f"set {_BLOCKS}=false"
    given = [name for name in _OWNED if name in sglang.named_arguments]
    if given:
        allowed = f"without {' and '.join(given)} in {_ARGUMENTS}: servers are started for blocks"
        yield Problem(_BLOCKS, "true", allowed, f"remove {' and '.join(given)}, or {off}", also=(_ARGUMENTS,))
    if sglang.sync == "disk":
        allowed = "distributed or tensor: files are written in bf16"
        yield Problem("engine.sglang.sync", f"disk with {_BLOCKS}", allowed, off, also=(_BLOCKS,))
    if config.actor.precision == "fp32":
        fix = f"set actor.precision=bf16, or {off}"
        yield Problem(_BLOCKS, "true with actor.precision fp32", "actor.precision bf16 or fp8", fix)
    capability = hardware.capability
    if hardware.fp8 is False or (capability is not None and capability >= _PACKS_SCALES):
        allowed = "GPUs of compute capability 8.9 or 9.0; from 10 on SGLang 0.5.23 packs the scales and takes no update"
        yield Problem(_BLOCKS, f"true on {_found(hardware)}", allowed, off)
    yield from _uneven(shape, sglang.tensor_parallel) if shape else ()


def _uneven(shape: ModelShape, ranks: int) -> Iterator[Problem]:
    """Yield the widths that SGLang cannot cut into blocks."""
    heads = {"query heads x head_dim": shape.heads, "key/value heads x head_dim": max(shape.kv_heads, ranks)}
    widths = {what: number * shape.head_dim / ranks for what, number in heads.items()}
    dense = not shape.experts or len(shape.experts.dense_layers) > 0
    widths |= {"hidden_size": float(shape.hidden)} | ({"intermediate_size": shape.ffn / ranks} if dense else {})
    if shape.experts:
        widths["width of an expert"] = shape.experts.ffn / ranks
    bad = [f"{what} {width:g}" for what, width in widths.items() if width % FP8_BLOCK]
    if bad:
        got = f"true with {', '.join(bad)} on each of {ranks} ranks"
        fix = f"set {_BLOCKS}=false, or a smaller engine.sglang.tensor_parallel"
        also = ("engine.sglang.tensor_parallel", "model.path")
        yield Problem(_BLOCKS, got, f"multiples of {FP8_BLOCK}", fix, also=also)


def _found(hardware: Hardware) -> str:
    return "no GPU" if hardware.kind == "cpu" else f"a GPU of compute capability {hardware.capability:g}"


def _quantized_updates(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """With servers that quantize each update themselves."""
    sglang = config.engine.sglang
    quantization, load_format = (sglang.named_arguments.get(name) for name in ("quantization", "load_format"))
    if quantization is None and load_format != "flash_rl":
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
        got, allowed = f"{_BOTH} on {_found(hardware)}", "GPUs of compute capability 8.9 or newer"
        yield Problem(_ARGUMENTS, got, allowed, "remove both: servers then compute in bf16")
