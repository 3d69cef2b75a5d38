"""What keeps Ray from starting is a sentence that names the cause, and comes soon."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import psutil
import pytest
from ray._private import services
from ray.exceptions import ActorDiedError

from megatron_daro.errors import ConfigError, WorkerError
from megatron_daro.runtime import cluster
from megatron_daro.runtime.cluster import (
    LEAST_OPEN_FILES,
    check_address,
    check_limits,
    not_started,
    own_directory,
    plain,
)
from megatron_daro.runtime.supervisor import WorkerDiedError, _how, _worst_first, gather


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound, and nobody listens


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(closed_port, form):
    address = form.format(closed_port)
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS: got '{address}', but nobody answers at .*:{closed_port} "):
        check_address(address)


def test_what_ray_and_tokenizers_must_know_is_set_and_what_a_person_set_stays(monkeypatch):
    """RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0: a worker without GPUs of its own keeps CUDA_VISIBLE_DEVICES
    (ray/_private/utils.py, set_visible_accelerator_ids, Ray 2.60)."""
    wanted = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    wanted |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for name in wanted:
        monkeypatch.setenv(name, "of a person")
    cluster._prepare_environment()
    assert {os.environ[name] for name in wanted} == {"of a person"}
    for name in wanted:
        monkeypatch.delenv(name)
    cluster._prepare_environment()
    assert {name: os.environ[name] for name in wanted} == wanted


def test_an_address_where_somebody_listens_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_address(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["nonsense", "no.such.host.invalid:6379"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS: got '{address}'"):
        check_address(address)


def test_auto_without_a_cluster_is_refused(monkeypatch):
    # As Ray finds it where none runs; this machine may have one.
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="got 'auto', but no Ray cluster runs on this machine"):
        check_address("auto")


def test_too_few_open_files_are_refused_and_a_soft_limit_is_raised():
    code = (
        "import resource, sys\n"
        "from megatron_daro.errors import ConfigError\n"
        "from megatron_daro.runtime.cluster import check_limits\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))\n"
        "try:\n"
        "    check_limits()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    for limit, says in ((64, f"may have 64 (`ulimit -n`); allowed: at least {LEAST_OPEN_FILES}"), (hard, str(hard))):
        done = subprocess.run([sys.executable, "-c", code, str(limit)], capture_output=True, text=True, check=True)
        assert says in done.stdout
    check_limits()


def test_a_temporary_directory_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    with ExitStack() as stack:
        made = own_directory(stack)
        assert made.name.startswith("daro_ray_")
    assert not made.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    if len(str(tmp_path)) <= 30:
        with pytest.raises(ConfigError, match="TMPDIR: no temporary directory can be written"):
            own_directory(ExitStack())
    monkeypatch.setattr(tempfile, "tempdir", "/proc/gone")
    with pytest.raises(ConfigError, match="TMPDIR: no temporary directory can be written"):
        own_directory(ExitStack())


@pytest.mark.parametrize(("slow", "calls"), [(2, 3), (3, 3)])
def test_ray_that_was_too_slow_to_start_is_started_again(monkeypatch, tmp_path, slow, calls):
    starts = []
    ended = subprocess.Popen(["sleep", "0"])
    child = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [child])  # listed, and gone since

    def init(**options):
        starts.append(options)
        if len(starts) <= slow:
            # ray/_private/node.py, 2.60
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "_end_helpers_after_this_process", lambda directory: "helpers")
    if slow < calls:
        assert cluster._start_private(1, tmp_path) == "helpers"
    else:
        with pytest.raises(Exception, match="timed out during startup"):
            cluster._start_private(1, tmp_path)
    assert len(starts) == calls


def test_what_ray_says_becomes_one_line():
    assert str(not_started(NotADirectoryError(20, "Not a directory", "/dev/null/x/.ray"))).startswith(
        "Ray cannot write /dev/null/x/.ray (Not a directory); fix: set HOME"
    )
    text = "\x1b[33mboom\x1b[0m\n   " + "x" * 1000
    said = str(not_started(RuntimeError(text)))
    assert said.startswith("Ray did not start: boom xxx") and "\x1b" not in said and "\n" not in said
    assert len(plain(text)) < 310


def test_a_death_is_told_without_rays_advice():
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainWorker\n\tpid: 4711\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. There are 3 potential root causes. "
        "(1) The process is killed by SIGKILL by OOM killer. (2) ray stop --force is called."
    )
    assert _how(text) == "process 4711: Worker unexpectedly exits with a connection error code 2. End of file"
    assert _how("something else\n entirely") == "something else entirely"


def test_the_death_of_a_worker_is_told_before_what_the_others_say_of_it():
    async def says():
        raise WorkerError("rank 0: connection closed by peer")

    async def dies():
        await asyncio.sleep(0.05)
        raise ActorDiedError()

    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        asyncio.run(gather({"rank 0": says(), "rank 1": dies()}))
    first, death = WorkerError("rank 0: connection closed by peer"), WorkerDiedError("rank 1 died")
    assert _worst_first([first, None, death]) == [death, first]
