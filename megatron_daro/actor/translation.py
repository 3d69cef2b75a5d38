"""The configuration in terms of Megatron-core: layout, and options of each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_daro.actor.megatron import TransformerConfig
from megatron_daro.actor.model import data_parallel_config, split_megatron_options, transformer_config
from megatron_daro.actor.optimizer import optimizer_config
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.precision import fp8_options, refuse_unsaveable_experts, uses_transformer_engine
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.megatron_options import TRANSFORMER_ENGINE_ONLY, gpu_defaults
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ConfigError


def layout_of(actor: ActorSection) -> Layout:
    """Return the parallel sizes of the section."""
    return Layout(
        tensor=actor.tensor_parallel,
        pipeline=actor.pipeline_parallel,
        context=actor.context_parallel,
        data=actor.data_parallel,
        expert=actor.expert_parallel,
        expert_tensor=actor.expert_tensor_parallel,
        virtual_pipeline=actor.virtual_pipeline_parallel,
    )


def check_megatron_options(actor: ActorSection, shape: ModelShape) -> None:
    """Check `actor.megatron` with Megatron-core, as every rank will. Starts nothing; needs no process groups.

    Raises:
        ConfigError: an option is unknown, of another type, or refused by upstream.
    """
    options = megatron_options(actor, shape)
    needing = [name for name in TRANSFORMER_ENGINE_ONLY & actor.megatron.keys() if actor.megatron[name]]
    if needing and not uses_transformer_engine(actor, shape):
        raise ConfigError(
            f"actor.megatron: got {', '.join(sorted(needing))}; allowed: only with the layers of Transformer Engine, "
            "which this run does not have here (docs/gpu.md); fix: remove it"
        )
    transformer_config_of(shape, actor, options["transformer"])
    data_parallel_config(distributed_optimizer=actor.optimizer.distributed, options=options["ddp"])
    optimizer_config(actor.optimizer, dtype=actor.dtype, options=options["optimizer"])


def megatron_options(actor: ActorSection, shape: ModelShape) -> dict[str, dict[str, Any]]:
    """Return `actor.megatron` with what ranks on GPUs add, by part of Megatron-core (see `split_megatron_options`)."""
    chosen: Mapping[str, Any] = {}
    if torch.cuda.is_available():
        has_experts = shape.experts is not None
        chosen = gpu_defaults(actor, experts=has_experts, transformer_engine=uses_transformer_engine(actor, shape))
    return split_megatron_options({**actor.megatron, **chosen})


def transformer_config_of(shape: ModelShape, actor: ActorSection, options: Mapping[str, Any]) -> TransformerConfig:
    """Return Megatron's configuration of a model on this rank. Raises ConfigError. Args: options: the transformer's
    part of `megatron_options`."""
    refuse_unsaveable_experts(actor, shape)
    return transformer_config(
        shape,
        layout_of(actor),
        dtype=actor.dtype,
        sequence_parallel=actor.use_sequence_parallel,
        recompute=actor.recompute,
        fp8=fp8_options(actor),
        transformer_engine=uses_transformer_engine(actor, shape),
        options=options,
    )
