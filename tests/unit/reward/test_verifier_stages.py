"""The stages of each verifier, called as the pool and the worker call them; a user's own checked word for word."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import RewardError
from megatron_daro.reward import worker
from megatron_daro.reward.base import Job, ScreenLimits, VerifierSpec
from megatron_daro.reward.extraction import (
    ExactVerifier,
    IntegerVerifier,
    last_answer_line,
    last_box,
    normalise_integer,
    trailing_number,
)
from megatron_daro.reward.factory import OwnVerifier, verifier_of
from megatron_daro.reward.math import MathVerifier
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Verdict

EXACT, INTEGER = ExactVerifier(VerifierSpec("exact")), IntegerVerifier(VerifierSpec("integer"))


@pytest.mark.parametrize(
    ("verifier", "text", "answer"),
    [
        (EXACT, "so\n#### 7 \nmore", "7"),
        (EXACT, "7", None),
        (EXACT, "#### ", None),
        (ExactVerifier(VerifierSpec("exact", strict=False)), " 7 ", "7"),
        (ExactVerifier(VerifierSpec("exact", strict=False)), "1 #### 7", "7"),
        (ExactVerifier(VerifierSpec("exact", strict=False)), " ", None),
        (INTEGER, "Answer: 1,007", "1007"),
        (INTEGER, "Answer: seven", "seven"),
        (INTEGER, "\\boxed{7}", None),
        (IntegerVerifier(VerifierSpec("integer", strict=False)), "3 so \\boxed{7} in 1", "7"),
        (IntegerVerifier(VerifierSpec("integer", strict=False)), "3 so 08", "8"),
        (IntegerVerifier(VerifierSpec("integer", strict=False)), "\\boxed{7} Answer: 8", "8"),
        (OwnVerifier(VerifierSpec("a:B")), " all of it ", "all of it"),
        (OwnVerifier(VerifierSpec("a:B")), " ", None),
        (MathVerifier(VerifierSpec()), "\\boxed{\\dfrac{1}{2}}", "\\frac12"),
        (MathVerifier(VerifierSpec()), "\\boxed{}", None),
        (MathVerifier(VerifierSpec()), "so 1.5", None),
        (MathVerifier(VerifierSpec(strict=False)), "so 1.5", "1.5"),
        (MathVerifier(VerifierSpec(limits=ScreenLimits(max_chars=3))), "\\boxed{x y}", "xy"),
        (MathVerifier(VerifierSpec(limits=ScreenLimits(max_chars=3))), "\\boxed{x + y}", "x + y"),
    ],
)
def test_the_final_answer_of_a_text(verifier: Any, text: str, answer: str | None) -> None:
    assert verifier.answer_of(text) == answer


@pytest.mark.parametrize(
    ("verifier", "gold", "problem"),
    [
        (EXACT, "7", None),
        (EXACT, "x #### 7", None),
        (EXACT, "x ####", "gold_empty"),
        (EXACT, " ", "gold_empty"),
        (EXACT, None, "gold_not_text"),
        (INTEGER, "1,007", None),
        (INTEGER, "0", None),
        (INTEGER, "seven", "gold_unparsed"),
        (INTEGER, "", "gold_empty"),
        (INTEGER, 7, "gold_not_text"),
        (OwnVerifier(VerifierSpec("a:B")), "", None),
        (OwnVerifier(VerifierSpec("a:B")), 7, "gold_not_text"),
        (MathVerifier(VerifierSpec()), "$ $", "gold_empty"),
        (MathVerifier(VerifierSpec()), "9^{9^{9^9}}", "gold_unparsed"),
        (MathVerifier(VerifierSpec()), 7, "gold_not_text"),
        (MathVerifier(VerifierSpec()), "(1, x + + / ) 3", "gold_unparsed"),
        (MathVerifier(VerifierSpec()), "(1,x+1)", None),
        (MathVerifier(VerifierSpec()), "(1,\\foo{ / +)", "gold_unparsed"),
    ],
)
def test_what_is_wrong_with_a_gold(verifier: Any, gold: object, problem: str | None) -> None:
    assert verifier.gold_problem(gold) == problem


@pytest.mark.parametrize("verifier", [EXACT, INTEGER])
@pytest.mark.parametrize(("answer", "reason"), [("7", "match"), ("8", "no_match")])
def test_a_cheap_verifier_decides_alike_in_both_stages(verifier: Any, answer: str, reason: str) -> None:
    text = f"#### {answer}" if verifier is EXACT else f"Answer: {answer}"
    assert verifier.screen(text, "7").reason == verifier.judge(Job(answer, "7")).reason == reason


def test_an_own_verifier_screens_text_only() -> None:
    own = verifier_of(VerifierSpec("a:B", incorrect_reward=-1.0))
    assert isinstance(own, OwnVerifier)
    assert own.screen("x", None) == Verdict(False, -1.0, "gold_not_text")
    assert own.screen(None, "x") == Verdict(False, -1.0, "not_text")
    assert own.screen("x", "", "s") == Job("x", "", "s") and own.screen("", "y") == Job("", "y", "")


GOOD = Verdict(True, 1, "m")


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (1.0, "a float; allowed: megatron_daro.types.Verdict;"),
        (replace(GOOD, correct=1), "correct 1; allowed: True or False;"),
        (replace(GOOD, reward=True), "reward True; allowed: a number;"),
        (replace(GOOD, reward="x" * 99), f"reward '{'x' * 79}; allowed: a number;"),
        (replace(GOOD, reward=float("inf")), "reward inf; allowed: a finite number;"),
        (replace(GOOD, reason=""), "reason ''; allowed: a word of 1 to 40 characters;"),
        (replace(GOOD, reason="x" * 41), f"reason '{'x' * 41}'; allowed: a word of 1 to 40 characters;"),
        (replace(GOOD, reason=None), "reason None; allowed: a word of 1 to 40 characters;"),
        (replace(GOOD, reason="x" * 40), None),
        (GOOD, None),
    ],
)
def test_what_a_users_class_returns_is_checked(verdict: Any, says: str | None) -> None:
    own = OwnVerifier(VerifierSpec("a:B"))
    asked: list[tuple[str, ...]] = []
    own._verifier = SimpleNamespace(verify=lambda *given: asked.append(given) or verdict)
    if says is None:
        found = own.judge(Job("answer", "gold", "statement"))
        assert found == verdict and type(found.reward) is float and asked == [("answer", "gold", "statement")]
    else:
        with pytest.raises(RewardError) as caught:
            own.verify("answer", "gold")
        assert str(caught.value) == f"reward.verifier: a:B.verify returned {says} fix: correct the class"
        assert asked == [("answer", "gold", "")]


class Judge:
    """A verifier that gives a verdict, or raises."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    def judge(self, job: Job) -> Verdict:
        assert job == Job("a", "g", "s")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]

    def gold_problem(self, gold: str) -> str | None:
        return None if gold == "good" else "gold_empty"


