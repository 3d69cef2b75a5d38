"""Planted paraphrases are found, problems that only sound alike are not; which row stays, and what is refused."""

from __future__ import annotations

import sys

import pytest
from made_words import Counting

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.curate import paraphrases
from megatron_daro.workshop.curate.leaks import drop_near
from megatron_daro.workshop.curate.paraphrases import drop_paraphrases, similar
from megatron_daro.workshop.curate.rows import Decisions

WORDINGS = (
    "A bag holds {} red marbles and {} blue marbles. How many marbles does it hold altogether?",
    "There are {} red and {} blue marbles in a bag. Find the total number of marbles in the bag.",
    "In a bag lie marbles of two colours, {} of them red and {} blue. How many are in it?",
)
OTHERS = (
    "A rectangle has length {} and width {}. What is its area?",
    "A rectangle has length {} and width {}. What is its perimeter?",
    "What is the remainder when {} is divided by {}?",
    "A club has {} members. In how many ways can a committee of {} people be chosen from them?",
)


def test_rewordings_are_found_that_minhash_does_not_see_and_nothing_else(rows_of):
    pytest.importorskip("sklearn")
    numbers = ((47, 6), (53, 8), (61, 9), (75, 4))
    reworded = [(text.format(a, b), str(a + b)) for a, b in numbers for text in WORDINGS]
    others = [(text.format(a, b), f"{a}{b}{i}") for a, b in numbers for i, text in enumerate(OTHERS)]
    rows = rows_of(*reworded, *others)
    by_words, by_vectors = Decisions(len(rows)), Decisions(len(rows))
    drop_near(rows, by_words)
    drop_paraphrases(rows, by_vectors)
    assert not by_words.dropped
    assert {1 + 3 * i for i in range(4)} <= set(by_vectors.dropped) <= set(range(12)) - {0, 3, 6, 9}


def test_equal_words_with_other_numbers_answers_or_opposites_are_other_problems(rows_of):
    pytest.importorskip("sklearn")
    text = "A shop sells {} red apples and the rest of its {} apples are green. How many green apples are there?"
    rows = rows_of(
        (text.format(12, 30), "18"), (text.format(13, 31), "18"), (text.format(12, 30), "17"),
        ("What is the largest odd number below 30 with 12 divisors?", "5"),
        ("What is the largest even number below 30 with 12 divisors?", "5"),
    )  # fmt: skip
    decisions = Decisions(5)
    drop_paraphrases(rows, decisions)
    assert not decisions.dropped


def test_paraphrases_without_scikit_learn_are_refused(monkeypatch, rows_of):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ConfigError, match=r"--paraphrases: scikit-learn is not installed; .*\[curate\]"):
        list(similar(rows_of(("a", "1"), ("b", "1")), 0.4))


def test_of_rows_that_say_the_same_the_earliest_stays(monkeypatch, rows_of):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    monkeypatch.setattr(paraphrases, "_AT_ONCE", 2)
    text = "red dogs run fast"
    rows = rows_of((text, "9"), (text, "1"), (text, "2"), (text + " today", "1.0"), (text, "1"), ("cats", "1"))
    decisions = Decisions(6)
    decisions.drop(0, "leak")
    paraphrases.drop_paraphrases(rows, decisions)
    assert {row: (one.reason, one.detail, one.other) for row, one in decisions.dropped.items() if row} == {
        3: ("paraphrase", "cosine 0.89", "made.jsonl:2"),
        4: ("paraphrase", "cosine 1.00", "made.jsonl:2"),
    }
    assert paraphrases.ALIKE == 0.4


def test_paraphrases_come_in_order_of_the_later_and_best_first(rows_of, monkeypatch):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    texts = ["red dogs run fast 3", "red dogs run slowly 3", "red dogs run fast today 3", "red dogs run fast 4"]
    rows = rows_of(*((text, "1") for text in texts))
    found = list(similar(rows, 0.3))
    assert [(earlier, later) for earlier, later, _ in found] == [(0, 1), (0, 2), (1, 2)] and found[1][2] > found[2][2]
    assert list(similar(rows[:1], 0.0)) == [] and [pair[:2] for pair in similar(rows, found[1][2])] == [(0, 2)]
    for one, other in (("odd", "even"), ("not red", "red")):
        assert not list(similar(rows_of((f"{one} dogs run", "1"), (f"{other} dogs run", "1")), 0.1))
    assert list(similar(rows_of(("odd dogs run", "1"), ("dogs run", "1")), 0.1))
