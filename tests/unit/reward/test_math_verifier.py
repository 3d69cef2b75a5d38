"""The math verifier in one process: every wrong accept and refusal that was measured, and what it refuses unparsed."""

from __future__ import annotations

import threading

import pytest

from megatron_daro.reward import ScreenLimits, build_verifier
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
        ("\\boxed  \n {5}", "match", "match"),
        ("\\fbox{6} \\boxed{5}", "match", "match"),
        ("\\boxed{\\frac{10}{2}} x }", "match", "match"),
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
        ("x+" * 600 + "1", "too_long"),
        ("9" * 400, "too_long"),
        ("{" * 3000 + "5" + "}" * 3000, "too_long"),
        *(
            (answer, "too_complex")
            for answer in (
                "{" * 100 + "5" + "}" * 100,
                "(" * 30 + "5" + ")" * 30,
                "[" * 9,
                "9^{9^{9^9}}",
                "9**9**9**9",
                "2^{1000000000}",
                "2^{10^9}",
                "2^ -10001",
                "2^{100 * 101}",
                "2^(1000000/100)",
                "2^{x + 99999}",
                "2^{9!}",
                "2^{10000.5}",
                "2^{a9999999}",
                "x^{y^{z^{w^{v}}}}",
                "1000000000!",
                "2001 !",
                "(10^9)!",
                "(40 \\cdot 51)!",
                "((100)!)!",
                "(n)!!",
                "5^{99}!",
                "5^9!",
                "\\binom{1000000000}{500000000}",
                "\\dbinom{9999}{n}",
                "2001 \\choose 1",
            )
        ),
    ],
)
def test_pathological_answers_are_refused_before_any_parsing(answer: str, reason: str) -> None:
    assert STRICT.verify(f"\\boxed{{{answer}}}", "5 x") == Verdict(False, 0.0, reason)


@pytest.mark.parametrize(
    "answer",
    ["2^{1009}", "10^{100}", "e^{x^{2}}", "\\frac{100!}{2^{50}}", "\\frac{n!}{(n-k)!}", "\\binom{2n}{n}", "((a+b)c+d)e"]
    + ["x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", "\\frac{2016}{2017^{2}}", "x^{5/2}", "e^{-\\frac{t}{R C}}"]
    + ["x" * 400, "9" * 300, "()" * 9, "2^{10000}", "2^{100 * 100}", "2^3^4", "2^{a}9999999", "2000!", "3!+3!"],
)
def test_ordinary_answers_are_compared(answer: str) -> None:
    assert STRICT.verify(f"\\boxed{{{answer}}}", "5 z").reason not in ("too_long", "too_complex")


def test_screen_limits_are_a_setting() -> None:
    limited = build_verifier("math", limits=ScreenLimits(max_chars=5, max_exponent=9))
    assert limited.verify("\\boxed{1+x}", "x+1").reason == "match"
    assert limited.verify("\\boxed{x+1+y+z}", "5").reason == "too_long"
    assert limited.verify("\\boxed{x+1+y+z}", " x+1+y+z ").reason == "match", "literally right"
    assert limited.verify("\\boxed{2^10}", "5 x").reason == "too_complex"


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


def test_a_gold_that_cannot_be_parsed_is_matched_literally() -> None:
    gold = "\\foo{ / + }} x"
    assert boxed("x_{7}^", "x_{7}^").correct
    assert STRICT.verify("\\boxed{2 x}", gold).reason == "gold_unparsed"


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


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1.5e3", "1.5 \\times 10^{3}"),
        ("1e-08", "1 \\times 10^{-8}"),
        ("np.sqrt(x) + math.acos(y)", "\\sqrt{x} + \\arccos(y)"),
        ("x**2", "x^2"),
        ("7. ,;", "7"),
        ("12,345.5", "12345.5"),
        ("2.1\\dot{6}", "\\frac{195}{90}"),
        ("\\left( x \\right.", "( x"),
        ("$x$ \\[y\\] \\(z\\)", "x y z"),
        ("a \\\\[2pt] b $", "a \\\\[2pt] b"),
        ("\\displaystyle x\\!\\,y~z", "x y z"),
        ("\\tfrac12+\\cfrac12", "\\frac12+\\frac12"),
        ("\uff11\uff12", "12"),
        ("5\u20136", "5-6"),
        ("\\lbrace 1 \\rbrace", "\\{ 1 \\}"),
        ("2 \\cdot 10^{-3}", "0.002"),
        ("-\\frac{-1}{2}", "1/2"),
        ("- 3 / 4", "-0.75"),
        ("50 percent", "0.5"),
        ("1/2%", "\\frac{1}{200}"),
        ("x\\%", "\\frac{x}{100}"),
        ("1a_{16}", "1A_{16}"),
        ("012_3", "12_3"),
        ("\\text{no}", "No"),
        ("O'Neil", "o'neil"),
        ("2x \\text{ cms}", "x+x \\text{ CM}"),
        ("5 \\text{ m}^{2}", "5"),
        ("5 square units", "5"),
        ("S=\\{1,2\\}", "T=\\{2,1\\}"),
        ("x,y,z", "z+0,x,y+0"),
        ("x=1, y=2", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("\\{x \\pm 1, \\pm 2\\}", "x+1, x-1, 2, -2"),
    ],
)
def test_one_answer_in_two_notations(left: str, right: str) -> None:
    assert boxed(right, left).reason == "match"
    assert boxed(left, right).reason == "match"


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("1/3", "0.333333", "match"),
        ("1/3", "0.33333", "no_match"),
        ("2x", "y=x+x=2x", "match"),
        ("8", "2^3=9=8", "no_match"),
        ("8", "=", "no_answer"),
        ("12_3", "12_4", "no_match"),
        ("\\text{(D)}", "C", "no_match"),
        ("5", "east", "no_match"),
        ("x,x", "x,y", "no_match"),
        ("(x,1)", "(1,x)", "no_match"),
        ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "no_match"),
        ("x=1, y=2", "x=1, z=2", "no_match"),
        ("x=1, y=2", "(1,2,3)", "no_match"),
        ("2x \\text{ cm}^2", "2x \\text{ cm}^3", "no_match"),
        ("x \\text{ or so}", "x \\text{ or so}", "match"),
        ("x", "x \\text{ or so}", "no_match"),
        ("((((((((x,1),1),1),1),1),1),1),1)", "((((((((y,1),1),1),1),1),1),1),1)", "too_complex"),
        ("\\tanh(e^{e^{e^5}})", "1", "too_complex"),
        ("5", "\\prod k = 5", "match"),
        ("\\sum k", "\\prod k", "unevaluated"),
        ("5\\pi", "\\sin 1", "unevaluated"),
        ("0.84", "\\sin 1", "no_match"),
        ("5x", "\\sin x", "no_match"),
        ("6!", "5!", "no_match"),
        ("x=4", "x+1=5", "unevaluated"),
        ("x+y=4", "x+1=5", "no_match"),
        ("(5,6)", "2x>10", "unevaluated"),
        ("(5,6)", "5<x", "no_match"),
    ],
)
def test_what_decides_between_two_answers(gold: str, answer: str, reason: str) -> None:
    assert boxed(answer, gold).reason == reason
