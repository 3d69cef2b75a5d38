"""What building a policy and building a critic share: the weights to start from, the wrapper, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.actor.compat import HiddenStateGPTModel
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    MegatronOptimizer,
    OptimizerParamScheduler,
    TransformerConfig,
)
from megatron_daro.actor.model import wrap_data_parallel
from megatron_daro.actor.optimizer import build_optimizer, build_scheduler
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import OptimizerSection
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.megatron_weights import MegatronWeights


def first_weights(
    settings: PolicySettings, shape: ModelShape, path: Path | None = None
) -> HFCheckpoint | MegatronWeights:
    """Open the weights that a model starts from: the Hugging Face checkpoint at `path`, or without one those of the
    run."""
    if path is None and settings.weights is not None:
        return MegatronWeights(settings.weights, shape)
    return HFCheckpoint(path or settings.model_path)


def trained_parts(
    chunks: Sequence[HiddenStateGPTModel],
    config: TransformerConfig,
    section: OptimizerSection,
    *,
    dtype: str,
    options: Mapping[str, Mapping[str, Any]],
    total_steps: int,
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Return what a `TrainedModel` is made of: the model's wrapped parts, their optimizer and schedule. Collective.

    Args:
        chunks: with their weights. options: from `translation.megatron_options`. total_steps: number of its updates.
    """
    wrapped = wrap_data_parallel(chunks, config, distributed_optimizer=section.distributed, options=options["ddp"])
    optimizer = build_optimizer(wrapped, section, dtype=dtype, options=options["optimizer"])
    return wrapped, optimizer, build_scheduler(optimizer, section, total_steps=total_steps)
