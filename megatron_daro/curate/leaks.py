"""Leaks: training problems that stand in an evaluation set.

Place in the data flow: rows that are still there, evaluation sets -> Decisions. Two rules. *Leak*: a problem of the
set stands in the row up to a few words, numbers and symbols unchanged (alike); it is dropped. This works for short
statements, which no run of 13 words can find. *Overlap*: a run of n tokens in common, the rule of GPT-3 (arXiv
2005.14165, appendix C), without the runs that stand in more than ten rows, as there; on mathematics it also meets
problems that only begin alike, so it is a note unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_daro.curate.alike import part_found
from megatron_daro.curate.decisions import Decisions
from megatron_daro.curate.duplicates import same_answers
from megatron_daro.curate.hashing import Ragged, ngrams
from megatron_daro.curate.rows import Row
from megatron_daro.curate.statements import Statement, statement_of, without_figures

_GRAM = 3
_FEW_PROBLEMS = 40
_FREQUENT = 10
_LONG, _SURELY = 25, 0.9
_LEAST_RARE = 3
_LEAST_SHARE = 0.2
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One problem of an evaluation set. name: "set:row"; row: as it was read; its statement is without drawings."""

    name: str
    row: Row
    statement: Statement


def held_out_of(name: str, rows: Sequence[Row]) -> list[HeldOut]:
    """Return the problems of an evaluation set."""
    usable = [row for row in rows if not row.unusable]
    return [HeldOut(f"{name}:{row.place.rsplit(':', 1)[-1]}", row, _undrawn(row)) for row in usable]


@dataclass(slots=True)
class Found:
    """Rows by what was found, each with the first such evaluation problem. No row is in two of them.

    leaks: the problem stands in it. alike: it does but for a few words, and the answers differ. overlaps: a long run
    of tokens in common.
    """

    leaks: dict[int, int]
    alike: dict[int, int]
    overlaps: dict[int, int]


class LeakIndex:
    """The evaluation problems by their n-grams."""

    def __init__(self, problems: Sequence[HeldOut], ngram: int) -> None:
        """Index all problems.

        Args:
            problems: of all evaluation sets.
            ngram: tokens of the run that makes an overlap.
        """
        self._problems = problems
        self._whole: dict[tuple[str, ...], int] = {}
        for index, problem in enumerate(problems):
            self._whole.setdefault(problem.statement.tokens, index)
        ragged = Ragged([problem.statement.tokens for problem in problems])
        self._short = _Postings(*ngrams(ragged, _GRAM), len(problems)).rare()
        self._long = _Postings(*ngrams(ragged, ngram), len(problems))
        self._ngram = ngram

    def find(self, rows: Sequence[Row]) -> Found:
        """Return the rows in which an evaluation problem stands, or that share a long run of tokens with one."""
        found = Found({}, {}, {})
        parts = [range(start, min(start + _CHUNK, len(rows))) for start in range(0, len(rows), _CHUNK)]
        frequency = np.zeros(len(self._long.grams), np.int64)
        for part in parts:
            statements = [_undrawn(rows[row]) for row in part]
            ragged = Ragged([statement.tokens for statement in statements])
            for local, problem in self._short.candidates(*ngrams(ragged, _GRAM), _LEAST_SHARE):
                self._judge(part[local], rows[part[local]], statements[local], problem, found)
            for local, statement in enumerate(statements):
                if statement.tokens and statement.tokens in self._whole:
                    found.leaks[part[local]] = self._whole[statement.tokens]
            frequency += self._long.frequency(*ngrams(ragged, self._ngram))
        telling = self._long.only(frequency <= _FREQUENT)
        for part in parts:
            ragged = Ragged([_undrawn(rows[row]).tokens for row in part])
            for local, problem in telling.candidates(*ngrams(ragged, self._ngram), 0.0):
                found.overlaps.setdefault(part[local], problem)
        found.alike = {row: p for row, p in found.alike.items() if row not in found.leaks}
        known = {*found.leaks, *found.alike}
        found.overlaps = {row: p for row, p in found.overlaps.items() if row not in known}
        return found

    def name(self, problem: int) -> str:
        """Return "set:row" of a problem."""
        return self._problems[problem].name

    def _judge(self, index: int, row: Row, statement: Statement, problem: int, found: Found) -> None:
        """Words may differ in a long statement, and in a short one where the answers agree: TARTAR is not ELLIPSE."""
        if index in found.leaks:
            return
        held_out = self._problems[problem]
        part = part_found(held_out.statement, statement)
        is_long = len(held_out.statement.tokens) >= _LONG and part >= _SURELY
        if part == 1.0 or (part and (is_long or same_answers(row, held_out.row))):
            found.leaks[index] = problem
        elif part:
            found.alike.setdefault(index, problem)


