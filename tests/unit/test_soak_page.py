"""benchmarks/results/sglang_soak.md has the tables that the soak's script writes."""

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


def test_the_page_has_the_tables_of_the_results(soak):
    _, mark, rest = soak.PAGE.read_text().partition(soak.MARKS[0] + "\n")
    assert mark and rest.partition(soak.MARKS[1])[0] == soak.tables(json.loads(soak.RESULTS.read_text()))


def test_a_page_without_the_marks_is_refused_and_stays_as_it_is(soak, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    monkeypatch.setattr(soak, "PAGE", page)
    with pytest.raises(SystemExit, match="has no lines"):
        soak.main()
    assert page.read_text() == "nothing\n"
