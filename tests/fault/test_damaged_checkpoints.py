"""Torn and edited checkpoints are refused and the one before is used; a full disk costs the new checkpoint, or the
export, only."""

import os
import shutil
import subprocess

import pytest
from cli_runs import assert_same_run, checkpoint, different_files, digests, run_cli, trained
from exported_model import assert_is_model_of

PAGE = 4096


def test_torn_and_edited_checkpoints_are_refused_and_an_older_one_is_used(tiny, reference, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    shard = checkpoint(run_dir, 8) / "shard_00001.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    state = checkpoint(run_dir, 6) / "state.json"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    assert digests(checkpoint(run_dir, 8)) != digests(checkpoint(reference, 8))
    assert state.stat().st_size == (checkpoint(reference, 6) / "state.json").stat().st_size

    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "--resume"]
    finished = trained(["train", tiny.config, *options], tmp_path / "log")
    assert f"shard_00001.safetensors: {size // 2} bytes" in finished.stdout
    assert "state.json: its SHA-256 is not that of the manifest" in finished.stdout
    assert "resumed from" in finished.stdout and "step_000004" in finished.stdout
    assert_same_run(run_dir, reference, range(1, 9))


def test_run_whose_checkpoints_are_all_damaged_is_not_resumed(tiny, reference, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    for step in (2, 4, 6, 8):
        os.truncate(checkpoint(run_dir, step) / "common.pt", 10)
    finished = run_cli(["train", tiny.config, f"trainer.run_dir={run_dir}", "--resume"], tmp_path / "log")
    assert finished.code == 1
    assert "none of 4 checkpoints is whole" in finished.last_line


@pytest.fixture
def small_disk(tmp_path, reference):
    """A disk with room for one and a half checkpoints, and the command that makes it larger."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    one = sum(-(-path.stat().st_size // PAGE) * PAGE for path in checkpoint(reference, 2).iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={one + one // 2 + 25 * PAGE}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield disk, ["mount", "-o", f"remount,size={10 * one}", disk]
    subprocess.run(["umount", disk], check=True)


@pytest.mark.heavy
def test_full_disk_is_named_and_the_previous_checkpoint_can_be_resumed(tiny, reference, small_disk, tmp_path):
    disk, enlarge = small_disk
    run_dir = disk / "run"
    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "trainer.keep_checkpoints=1"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log")
    assert finished.code == 1
    assert finished.last_line.startswith("CheckpointError: ") and "step_000004" in finished.last_line
    assert "No space left on device" in finished.last_line and "--resume" in finished.last_line
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["latest", "step_000002"]
    assert different_files(checkpoint(run_dir, 2), checkpoint(reference, 2)) == set()

    subprocess.run(enlarge, check=True)
    trained(["train", tiny.config, *options, "--resume"], tmp_path / "resumed")
    assert_same_run(run_dir, reference, range(1, 9))


@pytest.mark.heavy
def test_full_disk_costs_a_finished_run_its_export_only_and_a_resume_writes_it(tiny, reference, small_disk, tmp_path):
    disk, _ = small_disk
    run_dir, filler = disk / "run", disk / "filler"
    last = shutil.copytree(checkpoint(reference, 8), checkpoint(run_dir, 8))
    before, space = digests(last), os.statvfs(disk)
    filler.write_bytes(bytes(space.f_bavail * space.f_frsize - 10 * PAGE))  # the weights alone are 20 pages
    options = [f"trainer.run_dir={run_dir}", "trainer.eval_every_steps=4", "trainer.export_hf=true", "--resume"]
    finished = run_cli(["train", tiny.config, *options], tmp_path / "log")
    assert finished.code == 1
    assert finished.last_line.startswith("SyncError: weights could not be written: ")
    assert "No space left on device" in finished.last_line and "--resume with the same options" in finished.last_line
    assert digests(last) == before
    assert [path.name for path in run_dir.iterdir() if "hf" in path.name] == []

    filler.unlink()
    finished = trained(["train", tiny.config, *options], tmp_path / "again")
    assert "has all of its 8 steps" in finished.stdout and str(run_dir / "hf") in finished.stdout
    assert "step_000009" not in finished.stdout and not (run_dir / "rollouts").exists()
    assert_is_model_of(run_dir / "hf", last)
    finished = run_cli(["train", tiny.config, *options], tmp_path / "third", {"RAY_ADDRESS": "127.0.0.1:1"})
    assert finished.code == 0 and "has all of its 8 steps" in finished.stdout
