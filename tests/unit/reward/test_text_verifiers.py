"""The integer rule, the literal rule, final answers, and golds that cannot be used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.errors import RewardError
from megatron_daro.reward import VerifierSpec, build_verifier
from megatron_daro.reward.factory import verifier_of
from megatron_daro.types import Verdict

INTEGER = build_verifier("integer")


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        ("work\nAnswer: 42", "42", "match"),
        ("Answer: 41\nwait\nAnswer: 42", "42", "match"),
        ("Answer: 42\nwait\nAnswer: 41", "42", "no_match"),
        ("**Answer:** $\\boxed{1,042}$.", "1042", "match"),
        ("answer: x = 042", "42", "match"),
        ("Answer: ４２", "42", "match"),
        ("Answer: 4²", "42", "answer_unparsed"),
        ("Answer:\n42", "42", "match"),
        ("Answer: -7", "-7", "match"),
        ("Answer: 7", "-7", "no_match"),
        ("Answer: 27", "27.0", "match"),
        ("Answer: 42 apples", "42", "answer_unparsed"),
        ("Answer: 3/4", "3", "answer_unparsed"),
        ("The answer is 42", "42", "no_answer"),
        ("Answer: ", "42", "no_answer"),
        ("Answer: " + "9" * 500, "42", "too_long"),
        ("Answer: 42", "\\frac{1}{2}", "gold_unparsed"),
        ("Answer: 42", "", "gold_empty"),
        (None, "42", "not_text"),
        (b"Answer: 42", "42", "not_text"),
    ],
)
def test_dapo_integer_rule(text: str, gold: str, reason: str) -> None:
    verifier = build_verifier("integer", correct_reward=1.0, incorrect_reward=-1.0)
    correct = reason == "match"
    assert verifier.verify(text, gold) == Verdict(correct, 1.0 if correct else -1.0, reason)


@pytest.mark.parametrize("text", ["so \\boxed{42}", "it is 42"])
def test_integer_rule_without_the_line_needs_lenient_mode(text: str) -> None:
    assert build_verifier("integer").verify(text, "42").reason == "no_answer"
    assert build_verifier("integer", strict=False).verify(text, "42").reason == "match"


@given(st.integers(), st.sampled_from(["{}", "{:,}", "${}$", "\\boxed{{{}}}", " {}. ", "\\text{{{}}}", "x = {}"]))
def test_an_integer_is_read_in_its_usual_dress(value: int, layout: str) -> None:
    assert INTEGER.verify(f"Answer: {layout.format(value)}", str(value)).correct
    assert not INTEGER.verify(f"Answer: {layout.format(value)}", str(value + 1)).correct


@pytest.mark.parametrize(
    ("text", "gold", "marker", "reason"),
    [
        ("3+4=7\n#### 7", "7", "####", "match"),
        ("#### 8\n#### 7", "7", "####", "match"),
        ("#### 7.0", "7", "####", "no_match"),
        ("7", "7", "####", "no_answer"),
        ("#### ", "7", "####", "no_answer"),
        ("#### 18", "He has 9*2=18\n#### 18", "####", "match"),
        ("12+34: carry 0, 46#46", "46", "#", "match"),
        ("12+34: carry 0, 46#47", "46", "#", "no_match"),
        ("#### 7", "#### ", "####", "gold_empty"),
        (7, "7", "####", "not_text"),
    ],
)
def test_literal_rule(text: str, gold: str, marker: str, reason: str) -> None:
    assert build_verifier("exact", marker=marker).verify(text, gold).reason == reason


def test_literal_rule_takes_the_whole_text_in_lenient_mode() -> None:
    assert build_verifier("exact", strict=False).verify(" 7 ", "7").correct


@pytest.mark.parametrize(("name", "marker", "named"), [("maths", "####", "maths"), ("exact", "", "marker")])
def test_an_unknown_verifier_and_an_empty_marker_are_refused(name: str, marker: str, named: str) -> None:
    with pytest.raises(RewardError, match=named):
        build_verifier(name, marker=marker)


@pytest.mark.parametrize(
    ("name", "strict", "text", "answer"),
    [
        ("exact", True, "so\n#### 7 \nmore", "7"),
        ("exact", True, "7", None),
        ("exact", False, " 7 ", "7"),
        ("integer", True, "Answer: 1,007", "1007"),
        ("integer", True, "\\boxed{7}", None),
        ("integer", False, "3 so 08", "8"),
        ("math", True, "\\boxed{\\dfrac{1}{2}}", "\\frac12"),
        ("math", True, "so 1.5", None),
        ("math", False, "so 1.5", "1.5"),
        ("toy_verifier:LastDigit", True, " all of it ", "all of it"),
    ],
)
def test_the_final_answer_that_a_majority_is_taken_over(name: str, strict: bool, text: str, answer: str | None) -> None:
    assert verifier_of(VerifierSpec(name, strict=strict)).answer_of(text) == answer


@pytest.mark.parametrize(
    ("name", "gold", "problem"),
    [
        ("exact", "x #### 7", None),
        ("exact", "x ####", "gold_empty"),
        ("exact", None, "gold_not_text"),
        ("integer", "1,007", None),
        ("integer", "seven", "gold_unparsed"),
        ("math", "(1,x+1)", None),
        ("math", "(1, x + + / ) 3", "gold_unparsed"),
        ("math", "9^{9^{9^9}}", "gold_unparsed"),
        ("math", "$ $", "gold_empty"),
        ("toy_verifier:LastDigit", "", None),
        ("toy_verifier:LastDigit", 7, "gold_not_text"),
    ],
)
def test_what_is_wrong_with_a_gold(name: str, gold: object, problem: str | None) -> None:
    assert verifier_of(VerifierSpec(name)).gold_problem(gold) == problem


def test_importing_the_package_loads_no_algebra_system() -> None:
    code = (
        "import sys, megatron_daro.reward, megatron_daro.reward.pool, megatron_daro.reward.math;"
        "sys.exit(any(name in sys.modules for name in ('sympy', 'math_verify', 'torch', 'ray', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
