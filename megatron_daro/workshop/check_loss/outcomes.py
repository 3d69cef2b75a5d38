"""The outcome of a case, which is gradients and traces or an error, and how far the gradients of two cases differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SAME = 1e-4
_BROKEN_COLLECTIVE = ("Timed out waiting", "Connection closed by peer", "timed out after", "Connection reset by peer")
"""Parts of gloo's messages on a rank whose neighbours do not join a collective, or are gone."""


@dataclass(slots=True, eq=False)
class Trace:
    """One micro-batch on one rank of the last stage: what the loss does to each of its positions.

    data, context, tensor: ranks. micro_batch: its number. samples_T, positions_T: int64, sample and place in its
    response, -1 for padding. mask_T: bool. coefficients_T: float64, the derivative of the scheduled loss by each
    log-prob. old_T, advantages_T: float64, of the samples. returned: the number of tokens that the function returned,
    if any. types: floating types shorter than float64 in which it computed.
    """

    data: int
    context: int
    tensor: int
    micro_batch: int
    samples_T: Tensor
    positions_T: Tensor
    mask_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    coefficients_T: Tensor
    returned: float | None = None
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a case gave: the gradient of each parameter (float64, whole) and the traces of all ranks, or the error of
    the first rank that failed. lost: the rank could not report an error: it never answered, or its process ended."""

    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    error: str = ""
    lost: bool = False

    @property
    def hung(self) -> bool:
        """Whether ranks waited for each other, or one of them ended."""
        return self.lost or any(words in self.error for words in _BROKEN_COLLECTIVE)

    @property
    def types(self) -> str:
        """Types shorter than float64 in which the loss computed, in words."""
        return " and ".join(sorted({name for trace in self.traces for name in trace.types}))


def difference(outcome: Outcome, wanted: Outcome) -> float:
    """Return the largest difference of any gradient, relative to that parameter's largest reference gradient; inf if
    only one of the two failed, 0 if both did."""
    if outcome.error or wanted.error:
        return 0.0 if outcome.error and wanted.error else math.inf
    worst = 0.0
    for name, want in wanted.gradients.items():
        gap = float((outcome.gradients[name] - want).abs().max())
        size = float(want.abs().max())
        worst = max(worst, math.inf if math.isnan(gap) else gap / size if size else gap)
    return worst


def constant_ratio(gradients: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float | None:
    """Return the factor between two gradients; None if they differ by more than a factor."""
    got = torch.cat([gradients[name].flatten() for name in wanted])
    want = torch.cat([tensor.flatten() for tensor in wanted.values()])
    if not bool(torch.isfinite(got).all()) or not float(want.norm()):
        return None
    ratio = float(got @ want / (want @ want))
    return ratio if float((got - ratio * want).norm()) < _SAME * float(got.norm()) else None
