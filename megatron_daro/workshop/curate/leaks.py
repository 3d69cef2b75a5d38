"""Problems that stand in an evaluation set, and problems that stand twice in the training set.

A leak is a row in which a problem of an evaluation set stands up to a few words, with numbers and symbols unchanged;
it is dropped. This works for short statements, which no run of 13 words can find. An overlap is a run of n tokens in
common: GPT-3's rule (arXiv 2005.14165, appendix C), without runs that stand in more than ten rows, as there. On
mathematics it also meets problems that only begin alike, so it is a note unless asked for.

Of equal problems the first row stays. Two problems that differ in a few words are one where numbers, symbols and
answers agree; where the answers differ both stay, with a note: one of them is wrong, or the words make another
problem. Two that ask for their answers in different forms can have different answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import numpy as np

from megatron_daro.data.prompts import normalized_text, prompt_text
from megatron_daro.reward.normal_form import canonical, key, number
from megatron_daro.workshop.curate.alike import (
    Ragged,
    ngrams,
    part_found,
    same_problem,
    sequence_hash,
    signatures,
    similar_pairs,
)
from megatron_daro.workshop.curate.rows import Decisions, Row
from megatron_daro.workshop.curate.statements import Statement, statement_of, without_figures

_MOST_DIGITS = 100
_SURELY_ALIKE = 0.9
Conflicts = Literal["drop", "keep_first", "majority"]


def drop_equal(rows: Sequence[Row], decisions: Decisions, conflicts: Conflicts = "drop") -> None:
    """Drop all but one of the rows that are one problem in its normal form.

    Args:
        rows: every row that was read.
        decisions: what was dropped so far; written to.
        conflicts: what becomes of equal problems with different answers. "drop": none stays, since one answer is
            wrong; "keep_first": the first row; "majority": the first row with the answer that most rows have, none
            where two answers are equally frequent.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    by_text: dict[str, tuple[str, ...]] = {}
    for index in decisions.kept():
        row = rows[index]
        # A statement without a word or number, such as a picture, is equal to its own text only.
        tokens = row.statement.tokens or (row.prompt.statement,)
        # What training takes for the same problem (text without white space: `a b` is `ab`) is the same here.
        groups.setdefault(by_text.setdefault(normalized_text(prompt_text(row.prompt)), tokens), []).append(index)
    for group in groups.values():
        if len(group) > 1:
            _drop_in_group(group, rows, decisions, conflicts)


def drop_near(rows: Sequence[Row], decisions: Decisions) -> int:
    """Drop rows of which an earlier one differs in a few words only.

    Returns:
        How many buckets of candidates were too full to compare every pair in them.
    """
    kept = np.array(decisions.kept(), dtype=np.int64)
    statements = [rows[index].statement for index in kept.tolist()]
    ragged = Ragged([statement.tokens for statement in statements])
    keys_D = np.array([sequence_hash(statement.numbers) for statement in statements], dtype=np.uint64)
    pairs, crowded = similar_pairs(signatures(ragged), keys_D)
    for earlier, later in kept[pairs].tolist():
        if earlier in decisions.dropped or later in decisions.dropped:
            continue
        first, second = rows[earlier], rows[later]
        if not same_problem(first.statement, second.statement):
            continue
        other_form = first.statement.form != second.statement.form
        if other_form and same_problem(first.statement, second.statement, _SURELY_ALIKE):
            decisions.drop(later, "duplicate_form", _difference(first, second), first.place)
        elif same_answers(first, second):
            decisions.drop(later, "near_duplicate", _difference(first, second), first.place)
        else:
            detail = f"{' or '.join(second.prompt.answers)} here, {' or '.join(first.prompt.answers)} there"
            decisions.note(later, "other_answer", detail, first.place)
    return crowded


def same_answers(first: Row, second: Row) -> bool:
    """Return whether two rows have the same golds, however they are written."""
    return _answer_key(first) == _answer_key(second)


def _drop_in_group(group: list[int], rows: Sequence[Row], decisions: Decisions, conflicts: Conflicts) -> None:
    """Rows that ask for another form of the answer can have another gold; conflicts are among rows of one form."""
    forms: dict[tuple[str, ...], list[int]] = {}
    for index in group:
        forms.setdefault(rows[index].statement.form, []).append(index)
    left = [index for members in forms.values() for index in _of_one_form(members, rows, decisions, conflicts)]
    for index in sorted(left)[1:]:
        decisions.drop(index, "duplicate_form", "", rows[min(left)].place)


