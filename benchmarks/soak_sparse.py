"""A trainer whose steps change few weights, as steps of bf16 weights at a low learning rate do.

Place in the data flow: sglang_soak.py --sync differences installs it before the ranks start. Adam in fp32 changes every
weight in every step, so that differences would be as large as the weights; here all but a drawn share of them (other
ones in each step, the same on every rank) are put back after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_ranks
import torch

CHANGED = 0.04
"""Share of the weights that a step changes: as with SmolLM2 at 4e-5, in bf16."""


def install() -> None:
    """Make every rank of this process's runs such a trainer."""
    own_ranks.install(sparse)


def sparse(rank_class: Any) -> Any:
    """The class of such a rank."""

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

    return SparseWorker
