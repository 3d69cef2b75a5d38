"""Problems that are in an evaluation set.

A leak is a row that contains a problem of an evaluation set, where a few words may differ, but no number or symbol; it
is dropped. This also finds short statements, which have no run of 13 words. An overlap is a run of 13 tokens in common:
GPT-3's rule (arXiv 2005.14165, appendix C), which also ignores runs in more than ten rows. In mathematics it also
matches problems that only begin alike, so it is only noted unless asked for.

Evaluation problems that share n-grams of three tokens with a row are candidates for a leak; `contained_part` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_daro.workshop.curate.alike import contained_part
from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.duplicates import same_answers
from megatron_daro.workshop.curate.hashing import Ragged, ngrams
from megatron_daro.workshop.curate.rows import Row
from megatron_daro.workshop.curate.statements import Statement, statement_of, without_figures

_GRAM = 3
_RUN = 13
"""Tokens in a row that make an overlap."""
_FREQUENT = 10
"""Most rows that may share a run; a run in more rows is not evidence."""
_LONG, _SURELY = 25, 0.9
"""An evaluation problem with at least so many tokens, and so much of it found, is a leak whatever the answer is."""
_FEW_PROBLEMS, _LEAST_RARE = 40, 3
_LEAST_SHARE = 0.2
"""Least part of an evaluation problem's n-grams that a candidate has."""
_CHUNK = 4096


def drop_leaks(
    rows: Sequence[Row], sets: Mapping[str, Sequence[Row]], decisions: Decisions, *, overlaps: bool = False
) -> None:
    """Drop rows that contain a problem of an evaluation set; note those that share a long run of tokens with one.

    Args:
        rows: every row that was read.
        sets: evaluation sets by name, as read.
        decisions: what was dropped so far; written to.
        overlaps: drop what is otherwise only noted.
    """
    index = _LeakIndex([problem for name, one in sets.items() for problem in _held_out(name, one)])
    kept = decisions.kept()
    matches = index.find([rows[row] for row in kept])
    for local, name in sorted(matches.leaks.items()):
        decisions.drop(kept[local], "leak", "", name)
    act = decisions.drop if overlaps else decisions.note
    for detail, names in (
        ("a few words and the answer differ", matches.alike),
        (f"{_RUN} tokens in a row", matches.overlaps),
    ):
        for local, name in sorted(names.items()):
            act(kept[local], "overlap", detail, name)


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """One problem of an evaluation set. name: "set:row"; its statement is without drawings."""

    name: str
    row: Row
    statement: Statement


def _held_out(name: str, rows: Sequence[Row]) -> list[_HeldOut]:
    return [_HeldOut(f"{name}:{row.number}", row, _undrawn(row)) for row in rows if not row.unusable]


def _undrawn(row: Row) -> Statement:
    plain = without_figures(row.prompt.statement)
    return row.statement if plain == row.prompt.statement else statement_of(plain)


@dataclass(frozen=True, slots=True)
class _Matches:
    """Three kinds of matches, each row -> name of the first evaluation problem that it matches. No row has two kinds.

    leaks: the row contains the problem. alike: it does except for a few words, but the answers differ. overlaps: they
    have a long run of tokens in common.
    """

    leaks: dict[int, str] = field(default_factory=dict)
    alike: dict[int, str] = field(default_factory=dict)
    overlaps: dict[int, str] = field(default_factory=dict)


