"""Suites find their files, sets of one's own are named, and what is missing or twice there is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_daro.data.prompts import load_problems
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.evaluate.suites import SUITES, check_names, named_sets, suite_sets

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation files of ../shared/data/eval are not on this machine")
def test_every_set_of_the_suite_has_the_rows_that_are_published():
    for one in suite_sets("math6", DATA):
        prompts, report = load_problems([one.path], repeats="keep")
        assert (one.name, len(prompts), report.num_dropped) == (one.name, one.rows, 0)


def write_suite(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for member in SUITES["math6"]:
        (folder / f"{member.stem}.jsonl").write_text("{}\n")
    return folder


def test_files_are_found_by_the_beginning_of_their_names(tmp_path):
    found = suite_sets("math6", write_suite(tmp_path / "here"))
    assert [one.name for one in found] == ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]
    assert {(one.temperature, one.top_p, one.template) for one in found} == {(0.6, 0.95, "chat")}


def test_a_missing_or_double_file_and_an_unknown_suite_are_refused(tmp_path):
    folder = write_suite(tmp_path / "here")
    (folder / "amc23.other.parquet").write_text("")
    with pytest.raises(ConfigError, match=r"amc23\.jsonl, amc23\.other\.parquet"):
        suite_sets("math6", folder)
    (folder / "amc23.other.parquet").unlink()
    (folder / "minerva.jsonl").unlink()
    with pytest.raises(ConfigError, match="minerva"):
        suite_sets("math6", folder)
    with pytest.raises(ConfigError, match="--suite: got 'math7'"):
        suite_sets("math7", folder)


def test_own_sets_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (one,) = named_sets([f"mine={tmp_path / 'a.jsonl'}"])
    assert (one.name, one.path, one.rows) == ("mine", tmp_path / "a.jsonl", None)
    for text in ("mine", "=x", "mine="):
        with pytest.raises(ConfigError, match="--set"):
            named_sets([text])
    with pytest.raises(ConfigError, match="nowhere"):
        named_sets(["mine=nowhere"])
    with pytest.raises(ConfigError, match="'a b'"):
        named_sets([f"a b={tmp_path / 'a.jsonl'}"])


def test_sets_that_share_a_name_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    sets = named_sets([f"mine={tmp_path / 'a.jsonl'}", f"other={tmp_path / 'a.jsonl'}"])
    check_names(sets)
    with pytest.raises(ConfigError, match="mine"):
        check_names([*sets, sets[0]])
