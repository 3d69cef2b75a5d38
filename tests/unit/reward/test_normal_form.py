"""One notation for the same answer: numbers, words, equations, named values and alternatives."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

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
