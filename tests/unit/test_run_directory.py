"""One run in a directory: a second one, or one over another's files, is refused; a killed owner blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from megatron_daro.errors import CheckpointError, ConfigError, disk_fault
from megatron_daro.runtime.run_directory import LOCK_FILE, owned

_OWNER = """
import subprocess, sys
from pathlib import Path
from megatron_daro.runtime.run_directory import owned
with owned(Path(sys.argv[1]), resume=False):
    subprocess.Popen(["sleep", "30"])  # a child outlives its parent's kill and must not keep the lock
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns tmp_path / "run"."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "owned\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_refused_and_told_who_has_it(owner, tmp_path, resume):
    with pytest.raises(CheckpointError) as raised, owned(tmp_path / "run", resume=resume):
        pass
    message = str(raised.value)
    assert str(owner.pid) in message and socket.gethostname() in message
    assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == owner.pid


def test_an_owner_that_was_killed_blocks_nobody(owner, tmp_path):
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    with owned(tmp_path / "run", resume=False) as run_dir:
        assert json.loads((run_dir / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_the_directory_is_given_back(tmp_path):
    for _ in range(2):
        with owned(tmp_path / "new" / "run", resume=False) as run_dir:
            assert run_dir.is_dir()
        assert (run_dir / LOCK_FILE).read_text() == ""


def no_locks(*_arguments):
    raise OSError(37, "No locks available")


@pytest.mark.parametrize(
    ("owner", "free"),
    [
        ("", True),
        ("torn {", True),
        ({"pid": os.getpid(), "host": socket.gethostname()}, False),
        ({"pid": 2**22 + 1, "host": socket.gethostname()}, True),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, False),
        ({"pid": 1, "host": "elsewhere", "slurm_job": "7"}, True),  # an earlier attempt of this job, on a lost node
        ({"pid": 1, "host": "elsewhere", "slurm_job": "8"}, False),  # runs
        ({"pid": 1, "host": "elsewhere", "slurm_job": "9"}, True),  # Slurm has forgotten it
    ],
)
def test_a_file_system_without_locks_goes_by_what_the_owner_wrote(tmp_path, monkeypatch, owner, free):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    programs = tmp_path / "programs"
    programs.mkdir()
    forgotten = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
    (programs / "squeue").write_text(f'#!/bin/bash\n[ "$2" != --jobs=8 ] || exec echo RUNNING\n{forgotten}\n')
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / LOCK_FILE).write_text(owner if isinstance(owner, str) else json.dumps(owner))
    if free:
        with owned(tmp_path, resume=True):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        return
    with pytest.raises(CheckpointError, match=r"run\.lock"), owned(tmp_path, resume=True):
        pass


def test_a_directory_that_was_removed_meanwhile_does_not_hide_the_end(tmp_path):
    with owned(tmp_path / "run", resume=False) as run_dir:
        (run_dir / LOCK_FILE).unlink()
        run_dir.rmdir()


def test_a_directory_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"trainer\.run_dir.*file/run"),
        owned(tmp_path / "file" / "run", resume=False),
    ):
        pass


def test_a_run_is_not_started_over_another_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="--resume"), owned(tmp_path, resume=False):
        pass


def test_what_to_do_on_a_full_disk_is_what_the_run_directory_allows(tmp_path):
    """A run that recorded nothing has no directory left that could be resumed."""
    full, run_dir = OSError(errno.ENOSPC, "No space left on device"), tmp_path / "run"

    def advice() -> str:
        return disk_fault(full, run_dir)[1]

    (run_dir / "checkpoints" / "step_000001.tmp").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("")
    assert advice() == "free disk space and start again: there is no checkpoint yet"
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert advice() == "free disk space and --resume, which begins at step 0: there is no checkpoint yet"
    (run_dir / "checkpoints" / "step_000001").mkdir()
    assert advice() == "free disk space and --resume"
    assert disk_fault(full, run_dir, "run it again")[1] == "free disk space and run it again"
