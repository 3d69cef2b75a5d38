"""The parts of the math verifier, each at its bounds: what is refused, shapes, notations, numbers, comparisons."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from sympy import Float, Integer, Symbol

from megatron_daro.reward.base import Job, ScreenLimits, VerifierSpec
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
from megatron_daro.reward.normal_form import (
    as_union,
    assignments,
    canonical,
    chain,
    in_order,
    is_name,
    key,
    number,
    words,
)
from megatron_daro.reward.screening import Shape, is_region, named_value, refusal, shape_of
from megatron_daro.reward.symbolic import _differ_as_floats, _surely_differ, equal, parsed
from megatron_daro.types import Verdict

LIMITS = ScreenLimits()


@pytest.mark.parametrize(
    ("allowed", "refused", "reason"),
    [
        ("x" * 1000, "x" * 1001, "too_long"),
        ("9" * 300, "9" * 301, "too_long"),
        ("{" * 24 + "}" * 24, "{" * 25 + "}" * 25, "too_complex"),
        ("{}" * 25, "}{" * 2 + "{" * 25, "too_complex"),
        ("(" * 8 + ")" * 8, "([" * 4 + "(", "too_complex"),
        ("()" * 9, "[" * 9, "too_complex"),
        ("2^{10000}", "2^{10001}", "too_complex"),
        ("2**10000", "2**10001", "too_complex"),
        ("2^10000", "2^ -10001", "too_complex"),
        ("2^{100 * 100}", "2^{100 * 101}", "too_complex"),
        ("2^(100/1000000)", "2^(1000000/100)", "too_complex"),
        ("2^{x + 9}", "2^{x + 99999}", "too_complex"),
        ("2^{9^3}", "2^{9^9}", "too_complex"),
        ("2^{2^{10}}", "2^{2^{14}}", "too_complex"),
        ("x^{y^{z}}", "x^{y^{z^{w^{v}}}}", "too_complex"),
        ("2^3^4", "2^3^9", "too_complex"),
        ("2^{3!}", "2^{9!}", "too_complex"),
        ("2^{3.5}", "2^{10000.5}", "too_complex"),
        ("2^{a}9999999", "2^{a9999999}", "too_complex"),
        ("2000!", "2001!", "too_complex"),
        ("2000 !", "2001 !", "too_complex"),
        ("(2000)!", "(2001)!", "too_complex"),
        ("(n)!", "(n)!!", "too_complex"),
        ("3!+3!", "3!!", "too_complex"),
        ("(40 \\cdot 50)!", "(40 \\cdot 51)!", "too_complex"),
        ("(3)+3!", "(3!)!", "too_complex"),
        ("n!", "2^{3}!", "too_complex"),
        ("2^3+3!", "2^3!", "too_complex"),
        ("9999+(3)!", "(9999+(3))!", "too_complex"),
        ("!", "9999!", "too_complex"),
        ("\\binom{2000}{3}", "\\binom{2001}{3}", "too_complex"),
        ("\\dbinom{n}{9999}", "\\dbinom{9999}{n}", "too_complex"),
        ("2000 \\choose 1", "2001 \\choose 1", "too_complex"),
    ],
)
def test_an_answer_is_refused_just_beyond_each_limit(allowed: str, refused: str, reason: str) -> None:
    assert (refusal(allowed, LIMITS), refusal(refused, LIMITS)) == (None, reason)


def test_a_limit_of_ten_to_the_300_is_none() -> None:
    free = ScreenLimits(max_exponent=10**300, max_factorial=10**300, max_tower=9)
    assert refusal("9^{9^{9^9}} + (10^9)! + \\binom{10^9}{2}", free) is None


def test_an_unclosed_exponent_is_read_to_its_end() -> None:
    assert refusal("2^{99999", LIMITS) == refusal("2^(99999", LIMITS) == "too_complex" and refusal("2^", LIMITS) is None


@pytest.mark.parametrize(
    ("text", "kind", "items"),
    [
        ("{{ (1, 2) }}", "round", ("1", "2")),
        ("\\langle 1; 2 \\rangle", "round", ("1", "2")),
        ("[1,2)", "half_left", ("1", "2")),
        ("(1,2]", "half_right", ("1", "2")),
        ("[1,2]", "square", ("1", "2")),
        ("\\{1\\}", "set", ("1",)),
        ("\\{ \\}", "leaf", ()),
        ("(1)", "leaf", ()),
        ("((1,2))", "round", ("1", "2")),
        ("()", "leaf", ()),
        ("[1]", "leaf", ()),
        ("(1,2),(3,4)", "list", ("(1,2)", "(3,4)")),
        ("(1)(2,3)", "leaf", ()),
        ("{1},{2}", "list", ("{1}", "{2}")),
        ("\\{x \\pm 1, \\pm 2\\}", "set", ("x + 1", "x - 1", "2", "- 2")),
        ("a \\pm b \\mp c", "leaf", ()),
        ("a \\pm b \\pm c", "leaf", ()),
        ("(1 \\pm 2, 3)", "round", ("1 \\pm 2", "3")),
        ("1 \\text{ and } 2", "list", ("1", "2")),
        ("1, or 2", "list", ("1", "2")),
        (",1,", "leaf", ()),
        ("\\begin{pmatrix} 1 \\\\[2pt] 2 \\\\ \\end{pmatrix}", "column", ("1", "2")),
        ("\\begin{bmatrix} 1 & 2 \\end{bmatrix}", "row", ("1", "2")),
        ("\\begin{matrix} 1 & 2 \\\\ 3 & 4 \\end{matrix}", "leaf", ()),
        ("\\begin{vmatrix} 1 \\\\ 2 \\end{vmatrix}", "leaf", ()),
        ("\\begin{pmatrix} 1 \\end{pmatrix}", "leaf", ()),
        ("\\begin{cases} 1,2 \\end{cases}", "leaf", ()),
        ("f(1,2)", "leaf", ()),
        ("(1,2>", "leaf", ()),
    ],
)
def test_the_outer_shape_of_an_answer(text: str, kind: str, items: tuple[str, ...]) -> None:
    shape = shape_of(text)
    assert (shape.kind, shape.items) == (kind, items)


def test_braces_around_a_part_only_are_kept() -> None:
    assert (
        shape_of("{1}+{2}") == Shape("leaf", "{1}+{2}")
        and shape_of("{ x }").text == "x"
        and shape_of("{x").text == "{x"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("S = \\{1\\}", ("S", "\\{1\\}")),
        ("x \\in [1,2)", ("x", "[1,2)")),
        ("(x,y) = (1,2)", ("(x,y)", "(1,2)")),
        ("x = (1)+2", None),
        ("x = 2", None),
        ("(1,2)", None),
    ],
)
def test_a_name_before_brackets(text: str, named: tuple[str, str] | None) -> None:
    assert named_value(text) == named


def test_regions_are_written_with_order_or_sets() -> None:
    for text in ("x<1", "x \\le 1", "x \\geq 1", "\\mathbb{R}", "A \\cap B", "x \\neq 1", "\\gt"):
        assert is_region(text)
    assert not is_region("\\left(x\\right)") and not is_region("\\inf")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1.5e3", "1.5 \\times 10^{3}"),
        ("1e-08", "1 \\times 10^{-8}"),
        ("sqrt(2)", "\\sqrt{2}"),
        ("np.sqrt(x) + math.acos(y)", "\\sqrt{x} + \\arccos(y)"),
        ("atan(1)*asin(2)", "\\arctan(1)*\\arcsin(2)"),
        ("x**2", "x^2"),
        ("1./3", "1/3"),
        ("7.", "7"),
        ("7. ,;", "7"),
        ("= 7", "7"),
        ("== 7", "== 7"),
        ("1 234 567", "1234567"),
        ("12 34", "12 34"),
        ("12,345.5", "12345.5"),
        ("1,23", "1,23"),
        ("0.\\overline{3}", "\\frac{3}{9}"),
        ("2.1\\dot{6}", "\\frac{195}{90}"),
        ("0.\\overline{" + "1" * 59 + "}", "\\frac{" + "1" * 59 + "}{" + "9" * 59 + "}"),
        ("0.\\overline{" + "1" * 60 + "}", "0.\\overline{" + "1" * 60 + "}"),
        ("\\left( x \\right.", "( x"),
        ("$x$ \\[y\\] \\(z\\)", "x y z"),
        ("a \\\\[2pt] b $", "a \\\\[2pt] b"),
        ("\\displaystyle x\\!\\,y~z", "x y z"),
        ("\\tfrac12+\\cfrac12", "\\frac12+\\frac12"),
        ("x \u2264 \u00bd", "x \\leq \\frac{1}{2}"),
        ("x\u00b2\u207b\u2081", "x^{2-}_{1}"),
        ("\uff11\uff12", "12"),
        ("\u2153 \u00e9", "\\frac{1}{3} \u00e9"),
        ("\u215f2", "\u215f2"),
        ("5\u20136", "5-6"),
        ("\\lbrace 1 \\rbrace", "\\{ 1 \\}"),
    ],
)
def test_one_notation_for_the_same_answer(text: str, same: str) -> None:
    assert canonical(text) == same


def test_equal_answers_have_one_key() -> None:
    assert key("\\frac{1}{2} x^{ 2 }") == "\\frac12x^2" and key("1 2 3") == "1 2 3" and key("x_{12}") == "x_{12}"
    assert key("\\mathrm{ a b }") == "\\text{ab}" and key("2 x") == "2x" and key("x 2") == "x2"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\text{East}", "east"),
        ("yes", "yes"),
        ("ab", None),
        ("m", None),
        ("\\text{m}", "m"),
        ("(C)", "C"),
        ("C)", None),
        ("\\textbf{(D).}", "D"),
        ("\\text{a}2", None),
        ("\\text{no}", "no"),
        ("a-b c", "a-b c"),
        ("a-b", None),
        ("O'Neil", "o'neil"),
    ],
)
def test_words_and_letters_of_choices(text: str, found: str | None) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 1.50 ", Decimal("1.5")),
        ("-.5", Decimal("-0.5")),
        ("2 \\cdot 10^{-3}", Decimal("0.002")),
        ("2 \\times 10^3", Decimal(2000)),
        ("-\\frac{-1}{2}", Fraction(1, 2)),
        ("+3/4", Fraction(3, 4)),
        ("- 3 / 4", Fraction(-3, 4)),
        ("1/0", None),
        ("50\\%", Decimal("0.5")),
        ("50 percent", Decimal("0.5")),
        ("1/2%", Fraction(1, 200)),
        ("x%", None),
        ("%", None),
        ("x", None),
        ("1+1", None),
    ],
)
def test_literal_numbers_have_a_value(text: str, value: Decimal | Fraction | None) -> None:
    found = number(text)
    assert found == value and type(found) is type(value)


def test_equations_are_split_outside_of_brackets() -> None:
    assert chain("a = b = (c=d)") == ["a", "b", "(c=d)"] and chain(" x ") == ["x"]
    assert chain("\\{x=1\\}=y") == ["\\{x=1\\}", "y"] and chain("{a=b]=c") == ["{a=b]", "c"]
    assert chain("\\begin{x}=\\end{x}=1") == ["\\begin{x}=\\end{x}", "1"] and chain(")=1") == [")", "1"]


def test_names_and_their_values() -> None:
    assert all(map(is_name, ("x", " x_1 ", "\\alpha", "f'", "x_{max}", "angle"))) and not is_name("2x")
    assert assignments(("x_{1}=2", "y = 3")) == {"x_1": "2", "y": "3"}
    assert assignments(("x=2",)) is None and assignments(("x=2", "x=3")) is None
    assert (
        assignments(("x=2", "y")) is None
        and assignments(("x=2", "2=y")) is None
        and assignments(("x=1=2", "y=1")) is None
    )
    assert in_order({"y": "1", "x": "2"}) == ("2", "1") and in_order({"yy": "1", "x": "2"}) == ("1", "2")


@pytest.mark.parametrize(
    ("text", "union"),
    [
        ("x<0 or x>3", "(-\\infty,0) \\cup (3,\\infty)"),
        ("x \\leq 0 \\lor x \\ge 3", "(-\\infty,0] \\cup [3,\\infty)"),
        ("1 \\lt x \\le 2, or x \\gt 3", "(1,2] \\cup (3,\\infty)"),
        ("1 \\leq x < 2 \\vee x \\lt -1", "[1,2) \\cup (-\\infty,-1)"),
        ("x<0", None),
        ("x<0 or y", None),
    ],
)
def test_alternatives_become_a_union(text: str, union: str | None) -> None:
    assert as_union(text) == union


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


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("k", "K", "no_match"),
        ("\\Delta", "\\delta", "no_match"),
        ("k+K", "K+k", "match"),
        ("A^{T}", "A", "no_match"),
        ("f'(x)", "f(x)", "no_match"),
        ("x + + / ) 3", "x", "gold_unparsed"),
        ("x", "x + + / ) 3", "answer_unparsed"),
        ("x", "x+0", "match"),
        ("x+0", "x", "match"),
        ("x", "x+1", "no_match"),
        ("0=0", "0=0", "match"),
        ("0=0", "1=1", "no_match"),
        ("x=x", "0=0", "no_match"),
        ("0.0000672", "0.0000674", "no_match"),
        ("0.0000672", "0.00006720001", "match"),
        ("1/3", "0.3333333", "match"),
        ("x+1000", "x+1001", "no_match"),
        ("x+1", "1+x", "match"),
    ],
)
def test_two_leaves_are_compared_by_meaning(gold: str, answer: str, outcome: str) -> None:
    assert equal(gold, answer) == outcome


def test_values_at_a_point_show_a_sure_difference_only() -> None:
    x, one = Symbol("x"), Integer(1)
    assert _surely_differ(x + 1, x + 2) and not _surely_differ(x + 1, 1 + x) and not _surely_differ(x, one)
    assert not _surely_differ(one * 1000, Float(1000.9)) and _surely_differ(one * 1000, Float(1002))
    assert not _surely_differ(parsed("\\frac{1}{0}"), one)  # type: ignore[arg-type]
    assert not _surely_differ(parsed("x<1"), one)  # type: ignore[arg-type]
    assert _differ_as_floats(Float(1.0), Float(1.0001)) and not _differ_as_floats(Float(1.0), Float(1.000005))
    assert not _differ_as_floats(Integer(1), Integer(2)) and not _differ_as_floats(x, Float(1.0))
    assert not _differ_as_floats(parsed("x<1"), Float(1.0))  # type: ignore[arg-type]
