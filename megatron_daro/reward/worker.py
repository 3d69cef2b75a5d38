"""The program of a verifier worker: what it answers, and with which verifier.

RewardPool -> (this) -> a verdict in words. Limits and protocol are those of every worker (worker_pool/child.py).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megatron_daro.errors import RewardError
from megatron_daro.reward.base import Job, ScreenLimits, VerifierSpec
from megatron_daro.reward.factory import Judge, OwnVerifier, verifier_of
from megatron_daro.worker_pool.child import REFUSED, Answer, main

# One of each grammar form: the parser builds its tables on first use, 20 to 100 ms per form.
_WARM_UP = (
    r"\frac{1}{2}+\sqrt{3}",
    r"(x+1)^{2}-\cos (2 t)",
    "(1,2)",
    "[2,5)",
    r"2 \leq x < 5",
    r"y=2x+3",
    r"\{1,-2\}",
    r"90^{\circ}",
    r"3 \times 10^{-5}",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"(-\infty,0) \cup (3,\infty)",
    r"\frac{\pi}{2} e^{-2 t}",
    r"\log _{2} n",
    r"10 \%",
    r"5 \text{ cm}",
)
# The modules that sympy loads at its first simplification, solution and set comparison must not cost an answer's time.
_WARM_UP_PAIRS = (("x^2+2x+1", "(x+1)^2"), ("[2,5]", r"2 \leq x \leq 5"), ("y=2x+3", "2x-y+3=0"))


def spec_from(fields: dict[str, Any]) -> VerifierSpec:
    """Return the spec from its JSON form."""
    return VerifierSpec(**{**fields, "limits": ScreenLimits(**fields["limits"])})


def _answer(verifier: Judge, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply. Outcomes are words, from which the pool makes the rewards; a user's verifier gives its own."""
    if request["kind"] == "gold":
        return {"reason": verifier.gold_problem(request["gold"]) or "usable"}
    verdict = verifier.judge(Job(request["answer"], request["gold"], request["statement"]))
    reply = {"correct": verdict.correct, "reason": verdict.reason}
    return reply | {"reward": verdict.reward} if isinstance(verifier, OwnVerifier) else reply


def answer(verifier: Judge, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request; what a verifier raises becomes a word."""
    try:
        return _answer(verifier, request)
    except MemoryError:
        raise
    except RecursionError:
        return {"correct": False, "reason": "too_complex"}
    except RewardError as error:  # the class is wrong, not the answer
        return {"reason": REFUSED, "error": str(error)}
    except Exception:  # The border of the process: a fault of the verifier costs one verdict, counted by the pool.
        return {"correct": False, "reason": "verifier_failed"}


def load(settings: dict[str, Any]) -> Answer:
    """Make the verifier of a spec. Raises RewardError, ConfigError: a user's class does not fit, or cannot be made."""
    verifier = verifier_of(spec_from(settings))
    assert isinstance(verifier, Judge), "the pool starts workers for these only"
    if isinstance(verifier, OwnVerifier):
        verifier.load()
    if settings["name"] == "math":
        from megatron_daro.reward.symbolic import equal, parsed

        for form in _WARM_UP:
            parsed(form)
        for left, right in _WARM_UP_PAIRS:
            equal(left, right)
    return partial(answer, verifier)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], load))
