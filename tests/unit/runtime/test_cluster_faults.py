"""What keeps Ray from starting is a sentence that names the cause, and comes soon."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
from ray._private import services

from megatron_daro.errors import ConfigError, WorkerError
from megatron_daro.runtime import cluster
from megatron_daro.runtime.cluster import (
    LEAST_OPEN_FILES,
    check_address,
    not_started,
    own_directory,
)


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound, and nobody listens


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(closed_port, form):
    address = form.format(closed_port)
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS: got '{address}'.*:{closed_port} "):
        check_address(address)


@pytest.mark.parametrize("given", ["of a person", None])
def test_what_ray_and_tokenizers_must_know_is_set_and_what_a_person_set_stays(monkeypatch, given):
    """RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0: a worker without GPUs of its own keeps CUDA_VISIBLE_DEVICES
    (ray/_private/utils.py, set_visible_accelerator_ids, Ray 2.60)."""
    wanted = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    wanted |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for name in wanted:
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with cluster.cluster(1):
            assert {name: os.environ[name] for name in wanted} == {n: given or value for n, value in wanted.items()}


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
    with pytest.raises(ConfigError, match="RAY_ADDRESS: got 'auto'"):
        check_address("auto")


def test_a_soft_limit_of_open_files_is_raised_and_too_low_a_hard_one_refused():
    code = (
        "import resource, sys\n"
        "from megatron_daro.errors import ConfigError\n"
        "from megatron_daro.runtime.cluster import check_limits\n"
        "for hard in (int(sys.argv[1]), 64):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "    try:\n"
        "        check_limits()\n"
        "        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    hard = str(min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096))
    done = subprocess.run([sys.executable, "-c", code, hard], capture_output=True, text=True, check=True)
    raised, refused = done.stdout.splitlines()
    assert raised == hard and "open files" in refused and "64" in refused and str(LEAST_OPEN_FILES) in refused


def test_a_temporary_directory_that_cannot_be_written_is_named(monkeypatch):
    with ExitStack() as stack:
        made = own_directory(stack)
        assert made.name.startswith("daro_ray_")
    assert not made.exists()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/gone")
    with pytest.raises(ConfigError, match="TMPDIR"):
        own_directory(ExitStack())


@pytest.mark.parametrize(
    ("error", "fails", "starts"),
    [
        # ray/_private/node.py, 2.60
        ("The current node timed out during startup. This could happen because some of the raylet", 2, 3),
        ("The current node timed out during startup. This could happen because some of the raylet", 9, 3),
        ("no room", 9, 1),
    ],
)
def test_ray_that_was_too_slow_to_start_is_started_again(monkeypatch, error, fails, starts):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started, raylet = [], SimpleNamespace(pid=2**22 + 1)  # of a process that is gone
    raylet.name, raylet.status, raylet.suspend = lambda: "raylet", lambda: "running", lambda: None
    raylet.children = list

    def init(**options):
        started.append(options)
        if len(started) <= fails:
            raise RuntimeError(error)

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [raylet])
    if fails < starts:
        with cluster.cluster(1):
            pass
    else:
        with pytest.raises(WorkerError, match=error[:20]), cluster.cluster(1):
            pytest.fail("it did not start")
    assert len(started) == starts


def test_what_keeps_ray_from_starting_is_told_in_a_line():
    assert "/dev/null/x/.ray" in str(not_started(NotADirectoryError(20, "Not a directory", "/dev/null/x/.ray")))
    said = str(not_started(RuntimeError("\x1b[33mboom\x1b[0m\n   " + "x" * 1000)))
    assert "boom xxx" in said and "\x1b" not in said and "\n" not in said and len(said) < 500
