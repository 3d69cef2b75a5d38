"""The `lora` section: low-rank adapters beside frozen weights; what they can stand beside, and what an adapter's own
files say of it.

Read by actor/lora.py. Refuses targets that a model does not have, ranks above a matrix's side, and a published adapter
that is another than the section says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_daro.config.base import ExpandedPath, Section
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.families import families

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT calls the two files of an adapter."""
PEFT_PREFIX = "base_model.model."
"""Of PEFT's names, before those of transformers."""
ALL = "all"
_ATTENTION, _DENSE, _EXPERTS = ("qkv", "attention_output"), ("gate_up", "down"), ("expert_gate_up", "expert_down")


class LoraSection(Section):
    """Low-rank adapters (LoRA): they alone are trained, beside frozen weights."""

    rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of every adapter; 0: all weights are trained, without adapters."""
    alpha: float | None = Field(default=None, ge=1e-6, le=1e6)
    """What an adapter adds is multiplied by alpha / rank. Unset: rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank)."""
    dropout: float = Field(default=0.0, ge=0, le=0)
    """0 only: with dropout the log-probs before and after an update would be those of two models."""
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = (ALL,)
    """Matrices that get one, by Hugging Face's names (q_proj, down_proj); all: every one of the layers."""
    path: ExpandedPath | None = None
    """PEFT's folder of an adapter to start from, of this rank, alpha and these targets. Unset: A as PEFT draws it, from
    trainer.seed; B zero."""

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return (self.alpha or self.rank) / (self.rank**0.5 if self.rslora else self.rank)

    def target_names(self, shape: ModelShape) -> frozenset[str]:
        """Return the names of the matrices that get an adapter."""
        return frozenset(_sides(shape)) if ALL in self.targets else frozenset(self.targets)


_SERVED = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe")
"""Families whose adapters were tried in SGLang 0.5.23 (tests/sglang/test_sglang_adapters.py)."""


