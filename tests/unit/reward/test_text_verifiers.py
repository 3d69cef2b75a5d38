"""Integer rule, literal rule, extraction functions, and the factory."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.errors import RewardError
from megatron_daro.reward import build_verifier
from megatron_daro.reward.extraction import after_marker, last_answer_line, last_box, normalise_integer, trailing_number
from megatron_daro.reward.normal_form import canonical, key, number
from megatron_daro.types import Verdict


def test_exponents_of_up_to_9999_are_numbers_and_larger_ones_text():
    assert number(r"2 \times 10^{9999}") == Decimal("2e9999") and number(r"2 \cdot 10^{-9999}") == Decimal("2e-9999")
    assert number(r"2 \times 10^{10000}") is None and number(r"2 \times 10^{-10000}") is None


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        ("work\nAnswer: 42", "42", "match"),
        ("Answer: 41\nwait\nAnswer: 42", "42", "match"),
        ("Answer: 42\nwait\nAnswer: 41", "42", "no_match"),
        ("**Answer:** $\\boxed{1,042}$.", "1042", "match"),
        ("answer: x = 042", "42", "match"),
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
def test_normalised_integers_are_the_integer(value: int, layout: str) -> None:
    assert normalise_integer(layout.format(value)) == str(value)


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


@pytest.mark.parametrize(("name", "marker"), [("maths", "####"), ("exact", "")])
def test_factory_names_what_is_allowed(name: str, marker: str) -> None:
    with pytest.raises(RewardError, match="allowed"):
        build_verifier(name, marker=marker)


@given(st.text(alphabet="\\boxed{}fx 12Answer:\n#.,/-$()", max_size=200))
@settings(max_examples=300, deadline=None)
def test_extraction_and_rewriting_never_raise(text: str) -> None:
    for found in (last_box(text), last_answer_line(text), after_marker(text, "#"), trailing_number(text)):
        assert found is None or isinstance(found, str)
    assert isinstance(key(canonical(text)), str)


@given(st.integers(-(10**6), 10**6), st.integers(1, 99))
def test_trailing_number_is_the_last_one(value: int, other: int) -> None:
    assert trailing_number(f"first {other}, then {value}.") == str(value)
    assert trailing_number(f"first {other}, then {value:,}!") == str(value)


@pytest.mark.parametrize(
    ("text", "content"),
    [("\\boxed{a\\}b}", "a\\}b"), ("\\boxed{\\frac{1}{2}} x }", "\\frac{1}{2}"), ("\\boxed", None), ("x", None)],
)
def test_box_contents_with_nested_and_escaped_braces(text: str, content: str | None) -> None:
    assert last_box(text) == content


def test_importing_the_package_loads_no_algebra_system() -> None:
    code = (
        "import sys, megatron_daro.reward, megatron_daro.reward.pool, megatron_daro.reward.math;"
        "sys.exit(any(name in sys.modules for name in ('sympy', 'math_verify', 'torch', 'ray', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "content"),
    [("\\boxed{1 \\\\} is it", "1 \\\\"), ("\\boxed{a \\\\ b} }", "a \\\\ b"), ("\\boxed{1 \\\\\\} x", None)],
)
def test_a_brace_behind_an_escaped_backslash_is_not_escaped(text: str, content: str | None) -> None:
    assert last_box(text) == content
