"""Where a conversion can be written: known before any work, on the file system that will have the files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hf_checkpoints import config_of, make_hf, to_megatron

from megatron_daro.errors import ModelError
from megatron_daro.workshop.convert import conversion, jobs
from megatron_daro.workshop.convert.jobs import CARD_FILE


@pytest.fixture
def hf(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return tmp_path / "hf"


@pytest.mark.parametrize("kind", ["mount", "link to a mount", "link", "current", "under a file"])
def test_targets_that_cannot_be_replaced(hf, tmp_path, monkeypatch, kind):
    """Known before any work; a link to an empty directory is followed."""
    out = empty = tmp_path / "disk"
    empty.mkdir()
    if kind == "under a file":
        (tmp_path / "file").write_text("")
        out = tmp_path / "file/out"
    if kind.startswith("link"):
        out = tmp_path / "link"
        out.symlink_to(empty)
    if kind == "current":
        monkeypatch.chdir(empty)
        out = Path()
    is_mounted = "mount" in kind and os.geteuid() == 0
    if is_mounted and subprocess.run(["mount", "-t", "tmpfs", "tmpfs", empty], capture_output=True).returncode:
        is_mounted = False
    if "mount" in kind and not is_mounted:
        pytest.skip("this machine does not let this user mount a tmpfs")
    writes = []
    monkeypatch.setattr(conversion, "write_file", lambda *task: writes.append(task) or jobs.write_file(*task))
    try:
        if kind == "link":
            to_megatron(hf, out)
            assert out.is_symlink() and (empty / CARD_FILE).is_file() and writes
            return
        match = {"current": "is the current directory, which cannot be", "under a file": "file is a file; choose"}
        with pytest.raises(ModelError, match=match.get(kind, "is a mount point, which cannot be")):
            to_megatron(hf, out)
        assert not writes and not [path for path in tmp_path.iterdir() if ".partial" in path.name]
    finally:
        if is_mounted:
            subprocess.run(["umount", empty], check=True)


def test_a_target_that_only_the_system_knows_to_be_taken(hf, tmp_path, monkeypatch):
    """A bind mount within one file system does not show; the rename is tried with an empty directory first."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    (tmp_path / "real").mkdir()
    (tmp_path / "out").mkdir()
    if subprocess.run(["mount", "--bind", tmp_path / "real", tmp_path / "out"], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    monkeypatch.setattr(conversion, "write_file", lambda *task: pytest.fail("work was done before"))
    monkeypatch.setattr(Path, "is_mount", lambda path: False)
    try:
        with pytest.raises(ModelError, match=r"cannot be replaced by a directory beside it .*busy"):
            to_megatron(hf, tmp_path / "out")
    finally:
        subprocess.run(["umount", tmp_path / "out"], check=True)


def test_a_target_is_made_beside_nothing_that_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert conversion.replaceable(Path("a/b")) == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert conversion.replaceable(Path("empty")) == tmp_path / "empty"
    (tmp_path / "file").touch()
    for out, said in (("file", "exists and is not empty"), ("file/x", "is a file"), (".", "not empty")):
        with pytest.raises(ModelError, match=said):
            conversion.replaceable(Path(out))
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"is the current directory, .*--out .*converted; nothing was written"):
        conversion.replaceable(Path())


def test_space_is_counted_where_the_files_are_written(hf, tmp_path, monkeypatch):
    asked = []
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    (tmp_path / "disk/out").mkdir(parents=True)
    monkeypatch.setattr(conversion.os, "statvfs", lambda path: asked.append(path) or os.fstatvfs(0))
    to_megatron(hf, tmp_path / "link")
    assert asked == [tmp_path / "disk"]
