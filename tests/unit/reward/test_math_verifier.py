"""MathVerifier in one process: each stage and comparison, and every wrong accept and refusal that was measured."""

from __future__ import annotations

import threading

import pytest
from sympy import Expr

from megatron_daro.reward import ScreenLimits, VerifierSpec, build_verifier
from megatron_daro.reward.base import Job, StagedVerifier
from megatron_daro.reward.math import (
    MathVerifier,
    changes_value,
    compare,
    quick_equal,
    restates,
    unevaluated,
    unit,
    without_unit,
)
from megatron_daro.reward.normal_form import canonical
from megatron_daro.reward.symbolic import _surely_differ, parsed
from megatron_daro.types import Verdict

STRICT = build_verifier("math")
LENIENT = build_verifier("math", strict=False)


def boxed(answer: str, gold: str) -> Verdict:
    return STRICT.verify(f"The answer is $\\boxed{{{answer}}}$.", gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("3\\sqrt{13}", "3"), ("6 - 5i", "5"), ("1,3,5", "1.3"), ("1,3,5", "1"), ("\\frac{14}{3}", "14")],
)
def test_gold_is_boxed_before_parsing_so_that_it_is_read_whole(gold: str, answer: str) -> None:
    assert not boxed(answer, gold).correct
    assert boxed(gold, gold).correct


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("4.5e33", "4.5 \\times 10^{33}", True),
        ("4.5e33", "45 \\cdot 10^{32}", True),
        ("4.5e33", "4.5e33", True),
        ("4.5e33", "4.5 \\cdot e \\cdot 33", False),
        ("4.5e33", "4.5e32", False),
        ("1.325e-27", "\\frac{1325}{10^{30}}", True),
        ("2.7778e-6", "0.0000027778", True),
        ("1e-8", "0", False),
    ],
)
def test_e_notation_is_a_power_of_ten(gold: str, answer: str, correct: bool) -> None:
    assert boxed(answer, gold).correct is correct


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("np.arcsin(10/13)", "\\arcsin(\\frac{10}{13})", True),
        ("np.arcsin(10/13)", "\\arcsin(\\frac{10}{14})", False),
        ("-1./3", "-\\frac{1}{3}", True),
        ("-3./2", "-1.5", True),
        ("-3./2", "1.5", False),
        ("E_{1},E_{2}", "E_2, E_1", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\text{Evelyn}", "\\textbf{evelyn}", True),
        ("\\text{Evelyn}", "Navin", False),
        ("\\text{(C)}", "C", True),
        ("\\text{(C)}", "B", False),
        ("5.4 \\text{ cents}", "5.4", True),
        ("5.4 \\text{ cents}", "5.4 \\text{ dollars}", False),
        ("864 \\mbox{ inches}^2", "864", True),
        ("\\$32,\\!348", "32348", True),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100", True),
        ("58,500", "58500", True),
        ("90^\\circ", "90", True),
        ("27.0", "27", True),
        ("$69$,$84$", "84, 69", True),
    ],
)
def test_text_unit_and_code_golds(gold: str, answer: str, correct: bool) -> None:
    assert boxed(answer, gold).correct is correct


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("[2,5]", "2 \\le x \\le 5"),
        ("(2,5)", "2 < x < 5"),
        ("(3,4]", "3 < x \\leq 4"),
        ("x \\in [-2,7]", "[-2,7]"),
        ("(5,\\infty)", "x > 5"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1,2)"),
        ("\\begin{bmatrix} -1/3 \\\\ 2/3 \\\\ 5/3 \\end{bmatrix}", "\\left(-\\frac13, \\frac23, \\frac53\\right)"),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "(1,2)"),
        ("1 \\pm \\sqrt{19}", "1-\\sqrt{19}, 1+\\sqrt{19}"),
        ("\\{1\\pm\\sqrt{5},-2\\}", "-2, 1+\\sqrt5, 1-\\sqrt5"),
        ("1,3", "\\{3,1\\}"),
        ("(0,9) \\cup (9,36)", "(9,36)\\cup(0,9)"),
        ("(1,1), (3,2)", "(3,2),(1,1)"),
        ("x=1,2", "x=1 \\text{ or } x=2"),
        ("10\\%", "0.1"),
        ("62.5%", "\\frac{5}{8}"),
        ("2516_8", "2516_{8}"),
        ("(a+5)(b+2)", "ab+2a+5b+10"),
        ("y = 2x + 3", "y=3+2x"),
        ("137 \\frac{1}{2}", "137.5"),
        ("\\frac{1}{3}", "0.333333"),
        ("\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}", "\\begin{bmatrix} -1 & 0 \\\\ 0 & -1 \\end{bmatrix}"),
    ],
)
def test_equal_in_both_orders_of_arguments(left: str, right: str) -> None:
    assert boxed(right, left) == Verdict(True, 1.0, "match")
    assert boxed(left, right) == Verdict(True, 1.0, "match")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("(6,5)", "[6,5]"),
        ("(3,4)", "[3,4]"),
        ("10", "10\\%"),
        ("10", "10%"),
        ("x+10", "(x+10)\\%"),
        ("2516_8", "2516"),
        ("2516_8", "2516_{9}"),
        ("(1,3)", "1,3"),
        ("(1,3)", "\\{1,3\\}"),
        ("[2,5]", "2 < x < 5"),
        ("(3,4]", "(3,4)"),
        ("(1,2)", "(2,1)"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(2,1)"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "1,2"),
        ("(1,1), (3,2)", "(1,3),(1,2)"),
        ("-2,-2", "-2"),
        ("1,2,3", "1,2"),
        ("0.0000672", "0.0000674"),
        ("0.0000672", "\\frac{6.7205}{100000}"),
        ("(x,y)=(1,2)", "(y,x)=(1,2)"),
        ("\\frac{1}{3} E_{1}+\\frac{2}{3} E_{2}", "\\frac{1}{3} E_{1}+\\frac{2}{3} E_{2}+1"),
        ("\\frac{100!}{2^{50}}", "\\frac{100!}{2^{50}}+1"),
        ("\\text{even}", "\\text{odd}"),
    ],
)
def test_different_in_both_orders_of_arguments(left: str, right: str) -> None:
    assert not boxed(right, left).correct
    assert not boxed(left, right).correct


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("first \\boxed{5}, no: \\boxed{6}", "no_match", "no_match"),
        ("first \\boxed{6}, no: \\boxed{5}", "match", "match"),
        ("\\boxed{5} and later \\boxed{6", "no_answer", "no_match"),
        ("so it is 5", "no_answer", "match"),
        ("5 it is, or rather 1,006.5", "no_answer", "no_match"),
        ("\\fbox{5}", "match", "match"),
        ("\\boxed 5", "match", "match"),
        ("\\boxed{\\boxed{5}}", "match", "match"),
        ("\\boxedx{5} nothing", "no_answer", "match"),
        ("\\boxed{}", "no_answer", "no_answer"),
        ("no number", "no_answer", "no_answer"),
        ("", "no_answer", "no_answer"),
    ],
)
def test_last_box_wins_and_a_trailing_number_counts_in_lenient_mode_only(text: str, strict: str, lenient: str) -> None:
    assert STRICT.verify(text, "5").reason == strict
    assert LENIENT.verify(text, "5").reason == lenient


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9^{9^{9^9}}", "too_complex"),
        ("9**9**9**9", "too_complex"),
        ("2^{1000000000}", "too_complex"),
        ("2^{10^9}", "too_complex"),
        ("(10^9)!", "too_complex"),
        ("1000000000!", "too_complex"),
        ("((100)!)!", "too_complex"),
        ("5^{99}!", "too_complex"),
        ("5^9!", "too_complex"),
        ("\\binom{1000000000}{500000000}", "too_complex"),
        ("{" * 3000 + "5" + "}" * 3000, "too_long"),
        ("{" * 100 + "5" + "}" * 100, "too_complex"),
        ("(" * 30 + "5" + ")" * 30, "too_complex"),
        ("9" * 400, "too_long"),
        ("x+" * 600 + "1", "too_long"),
    ],
)
def test_pathological_answers_are_refused_before_any_parsing(answer: str, reason: str) -> None:
    assert isinstance(STRICT, StagedVerifier)
    assert STRICT.screen(f"\\boxed{{{answer}}}", "5 x") == Verdict(False, 0.0, reason)


