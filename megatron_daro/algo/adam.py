"""Adam on a few numbers, each with a step count of its own, in float64 on the CPU: equal gradients, equal moves.

Place in the data flow: gradients of what an algorithm learns -> moves. An entry that is absent from a step keeps its
moments and its count, so its first step after a pause is as large as it would have been. Refuses torn states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError, CheckpointError


class Adam:
    """Moments and step counts of a vector. Source: Kingma and Ba, arXiv 1412.6980."""

    def __init__(
        self, size: int, *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Start with moments of 0.

        Args:
            size: entries. learning_rate: 0 or more. betas: each from 0 to below 1. eps: above 0.

        Raises:
            AlgorithmError: an option is out of range.
        """
        if not (learning_rate >= 0 and math.isfinite(learning_rate)):
            raise AlgorithmError(f"learning_rate: got {learning_rate}, allowed is 0 or more")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise AlgorithmError(f"betas: got {betas}, allowed are two numbers from 0 to below 1")
        if not eps > 0:
            raise AlgorithmError(f"eps: got {eps}, allowed is a number above 0")
        self.learning_rate = learning_rate
        self.betas, self.eps = (float(betas[0]), float(betas[1])), eps
        self._first_moments = torch.zeros(size, dtype=torch.float64)
        self._second_moments = torch.zeros(size, dtype=torch.float64)
        self._steps = torch.zeros(size, dtype=torch.int64)

    def moves(self, gradient: Tensor, present: Tensor) -> Tensor:
        """Return what is to be subtracted, float64 [size], and remember the gradient; 0 where not present.

        Args:
            gradient: float64 [size]. present: bool [size], which entries take part.
        """
        beta1, beta2 = self.betas
        steps = self._steps + present.to(torch.int64)
        first = torch.where(present, beta1 * self._first_moments + (1 - beta1) * gradient, self._first_moments)
        second = torch.where(present, beta2 * self._second_moments + (1 - beta2) * gradient**2, self._second_moments)
        age = steps.clamp(min=1).to(torch.float64)
        move = (first / (1 - beta1**age)) / ((second / (1 - beta2**age)).sqrt() + self.eps)
        self._first_moments, self._second_moments, self._steps = first, second, steps
        return torch.where(present, self.learning_rate * move, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return lists of plain numbers: both moments, and steps per entry."""
        return {
            "first_moments": self._first_moments.tolist(),
            "second_moments": self._second_moments.tolist(),
            "steps": self._steps.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any], owner: str) -> None:
        """Take over a saved state; it is checked as a whole first, so a refused one changes nothing.

        Args:
            state: of `state_dict`. owner: whose state this is, for the message.

        Raises:
            CheckpointError: a missing or misshapen entry, a number that is not finite, or a negative one.
        """
        columns = {}
        for field in ("first_moments", "second_moments", "steps"):
            columns[field] = column(state, field, len(self._steps), owner)
            if field != "first_moments" and bool((columns[field] < 0).any()):
                raise torn(state, field, len(self._steps), owner)
        self._first_moments, self._second_moments = columns["first_moments"], columns["second_moments"]
        self._steps = columns["steps"].to(torch.int64)


def column(state: Mapping[str, Any], field: str, size: int, owner: str) -> Tensor:
    """Return a saved list of finite numbers as float64 [size], or raise CheckpointError."""
    try:
        values = torch.as_tensor(state.get(field), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise torn(state, field, size, owner) from None
    if values.shape != (size,) or not bool(torch.isfinite(values).all()):
        raise torn(state, field, size, owner)
    return values


def torn(state: Mapping[str, Any], field: str, size: int, owner: str) -> CheckpointError:
    """Return the error for a field of no use."""
    return CheckpointError(
        f"{owner}, {field}: the saved state has {state.get(field)!r}, allowed are {size} finite numbers, moments of "
        "squares and steps 0 or more; the checkpoint is torn or edited"
    )
