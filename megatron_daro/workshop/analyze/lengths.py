"""What counts as the length of an answer: a number or a list of tokens, the characters of a text or of a chat."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast


def token_count(length: object) -> float | None:
    """Return a number of tokens, or how many tokens a list has; None for anything else, such as a list of messages."""
    if isinstance(length, list | tuple):
        return float(len(length)) if all(isinstance(token, int | float) for token in length) else None
    size = None if isinstance(length, bool) else number_of(length)
    return size if size is not None and 0 <= size < math.inf else None


def character_count(answer: object) -> float | None:
    """Return the characters of a text, or of the assistant's messages of a chat; None for anything else."""
    if isinstance(answer, str):
        return float(len(answer))
    if not isinstance(answer, list | tuple) or not all(isinstance(message, Mapping) for message in answer):
        return None
    texts = [message.get("content") for message in answer if message.get("role") == "assistant"]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return float(sum(map(len, cast("list[str]", texts))))


def number_of(value: object) -> float | None:
    """Return a value as a float: infinity if it is too large for one; None if it is no number."""
    try:
        return float(cast(float, value))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
