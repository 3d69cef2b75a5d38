"""The cheap pre-filter: refuses answers that would keep a computer algebra system busy for minutes.

Runs in the calling process, linear in the text, and parses nothing. It only saves time; the guard is the hard limits of
the worker. The outer shape of an answer (tuple, interval, set, list, column vector, or a leaf) is split here too,
because brackets carry meaning that the algebra system drops: (6,5) is not [6,5], and (1,3) is not 1,3.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from megatron_daro.reward.base import ScreenLimits

Kind = Literal["leaf", "round", "square", "half_right", "half_left", "set", "list", "column", "row"]

_OPENERS = {"(": "(", "[": "[", "\\{": "{", "\\langle": "<"}
_CLOSERS = {")": ")", "]": "]", "\\}": "}", "\\rangle": ">"}
_KINDS: dict[str, Kind] = {
    "()": "round",
    "<>": "round",
    "[]": "square",
    "(]": "half_right",
    "[)": "half_left",
    "{}": "set",
}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_SEPARATOR_WORDS = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*"
)
_MATRIX = re.compile(r"\\begin\{([pbv]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_NAMED = re.compile(r"(?P<name>[^=<>]*?[A-Za-z}')][^=<>]*?)\s*(?:=|\\in(?![a-zA-Z]))\s*(?P<value>[(\[\\].*)", re.DOTALL)
_REGION = re.compile(
    r"[<>]|\\(?:l|g)(?:e|eq|t)(?![a-zA-Z])|\\(?:in|cup|cap|setminus|backslash|neq?|mathbb)(?![a-zA-Z])"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Text with its outer shape. items: the parts, empty for a leaf."""

    kind: Kind
    text: str
    items: tuple[str, ...] = ()


def shape_of(text: str) -> Shape:
    """Return the outer shape of a canonical text. Parts are canonical text too and may have a shape of their own."""
    text = _unwrap(text.strip())
    matrix = _MATRIX.fullmatch(text)
    if matrix and matrix.group(1) != "v":
        return _matrix_shape(text, matrix.group(2))
    enclosed = _enclosed(text)
    if enclosed is not None:
        kind, inner = enclosed
        parts = _split(inner)
        if len(parts) > 1 or (kind == "set" and inner.strip()):
            return Shape(kind, text, _expand_signs(parts) if kind == "set" else tuple(parts))
        return shape_of(inner) if kind == "round" and inner.strip() else Shape("leaf", text)
    parts = _split(_SEPARATOR_WORDS.sub(",", text))
    parts = [part for part in parts if part]
    expanded = _expand_signs(parts)
    return Shape("list", text, expanded) if len(expanded) > 1 else Shape("leaf", text)


def is_region(text: str) -> bool:
    """Whether a text may describe a set of numbers in terms of order or set algebra, as `2 \\leq x \\leq 5`."""
    return _REGION.search(text) is not None


def named_value(text: str) -> tuple[str, str] | None:
    """Return (name, value) of `S = \\{...\\}`, `x \\in [..]`, `(x, y) = (1, 2)`; None for anything else."""
    match = _NAMED.fullmatch(text)
    if match is None or _enclosed(match.group("value").strip()) is None:
        return None
    return match.group("name").strip(), match.group("value").strip()


def _unwrap(text: str) -> str:
    """Drop braces that only group the whole text."""
    while text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closing(text: str, start: int) -> int | None:
    depth = 0
    for match in _TOKEN.finditer(text, start):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:
            return match.start()
    return None


def _enclosed(text: str) -> tuple[Kind, str] | None:
    """Return kind and content if one pair of brackets encloses the whole text, else None."""
    first = _TOKEN.match(text)
    if first is None or first.group() not in _OPENERS:
        return None
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += token in _OPENERS or token == "{"
        depth -= token in _CLOSERS or token == "}"
        if depth == 0:
            if match.end() != len(text) or token not in _CLOSERS:
                return None
            kind = _KINDS.get(_OPENERS[first.group()] + _CLOSERS[token])
            return None if kind is None else (kind, text[first.end() : match.start()])
    return None


def _split(text: str) -> list[str]:
    """Return the parts between commas (or semicolons) that are outside all brackets."""
    parts, depth, begin = [], 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += token in _OPENERS or token == "{" or token == "\\begin"
        depth -= token in _CLOSERS or token == "}" or token == "\\end"
        if depth <= 0 and token in ",;":
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def _expand_signs(parts: list[str]) -> tuple[str, ...]:
    """Return the parts, with `a \\pm b` as two values."""
    expanded: list[str] = []
    for part in parts:
        if part.count("\\pm") == 1 and "\\mp" not in part:
            expanded += [part.replace("\\pm", "+").lstrip("+ "), part.replace("\\pm", "-")]
        else:
            expanded.append(part)
    return tuple(expanded)


