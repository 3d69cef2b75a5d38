"""KL to a reference policy, and its three estimators. Default coefficient 0: DAPO and Dr. GRPO drop it.

Place in the data flow: current and reference log-probs -> a KL term per token for the objective.
Refuses unknown estimators. Does not reduce.

Shapes: "..." is any common (broadcastable) shape.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_daro.algo.surrogate import MAX_LOG_RATIO
from megatron_daro.errors import AlgorithmError

KlEstimator = Literal["k1", "k2", "k3"]


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) per sampled token.

    With d = logprobs - ref_logprobs: k1 is d (unbiased; as a loss its expected gradient is zero), k2 is d^2/2 (its
    gradient is that of the KL), k3 is exp(-d) - 1 + d (unbiased and never negative). Where -d is above 20, k3 goes on
    along its tangent: the slope stays at 1 - exp(20), which still pulls towards the reference and is finite.

    Args:
        logprobs: of the tokens sampled from the policy, natural log; gradient flows.
        ref_logprobs: under the reference; no gradient flows.
        estimator: "k1", "k2" or "k3".

    Returns:
        Terms, common shape.

    Raises:
        AlgorithmError: unknown estimator.

    Source: J. Schulman, "Approximating KL divergence" (2020); GRPO arXiv 2402.03300 eq. 4 uses k3.
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits: near d = 0 the three terms cancel to d^2/2.
        exponent = -difference
        tangent = torch.where(exponent > MAX_LOG_RATIO, (exponent - MAX_LOG_RATIO) * math.exp(MAX_LOG_RATIO), 0)
        return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + tangent + difference
    raise AlgorithmError(f"estimator: got {estimator!r}, allowed are {', '.join(get_args(KlEstimator))}")
