"""A trainer whose steps change few weights, as steps of bf16 weights at a low learning rate do.

Place in the data flow: sglang_soak.py --sync differences installs it before the ranks start. Adam in fp32 changes every
weight in every step, so that differences would be as large as the weights; here all but a drawn share of them (other
ones in each step, the same on every rank) are put back after it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import torch

from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.supervisor import actor_class, remote_class
from megatron_daro.runtime.workers import _GROUPS, TrainWorker

CHANGED = 0.04
"""Share of the weights that a step changes: as with SmolLM2 at 4e-5, in bf16."""


def install() -> None:
    """Make every rank of this process's runs such a trainer."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = _class()

    def start_process(self: PolicyGroup, rank: int) -> Any:
        return actor_class(made).options(**self._placement.rank(rank)).remote(rank, self._logs)

    PolicyGroup.start_process = start_process  # type: ignore[method-assign]


def _class() -> Any:
    rank_class: Any = TrainWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]

    class SparseWorker(rank_class):  # type: ignore[misc]
        def __init__(self, rank: int, log_folder: Path | None = None) -> None:
            super().__init__(rank, log_folder)
            from megatron_daro.actor import step

            apply_update = step.apply_update

            def sparsely(optimizer: Any, scheduler: Any, *arguments: Any, **options: Any) -> Any:
                weights = [weight for group in optimizer.param_groups for weight in group["params"]]
                before = [weight.detach().clone() for weight in weights]
                report = apply_update(optimizer, scheduler, *arguments, **options)
                drawn = torch.Generator().manual_seed(scheduler.num_steps)
                for weight, old in zip(weights, before, strict=True):
                    keeps = torch.rand(weight.shape, generator=drawn) >= CHANGED
                    weight.data[keeps] = old[keeps]
                return report

            step.apply_update = sparsely

    return remote_class(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)(SparseWorker)
