"""Megatron's optimizer and learning-rate schedule, with a step that can be refused, and the precision of a rank.

A step reduces, checks and clips gradients before it updates; with a non-finite norm nothing is updated and the caller
decides. The schedule advances before the update, so that the first step of a warm-up does not run at learning rate 0.

The precision of a rank is settled once, when the policy is built: whose layers, which of Megatron's fp8 options.
config/precision.py has checked what is known before the start; here the GPU and the libraries are those that compute,
and fp8 that would silently be something else is rejected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_daro.actor import device
from megatron_daro.actor.compat import optimizer_parts, upstream_config
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from megatron_daro.actor.model import DTYPES
from megatron_daro.config import precision
from megatron_daro.config.actor import ActorSection, OptimizerSection
from megatron_daro.config.hardware import version_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ConfigError


def uses_transformer_engine(actor: ActorSection) -> bool:
    """Return whether the layers are Transformer Engine's.

    It has no attention for packed sequences in fp32, and multiplies fp32 matrices as TF32.

    Raises:
        ConfigError: fp8 is asked for, and the recipe cannot run on this rank; with the nearest one that can.
    """
    found = actor.precision != "fp32" and device.has_transformer_engine()
    if actor.precision == "fp8":
        if why := precision.problem(actor.fp8_recipe, surroundings()):
            raise ConfigError(str(why))
        if not found:
            raise ConfigError(
                "actor.precision: got fp8, but Transformer Engine cannot be imported here; without it nothing would be "
                "multiplied in fp8; fix: repair it on every node of the actor (docs/gpu.md), or set "
                "actor.precision=bf16"
            )
    return found


def refuse_unsaveable_experts(actor: ActorSection, shape: ModelShape) -> None:
    """Raise ConfigError where this rank's libraries would compute experts in fp8 that they cannot save."""
    if actor.precision == "fp8" and (why := precision.experts_problem(shape, surroundings())):
        raise ConfigError(str(why))


def surroundings() -> precision.Surroundings:
    """Return what this process would compute fp8 with."""
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


def remarks(actor: ActorSection, transformer_engine: bool) -> tuple[str, ...]:
    """Return what a person should know about the layers."""
    if transformer_engine or not torch.cuda.is_available():
        return ()
    why = "it has no packed attention in fp32" if actor.precision == "fp32" else "it cannot be imported there"
    return (
        f"ranks on GPUs compute without Transformer Engine ({why}): attention then takes its sequences one by one in "
        "Python, many times slower; good for tests only",
    )


_GROUP_STATE = ("params", "step")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One attempt to update. grad_norm is before clipping; learning_rate the one used."""

    applied: bool
    grad_norm: float
    learning_rate: float


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], section: OptimizerSection, *, dtype: str, options: Mapping[str, Any]
) -> MegatronOptimizer:
    """Adam over this rank's parameters (or its shard of them, when distributed)."""
    config = optimizer_config(section, dtype=dtype, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)


def optimizer_config(section: OptimizerSection, *, dtype: str, options: Mapping[str, Any]) -> OptimizerConfig:
    """Megatron's configuration of the optimizer. Raises ConfigError where upstream refuses the options."""
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
    """Warm-up from 0, then constant, linear or cosine down to min_learning_rate_ratio; the unit is optimizer steps."""
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
    """Return the options of each parameter group (learning rates, betas, eps, ...), without its parameters and their
    age."""
    return [{k: v for k, v in group.items() if k not in _GROUP_STATE} for group in optimizer.param_groups]


def set_group_options(optimizer: MegatronOptimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Put back what `group_options` gave: loading a checkpoint replaces the options of this run by the saved ones.

    The schedule then sets learning rate and weight decay of the step from them.
    """
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def prepare_update(optimizer: MegatronOptimizer, *, allowed: bool = True) -> UpdateReport:
    """Look at the gradients; `applied` is whether they may be. Nothing of parameters or state changes.

    Args:
        optimizer: of this rank. allowed: False if the loss was not finite; must be the same on every rank.
    """
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    fit = allowed and not found_inf and _finite_everywhere(grad_norm)
    return UpdateReport(applied=fit, grad_norm=grad_norm, learning_rate=0.0)


def apply_update(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, grad_norm: float, *, afresh: bool = False
) -> UpdateReport:
    """Clip and apply gradients that `prepare_update` found fit.

    Args:
        optimizer, scheduler: of this rank. grad_norm: of the report.
        afresh: whether the moments are zero before this update.
    """
    if afresh:
        reset_moments(optimizer)
    scheduler.step(increment=1)
    for part in optimizer_parts(optimizer):
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    return UpdateReport(applied=True, grad_norm=grad_norm, learning_rate=_learning_rate(optimizer))


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Make Adam's moments and step counts zero, as before the first update; parameters and options stay.

    Raises:
        ConfigError: the optimizer keeps something else.
    """
    for part in optimizer_parts(optimizer):
        inner = getattr(part, "optimizer", None)
        if inner is None:  # a rank without parameters of this part
            continue
        for values in inner.state.values():
            if unknown := sorted(set(values) - {"exp_avg", "exp_avg_sq", "step", "master_param"}):
                raise ConfigError(
                    f"algorithm.kimi.reset_optimizer: got true with an optimizer that keeps {', '.join(unknown)}; "
                    "allowed: with Adam; fix: set it to false"
                )
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if torch.is_tensor(values.get(name)):
                    values[name].zero_()
        for group in inner.param_groups:  # Transformer Engine and Apex count steps here
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0


def _finite_everywhere(value: float) -> bool:
    """Return the same answer on every rank: a norm may be taken over a part of the world only."""
    flag = torch.tensor([float(math.isfinite(value))], device=device.prepare())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag.item() > 0)


def _learning_rate(optimizer: MegatronOptimizer) -> float:
    return float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0