def unserved(settings: Any, shape: ModelShape) -> str:
    """Why servers cannot get the adapters alone; empty where they can. Args: settings: a Config.

    Source: sglang 0.5.23, srt/lora/lora.py: it fuses q, k, v where there is a q, and reads v then; gate and up where
    there is a gate. What it does not find it takes for zeros, and what it does not fuse it leaves out.
    """
    engine, sglang, step = settings.engine, settings.engine.sglang, 32 * settings.engine.sglang.tensor_parallel
    if engine.kind != "sglang" or shape.family not in _SERVED:
        return f"this was not tried with engine.kind {engine.kind} and a model of type {shape.family}"
    targets = settings.lora.target_names(shape)
    of_qkv, of_mlp = targets & {"q_proj", "k_proj", "v_proj"}, targets & {"gate_proj", "up_proj", "down_proj"}
    padded = sglang.named_arguments.get("device") == "cpu" and of_mlp and shape.ffn % step
    reasons = {
        "SGLang takes one of q, k or v only with those of q and v": of_qkv and not of_qkv >= {"q_proj", "v_proj"},
        "SGLang takes one of up_proj only with one of gate_proj": of_mlp & {"up_proj"} and not of_mlp & {"gate_proj"},
        f"on a CPU SGLang pads an MLP, but no adapter, to a multiple of {step}": padded,
        "servers read model.path, not model.megatron_weights": settings.model.megatron_weights is not None,
        "with engine.colocate servers lose their weights in the trainer's turn": engine.colocate,
        "servers are quantized": sglang.fp8_blocks or sglang.named_arguments.get("quantization") is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def with_adapter_sync(settings: Any, shape: ModelShape | None) -> Any:
    """Return the Config whose servers get adapters alone, where they can and `engine.sglang.sync` is not given."""
    engine, given = settings.engine, "sync" in settings.engine.sglang.model_fields_set
    if not settings.lora.rank or given or shape is None or unserved(settings, shape):
        return settings
    sglang = engine.sglang.model_copy(update={"sync": "adapters"})
    return settings.model_copy(update={"engine": engine.model_copy(update={"sglang": sglang})})


def merging(settings: Any, shape: ModelShape | None) -> Iterator[Problem]:
    """Warn that engines get whole weights. Args: settings: a Config, as `with_adapter_sync` returns it."""
    if settings.lora.rank and shape is not None and not settings.engine.sglang.transport.adapters:
        got = f"adapters, of which engines get none ({unserved(settings, shape) or 'engine.sglang.sync is given'})"
        allowed = "whole weights, with the adapters added to them in fp32 and rounded to the weights' type"
        yield Problem("lora.rank", got, allowed, "none needed (docs/lora.md)")


def served_config(settings: Any) -> dict[str, Any]:
    """Return adapter_config.json for servers that get adapters; empty where they get whole weights. SGLang 0.5.23
    multiplies by lora_alpha / r, whatever it says of rslora. Args: settings: a Config."""
    section, path = settings.lora, settings.model.path
    if not settings.engine.sglang.transport.adapters:
        return {}
    config = peft_config(section, read_model_shape(path), str(path))
    return {**config, "lora_alpha": section.scale * section.rank, "use_rslora": False}


def peft_config(section: LoraSection, shape: ModelShape, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json. Args: base: path or name of the frozen model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha or section.rank,
        "use_rslora": section.rslora,
        "lora_dropout": 0.0,
        "target_modules": sorted(section.target_names(shape)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def lora_problems(settings: Any, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield why these adapters cannot be trained. Args: settings: a Config. shape: of the model, where it is known."""
    section: LoraSection = settings.lora
    if shape is not None and settings.engine.sglang.transport.adapters:
        reason = unserved(settings, shape) if section.rank else "lora.rank is 0"
        fix = "set engine.sglang.sync=distributed, or remove it"
        if reason:
            yield Problem("engine.sglang.sync", f"adapters, but {reason}", "adapters that servers can take", fix)
    if not section.rank:
        if settings.trainer.export_adapter:
            fix = "set lora.rank, or trainer.export_adapter=false"
            yield wrong(settings, "trainer.export_adapter", "false without adapters", fix, beside="lora.rank")
        return
    if settings.actor.precision == "fp8":
        fix = "set actor.precision=bf16, or lora.rank=0"
        yield wrong(settings, "lora.rank", "0 with weights in fp8", fix, beside="actor.precision")
    if shape is not None and shape.takes_adapters:
        yield from _target_problems(settings, section, shape)
    if section.path is not None:
        yield from _path_problems(section, shape)


def _target_problems(settings: Any, section: LoraSection, shape: ModelShape) -> Iterator[Problem]:
    sides = _sides(shape)
    names, of_experts = ", ".join(sides), _names(shape, _EXPERTS)
    if shape.experts is not None and ALL in section.targets:
        allowed = f"names out of {names} for a model with experts, whose own matrices get none"
        yield wrong(settings, "lora.targets", allowed, f"set lora.targets=[{names}]")
        return
    for target in section.targets:
        if target in sides or target == ALL:
            continue
        why = ", which is an expert's" if target in of_experts else ""
        yield Problem("lora.targets", f"{target}{why}", f"{ALL}, or names out of {names}", "remove or correct it")
    wanted = [name for name in section.target_names(shape) if name in sides]
    smallest = min(wanted, key=lambda name: sides[name], default=None)
    if smallest is not None and section.rank > sides[smallest]:
        allowed = f"at most {sides[smallest]}, the shorter side of {smallest}"
        yield wrong(settings, "lora.rank", allowed, "lower it")


def _names(shape: ModelShape, roles: tuple[str, ...]) -> list[str]:
    tensors = families()[shape.family].tensors
    return [name.split(".")[-2] for role in roles for name in tensors.get(role, ())]


def _sides(shape: ModelShape) -> Mapping[str, int]:
    """Return the shorter side of each matrix that can have an adapter, by its name."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_attention = dict(zip(_names(shape, _ATTENTION), (query, key, key, query), strict=True))
    dense = {} if shape.experts is not None else dict.fromkeys(_names(shape, _DENSE), shape.ffn)
    return {name: min(shape.hidden, side) for name, side in (of_attention | dense).items()}


def _path_problems(section: LoraSection, shape: ModelShape | None) -> Iterator[Problem]:
    assert section.path is not None
    try:
        content = json.loads(Path(section.path, CONFIG_FILE).read_text(encoding="utf-8"))
        lacking = "" if Path(section.path, WEIGHTS_FILE).is_file() else f"no {WEIGHTS_FILE}"
    except (OSError, ValueError) as error:
        content, lacking = {}, str(error)
    if lacking or not isinstance(content, dict):
        allowed = f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        yield Problem("lora.path", f"{section.path} ({lacking or 'no mapping'})", allowed, "name such a folder")
        return
    for name, value in plain_config(section).items():
        if content.get(name, value) != value:
            yield Problem("lora.path", f"an adapter with {name} {content[name]!r}", f"{name} {value!r}", _FIX)
    targets = content.get("target_modules")
    if shape is None or not shape.takes_adapters or not isinstance(targets, list):
        return
    if {*targets} != section.target_names(shape):
        got = f"an adapter of {', '.join(sorted(targets))}"
        yield Problem("lora.path", got, ", ".join(sorted(section.target_names(shape))), _FIX)


def plain_config(section: LoraSection) -> dict[str, Any]:
    """Return what adapter_config.json says of these adapters where they are nothing more than LoRA."""
    return {
        "peft_type": "LORA",
        "r": section.rank,
        "lora_alpha": section.alpha or section.rank,
        "use_rslora": section.rslora,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


_FIX = "set lora.rank, lora.alpha, lora.rslora and lora.targets as the adapter has them, or name another adapter"
