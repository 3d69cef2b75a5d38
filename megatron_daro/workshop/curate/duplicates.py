"""Problems that occur more than once in the training set.

Of equal problems with the same answer the first row is kept; where the answers differ none is kept, since some of them
are wrong. Two problems that differ in a few words count as one if their numbers, symbols and answers agree; where the
answers differ both are kept, with a note: one answer is wrong, or the words make it another problem. Problems that ask
for their answers in different forms (give m + n) can have different answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from megatron_daro.data.prompts import normalized_text, prompt_text
from megatron_daro.reward.normal_form import canonical, key, number
from megatron_daro.workshop.curate.alike import same_problem
from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.hashing import Ragged, sequence_hash, signatures, similar_pairs
from megatron_daro.workshop.curate.rows import Row

_MOST_DIGITS = 100
_SURELY_ALIKE = 0.9


def drop_equal(rows: Sequence[Row], decisions: Decisions) -> None:
    """Drop repeats of problems with the same normal form, and all of them where their answers differ."""
    groups: dict[tuple[str, ...], list[int]] = {}
    tokens_by_text: dict[str, tuple[str, ...]] = {}
    for index in decisions.kept():
        row = rows[index]
        # A statement without a word or number, such as a picture, equals only the same text.
        tokens = row.statement.tokens or (row.prompt.statement,)
        # Problems that training takes for the same (`a b` is `ab`, `1 2` is not `12`) are the same here.
        tokens = tokens_by_text.setdefault(normalized_text(prompt_text(row.prompt)), tokens)
        groups.setdefault(tokens, []).append(index)
    for group in groups.values():
        if len(group) > 1:
            _drop_in_group(group, rows, decisions)


def _drop_in_group(group: Sequence[int], rows: Sequence[Row], decisions: Decisions) -> None:
    """Drop repeats; answers conflict only among rows of one form, since another form can have another gold."""
    forms: dict[tuple[str, ...], list[int]] = {}
    for index in group:
        forms.setdefault(rows[index].statement.form, []).append(index)
    firsts = [members[0] for members in forms.values() if not _drop_conflict(members, rows, decisions)]
    for members in forms.values():
        for index in members[1:]:
            if index not in decisions.dropped:
                decisions.drop(index, "duplicate", "", rows[members[0]].place)
    for index in sorted(firsts)[1:]:
        decisions.drop(index, "duplicate_form", "", rows[min(firsts)].place)


def _drop_conflict(members: Sequence[int], rows: Sequence[Row], decisions: Decisions) -> bool:
    """Drop all of these rows if their answers differ, and return whether they do."""
    keys = {index: _answer_key(rows[index]) for index in members}
    if len(set(keys.values())) == 1:
        return False
    for index in members:
        other = next(one for one in members if keys[one] != keys[index])
        decisions.drop(index, "conflict", _disagreement(rows[index], rows[other]), rows[other].place)
    return True


def drop_near(rows: Sequence[Row], decisions: Decisions) -> int:
    """Drop rows that differ from an earlier one in a few words only.

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
            decisions.note(later, "other_answer", _disagreement(second, first), first.place)
    return crowded


def same_answers(first: Row, second: Row) -> bool:
    """Return whether two rows have the same golds, however they are written."""
    return _answer_key(first) == _answer_key(second)


def _answer_key(row: Row) -> tuple[str, ...]:
    """Return the golds in one notation, in alphabetical order; 27.0 is 27, and \\dfrac{1}{2} is \\frac12."""
    return tuple(sorted(_one_key(answer) for answer in row.prompt.answers))


def _one_key(answer: str) -> str:
    text = canonical(answer)
    value = number(text)
    if value is None:
        return key(text)
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MOST_DIGITS:
        return str(value.normalize())
    return str(Fraction(value))


def _disagreement(row: Row, other: Row) -> str:
    return f"{' or '.join(row.prompt.answers)} here, {' or '.join(other.prompt.answers)} there"


def _difference(first: Row, second: Row) -> str:
    """Return the words that only one of two statements has."""
    mine, theirs = set(second.statement.tokens), set(first.statement.tokens)
    here, there = sorted(mine - theirs)[:8], sorted(theirs - mine)[:8]
    return f"here: {' '.join(here) or '-'}; there: {' '.join(there) or '-'}"
