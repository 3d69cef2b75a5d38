"""ManagedProcess with real commands: start, log, kill, and an owner that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sglang_pool import required_environment
from sglang_process_trees import alive, eventually, python, read_pids, state, tree

from megatron_daro.engine.sglang.command import is_loopback, server_environment
from megatron_daro.engine.sglang.process import ManagedProcess
from megatron_daro.errors import EngineError

PYTHON = Path(sys.executable)


@pytest.fixture
def managed(tmp_path):
    made = []

    def make(command, **env):
        process = ManagedProcess(command, host="127.0.0.1", env=env, log_path=tmp_path / "a" / "log", python=PYTHON)
        made.append(process)
        return process

    yield make
    for process in made:
        process.kill()


def ended(process: ManagedProcess) -> int:
    eventually(lambda: process.poll() is not None, "the command to end")
    code = process.poll()
    assert code is not None
    return code


def test_status_pid_and_log(managed):
    process = managed(python("import os, sys\nprint('pid', os.getpid())\nprint('bad', file=sys.stderr)\nsys.exit(4)"))
    assert process.pid is None and process.poll() is None and process.log_tail() == ""
    process.start()
    assert ended(process) == 4
    assert sorted(process.log_tail().split("\n")) == sorted([f"pid {process.pid}", "bad"])
    process.kill()
    assert process.poll() == 4


def test_log_tail_is_of_this_process_and_bounded(managed, tmp_path):
    first = managed(python("print('of the first')"))
    first.start()
    ended(first)
    second = managed(python("for i in range(20000): print(f'line {i}')"))
    second.start()
    ended(second)
    assert second.log_tail(2) == "line 19998\nline 19999"
    assert len(second.log_tail(10**6)) <= 65536
    assert (tmp_path / "a" / "log").read_text().startswith("of the first\nline 0\n")


def test_missing_command_gives_127_and_says_why(managed):
    process = managed(["/nowhere/python"])
    process.start()
    assert ended(process) == 127
    assert "/nowhere/python" in process.log_tail()


def test_missing_interpreter_is_an_error(tmp_path):
    process = ManagedProcess(["x"], host="127.0.0.1", env={}, log_path=tmp_path / "log", python=Path("/nowhere/python"))
    with pytest.raises(EngineError, match="/nowhere/python"):
        process.start()
    process.kill()
    assert process.poll() is None


def watchdog_of(process):
    """Process id of what started the command."""
    return psutil.Process(process.pid).ppid()


def test_kill_ends_the_tree_and_may_be_repeated(managed, tmp_path):
    process = managed(tree(tmp_path / "pids"))
    process.start()
    pids = read_pids(tmp_path / "pids")
    assert process.pid in pids and process.poll() is None
    watchdog = watchdog_of(process)
    for _ in range(2):
        process.kill()
        assert process.poll() == 137
        assert not alive([*pids, watchdog])


def test_kill_does_not_need_the_watchdog(managed, tmp_path):
    process = managed(tree(tmp_path / "pids", own_session=True))
    process.start()
    pids = read_pids(tmp_path / "pids")
    watchdog = watchdog_of(process)
    os.kill(watchdog, signal.SIGSTOP)
    eventually(lambda: state(watchdog) == "T", "the watchdog to be stopped")
    process.kill()
    assert process.poll() == 137
    eventually(lambda: not alive([*pids, watchdog]), "everything to be gone")


def test_killed_watchdog_is_seen_and_its_group_ended(managed, tmp_path):
    process = managed(tree(tmp_path / "pids"))
    process.start()
    pids = read_pids(tmp_path / "pids")
    os.kill(watchdog_of(process), signal.SIGKILL)
    assert ended(process) == 137
    eventually(lambda: not alive(pids), "the group to be gone")


def test_dropped_object_ends_the_command(managed, tmp_path):
    process = ManagedProcess(
        tree(tmp_path / "pids"), host="127.0.0.1", env={}, log_path=tmp_path / "log", python=PYTHON
    )
    process.start()
    pids = read_pids(tmp_path / "pids")
    with pytest.warns(ResourceWarning):
        del process
    eventually(lambda: not alive(pids), "the command of the dropped object to be gone")


def test_killed_owner_leaves_no_process(tmp_path):
    """An owner as a Ray worker may be: a thread started the process and ended; a forked child holds copies of pipes."""
    code = f"""
import os, psutil, sys, threading, time
from pathlib import Path
from megatron_daro.engine.sglang.process import ManagedProcess
log, python = Path({str(tmp_path / "log")!r}), Path({sys.executable!r})
process = ManagedProcess({tree(tmp_path / "pids")!r}, host="127.0.0.1", env={{}}, log_path=log, python=python)
starter = threading.Thread(target=process.start)
starter.start()
starter.join()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, psutil.Process(process.pid).ppid(), flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child, watchdog_pid = (int(word) for word in owner.stdout.readline().split())
    try:
        pids = [*read_pids(tmp_path / "pids"), watchdog_pid]
        time.sleep(0.5)
        assert len(alive(pids)) == 4, "the end of the starting thread ended the command"
        owner.kill()
        owner.wait(60)
        eventually(lambda: not alive(pids), "the processes of the killed owner to be gone")
        assert alive([child]), "the copy of the pipe was gone too, so nothing was tested"
    finally:
        owner.kill()
        os.kill(child, signal.SIGKILL)
        owner.wait(60)


TRAINER = {
    "PATH": "/usr/bin",
    "HOME": "/home/me",
    "VIRTUAL_ENV": "/trainer",
    "PYTHONPATH": "/trainer/lib",
    "PYTHONHOME": "/trainer",
    "PYTHONDONTWRITEBYTECODE": "1",
    "RAY_ADDRESS": "1.2.3.4:6379",
    "MASTER_PORT": "29500",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_VISIBLE_DEVICES": "3",
    "NCCL_SOCKET_IFNAME": "eth0",
    "no_proxy": "example.org",
    "HF_HUB_OFFLINE": "0",
}


def test_environment_is_clean_of_the_trainer():
    found = server_environment({}, host="127.0.0.1", python=Path("/server/bin/python"), inherited=TRAINER)
    assert found == {
        "PATH": "/server/bin:/usr/bin",
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_CUMEM_ENABLE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "no_proxy": "example.org,127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def test_sglang_itself_reads_that_it_compiles_on_demand_and_takes_gpus_that_are_unevenly_full():
    """By upstream's own names: one that it does not know is ignored."""
    python = required_environment() / "bin" / "python"
    names = ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK")
    code = f"from sglang.srt.environ import envs; print(*(getattr(envs, name).get() for name in {names}))"
    env = server_environment({}, host="127.0.0.1", python=python, inherited=TRAINER)
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_users_variables_win():
    user = {"PYTHONPATH": "/shim", "HF_HUB_OFFLINE": "0", "RAY_X": "1", "GLOO_SOCKET_IFNAME": "eth1", "PATH": "/only"}
    found = server_environment(user, host="127.0.0.1", python=Path("/server/bin/python"), inherited=TRAINER)
    assert {name: found[name] for name in user} == user


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("n7", False)],
)
def test_gloo_uses_the_loopback_interface_only_for_loopback_hosts(host, loopback):
    assert is_loopback(host) is loopback
    found = server_environment({}, host=host, python=Path("/p/python"), inherited=TRAINER)
    assert ("GLOO_SOCKET_IFNAME" in found) is loopback
    assert host in found["NO_PROXY"].split(",")
