"""Decisions: what happened to each row, so that the counts add up to the rows that were read.

Every stage writes here; output and page read it. A row is kept until one stage drops it, and
is dropped once. A note says something about a row that stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

REASONS: Mapping[str, str] = {
    "unusable": "no problem or no answer could be read",
    "unverifiable": "the verifier cannot check its answer",
    "leak": "it stands in an evaluation set",
    "overlap": "it shares a long run of words with an evaluation set",
    "conflict": "the same problem stands in the data with another answer",
    "duplicate": "the same problem, written alike up to spelling, is kept",
    "duplicate_form": "the same problem is kept, asking for its answer in another form",
    "near_duplicate": "a kept problem differs in a few words, has the same numbers and the same answer",
    "guessable": "a guess hits its answer",
    "unsampled": "no pass rate could be measured",
    "pass_rate": "its pass rate is outside the range",
}
"""Why a row can be dropped, in the order of the stages."""

NOTES: Mapping[str, str] = {
    "other_answer": "a kept problem differs in a few words and has another answer",
    "overlap": "it shares a long run of words with an evaluation set, but is another problem",
    "majority": "its answer is that of most copies of the problem",
}
"""What can be said of a row that stays."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row, why it was dropped or noted, and the other side: a place, or set and row of an evaluation set."""

    row: int
    reason: str
    detail: str = ""
    other: str = ""


@dataclass(slots=True)
class Decisions:
    """The book of one curation. `count`: rows that were read."""

    count: int
    dropped: dict[int, Finding] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)

    def drop(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Drop a row. Raises ValueError for an unknown reason or a row that was dropped before."""
        if reason not in REASONS or row in self.dropped or not 0 <= row < self.count:
            raise ValueError(f"row {row} of {self.count} cannot be dropped as {reason!r}")
        self.dropped[row] = Finding(row, reason, detail, other)

    def note(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Say something about a row. Raises ValueError for an unknown note."""
        if reason not in NOTES:
            raise ValueError(f"no note {reason!r}")
        self.notes.append(Finding(row, reason, detail, other))

    def kept(self) -> list[int]:
        """Return the rows that stay, in order."""
        return [row for row in range(self.count) if row not in self.dropped]

    def notes_on_kept(self) -> list[Finding]:
        """Return what is said about rows that stay, in order of the rows."""
        return sorted((n for n in self.notes if n.row not in self.dropped), key=lambda n: (n.row, n.reason, n.other))

    def counts(self) -> dict[str, int]:
        """Return how many rows each reason dropped; their sum and the rows that stay are `count`."""
        return _counted((f.reason for f in self.dropped.values()), REASONS)

    def note_counts(self) -> dict[str, int]:
        """Return how many notes there are of each kind, on rows that stay."""
        return _counted((note.reason for note in self.notes_on_kept()), NOTES)


def _counted(found: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    counts = Counter(found)
    return {name: counts[name] for name in names if counts[name]}
