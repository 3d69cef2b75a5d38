"""Equal and nearly equal problems: which row stays, what happens to answers that differ, and the books."""

import pytest

from megatron_daro.workshop.curate.leaks import drop_equal, drop_near, same_answers
from megatron_daro.workshop.curate.rows import Decisions

LONG = "A bag holds 12 red marbles and 5 blue ones. How many marbles does the bag hold in total?"
FORM = " The answer is in the form m/n. Please give m + n."


def reasons(decisions):
    return {row: (one.reason, one.other) for row, one in sorted(decisions.dropped.items())}


def test_the_first_of_equal_problems_stays(rows_of):
    rows = rows_of((LONG, "17"), (LONG.upper().lower(), "17.0"), ("What is $1+1$?", "2"), (f"  {LONG}\n", "17"))
    decisions = Decisions(4)
    drop_equal(rows, decisions)
    assert reasons(decisions) == {1: ("duplicate", "made.jsonl:1"), 3: ("duplicate", "made.jsonl:1")}
    assert decisions.kept() == [0, 2] and decisions.counts() == {"duplicate": 2}


@pytest.mark.parametrize(
    ("conflicts", "kept", "counts"),
    [
        ("drop", [], {"conflict": 3}),
        ("keep_first", [0], {"duplicate": 1, "conflict": 1}),
        ("majority", [0], {"duplicate": 1, "conflict": 1}),
    ],
)
def test_equal_problems_that_disagree(rows_of, conflicts, kept, counts):
    decisions = Decisions(3)
    drop_equal(rows_of((LONG, "17"), (LONG, "18"), (LONG, "17")), decisions, conflicts)
    assert decisions.kept() == kept and decisions.counts() == counts
    assert decisions.dropped[1].detail == "18 here, 17 there"


def test_a_draw_has_no_majority_and_a_majority_is_noted(rows_of):
    decisions = Decisions(2)
    drop_equal(rows_of((LONG, "17"), (LONG, "18")), decisions, "majority")
    assert decisions.kept() == []
    decisions = Decisions(3)
    drop_equal(rows_of((LONG, "17"), (LONG, "18"), (LONG, "18")), decisions, "majority")
    assert decisions.kept() == [1] and decisions.note_counts() == {"majority": 1}


def test_another_form_of_the_answer_is_no_conflict(rows_of):
    decisions = Decisions(3)
    drop_equal(rows_of((LONG, "17"), (LONG + FORM, "18"), (LONG + FORM, "18")), decisions)
    assert reasons(decisions) == {1: ("duplicate_form", "made.jsonl:1"), 2: ("duplicate", "made.jsonl:2")}


def test_nearly_equal_problems_need_the_same_numbers_and_answers(rows_of):
    cases = [
        (LONG, "17"),
        (LONG.replace("bag", "box", 1), "17"),
        (LONG.replace("12", "13"), "17"),
        (LONG.replace("red", "green"), "99"),
    ]
    decisions = Decisions(4)
    assert drop_near(rows_of(*cases), decisions) == 0
    assert reasons(decisions) == {1: ("near_duplicate", "made.jsonl:1")}
    assert decisions.dropped[1].detail == "here: box; there: -"
    assert [(n.row, n.reason, n.detail) for n in decisions.notes_on_kept()] == [
        (3, "other_answer", "99 here, 17 there")
    ]


def test_what_is_a_copy_of_a_dropped_row_only_stays(rows_of):
    rows = rows_of((LONG, "17"), (LONG.replace("bag", "box"), "17"), (LONG, "17"))
    decisions = Decisions(3)
    decisions.drop(0, "leak")
    drop_near(rows, decisions)
    assert reasons(decisions)[2] == ("near_duplicate", "made.jsonl:2") and decisions.kept() == [1]


def test_statements_without_words_are_equal_to_their_own_text_only(rows_of):
    decisions = Decisions(3)
    drop_equal(rows_of(("$", "1"), ("?", "2"), ("$", "1")), decisions)
    assert reasons(decisions) == {2: ("duplicate", "made.jsonl:1")}


def test_what_training_takes_for_the_same_problem_is_the_same(rows_of):
    decisions = Decisions(3)
    drop_equal(rows_of(("Find the fi ves", "1"), ("Find the fives", "1"), ("find the fives!", "1")), decisions)
    assert reasons(decisions) == {1: ("duplicate", "made.jsonl:1")} and decisions.kept() == [0, 2]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("27.0", "27", True),
        ("\\dfrac{1}{2}", "0.5", True),
        ("1,080", "1080", True),
        ("$x+1$", "x + 1", True),
        ("3", "-3", False),
        ("1e999999", "1e999998", False),
    ],
)
def test_answers_are_compared_by_value(rows_of, one, other, same):
    first, second = rows_of((LONG, one), (LONG, other))
    assert same_answers(first, second) is same


def test_alternatives_count_in_any_order(rows_of):
    assert same_answers(*rows_of((LONG, "1", "2"), (LONG, "2", "1.0")))
    assert not same_answers(*rows_of((LONG, "1", "2"), (LONG, "1")))


def test_a_row_is_dropped_once():
    decisions = Decisions(2)
    decisions.drop(1, "leak")
    for row, reason in ((1, "leak"), (2, "leak"), (0, "because")):
        with pytest.raises(ValueError):
            decisions.drop(row, reason)
    with pytest.raises(ValueError):
        decisions.note(0, "because")
