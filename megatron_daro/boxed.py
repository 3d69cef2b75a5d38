r"""The last `\boxed{...}` of a text: the answer of a solution in a problem file, and that of a response.

Linear in the length of the text, and never raises.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s$]+")


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed` (or `\fbox`); None when there is none or it was cut off.

    `\boxed 42` without braces gives `42`. An earlier box never replaces a later one that was cut off.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = _BOX.match(text, start) if start >= 0 else None
    if match is None:
        return None
    position = match.end()
    position += len(text[position:]) - len(text[position:].lstrip())
    if position < len(text) and text[position] == "{":
        end = _matching_brace(text, position)
        return None if end is None else text[position + 1 : end].strip()
    bare = _BARE_BOX.match(text, position)
    return bare.group().rstrip(".,;") if bare else None


def _matching_brace(text: str, start: int) -> int | None:
    """Return the index of the `}` that closes the `{` at `start`; escaped braces do not count. None when it is never
    closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return None
