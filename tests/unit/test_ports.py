"""Reserved ports: outside the kernel's range, unique over processes, free again after a crash."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_daro import ports
from megatron_daro.errors import EngineError
from megatron_daro.ports import candidate_ports, reserve_port


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"megatron_daro-ports-{os.getuid()}"


@pytest.fixture
def few(monkeypatch):
    """Leaves a few candidates that nothing listens on."""

    def leave(number: int) -> list[int]:
        with ExitStack() as held:
            found = [held.enter_context(reserve_port("127.0.0.1")).port for _ in range(number)]
        found.sort()
        monkeypatch.setattr(ports, "candidate_ports", lambda: found)
        return found

    return leave


def test_port_can_be_bound_while_it_is_reserved():
    with reserve_port("127.0.0.1") as reservation, socket.socket() as server:
        assert reservation.port in candidate_ports()
        server.bind(("127.0.0.1", reservation.port))


def test_candidates_avoid_outgoing_connections_and_rays_workers(tmp_path):
    file = tmp_path / "range"
    file.write_text("32768\t60999\n")
    assert candidate_ports(file) == [*range(20000, 32768), *range(61000, 65536)]
    file.write_text("15000 65535")
    assert candidate_ports(file) == list(range(10241, 15000))
    file.write_text("1024 65535")
    assert candidate_ports(file) == list(range(10241, 65536))
    assert candidate_ports(tmp_path / "missing") == [*range(20000, 32768), *range(61000, 65536)]


def test_no_port_is_given_twice_until_it_is_given_back(few):
    expected = few(4)
    held = [reserve_port("127.0.0.1") for _ in expected]
    assert sorted(r.port for r in held) == expected
    with pytest.raises(EngineError, match=r"127\.0\.0\.1"):
        reserve_port("127.0.0.1")
    held[2].close()
    held[2].close()
    with reserve_port("127.0.0.1") as again:
        assert again.port == held[2].port
    for reservation in held:
        reservation.close()


def test_a_port_that_someone_listens_on_is_passed_over(few):
    taken, free = few(2)
    for address in ("127.0.0.1", "0.0.0.0", "127.0.0.3"):
        with socket.socket() as other:
            other.bind((address, taken))
            other.listen()
            with reserve_port("127.0.0.1") as reservation:
                assert reservation.port == free


def test_processes_at_once_get_different_ports(own_directory, few):
    """Forty reservations of four processes out of forty candidates: each collision would be seen."""
    expected = few(40)
    code = f"""
import sys
from megatron_daro import ports
ports.candidate_ports = lambda: {expected!r}
held = []
sys.stdin.readline()
for _ in range(10):
    held.append(ports.reserve_port("127.0.0.1"))
print(*(r.port for r in held), flush=True)
sys.stdin.read()
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [int(word) for process in started for word in process.stdout.readline().split()]
    for process in started:
        process.communicate(timeout=60)
    assert sorted(found) == expected
    assert list(own_directory.iterdir()) != [], "crashed or ended processes leave files, which is harmless"
    again = [reserve_port("127.0.0.1") for _ in expected]
    assert sorted(r.port for r in again) == expected
    for reservation in again:
        reservation.close()
    assert list(own_directory.iterdir()) == []


def test_killed_holder_gives_the_port_back(few):
    (port,) = few(1)
    code = f"""
import sys
from megatron_daro import ports
ports.candidate_ports = lambda: [{port}]
held = ports.reserve_port("127.0.0.1")
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(EngineError):
        reserve_port("127.0.0.1")
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=60)
    with reserve_port("127.0.0.1") as reservation:
        assert reservation.port == port


def test_forked_child_does_not_keep_a_port_that_was_given_back(few):
    few(1)
    reservation = reserve_port("127.0.0.1")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    reservation.close()
    reserve_port("127.0.0.1").close()
    os.close(write_end)
    os.waitpid(child, 0)


def test_lock_on_a_removed_file_is_no_reservation(own_directory, few, monkeypatch):
    """The holder removes its file between our open and our lock: the lock is on a file that nobody else will see."""
    few(1)
    locked = []

    def remove_then_lock(descriptor, operation):
        if operation & fcntl.LOCK_EX and not locked:
            locked.append(descriptor)
            next(own_directory.iterdir()).unlink()
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with pytest.raises(EngineError):
        reserve_port("127.0.0.1")
    assert locked
    reserve_port("127.0.0.1").close()


def test_what_stands_in_the_place_of_a_lock_file_is_passed_over(own_directory, few):
    directory, link, free = few(3)
    own_directory.mkdir(mode=0o700, exist_ok=True)
    (own_directory / str(directory)).mkdir()
    (own_directory / str(link)).symlink_to("/dev/null")
    with reserve_port("127.0.0.1") as reservation:
        assert reservation.port == free


def test_directory_that_is_not_ours_is_passed_over(own_directory):
    own_directory.symlink_to(own_directory.parent)
    Path(f"{own_directory}-1").write_text("a file")
    with reserve_port("127.0.0.1") as reservation:
        assert [path.name for path in Path(f"{own_directory}-2").iterdir()] == [str(reservation.port)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_directory_of_another_user_is_passed_over(own_directory):
    own_directory.mkdir(mode=0o777)
    os.chown(own_directory, 4711, 4711)
    with reserve_port("127.0.0.1") as reservation:
        assert [path.name for path in Path(f"{own_directory}-1").iterdir()] == [str(reservation.port)]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_of_another_machine_is_refused(host):
    with pytest.raises(EngineError, match=host):
        reserve_port(host)


def test_a_directory_that_cannot_be_made_is_passed_over(own_directory):
    own_directory.symlink_to(own_directory)  # leads nowhere: mkdir fails
    with reserve_port("127.0.0.1") as reservation:
        assert [path.name for path in Path(f"{own_directory}-1").iterdir()] == [str(reservation.port)]
