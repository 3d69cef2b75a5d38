"""What an answer does besides being right or wrong: whether it reflects on itself, and how it ends.

Texts of eval's and analyze's answers -> shares for their tables. Rules decide, not a judge model. Dr. GRPO (arXiv
2503.20783, sections 2.1 and 2.3) asks GPT-4o-mini whether a base model answers at all or only completes the question;
here the end of the answer tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KEYWORDS = (
    *("recheck", "rethink", "reassess", "reevaluate", "re-evaluate", "reevaluation", "re-examine", "reexamine"),
    *("reconsider", "reanalyze", "double-check", "check again", "think again", "verify again", "go over the steps"),
)
"""Source: `keyword_pool` of analysis/keyword_count.py, Dr. GRPO's authors' code."""
Ending = Literal["answered", "ran on", "cut off", "without answer"]
"""In this order: stopped with a final answer; cut off although it has a final answer; cut off before one; stopped
without one, so it is no answer, or not in the form that was asked for."""
_CODE = ("```python", "```output")


def reflects(text: str) -> bool:
    """Return whether an answer contains one of KEYWORDS, in any case."""
    lower = text.lower()
    return any(word in lower for word in KEYWORDS)


def ending_of(has_answer: bool, truncated: bool) -> Ending:
    """Return how an answer ends. Args: has_answer: the verifier finds a final answer. truncated: it was cut."""
    if has_answer:
        return "ran on" if truncated else "answered"
    return "cut off" if truncated else "without answer"


def has_code(text: str) -> bool:
    """Return whether an answer contains a block of Python, or of its output."""
    return any(mark in text for mark in _CODE)


@dataclass(slots=True)
class Reflection:
    """Counts of answers with and without a word of self-reflection."""

    reflecting: int = 0
    reflecting_right: int = 0
    other: int = 0
    other_right: int = 0

    def add(self, reflecting: bool, right: bool) -> None:
        """Count an answer."""
        if reflecting:
            self.reflecting += 1
            self.reflecting_right += right
        else:
            self.other += 1
            self.other_right += right

    @property
    def share(self) -> float:
        """Share of the answers that reflect; 0 without answers."""
        return self.reflecting / max(self.reflecting + self.other, 1)

    @property
    def accuracy_with(self) -> float | None:
        """Share of right answers among those that reflect; None if none does."""
        return self.reflecting_right / self.reflecting if self.reflecting else None

    @property
    def accuracy_without(self) -> float | None:
        """Share of right answers among the others; None if there are none."""
        return self.other_right / self.other if self.other else None
