"""Problems of evaluation sets: found in other words or inside other text, not with another number."""

from __future__ import annotations

import pytest
from curated_rows import PLAIN

HELD_OUT = [
    ("A train leaves the station at noon and travels 60 km per hour for 3 hours. How far does it go in total?", "180"),
    ("Compute $1-2+3-4+5- \\dots +99-100$.", "-50"),
    ("Determine the number of ways to arrange the letters of the word ELLIPSE.", "1260"),
    ('How many distinct arrangements of the letters in the word "monkey" are there?', "720"),
]
TRAIN = HELD_OUT[0][0]


def test_leaks_are_found(curate):
    found = curate(
        (TRAIN, "180"),
        (TRAIN.replace("noon", "midday").replace("How far", "Determine how far"), "180"),
        ("Here is a task with 4 parts. " + TRAIN + " Give 2 reasons for it.", "7"),
        ("compute  \\(1-2+3-4+5-\\ldots+99-100\\)", "-50"),
        (HELD_OUT[3][0].replace("distinct", "different"), "720"),
        PLAIN,
        held_out=HELD_OUT,
    )
    names = ["exam:1", "exam:1", "exam:1", "exam:2", "exam:4"]
    assert found.dropped == {number: ("leak", name) for number, name in enumerate(names, 1)}
    assert found.statistics["held_out"]["exam"]["rows_dropped"] == 5


def test_other_problems_stay(curate):
    rows = [
        (TRAIN.replace("60", "70"), "210"),
        ("Compute $1-2+3-4+5- \\dots +97-98$.", "-49"),
        (HELD_OUT[2][0].replace("ELLIPSE", "TARTAR"), "90"),
        (HELD_OUT[3][0].replace("monkey", "basic"), "120"),
        ("How far is it?", "1"),
    ]
    found = curate(*rows, held_out=HELD_OUT)
    assert not found.dropped
    # A word and the answer differ in a short statement: a person is to look at it.
    assert 4 in {row for row, *_ in found.notes}


def test_a_long_run_of_words_is_noted_or_dropped(curate):
    rows = [(TRAIN.replace("3 hours", "4 hours"), "240"), PLAIN]
    assert [note[:3] for note in curate(*rows, held_out=HELD_OUT).notes] == [(1, "overlap", "exam:1")]
    assert curate(*rows, options="--drop overlap", held_out=HELD_OUT).reasons == {1: "overlap"}


@pytest.mark.parametrize(("number", "noted"), [(10, 10), (11, 0)])
def test_a_run_that_many_rows_share_says_nothing(curate, number, noted):
    siblings = [(TRAIN.replace("3 hours", f"{i} hours"), str(60 * i)) for i in range(4, 4 + number)]
    assert len(curate(*siblings, held_out=HELD_OUT).notes) == noted


def test_short_problems_leak_as_whole_statements_only(curate):
    found = curate(("Solve it.", "3"), ("Solve this.", "3"), ("2+2", "4"), held_out=[("Solve it", "4"), ("1+1", "2")])
    assert found.dropped == {1: ("leak", "exam:1")}


def names(count, first=0):
    """Words that differ."""
    return ["w" + chr(97 + i // 26) + chr(97 + i % 26) for i in range(first, first + count)]


@pytest.mark.parametrize(
    ("count", "changed", "answer", "leaks"),
    [(25, 2, "2", True), (24, 2, "2", False), (24, 2, "1", True), (30, 4, "2", False), (30, 4, "1", True)],
)
def test_in_other_words_a_short_problem_leaks_with_its_answer_only(curate, count, changed, answer, leaks):
    """From 25 words on, nine tenths of which agree, the answer does not matter."""
    text = " ".join([*names(count - changed), *names(changed, 300)])
    found = curate((text, answer), PLAIN, held_out=[(" ".join(names(count)), "1")])
    assert (found.reasons == {1: "leak"}) is leaks
    assert leaks or [note[0] for note in found.notes] == [1]