class _Postings:
    """Sorted n-grams with the problems they occur in: `grams` uint64 [G] and `problems` int64 [G], pairs once."""

    def __init__(self, grams: np.ndarray, problems: np.ndarray, count: int) -> None:
        pairs = np.unique(np.stack([grams, problems.astype(np.uint64)], axis=1), axis=0) if len(grams) else None
        self.grams = np.empty(0, np.uint64) if pairs is None else pairs[:, 0]
        self.problems = np.empty(0, np.int64) if pairs is None else pairs[:, 1].astype(np.int64)
        self._count = count
        self._sizes = np.bincount(self.problems, minlength=count)

    def rare(self) -> _Postings:
        """Return the n-grams of few problems only; those of a problem that would keep too few stay all."""
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
        """Return in how many rows each entry's n-gram stands: int64 [G]."""
        if not len(grams) or not len(self.grams):
            return np.zeros(len(self.grams), np.int64)
        pairs = np.unique(np.stack([grams, rows.astype(np.uint64)], axis=1), axis=0)[:, 0]
        low = np.searchsorted(pairs, self.grams, side="left")
        return np.searchsorted(pairs, self.grams, side="right") - low

    def candidates(self, grams: np.ndarray, rows: np.ndarray, least: float) -> list[tuple[int, int]]:
        """Return (row, problem) pairs that have at least that part of the problem's n-grams, and one, in common."""
        if not len(grams) or not len(self.grams):
            return []
        order = np.lexsort((rows, grams))
        grams, rows = grams[order], rows[order]
        new = np.concatenate([[True], (grams[1:] != grams[:-1]) | (rows[1:] != rows[:-1])])
        grams, rows = grams[new], rows[new]
        low = np.searchsorted(self.grams, grams, side="left")
        found = np.searchsorted(self.grams, grams, side="right") - low
        hit = found > 0
        low, found, rows = low[hit], found[hit], rows[hit]
        within = np.arange(int(found.sum())) - np.repeat(np.cumsum(found) - found, found)
        problems = self.problems[np.repeat(low, found) + within]
        pairs, counts = np.unique(np.repeat(rows, found) * np.int64(self._count) + problems, return_counts=True)
        row, problem = np.divmod(pairs, np.int64(self._count))
        close = counts >= least * self._sizes[problem]
        return list(zip(row[close].tolist(), problem[close].tolist(), strict=True))


def drop_leaks(
    rows: Sequence[Row],
    sets: Mapping[str, Sequence[Row]],
    decisions: Decisions,
    *,
    ngram: int = 13,
    drop_overlaps: bool = False,
) -> None:
    """Drop rows that stand in an evaluation set; note, or drop, those that share a long run of tokens with one.

    Args:
        rows: every row that was read.
        sets: evaluation sets by name, as read.
        decisions: what was dropped so far; written to.
        ngram: tokens in a row that make an overlap.
        drop_overlaps: overlaps are dropped as well.
    """
    index = LeakIndex([problem for name, one in sets.items() for problem in held_out_of(name, one)], ngram)
    kept = decisions.kept()
    found = index.find([rows[row] for row in kept])
    for local, problem in sorted(found.leaks.items()):
        decisions.drop(kept[local], "leak", "", index.name(problem))
    for what, many in (
        ("a few words and the answer differ", found.alike),
        (f"{ngram} tokens in a row", found.overlaps),
    ):
        for local, problem in sorted(many.items()):
            act = decisions.drop if drop_overlaps else decisions.note
            act(kept[local], "overlap", what, index.name(problem))


def _undrawn(row: Row) -> Statement:
    plain = without_figures(row.prompt.statement)
    return row.statement if plain == row.prompt.statement else statement_of(plain)
