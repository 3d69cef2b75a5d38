"""Rows of files, named by their places, and the books of what was dropped and noted."""

from __future__ import annotations

import json

import pytest

from megatron_daro.errors import DataError
from megatron_daro.workshop.curate.rows import Decisions, Fields, read_all


def test_files_are_named_by_the_ends_of_their_paths(tmp_path):
    paths = [tmp_path / name for name in ("a/x/d.jsonl", "b/x/d.jsonl", "e.jsonl")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"problem": "a b", "answer": "1", "level": [1, 2.0]}) + "\n")
    rows, shared = read_all(paths, Fields(keep=("level", "none")))
    assert [row.place for row in rows] == [
        "a/x/d.jsonl:1",
        "b/x/d.jsonl:1",
        f"{tmp_path.parent.name}/{tmp_path.name}/e.jsonl:1",
    ] and not shared
    assert json.loads(rows[0].kept["level"])[0] == 1 and rows[0].kept["none"] == "null"
    with pytest.raises(DataError, match="no file given"):
        read_all([], Fields())
    (tmp_path / "e.jsonl").write_text(json.dumps({"q": "a", "r": "1"}) + "\n")
    with pytest.raises(
        DataError, match=r"no usable row among 1: .*; the fields are q, r: name two with --problem-field"
    ):
        read_all(paths[2:], Fields())


def test_the_books_add_up_in_the_order_of_the_stages():
    decisions = Decisions(4)
    for row, reason in ((3, "topic"), (0, "leak"), (1, "proof")):
        decisions.drop(row, reason)
    decisions.note(2, "overlap", "", "b")
    decisions.note(2, "majority")
    decisions.note(2, "overlap", "", "a")
    decisions.note(0, "overlap")
    assert list(decisions.counts().items()) == [("proof", 1), ("leak", 1), ("topic", 1)] and decisions.kept() == [2]
    assert [(n.reason, n.other) for n in decisions.notes_on_kept()] == [
        ("majority", ""),
        ("overlap", "a"),
        ("overlap", "b"),
    ]
    assert decisions.note_counts() == {"overlap": 2, "majority": 1}
    with pytest.raises(ValueError, match="row -1 of 4 cannot be dropped as 'leak'"):
        decisions.drop(-1, "leak")
