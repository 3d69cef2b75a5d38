"""Literal answers behind a marker (`####` as in GSM8K, or any other text).

Place in the data flow: rollout text -> Verdict, in process: the work is linear in the text.
Refuses text that is not text; compares characters, not mathematics: `18` is not `18.0`.
"""

from __future__ import annotations

from megatron_daro.reward.base import Job, VerifierSpec, check_text
from megatron_daro.reward.extraction import after_marker
from megatron_daro.types import Verdict


class ExactVerifier:
    """Text behind the last marker equals the gold, surrounding white space aside.

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
        wanted = self._cut(gold)
        if not wanted:
            return self._spec.verdict(False, "gold_empty")
        found = self.answer_of(answer_text)
        if not found:
            return self._spec.verdict(False, "no_answer")
        return self._spec.verdict(found == wanted, "match" if found == wanted else "no_match")

    def screen(self, answer_text: str, gold: str, statement: str = "") -> Verdict | Job:
        """All of it is cheap."""
        return self.verify(answer_text, gold)

    def judge(self, job: Job) -> Verdict:
        """Never needed: `screen` decides everything."""
        return self.verify(f"{self._spec.marker}{job.answer}", job.gold)

    def gold_problem(self, gold: str) -> str | None:
        """`gold_not_text`, `gold_empty`, or None for a usable gold."""
        refused = check_text(self._spec, "", gold)
        if refused is not None:
            return refused.reason
        return None if self._cut(gold) else "gold_empty"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the final answer; None where there is none."""
        found = after_marker(answer_text, self._spec.marker)
        return (answer_text.strip() if found is None and not self._spec.strict else found) or None

    def _cut(self, gold: str) -> str:
        behind = after_marker(gold, self._spec.marker)
        return gold.strip() if behind is None else behind
