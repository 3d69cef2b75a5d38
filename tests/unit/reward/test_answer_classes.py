"""Every pair of every class of answers, and the rules against answers that only restate the problem."""

from __future__ import annotations

import pytest
from answer_classes import RIGHT, WRONG

from megatron_daro.reward import build_verifier

VERIFIER = build_verifier("math")


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in WRONG.values() for pair in pairs])
def test_pairs_that_must_not_match(gold: str, answer: str) -> None:
    verdict = VERIFIER.verify(f"so \\boxed{{{answer}}}", gold)
    assert (verdict.correct, verdict.reason) in [(False, r) for r in ("no_match", "unevaluated", "answer_unparsed")]


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in RIGHT.values() for pair in pairs])
def test_pairs_that_must_match(gold: str, answer: str) -> None:
    assert VERIFIER.verify(f"so \\boxed{{{answer}}}", gold).reason == "match"


def test_every_text_matches_itself() -> None:
    texts = {text for pairs in (WRONG | RIGHT).values() for pair in pairs for text in pair}
    assert {VERIFIER.verify(f"so \\boxed{{{text}}}", text).reason for text in texts} == {"match"}


def test_lenient_mode_evaluates_operators() -> None:
    lenient = build_verifier("math", strict=False)
    assert lenient.verify(r"\boxed{\sum_{k=1}^{100} k}", "5050").correct
    assert VERIFIER.verify(r"\boxed{\sum_{k=1}^{100} k}", "5050").reason == "unevaluated"
