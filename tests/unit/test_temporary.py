"""Temporary directories: those of dead owners go, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron_daro import temporary
from megatron_daro.temporary import own_directory

OWNER = """
import sys, time
from megatron_daro import temporary
with temporary.own_directory("ray", sys.argv[1]) as directory:
    (directory / "session").mkdir()
    print(directory, flush=True)
    time.sleep(300)
"""
FORKS = """
import multiprocessing, sys, time
from megatron_daro import temporary
if __name__ == "__main__":
    temporary.use_own_sockets()
    temporary.use_own_sockets()
    process = multiprocessing.get_context("forkserver").Process(target=print)
    process.start()
    process.join()
    print(multiprocessing.util.get_temp_dir(), flush=True)
    if sys.argv[1:] == ["wait"]:
        time.sleep(300)
"""


@pytest.fixture
def owner(tmp_path):
    """A process that owns a directory below tmp_path, and the directory."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait(30)
    process.stdout.close()


def test_what_a_killed_owner_leaves_is_removed_at_the_next_start_and_not_before(owner, tmp_path):
    process, directory = owner
    with own_directory("ray", str(tmp_path)) as mine:
        assert (directory / "session").is_dir(), "its owner lives"
    assert not mine.exists() and directory.is_dir()
    process.kill()
    process.wait(30)
    assert directory.is_dir()
    with own_directory("pymp", str(tmp_path)):
        assert not directory.exists()


def test_what_is_not_proved_to_be_ours_stays(owner, tmp_path):
    process, directory = owner
    process.kill()
    process.wait(30)
    without_lock, another = tmp_path / "daro_ray_nobody", tmp_path / "other_ray_1"
    for path in (without_lock, another):
        path.mkdir()
    (another / "owner.lock").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp_path / "daro_ray_link").symlink_to(elsewhere)
    forged = tmp_path / "daro_ray_forged"
    forged.mkdir()
    (forged / "owner.lock").symlink_to(elsewhere / "owner.lock")
    (tmp_path / "daro_ray_file").touch()
    with own_directory("ray", str(tmp_path)):
        pass
    assert not directory.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("daro_ray_nobody", "other_ray_1", "elsewhere", "daro_ray_link", "daro_ray_forged", "daro_ray_file")
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_stays(owner, tmp_path):
    process, directory = owner
    process.kill()
    process.wait(30)
    os.chown(directory, 12345, -1)
    with own_directory("ray", str(tmp_path)):
        assert directory.is_dir()


def test_a_directory_in_which_a_child_of_the_dead_owner_works_stays(owner, tmp_path):
    process, directory = owner
    process.kill()
    process.wait(30)
    command = [
        sys.executable,
        "-c",
        "print(flush=True); import time; time.sleep(99)",
        f"--temp_dir={directory}/session",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline(), "from here on its command line is its own"
        with own_directory("ray", str(tmp_path)):
            assert directory.is_dir()
    finally:
        child.kill()
        child.communicate(timeout=30)
    with own_directory("ray", str(tmp_path)):
        assert not directory.exists()


def test_leftovers_go_whatever_stands_between_them(tmp_path):
    """A name of nobody is skipped and does not end the search; the kernel lists names in no order."""
    for number in range(12):
        (tmp_path / f"daro_pymp_dead{number}" / "session").mkdir(parents=True)
        (tmp_path / f"daro_pymp_dead{number}" / "owner.lock").touch()
        (tmp_path / f"daro_ray_nobody{number}").mkdir()
        (tmp_path / f"daro_ray_link{number}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner.lock").touch()
    with own_directory("ray", str(tmp_path)) as mine:
        assert mine.parent == tmp_path and (mine / "owner.lock").is_file()
    assert {path.name.rstrip("0123456789") for path in tmp_path.iterdir()} == {
        *("daro_ray_nobody", "daro_ray_link", "elsewhere")
    }


def test_without_locks_a_directory_is_made_and_left_to_nobodys_judgement(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    with own_directory("ray", str(tmp_path)) as mine:
        assert [path.name for path in mine.iterdir()] == ["owner.lock.new"]
    assert not mine.exists()


@pytest.fixture
def short_path():
    """A directory whose sockets have names of less than the 108 bytes that the kernel takes."""
    with tempfile.TemporaryDirectory(prefix="daro-test-") as folder:
        yield Path(folder)


def test_sockets_of_fork_servers_are_in_a_directory_of_ours(short_path):
    tmp_path = short_path
    code, environment = tmp_path / "forks.py", {**os.environ, "TMPDIR": str(tmp_path)}
    code.write_text(FORKS)
    command = [sys.executable, str(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert Path(done.stdout.split()[-1]).name.startswith("daro_pymp_")
    assert [path.name for path in tmp_path.iterdir()] == ["forks.py"], done.stderr
    with subprocess.Popen([*command, "wait"], env=environment, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        directory = Path(killed.stdout.read(1) and killed.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("daro_pymp_*")), directory
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("daro_pymp_*")) and time.monotonic() < deadline:  # the fork server itself ends a bit later
        with own_directory("ray", str(tmp_path)):
            time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["forks.py"]


WRITES_ON = """
import pathlib, sys, time
print(flush=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    folder = pathlib.Path(sys.argv[1], "session")
    try:
        folder.mkdir(exist_ok=True)
        (folder / "log").write_text("more")
    except OSError:
        if not folder.parent.is_dir():
            break
"""


def test_a_directory_goes_although_an_ending_process_still_writes_there(tmp_path):
    with own_directory("ray", str(tmp_path)) as directory:
        command = [sys.executable, "-c", WRITES_ON, str(directory)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdout is not None and child.stdout.readline()
    child.communicate(timeout=30)
    assert not directory.exists()
