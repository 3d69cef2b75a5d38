"""kill -9 of an evaluation in the middle: the same command goes on, asks for nothing twice, and ends with the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from pathlib import Path

import pytest
from cli_runs import started, trained

from megatron_daro.workshop.evaluate.answers import kept, part_files, rows

SAMPLES = 400


def command(tiny, out: Path) -> list[str]:
    words = ["eval", str(tiny.config), "--hf", str(tiny.model), "--out", str(out), "--set"]
    words += [f"digits={tiny.directory / 'held_out.jsonl'}", "--template", "none", "--temperature", "1"]
    return [*words, "--top-p", "1", "--samples", str(SAMPLES), "--k", "1", "--k", "8"]


def answers_of(out: Path) -> dict[tuple[int, int], tuple]:
    columns = ("tokens", "correct", "finish_reason")
    return {(row["group_id"], row["index"]): tuple(map(str, (row[c] for c in columns))) for row in rows(out, columns)}


def killed_in_the_middle(tiny, folder: Path) -> tuple[Path, Collection]:
    """The directory of an evaluation that kill -9 ended, and its answers. A busy machine may kill only when all are
    written: then another one is killed."""
    for attempt in range(5):
        broken = folder / f"broken_{attempt}"
        with started(command(tiny, broken), folder / f"log_killed_{attempt}") as run:
            run.wait_until(lambda broken=broken: bool(part_files(broken)), "a part of the answers")
            run.driver.kill()
            assert run.finish().code == -signal.SIGKILL
            assert run.left_behind() == []
        there = kept(broken)
        assert there
        if len(there) < 10 * SAMPLES:
            return broken, there
    raise AssertionError("five evaluations had all their answers before they were killed")


@pytest.mark.heavy
def test_a_killed_evaluation_goes_on_and_ends_with_the_same(tiny, tmp_path):
    unbroken = tmp_path / "unbroken"
    whole = trained(command(tiny, unbroken), tmp_path / "log_whole")
    assert "pass@8" in whole.stdout and "digits" in whole.stdout
    broken, there = killed_in_the_middle(tiny, tmp_path)
    parts = {path: path.read_bytes() for path in part_files(broken)}
    resumed = trained(command(tiny, broken), tmp_path / "log_resumed")
    assert f"has {len(there)} of {10 * SAMPLES} answers; asking for the others" in resumed.stderr
    assert all(path.read_bytes() == content for path, content in parts.items())
    assert answers_of(broken) == answers_of(unbroken)
    assert json.loads((broken / "summary.json").read_text()) == json.loads((unbroken / "summary.json").read_text())
    again = trained(command(tiny, broken), tmp_path / "log_again")
    assert "has all 4000 answers already" in again.stderr and again.stdout == resumed.stdout
