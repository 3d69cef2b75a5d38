"""The category of a row: from which fields, in which order, and what counts as one."""

from __future__ import annotations

import json

import pytest

from megatron_daro.data.formats import ParsedRow, parse_row
from megatron_daro.data.prompts import load_problems


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"category": " digits_3 "}, "digits_3"),
        ({"difficulty": 4}, "4"),
        ({"level": 5.0}, "5"),
        ({"difficulty": 0.25}, "0.25"),
        ({"level": "Level 5", "difficulty": 2}, "2"),
        ({"level": "Level 5", "difficulty": 2, "category": "algebra"}, "algebra"),
        ({"category": None, "level": 1}, "1"),
        ({"category": ["a"]}, ""),
        ({"category": {"name": "a"}}, ""),
        ({"category": True}, ""),
        ({"difficulty": float("nan")}, ""),
    ],
)
def test_category_of_a_row(fields, expected):
    parsed = parse_row({"problem": "1+1=", "answer": "2", **fields})
    assert isinstance(parsed, ParsedRow)
    assert parsed.category == expected


def test_category_reaches_the_prompt_and_not_its_id(tmp_path):
    rows = [{"problem": "1+1=", "answer": "2"}, {"problem": "1+1=", "answer": "2", "category": "digits_1"}]
    found = []
    for row in rows:
        path = tmp_path / "sums.jsonl"
        path.write_text(json.dumps(row) + "\n")
        prompts, _ = load_problems([path])
        found.append(prompts[0])
    assert [prompt.category for prompt in found] == ["", "digits_1"]
    assert found[0].id == found[1].id
