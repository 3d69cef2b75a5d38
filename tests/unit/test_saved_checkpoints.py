"""Checkpoints: whole or not at all, on the disk before they count; torn, edited and pruned ones; a really full disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import FakeProgress, make_stack, run_stack

from megatron_daro import durable
from megatron_daro.checkpoints import (
    STATE_FORMAT,
    Checkpoints,
    check_format,
    find_latest_valid,
    read_provenance,
    require_fresh,
    set_newer_aside,
    step_directories,
    verify,
)
from megatron_daro.errors import CheckpointError, ConfigError, DeadlineError
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder


def writer(size=2000, error=None):
    """What a policy does: some shards in a folder of its own."""

    async def write(directory: Path) -> None:
        (directory / "iter" / "deep").mkdir(parents=True)
        for name in ("iter/a.distcp", "iter/deep/b.distcp", "common.pt"):
            (directory / name).write_bytes(hashlib.sha256(name.encode()).digest() * (size // 32))
        if error:
            raise error

    return write


def save(run, *steps, keep=10, notices=None, **options):
    store = Checkpoints(run, keep=keep)
    for step in steps:
        state = {"step": step, "cursor": step * 10}
        path = asyncio.run(store.save(step, writer(**options), state, notices or FakeProgress()))
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_checkpoint_has_everything_and_latest_points_at_it(tmp_path):
    path = save(tmp_path, 20)
    assert path == tmp_path / "checkpoints" / "step_000020"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000020\n"
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"iter/a.distcp", "iter/deep/b.distcp", "common.pt", "state.json"}
    data = (path / "iter" / "a.distcp").read_bytes()
    assert manifest["files"]["iter/a.distcp"] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert find_latest_valid(tmp_path, FakeProgress()) == (path, {"step": 20, "cursor": 200})
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step_000020", "latest"}


@pytest.mark.parametrize(
    ("steps", "stay"), [(range(1, 11), (10, 9, 8, 4)), (range(3, 28, 3), (27, 24, 21, 18, 12, 9, 6))]
)
def test_the_first_checkpoint_at_or_after_every_so_many_steps_stays(tmp_path, steps, stay):
    """Also where no step is a multiple: batches of three steps are saved at their end."""
    store = Checkpoints(tmp_path, keep=2, keep_every=4)
    for step in steps:
        asyncio.run(store.save(step, writer(), {"step": step}, FakeProgress()))
    assert [path.name for path in step_directories(tmp_path / "checkpoints")] == [f"step_{i:06d}" for i in stay]


def test_what_a_run_is_made_of_is_in_its_checkpoints(tmp_path):
    provenance = {"train_files": ["x"]}
    store = Checkpoints(tmp_path, keep=2, provenance=provenance)
    path = asyncio.run(store.save(1, writer(), {"step": 1}, FakeProgress()))
    assert read_provenance(path) == provenance
    assert "made_with.json" in json.loads((path / "manifest.json").read_text())["files"]
    assert read_provenance(save(tmp_path, 2)) is None


def test_every_file_and_folder_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced, sync = [], durable.sync
    monkeypatch.setattr(
        durable, "sync", lambda path: synced.append(path.relative_to(tmp_path).as_posix()) or sync(path)
    )
    save(tmp_path, 7)
    inside = "checkpoints/step_000007.tmp/"
    files = ("iter/a.distcp", "iter/deep/b.distcp", "common.pt", "state.json", "iter", "iter/deep", "")
    assert {(inside + name).rstrip("/") for name in files} <= set(synced)
    assert synced[-2:] == ["checkpoints", "checkpoints"], "the folder after each of the two renames"


def test_what_an_earlier_try_left_is_not_taken_over(tmp_path):
    left = tmp_path / "checkpoints" / "step_000003.tmp"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    assert not (save(tmp_path, 3) / "half").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = save(tmp_path, 1)

    def refuse(file, name):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    with pytest.raises(CheckpointError, match=r"step_000001/.*Input/output error"):
        verify(path)


def test_a_state_of_another_format_is_refused(tmp_path):
    check_format(tmp_path, {"format": STATE_FORMAT})
    with pytest.raises(CheckpointError, match=r"state\.json.*format 1"):
        check_format(tmp_path, {"format": 1})


def test_directories_are_checkpoints_by_their_names_newest_first(tmp_path):
    for name in ("step_000009", "step_000100", "step_1000000", "step_12", "step_000001.tmp", "step_000002.refused"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000200").write_text("a file")
    assert [path.name for path in step_directories(tmp_path)] == ["step_1000000", "step_000100", "step_000009"]
    assert step_directories(tmp_path / "none") == []


def test_no_checkpoint_is_none(tmp_path):
    assert find_latest_valid(tmp_path, FakeProgress()) is None


def _cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _text(old, new):
    def edit(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return edit


DAMAGE = {
    "shard cut": ("iter/a.distcp", _cut),
    "one bit": ("iter/deep/b.distcp", _flip),
    "shard missing": ("common.pt", Path.unlink),
    "state edited": ("state.json", _text('"cursor": 30', '"cursor": 31')),
    "manifest missing": ("manifest.json", Path.unlink),
    "manifest cut": ("manifest.json", _cut),
    "manifest without files": ("manifest.json", _text('"files"', '"fi1es"')),
    "manifest escapes": ("manifest.json", _text('"common.pt"', '"../../x"')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(tmp_path, damage):
    name, break_it = DAMAGE[damage]
    path = save(tmp_path, 2, 3)
    break_it(path / name)
    progress = FakeProgress()
    found, state = find_latest_valid(tmp_path, progress)
    assert (found.name, state["step"]) == ("step_000002", 2)
    with pytest.raises(CheckpointError, match=name):
        verify(path)
    assert name.split("/")[-1] in progress.messages[0]


def test_a_renamed_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, 2, 3)
    path.rename(path.with_name("step_000009"))
    progress = FakeProgress()
    assert find_latest_valid(tmp_path, progress)[1]["step"] == 2
    assert "step_000009" in progress.messages[0]


def test_when_none_is_whole_it_is_an_error_and_not_a_fresh_start(tmp_path):
    for path in (save(tmp_path, 2), save(tmp_path, 3)):
        _flip(path / "common.pt")
    with pytest.raises(CheckpointError, match="none of 2"):
        find_latest_valid(tmp_path, FakeProgress())


@pytest.mark.parametrize("pointer", [None, "step_0000", "garbage\n", "step_000002\n"])
def test_a_torn_pointer_does_not_matter(tmp_path, pointer):
    save(tmp_path, 2, 3)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    progress = FakeProgress()
    assert find_latest_valid(tmp_path, progress)[1]["step"] == 3
    assert "step_000003" in progress.messages[0]


def test_refused_ones_are_set_aside_so_that_pruning_keeps_the_whole_ones(tmp_path):
    _flip(save(tmp_path, 10, 20) / "common.pt")
    found, state = find_latest_valid(tmp_path, FakeProgress())
    assert state["step"] == 10
    set_newer_aside(found)
    save(tmp_path, 15, keep=2)
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_000010", "step_000015", "step_000020.refused", "latest"}
    save(tmp_path, 20, keep=2)
    assert find_latest_valid(tmp_path, FakeProgress())[1]["step"] == 20


def test_old_ones_go_when_the_new_one_is_whole(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert [p.name for p in step_directories(tmp_path / "checkpoints")] == ["step_000004", "step_000003"]


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, keep=2)
    remove, progress = shutil.rmtree, FakeProgress()

    def refuses(path, **options):
        if path.name == "step_000001":
            raise OSError(39, "Directory not empty")
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        path = save(tmp_path, 3, keep=2, notices=progress)
    assert find_latest_valid(tmp_path, FakeProgress())[0] == path
    assert [text for text in progress.messages if "step_000001 could not be removed" in text] == progress.messages
    save(tmp_path, 4, keep=2)
    assert [p.name for p in step_directories(tmp_path / "checkpoints")] == ["step_000004", "step_000003"]


def test_nothing_is_removed_when_the_new_one_cannot_be_read_back(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, keep=2)
    rename = Path.rename

    def loses_a_file(path, target):
        renamed = rename(path, target)
        (renamed / "common.pt").unlink()
        return renamed

    monkeypatch.setattr(Path, "rename", loses_a_file)
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        save(tmp_path, 3, keep=2)
    assert find_latest_valid(tmp_path, FakeProgress())[1]["step"] == 2
    verify(tmp_path / "checkpoints" / "step_000001")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("rank 1 died")])
def test_a_save_that_fails_leaves_nothing_and_earlier_ones_as_they_were(tmp_path, error):
    save(tmp_path, 1)
    before = content(tmp_path)
    with pytest.raises(
        CheckpointError if isinstance(error, OSError) else RuntimeError,
        match=r"step_000002.*No space" if isinstance(error, OSError) else "rank 1",
    ):
        save(tmp_path, 2, error=error)
    assert content(tmp_path) == before
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_a_state_that_is_no_json_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(CheckpointError, match="JSON"):
        asyncio.run(Checkpoints(tmp_path, keep=1).save(1, writer(), {"step": 1, "x": object()}, FakeProgress()))
    assert list((tmp_path / "checkpoints").iterdir()) == []


@contextmanager
def small_filesystem(directory: Path, size_kib: int):
    """A file system that is really small."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small tmpfs (needs root); the file-size limit test covers the same path")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("free_kib", [0, 12])
