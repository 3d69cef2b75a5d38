"""The outer shape of an answer: tuple, interval, set, list, column vector, or a leaf.

Place in the data flow: canonical text -> (this) -> comparison of leaves. Brackets carry meaning that the algebra system
drops: (6,5) is not [6,5], and (1,3) is not 1,3. Pure text, linear. What it cannot split is a leaf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

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
    """Whether a text may describe a set of numbers in words of order or set algebra, as `2 \\leq x \\leq 5`."""
    return _REGION.search(text) is not None


def named_value(text: str) -> tuple[str, str] | None:
    """(name, value) of `S = \\{...\\}`, `x \\in [..]`, `(x, y) = (1, 2)`; None for anything else."""
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
    """Kind and content when one pair of brackets encloses the whole text."""
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
    """Parts between commas (or semicolons) that stand outside all brackets."""
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
    """Return `a \\pm b` is two values."""
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
