"""Duplicates: equal and nearly equal problems, and those that disagree about the answer.

Place in the data flow: rows that are still there -> Decisions. Of each set of equal problems the first row stays. Two
problems that differ in a few words are one where numbers, symbols and answers agree (alike); where the answers differ
both stay, with a note: one of them is wrong, or the words make another problem. Two that ask for their answers in
different forms can have different answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import numpy as np

from megatron_daro.curate.alike import same_problem
from megatron_daro.curate.decisions import Decisions
from megatron_daro.curate.hashing import Ragged, sequence_hash, signatures, similar_pairs
from megatron_daro.curate.rows import Row
from megatron_daro.data.contamination import normalized_text, prompt_text
from megatron_daro.reward.normal_form import canonical, key, number

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