@pytest.mark.parametrize(
    "answer",
    ["2^{1009}", "10^{100}", "e^{x^{2}}", "\\frac{100!}{2^{50}}", "\\frac{n!}{(n-k)!}", "\\binom{2n}{n}", "((a+b)c+d)e"]
    + ["x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", "\\frac{2016}{2017^{2}}", "x^{5/2}", "e^{-\\frac{t}{R C}}"],
)
def test_ordinary_answers_pass_the_screen(answer: str) -> None:
    assert isinstance(STRICT, StagedVerifier)
    assert isinstance(STRICT.screen(f"\\boxed{{{answer}}}", "5 z"), Job)


def test_screen_limits_are_a_setting() -> None:
    verifier = MathVerifier(VerifierSpec(limits=ScreenLimits(max_exponent=10**10)))
    assert isinstance(verifier.screen("\\boxed{2^{1000000000}}", "5 x"), Job)


def test_an_answer_equal_to_a_huge_gold_is_literally_right() -> None:
    assert boxed("9^{9^{9^9}}", "9^{9^{9^9}}").correct


@pytest.mark.parametrize("answer", [None, b"\\boxed{5}", 5, 5.0, ["\\boxed{5}"]])
def test_an_answer_that_is_not_text_is_said_so(answer: object) -> None:
    assert STRICT.verify(answer, "5") == Verdict(False, 0.0, "not_text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gold", "reason"), [("", "gold_empty"), ("  ", "gold_empty"), (None, "gold_not_text"), (5, "gold_not_text")]
)
def test_unusable_golds_are_said_so(gold: object, reason: str) -> None:
    assert STRICT.verify("\\boxed{5}", gold) == Verdict(False, 0.0, reason)  # type: ignore[arg-type]


