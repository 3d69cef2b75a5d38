"""Answers that the real verifiers cannot check, and answers that a guess hits."""

import pytest

from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.curate.offline import ANSWER_FORMS, drop_guessable, drop_unverifiable, guess_of
from megatron_daro.workshop.curate.rows import Decisions


def test_the_math_verifier_must_read_the_answer_and_find_it_equal(rows_of):
    golds = ["42", "\\frac{1}{2}", "x + + / ) 3", "9^{9^{9^9}}", "\\text{Tuesday}"]
    rows = rows_of(*((f"What is {i}?", gold) for i, gold in enumerate(golds)), ("Both?", "1", "x + + / ) 3"))
    decisions = Decisions(6)
    with RewardPool("math", workers=1) as pool:
        drop_unverifiable(rows, decisions, pool, ANSWER_FORMS["math"])
    assert sorted(decisions.dropped) == [2, 3, 5] and set(decisions.counts()) == {"unverifiable"}
    assert decisions.dropped[2].detail == "gold_unparsed: x + + / ) 3"


def test_the_integer_verifier_takes_integers_only(rows_of):
    rows = rows_of(("a", "7"), ("b", "1/2"), ("c", "-12"))
    decisions = Decisions(3)
    with RewardPool("integer", workers=0) as pool:
        drop_unverifiable(rows, decisions, pool, ANSWER_FORMS["integer"])
    assert decisions.kept() == [0, 2]


@pytest.mark.parametrize(
    ("answer", "statement", "kind"),
    [
        ("\\text{(E)}", "Which?", "choice"),
        ("(B)", "Which?", "choice"),
        ("C", "Which one? (A) 1 (B) 2 (C) 3", "choice"),
        ("C", "Name the point on line BC.", None),
        ("x", "Which variable? (A) x (B) y", None),
        ("\\text{Yes}", "Is it?", "yes_no"),
        ("no.", "Is it?", "yes_no"),
        ("True", "Is it?", "true_false"),
        ("-10", "How many?", "small_integer"),
        ("10", "How many?", "small_integer"),
        ("11", "How many?", None),
        ("2.5", "How many?", None),
        ("10000000000000000000000000", "How many?", None),
        ("nobody", "Who?", None),
    ],
)
def test_guesses(answer, statement, kind):
    assert guess_of(answer, statement, 10) == kind


def test_only_the_named_guesses_are_dropped(rows_of):
    rows = rows_of(("Is it?", "yes"), ("How many?", "3"), ("How many?", "300", "3"))
    decisions = Decisions(3)
    drop_guessable(rows, decisions, ["small_integer"], 5)
    assert {row: one.detail for row, one in decisions.dropped.items()} == {
        1: "small_integer: 3",
        2: "small_integer: 3",
    }


def test_a_gold_that_is_not_equal_to_itself_is_named(rows_of):
    rows = rows_of(("a", "7"), ("b", "8", "x y"))
    decisions = Decisions(2)
    with RewardPool("exact", workers=0) as pool:
        drop_unverifiable(rows, decisions, pool, "{answer}")
    assert decisions.dropped[0].detail == "no_answer: 7" and decisions.dropped[1].detail == "no_answer: 8"


def test_guesses_at_their_bounds():
    assert guess_of("B", "(A) 1 (B) 2", 1) == "choice" and guess_of("b", "(A) 1 (B) 2", 1) is None
    assert guess_of("(b)", "", 1) == "choice" and guess_of("(k)", "", 1) is None and guess_of("B", "", 1) is None
    assert guess_of("+1", "", 1) == guess_of("-1", "", 1) == "small_integer" and guess_of("2", "", 1) is None
    assert guess_of("false.", "", 1) == "true_false" and guess_of("NO", "", 1) == "yes_no"
