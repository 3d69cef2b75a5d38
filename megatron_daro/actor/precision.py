"""The precision of a rank, settled once, when the policy is built: whose layers, which of Megatron's fp8 options.

config/precision.py has checked what is known before the start. Here the GPU and the libraries that compute are known,
and fp8 that would silently be something else is rejected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_daro.actor import device
from megatron_daro.config import precision
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import version_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ConfigError


def uses_transformer_engine(actor: ActorSection, shape: ModelShape) -> bool:
    """Return whether the layers are Transformer Engine's.

    It has no attention for packed sequences in fp32, and multiplies fp32 matrices as TF32. Its layers with
    sinks, or with norms after them, have not been compared with the model's.

    Raises:
        ConfigError: fp8 is asked for, but the recipe cannot run on this rank (the message names the nearest one that
            can), or Transformer Engine cannot be imported.
    """
    available = actor.precision != "fp32" and not shape.local_layers and device.has_transformer_engine()
    if actor.precision == "fp8":
        if why := precision.problem(actor.fp8_recipe, surroundings()):
            raise ConfigError(str(why))
        if not available:
            raise ConfigError(
                "actor.precision: got fp8, but Transformer Engine cannot be imported here; without it nothing would be "
                "multiplied in fp8; fix: repair it on every node of the actor (docs/gpu.md), or set "
                "actor.precision=bf16"
            )
    return available


def refuse_unsaveable_experts(actor: ActorSection, shape: ModelShape) -> None:
    """Raise ConfigError if this rank's libraries would compute experts in fp8 and could not save them."""
    if actor.precision == "fp8" and (why := precision.experts_problem(shape, surroundings())):
        raise ConfigError(str(why))


def surroundings() -> precision.Surroundings:
    """Return the GPU and library versions that this process would compute fp8 with."""
    if not torch.cuda.is_available():
        return precision.Surroundings(capability=0)
    major, minor = torch.cuda.get_device_capability()
    cudnn = torch.backends.cudnn.version()
    return replace(
        precision.installed(here=True),
        capability=major + minor / 10,
        cuda=version_of(torch.version.cuda or ""),
        cudnn=None if cudnn is None else (cudnn // 10_000, cudnn // 100 % 100, cudnn % 100),
    )


def fp8_options(actor: ActorSection) -> dict[str, Any]:
    """Return the TransformerConfig fields that make the layers' products fp8; none with another precision."""
    if actor.precision != "fp8":
        return {}
    start, end = actor.num_layers_at_start_in_bf16, actor.num_layers_at_end_in_bf16
    return {
        "fp8": actor.fp8_format,
        "fp8_recipe": actor.fp8_recipe,
        "first_last_layers_bf16": start + end > 0,
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }


def remarks(actor: ActorSection, shape: ModelShape, transformer_engine: bool) -> tuple[str, ...]:
    """Return remarks for the user about the layers."""
    if transformer_engine or not torch.cuda.is_available():
        return ()
    why = "it has no packed attention in fp32" if actor.precision == "fp32" else "it cannot be imported there"
    if shape.local_layers and actor.precision != "fp32":
        why = "its layers are not known to be the model's"
    return (
        f"ranks on GPUs compute without Transformer Engine ({why}): attention is many times slower "
        "then; good for tests only",
    )