def test_a_gold_that_cannot_be_parsed_is_matched_literally_and_reported() -> None:
    gold = "\\foo{ / + }} x"
    assert boxed("x_{7}^", "x_{7}^").correct
    assert STRICT.verify("\\boxed{2 x}", gold).reason == "gold_unparsed"
    assert isinstance(STRICT, MathVerifier)
    assert STRICT.gold_problem(gold) == "gold_unparsed"
    assert STRICT.gold_problem("\\frac{1}{2}") is None
    assert STRICT.gold_problem("\\text{east}") is None
    assert STRICT.gold_problem(" ") == "gold_empty"


def test_an_answer_that_cannot_be_parsed_is_said_so() -> None:
    assert boxed("\\frac{x}{", "x+1").reason in ("answer_unparsed", "no_answer")
    assert boxed("x + + / ) 3", "x+1").reason == "answer_unparsed"


def test_rewards_are_those_asked_for() -> None:
    verifier = build_verifier("math", correct_reward=1.0, incorrect_reward=-1.0)
    assert verifier.verify("\\boxed{5}", "5").reward == 1.0
    assert verifier.verify("\\boxed{6}", "5").reward == -1.0


def test_works_outside_the_main_thread_where_signal_time_outs_do_not() -> None:
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(boxed("(x+1)^2", "x^2+2x+1")))
    thread.start()
    thread.join(60)
    assert verdicts == [Verdict(True, 1.0, "match")]


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("60", "60\\text{ miles per hour}", True),  # as many words as a unit may have
        ("60", "60\\text{ nautical miles per hour}", False),
        ("(1,2] \\cup (3,\\infty)", "1 < x \\le 2 \\text{ or } x > 3", True),
        ("[1,2) \\cup (3,\\infty)", "1 \\le x < 2 \\text{ or } x > 3", True),
        ("(1,2) \\cup (3,\\infty)", "1 < x \\le 2 \\text{ or } x > 3", False),
        ("[1,2] \\cup (3,\\infty)", "1 \\le x < 2 \\text{ or } x > 3", False),
    ],
)
def test_units_of_three_words_and_each_end_of_an_interval(gold: str, answer: str, correct: bool) -> None:
    assert boxed(answer, gold).correct is correct


@pytest.mark.parametrize("answer", ["\\text{or more}", "  \\text{or more}"])
def test_words_with_no_value_before_them_are_no_unit(answer: str) -> None:
    assert not changes_value(answer) and changes_value("5" + answer)
    assert unit(answer) is None and without_unit(answer) == answer


