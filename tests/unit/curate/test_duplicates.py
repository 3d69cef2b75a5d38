"""Equal and nearly equal problems: which row stays, what happens to answers that differ, and the books."""

import pytest
from made_words import named

from megatron_daro.workshop.curate import leaks
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


def test_another_form_is_a_repeat_only_where_the_problem_is_surely_the_same(rows_of):
    form = " The answer is in the form m/n. Please give m + n."
    problem = " ".join(named(20))
    close, far = (" ".join((*named(20 - changed), *named(changed, 300))) for changed in (2, 3))
    for text, reason in ((close, "duplicate_form"), (far, None)):
        decisions = Decisions(2)
        leaks.drop_near(rows_of((problem, "1"), (text + form, "2")), decisions)
        assert [one.reason for one in decisions.dropped.values()] == ([reason] if reason else [])
        assert len(decisions.notes) == (reason is None)


def test_only_eight_words_of_a_difference_are_shown(rows_of):
    first, second = rows_of((" ".join(named(9)), "1"), ("q r", "1"))
    assert leaks._difference(second, first) == f"here: {' '.join(named(8))}; there: q r"
    assert leaks._difference(first, first) == "here: -; there: -"


def test_equal_answers_of_any_size_are_one_value():
    assert leaks._one_key("1e100") == "1" + "0" * 100 and leaks._one_key("1e101") == "1E+101"
    assert leaks._one_key("0.50") == "1/2" and leaks._one_key("x + 1") == "x+1"


def test_votes_of_three_answers_count_the_two_most_frequent(rows_of):
    def kept(*answers: str) -> list[int]:
        decisions = Decisions(len(answers))
        leaks.drop_equal(rows_of(*(("a b", answer) for answer in answers)), decisions, "majority")
        return decisions.kept()

    assert kept("1", "2", "2", "3") == [1] and kept("1", "2", "2", "1", "3") == []
    decisions = Decisions(4)
    leaks.drop_equal(rows_of(*(("a b", answer) for answer in "1223")), decisions, "majority")
    assert [note.detail for note in decisions.notes] == ["2 of 4 rows have this answer"]
    assert decisions.dropped[0].other == "made.jsonl:2" and decisions.counts() == {"conflict": 2, "duplicate": 1}
    decisions = Decisions(2)
    leaks.drop_equal(rows_of(("a b", "1", "2"), ("a b", "3")), decisions, "drop")
    assert decisions.dropped[0].detail == "1 or 2 here, 3 there" and decisions.dropped[1].other == "made.jsonl:1"
