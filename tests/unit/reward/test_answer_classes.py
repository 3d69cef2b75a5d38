"""Every pair of every class of answers, and the rules against answers that only restate the problem."""

from __future__ import annotations

import pytest
from answer_classes import RIGHT, WRONG

from megatron_daro.reward import VerifierSpec, build_verifier
from megatron_daro.reward.math import MathVerifier

VERIFIER = build_verifier("math")


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in WRONG.values() for pair in pairs])
def test_pairs_that_must_not_match(gold: str, answer: str) -> None:
    verdict = VERIFIER.verify(f"so \\boxed{{{answer}}}", gold)
    assert (verdict.correct, verdict.reason) in [(False, r) for r in ("no_match", "unevaluated", "answer_unparsed")]


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in RIGHT.values() for pair in pairs])
def test_pairs_that_must_match(gold: str, answer: str) -> None:
    assert VERIFIER.verify(f"so \\boxed{{{answer}}}", gold).reason == "match"


@pytest.mark.parametrize(("gold", "answer"), WRONG["unevaluated operator"])
def test_an_operator_counts_where_the_gold_has_it(gold: str, answer: str) -> None:
    assert VERIFIER.verify(f"\\boxed{{{answer}}}", answer).correct
    assert VERIFIER.verify(f"\\boxed{{{gold}}}", gold).correct


def test_lenient_mode_evaluates_operators() -> None:
    lenient = build_verifier("math", strict=False)
    assert lenient.verify(r"\boxed{\sum_{k=1}^{100} k}", "5050").correct
    assert VERIFIER.verify(r"\boxed{\sum_{k=1}^{100} k}", "5050").reason == "unevaluated"


STATEMENT = (
    r"Simplify $\frac{(10r^3)(4r^6)}{8r^4}$, where $r = 99^2+99+1$ is \(3/20\), the letter $k$ or \[x^2 - 1 < 0.\]"
)


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        (r"\frac{(10r^3)(4r^6)}{8r^4}", "5r^5", "restated"),
        (r"\dfrac{ (10r^3)(4r^6) }{8r^4}", "5r^5", "restated"),
        ("99^2+99+1", "9901", "restated"),
        ("x^2-1", "(x-1)(x+1)", "restated"),
        ("5r^5", "5r^5", "match"),
        ("99^2+100", "9901", "match"),
        ("3/20", "0.15", "match"),
        ("k", "k", "match"),
        ("x^2 - 1", "x^2-1", "match"),
    ],
)
def test_an_expression_of_the_statement_is_no_answer_where_asked_for(answer: str, gold: str, reason: str) -> None:
    asked, usual = (MathVerifier(VerifierSpec(refuse_restated=refuse)) for refuse in (True, False))
    text = f"\\boxed{{{answer}}}"
    screened = asked.screen(text, gold, STATEMENT)
    verdict = asked.judge(screened) if not hasattr(screened, "reason") else screened
    assert verdict.reason == reason
    assert usual.verify(text, gold).reason == "match"
    assert asked.verify(text, gold).reason == "match"  # nothing is known of a statement
