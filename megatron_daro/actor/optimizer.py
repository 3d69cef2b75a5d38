"""Megatron's optimizer and learning-rate schedule, with a step that can be refused.

Gradients are checked first, and clipped as part of the update; the caller updates only if the check allows it. The
schedule advances before the update, so that the first step of a warm-up does not run at learning rate 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_daro.actor.compat import inner_optimizers, optimizer_parts, order_by_dtype, upstream_config
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from megatron_daro.actor.model import DTYPES
from megatron_daro.actor.reductions import finite_on_all_ranks
from megatron_daro.config.actor import OptimizerSection
from megatron_daro.errors import ConfigError

_GROUP_STATE = ("params", "step")


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """The gradients of a step, judged alike on every rank. fit: whether they may be applied. grad_norm: before
    clipping."""

    fit: bool
    grad_norm: float


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], section: OptimizerSection, *, dtype: str, options: Mapping[str, Any]
) -> MegatronOptimizer:
    """Return Adam over this rank's parameters (or its shard of them, when distributed)."""
    config = optimizer_config(section, dtype=dtype, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    order_by_dtype(optimizer)
    return optimizer


def optimizer_config(section: OptimizerSection, *, dtype: str, options: Mapping[str, Any]) -> OptimizerConfig:
    """Return Megatron's configuration of the optimizer. Raises ConfigError: upstream refuses an option."""
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": section.learning_rate,
        "min_lr": section.learning_rate * section.min_learning_rate_ratio,  # copied into every parameter group
        "weight_decay": section.weight_decay,
        "adam_beta1": section.betas[0],
        "adam_beta2": section.betas[1],
        "adam_eps": section.eps,
        "clip_grad": section.grad_clip,
        "use_distributed_optimizer": section.distributed,
        "params_dtype": DTYPES[dtype],
        "bf16": dtype == "bf16",
    }
    return upstream_config(OptimizerConfig, values, options)


def build_scheduler(
    optimizer: MegatronOptimizer, section: OptimizerSection, *, total_steps: int
) -> OptimizerParamScheduler:
    """Return a schedule, in optimizer steps: warm-up from 0, then constant, or linear or cosine decay down to
    min_learning_rate_ratio."""
    warmup = section.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.learning_rate,
        min_lr=section.learning_rate * section.min_learning_rate_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def group_options(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group (learning rates, betas, eps, ...), without its parameters and step
    count."""
    return [{k: v for k, v in group.items() if k not in _GROUP_STATE} for group in optimizer.param_groups]


def set_group_options(optimizer: MegatronOptimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Put back what `group_options` returned: loading a checkpoint replaces this run's options with the saved ones.

    The schedule then derives the learning rate and weight decay of the step from them.
    """
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def check_gradients(optimizer: MegatronOptimizer, *, allowed: bool = True) -> GradientCheck:
    """Check whether reduced gradients may be applied; parameters and state do not change. Collective.

    Args:
        optimizer: of this rank. allowed: False if the loss was not finite; must be the same on every rank.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    fit = allowed and not found_inf and finite_on_all_ranks(grad_norm)
    return GradientCheck(fit, grad_norm)


def apply_update(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, grad_norm: float, *, fresh_moments: bool = False
) -> float:
    """Clip and apply gradients that `check_gradients` found fit. Returns the learning rate of the update.

    Args:
        optimizer, scheduler: of this rank. grad_norm: of the check.
        fresh_moments: whether Adam's moments are set to zero before this update.
    """
    if fresh_moments:
        reset_moments(optimizer)
    scheduler.step(increment=1)
    for part in optimizer_parts(optimizer):
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    return float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Make Adam's moments and step counts zero, as before the first update; parameters and options stay.

    Raises:
        ConfigError: the optimizer keeps something else.
    """
    for inner in inner_optimizers(optimizer):
        for values in inner.state.values():
            if unknown := sorted(set(values) - {"exp_avg", "exp_avg_sq", "step", "master_param"}):
                raise ConfigError(
                    f"algorithm.options.reset_optimizer: got true with an optimizer that keeps {', '.join(unknown)}; "
                    "allowed: with Adam; fix: set it to false"
                )
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if torch.is_tensor(values.get(name)):
                    values[name].zero_()
        for group in inner.param_groups:  # Transformer Engine and Apex count steps here
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0
