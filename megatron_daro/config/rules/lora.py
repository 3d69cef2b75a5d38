"""Rules of `lora`: what adapters can be combined with, which of them servers can take, and whether a given adapter
fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_daro.config.lora import (
    ALL,
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraSection,
    differing,
    layers_of_role,
    matrix_of,
    matrix_sides,
    peft_config,
    sides_of_roles,
    stored_shapes,
)
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.safetensors_header import HeaderError, read_header
from megatron_daro.config.sections import Config
from megatron_daro.config.stages import part_layers
from megatron_daro.families import families

_SERVED = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "glm4_moe", "mixtral")
"""Families whose adapters were tried in SGLang 0.5.23 (tests/sglang/test_sglang_adapters.py)."""


def unserved(config: Config, shape: ModelShape) -> str:
    """Return why servers cannot get only the adapters; empty if they can.

    Source: sglang 0.5.23, srt/lora/lora.py: if there is an adapter of q it fuses q, k and v, for which it needs v; if
    there is one of gate it fuses gate and up. It takes adapters that are missing then as zeros, and ignores those that
    it does not fuse.
    """
    engine, sglang, step = config.engine, config.engine.sglang, 32 * config.engine.sglang.tensor_parallel
    if engine.kind != "sglang":
        return f"engine.kind is {engine.kind}"
    if shape.family not in _SERVED:
        return f"this was not tried with a model of type {shape.family}"
    targets = config.lora.target_names(shape)
    of_qkv, of_mlp = targets & {"q_proj", "k_proj", "v_proj"}, targets & {"gate_proj", "up_proj", "down_proj"}
    padded = sglang.named_arguments.get("device") == "cpu" and of_mlp and shape.ffn % step
    reasons = {
        "SGLang takes one of q, k or v only with those of q and v": of_qkv and not of_qkv >= {"q_proj", "v_proj"},
        "SGLang takes one of up_proj only with one of gate_proj": of_mlp & {"up_proj"} and not of_mlp & {"gate_proj"},
        f"on a CPU SGLang pads an MLP, but no adapter, to a multiple of {step}": padded,
        "servers read model.path, not model.megatron_weights": config.model.megatron_weights is not None,
        "with engine.colocate servers lose their weights in the trainer's turn": engine.colocate,
        "servers are quantized": sglang.is_quantized,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def with_adapter_sync(config: Config, shape: ModelShape | None) -> Config:
    """Return the Config with `engine.sglang.sync` adapters, if servers can take them and the option is not given."""
    engine, given = config.engine, "sync" in config.engine.sglang.model_fields_set
    if not config.lora.rank or given or shape is None or unserved(config, shape):
        return config
    sglang = engine.sglang.model_copy(update={"sync": "adapters"})
    return config.model_copy(update={"engine": engine.model_copy(update={"sglang": sglang})})


def merging(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield a warning if engines get whole weights. Args: config: as `with_adapter_sync` returns it."""
    if config.lora.rank and shape is not None and not config.engine.sglang.transport.adapters:
        got = f"adapters, of which engines get none ({unserved(config, shape) or 'engine.sglang.sync is given'})"
        allowed = "whole weights, with the adapters added to them in fp32 and rounded to the weights' type"
        yield Problem("lora.rank", got, allowed, "none needed (docs/lora.md)")


def served_config(config: Config) -> dict[str, Any]:
    """Return adapter_config.json for servers that get adapters; empty if they get whole weights. SGLang 0.5.23 always
    multiplies by lora_alpha / r and ignores use_rslora, so lora_alpha contains the scale."""
    section, path = config.lora, config.model.path
    if not config.engine.sglang.transport.adapters:
        return {}
    adapter = peft_config(section, read_model_shape(path), str(path))
    return {**adapter, "lora_alpha": section.scale * section.rank, "use_rslora": False}


