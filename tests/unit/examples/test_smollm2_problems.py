"""The problems of examples/smollm2: what is held out is never shown, and every answer is right."""

from __future__ import annotations

import functools
import json
import random
import re

import pytest
import short_problems
from short_problems import KINDS, NUM_HELD_OUT, NUM_TRAIN


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Name -> rows."""
    folder = tmp_path_factory.mktemp("problems")
    short_problems.write(folder)
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.iterdir()}


@functools.cache
def pattern(wording: str) -> re.Pattern[str]:
    places = re.sub(r"\\\{\d?\\\}", r"(\\d+)", re.escape(wording))
    return re.compile(places + r"(\d*)$")


@functools.cache
def wordings_of(line: str) -> set[tuple[str, int, tuple[int, ...]]]:
    """(kind, number of the wording, numbers in the order of the question) that a line may be."""
    found = set()
    for kind in KINDS:
        for number, wording in enumerate(kind.wordings):
            if match := pattern(wording).match(line):
                order = [int(place) for place in re.findall(r"\{(\d)\}", wording)] or range(len(match.groups()) - 1)
                numbers = dict(zip(order, map(int, match.groups()), strict=False))
                found.add((kind.name, number, tuple(numbers[i] for i in sorted(numbers))))
    return found


ANSWERS = {
    "sum": lambda a, b: a + b,
    "word_problem": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "larger": max,
    "smaller": min,
    "sequence": lambda a, b, c: c + (b - a),
    "counting": lambda a, b, c: c + 1,
    "repeat": lambda a, b: a,
    "successor": lambda a: a + 1,
    "metres": lambda a: 100 * a,
    "last_digit": lambda a: int(str(a)[-1]),
    "half": lambda a: a // 2,
}


def test_sizes_kinds_and_answers(sets):
    assert {name: len(rows) for name, rows in sets.items()} == {
        "train": NUM_TRAIN,
        "numbers": NUM_HELD_OUT,
        "wordings": NUM_HELD_OUT,
    }
    for rows in sets.values():
        assert {row["category"] for row in rows} == {kind.name for kind in KINDS} == set(ANSWERS)
        for row in rows:
            question = row["problem"].splitlines()[-1]
            numbers = [found for kind, _, found in wordings_of(question) if kind == row["category"]]
            assert str(ANSWERS[row["category"]](*numbers[0])) == row["answer"], row


def test_held_out_numbers_are_in_no_line_of_the_training_set(sets):
    def asked(rows):
        return {
            (kind, numbers)
            for row in rows
            for kind, _, numbers in wordings_of(row["problem"].splitlines()[-1])
            if kind == row["category"]
        }

    shown = {
        (kind, numbers)
        for row in sets["train"]
        for line in row["problem"].splitlines()
        for kind, _, numbers in wordings_of(line)
        if kind == row["category"]
    }
    assert not asked(sets["numbers"]) & shown and not asked(sets["wordings"]) & shown


def test_held_out_wordings_are_in_no_training_problem(sets):
    def used(rows):
        return {
            (row["category"], number)
            for row in rows
            for kind, number, _ in wordings_of(row["problem"].splitlines()[-1])
            if kind == row["category"]
        }

    last = {(kind.name, len(kind.wordings) - 1) for kind in KINDS}
    assert used(sets["wordings"]) == last
    assert not used(sets["train"]) & last and not used(sets["numbers"]) & last


def test_the_same_seed_gives_the_same_problems():
    def drawn(seed):
        rng = random.Random(seed)
        return list(short_problems.rows(rng, 40, held_out_numbers=False, held_out_wordings=False))

    assert drawn(1) == drawn(1) != drawn(2)
