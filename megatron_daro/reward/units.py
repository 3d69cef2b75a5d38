"""Units and words behind a value: cut off where they are only that, refused where they change what is said.

Place in the data flow: canonical text of a leaf -> (this) -> value without unit. Pure text, linear. Refuses words that
hedge (`maybe not`), join (`or six`) or scale (`million`): with them the value is another one, or none.
"""

from __future__ import annotations

import re

_UNIT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf)\s*\{\s*([A-Za-z][A-Za-z .'/-]*?)\s*\}\s*(\^\s*\{?\d\}?)?\s*$")
# Without a text wrapper only words that cannot be a product of symbols in an answer, after a digit or a brace.
_BARE_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:cm|mm|km|kg|inch(?:es)?|feet|foot|meters?|metres?|miles?|degrees?|cents?|dollars?|hours?|minutes?"
    r"|seconds?|days?|years?|units?|square (?:units|inches|feet|cm|meters))\s*(?:\^\s*\{?[23]\}?)?\s*$"
)
_MAX_WORDS = 3
_NOT_A_UNIT = re.compile(
    r"\b(?:a|about|almost|an|and|approximately|approx|around|at|base|be|billion|but|by|cannot|could|does|"
    r"doubtful|dozen|eight|eleven|exactly|except|false|few|five|four|guess|half|hardly|hundred|i|if|"
    r"incorrect|is|it|just|least|less|likely|may|maybe|might|million|mod|modulo|more|most|nearly|negative|"
    r"never|nine|no|nope|none|nor|not|of|off|one|or|otherwise|perhaps|plus|minus|possibly|possible|"
    r"probably|quarter|roughly|seven|several|six|some|sure|ten|then|third|thirds|thousand|three|times|to|"
    r"trillion|true|twelve|twenty|twice|two|uncertain|undefined|unknown|unless|unsure|until|up|when|where|"
    r"wrong|zero)\b"
)


def without_unit(text: str) -> str:
    """Return the text without a unit at its end; unchanged when nothing else would be left."""
    match = _UNIT.search(text) or _BARE_UNIT.search(text)
    return text if match is None or not text[: match.start()].strip() else text[: match.start()].strip()


def unit(text: str) -> str | None:
    """Return the unit of a value that is written as text, in one spelling; None without one."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return None
    return match.group(1).lower().rstrip("s") + re.sub(r"[{}\s]", "", match.group(2) or "")


def changes_value(text: str) -> bool:
    """Whether the words behind a value are more than a unit: too many, or one that hedges, joins or scales."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return False
    words = match.group(1).lower()
    return len(words.split()) > _MAX_WORDS or _NOT_A_UNIT.search(words) is not None