def test_a_full_disk_is_named_and_the_previous_checkpoint_is_intact(tmp_path, free_kib):
    run = tmp_path / "small"
    with small_filesystem(run, 256):
        save(run, 1)
        before = content(run)
        filler = run / "filler"
        space = os.statvfs(run)
        filler.write_bytes(b"x" * (space.f_bavail * space.f_frsize - free_kib * 1024))
        with pytest.raises(CheckpointError, match=r"step_000002.*No space left"):
            save(run, 2)
        filler.unlink()
        assert content(run) == before
        assert not list((run / "checkpoints").glob("*.tmp"))
        assert find_latest_valid(run, FakeProgress())[1]["step"] == 1
        save(run, 2)
        assert find_latest_valid(run, FakeProgress())[1]["step"] == 2


def test_a_removed_run_directory_is_not_called_a_full_disk(tmp_path):
    async def write(directory: Path) -> None:
        shutil.rmtree(tmp_path / "run")
        (directory / "shard").write_bytes(b"x")

    store = Checkpoints(tmp_path / "run", keep=1)
    with pytest.raises(CheckpointError, match="run") as raised:
        asyncio.run(store.save(1, write, {"step": 1}, FakeProgress()))
    assert "full" not in str(raised.value)


@pytest.mark.parametrize("error", [OSError(28, "No space"), OSError(13, "Permission denied")])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_disk_that_refuses_the_first_checkpoint_names_the_replay_of_what_was_recorded(tmp_path, recorded, error):
    if recorded:
        Recorder(tmp_path).write_step(1, {}, RecordedMiniBatch(1, 1, 1, (), applied=True))
    with pytest.raises(CheckpointError, match=rf"step_000001.*{error.strerror}") as raised:
        save(tmp_path, 1, error=error)
    assert ("--replay" in str(raised.value)) == recorded
    assert ("free disk space" in str(raised.value)) == (error.errno == 28)


