"""Runs recorded in the older format: refused by name, and converted bit for bit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from loop_fakes import K, make_stack, run_stack

from megatron_daro import cli
from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.jsonl_rollouts import convert_run
from megatron_daro.rollout.recorder import Recorder, read_groups, read_step, recorded_steps
from megatron_daro.rollout.replay import ReplaySource

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "recording.py"


@pytest.fixture(scope="module")
def write_jsonl():
    """The older writer, which lives in the benchmark."""
    specification = importlib.util.spec_from_file_location("recording_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.write_jsonl


@pytest.fixture
def older_run(tmp_path, write_jsonl):
    """(a run of the older format, the same run in the present one)."""
    present, older = tmp_path / "present", tmp_path / "older"
    run_stack(make_stack(present))
    Recorder(present).write_failed(3, [group for group, _ in read_step(present, 3)])
    for folder in ("rollouts", "failed"):
        (older / folder).mkdir(parents=True)
        for path in sorted((present / folder).iterdir()):
            entries = [RecordedGroup(group, used) for group, used in read_groups(path)]
            write_jsonl(older / folder / path.with_suffix(".jsonl.zst").name, entries)
    return older, present


def test_the_older_format_is_refused_with_its_name_and_how_to_convert(older_run):
    older, _ = older_run
    advice = rf"step_000001.jsonl.zst: recorded in the older format.*megatron-daro convert-rollouts {older}"
    for use in (
        lambda: ReplaySource(older, rollouts_per_prompt=K),
        lambda: recorded_steps(older),
        lambda: Recorder(older).truncate_after(0),
        lambda: read_groups(older / "rollouts" / "step_000001.jsonl.zst"),
    ):
        with pytest.raises(DataError, match=advice):
            use()


def test_the_command_converts_every_file_and_the_run_can_be_replayed(older_run, capsys):
    older, present = older_run
    assert cli.main(["convert-rollouts", str(older)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("7 files converted")
    for folder in ("rollouts", "failed"):
        names = [path.name for path in sorted((present / folder).iterdir())]
        assert [path.name for path in sorted((older / folder).iterdir())] == names
        for name in names:
            assert (older / folder / name).read_bytes() == (present / folder / name).read_bytes()
    assert ReplaySource(older, rollouts_per_prompt=K).steps == [1, 2, 3, 4, 5, 6]
    assert cli.main(["convert-rollouts", str(older)]) == 0
    assert capsys.readouterr().out.startswith("0 files converted")


def test_a_damaged_file_is_named_and_stays(older_run, capsys):
    older, _ = older_run
    path = older / "rollouts" / "step_000002.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-9])
    assert cli.main(["convert-rollouts", str(older)]) == 1
    assert f"{path}: cannot be read: it ends in the middle of the data" in capsys.readouterr().err
    assert path.exists() and (older / "rollouts" / "step_000001.parquet").exists()


def test_a_file_that_would_not_come_back_equal_stays(older_run, monkeypatch):
    older, _ = older_run
    shutil.rmtree(older / "failed")
    monkeypatch.setattr("megatron_daro.rollout.jsonl_rollouts.read_recorded", lambda path: [])
    with pytest.raises(DataError, match=r"step_000001.jsonl.zst: does not come back equal from Parquet"):
        list(convert_run(older))
    assert [path.suffix for path in (older / "rollouts").iterdir()] == [".zst"] * 6
