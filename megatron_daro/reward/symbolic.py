"""Equality of two leaves by math-verify, with the gold always wrapped in `\\boxed{}` and always first.

Pairs of canonical texts -> outcome. A run uses it in worker processes only: time and memory are bounded there, not here
(math-verify's own time-outs use signals and are switched off). Refuses what the algebra system would wrongly accept:
floats that agree only because both are tiny.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Literal

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import (
    Abs,
    Basic,
    Derivative,
    Expr,
    Float,
    Function,
    I,
    Integral,
    Limit,
    MatrixBase,
    Pow,
    Product,
    Rational,
    Sum,
    Symbol,
    arg,
    ceiling,
    exp,
    floor,
    log,
    nan,
    sign,
    zoo,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.functions.combinatorial.factorials import CombinatorialFunction
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction
from sympy.logic.boolalg import BooleanAtom

from megatron_daro.reward.normal_form import chain, key

Outcome = Literal["match", "no_match", "gold_unparsed", "answer_unparsed", "compare_failed", "too_complex"]

RELATIVE_TOLERANCE = 1e-5
_CACHE_ENTRIES = 4096
# Wider than any rounding math-verify accepts (6 decimals, or the relative tolerance above).
_SURE_DIFFERENCE = 1e-3
# math-verify compares decimals with this many digits, and within sets takes what is smaller than _ROUNDED_AWAY for 0.
_DIGITS_OF_DECIMALS = 15
_ROUNDED_AWAY = 1e-6
_FEWEST_DIGITS = 100
# More digits take longer than a verdict may.
_MOST_DIGITS = 100_000
_FEWEST_BITS = 10
# sin(tan x) and tan(sin x) differ by x^7 only: both sides, two functions deep.
_TERMS = 3
_PERIODIC = (TrigonometricFunction, InverseTrigonometricFunction, log, Abs, arg, sign, floor, ceiling)
_LETTERS = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_TEXT = re.compile(r"\\(?:text|mbox|textrm|textbf)\s*\{[^{}]*\}")
_MARKED = re.compile(
    r"\^\s*\{?\s*(?:T|\\top|\\intercal|\\dagger|\\prime|\\(?:mathrm|mathsf|text)\s*\{\s*T\s*\})(?![a-zA-Z])|'"
)
_NO_VALUE = (AppliedUndef, Derivative, Integral, Limit)
# units=False: else math-verify takes the m of 6m for metres and drops it. Units that are text are cut before.
_NORMALISATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION)]

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class _TooManyDigitsError(Exception):
    """Two values are too large or too close to be told apart."""


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
    return _with_imaginary_unit(expressions[0]) if expressions else None


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
        same = _same_number(gold_value, answer_value)
        if same is None:
            same = _verified(gold_value, answer_value)
        if same and _differ_as_floats(gold_value, answer_value):
            same = False
    except MemoryError:
        raise
    except _TooManyDigitsError:
        return "too_complex"
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
    """Evaluate the side opposite a lone symbol, which math-verify compares by name only: x + 0 and 1.0 x are x."""
    if isinstance(gold, Symbol) and isinstance(answer, Expr):
        return gold, gold if (answer.doit() - gold) == 0 else answer.doit()
    if isinstance(answer, Symbol) and isinstance(gold, Expr):
        return answer if (gold.doit() - answer) == 0 else gold.doit(), answer
    return gold, answer


def _verified(gold: Basic, answer: Basic) -> bool:
    """Ask math-verify, which ignores differences below its precision.

    So exact values get enough digits to decide, and small decimals in a set, a relation or a matrix are taken as the
    exact values that they write.
    """
    decimals = gold.atoms(Float) | answer.atoms(Float)
    small = any(0 < abs(decimal) < _ROUNDED_AWAY for decimal in decimals)
    if small and not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        exact = {decimal: Rational(str(decimal)) for decimal in decimals}
        gold, answer, decimals = gold.xreplace(exact), answer.xreplace(exact), set()
    digits = _DIGITS_OF_DECIMALS if decimals else _digits_of(*map(_summed, (gold, answer)))
    return verify(
        gold,
        answer,
        numeric_precision=digits,
        allow_set_relation_comp=True,
        timeout_seconds=None,
        raise_on_error=True,
    )


def _summed(value: Basic) -> Basic:
    """Return a value with its sums, products and factorials worked out, since their contribution may be tiny."""
    return value.doit() if value.has(Sum, Product, CombinatorialFunction) and not value.has(*_NO_VALUE) else value


def _with_imaginary_unit(value: Basic) -> Basic:
    """Put the imaginary unit where the grammar has a symbol i that is not an index (as in a sum over i).

    If a text has an i, the grammar takes none of its symbols for real, even if i is only an index.
    """
    free_i = next((symbol for symbol in value.free_symbols if symbol.name == "i"), None)
    if free_i is not None and not value.has(ExprWithLimits):
        others = {symbol: Symbol(symbol.name) for symbol in value.atoms(Symbol) - {free_i}}
        try:
            return value.xreplace({**others, free_i: I})
        except AttributeError:  # a chain of equations that becomes a single one (latex2sympy2_extended/logic.py, `And`)
            return value
    unreal = {symbol: Symbol(symbol.name, real=True) for symbol in value.atoms(Symbol) if symbol.is_real is False}
    return value.xreplace(unreal) if unreal else value


def _same_number(gold: Expr, answer: Expr) -> bool | None:
    """Whether two exact numbers are equal: rational ones exactly, others with so many digits that nothing in them is
    rounded away.

    None if one is no exact number or has no value. Raises _TooManyDigitsError.
    """
    for value in (gold, answer):
        if not isinstance(value, Expr) or value.free_symbols or value.has(Float, *_NO_VALUE):
            return None
    difference = gold.doit() - answer.doit()
    if difference.is_Rational:
        return bool(difference == 0)
    digits = _digits_of(difference)
    for some in (min(digits, _FEWEST_DIGITS), digits):
        value = difference.evalf(some)
        if not value.is_number or value.has(nan, zoo, Function):
            return None
        # evalf leaves one bit of precision to what is only a rounding error.
        if any(part != 0 and part._prec > _FEWEST_BITS for part in value.atoms(Float)):
            return False
    return True


def _digits_of(*values: Basic) -> int:
    """Return how many digits tell two values apart, whatever in them is tiny, huge or close to a limit.

    Raises _TooManyDigitsError.
    """
    digits = _FEWEST_DIGITS + 2 * sum(map(_size, values))
    if digits > _MOST_DIGITS:
        raise _TooManyDigitsError
    return int(digits)


def _size(value: Basic | MatrixBase) -> float:
    """Return a generous bound on |log10| of every number that can be built of a value's parts: of itself, of its
    distance from a limit (`\\tanh 100` from 1), and of the first terms of a series around it (`\\sin x` around x)."""
    if isinstance(value, MatrixBase):
        return sum(map(_size, value.flat()))
    if isinstance(value, Rational):
        return math.log10(2) * (value.p.bit_length() + value.q.bit_length())
    if not value.args:
        return 0.0 if isinstance(value, Symbol) else 1.0
    if isinstance(value, Pow):
        return _size(value.exp) + max(1.0, _magnitude(value.exp)) * (1.0 + _size(value.base))
    parts = sum(map(_size, value.args))
    if isinstance(value, _PERIODIC):
        return _TERMS * parts
    if isinstance(value, (Function, ExprWithLimits)):
        bounds = value.args if isinstance(value, Function) else [b for limit in value.limits for b in limit[1:]]
        grown = [_magnitude(bound) for bound in bounds]
        powers = 1 if isinstance(value, (HyperbolicFunction, exp)) else 2
        return _TERMS * parts + sum(size**powers for size in grown)
    return parts


def _magnitude(value: Basic) -> float:
    """Return the absolute value of a number, 0 for what is none or infinite. Raises _TooManyDigitsError."""
    if value.free_symbols or not isinstance(value, Expr) or value.is_infinite:
        return 0.0
    size = _size(value)
    if size > _MOST_DIGITS:
        raise _TooManyDigitsError
    found = abs(value.evalf(15, maxn=int(size) + _FEWEST_DIGITS))
    if found > _MOST_DIGITS:
        raise _TooManyDigitsError
    return float(found) if found.is_Float or found.is_Rational else 0.0


def _surely_differ(gold: Basic, answer: Basic) -> bool:
    """Whether two expressions have clearly different values at one point; saves the search for a proof of equality.

    Only a difference is concluded. False when a value is not finite or the objects are not plain expressions
    (relations, sets, lone symbols and undefined functions follow rules of their own in math-verify).
    """
    if not all(isinstance(value, Expr) and not isinstance(value, Symbol) for value in (gold, answer)):
        return False
    return _apart(gold, answer, _SURE_DIFFERENCE)


def _differ_as_floats(gold: Basic, answer: Basic) -> bool:
    """Whether two expressions, one with a decimal, are too far apart relative to their size.

    math-verify rounds to 6 decimals: 0.0000672 equals 0.0000674 there.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or not (gold.has(Float) or answer.has(Float)):
        return False
    return _apart(gold, answer, RELATIVE_TOLERANCE)


def _apart(gold: Expr, answer: Expr, tolerance: float) -> bool:
    """Whether two values at one point differ by more than `tolerance`, relative to the larger. Sizes never
    underflow."""
    if gold.has(*_NO_VALUE) or answer.has(*_NO_VALUE):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Float(0.7 + 0.137 * (i + 1) ** 0.5, 15) for i, symbol in enumerate(symbols)}
    try:
        of_gold, of_answer = (value.evalf(15, subs=point) for value in (gold, answer))
        apart, size = abs(of_gold - of_answer), max(abs(of_gold), abs(of_answer))
        return bool(size.is_finite and apart > tolerance * size)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
