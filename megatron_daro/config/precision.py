"""Which fp8 recipes of the actor can run on which machines, and which matrices of a model they can multiply.

The configuration's checks ask before anything starts, with what is known about the machines by then; each rank asks
again with what it sees (actor/precision.py). Versions are read from the installed packages' metadata, because importing
torch takes seconds. Unknown facts lead to no refusal. The numbers are those of Transformer Engine 2.20.2 and
Megatron-core 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from megatron_daro.config.actor import ActorSection, Fp8Recipe
from megatron_daro.config.hardware import Version, torch_cuda, version_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Hardware and versions on which a recipe would run. None: not known.

    capability: the least compute capability of the GPUs, 0 on a CPU. cuda: the version for which torch was built.
    transformer_engine: its version, () if it is not installed. megatron: version of Megatron-core.
    """

    capability: float | None = None
    cuda: Version | None = None
    transformer_engine: Version | None = None
    cudnn: Version | None = None
    megatron: Version | None = None


@dataclass(frozen=True, slots=True)
class _Needs:
    """Requirements of a recipe. below: compute capability from which on it does not run. width: the sides of matrices
    must be multiples of it. nearest: the recipes that are most like it, best first.
    """

    capability: float
    cuda: Version
    transformer_engine: Version
    width: int
    nearest: tuple[Fp8Recipe, ...]
    below: float | None = None


FP8_BLOCK = 128
"""Rows and columns of the blocks that share a scale."""
_CUDNN: Version = (9, 12)
_STATELESS_FP8: Version = (2, 16)
_SPLITS_NO_STATE: Version = (0, 19)
NEEDS: dict[Fp8Recipe, _Needs] = {
    "tensorwise": _Needs(8.9, (12, 1), (2, 2), 16, ()),
    "blockwise": _Needs(9.0, (12, 9), (2, 3), 16, ("mxfp8", "tensorwise")),
    "mxfp8": _Needs(10.0, (12, 8), (2, 1), 32, ("blockwise", "tensorwise"), below=12.0),
}
"""Requirements by recipe."""


def why_not(recipe: Fp8Recipe, found: Surroundings) -> str:
    """Return why the recipe cannot run on `found`; empty if it can, or if that is not known."""
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
    """Return the recipe that is most like this one and runs on `found`; None if there is none."""
    return next((other for other in NEEDS[recipe].nearest if not why_not(other, found)), None)


def problem(recipe: Fp8Recipe, found: Surroundings) -> Problem | None:
    """Return why the recipe cannot run on `found`, with the nearest recipe that can."""
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
    """Return why experts in fp8 could not be saved; otherwise this would show at the first checkpoint, hours after the
    start.

    Source: Transformer Engine from 2.16 on saves no state for these recipes (`is_stateless_recipe`, module/base.py),
    and Megatron-core below 0.19 reads `extra_fp8_variables` from that state for each expert (`_split_extra_state`).
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


def fp8_problems(actor: ActorSection, shape: ModelShape | None, found: Surroundings) -> Iterator[Problem]:
    """Yield why a run could not compute in fp8: the first reason that applies, and options that leave no layer for fp8.

    Args:
        shape: of the model; None: not known. found: hardware and versions on which it would run.
    """
    if actor.precision != "fp8":
        return
    against = problem(actor.fp8_recipe, found) or (
        shape and (experts_problem(shape, found) or _uneven_problem(actor, shape))
    )
    if against:
        yield against
    if shape:
        yield from _bf16_layers(actor, shape)


def _uneven_problem(actor: ActorSection, shape: ModelShape) -> Problem | None:
    width = NEEDS[actor.fp8_recipe].width
    uneven = [f"{size} {what}" for what, size in _sides(actor, shape).items() if size % width]
    if not uneven:
        return None
    got = f"fp8 ({actor.fp8_recipe}), but a rank has {', '.join(uneven)}"
    fix = "set actor.precision=bf16, or another tensor_parallel"
    also = ("actor.tensor_parallel", "model.path")
    return Problem("actor.precision", got, f"matrices whose sides are multiples of {width}", fix, also=also)


def _bf16_layers(actor: ActorSection, shape: ModelShape) -> Iterator[Problem]:
    start, end = actor.num_layers_at_start_in_bf16, actor.num_layers_at_end_in_bf16
    if start + end >= shape.layers:
        allowed = f"fewer than the model's {shape.layers} layers, together with those at the start"
        yield wrong(
            {"actor": actor},
            "actor.num_layers_at_end_in_bf16",
            allowed,
            "lower them, or set actor.precision=bf16",
            beside="actor.num_layers_at_start_in_bf16 model.path",
        )
    most = shape.layers // actor.pipeline_parallel
    for field, count in (("actor.num_layers_at_start_in_bf16", start), ("actor.num_layers_at_end_in_bf16", end)):
        if count > most:
            allowed = f"at most {most}, layers / pipeline_parallel: Megatron-core keeps them on one stage"
            beside = "actor.pipeline_parallel model.path"
            yield wrong({"actor": actor}, field, allowed, f"set {field}={most}", beside=beside)


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
        sides["columns of shared experts"] = shape.experts.shared_ffn // tensor
    return sides


def installed(*, here: bool) -> Surroundings:
    """Return the versions that this interpreter would import.

    Args:
        here: whether the ranks run on this machine; if not, a package that is absent here may still be there.
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
