"""A server's process from its launch to its end: which files and ports it has, how parts meet, why it is gone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_process_trees import alive, eventually, python

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import command, upstream_names
from megatron_daro.engine.sglang import servers as servers_module
from megatron_daro.engine.sglang.command import check_environments, interpreter, server_environment
from megatron_daro.engine.sglang.servers import (
    ExternalServer,
    LaunchOptions,
    LocalServer,
    ManagedProcess,
    ServerProcess,
)
from megatron_daro.errors import ConfigError, EngineError

PYTHON = Path(sys.executable)


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


def managed(command, log, interpreter=PYTHON):
    return ManagedProcess(command, host="127.0.0.1", env={}, log_path=log, python=interpreter)


def test_a_start_that_fails_leaves_nothing_open(tmp_path):
    before = open_files()
    with pytest.raises(EngineError, match="could not run /nowhere/python"):
        managed(["x"], tmp_path / "log", Path("/nowhere/python")).start()
    assert open_files() == before


def test_a_process_that_ended_leaves_nothing_open_and_its_watchdog_had_a_session_of_its_own(tmp_path):
    before = open_files()
    process = managed(python("import sys; sys.stdin.read(); print('up', flush=True)"), tmp_path / "log")
    process.start()
    assert os.getsid(process.watchdog_pid) == process.watchdog_pid
    eventually(lambda: process.poll() is not None, "the command to end")
    assert process.stop() == 0 and process._input is None and open_files() == before


def test_an_interpreter_that_does_nothing_is_ended_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(servers_module, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(servers_module, "_WATCHDOG_KILL_AFTER_S", 0.1)
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o700)
    process = managed(["x"], tmp_path / "log", fake)
    with pytest.raises(EngineError, match=r"did not start 'x' within 0\.1 s; it wrote: nothing"):
        process.start()
    assert not alive([process.watchdog_pid])


def test_the_group_of_a_killed_watchdog_is_ended_once(tmp_path, monkeypatch):
    """A second time, another process may have the number."""
    process, ended = managed(python("import time; time.sleep(600)"), tmp_path / "log"), []
    process.start()
    monkeypatch.setattr(servers_module.os, "killpg", lambda pid, number: ended.append(pid))
    process._watchdog.kill()
    eventually(lambda: process.poll() is not None, "the watchdog to be gone")
    assert process.poll() == 137 and process.stop() == 137 and ended == [process.pid]
    monkeypatch.undo()
    eventually(lambda: not alive([process.pid]), "the command to be gone")


def fake_sglang(directory, text):
    """An interpreter whose `-m sglang.launch_server` is this shell script."""
    (directory / "config.json").write_text("{}")
    path = directory / "python"
    path.write_text(f'#!/bin/sh\ncase "$1$2" in -msglang.launch_server) {text};; esac\nexec {PYTHON} "$@"\n')
    path.chmod(0o755)
    return LaunchOptions(
        python=path, model_path=directory, tensor_parallel=1, seed=0, arguments={}, env={}, log_path=directory / "log"
    )


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("seq 1 20; echo; echo '  last  '; exit 3", "exit code 3"),
        ("seq 1 20; echo; echo last; kill -9 $$", "signal 9"),
        ("seq 1 20; echo; echo last; exit 128", "exit code 128"),
    ],
)
def test_a_process_that_ended_is_described_with_its_last_words(tmp_path, text, how):
    server = ServerProcess(fake_sglang(tmp_path, text), "127.0.0.1")
    assert server.death() == "it was not started"
    server.launch()
    eventually(server.death, "the command to end")
    lines = " | ".join([*map(str, range(11, 21)), "last"])  # of 12, one is empty
    assert server.death() == f"its process ended with {how}; log {tmp_path / 'log'}: {lines}"
    server.stop()
    assert server.death() == "it was not started"


def test_a_second_launch_ends_the_first_and_ports_are_kept_until_the_end(tmp_path):
    server = ServerProcess(fake_sglang(tmp_path, "exec sleep 600"), "127.0.0.1")
    first_url, first = server.launch(), server._process
    assert server.death() == ""
    ports = [int(first_url.rpartition(":")[2]), int(server.meeting.rpartition(":")[2])]
    assert len({*ports}) == 2 and server.meeting == f"127.0.0.1:{ports[1]}"
    server.launch()
    assert not alive([first.pid]) and first is not server._process
    reservations = [*server._ports]
    server.stop()
    server.stop()
    assert server._ports == [] and len(reservations) == 2
    for reservation in reservations:
        with socket.create_server(("127.0.0.1", reservation.port)):
            pass


def test_a_model_that_is_not_there_is_named_before_anything_starts(tmp_path):
    options = replace(fake_sglang(tmp_path, "exit 0"), model_path=tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"model\.path: .*nowhere has no config\.json on the host of this server"):
        ServerProcess(options, "127.0.0.1").launch()


def test_parts_of_a_server_meet_at_the_first(tmp_path):
    options = replace(fake_sglang(tmp_path, 'echo "$@"; exit 0'), parts=2)

    def words_of(server, meeting=""):
        server.launch(meeting)
        eventually(server.death, "the command to end")
        told, at = server._process.log_tail().split(), server.meeting
        server.stop()
        return told, at

    first, at = words_of(ServerProcess(options, "127.0.0.1"))
    assert first[-6:] == ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", at]
    second, _ = words_of(ServerProcess(replace(options, part=1), "127.0.0.1"), "10.0.0.1:5")
    assert second[-6:] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5"]
    alone, _ = words_of(ServerProcess(replace(options, parts=1), "127.0.0.1"))
    assert "--nnodes" not in alone


def test_an_address_of_ipv6_stands_in_brackets(tmp_path):
    server = ServerProcess(fake_sglang(tmp_path, "exit 0"), "::1")
    server._ports = [SimpleNamespace(port=4), SimpleNamespace(port=5)]
    assert server.meeting == "[::1]:5"


def test_servers_of_this_machine_and_of_others_are_handled_alike(tmp_path):
    async def scenario():
        ours, theirs = LocalServer(fake_sglang(tmp_path, "exec sleep 600")), ExternalServer("http://there:1/")
        assert ours.restartable and not theirs.restartable
        assert (await ours.launch()).startswith("http://127.0.0.1:") and await theirs.launch() == "http://there:1"
        assert await ours.death() == await theirs.death() == ""
        pid = ours._process._process.pid
        await theirs.stop()
        await ours.stop()
        assert not alive([pid]) and await ours.death() == "it was not started"

    asyncio.run(scenario())


@pytest.mark.parametrize(("value", "listed"), [(None, []), ("a", ["a"]), (("a", "b"), ["a", "b"]), (["a"], ["a"])])
def test_one_value_or_several(value, listed):
    assert servers_module._listed(value) == listed


def test_an_environment_without_path_has_that_of_the_system():
    found = server_environment({}, host="10.0.0.1", python=Path("/server/bin/python"), inherited={"no_proxy": "a,,a,b"})
    assert found["PATH"] == f"/server/bin{os.pathsep}{os.defpath}"
    assert found["no_proxy"] == "a,b,10.0.0.1,127.0.0.1,localhost" and "GLOO_SOCKET_IFNAME" not in found
    empty = server_environment({}, host="localhost", python=Path("/server/bin/python"), inherited={"PATH": ""})
    assert empty["PATH"] == "/server/bin" and empty["NO_PROXY"] == "localhost,127.0.0.1"


def test_the_interpreter_is_that_of_the_option_else_our_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert interpreter(SGLangSection(python=Path("here/python"))) == tmp_path / "here" / "python"
    assert interpreter(SGLangSection()) == PYTHON


def test_servers_that_run_already_have_interpreters_of_their_own():
    check_environments(SGLangSection(urls=("http://127.0.0.1:1",), python=Path("/nowhere/python")))


def test_what_an_interpreter_prints_before_its_answer_and_what_is_no_text(tmp_path):
    fake = tmp_path / "python"
    answer = '{"version": "0.5.23", "names": ["a"], "python": "3.11.2"}'
    fake.write_text(f"#!/bin/sh\necho hello\necho '{answer}'\n")
    fake.chmod(0o700)
    assert command.inspect_environment(fake) == command.ServerEnvironment("0.5.23", frozenset({"a"}))
    fake.write_text("#!/bin/sh\nprintf 'odd \\377'; cat; exit 4\n")
    with pytest.raises(ConfigError, match="status 4; it wrote: odd \N{REPLACEMENT CHARACTER}"):
        command.inspect_environment(fake)
    fake.write_text("#!/bin/sh\nprintf '%0500d' 7 >&2; echo said; exit 4\n")
    with pytest.raises(ConfigError, match=f"it wrote: {'0' * 399}7\\)"):
        command.inspect_environment(fake)
    fake.write_text("#!/bin/sh\nexit 4\n")
    with pytest.raises(ConfigError, match="status 4; it wrote: nothing"):
        command.inspect_environment(fake)


@pytest.mark.parametrize(
    ("options", "own", "theirs", "count"),
    [
        ({}, "nvidia-nccl-cu13==2.1", "nvidia-nccl-cu13==2.2", 1),
        ({}, "nvidia-nccl-cu13==2.1", "nvidia-nccl-cu12==2.1", 0),
        ({}, None, "nvidia-nccl-cu13==2.2", 0),
        ({}, "nvidia-nccl-cu13==2.1", None, 0),
        ({"sync": "disk"}, "nvidia-nccl-cu13==2.1", "nvidia-nccl-cu13==2.2", 0),
    ],
)
def test_versions_of_nccl_are_compared_where_both_broadcast(monkeypatch, options, own, theirs, count):
    monkeypatch.setattr(command.upstream_names, "nccl_package", lambda: own)
    problems = command._nccl_problems(SGLangSection(**options), PYTHON, theirs)
    assert [problem.also for problem in problems] == [("engine.sglang.python",)] * count


@pytest.mark.parametrize(
    ("own", "theirs", "over", "lacking"),
    [
        (True, True, "rdma", ()),
        (False, False, "tcp", ()),
        (False, True, "rdma", (PYTHON,)),
        (True, False, "rdma", ("/theirs",)),
        (False, False, "rdma", (PYTHON, "/theirs")),
    ],
)
def test_mooncake_is_named_for_each_interpreter_that_lacks_it(monkeypatch, own, theirs, over, lacking):
    monkeypatch.setattr(command.upstream_names, "has_mooncake", lambda: own)
    options = SGLangSection(sync="shards", shards_over=over)
    problems = command._mooncake_problems(options, Path("/theirs"), theirs)
    assert [problem.got for problem in problems] == [
        f"{over}, but no mooncake-transfer-engine for {' and '.join(map(str, lacking))}" for _ in lacking[:1]
    ]
    assert all(problem.also == ("engine.sglang.python",) for problem in problems)


@pytest.mark.parametrize("installed", [("cu13", "cu12"), ("cu12",), ()])
def test_the_nccl_of_torch_is_found_under_either_name(monkeypatch, installed):
    def version(name):
        if name.rpartition("-")[2] not in installed:
            raise upstream_names.importlib.metadata.PackageNotFoundError(name)
        return "2.3"

    monkeypatch.setattr(upstream_names.importlib.metadata, "version", version)
    expected = f"nvidia-nccl-{installed[0]}==2.3" if installed else None
    assert upstream_names.nccl_package() == expected
