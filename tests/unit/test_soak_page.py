"""benchmarks/results/sglang_soak*.md have the tables that the soak's script writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import soak_page

    yield soak_page
    del sys.modules["soak_page"]


def test_the_pages_have_the_tables_of_the_results(soak):
    assert soak.RESULTS
    for results in soak.RESULTS:
        _, mark, rest = results.with_suffix(".md").read_text().partition(soak.MARKS[0] + "\n")
        assert mark and rest.partition(soak.MARKS[1])[0] == soak.tables(json.loads(results.read_text()))


def test_a_page_without_the_marks_is_refused_and_stays_as_it_is(soak, tmp_path):
    results, page = tmp_path / "page.json", tmp_path / "page.md"
    results.write_text(soak.RESULTS[0].read_text())
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="has no lines"):
        soak.write(results)
    assert page.read_text() == "nothing\n"
