"""A conversion under way: who takes it up, its progress, and what must be before the target has its name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hf_checkpoints import config_of, make_hf, record, sha, tensors_of, to_megatron

from megatron_daro.convert import plan as plans
from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.workshop.convert import conversion
from megatron_daro.workshop.convert.conversion import Partial
from megatron_daro.workshop.convert.jobs import FileRecord


@pytest.fixture
def plan(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return plans.plan_to_megatron(tmp_path / "hf", "daro", None)


def test_an_unfinished_run_is_taken_up_by_the_same_plan_only(tmp_path, plan):
    target, file = tmp_path / "out", FileRecord("w", 3, [record("a")], [record("b")])
    with Partial(target, plan) as partial:
        assert partial.root == tmp_path / ".out.partial" and partial.done == {} and list(partial.folder.iterdir()) == []
        (partial.folder / "w").write_bytes(b"123")
        (partial.folder / "release").mkdir()
        (partial.folder / "release" / "r").write_bytes(b"12")
        for one in (file, replace(file, file="r", num_bytes=2), replace(file, file="gone"), replace(file, file="w2")):
            partial.note(one)
        (partial.root / "done" / "w2.json").write_text("{}")
        with pytest.raises(ModelError, match="another conversion is writing"), Partial(target, plan):
            pass
    with Partial(target, plan) as partial:
        assert partial.done == {"w": file, "r": replace(file, file="r", num_bytes=2)}
        partial.forget("r")
        partial.forget("r")
        (partial.folder / "w").write_bytes(b"1234")
    with Partial(target, plan) as partial:
        assert partial.done == {}
    os.utime(tmp_path / "hf" / "config.json", ns=(1, 1))
    with Partial(target, plan) as partial:
        assert list(partial.folder.iterdir()) == [] and not list((partial.root / "done").iterdir())
        (partial.folder / "x").touch()
        target.mkdir()
        partial.publish()
    assert [path.name for path in target.iterdir()] == ["x"] and not (tmp_path / ".out.partial").exists()


def test_progress_is_told_in_bytes_to_the_end(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    told: list[tuple[str, int]] = []
    to_megatron(tmp_path / "hf", tmp_path / "out", verify=True, progress=lambda *one: told.append(one))
    made = plans.plan_to_megatron(tmp_path / "hf", "daro", None)
    written = [done for phase, done in told if phase == "converting"]
    verified = [done for phase, done in told if phase == "verifying"]
    assert written == sorted(written) and written[0] == 0 and written[-1] == made.num_bytes
    assert verified == sorted(verified) and verified[0] == 0 and verified[-1] == sum(job.num_bytes for job in made.jobs)
    card = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert {row["check"] for row in card["rows"]} == {"hashed; read back and compared"}
    hf = tensors_of(tmp_path / "hf")
    assert all(one["sha256"] == sha(hf[one["name"]]) for row in card["rows"] for one in row["hf"])


def test_the_last_check_sees_the_whole_checkpoint_before_it_has_its_name(tmp_path, plan):
    seen: list[object] = []

    def check(folder):
        seen.append((sorted(path.name for path in folder.iterdir()), (tmp_path / "out").exists()))
        raise CheckpointError("other logits")

    given = {"processes": 1, "verify": False, "progress": lambda *_: None}
    with pytest.raises(CheckpointError, match="other logits"):
        conversion.convert(plan, tmp_path / "out", **given, last_check=check)
    assert seen[0][1] is False and "conversion.json" in seen[0][0] and not (tmp_path / "out").exists()
    card = conversion.convert(plan, tmp_path / "out", **given)
    assert {row.check for row in card.rows} == {"hashed; read back and compared"}  # of an earlier run: not trusted


def test_every_file_and_folder_is_on_the_disk_before_the_target_has_its_name(tmp_path, plan, monkeypatch):
    real, synced = conversion.durable.sync, []
    monkeypatch.setattr(conversion.durable, "sync", lambda path: synced.append(path) or real(path))
    given = {"processes": 1, "verify": False, "progress": lambda *_: None}
    conversion.convert(plan, tmp_path / "out", **given)
    files = tmp_path / ".out.partial" / "files"
    made = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    missing = {name for name in made if files / name not in synced}
    assert missing <= {Path("conversion.json")} and files in synced and synced[-1] == tmp_path
