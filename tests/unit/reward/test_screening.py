"""Which answers are refused before anything parses them, and the outer shape of the others."""

from __future__ import annotations

import pytest

from megatron_daro.reward.base import ScreenLimits
from megatron_daro.reward.screening import Shape, is_region, named_value, refusal, shape_of

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
