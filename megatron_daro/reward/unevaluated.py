"""Answers that only restate the problem: operators nobody evaluated, expressions copied from the statement.

Place in the data flow: extracted answer, gold, statement -> (this) -> refusal or nothing, before any comparison. An
algebra system would do the missing work: the sum of k from 1 to 100 equals 5050, whoever evaluates it. Pure text,
linear. Refuses nothing that the gold itself contains.
"""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_daro.reward.normal_form import canonical, number, words
from megatron_daro.reward.relations import chain, is_name

# Families: a gold with one member allows the others.
_OPERATORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\sum(?![a-zA-Z])|\u2211",
        r"\\prod(?![a-zA-Z])|\u220f",
        r"\\(?:i{0,3}|o|id)int(?![a-zA-Z])|[\u222b-\u222e]",
        r"\\(?:lim|limsup|liminf|varlimsup|varliminf|overline\s*\{\s*\\lim|underline\s*\{\s*\\lim)(?![a-zA-Z])",
        r"\\(?:max|min|sup|inf|argmax|argmin)(?![a-zA-Z])",
        r"(?<![a-zA-Z])\\?(?:gcd|lcm|hcf|gcf)(?![a-zA-Z])",
        r"\\det(?![a-zA-Z])|vmatrix|\\(?:rank|tr|dim|ker|deg)(?![a-zA-Z])",
        r"\\(?:p|b)?mod(?![a-zA-Z])",
        r"\\frac\s*\{?\s*(?:d|\\partial)\s*(?:\^\s*\{?\d\}?\s*)?\}?\s*\{\s*(?:d|\\partial)",
        r"\\(?:[lr]?floor|[lr]?ceil)(?![a-zA-Z])|[\u2308-\u230b]",
    )
)
# Only where the gold is one value: n(n-1)/2 may be written as a binomial, \sinh x in exponentials.
_OPERATORS_OF_VALUES = (
    re.compile(r"\\[dt]?(?:binom|choose|nCr)(?![a-zA-Z])|!"),
    re.compile(
        r"\\?(?<![a-zA-Z])(?:arc|a)?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|lg)(?![a-zA-Z])"
        r"|\\(?:Re|Im|arg)(?![a-zA-Z])"
    ),
)
_NAME_WRAPPER = re.compile(r"\\(?:operatorname|mathop)\*?\s*\{\s*([a-zA-Z]+)\s*\}")
_COMMAND = re.compile(r"\\(?!pi(?![a-zA-Z]))[a-zA-Z]+")
_SPAN = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_SIDES = re.compile(r"=|<|>|,|;|\\(?:leq?|geq?|lt|gt|neq?|approx|equiv)(?![a-zA-Z])")
_ORDER = re.compile(r"<|>|\\(?:leq?|geq?|lt|gt)(?![a-zA-Z])")
_MAX_STATEMENT = 20_000


def unevaluated(answer: str, gold: str) -> bool:
    """Whether a canonical answer holds an operator that the canonical gold does not.

    Sums, products, integrals, limits, derivatives, extrema, gcd and lcm, determinants, remainders, floors always;
    binomials, factorials, logarithms and trigonometric functions where the gold is one exact value without them. Of
    `S = 5050` only what stands behind the last sign counts.
    """
    if _unsolved(answer, gold):
        return True
    value = answer if "=" in gold else chain(answer)[-1]
    answer, gold = _plain_names(value), _plain_names(gold)
    if any(operator.search(answer) and not operator.search(gold) for operator in _OPERATORS):
        return True
    if "." in gold or re.search(r"[a-zA-Z]", _COMMAND.sub("", gold).replace("\\pi", "")):
        return False
    return any(operator.search(answer) and not operator.search(gold) for operator in _OPERATORS_OF_VALUES)


def _unsolved(answer: str, gold: str) -> bool:
    """Whether the answer is an inequality, or an equation for one number, that the gold has solved for a symbol."""
    if _ORDER.search(answer):
        return not any(map(is_name, _ORDER.split(answer))) and ("(" in gold or "[" in gold or _solved(_ORDER, gold))
    wanted, sides = chain(gold), chain(answer)
    of_number = len(wanted) == 2 and is_name(wanted[0]) and number(wanted[1]) is not None
    return of_number and len(sides) > 1 and not any(map(is_name, sides))


def _solved(relation: re.Pattern[str], text: str) -> bool:
    return relation.search(text) is not None and any(map(is_name, relation.split(text)))


def restates(answer: str, statement: str) -> bool:
    """Whether a canonical answer is an expression of the statement: a whole formula, or a side of one.

    Never for a plain number, a word, a choice letter or a lone symbol: those stand in statements by right.
    """
    if number(answer) is not None or words(answer) is not None or len(_flat(answer)) < 3:
        return False
    return _flat(answer) in _expressions(statement[:_MAX_STATEMENT])


@lru_cache(maxsize=256)
def _expressions(statement: str) -> frozenset[str]:
    found: set[str] = set()
    for match in _SPAN.finditer(statement):
        formula = canonical(next(group for group in match.groups() if group is not None))
        sides = _SIDES.split(formula)
        found |= {_flat(part) for part in (formula, *sides)}
    return frozenset(found)


def _flat(text: str) -> str:
    return re.sub(r"[\s{}]", "", text).rstrip(".,;")


def _plain_names(text: str) -> str:
    """`\\operatorname{gcd}` is `\\gcd`."""
    return _NAME_WRAPPER.sub(lambda m: f"\\{m.group(1)} ", text)
