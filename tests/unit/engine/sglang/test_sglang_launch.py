"""A server's process from its launch to its end: its arguments and environment, how parts meet, why it is gone."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sglang_process_trees import alive, eventually, read_pids

from megatron_daro.config.sections import SGLangSection
from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.engine.sglang import servers as servers_module
from megatron_daro.engine.sglang.interpreter import check_environments, inspect_environment, interpreter
from megatron_daro.engine.sglang.servers import LaunchOptions, ServerProcess
from megatron_daro.errors import EngineError
from megatron_daro.sync.in_server import FOLDER

LOADER = TRANSPORTS["shards"].loader

PYTHON = Path(sys.executable)


def fake_sglang(directory, text, **options):
    """An interpreter whose `-m sglang.launch_server` is this shell script."""
    (directory / "config.json").write_text("{}")
    path = directory / "python"
    path.write_text(f'#!/bin/sh\ncase "$1$2" in -msglang.launch_server) {text};; esac\nexec {PYTHON} "$@"\n')
    path.chmod(0o755)
    return LaunchOptions(**{
        "python": path, "model_path": directory, "tensor_parallel": 1, "seed": 0, "arguments": {}, "env": {},
        "log_path": directory / "log", **options,
    })  # fmt: skip


def log_of(options, meeting=""):
    """What a server that ends at once wrote, and where its parts meet."""
    server = ServerProcess(options, "127.0.0.1")
    try:
        server.launch(meeting)
        eventually(server.death, "the command to end")
        return options.log_path.read_text(), server.meeting
    finally:
        server.stop()
        options.log_path.unlink()


@pytest.mark.parametrize(("end", "how"), [("exit 3", "3"), ("exit 255", "exit code 255"), ("kill -9 $$", "signal 9")])
def test_a_process_that_ended_is_described_with_its_last_words(tmp_path, end, how):
    server = ServerProcess(fake_sglang(tmp_path, f"seq 1 20; echo '  last  '; {end}"), "127.0.0.1")
    assert server.death()
    server.launch()
    eventually(server.death, "the command to end")
    assert how in server.death() and str(tmp_path / "log") in server.death() and server.death().endswith("20 | last")
    server.stop()


def test_a_second_launch_ends_the_first(tmp_path):
    server = ServerProcess(fake_sglang(tmp_path, f"echo $$ >> {tmp_path / 'pids'}; exec sleep 600"), "127.0.0.1")
    assert server.launch() != ""
    (first,) = read_pids(tmp_path / "pids", 1)
    assert server.death() == ""
    server.launch()
    _, second = read_pids(tmp_path / "pids", 2)
    assert alive([first, second]) == [second]
    server.stop()
    server.stop()
    assert not alive([second])


def test_a_model_that_is_not_there_is_named_before_anything_starts(tmp_path):
    options = replace(fake_sglang(tmp_path, "exit 0"), model_path=tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"model\.path.*nowhere.*config\.json"):
        ServerProcess(options, "127.0.0.1").launch()


def test_parts_of_a_server_meet_at_the_first(tmp_path):
    options = fake_sglang(tmp_path, 'echo "$@"; exit 0', parts=2)
    first, at = log_of(options)
    assert first.split()[-6:] == ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", at]
    second, _ = log_of(replace(options, part=1), "10.0.0.1:5")
    assert second.split()[-6:] == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5"]
    assert "--nnodes" not in log_of(replace(options, parts=1))[0]


def environment_of(options):
    return dict(line.split("=", 1) for line in log_of(options)[0].splitlines() if "=" in line)


@pytest.mark.parametrize(
    ("arguments", "env", "kept"),
    [({"device": "cpu"}, {}, "0"), ({"device": "cpu"}, {"MALLOC_MMAP_MAX_": "9"}, "9"), ({}, {}, None)],
    ids=["cpu", "the user's wins", "gpu"],
)
def test_a_server_on_a_cpu_keeps_the_memory_of_buckets(tmp_path, arguments, env, kept):
    seen = environment_of(fake_sglang(tmp_path, "exec env", arguments=arguments, env=env))
    assert seen["GLOO_SOCKET_IFNAME"] == "lo" and seen.get("MALLOC_MMAP_MAX_") == kept


@pytest.mark.parametrize(
    ("gpus", "maps_memory", "env", "want"),
    [
        (None, False, {}, "5"),
        ("2,3", False, {}, "2,3"),
        ("2,3", True, {}, "2,3,0,1"),
        ("2,3", False, {"CUDA_VISIBLE_DEVICES": "7"}, "7"),
    ],
    ids=["what Ray gave it", "shared", "shared, and maps those of others", "the user's wins"],
)
def test_a_server_sees_the_gpus_that_it_shares(tmp_path, monkeypatch, gpus, maps_memory, env, want):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    own_first = lambda own: ",".join(dict.fromkeys([*own.split(","), *"0123"]))
    monkeypatch.setattr(servers_module, "gpus_with_own_first", own_first)
    seen = environment_of(fake_sglang(tmp_path, "exec env", env=env, maps_memory=maps_memory, gpus=gpus))
    assert seen["CUDA_VISIBLE_DEVICES"] == want


@pytest.mark.parametrize(
    ("given", "env", "loaders", "paths"),
    [
        ({}, {}, [], []),
        ({"custom_weight_loader": "mine.load"}, {"PYTHONPATH": "/mine"}, ["mine.load"], ["/mine"]),
        ({"custom_weight_loader": ["a.b", "c.d"]}, {}, ["a.b", "c.d"], []),
    ],
)
def test_a_server_that_takes_shards_is_started_with_our_loader_beside_those_of_the_user(
    tmp_path, given, env, loaders, paths
):
    text = 'echo "$@"; echo "path=$PYTHONPATH"; exit 0'
    said, _ = log_of(fake_sglang(tmp_path, text, arguments=given, env=env, loader=LOADER))
    words, path = said.splitlines()
    after = words.split("--custom-weight-loader ")[1].split()
    assert after[: len(loaders) + 1] == [*loaders, LOADER]
    assert path.removeprefix("path=").split(os.pathsep) == [str(FOLDER), *paths]


def test_the_interpreter_is_that_of_the_option_else_our_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert interpreter(SGLangSection(python=Path("here/python"))) == tmp_path / "here" / "python"
    assert interpreter(SGLangSection()) == PYTHON


def test_servers_that_run_already_have_interpreters_of_their_own():
    check_environments(SGLangSection(urls=("http://127.0.0.1:1",), python=Path("/nowhere/python")))


def test_what_an_interpreter_prints_before_its_answer_is_passed_over(tmp_path):
    fake = tmp_path / "python"
    answer = '{"version": "0.5.23", "names": ["a"], "python": "3.11.2"}'
    fake.write_text(f"#!/bin/sh\necho hello\necho '{answer}'\n")
    fake.chmod(0o700)
    assert inspect_environment(fake).version == "0.5.23"
