"""Problems of kinds that are not wanted: planted ones go, those that only look like them stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.curate import kinds
from megatron_daro.workshop.curate.kinds import (
    drop_languages,
    drop_proofs,
    drop_sentences,
    drop_surplus_topics,
    is_proof,
    language_of,
    largest_cap,
    topic_of,
    words_of,
)
from megatron_daro.workshop.curate.offline import Rules, decide
from megatron_daro.workshop.curate.rows import Decisions


@pytest.mark.parametrize(
    ("statement", "gold", "proof"),
    [
        ("Prove that $\\sqrt 2$ is irrational.", "See the proof.", True),
        ("Let $n$ be odd. Show that $n^2 - 1$ is divisible by 8.", "8", True),
        ("Find $x$ if $x^2 = 4$ and $x > 0$.", "see solution", True),
        ("What is $1 + 1$?", "Q.E.D.", True),
        ("\u6c42\u8bc1\uff1a$a+b>c$.", "\u8bc1\u660e\u89c1\u89e3\u6790", True),
        ("Prove or disprove: every prime is odd.", "disproved", True),
        ("Show that $f$ is linear, and find $f(3)$.", "6", False),
        ("It can be shown that $a_n$ converges. What is its limit?", "2", False),
        ("A bag holds 12 marbles. How many are red?", "5", False),
        ("The proof of a liquor is twice its percentage of alcohol. What is that of 40 %?", "80", False),
    ],
)
def test_proofs(statement, gold, proof):
    assert is_proof(statement, [gold]) is proof


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("42", 0), ("\\frac{1}{2}", 0), ("x = 3y", 0), ("\\text{Tuesday}", 1), ("12 \\text{ square meters}", 2),
        ("The two lines are parallel to each other", 8), ("$\\alpha + \\beta$", 0), ("\u7532\u4e59\u4e24\u4eba", 2),
    ],
)  # fmt: skip
def test_words_of_an_answer(answer, words):
    assert words_of(answer) == words


def test_sentences_go_unless_one_of_the_golds_is_none(rows_of):
    rows = rows_of(("a", "They are parallel to each other"), ("b", "7 meters"), ("c", "They never do meet", "0"))
    decisions = Decisions(3)
    drop_sentences(rows, decisions, 3)
    assert decisions.counts() == {"free_text": 1} and decisions.dropped[0].detail.startswith("6 words: They are")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How many marbles are there in the bag?", "en"),
        ("Combien de billes y a-t-il dans le sac qui est sur la table ?", "fr"),
        ("Wie viele Kugeln sind in der Tasche, die auf dem Tisch ist und f\u00fcr Kinder?", "de"),
        ("\u00bfCu\u00e1ntos n\u00fameros hay en la lista de los primos que es finita?", "es"),
        ("\u888b\u4e2d\u6709\u591a\u5c11\u4e2a\u7403\uff1f", "zh"),
        ("\u888b\u306e\u4e2d\u306b\u7403\u306f\u3044\u304f\u3064\u3042\u308a\u307e\u3059\u304b", "ja"),
        (
            "\u0421\u043a\u043e\u043b\u044c\u043a\u043e \u0448\u0430\u0440\u043e\u0432?",
            "ru",
        ),
        ("$\\int_0^1 x^2 dx$", None),
        ("Solve $x^2 + \\alpha = 3$", None),
    ],
)
def test_languages(text, language):
    assert language_of(text) == language


def test_other_languages_go_and_formulas_stay(rows_of):
    rows = rows_of(
        ("How many are in the bag?", "1"), ("\u888b\u4e2d\u6709\u591a\u5c11\u4e2a\u7403", "2"), ("$1+1$", "2")
    )
    decisions = Decisions(3)
    drop_languages(rows, decisions, ("en",))
    assert decisions.kept() == [0, 2] and decisions.dropped[1].detail == "zh"


def test_each_kind_that_goes_is_counted_as_it_goes(rows_of):
    rows = rows_of(
        ("Prove that 2 is even.", "See the proof."),
        ("Why is the sky blue?", "since blue light is scattered"),
        ("\u888b\u4e2d\u6709\u591a\u5c11\u4e2a\u7403", "2"),
        ("How many are in the bag?", "1"),
    )
    said = []
    rules = Rules(most_gold_words=3, languages=("en",), verifier="none", near=False)
    decisions, _ = decide(rows, {}, rules, said.append)
    assert decisions.kept() == [3]
    assert said[1:4] == [
        "problems that ask for a proof: 3 of 4 rows are left",
        "sentences as answers: 2 of 4 rows are left",
        "other languages: 1 of 4 rows are left",
    ]


def test_no_topic_has_more_than_its_share(rows_of):
    geometry = [(f"A triangle {i} has a right angle. What is its area?", "1") for i in range(40)]
    primes = [(f"What is the remainder of {i} modulo a prime?", "1") for i in range(10)]
    dice = [(f"What is the probability that {i} dice show a six?", "1") for i in range(6)]
    rows = rows_of(*geometry, *primes, *dice)
    assert Counter(map(topic_of, rows)) == {"geometry": 40, "number theory": 10, "counting and probability": 6}
    decisions = Decisions(len(rows))
    drop_surplus_topics(rows, decisions, 0.5)
    left = Counter(topic_of(rows[row]) for row in decisions.kept())
    assert left == {"geometry": 16, "number theory": 10, "counting and probability": 6}
    again = Decisions(len(rows))
    drop_surplus_topics(rows, again, 0.5)
    assert again.kept() == decisions.kept()
    with pytest.raises(ConfigError, match=r"--most-per-topic: got 0.3 with 3 topics .*allowed: at least 0.33"):
        drop_surplus_topics(rows, Decisions(len(rows)), 0.3)
    drop_surplus_topics(rows, Decisions(0), 0.3)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.05, 1.0))
def test_the_cap_is_the_largest_that_fits(sizes, most):
    def fits(cap):
        left = [min(size, cap) for size in sizes]
        return max(left) <= most * sum(left)

    cap = largest_cap(sizes, most)
    assert cap == 0 or fits(cap)
    assert not any(fits(more) for more in range(cap + 1, max(sizes) + 1))


def test_planted_proofs_go_before_the_verifier_sees_them(rows_of):
    rows = rows_of(("Prove that 2 is prime.", "See the proof."), ("What is 1+1?", "2"))
    decisions = Decisions(2)
    drop_proofs(rows, decisions)
    assert decisions.counts() == {"proof": 1} and decisions.dropped[0].detail == "gold: See the proof."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("\u00e9" * 18 + " \u0431\u0431", "ru"),
        ("\u00e9" * 19 + " \u0431\u0431", None),
        ("is the", "en"),
        ("is", None),
        ("der das", "de"),
        ("in is de la", None),  # as many of two languages
        ("\\alpha\\beta \u03b1", None),
        ("x \u03b1\u03b2\u03b3", "el"),
        ("The of $\\text{\u0431\u0431\u0431\u0431}$ and", "en"),
        ("12 + 3", None),
    ],
)
def test_a_language_is_told_by_a_tenth_of_the_letters_or_two_words(text, code):
    assert language_of(text) == code


def test_proofs_words_and_topics(rows_of):
    assert is_proof("What is it?", ["1", "proof"]) and not is_proof("What is it?", ["1"])
    assert not is_proof("Compute it.", ["1"]) and is_proof("Prove it.", ["1"])
    assert (words_of("\u7532\u4e59\u4e19"), words_of("\\text{ab} c \\mathrm{de}"), words_of("$ab cd$ ef")) == (2, 2, 1)
    texts = ("nothing here", "A circle and a prime and a radius", "\u5706\u5706 prime")
    assert [topic_of(row) for row in rows_of(*((text, "1") for text in texts))] == ["other", "geometry", "geometry"]
    (row,) = rows_of(("a circle", "1"))
    assert topic_of(replace(row, prompt=replace(row.prompt, category="mine"))) == "mine"


def test_a_sentence_of_as_many_words_as_are_allowed_stays(rows_of):
    decisions = Decisions(2)
    kinds.drop_sentences(rows_of(("a", "one two three"), ("b", "one two three four")), decisions, 3)
    assert decisions.kept() == [0] and decisions.dropped[1].detail == "4 words: one two three four"


def test_a_topic_may_have_all_of_one_and_which_go_follows_from_the_texts(rows_of):
    assert (kinds.largest_cap([3, 1], 0.75), kinds.largest_cap([3, 1], 0.7)) == (3, 2)
    assert kinds.largest_cap([5], 1.0) == 5 and kinds.largest_cap([5], 0.9) == 0
    rows = rows_of(*((f"a circle {i}", "1") for i in range(6)), *((f"a prime {i}", "1") for i in range(2)))
    decisions = Decisions(8)
    kinds.drop_surplus_topics(rows, decisions, 0.5)
    assert {one.detail for one in decisions.dropped.values()} == {"geometry: 6 of 8"}
    turned = Decisions(8)
    kinds.drop_surplus_topics(rows[::-1], turned, 0.5)
    assert {rows[i].prompt.text for i in decisions.kept()} == {rows[7 - i].prompt.text for i in turned.kept()}
