"""Which precision can run where: fp8 recipes of the actor, and servers that compute in fp8.

The configuration's checks ask before anything starts, with what is known of the machines by then; each rank asks
again with what it sees (actor/optimizer.py). Versions are read from what is installed, because importing torch takes
seconds. What is not known rejects nothing. The numbers are those of Transformer Engine 2.20.2 and Megatron-core
0.16.1 to 0.19.2.

SGLang 0.5.23 has two ways to compute the policy's weights in fp8. With `load_format: flash_rl` it casts the bf16
weights of every update, for dense Qwen2 and Qwen3 models only; without that, parameters that it quantized at its
start have lost what loads them, and the first update fails. With `fp8_blocks` the policy sends blocks with their
scales, of any family. Quantized servers that could not follow the policy are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from megatron_daro.config.actor import ActorSection, Fp8Recipe
from megatron_daro.config.hardware import Hardware, Version, torch_cuda, version_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a recipe would run on. None: not known. capability: the least of the GPUs, 0 on a CPU.

    cuda: that torch was built for. transformer_engine: its version, () where it is not installed. megatron: of
    Megatron-core.
    """

    capability: float | None = None
    cuda: Version | None = None
    transformer_engine: Version | None = None
    cudnn: Version | None = None
    megatron: Version | None = None


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of a recipe. below: compute capability from which on it does not run. width: what the matrices' sides divide by.

    tokens: what the tokens of a matrix product are padded to. nearest: which recipes are most like it, best first.
    """

    capability: float
    cuda: Version
    transformer_engine: Version
    width: int
    tokens: int
    nearest: tuple[Fp8Recipe, ...]
    below: float | None = None


_CUDNN: Version = (9, 12)
_STATELESS_FP8: Version = (2, 16)
_SPLITS_NO_STATE: Version = (0, 19)
NEEDS: dict[Fp8Recipe, _Needs] = {
    "tensorwise": _Needs(8.9, (12, 1), (2, 2), 16, 32, ()),
    "blockwise": _Needs(9.0, (12, 9), (2, 3), 16, 128, ("mxfp8", "tensorwise")),
    "mxfp8": _Needs(10.0, (12, 8), (2, 1), 32, 32, ("blockwise", "tensorwise"), below=12.0),
}
"""By recipe. Padding: 16 tokens would do for tensorwise; blockwise with sequence parallelism needs whole blocks."""


def why_not(recipe: Fp8Recipe, found: Surroundings) -> str:
    """Return why the recipe cannot run there; empty where it can, or where nobody knows."""
    needs = NEEDS[recipe]
    if found.capability == 0:
        return "there is no GPU"
    if found.capability is not None and found.capability < needs.capability:
        return f"a GPU has compute capability {found.capability:g}, it needs {needs.capability:.1f} or newer"
    if found.capability is not None and needs.below is not None and found.capability >= needs.below:
        return f"a GPU has compute capability {found.capability:g}, where it lacks kernels (below {needs.below:.1f})"
    if found.transformer_engine == ():
        return "Transformer Engine is not installed"
    for name, version, least in (
        ("Transformer Engine", found.transformer_engine, needs.transformer_engine),
        ("torch's CUDA", found.cuda, needs.cuda),
        ("cuDNN", found.cudnn, _CUDNN),
    ):
        if version is not None and version < least:
            return f"{name} is {_text(version)}, it needs {_text(least)} or newer"
    return ""


def nearest(recipe: Fp8Recipe, found: Surroundings) -> Fp8Recipe | None:
    """Return the recipe that is most like this one and runs there; None where no recipe does."""
    return next((other for other in NEEDS[recipe].nearest if not why_not(other, found)), None)


def problem(recipe: Fp8Recipe, found: Surroundings) -> Problem | None:
    """Return what forbids the recipe there, with the nearest one that works."""
    why = why_not(recipe, found)
    if not why:
        return None
    other = nearest(recipe, found)
    if other is None:
        allowed = "fp32, bf16" if why != "Transformer Engine is not installed" else "fp8 where it is"
        fix = "set actor.precision=bf16"
        if found.transformer_engine == () and found.capability != 0:
            fix = f"install it (docs/gpu.md), or {fix}"
        return Problem("actor.precision", f"fp8 ({recipe}), but {why}", allowed, fix, also=("actor.fp8_recipe",))
    running = [name for name in NEEDS if not why_not(name, found)]
    fix = f"set actor.fp8_recipe={other}"
    return Problem("actor.fp8_recipe", f"{recipe}, but {why}", " or ".join(running), fix, also=("actor.precision",))


def experts_problem(shape: ModelShape, found: Surroundings) -> Problem | None:
    """Return why experts in fp8 could not be saved there: found at the first checkpoint, hours after the start.

    Source: Transformer Engine from 2.16 on saves no state of these recipes (`is_stateless_recipe`, module/base.py), and
    Megatron-core below 0.19 reads `extra_fp8_variables` of it for each expert (`_split_extra_state`).
    """
    core, engine = found.megatron, found.transformer_engine
    if not shape.experts or not core or not engine or core >= _SPLITS_NO_STATE or engine < _STATELESS_FP8:
        return None
    pair = f"Megatron-core {_text(core)} with Transformer Engine {_text(engine)}"
    return Problem(
        "actor.precision",
        f"fp8 of a model with experts, but {pair} cannot save them",
        f"Megatron-core {_text(_SPLITS_NO_STATE)} or newer, or Transformer Engine below {_text(_STATELESS_FP8)}",
        "install one of these (docs/gpu.md), or set actor.precision=bf16",
        also=("model.path",),
    )


def shape_problems(actor: ActorSection, shape: ModelShape) -> Iterator[Problem]:
    """Return what of the model the recipe cannot multiply, and layers in bf16 that leave none for fp8."""
    width = NEEDS[actor.fp8_recipe].width
    for what, size in _sides(actor, shape).items():
        if size % width:
            got = f"fp8 ({actor.fp8_recipe}), but a rank has {size} {what}"
            allowed = f"matrices whose sides are multiples of {width}"
            fix = "set actor.precision=bf16, or another tensor_parallel"
            yield Problem("actor.precision", got, allowed, fix, also=("actor.tensor_parallel", "model.path"))
    start, end = actor.num_layers_at_start_in_bf16, actor.num_layers_at_end_in_bf16
    also = ("actor.num_layers_at_start_in_bf16", "actor.pipeline_parallel", "model.path")
    if start + end >= shape.layers:
        got = f"{end}, with {start} at the start, but the model has {shape.layers} layers"
        fix = "lower them, or set actor.precision=bf16"
        yield Problem("actor.num_layers_at_end_in_bf16", got, "fewer than all layers together", fix, also=also)
    most = shape.layers // actor.pipeline_parallel
    for name, count in (("start", start), ("end", end)):
        if count > most:
            allowed = f"at most {most}, layers / pipeline_parallel: Megatron-core keeps them on one stage"
            field = f"actor.num_layers_at_{name}_in_bf16"
            yield Problem(field, str(count), allowed, f"set {field}={most}", also=also)


def _sides(actor: ActorSection, shape: ModelShape) -> dict[str, int]:
    """Sides of the matrices that a rank multiplies in its layers."""
    tensor = actor.tensor_parallel
    kv_heads = max(shape.kv_heads // tensor, 1)
    sides = {
        "hidden columns": shape.hidden,
        "columns of attention heads": shape.heads // tensor * shape.head_dim,
        "rows of queries, keys and values": (shape.heads // tensor + 2 * kv_heads) * shape.head_dim,
    }
    if shape.expert_layers < shape.layers:
        sides["MLP columns"] = shape.ffn // tensor
    if shape.experts:
        sides["columns of an expert"] = shape.experts.ffn // actor.expert_tensor_size
    return sides


def installed(*, here: bool) -> Surroundings:
    """Return the versions that this interpreter would import.

    Args:
        here: whether the ranks run on this machine; on others a package that is absent here says nothing.
    """
    engine = _version("transformer_engine")
    cudnn = next((v for v in map(_version, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")) if v), None)
    engine = (() if here else None) if engine is None else engine
    return Surroundings(None, torch_cuda(), engine, cudnn, _version("megatron-core"))


def _version(package: str) -> Version | None:
    try:
        return version_of(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def precision_text(actor: ActorSection) -> str:
    """Return the precision in a few words."""
    if actor.precision != "fp8":
        return actor.precision
    start, end = actor.num_layers_at_start_in_bf16, actor.num_layers_at_end_in_bf16
    some = f", first {start} and last {end} layers in bf16" if start or end else ""
    return f"fp8 ({actor.fp8_recipe}, {actor.fp8_format}{some})"


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
