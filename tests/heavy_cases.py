"""Which cases of a test run by default, and which only with --heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_heavy(cases: Iterable[Any], *light: Any) -> list[Any]:
    """Return the cases of a `parametrize`, all but `light` marked heavy. ValueError: a light one is no case."""
    cases = list(cases)
    if missing := [case for case in light if case not in cases]:
        raise ValueError(f"light cases {missing}: allowed are {cases}")
    return [case if case in light else _heavy(case) for case in cases]


def _heavy(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.heavy)
