"""Two expressions are equal by what they mean, or surely different by their values at a point."""

from __future__ import annotations

import pytest
from sympy import Float, Integer, Symbol

from megatron_daro.reward.symbolic import _differ_as_floats, _surely_differ, equal, parsed


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