class _LeakIndex:
    """The evaluation problems by their n-grams."""

    def __init__(self, problems: Sequence[_HeldOut]) -> None:
        self._problems = problems
        self._whole: dict[tuple[str, ...], str] = {}
        for problem in problems:
            self._whole.setdefault(problem.statement.tokens, problem.name)
        ragged = Ragged([problem.statement.tokens for problem in problems])
        self._short = _Postings(*ngrams(ragged, _GRAM), len(problems)).rare()
        self._long = _Postings(*ngrams(ragged, _RUN), len(problems))

    def find(self, rows: Sequence[Row]) -> _Matches:
        """Return the rows that contain an evaluation problem, or share a long run of tokens with one."""
        matches = _Matches()
        statements = [_undrawn(row) for row in rows]
        frequency = np.zeros(len(self._long.grams), np.int64)
        chunks = [range(start, min(start + _CHUNK, len(rows))) for start in range(0, len(rows), _CHUNK)]
        for chunk in chunks:
            ragged = Ragged([statements[row].tokens for row in chunk])
            for local, problem in self._short.candidates(*ngrams(ragged, _GRAM), _LEAST_SHARE):
                row = chunk[local]
                self._judge(row, rows[row], statements[row], self._problems[problem], matches)
            for row in chunk:
                if (tokens := statements[row].tokens) and tokens in self._whole:
                    matches.leaks[row] = self._whole[tokens]
            frequency += self._long.frequency(*ngrams(ragged, _RUN))
        for row in matches.leaks:
            matches.alike.pop(row, None)
        telling = self._long.only(frequency <= _FREQUENT)
        for chunk in chunks:
            ragged = Ragged([statements[row].tokens for row in chunk])
            for local, problem in telling.candidates(*ngrams(ragged, _RUN), 0.0):
                if (row := chunk[local]) not in matches.leaks and row not in matches.alike:
                    matches.overlaps.setdefault(row, self._problems[problem].name)
        return matches

    def _judge(self, index: int, row: Row, statement: Statement, held_out: _HeldOut, matches: _Matches) -> None:
        """Judge a row: a leak may differ in words if it is long or the answers agree (TARTAR is not ELLIPSE)."""
        if index in matches.leaks:
            return
        part = contained_part(held_out.statement, statement)
        is_long = len(held_out.statement.tokens) >= _LONG and part >= _SURELY
        if part == 1.0 or (part and (is_long or same_answers(row, held_out.row))):
            matches.leaks[index] = held_out.name
        elif part:
            matches.alike.setdefault(index, held_out.name)


class _Postings:
    """Sorted n-grams with the problems they occur in: `grams` uint64 [G] and `problems` int64 [G], each pair once."""

    def __init__(self, grams: np.ndarray, problems: np.ndarray, count: int) -> None:
        pairs = np.unique(np.stack([grams, problems.astype(np.uint64)], axis=1), axis=0) if len(grams) else None
        self.grams = np.empty(0, np.uint64) if pairs is None else pairs[:, 0]
        self.problems = np.empty(0, np.int64) if pairs is None else pairs[:, 1].astype(np.int64)
        self._count = count
        self._sizes = np.bincount(self.problems, minlength=count)

    def rare(self) -> _Postings:
        """Return only the n-grams of few problems, but all those of a problem that would keep too few."""
        if not len(self.grams):
            return self
        _, inverse, counts = np.unique(self.grams, return_inverse=True, return_counts=True)
        few = counts[inverse] <= _FEW_PROBLEMS
        left = np.bincount(self.problems[few], minlength=self._count)
        stays = few | (left[self.problems] < _LEAST_RARE)
        return _Postings(self.grams[stays], self.problems[stays], self._count)

    def only(self, chosen: np.ndarray) -> _Postings:
        """Return the chosen entries, bool [G]."""
        return _Postings(self.grams[chosen], self.problems[chosen], self._count)

    def frequency(self, grams: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return in how many rows each entry's n-gram occurs: int64 [G]."""
        if not len(grams) or not len(self.grams):
            return np.zeros(len(self.grams), np.int64)
        pairs = np.unique(np.stack([grams, rows.astype(np.uint64)], axis=1), axis=0)[:, 0]
        low = np.searchsorted(pairs, self.grams, side="left")
        return np.searchsorted(pairs, self.grams, side="right") - low

    def candidates(self, grams: np.ndarray, rows: np.ndarray, least: float) -> list[tuple[int, int]]:
        """Return (row, problem) pairs that share at least one, and the part `least`, of the problem's n-grams."""
        if not len(grams) or not len(self.grams):
            return []
        order = np.lexsort((rows, grams))
        grams, rows = grams[order], rows[order]
        new = np.concatenate([[True], (grams[1:] != grams[:-1]) | (rows[1:] != rows[:-1])])
        grams, rows = grams[new], rows[new]
        low = np.searchsorted(self.grams, grams, side="left")
        entries = np.searchsorted(self.grams, grams, side="right") - low
        hit = entries > 0
        low, entries, rows = low[hit], entries[hit], rows[hit]
        within = np.arange(int(entries.sum())) - np.repeat(np.cumsum(entries) - entries, entries)
        problems = self.problems[np.repeat(low, entries) + within]
        pairs, counts = np.unique(np.repeat(rows, entries) * np.int64(self._count) + problems, return_counts=True)
        row, problem = np.divmod(pairs, np.int64(self._count))
        close = counts >= least * self._sizes[problem]
        return list(zip(row[close].tolist(), problem[close].tolist(), strict=True))