def _of_one_form(members: list[int], rows: Sequence[Row], decisions: Decisions, conflicts: Conflicts) -> list[int]:
    """Return the row that stays, if any; the others are dropped."""
    votes = Counter(_answer_key(rows[index]) for index in members)
    if len(votes) == 1 or conflicts == "keep_first":
        winner = _answer_key(rows[members[0]])
    else:
        (winner, most), (_, second) = votes.most_common(2)
        if conflicts == "drop" or most == second:
            for index in members:
                other = next(i for i in members if _answer_key(rows[i]) != _answer_key(rows[index]))
                decisions.drop(index, "conflict", _disagreement(rows[index], rows[other]), rows[other].place)
            return []
    first = next(index for index in members if _answer_key(rows[index]) == winner)
    if len(votes) > 1 and conflicts == "majority":
        decisions.note(first, "majority", f"{votes[winner]} of {len(members)} rows have this answer")
    for index in members:
        if index == first:
            continue
        if _answer_key(rows[index]) == winner:
            decisions.drop(index, "duplicate", "", rows[first].place)
        else:
            decisions.drop(index, "conflict", _disagreement(rows[index], rows[first]), rows[first].place)
    return [first]


def _disagreement(row: Row, other: Row) -> str:
    return f"{' or '.join(row.prompt.answers)} here, {' or '.join(other.prompt.answers)} there"


def _answer_key(row: Row) -> tuple[str, ...]:
    """Return the golds in one notation, in order of the alphabet; 27.0 is 27, and \\dfrac{1}{2} is \\frac12."""
    return tuple(sorted(_one_key(answer) for answer in row.prompt.answers))


def _one_key(answer: str) -> str:
    text = canonical(answer)
    value = number(text)
    if value is None:
        return key(text)
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MOST_DIGITS:
        return str(value.normalize())
    return str(Fraction(value))


def _difference(first: Row, second: Row) -> str:
    """Return the words that only one of two statements has."""
    mine, theirs = set(second.statement.tokens), set(first.statement.tokens)
    here, there = sorted(mine - theirs)[:8], sorted(theirs - mine)[:8]
    return f"here: {' '.join(here) or '-'}; there: {' '.join(there) or '-'}"


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
        hits = Found({}, {}, {})
        parts = [range(start, min(start + _CHUNK, len(rows))) for start in range(0, len(rows), _CHUNK)]
        frequency = np.zeros(len(self._long.grams), np.int64)
        for part in parts:
            statements = [_undrawn(rows[row]) for row in part]
            ragged = Ragged([statement.tokens for statement in statements])
            for local, problem in self._short.candidates(*ngrams(ragged, _GRAM), _LEAST_SHARE):
                self._judge(part[local], rows[part[local]], statements[local], problem, hits)
            for local, statement in enumerate(statements):
                if statement.tokens and statement.tokens in self._whole:
                    hits.leaks[part[local]] = self._whole[statement.tokens]
            frequency += self._long.frequency(*ngrams(ragged, self._ngram))
        telling = self._long.only(frequency <= _FREQUENT)
        for part in parts:
            ragged = Ragged([_undrawn(rows[row]).tokens for row in part])
            for local, problem in telling.candidates(*ngrams(ragged, self._ngram), 0.0):
                hits.overlaps.setdefault(part[local], problem)
        hits.alike = {row: p for row, p in hits.alike.items() if row not in hits.leaks}
        known = {*hits.leaks, *hits.alike}
        hits.overlaps = {row: p for row, p in hits.overlaps.items() if row not in known}
        return hits

    def name(self, problem: int) -> str:
        """Return "set:row" of a problem."""
        return self._problems[problem].name

    def _judge(self, index: int, row: Row, statement: Statement, problem: int, hits: Found) -> None:
        """Words may differ in a long statement, and in a short one where the answers agree: TARTAR is not ELLIPSE."""
        if index in hits.leaks:
            return
        held_out = self._problems[problem]
        part = part_found(held_out.statement, statement)
        is_long = len(held_out.statement.tokens) >= _LONG and part >= _SURELY
        if part == 1.0 or (part and (is_long or same_answers(row, held_out.row))):
            hits.leaks[index] = problem
        elif part:
            hits.alike.setdefault(index, problem)


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
    hits = index.find([rows[row] for row in kept])
    for local, problem in sorted(hits.leaks.items()):
        decisions.drop(kept[local], "leak", "", index.name(problem))
    for what, many in (
        ("a few words and the answer differ", hits.alike),
        (f"{ngram} tokens in a row", hits.overlaps),
    ):
        for local, problem in sorted(many.items()):
            act = decisions.drop if drop_overlaps else decisions.note
            act(kept[local], "overlap", what, index.name(problem))


def _undrawn(row: Row) -> Statement:
    plain = without_figures(row.prompt.statement)
    return row.statement if plain == row.prompt.statement else statement_of(plain)