def _matrix_shape(text: str, body: str) -> Shape:
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", body.strip()) if row.strip()]
    if len(rows) > 1 and all("&" not in row for row in rows):
        return Shape("column", text, tuple(rows))
    if len(rows) == 1 and "&" in rows[0]:
        return Shape("row", text, tuple(cell.strip() for cell in rows[0].split("&")))
    return Shape("leaf", text)


_OPEN_ROUND, _CLOSE_ROUND = "([", ")]"
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{([^{}]*)\}|\\choose")
_DIGITS = re.compile(r"\d+")
_POWER = re.compile(r"\^|\*\*")
# Bounds are capped here, so that a limit of 10^300 means no limit.
_LARGEST_LOG10 = 300.0
_PLAIN_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def refusal(text: str, limits: ScreenLimits) -> str | None:
    """Return why an extracted answer is refused unparsed.

    Args:
        text: the extracted answer.
        limits: what is allowed.

    Returns: `too_long`, `too_complex`, or None when it may be parsed.
    """
    if len(text) > limits.max_chars:
        return "too_long"
    if any(len(run) > limits.max_digits for run in _DIGITS.findall(text)):
        return "too_long"
    if _too_nested(text, limits):
        return "too_complex"
    if any(_too_big(text, match.end(), limits) for match in _POWER.finditer(text)):
        return "too_complex"
    if _factorial_too_big(text, limits) or _binomial_too_big(text, limits):
        return "too_complex"
    return None


def _too_nested(text: str, limits: ScreenLimits) -> bool:
    curly = rounded = 0
    for char in text:
        if char == "{":
            curly += 1
        elif char == "}":
            curly -= 1
        elif char in _OPEN_ROUND:
            rounded += 1
        elif char in _CLOSE_ROUND:
            rounded -= 1
        if curly > limits.max_nesting or rounded > limits.max_round_nesting:
            return True
    return False


def _operand(text: str, start: int) -> str:
    """Return the exponent that begins at `start`: a bracketed group without its brackets, or a run up to an operator.

    A power that follows the exponent belongs to it, as in 9^9^9.
    """
    while start < len(text) and text[start] in " -+":
        start += 1
    end = start
    if start < len(text) and text[start] in "{([":
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] in "{([") - (text[end] in "})]")
            if depth == 0:
                break
        end += 1
    else:
        while end < len(text) and (text[end].isalnum() or text[end] in ".\\"):
            end += 1
    tail = _POWER.match(text, end)
    return text[start:] if tail else text[start:end].strip("{}()[] ")


def _too_big(text: str, start: int, limits: ScreenLimits) -> bool:
    """Whether the exponent at `start` is, or may evaluate to, more than the limit."""
    return _log10_bound(_operand(text, start), limits.max_tower) > math.log10(limits.max_exponent)


def _log10_bound(text: str, levels: int) -> float:
    """Return log10 of a generous bound on the value of a small numeric expression; symbols count as 1.

    Sums and products are bounded by the product of their numbers, a power by base bound times exponent bound.
    Infinite when powers stand in exponents more than `levels` deep.
    """
    if levels < 0:
        return math.inf
    total = 0.0
    position = 0
    previous = 0.0
    while position < len(text):
        power = _POWER.match(text, position)
        number = _PLAIN_NUMBER.match(text, position)
        if power:
            inner = _operand(text, power.end())
            exponent = _log10_bound(inner, levels - 1)
            if exponent == math.inf:
                return math.inf
            total += max(previous, 0.0) * (10 ** min(exponent, 12.0))
            position = power.end() + max(1, len(inner))
        elif number:
            previous = math.log10(max(1.0, abs(float(number.group()))))
            total += 0.0 if text[:position].rstrip().endswith("/") else previous
            position = number.end()
        else:
            if text[position] == "!":
                total += (10**previous) * max(previous, 1.0)
            position += 1
    return min(total, _LARGEST_LOG10)


def _factorial_too_big(text: str, limits: ScreenLimits) -> bool:
    """Whether a text has n! with n above the limit, or a factorial of too large an expression or of another factorial,
    or one in an exponent."""
    for match in re.finditer("!", text):
        before = text[: match.start()].rstrip()
        if before.endswith("!"):
            return True
        if before and before[-1] in ")}]":
            group = _group_before(before)
            if before[: -len(group)].rstrip().endswith("^"):
                return True
            if "!" in group or _log10_bound(group, limits.max_tower) > math.log10(limits.max_factorial):
                return True
            continue
        digits = re.search(r"\d+$", before)
        if digits and (int(digits.group()) > limits.max_factorial or before[: digits.start()].rstrip().endswith("^")):
            return True
    return False


def _group_before(text: str) -> str:
    depth = 0
    for start in range(len(text) - 1, -1, -1):
        depth += (text[start] in ")}]") - (text[start] in "({[")
        if depth == 0:
            return text[start:]
    return text


def _binomial_too_big(text: str, limits: ScreenLimits) -> bool:
    return any(
        _log10_bound(match.group(1) or text, limits.max_tower) > math.log10(limits.max_factorial)
        for match in _BINOMIAL.finditer(text)
    )
