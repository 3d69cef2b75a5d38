"""What a check finds: a difference beside its tolerance, numbers alone, or why it cannot run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

NO_TRANSFORMER_ENGINE = "Transformer Engine is not installed, or there is no GPU"


class NotHereError(Exception):
    """The check needs something that this machine or environment lacks; the message names it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, by its name with the unit; nothing to pass."""

    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """difference: the largest found, in the unit that `of` names; passed where it is at most `tolerance`. numbers: what
    was measured on the way."""

    difference: float
    tolerance: float
    of: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the difference is a number within the tolerance (NaN is not)."""
        return self.difference <= self.tolerance


def angle(got: np.ndarray, want: np.ndarray) -> float:
    """1 - cosine of the angle between two gradients."""
    a, b = got.ravel().astype(np.float64), want.ravel().astype(np.float64)
    return 1.0 - float(a @ b / np.sqrt((a @ a) * (b @ b)))


def need_gpu(device: torch.device) -> None:
    """Raise NotHereError on a CPU."""
    if device.type != "cuda":
        raise NotHereError("it is about the memory of a GPU, and there is none")


def need_gpus(device: torch.device, number: int, what: str) -> None:
    """Raise NotHereError where there are GPUs, and fewer than so many processes need."""
    if device.type == "cuda" and torch.cuda.device_count() < number:
        raise NotHereError(f"{number} {what} need as many GPUs, and there are {torch.cuda.device_count()}")


def need_transformer_engine() -> None:
    """Raise NotHereError where Transformer Engine cannot be used."""
    from megatron_daro.actor.device import has_transformer_engine

    if not has_transformer_engine():
        raise NotHereError(NO_TRANSFORMER_ENGINE)
