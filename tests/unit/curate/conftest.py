"""Rows made by hand."""

from __future__ import annotations

import pytest

from megatron_daro.types import Prompt
from megatron_daro.workshop.curate.rows import Row
from megatron_daro.workshop.curate.statements import statement_of


def row_of(text: str, *answers: str, number: int = 1, source: str = "made") -> Row:
    prompt = Prompt(
        id=f"id{number}", answer=answers[0], alternatives=tuple(answers[1:]), source=source, text=text, category=""
    )
    return Row(f"made.jsonl:{number}", prompt, statement_of(text))


@pytest.fixture
def rows_of():
    """(text, answer, ...) tuples -> rows numbered from 1."""
    return lambda *cases: [row_of(*case, number=i) for i, case in enumerate(cases, start=1)]
