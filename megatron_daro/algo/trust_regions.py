"""Trust regions beside PPO's clip: CISPO's clipped weight and SAPO's soft gate.

Place in the data flow: importance ratios and advantages -> token losses, in the place of
`surrogate.clipped_ratio_loss`. (GSPO is that clip with a sequence's ratio: `corrections.sequence_log_ratio`.)
Their values are shifted so that at ratio 1 the loss is -A, as PPO's; gradients are the papers'. So sums of token losses
mean the same under every trust region.

Shapes: "..." is any common (broadcastable) shape.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError

TrustRegion = Literal["clip", "gspo", "cispo", "sapo"]


def cispo_loss(ratio: Tensor, advantages: Tensor, clip_high: float = 0.28) -> Tensor:
    """Return -sg(min(ratio, 1 + clip_high)) A log pi, shifted: no token loses its gradient, its weight is bounded.

    Args:
        ratio: importance ratios with gradient, any shape. advantages: broadcastable.
        clip_high: 0 or more. Below nothing is clipped: the paper sets that bound so low that it is none.

    Returns:
        Losses, common shape: value -min(ratio, 1 + clip_high) A, gradient that value's weight times d log pi.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    weight = ratio.detach().clamp(max=1 + clip_high)
    # ratio / sg(ratio) is 1 with the gradient of log pi.
    return -weight * advantages * (ratio / ratio.detach())


def sapo_loss(ratio: Tensor, advantages: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """Return -A (1 + 4/tau (sigmoid(tau (ratio - 1)) - 1/2)), with tau by the sign of A.

    Its slope by the ratio is -A at ratio 1 and falls smoothly to both sides, faster for a larger tau.

    Args:
        ratio: importance ratios, any shape. advantages: broadcastable.
        positive, negative: tau for A > 0 and for the rest, both above 0.

    Returns:
        Losses, common shape.

    Source: SAPO, arXiv 2511.20347.
    """
    # Tensors of the ratio's type, made on its device: numbers alone would be fp32.
    temperature = torch.where(advantages > 0, torch.full_like(ratio, positive), torch.full_like(ratio, negative))
    gate = 4 / temperature * (torch.sigmoid(temperature * (ratio - 1)) - 0.5)
    return -advantages * (1 + gate)


def check_temperatures(positive: float, negative: float) -> None:
    """Raise AlgorithmError if a temperature of SAPO has no meaning."""
    for name, value in (("sapo_positive", positive), ("sapo_negative", negative)):
        if not 0 < value < float("inf"):
            raise AlgorithmError(f"{name}: got {value}, allowed is a number above 0")
