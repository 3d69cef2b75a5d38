"""Planted paraphrases are found, and problems that only sound alike are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_daro.workshop.curate.leaks import drop_near
from megatron_daro.workshop.curate.paraphrases import drop_paraphrases
from megatron_daro.workshop.curate.rows import Decisions

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))


def test_more_planted_paraphrases_are_found_than_by_minhash_at_the_same_precision(rows_of):
    pytest.importorskip("sklearn")
    from curate_paraphrases import planted, precision_and_recall

    rows, origin = planted(rows_of)
    by_words, by_vectors = Decisions(len(rows)), Decisions(len(rows))
    drop_near(rows, by_words)
    drop_paraphrases(rows, by_vectors)
    near, vectors = (precision_and_recall(one, origin) for one in (by_words, by_vectors))
    assert vectors[0] >= 0.95 and vectors[1] >= 0.7
    assert vectors[1] > near[1] + 0.3


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
