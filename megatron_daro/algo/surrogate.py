"""The clipped surrogate: the loss of one token.

The actor's log-probs of the sampled tokens -> token losses -> weighted sums. The algorithm's coefficients weight the
sums (algorithm.py).

Shapes: "..." is any common (broadcastable) shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError

# exp(20) = 4.9e8. Far beyond, at exp(44), the square of a ratio overflows in fp32, and at exp(88) the ratio itself;
# then 0 * inf is NaN in the backward pass.
MAX_LOG_RATIO = 20.0


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), with the difference limited to +-20 so that value and gradient are finite.

    Beyond the limit the ratio is constant, so such a token has no gradient, even where A < 0 and the unlimited loss
    would have one. A ratio of 4.9e8 means that the two log-probs are not from neighbouring policies, and its gradient
    would outweigh every other token of the step.

    Args:
        logprobs, old_logprobs: natural logarithms, any broadcastable shapes.

    Returns:
        The ratio, common shape; gradient flows into whatever requires it.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_ratio_loss(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """Return -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), but at most dual_clip * |A| where A < 0.

    Args:
        ratio: importance ratios, any shape.
        advantages: broadcastable to the ratio's shape.
        clip_low, clip_high: half-widths of the clip range below and above 1; 0 <= clip_low <= 1, clip_high >= 0.
        dual_clip: bound c > 1 on the loss of tokens with A < 0, in units of |A|; None: no bound.

    Returns:
        Losses, common shape.

    Raises:
        AlgorithmError: a clip range is out of bounds.

    Source: PPO arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729; the asymmetric range DAPO arXiv 2503.14476.
    """
    check_clip_range(clip_low, clip_high, dual_clip)
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def clipped_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the clipped surrogate loss of every token, to be minimised.

    The loss is homogeneous of degree one in the advantages. No gradient flows into `old_logprobs` or `advantages`.

    Args:
        logprobs: log-probs of the sampled tokens under the current policy (natural log), any shape.
        old_logprobs: their log-probs in the denominator of the ratio; broadcastable.
        advantages: broadcastable, for example [N, 1] against [N, S].
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: see `clipped_ratio_loss`.
        mask: broadcastable, true (or 1) where the token is trained. Elsewhere loss and gradient are 0, even if the
            inputs are NaN.

    Returns:
        Token losses, common shape.

    Raises:
        AlgorithmError: a clip range is out of bounds.

    Source: PPO arXiv 1707.06347 with the asymmetric range of DAPO arXiv 2503.14476.
    """
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()
    if mask is not None:
        kept = mask.bool()
        # Select the inputs, not the outputs: 0 * NaN would still be NaN in the gradient.
        logprobs, old_logprobs, advantages = (torch.where(kept, x, 0) for x in (logprobs, old_logprobs, advantages))
    return clipped_ratio_loss(importance_ratio(logprobs, old_logprobs), advantages, clip_low, clip_high, dual_clip)


def clip_fractions(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> dict[str, Tensor]:
    """Return masks of the tokens whose gradient clipping removed; their sum over the token count is the fraction.

    A ratio above the range with A < 0 (or below it with A > 0) is not clipped: the minimum is the unclipped term.

    Args:
        ratio: importance ratios; advantages: broadcastable; the rest as in `clipped_ratio_loss`.

    Returns:
        "clip_high" (A > 0 and ratio > 1 + clip_high), "clip_low" (A < 0 and ratio < 1 - clip_low), "dual_clip"
        (A < 0 and ratio > dual_clip): boolean, common shape.
    """
    dual = torch.zeros_like(ratio * advantages, dtype=torch.bool)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
    return {
        "clip_high": (advantages > 0) & (ratio > 1 + clip_high),
        "clip_low": (advantages < 0) & (ratio < 1 - clip_low),
        "dual_clip": dual,
    }


def check_clip_range(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raise AlgorithmError if a clip option is out of range."""
    if not 0 <= clip_low <= 1:
        raise AlgorithmError(f"clip_low: got {clip_low}, allowed is 0 to 1 (the range starts at 1 - clip_low)")
    if not clip_high >= 0:
        raise AlgorithmError(f"clip_high: got {clip_high}, allowed is 0 or more (the range ends at 1 + clip_high)")
    if dual_clip is not None and not dual_clip > 1:
        raise AlgorithmError(f"dual_clip: got {dual_clip}, allowed is a number above 1, or None to switch it off")
