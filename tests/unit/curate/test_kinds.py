"""Problems of kinds that are not wanted, and answers that nothing can check or that a guess hits: those go, what only
looks like them stays."""

from __future__ import annotations

import pytest
from curated_rows import PLAIN, write_problems

from megatron_daro.cli import main

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
    assert not curate(*PROOFS, *NO_PROOFS, options="--proofs").dropped


def test_sentences_as_answers_go_unless_one_of_the_golds_is_none(curate):
    answers = [
        *("42", "\\frac{1}{2}", "x = 3y", "\\text{Tuesday}", "12 \\text{ square meters}", "$\\alpha + \\beta$"),
        *("甲乙两人", "one two three", "They are parallel to each other"),
    ]
    rows = [(f"Name the thing number {i}.", answer) for i, answer in enumerate(answers)]
    rows.append(("Name the last thing of all.", "They never do meet", "0"))
    assert curate(*rows, options="--most-gold-words 3 --no-near").reasons == {9: "free_text"}


def test_other_languages_go_and_formulas_stay(curate):
    wanted = ["How many marbles are there in the bag?", "$\\int_0^1 x^2 dx$", "Solve $x^2 + \\alpha = 3$", "12 + 3"]
    others = [
        "Combien de billes y a-t-il dans le sac qui est sur la table ?",
        "Wie viele Kugeln sind in der Tasche, die auf dem Tisch ist und für Kinder?",
        "¿Cuántos números hay en la lista de los primos que es finita?",
        "袋中有多少个球？",
        "袋の中に球はいくつありますか",
        "Сколько шаров?",
    ]
    rows = [(text, str(i)) for i, text in enumerate([*wanted, *others])]
    found = curate(*rows, options="--languages en")
    assert found.reasons == dict.fromkeys(range(5, 11), "language")
    assert [found.details[number] for number in range(5, 11)] == ["fr", "de", "es", "zh", "ja", "ru"]
    assert curate(*rows, options="--languages en,zh").kept == [1, 2, 3, 4, 8]


def test_no_topic_has_more_than_its_share(curate, tmp_path, capsys):
    geometry = [(f"What is the area of triangle number {i}?", "1") for i in range(40)]
    primes = [(f"What is the remainder of {i} modulo a prime?", "1") for i in range(10)]
    dice = [(f"What is the probability that {i} dice show a six?", "1") for i in range(6)]
    rows = [*geometry, *primes, *dice]
    found = curate(*rows, options="--most-per-topic 0.5 --no-near")
    left = [sum(first < number <= last for number in found.kept) for first, last in ((0, 40), (40, 50), (50, 56))]
    assert left == [16, 10, 6] and set(found.reasons.values()) == {"topic"}
    # Which of them go follows from their texts, not from their places.
    turned = curate(*rows[::-1], options="--most-per-topic 0.5 --no-near")
    assert {57 - number for number in turned.kept} == set(found.kept)
    file = write_problems(tmp_path / "train.jsonl", rows)
    words = ["--verifier", "none", "--no-near", "--most-per-topic", "0.3"]  # three topics
    assert main(["curate", str(file), "--out", str(tmp_path / "out"), *words]) == 2
    assert "--most-per-topic" in capsys.readouterr().err


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
    found = curate(*rows, options=f"--verifier {verifier} --workers 1 --no-near")
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
    found = curate(*rows, options=f"--drop-guesses {','.join(GUESSES)} --no-near")
    assert {number: found.details[number].partition(":")[0] for number in found.dropped} == {
        number: kind for number, (kind, _) in enumerate(kinds, 1)
    }
    found = curate(*rows, options="--drop-guesses small_integer --largest-integer 5 --no-near")
    assert [rows[number - 1][1] for number in found.dropped] == ["3"]
    # One of several answers is enough for a guess to be right.
    assert curate(("How many?", "300", "3"), PLAIN, options="--drop-guesses small_integer").kept == [2]
