"""The `lora` section: low-rank adapters beside frozen weights, and the files of an adapter. Its rules are in
rules/lora.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from megatron_daro.config.base import ExpandedPath, Section
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.families import families

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of the two files of an adapter."""
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before transformers' name of a parameter."""
Sides = tuple[int, int]
"""Outputs and inputs: the shape of a matrix."""
ALL = "all"


class LoraSection(Section):
    """Low-rank adapters (LoRA): only the adapters are trained; the weights are frozen."""

    rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of every adapter; 0: no adapters, all weights are trained."""
    alpha: float | None = Field(default=None, ge=1e-6, le=1e6)
    """An adapter's output is multiplied by alpha / rank. Unset: rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    dropout: float = Field(default=0.0, ge=0, le=0)
    """Only 0 is allowed: with dropout the log-probs before and after an update would be those of two models."""
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = (ALL,)
    """Matrices that get an adapter, by Hugging Face's names (q_proj, down_proj); all: every matrix of the layers that
    can have one."""
    path: ExpandedPath | None = None
    """Folder of an adapter in PEFT's format to start from; it must have this rank, alpha and these targets. Unset: A is
    drawn as in PEFT, from trainer.seed, and B is 0."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output B A x."""
        return (self.alpha or self.rank) / (self.rank**0.5 if self.rslora else self.rank)

    def target_names(self, shape: ModelShape) -> frozenset[str]:
        """Return the names of the matrices that get an adapter."""
        return frozenset(matrix_sides(shape)) if ALL in self.targets else frozenset(self.targets)


def peft_config(section: LoraSection, shape: ModelShape, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json. Args: base: path or name of the frozen model."""
    return {
        **_plain_config(section),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "lora_dropout": 0.0,
        "target_modules": sorted(section.target_names(shape)),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def matrix_of(hf_name: str) -> str:
    """Return PEFT's name of a matrix: q_proj for model.layers.0.self_attn.q_proj.weight."""
    return hf_name.split(".")[-2]


def sides_of_roles(shape: ModelShape) -> Mapping[str, Mapping[str, Sides]]:
    """Return the matrices of a layer that can have an adapter: role (families/table.py) -> name -> its sides. Names are
    complete, with {layer} for the layer's number. Experts get no adapters."""
    query, key, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    outputs = {"qkv": (query, key, key), "gated_qkv": (2 * query, key, key), "attention_output": (hidden,)}
    inputs = {"attention_output": shape.heads * shape.value_dim}  # of the others the hidden state
    if latent := shape.latent:
        rank, rows = latent.query_rank or 0, shape.heads * (latent.plain + latent.value)
        outputs |= {"q": (query,), "q_down": (rank,), "q_up": (query,)}
        outputs |= {"kv_down": (latent.kv_rank + latent.rotary,), "kv_up": (rows,)}
        inputs |= {"q_up": rank, "kv_up": latent.kv_rank}
    if linear := shape.linear:
        convolved, heads = 2 * linear.keys + linear.values, linear.value_heads
        outputs |= {"linear_in": (convolved, linear.values, heads, heads), "linear_output": (hidden,)}
        outputs |= {"linear_in_by_head": (convolved + linear.values, 2 * heads)}
        inputs |= {"linear_output": linear.values}
    if shape.experts is None:
        outputs |= {"gate_up": (shape.ffn, shape.ffn), "down": (hidden,)}
        inputs |= {"down": shape.ffn}
    names = families()[shape.family].tensors
    return {
        role: {name: (side, inputs.get(role, hidden)) for name, side in zip(names[role], sides, strict=True)}
        for role, sides in outputs.items()
        if role in names and shape.has_role(role)
    }


def layers_of_role(role: str, shape: ModelShape) -> tuple[int, ...]:
    """Return the layers that have a role's matrices. Args: role: of `sides_of_roles`."""
    if role.startswith("linear_"):
        return shape.linear_layers
    without = () if role in ("gate_up", "down") else shape.linear_layers
    return tuple(layer for layer in range(shape.layers) if layer not in without)


def matrix_sides(shape: ModelShape) -> Mapping[str, Sides]:
    """Return the sides of each matrix that can have an adapter, by PEFT's name of it."""
    return {matrix_of(name): sides for part in sides_of_roles(shape).values() for name, sides in part.items()}


def stored_shapes(section: LoraSection, shape: ModelShape) -> Mapping[str, Sides]:
    """Return the shapes of the tensors in adapter_model.safetensors, by name."""
    targets, found = section.target_names(shape), dict[str, Sides]()
    for role, matrices in sides_of_roles(shape).items():
        for template, (outputs, inputs) in matrices.items():
            for layer in layers_of_role(role, shape) if matrix_of(template) in targets else ():
                stem = PEFT_PREFIX + template.format(layer=layer).removesuffix("weight")
                found[f"{stem}lora_A.weight"] = (section.rank, inputs)
                found[f"{stem}lora_B.weight"] = (outputs, section.rank)
    return found


def differing(section: LoraSection, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of an adapter_config.json that are of another adapter, or of more than plain LoRA, as (name,
    the value that it should have)."""
    return ((name, value) for name, value in _plain_config(section).items() if content.get(name, value) != value)


def _plain_config(section: LoraSection) -> dict[str, Any]:
    """Return the entries of adapter_config.json that say that these adapters are plain LoRA."""
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
