"""tools/fetch_eval_suite.py: what is not the published file is refused, what is there is left alone.

The network itself is not tested: files come from a folder, or from file:// in the place of the publisher.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from megatron_daro.workshop.evaluate.suites import SUITES, suite_sets

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data" / "eval"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("fetch_eval_suite", ROOT / "tools" / "fetch_eval_suite.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_eval_suite"] = module
    spec.loader.exec_module(module)
    return module


def test_the_tool_and_the_suite_mean_the_same_files(tool):
    assert {name: source.rows for name, source in tool.SOURCES.items()} == {
        member.name: member.rows for member in SUITES["math6"]
    }


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation files of ../shared/data/eval are not on this machine")
def test_files_are_taken_from_a_folder_or_a_mirror(tool, tmp_path, capsys):
    assert tool.main(["--out", str(tmp_path / "a"), "--from", str(DATA)]) == 0
    assert {one.path.name for one in suite_sets("math6", tmp_path / "a")} == {f"{name}.jsonl" for name in tool.SOURCES}
    for name, source in tool.SOURCES.items():
        place = tmp_path / "mirror" / source.repository / source.commit / source.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((tmp_path / "a" / f"{name}.jsonl").read_bytes())
    (tmp_path / "a" / "minerva.jsonl").write_text("torn")
    capsys.readouterr()
    assert tool.main(["--out", str(tmp_path / "a"), "--mirror", (tmp_path / "mirror").as_uri()]) == 0
    said = capsys.readouterr().out
    assert "minerva.jsonl: 272 rows" in said and said.count("272 rows") == 1


def test_what_was_not_published_is_refused(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "_PAUSE_S", 0.0)
    source = tool.SOURCES["aime24"]
    place = tmp_path / source.repository / source.commit / source.path
    place.parent.mkdir(parents=True)
    place.write_text('{"problem": "1+1?", "answer": 2}\n' * 29)
    assert tool.main(["--out", str(tmp_path / "out"), "--mirror", tmp_path.as_uri()]) == 1
    assert "aime24" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    place.unlink()
    assert tool.main(["--out", str(tmp_path / "out"), "--mirror", tmp_path.as_uri()]) == 1
    assert "aime24" in capsys.readouterr().err
    assert tool.main(["--out", str(tmp_path / "out"), "--from", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
