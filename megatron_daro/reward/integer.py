"""Integer answers by DAPO's rule: the last `Answer:` line, normalised as text, compared as an integer.

Place in the data flow: rollout text -> Verdict, in process: the work is linear in the text, no sympy.
Refuses golds that are not integers (reason `gold_unparsed`). Source of the rule: DAPO, arXiv 2503.14476; rewards +1
and -1 there, here `correct_reward` and `incorrect_reward`.
"""

from __future__ import annotations

import re

from megatron_daro.reward.base import Job, VerifierSpec, check_text
from megatron_daro.reward.extraction import last_answer_line, last_box, trailing_number
from megatron_daro.types import Verdict

MAX_CHARS = 200
_WRAPPERS = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left|\\right|[$*`]|\\\(|\\\)|\\\[|\\\]")
_INTEGER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")


def normalise_integer(text: str) -> str | None:
    """Return the integer a short text writes, as canonical decimal text; None when it writes none.

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
    digits = match.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


class IntegerVerifier:
    """DAPO's rule. Lenient mode also takes the last box, or else a trailing number, when no `Answer:` line is there."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec

    def verify(self, answer_text: str, gold: str) -> Verdict:
        """Compare; reasons: match, no_match, no_answer, answer_unparsed, not_text, gold_empty, gold_unparsed."""
        refused = check_text(self._spec, answer_text, gold)
        if refused is not None:
            return refused
        wanted = normalise_integer(gold)
        if wanted is None:
            return self._spec.verdict(False, "gold_unparsed")
        found = self._extract(answer_text)
        if not found:
            return self._spec.verdict(False, "no_answer")
        value = normalise_integer(found)
        if value is None:
            return self._spec.verdict(False, "too_long" if len(found) > MAX_CHARS else "answer_unparsed")
        return self._spec.verdict(value == wanted, "match" if value == wanted else "no_match")

    def screen(self, answer_text: str, gold: str, statement: str = "") -> Verdict | Job:
        """All of it is cheap."""
        return self.verify(answer_text, gold)

    def judge(self, job: Job) -> Verdict:
        """Never needed: `screen` decides everything."""
        return self.verify(f"Answer: {job.answer}", job.gold)

    def gold_problem(self, gold: str) -> str | None:
        """`gold_not_text`, `gold_empty`, `gold_unparsed`, or None for a usable gold."""
        refused = check_text(self._spec, "", gold)
        if refused is not None:
            return refused.reason
        return None if normalise_integer(gold) is not None else "gold_unparsed"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the final answer as an integer's text (as it stands, where it is no integer); None where none is."""
        found = self._extract(answer_text)
        return (normalise_integer(found) or found) if found else None

    def _extract(self, text: str) -> str | None:
        line = last_answer_line(text)
        if line is not None or self._spec.strict:
            return line
        return last_box(text) or trailing_number(text)
