"""Makes text of unknown origin (model answers, prompts, file contents) safe to print, log and embed.

Between a rollout's text and a terminal, a log line or the report. It never drops a character
unseen: what could act (terminal escapes, other control characters, direction overrides) becomes a visible code.
"""

from __future__ import annotations

import json
import unicodedata

_KEPT = {"\n", "\t"}
# Cc: control characters, ANSI's ESC among them. Cf: invisible format characters, direction overrides among them.
# Cs: lone surrogates, which no encoder accepts. Zl, Zp: line breaks that HTML and JavaScript see differently.
_ACTIVE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Joiners are format characters that ordinary writing needs (Persian, Hindi, emoji).
_JOINERS = {"‌", "‍"}


def safe_text(text: object, limit: int | None = None, *, one_line: bool = False) -> str:
    """Text with every control or format character replaced by a visible code such as `\\x1b`.

    Args:
        text: anything; turned into a string first.
        limit: most characters to keep, counted after replacement; the rest becomes `… (+n characters)`.
        one_line: replace newlines and tabs too, as a log line needs.

    Returns:
        Plain text. It is not markup of any kind: print it as `rich.text.Text`, embed it with `html.escape`.
    """
    kept = set() if one_line else _KEPT
    raw = str(text)
    clean = "".join(c if c in kept or not _is_active(c) else _code(c) for c in raw)
    if limit is not None and len(clean) > limit:
        return f"{clean[:limit]}… (+{len(clean) - limit} characters)"
    return clean


def script_json(value: object) -> str:
    """JSON that may stand inside a `<script>` element: no character in it can end the element or start a comment.

    Args:
        value: what `json.dumps` accepts; NaN and infinity are refused.

    Returns:
        ASCII-only JSON text without `<`, `>` and `&`.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _is_active(character: str) -> bool:
    if " " <= character <= "~" or character in _JOINERS:
        return False
    return unicodedata.category(character) in _ACTIVE


def _code(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    number = ord(character)
    if character in named:
        return named[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