def lora_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield why these adapters cannot be trained. Args: shape: of the model, if it is known."""
    section = config.lora
    if shape is not None and config.engine.sglang.transport.adapters:
        reason = unserved(config, shape) if section.rank else "lora.rank is 0"
        fix = "set engine.sglang.sync=distributed, or remove it"
        if reason:
            yield Problem("engine.sglang.sync", f"adapters, but {reason}", "adapters that servers can take", fix)
    if not section.rank:
        return
    if config.actor.precision == "fp8":
        fix = "set actor.precision=bf16, or lora.rank=0"
        yield wrong(config, "lora.rank", "0 with weights in fp8", fix, beside="actor.precision")
    if shape is not None:
        yield from _target_problems(config, section, shape)
    if section.path is not None:
        yield from _path_problems(section, shape)


def _target_problems(config: Config, section: LoraSection, shape: ModelShape) -> Iterator[Problem]:
    sides, tensors = matrix_sides(shape), families()[shape.family].tensors
    of_experts = [matrix_of(name) for role in ("expert_gate_up", "expert_down") for name in tensors.get(role, ())]
    names = ", ".join(sides)
    if shape.experts is not None and ALL in section.targets:
        allowed = f"names out of {names} for a model with experts, whose own matrices get none"
        yield wrong(config, "lora.targets", allowed, f"set lora.targets=[{names}]")
        return
    for target in section.targets:
        if target in sides or target == ALL:
            continue
        why = ", which is an expert's" if target in of_experts else ""
        yield Problem("lora.targets", f"{target}{why}", f"{ALL}, or names out of {names}", "remove or correct it")
    wanted = [(min(sides[name]), name) for name in section.target_names(shape) if name in sides]
    if wanted and section.rank > min(wanted)[0]:
        shorter, name = min(wanted)
        yield wrong(config, "lora.rank", f"at most {shorter}, the shorter side of {name}", "lower it")
    yield from _stages_without(config, {name for _, name in wanted}, shape)


def _stages_without(config: Config, targets: Set[str], shape: ModelShape) -> Iterator[Problem]:
    """Yield the first pipeline stage without an adapter, since Megatron-core's optimizer would have no state there."""
    adapted = {
        layer
        for role, matrices in sides_of_roles(shape).items()
        if any(matrix_of(name) in targets for name in matrices)
        for layer in layers_of_role(role, shape)
    }
    actor = config.actor
    stages, virtual = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    for stage, parts in enumerate(part_layers(shape.layers, stages, virtual, actor.megatron) or ()):
        if adapted and adapted.isdisjoint(chain(*parts)):
            allowed = f"matrices of which each pipeline stage has one: stage {stage} of 0 to {stages - 1} has none"
            fix = f"set lora.targets=[{', '.join(matrix_sides(shape))}], or lower actor.pipeline_parallel"
            yield wrong(config, "lora.targets", allowed, fix, beside="actor.pipeline_parallel")
            return


def _path_problems(section: LoraSection, shape: ModelShape | None) -> Iterator[Problem]:
    assert section.path is not None
    try:
        content = json.loads(Path(section.path, CONFIG_FILE).read_text(encoding="utf-8"))
        stored = {name: entry.shape for name, entry in read_header(section.path / WEIGHTS_FILE).items()}
        others = [(name, repr(content[name]), repr(value)) for name, value in differing(section, content)]
    except (OSError, ValueError, AttributeError, HeaderError) as error:
        allowed = f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        yield Problem("lora.path", f"{section.path} ({error})", allowed, "name such a folder")
        return
    if shape is not None and not others:
        wanted = stored_shapes(section, shape)
        names = sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name))
        others = [(name, str(stored.get(name, "absent")), str(wanted.get(name, "absent"))) for name in names[:1]]
    for name, got, value in others:
        yield Problem("lora.path", f"an adapter with {name} {got}", f"{name} {value}", _FIX)


_FIX = "set section lora as the adapter is, or name an adapter of this model"
