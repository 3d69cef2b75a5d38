"""Checkpoints in detail: what is written and synced in which order, what of an edited one is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from test_recovery import FakeProgress, _flip, save, writer

from megatron_daro import durable, recovery
from megatron_daro.errors import CheckpointError
from megatron_daro.recovery import (
    BackgroundSave,
    Checkpoints,
    check_fits,
    find_latest_valid,
    read_provenance,
    read_state,
    require_fresh,
    set_newer_aside,
    step_directories,
    verify,
)


def edit_manifest(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_store_that_keeps_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer\.keep_checkpoints: 0; allowed: >= 1"):
        Checkpoints(tmp_path, keep=0)
    Checkpoints(tmp_path, keep=1)


def test_what_a_run_is_made_of_is_in_its_checkpoints(tmp_path):
    provenance = {
        "config": {"data": {"eval": [{"name": "d"}]}}, "model": {}, "bound_files": {}, "free_files": {},
        "train_files": ["x"], "eval_files": {}, "packages": {}, "machine": {},
    }  # fmt: skip
    store = Checkpoints(tmp_path, keep=2, provenance=provenance)
    path = asyncio.run(store.save(1, writer(), {"step": 1}, FakeProgress()))
    assert read_provenance(path) == provenance
    assert "made_with.json" in json.loads((path / "manifest.json").read_text())["files"]
    assert read_provenance(save(tmp_path, 2)) is None
    (path / "made_with.json").write_text(json.dumps(provenance | {"train_files": "x"}))
    with pytest.raises(CheckpointError, match=r"made_with\.json: train_files: got 'x'; .*edited, or of another"):
        read_provenance(path)


def test_the_manifest_says_its_format_and_step_and_is_the_last_file(tmp_path, monkeypatch):
    written, write = [], durable.write
    monkeypatch.setattr(durable, "write", lambda path, text: written.append(path.name) or write(path, text))
    path = save(tmp_path, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 7)
    assert written == ["state.json", "manifest.json", "latest.tmp"]
    assert (path / "state.json").read_text() == '{\n "cursor": 70,\n "step": 7\n}'


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


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    (save(tmp_path, 3) / "old").write_text("x")
    assert not (save(tmp_path, 3) / "old").exists()


def test_what_an_earlier_try_left_is_not_taken_over(tmp_path):
    left = tmp_path / "checkpoints" / "step_000003.tmp"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    assert not (save(tmp_path, 3) / "half").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.pop("state.json"), r"manifest\.json: does not name state\.json: torn or edited"),
        (lambda files: files.update({"/x": files["common.pt"]}), "names '/x', outside the checkpoint; it was edited"),
        (lambda files: files.update({"iter": files["common.pt"]}), "iter: missing; use another checkpoint"),
        (lambda files: files.update({"x" * 300: files["common.pt"]}), "xxx: missing"),
        (lambda files: files["common.pt"].update(bytes=-1), r"files\.common\.pt\.bytes: got -1; "),
        (lambda files: files["common.pt"].update(bytes="1984"), r"files\.common\.pt\.bytes: got '1984'; "),
        (lambda files: files["common.pt"].update(sha256="0" * 63), r"files\.common\.pt\.sha256: got '0"),
        (lambda files: files["common.pt"].pop("sha256"), r"files\.common\.pt\.sha256: got nothing; "),
    ],
)
def test_a_manifest_that_was_edited_is_refused(tmp_path, change, words):
    path = save(tmp_path, 1)
    edit_manifest(path, change)
    with pytest.raises(CheckpointError, match=words):
        verify(path)


def test_without_hashes_only_sizes_are_compared(tmp_path):
    path = save(tmp_path, 1)
    _flip(path / "common.pt")
    verify(path, hashes=False)
    with pytest.raises(CheckpointError, match="its SHA-256"):
        verify(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = save(tmp_path, 1)

    def refuse(file, name):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    with pytest.raises(CheckpointError, match=r"step_000001/.*: cannot be read: .*Input/output error"):
        verify(path)


@pytest.mark.parametrize("text", ["[]", "3", "no JSON"])
def test_a_state_that_is_no_object_is_refused(tmp_path, text):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"state\.json: (no JSON object|cannot be read: .*); use another checkpoint"
    ):
        read_state(path)


STATE = {
    "format": 2, "step": 1, "batches_done": 1, "skipped_steps": 0, "sampler": {}, "difficulty_weights": {},
    "identity": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches_done": -1}, "batches_done: got -1; "),
        ({"skipped_steps": "0"}, "skipped_steps: got '0'; "),
        ({"sampler": []}, r"sampler: got \[\]; "),
        ({"difficulty_weights": {"a": "x"}}, r"difficulty_weights\.a: got 'x'; "),
    ],
)
def test_a_state_of_this_format_has_everything(tmp_path, change, words):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(json.dumps(STATE))
    assert read_state(path) == STATE
    (path / "state.json").write_text(json.dumps(STATE | change))
    with pytest.raises(CheckpointError, match=words):
        read_state(path)
    (path / "state.json").write_text(json.dumps(STATE | change | {"format": 1}))
    assert read_state(path)["format"] == 1, "one of another format is refused where it is used"


def test_a_state_fits_a_run_of_its_format_and_identity(tmp_path):
    assert recovery.STATE_FORMAT == 2
    check_fits(tmp_path, {"format": 2, "identity": {"seed": 1, "old": None}}, {"seed": 1})
    with pytest.raises(CheckpointError, match=r"state\.json: format 1; allowed: 2\. Resume with the version"):
        check_fits(tmp_path, {"format": 1, "identity": {}}, {})
    with pytest.raises(CheckpointError, match=r"another run: a was 1, is None; b was None, is 2; c was 3, is 4\. Set"):
        check_fits(tmp_path, {"format": 2, "identity": {"a": 1, "c": 3, "d": 5}}, {"b": 2, "c": 4, "d": 5})


def test_directories_are_checkpoints_by_their_names_newest_first(tmp_path):
    for name in ("step_000009", "step_000100", "step_1000000", "step_12", "step_000001.tmp", "step_000002.refused"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000200").write_text("a file")
    assert [path.name for path in step_directories(tmp_path)] == ["step_1000000", "step_000100", "step_000009"]
    assert step_directories(tmp_path / "none") == []


def test_what_was_refused_twice_takes_the_place_of_the_one_before(tmp_path):
    for _ in range(2):
        _flip(save(tmp_path, 1, 2) / "common.pt")
        set_newer_aside(tmp_path / "checkpoints" / "step_000001")
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step*")) == ["step_000001", "step_000002.refused"]


def test_a_pointer_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    save(tmp_path, 1)
    progress = FakeProgress()
    find_latest_valid(tmp_path, progress)
    assert progress.messages == []
    (tmp_path / "checkpoints" / "latest").unlink()
    find_latest_valid(tmp_path, progress)
    assert "latest names '(missing)'; the newest whole checkpoint is step_000001" in progress.messages[0]


def test_a_full_disk_says_what_stays(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"Nothing of it was kept and earlier checkpoints are untouched; .*; trainer\.keep_checkp"
    ):
        save(tmp_path, 2, error=OSError(28, "No space left on device"))


def test_a_crash_of_a_pruning_leaves_no_half_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / "step_000001.tmp").mkdir(parents=True)
    save(tmp_path, 2)
    assert not (tmp_path / "checkpoints" / "step_000001.tmp").exists()


class Saves:
    """Saves that a test holds."""

    def __init__(self) -> None:
        self.gate, self.begun, self.ended, self.error = asyncio.Event(), 0, 0, None

    async def __call__(self, captured) -> None:
        self.begun += 1
        captured()
        await self.gate.wait()
        if self.error:
            raise self.error
        self.ended += 1


def test_a_background_save_returns_when_the_state_is_captured_and_the_next_one_waits_for_it():
    async def go():
        saving, first, second = BackgroundSave(), Saves(), Saves()
        await saving.finished()
        await saving.begin(first)
        saving.check()
        await asyncio.sleep(0)
        assert (first.begun, first.ended) == (1, 0) and len(asyncio.all_tasks()) == 2, "this one and the save"
        next_one = asyncio.ensure_future(saving.begin(second))
        await asyncio.sleep(0.01)
        assert second.begun == 0 and not next_one.done()
        first.gate.set()
        await next_one
        assert (first.ended, second.begun) == (1, 1)
        second.gate.set()
        await saving.finished()
        assert second.ended == 1

    asyncio.run(go())


def test_a_background_save_that_ends_without_a_word_is_done():
    async def go():
        saving, ended = BackgroundSave(), []

        async def save(captured):
            ended.append(True)

        async with asyncio.timeout(10):
            await saving.begin(save)
        assert ended == [True]

    asyncio.run(go())


def test_what_went_wrong_with_a_background_save_is_raised_once():
    async def go():
        saving, save = BackgroundSave(), Saves()
        save.error = CheckpointError("full")
        await saving.begin(save)
        save.gate.set()
        with pytest.raises(CheckpointError, match="full"):
            await saving.finished()
        saving.check()
        await saving.finished()

        async def at_once(captured):
            raise CheckpointError("no state")

        with pytest.raises(CheckpointError, match="no state"):
            await saving.begin(at_once)

    asyncio.run(go())


@pytest.mark.parametrize("error", [None, CheckpointError("full")])
def test_at_the_end_a_background_save_is_waited_for_and_its_failure_is_said(error):
    async def go():
        saving, save, progress = BackgroundSave(), Saves(), FakeProgress()
        await saving.end(progress, at_once=False)
        save.error = error
        await saving.begin(save)
        asyncio.get_running_loop().call_later(0.01, save.gate.set)
        await saving.end(progress, at_once=False)
        assert save.ended == (error is None) and progress.messages == (["warning: full"] if error else [])

    asyncio.run(go())


def test_at_once_a_background_save_is_given_up():
    async def go():
        saving, save, progress = BackgroundSave(), Saves(), FakeProgress()
        await saving.begin(save)
        async with asyncio.timeout(10):
            await saving.end(progress, at_once=True)
        assert save.ended == 0 and progress.messages == []
        saving.check()

    asyncio.run(go())


def test_a_run_directory_is_fresh_without_checkpoints_and_with_an_empty_log(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    require_fresh(tmp_path / "none")
    require_fresh(tmp_path)
