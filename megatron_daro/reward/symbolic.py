"""Equality of two leaves by math-verify, with the gold always wrapped in `\\boxed{}` and always first.

Pairs of canonical texts -> outcome. Runs inside a worker process only for model answers: time
and memory are bounded there, not here (math-verify's own time-outs use signals and are switched off).
Refuses what the algebra system would wrongly accept: floats that agree only because both are tiny.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Literal

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Basic, Derivative, Expr, Float, Integral, Limit, Symbol
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

from megatron_daro.reward.normal_form import chain, key

Outcome = Literal["match", "no_match", "gold_unparsed", "answer_unparsed", "compare_failed"]

RELATIVE_TOLERANCE = 1e-5
_CACHE_ENTRIES = 4096
# Wider than any rounding math-verify accepts (6 decimals, or the relative tolerance above).
_SURE_DIFFERENCE = 1e-3
_LETTERS = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_TEXT = re.compile(r"\\(?:text|mbox|textrm|textbf)\s*\{[^{}]*\}")
_MARKED = re.compile(
    r"\^\s*\{?\s*(?:T|\\top|\\intercal|\\dagger|\\prime|\\(?:mathrm|mathsf|text)\s*\{\s*T\s*\})(?![a-zA-Z])|'"
)
_NO_VALUE = (AppliedUndef, Derivative, Integral, Limit)
# units=False: math-verify takes the m of 6m for metres and drops it. Units are cut before, where they are text.
_NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION)]

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


@lru_cache(maxsize=_CACHE_ENTRIES)
def parsed(text: str) -> Basic | None:
    """Return the sympy object of a canonical text; None when the grammar does not take it. Raises MemoryError only."""
    try:
        expressions = parse(
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
    return expressions[0] if expressions else None


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
    if _other_symbols(gold, answer):
        return "no_match"
    try:
        if _says_nothing(gold_value) or _says_nothing(answer_value):
            return "match" if [key(side) for side in chain(gold)[::-1]] == list(map(key, chain(answer))) else "no_match"
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


def _other_symbols(gold: str, answer: str) -> bool:
    """Whether a letter stands in one case in the gold and in the other case in the answer, or only one of them has a
    transposition or a prime.

    The grammar makes all symbols lower-case and drops such marks.
    """
    if bool(_MARKED.search(gold)) != bool(_MARKED.search(answer)):
        return True
    of_gold, of_answer = (set(_LETTERS.findall(_TEXT.sub("", text))) for text in (gold, answer))
    missing = of_gold - of_answer
    return any(_other_case(letter) in of_answer - of_gold for letter in missing)


def _other_case(letter: str) -> str:
    return f"\\{letter[1:2].swapcase()}{letter[2:]}" if letter.startswith("\\") else letter.swapcase()


def _says_nothing(value: Basic) -> bool:
    """Whether an equation or inequality holds, or fails, whatever its symbols are: `0=0`, `ab=ba`."""
    if isinstance(value, Relational):
        value = value.func(*value.args)
    return isinstance(value, BooleanAtom)


def _symbol_pair(gold: Basic, answer: Basic) -> tuple[Basic, Basic]:
    """math-verify compares a lone symbol by name only: evaluate the other side first, so that x + 0 is x."""
    if isinstance(gold, Symbol) and isinstance(answer, Expr):
        return gold, answer.doit()
    if isinstance(answer, Symbol) and isinstance(gold, Expr):
        return gold.doit(), answer
    return gold, answer


def _surely_differ(gold: Basic, answer: Basic) -> bool:
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


def _differ_as_floats(gold: Basic, answer: Basic) -> bool:
    """Whether two numbers, one a float, are too far apart relative to their size.

    math-verify rounds floats to 6 decimals: 0.0000672 equals 0.0000674 there.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if gold.free_symbols or answer.free_symbols or not (gold.has(Float) or answer.has(Float)):
        return False
    gold_number, answer_number = complex(gold.evalf(15)), complex(answer.evalf(15))
    return abs(gold_number - answer_number) > RELATIVE_TOLERANCE * max(abs(gold_number), abs(answer_number))