@pytest.mark.parametrize(
    ("outcome", "reply"),
    [
        (Verdict(True, 3.0, "match"), {"correct": True, "reason": "match"}),
        (RecursionError(), {"correct": False, "reason": "too_complex"}),
        (ValueError(), {"correct": False, "reason": "verifier_failed"}),
        (RewardError("wrong class"), {"reason": worker.REFUSED, "error": "wrong class"}),
    ],
)
def test_a_worker_answers_in_words(outcome: object, reply: dict[str, object]) -> None:
    request = {"kind": "judge", "answer": "a", "gold": "g", "statement": "s"}
    assert worker.answer_all(Judge(outcome), request) == reply  # type: ignore[arg-type]
    golds = [worker.answer_all(Judge(None), {"kind": "gold", "gold": gold}) for gold in ("good", "")]  # type: ignore[arg-type]
    assert golds == [{"reason": "usable"}, {"reason": "gold_empty"}]


def test_only_a_users_verifier_sends_its_own_reward() -> None:
    own = OwnVerifier(VerifierSpec("a:B"))
    own._verifier = SimpleNamespace(verify=lambda *_: Verdict(False, 0.25, "near"))
    request = {"kind": "judge", "answer": "a", "gold": "g", "statement": "s"}
    assert worker.answer(own, request) == {"correct": False, "reason": "near", "reward": 0.25}


def test_a_worker_makes_the_verifier_of_its_settings() -> None:
    fields = {"name": "exact", "strict": False, "marker": "#", "limits": {"max_chars": 7}}
    assert worker.spec_from(fields) == VerifierSpec("exact", False, marker="#", limits=ScreenLimits(max_chars=7))
    answer = worker.load(fields)
    assert answer({"kind": "judge", "answer": "7", "gold": "7", "statement": ""}) == {
        "correct": True,
        "reason": "match",
    }


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed 42, then", "42"),
        ("\\boxed  \n {42}", "42"),
        ("\\boxed $", None),
        ("\\boxed", None),
        ("\\boxed{a{b}c} x", "a{b}c"),
        ("\\boxed{1} \\fbox{2}", "2"),
        ("\\fbox{1} \\boxed{2}", "2"),
        ("{ \\boxed{ 1 }", "1"),
    ],
)
def test_the_last_box_with_braces_or_without(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7" + " " * 298 + "x", "7"),
        ("7" + " " * 299 + "x", None),
        ("1,234,567.50", "1234567.50"),
        ("-.5", "-.5"),
        ("+3/4.", "+3/4"),
        ("v1", None),
        ("1,23", "23"),
    ],
)
def test_a_trailing_number_is_near_the_end(text: str, number: str | None) -> None:
    assert trailing_number(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9" * 200, "9" * 200),
        ("9" * 201, None),
        ("\\text{\\mathbf{\\boxed{7}}}", "7"),
        ("\\text{\\text{\\text{\\text{7}}}}", None),
        ("a=b=7", "7"),
        ("-0", "0"),
        ("+7.", "7"),
        ("7.00", "7"),
        ("7.05", None),
        (".", None),
        ("-{,}", None),
        ("\u22127", "-7"),
        ("1{,}000", "1000"),
        ("-007", "-7"),
    ],
)
def test_an_integer_is_read_in_its_usual_dress(text: str, value: str | None) -> None:
    assert normalise_integer(text) == value


