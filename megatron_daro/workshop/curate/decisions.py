"""What becomes of each row: every row that was read is kept or dropped for one reason, so the counts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

REASONS: Mapping[str, str] = {
    "unusable": "no problem or no answer could be read",
    "proof": "it asks for a proof",
    "free_text": "its answer is a sentence",
    "unverifiable": "the verifier cannot check its answer",
    "leak": "it stands in an evaluation set",
    "overlap": "it shares a long run of words with an evaluation set",
    "conflict": "the same problem stands in the data with another answer",
    "duplicate": "the same problem, maybe in another spelling, is kept",
    "duplicate_form": "kept where its answer is asked for in another form",
    "near_duplicate": "a kept one differs in a few words, with the same answer",
    "guessable": "a guess hits its answer",
    "unsampled": "no pass rate could be measured",
    "pass_rate": "its pass rate is outside the range",
}
"""Why a row can be dropped, in the order of the stages."""

NOTES: Mapping[str, str] = {
    "other_answer": "another kept one is nearly equal, its answer is not",
    "overlap": "shares a long run of words with an evaluation set",
}
"""What can be noted of a row that is kept."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row, why it was dropped or noted, and the other row: a place, or set and row of an evaluation set."""

    row: int
    reason: str
    detail: str = ""
    other: str = ""


@dataclass(slots=True)
class Decisions:
    """The record of one curation. `count`: rows that were read."""

    count: int
    dropped: dict[int, Finding] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)

    def drop(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Drop a row, which was not dropped before."""
        assert reason in REASONS and row not in self.dropped, f"row {row} cannot be dropped as {reason!r}"
        self.dropped[row] = Finding(row, reason, detail, other)

    def note(self, row: int, reason: str, detail: str = "", other: str = "") -> None:
        """Note something about a row that may be kept."""
        assert reason in NOTES
        self.notes.append(Finding(row, reason, detail, other))

    def kept(self) -> list[int]:
        """Return the rows that are kept, in order."""
        return [row for row in range(self.count) if row not in self.dropped]

    def notes_on_kept(self) -> list[Finding]:
        """Return the notes on rows that are kept, in order of the rows."""
        return sorted((n for n in self.notes if n.row not in self.dropped), key=lambda n: (n.row, n.reason, n.other))

    def counts(self) -> dict[str, int]:
        """Return how many rows each reason dropped."""
        return _counted((finding.reason for finding in self.dropped.values()), REASONS)

    def note_counts(self) -> dict[str, int]:
        """Return how many notes of each kind there are on rows that are kept."""
        return _counted((note.reason for note in self.notes_on_kept()), NOTES)


def _counted(values: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names if counts[name]}