def test_a_file_size_limit_is_named_too(tmp_path):
    save(tmp_path, 1)
    before = content(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*ulimit -f"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(tmp_path) == before


@pytest.mark.parametrize("stage", ["write", "hash", "rename", "pointer"])
def test_a_kill_at_any_point_of_saving_leaves_a_whole_checkpoint(tmp_path, stage):
    """A process that is really killed, at each stage of saving step 2."""
    save(tmp_path, 1)
    script = f"""
import asyncio, hashlib, os, signal
from pathlib import Path
from megatron_daro.checkpoints import Checkpoints
stage = {stage!r}

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

async def write(directory):
    (directory / "shard").write_bytes(b"x" * 1000)
    if stage == "write":
        die()

if stage == "hash":
    hashlib.file_digest = die
elif stage == "rename":
    Path.rename = die
elif stage == "pointer":
    Path.replace = die
asyncio.run(Checkpoints(Path({str(tmp_path)!r}), keep=10).save(2, write, {{"step": 2}}, None))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert result.returncode == -9, result.stderr.decode()
    expected = 2 if stage == "pointer" else 1
    assert find_latest_valid(tmp_path, FakeProgress())[1]["step"] == expected
    save(tmp_path, 2 if expected == 1 else 3)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step_00000{2 if expected == 1 else 3}\n"


def test_a_hanging_save_is_named_and_not_taken_for_a_checkpoint(tmp_path):
    from dataclasses import replace

    from loop_fakes import FAST, NEVER

    stack = make_stack(tmp_path, deadlines=replace(FAST, save=0.05))

    async def hang(directory, captured):
        (directory / "half").write_bytes(b"x")
        await asyncio.sleep(NEVER)

    stack.policy.save = hang
    with pytest.raises(DeadlineError, match="save"):
        run_stack(stack)
    assert find_latest_valid(tmp_path, FakeProgress()) is None


def test_a_full_disk_ends_a_run_with_that_error_and_it_can_be_resumed(tmp_path):
    from loop_fakes import resume_stack

    stack = make_stack(tmp_path)
    stack.progress.on_step = lambda step: setattr(
        stack.policy, "save_error", OSError(28, "No space") if step > 3 else None
    )
    with pytest.raises(CheckpointError, match="step_000004"):
        run_stack(stack)
    assert stack.policy.closed == stack.engine.closed == 1
    assert resume_stack(make_stack(tmp_path)).step == 6


def test_a_new_run_over_an_old_one_is_refused(tmp_path):
    require_fresh(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    require_fresh(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="--resume"):
        require_fresh(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match="--resume"):
        require_fresh(tmp_path)
