"""The rules that hold where none is given, and what is left after each stage of a curation."""

from __future__ import annotations

from dataclasses import replace

from made_words import Counting

from megatron_daro.workshop.curate import paraphrases
from megatron_daro.workshop.curate.offline import Rules, decide


def test_rules_have_their_usual_values():
    rules = Rules()
    assert (rules.conflicts, rules.near, rules.ngram, rules.drop_overlaps) == ("drop", True, 13, False)
    assert (rules.verifier, rules.workers, rules.guesses, rules.largest_integer) == ("math", 2, (), 10)
    assert (rules.proofs, rules.most_gold_words, rules.languages, rules.most_per_topic) == (True, None, (), None)
    assert (rules.paraphrases, rules.alike) == (False, 0.4)


def test_each_stage_says_what_is_left(rows_of, monkeypatch):
    monkeypatch.setattr(paraphrases, "_vectorizer", Counting)
    rows = rows_of(
        ("What is $2+2$ in total?", "4"), ("What is $2 + 2$ in total", "4"), ("Is 3 a circle?", "yes"),
        ("Compute the square of 17 circles of radius r", "289"), ("How many primes are there?", "x"),
        ("What remains is 7 of all primes?", "700"), ("broken", "1"),
    )  # fmt: skip
    rows[6] = replace(rows[6], unusable="no answer")
    said: list[str] = []
    rules = Rules(
        verifier="exact", guesses=("yes_no",), paraphrases=True, most_per_topic=0.9, workers=1, drop_overlaps=True
    )
    sets = {"exam": rows_of(("Compute the square of 17 circles of radius r", "289"))}
    decisions, crowded = decide(rows, sets, rules, said.append)
    assert said == [
        "7 rows read, 1 unusable",
        "problems that ask for a proof: 6 of 7 rows are left",
        "answers checked by the verifier exact: 6 of 7 rows are left",
        "compared with 1 evaluation sets: 5 of 7 rows are left",
        "equal problems: 4 of 7 rows are left",
        "nearly equal problems: 4 of 7 rows are left",
        "the same in other words: 4 of 7 rows are left",
        "answers that a guess hits: 3 of 7 rows are left",
        "topics with more than their share: 3 of 7 rows are left",
    ]
    assert crowded == 0 and decisions.dropped[6].detail == "no answer"
    said.clear()
    decide(rows, {}, Rules(verifier="none", proofs=False, near=False), said.append)
    assert said == ["7 rows read, 1 unusable", "equal problems: 5 of 7 rows are left"]
