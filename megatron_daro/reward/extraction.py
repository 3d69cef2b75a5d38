"""Finds the final answer in a model's text, and the two verifiers that compare it as plain text.

Forms: the last box (`boxed.py`), the last `Answer:` line, text after a marker, a trailing number. Every function is
linear in the length of the text and never raises; None means that the form is not there, nothing is guessed.
`ExactVerifier` compares characters after a marker (`####` as in GSM8K): `18` is not `18.0`. `IntegerVerifier` follows
DAPO's rule (arXiv 2503.14476): the last `Answer:` line, normalized and compared as an integer; golds that are not
integers are rejected (`gold_unparsed`).
"""

from __future__ import annotations

import re
from collections import deque

from megatron_daro.boxed import last_box
from megatron_daro.reward.base import VerifierSpec, check_text
from megatron_daro.types import Verdict

TAIL_CHARS = 300
_ANSWER = re.compile(r"(?ia)answer[ \t*_]*:")
_ANSWER_LINE = re.compile(r"[ \t*_]*\n?([^\n]*)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+|(?<=\d))(?:/\d+)?")


def trailing_number(text: str) -> str | None:
    """Return the last number within the last TAIL_CHARS characters, thousands commas removed; None when there is
    none."""
    number = None
    for match in _NUMBER.finditer(text[-TAIL_CHARS:]):
        number = match.group()
    return None if number is None else number.replace(",", "")


def last_answer_line(text: str) -> str | None:
    """Return what follows the last `Answer:` (any case, also in bold): the rest of its line, or the next line if that
    is empty.

    Source: the rule of DAPO (arXiv 2503.14476, section 3.4): the prompt asks for a last line `Answer: $Answer`.
    """
    last = deque(_ANSWER.finditer(text), maxlen=1)
    line = _ANSWER_LINE.match(text, last[0].end()) if last else None
    return line.group(1).strip() if line else None


def after_marker(text: str, marker: str) -> str | None:
    """Return what follows the last `marker` up to the end of its line; None when the marker is not there."""
    start = text.rfind(marker)
    if start < 0:
        return None
    return text[start + len(marker) :].split("\n", 1)[0].strip()


class ExactVerifier:
    """Judges whether the text after the last marker equals the gold, apart from surrounding white space.

    A gold that itself contains the marker (GSM8K's own layout) is cut the same way. Lenient mode takes the whole
    answer text when the marker is missing.
    """

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec

    def verify(self, answer_text: str, gold: str) -> Verdict:
        """Compare; reasons: match, no_match, no_answer, not_text, gold_empty, gold_not_text."""
        refused = check_text(self._spec, answer_text, gold)
        if refused is not None:
            return refused
        gold_answer = self._cut(gold)
        if not gold_answer:
            return self._spec.verdict(False, "gold_empty")
        answer = self.answer_of(answer_text)
        if not answer:
            return self._spec.verdict(False, "no_answer")
        return self._spec.verdict(answer == gold_answer, "match" if answer == gold_answer else "no_match")

    def screen(self, answer_text: str, gold: str, statement: str = "") -> Verdict:
        """Compare at once: all of it is cheap."""
        return self.verify(answer_text, gold)

    def gold_problem(self, gold: str) -> str | None:
        """Return `gold_not_text`, `gold_empty`, or None for a usable gold."""
        refused = check_text(self._spec, "", gold)
        if refused is not None:
            return refused.reason
        return None if self._cut(gold) else "gold_empty"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the final answer; None where there is none."""
        text = self._spec.answer_part(answer_text)
        marked = after_marker(text, self._spec.marker)
        return (text.strip() if marked is None and not self._spec.strict else marked) or None

    def _cut(self, gold: str) -> str:
        behind = after_marker(gold, self._spec.marker)
        return gold.strip() if behind is None else behind


MAX_CHARS = 200
_WRAPPERS = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left|\\right|[$*`]|\\\(|\\\)|\\\[|\\\]")
_INTEGER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")


def normalise_integer(text: str) -> str | None:
    """Return the integer that a short text stands for, as canonical decimal text; None when it stands for none.

    Takes the right side of a last `=`; drops dollar signs, bold marks, LaTeX wrappers and spaces, thousands commas,
    a leading plus, leading zeros, a decimal part of zeros and a final full stop.
    """
    if len(text) > MAX_CHARS:
        return None
    text = text.replace("{,}", ",").replace("\u2212", "-")
    for _ in range(3):
        text = _WRAPPERS.sub(r"\1", text)
    text = _NOISE.sub("", text).rsplit("=", 1)[-1].strip()
    match = _INTEGER.fullmatch(text.rstrip(".") or text)
    if match is None:
        return None
    return str(int(match.group(1) + match.group(2).replace(",", "")))


class IntegerVerifier:
    """DAPO's rule. Lenient mode also takes the last box, or else a trailing number, when no `Answer:` line is there."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec

    def verify(self, answer_text: str, gold: str) -> Verdict:
        """Compare; reasons: match, no_match, no_answer, answer_unparsed, too_long, not_text, gold_empty, gold_not_text,
        gold_unparsed."""
        refused = check_text(self._spec, answer_text, gold)
        if refused is not None:
            return refused
        gold_value = normalise_integer(gold)
        if gold_value is None:
            return self._spec.verdict(False, "gold_unparsed")
        answer = self._extract(answer_text)
        if not answer:
            return self._spec.verdict(False, "no_answer")
        value = normalise_integer(answer)
        if value is None:
            return self._spec.verdict(False, "too_long" if len(answer) > MAX_CHARS else "answer_unparsed")
        return self._spec.verdict(value == gold_value, "match" if value == gold_value else "no_match")

    def screen(self, answer_text: str, gold: str, statement: str = "") -> Verdict:
        """Compare at once: all of it is cheap."""
        return self.verify(answer_text, gold)

    def gold_problem(self, gold: str) -> str | None:
        """Return `gold_not_text`, `gold_empty`, `gold_unparsed`, or None for a usable gold."""
        refused = check_text(self._spec, "", gold)
        if refused is not None:
            return refused.reason
        return None if normalise_integer(gold) is not None else "gold_unparsed"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the final answer as an integer's text (as it stands, if it is no integer); None if there is none."""
        extracted = self._extract(answer_text)
        return (normalise_integer(extracted) or extracted) if extracted else None

    def _extract(self, answer_text: str) -> str | None:
        text = self._spec.answer_part(answer_text)
        line = last_answer_line(text)
        if line is not None or self._spec.strict:
            return line
        return last_box(text) or trailing_number(text)
