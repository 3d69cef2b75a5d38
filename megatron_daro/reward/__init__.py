"""Verifiers of answers and the pool of killable workers that runs them.

Place in the data flow: rollout text and gold -> Verdict. Importing this package imports neither sympy nor torch.
"""

from megatron_daro.reward.base import ScreenLimits, Verifier, VerifierSpec
from megatron_daro.reward.factory import build_verifier

__all__ = ["ScreenLimits", "Verifier", "VerifierSpec", "build_verifier"]
