"""Makes verifiers by name.

Spec -> (this) -> verifier. The one file of this package that knows all verifiers; it loads no
algebra system. Refuses unknown names (VerifierSpec does).
"""

from __future__ import annotations

from megatron_daro.reward.base import ScreenLimits, Verifier, VerifierSpec
from megatron_daro.reward.extraction import ExactVerifier, IntegerVerifier
from megatron_daro.reward.math import MathVerifier
from megatron_daro.reward.own import OwnVerifier

AnyVerifier = MathVerifier | IntegerVerifier | ExactVerifier | OwnVerifier
_CLASSES: dict[str, type[AnyVerifier]] = {"math": MathVerifier, "integer": IntegerVerifier, "exact": ExactVerifier}


def build_verifier(
    name: str,
    *,
    strict: bool = True,
    correct_reward: float = 1.0,
    incorrect_reward: float = 0.0,
    marker: str = "####",
    limits: ScreenLimits | None = None,
) -> Verifier:
    """Return the verifier of that name.

    Args:
        name: `math`, `integer`, `exact`, or module:Class of a user's own without options.
        strict: accept only the agreed answer form.
        correct_reward, incorrect_reward: what the verdicts carry.
        marker: text before the answer, used by `exact` only.
        limits: what is refused unparsed, used by `math` only; None for the defaults.

    Returns: an object with `verify(answer_text, gold) -> Verdict`. `math` is unbounded in time when called directly
    on hostile text that passes the screen: use RewardPool for model answers.
    Raises: RewardError for an unknown name or an empty marker.
    """
    spec = VerifierSpec(name, strict, correct_reward, incorrect_reward, marker, limits or ScreenLimits())
    return verifier_of(spec)


def verifier_of(spec: VerifierSpec) -> AnyVerifier:
    """Return the verifier a spec describes."""
    return OwnVerifier(spec) if spec.is_own else _CLASSES[spec.name](spec)