@pytest.mark.parametrize("answer", ["\\int_0^{10^{9}} \\sin(x^2) dx", "\\lim_{x\\to 0} \\frac{\\sin(1/x)}{x}", "f(2)"])
def test_what_has_no_value_yet_is_not_computed_to_look_for_a_difference(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quadrature of such an integral may take minutes; the proof of equality is not begun here."""
    asked: list[str] = []
    monkeypatch.setattr(Expr, "evalf", lambda self, *options, **names: asked.append(str(self)))
    gold, value = parsed("3"), parsed(answer)
    assert gold is not None and value is not None
    assert not _surely_differ(gold, value) and not _surely_differ(value, gold) and not asked


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("5", "", "no_answer"),
        ("1/3", "0.33333", "no_match"),
        ("1/3", "0.333333", None),
        ("0.333333", "1/3", None),
        ("0.5", "1/2", "match"),
        ("1/2", "0.50", "match"),
        ("0.5", "0.50", "match"),
        ("1/2", "2/4", "match"),
        ("1/2", "1/3", "no_match"),
        ("0.5", "x", None),
        ("\\text{east}", "\\textbf{East}", "match"),
        ("\\text{east}", "west", "no_match"),
        ("(C)", "C", "match"),
        ("(C)", "D", "no_match"),
        ("\\text{east}", "5", None),
        ("5", "east", None),
        ("1a_{16}", "1A_{16}", "match"),
        ("012_3", "12_3", "match"),
        ("12_3", "12_4", "no_match"),
        ("12_3", "x+12_3", "no_match"),
        ("12_3+x", "12_3 + x", "match"),
    ],
)
def test_what_needs_no_algebra_is_decided_without(gold: str, answer: str, outcome: str | None) -> None:
    assert quick_equal(gold, answer) == outcome


def test_brackets_within_brackets_have_an_end() -> None:
    assert compare("x", "y", 7) == "too_complex" and compare("5", "5", 6) == "match"
    deep = "((((((((x,1),1),1),1),1),1),1),1)"
    assert compare(deep.replace("x", "a"), deep.replace("x", "b"), 0) == "too_complex"


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("(x,1)", "(x+0,1)", "match"),
        ("(x,1)", "(x,2)", "no_match"),
        ("(x,1)", "(1,x)", "no_match"),
        ("(1,2,3)", "(1,2)", "no_match"),
        ("\\{x,y\\}", "y,x", "match"),
        ("x,x", "x,y", "no_match"),
        ("x,y,z", "z+0,x,y+0", "match"),
        ("x + + / ) 3,y", "x,z", "gold_unparsed"),
        ("(1,2)", "\\{1,2\\}", "no_match"),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "no_match"),
        ("x=1, y=2", "x=1, z=2", "no_match"),
        ("x=1, y=2", "y=2, x=0+1", "match"),
        ("x=1, y=2", "[1,2]", "no_match"),
        ("x=1, y=2", "(1,2,3)", "no_match"),
        ("x=1, y=2", "(1,2)", "match"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "x=1, y=2", "match"),
        ("(1,2)", "3", "no_match"),
        ("S=\\{1,2\\}", "T=\\{2,1\\}", "match"),
        ("(x,y)=(1,2)", "(y,x)=(1,2)", "no_match"),
        ("x\\%", "\\frac{x}{100}", "match"),
        ("x\\%", "x", "no_match"),
        ("2x \\text{ cms}", "x+x \\text{ CM}", "match"),
        ("2x \\text{ cm}", "2x \\text{ km}", "no_match"),
        ("2x \\text{ cm}^2", "2x \\text{ cm}^3", "no_match"),
        ("x", "x \\text{ or so}", "no_match"),
        ("x \\text{ or so}", "x \\text{ or so}", "match"),
        ("2x", "y=2x", "match"),
        ("2x", "y=x+x=2x", "match"),
        ("2x", "2x=y", "match"),
        ("8", "2^3=9=8", "no_match"),
        ("8", "2^3=8", "match"),
        ("8", "8=", "match"),
        ("8", "=", "no_answer"),
        ("x>5", "y=x>5", "no_match"),
    ],
)
def test_comparison_by_shape_and_leaf(gold: str, answer: str, outcome: str) -> None:
    assert compare(canonical(gold), canonical(answer), 0) == outcome


@pytest.mark.parametrize(
    ("answer", "gold", "refused"),
    [
        ("S = \\sum k", "5", True),
        ("\\sum k = 5", "5", False),
        ("\\sum k = n", "\\sum k", False),
        ("\\prod k", "\\sum k", True),
        ("\\operatorname{gcd}(1,2)", "\\gcd(1,2)", False),
        ("\\sin x", "5x", False),
        ("\\sin 1", "5\\pi", True),
        ("\\sin 1", "5\\sqrt{2}", True),
        ("\\sin 1", "0.84", False),
        ("5!", "120", True),
        ("5!", "6!", False),
        ("x+1=5", "x=4", True),
        ("x=4", "x=4", False),
        ("x+1=5", "x+y=4", False),
        ("x+1=5", "x=y", False),
        ("5", "x=4", False),
        ("2x>10", "x>5", True),
        ("x>5", "x>5", False),
        ("2x>10", "2x>10", False),
        ("2x>10", "[5,6]", True),
        ("2x>10", "(5,6)", True),
        ("2x>10", "5", False),
        ("5<x", "(5,6)", False),
    ],
)
def test_what_only_restates_the_work_is_told_from_an_answer(answer: str, gold: str, refused: bool) -> None:
    assert unevaluated(canonical(answer), canonical(gold)) is refused


def test_an_expression_of_the_statement_is_found_in_its_first_20000_characters() -> None:
    assert restates("x+1", "what is $$x + {1}$$?") and restates("x+1", "if $y = x+1.$") and restates("x+1", "\\(x+1\\)")
    assert not restates("x", "$x$") and not restates("xy", "$xy$") and restates("xyz+", "$xyz+$")
    assert not restates("abc", "$abc$") and not restates("12/5", "$12/5$") and not restates("x+1", "x+1")
    assert restates("x+1,", "$x+1$") and restates("x+1", "$y = x+1.; z$")
    assert restates("x+1", " " * 19_995 + "$x+1$") and not restates("x+1", " " * 19_996 + "$x+1$")


@pytest.mark.parametrize(
    ("text", "bare", "name", "changed"),
    [
        ("5 \\text{ Apples}", "5", "apple", False),
        ("5 \\text{ m}^{2}", "5", "m^2", False),
        ("5 square units", "5", None, False),
        ("5 cm^2", "5", None, False),
        ("x cm", "x cm", None, False),
        ("\\text{ cm}", "\\text{ cm}", None, False),
        ("5 \\text{a b c}", "5", "a b c", True),
        ("5 \\text{x y z}", "5", "x y z", False),
        ("5 \\text{x y z w}", "5", "x y z w", True),
        ("5 \\text{ Million}", "5", "million", True),
    ],
)
def test_units_are_told_from_words_that_change_a_value(text: str, bare: str, name: str | None, changed: bool) -> None:
    assert (without_unit(text), unit(text), changes_value(text)) == (bare, name, changed)


def test_a_long_answer_is_compared_as_text_or_in_a_worker() -> None:
    strict = MathVerifier(VerifierSpec(limits=ScreenLimits(max_chars=5)))
    assert strict.screen("\\boxed{x+1+y+z}", " x+1+y+z ") == Verdict(True, 1.0, "match")
    assert strict.screen("\\boxed{x+1+y+z}", "5") == Verdict(False, 0.0, "too_long")
    assert strict.screen("\\boxed{x+1+y}", "x+1+y").reason == "match" and strict.screen("\\boxed{x+1+}", "5 y") == Job(
        "x+1+", "5 y"
    )
    wide = MathVerifier(VerifierSpec(limits=ScreenLimits(max_chars=5000)))
    assert wide.screen("\\boxed{" + "x" * 1001 + "}", "x" * 1001) == Job("x" * 1001, "x" * 1001)
    assert wide.screen("\\boxed{" + "x" * 1000 + "}", "x" * 1000).reason == "match"
    assert strict.judge(Job("x", "\\boxed{x}")).reason == strict.judge(Job("1+x", "x+1")).reason == "match"
    assert strict.judge(Job("9^{9^{9^9}}", " 9^{9^{9^9}} ")).reason in ("match", "too_long")
