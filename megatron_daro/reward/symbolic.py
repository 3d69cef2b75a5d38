"""Equality of two leaves by math-verify, with the gold always wrapped in `\\boxed{}` and always first.

Place in the data flow: pairs of canonical texts -> outcome. Runs inside a worker process only for model answers: time
and memory are bounded there, not here (math-verify's own time-outs use signals and are switched off).
Refuses what the algebra system would wrongly accept: floats that agree only because both are tiny.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Derivative, Expr, Float, Integral, Limit, Symbol
from sympy.core.function import AppliedUndef

Outcome = Literal["match", "no_match", "gold_unparsed", "answer_unparsed", "compare_failed"]

RELATIVE_TOLERANCE = 1e-5
_CACHE_ENTRIES = 4096
# Wider than any rounding math-verify accepts (6 decimals, or the relative tolerance above).
_SURE_DIFFERENCE = 1e-3
_NO_VALUE = (AppliedUndef, Derivative, Integral, Limit)
# units=False: math-verify takes the m of 6m for metres and drops it. Units are cut before, where they are text.
_NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION)]

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


@lru_cache(maxsize=_CACHE_ENTRIES)
def parsed(text: str) -> Any | None:
    """The sympy object of a canonical text; None when the grammar does not take it. Raises MemoryError only."""
    try:
        found = parse(
            f"\\boxed{{{text}}}",
            _EXTRACTION,
            fallback_mode="no_fallback",
            # The whole box or nothing: with "any_match" a box that does not parse is read as one fraction inside it.
            extraction_mode="first_match",
            parsing_timeout=None,  # type: ignore[arg-type]
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:
        return None
    return found[0] if found else None


def equal(gold: str, answer: str) -> Outcome:
    """Whether the answer means the same as the gold.

    Args:
        gold, answer: canonical texts; the order matters to math-verify (assignments follow the gold's form).

    Returns: `match`, `no_match`, or why no comparison was possible.
    """
    gold_value = parsed(gold)
    if gold_value is None:
        return "gold_unparsed"
    answer_value = parsed(answer)
    if answer_value is None:
        return "answer_unparsed"
    try:
        if _surely_differ(gold_value, answer_value):
            return "no_match"
        gold_value, answer_value = _symbol_pair(gold_value, answer_value)
        same = verify(gold_value, answer_value, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        if same and _differ_as_floats(gold_value, answer_value):
            same = False
    except MemoryError:
        raise
    except Exception:
        return "compare_failed"
    return "match" if same else "no_match"


def _symbol_pair(gold: Any, answer: Any) -> tuple[Any, Any]:
    """math-verify compares a lone symbol by name only: evaluate the other side first, so that x + 0 is x."""
    if isinstance(gold, Symbol) and isinstance(answer, Expr):
        return gold, answer.doit()
    if isinstance(answer, Symbol) and isinstance(gold, Expr):
        return gold.doit(), answer
    return gold, answer


def _surely_differ(gold: Any, answer: Any) -> bool:
    """Whether two expressions have clearly different values at one point; saves the search for a proof of equality.

    Only a difference is concluded. False when a value is not finite or the objects are not plain expressions
    (relations, sets, lone symbols and undefined functions follow rules of their own in math-verify).
    """
    if not all(isinstance(value, Expr) and not isinstance(value, Symbol) for value in (gold, answer)):
        return False
    if gold.has(*_NO_VALUE) or answer.has(*_NO_VALUE):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Float(0.7 + 0.137 * (i + 1) ** 0.5, 15) for i, symbol in enumerate(symbols)}
    try:
        gold_number, answer_number = (complex(value.evalf(15, subs=point)) for value in (gold, answer))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    size = max(abs(gold_number), abs(answer_number))
    return size < float("inf") and abs(gold_number - answer_number) > _SURE_DIFFERENCE * size


def _differ_as_floats(gold: Any, answer: Any) -> bool:
    """Whether two numbers, one a float, are too far apart relative to their size.

    math-verify rounds floats to 6 decimals: 0.0000672 equals 0.0000674 there.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if gold.free_symbols or answer.free_symbols or not (gold.has(Float) or answer.has(Float)):
        return False
    gold_number, answer_number = complex(gold.evalf(15)), complex(answer.evalf(15))
    return abs(gold_number - answer_number) > RELATIVE_TOLERANCE * max(abs(gold_number), abs(answer_number))
