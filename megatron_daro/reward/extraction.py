"""Finds the final answer inside a model's text: last box, last `Answer:` line, text after a marker, trailing number.

Place in the data flow: rollout text -> (this) -> answer string -> comparison. Every function is linear in the length
of the text and never raises on any text. Refuses to guess: None means that the form is not there.
"""

from __future__ import annotations

import re
from collections import deque

TAIL_CHARS = 300
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s$]+")
_ANSWER = re.compile(r"(?ia)answer[ \t*_]*:")
_ANSWER_LINE = re.compile(r"[ \t*_]*\n?([^\n]*)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+|(?<=\d))(?:/\d+)?")


def matching_brace(text: str, start: int) -> int | None:
    """Index of the `}` that closes the `{` at `start`; escaped braces do not count. None when it is never closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return None


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed` (or `\\fbox`); None when there is none or it was cut off.

    `\\boxed 42` without braces gives `42`. An earlier box never replaces a later one that was cut off.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = _BOX.match(text, start) if start >= 0 else None
    if match is None:
        return None
    position = match.end()
    position += len(text[position:]) - len(text[position:].lstrip())
    if position < len(text) and text[position] == "{":
        end = matching_brace(text, position)
        return None if end is None else text[position + 1 : end].strip()
    bare = _BARE_BOX.match(text, position)
    return bare.group().rstrip(".,;") if bare else None


def trailing_number(text: str) -> str | None:
    """Return the last number within the last TAIL_CHARS characters, thousands commas removed; None when there is
    none."""
    found = None
    for match in _NUMBER.finditer(text[-TAIL_CHARS:]):
        found = match.group()
    return None if found is None else found.replace(",", "")


def last_answer_line(text: str) -> str | None:
    """Return what stands behind the last `Answer:` (any case, also in bold) up to the end of its line.

    Source: the rule of DAPO (arXiv 2503.14476, section 3.4): the prompt asks for a last line `Answer: $Answer`.
    """
    last = deque(_ANSWER.finditer(text), maxlen=1)
    line = _ANSWER_LINE.match(text, last[0].end()) if last else None
    return line.group(1).strip() if line else None


def after_marker(text: str, marker: str) -> str | None:
    """Return what stands behind the last `marker` up to the end of its line; None when the marker is not there."""
    start = text.rfind(marker)
    if start < 0:
        return None
    return text[start + len(marker) :].split("\n", 1)[0].strip()
