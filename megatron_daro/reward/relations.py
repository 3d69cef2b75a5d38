"""Answers written as equations and inequalities: chains, named values, alternatives.

Place in the data flow: canonical text -> (this) -> comparison by shape. Pure text, linear. What is
not of one of these forms is left as it is.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"\\?[A-Za-z]+(?:\s*_\s*(?:\{[^{}]*\}|\w))?'?")
_VALUE = r"([^<>=,]+?)"
_LESS, _MORE = r"(<|\\(?:lt|leq?)(?![a-zA-Z]))", r"(>|\\(?:gt|geq?)(?![a-zA-Z]))"
_OR = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor|\\vee)\s*")
_BELOW = re.compile(rf"\s*{_NAME.pattern}\s*{_LESS}\s*{_VALUE}\s*")
_ABOVE = re.compile(rf"\s*{_NAME.pattern}\s*{_MORE}\s*{_VALUE}\s*")
_BETWEEN = re.compile(rf"\s*{_VALUE}\s*{_LESS}\s*{_NAME.pattern}\s*{_LESS}\s*{_VALUE}\s*")
_LT, _GT = "\\lt", "\\gt"
_SPLIT = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)


def chain(text: str) -> list[str]:
    """Return the parts between `=` signs that stand outside brackets; one part when there is none."""
    parts, depth, begin = [], 0, 0
    for match in _SPLIT.finditer(text):
        token = match.group()
        depth += token in "{([" or token in ("\\{", "\\begin")
        depth -= token in "})]" or token in ("\\}", "\\end")
        if token == "=" and depth <= 0:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def is_name(text: str) -> bool:
    """Whether a text is one symbol, with a subscript or without."""
    return _NAME.fullmatch(text.strip()) is not None


def assignments(parts: tuple[str, ...]) -> dict[str, str] | None:
    """name -> value of parts such as `x=2` and `y=12`; None unless each part has a name of its own."""
    found: dict[str, str] = {}
    for part in parts:
        sides = chain(part)
        if len(sides) != 2 or not is_name(sides[0]) or re.sub(r"[\s{}]", "", sides[0]) in found:
            return None
        found[re.sub(r"[\s{}]", "", sides[0])] = sides[1]
    return found if len(found) > 1 else None


def in_order(named: dict[str, str]) -> tuple[str, ...]:
    """Return the values as coordinates: letters in the order of the alphabet, other names as they stand."""
    letters = all(len(name) == 1 for name in named)
    return tuple(named[name] for name in (sorted(named) if letters else named))


def as_union(text: str) -> str | None:
    """`x<0 or x>3` as a union of intervals; None for anything else."""
    parts = _OR.split(text)
    intervals = [_interval(part) for part in parts]
    return " \\cup ".join(part for part in intervals if part) if len(parts) > 1 and all(intervals) else None


def _interval(text: str) -> str | None:
    between = _BETWEEN.fullmatch(text)
    if between:
        low, left, right, high = between.groups()
        return f"{'(' if left in ('<', _LT) else '['}{low},{high}{')' if right in ('<', _LT) else ']'}"
    below = _BELOW.fullmatch(text)
    if below:
        return f"(-\\infty,{below.group(2)}{')' if below.group(1) in ('<', _LT) else ']'}"
    above = _ABOVE.fullmatch(text)
    if above:
        return f"{'(' if above.group(1) in ('>', _GT) else '['}{above.group(2)},\\infty)"
    return None