def test_an_answer_line_ends_with_its_line() -> None:
    assert last_answer_line("ANSWER: 7 \nmore") == "7" and last_answer_line("**answer** _:_ 7") == "7"
    assert last_answer_line("answer 7") is None


def test_a_verifier_is_named_or_a_class() -> None:
    for spec in ({"name": "maths"}, {"marker": ""}):
        with pytest.raises(RewardError):
            VerifierSpec(**spec)
    spec = VerifierSpec("a:B")
    assert spec.is_own and not VerifierSpec("math").is_own and (spec.strict, spec.refuse_restated) == (True, False)
    assert spec.verdict(True, "x") == Verdict(True, 1.0, "x") and spec.verdict(False, "x") == Verdict(False, 0.0, "x")
    assert VerifierSpec().limits == ScreenLimits(1000, 24, 8, 10_000, 2_000, 300, 2)


def test_a_pool_has_every_setting_of_its_section() -> None:
    section = RewardSection(
        verifier="math", strict=False, correct_reward=2.0, incorrect_reward=-1.0, marker="@", refuse_restated=True
    )
    pool = RewardPool.from_section(section)
    expected = VerifierSpec("math", False, 2.0, -1.0, "@", refuse_restated=True)
    assert pool._spec == expected and isinstance(pool._verifier, MathVerifier) and pool._needs_workers()
    own = RewardPool.from_section(RewardSection(verifier="a:B", options={"x": 1}))
    assert own._spec.options == {"x": 1} and isinstance(own._verifier, OwnVerifier) and own._needs_workers()
    assert not RewardPool("exact", workers=0)._needs_workers() and RewardPool()._spec == VerifierSpec()


@pytest.mark.parametrize(("name", "workers"), [("math", 0), ("a:B", 0), ("exact", -1)])
def test_a_pool_without_workers_is_for_cheap_verifiers(name: str, workers: int) -> None:
    with pytest.raises(
        RewardError, match=rf"got {workers} with verifier '{name}', allowed 1 or more \(0 for integer and exact"
    ):
        RewardPool(VerifierSpec(name), workers=workers)


def test_equal_jobs_are_asked_once_and_each_gets_its_verdict() -> None:
    class Pool(RewardPool):
        def start(self) -> None:
            return None

        def _ask_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
            asked.extend(requests)
            return [{"correct": one["answer"] == "a", "reason": "said", "reward": 0.5} for one in requests]

    asked: list[dict[str, Any]] = []
    pool = Pool(VerifierSpec("a:B"), workers=1)
    verdicts = pool.score([("a", "g", "s"), ("b", "g"), (None, "g"), ("a", "g", "s")])
    said = Verdict(True, 0.5, "said")
    assert verdicts == [said, Verdict(False, 0.5, "said"), Verdict(False, 0.0, "not_text"), said]
    assert asked == [
        {"kind": "judge", "answer": "a", "gold": "g", "statement": "s"},
        {"kind": "judge", "answer": "b", "gold": "g", "statement": ""},
    ]
    assert (pool.counters["screened"], pool.counters["deduplicated"]) == (1, 1)
    asked.clear()
    assert pool._verdict({"reason": "x"}) == Verdict(False, 0.0, "x")
    assert pool._verdict({"correct": 1, "reason": 7}) == Verdict(False, 0.0, "7")


def test_golds_are_asked_of_workers_where_they_are_text() -> None:
    class Pool(RewardPool):
        def start(self) -> None:
            return None

        def _ask_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert requests == [{"kind": "gold", "gold": gold} for gold in ("a", "b")]
            return [{"reason": "gold_unparsed"}, {"reason": "usable"}]

    assert Pool("math", workers=1).check_golds(["a", None, "b", 5]) == {
        0: "gold_unparsed", 1: "gold_not_text", 3: "gold_not_text",
    }  # fmt: skip
