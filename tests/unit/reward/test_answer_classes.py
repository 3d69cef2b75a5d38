"""Every pair of every class of answers, and the rules against answers that only restate the problem."""

from __future__ import annotations

import pytest
from answer_classes import RIGHT, WRONG

from megatron_daro.reward import VerifierSpec, build_verifier
from megatron_daro.reward.pool import RewardPool

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


STATEMENT = (
    r"Simplify $\frac{(10r^3)(4r^6)}{8r^4}$, where $r = 99^2+99+1$ is \(3/20\), the letter $k$ or \[x^2 - 1 < 0.\]"
)


RESTATED = [
    (r"\frac{(10r^3)(4r^6)}{8r^4}", "5r^5", "restated"),
    (r"\dfrac{ (10r^3)(4r^6) }{8r^4}", "5r^5", "restated"),
    ("99^2+99+1", "9901", "restated"),
    ("x^2-1", "(x-1)(x+1)", "restated"),
    ("5r^5", "5r^5", "match"),
    ("99^2+100", "9901", "match"),
    ("3/20", "0.15", "match"),
    ("k", "k", "match"),
    ("x^2 - 1", "x^2-1", "match"),
]
"""(answer, gold, reason where expressions of the statement are refused)"""


def test_an_expression_of_the_statement_is_no_answer_where_asked_for() -> None:
    texts = [(f"\\boxed{{{answer}}}", gold) for answer, gold, _ in RESTATED]
    with RewardPool(VerifierSpec(refuse_restated=True), workers=1, timeout_s=60) as pool:
        found = pool.score([(*text, STATEMENT) for text in texts])
        unknown = pool.score(texts)
    assert [verdict.reason for verdict in found] == [reason for *_, reason in RESTATED]
    assert {verdict.reason for verdict in unknown} == {"match"}, "nothing is known of a statement"
    assert all(VERIFIER.verify(*text).correct for text in texts)
