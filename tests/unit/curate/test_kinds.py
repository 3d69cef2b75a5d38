"""Problems of kinds that are not wanted, and answers that nothing can check or that a guess hits: those go, what only
looks like them stays."""

from __future__ import annotations

import pytest
from curated_rows import PLAIN

pytestmark = pytest.mark.slow

PROOFS = [
    ("Prove that $\\sqrt 2$ is irrational.", "See the proof."),
    ("Let $n$ be odd. Show that $n^2 - 1$ is divisible by 8.", "8"),
    ("Find $x$ if $x^2 = 4$ and $x > 0$.", "see solution"),
    ("What is $1 + 1$?", "Q.E.D."),
    ("求证：$a+b>c$.", "证明见解析"),
    ("Prove or disprove: every prime is odd.", "disproved"),
]
NO_PROOFS = [
    ("Show that $f$ is linear, and find $f(3)$.", "6"),
    ("It can be shown that $a_n$ converges. What is its limit?", "2"),
    ("A bag holds 12 marbles. How many are red?", "5"),
    ("The proof of a liquor is twice its percentage of alcohol. What is that of 40 %?", "80"),
]


def test_proofs_go_unless_they_are_asked_for(curate):
    found = curate(*PROOFS, *NO_PROOFS)
    assert found.reasons == dict.fromkeys(range(1, len(PROOFS) + 1), "proof")
    assert not curate(*PROOFS, *NO_PROOFS, options="--drop near_duplicate").dropped


def test_sentences_as_answers_go_unless_one_of_the_golds_is_none(curate):
    answers = [
        *("42", "\\frac{1}{2}", "x = 3y", "\\text{Tuesday}", "12 \\text{ square meters}", "$\\alpha + \\beta$"),
        *("甲乙两人", "one two three", "They are parallel to each other"),
    ]
    rows = [(f"Name the thing number {i}.", answer) for i, answer in enumerate(answers)]
    rows.append(("Name the last thing of all.", "They never do meet", "0"))
    assert curate(*rows, options="--drop free_text").reasons == {9: "free_text"}


@pytest.mark.parametrize(
    ("verifier", "checked", "unchecked"),
    [
        (
            "math",
            [("42",), ("\\frac{1}{2}",), ("\\text{Tuesday}",)],
            [("x + + / ) 3",), ("9^{9^{9^9}}",), ("1", "x + + / ) 3")],
        ),
        ("integer", [("7",), ("-12",)], [("1/2",), ("x",)]),
    ],
)
def test_the_verifier_must_read_every_answer_and_find_it_equal(curate, verifier, checked, unchecked):
    rows = [(f"What is the thing number {i}?", *golds) for i, golds in enumerate([*checked, *unchecked])]
    found = curate(*rows, options=f"--verifier {verifier} --drop proof")
    assert found.kept == list(range(1, len(checked) + 1)) and set(found.reasons.values()) == {"unverifiable"}


GUESSES = {
    "choice": [("\\text{(E)}", "Which?"), ("(B)", "Which one?"), ("C", "Which of them? (A) 1 (B) 2 (C) 3")],
    "yes_no": [("\\text{Yes}", "Is it?"), ("no.", "Is it so?")],
    "true_false": [("True", "Is it right?")],
    "small_integer": [("-10", "How many?"), ("10", "How many are there?"), ("3", "How much?")],
}
NO_GUESSES = [
    *(("C", "Name the point on line BC."), ("x", "Which variable? (A) x (B) y"), ("11", "How many of them?")),
    *(("2.5", "How many of these?"), ("10000000000000000000000000", "How many of all?"), ("nobody", "Who?")),
]


def test_answers_that_a_guess_hits_go_where_their_kind_is_named(curate):
    kinds = [(kind, case) for kind, cases in GUESSES.items() for case in cases]
    rows = [(text, answer) for answer, text in [case for _, case in kinds] + NO_GUESSES]
    found = curate(*rows, options=f"--drop {','.join(GUESSES)}")
    assert {number: found.details[number].partition(":")[0] for number in found.dropped} == {
        number: kind for number, (kind, _) in enumerate(kinds, 1)
    }
    found = curate(*rows, options="--drop small_integer")
    assert [rows[number - 1][1] for number in found.dropped] == ["-10", "10", "3"]
    # One of several answers is enough for a guess to be right.
    assert curate(("How many?", "300", "3"), PLAIN, options="--drop small_integer").kept == [2]
