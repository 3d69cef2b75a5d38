"""The Ray cluster of a run: a private one on this machine, or the one that RAY_ADDRESS names.

Place in the data flow: started before any worker, shut down after the last. A private cluster listens on loopback
only, has no dashboard, and dies with this process even if this process is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants

from megatron_daro.config import detect
from megatron_daro.engine.sglang.keeper import descendants, signal_all
from megatron_daro.runtime.cluster_faults import check_address, check_limits, not_started, own_directory
from megatron_daro.runtime.interrupts import kept_handlers

# Ray (2.60) binds its servers to loopback only where a node's address is 127.0.0.1 itself, and replaces that address by
# the one of the network card unless this switch, made for macOS and Windows, says that the cluster is of one machine.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
LOOPBACK = "127.0.0.1"
# If Ray's raylet is killed with the driver, its helpers (dashboard, environments) try for a minute to report that to a
# server which is dead as well (ray/_private/process_watcher.py, Ray 2.60). This shell ends them after 3 seconds, and
# removes the session's directory. If the raylet dies first, Ray's C++ part ends this process; the cause is said here.
_END_HELPERS = """
dir=$1 raylet=$2; shift 2; read -r _
grep -q . "/proc/$raylet/cmdline" 2> /dev/null || echo "WorkerError: the raylet of this run (Ray's process $raylet) \
died, and the run with it. Look for oom-kill in the kernel log; --resume goes on from the newest checkpoint" >&2
sleep 3; kill -9 "$@" 2> /dev/null; sleep 1; rm -rf -- "$dir"
"""


@contextmanager
def cluster(processes: int) -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    Args:
        processes: of the run that get a place; a private cluster has as many logical CPUs, and this machine's GPUs.

    Raises:
        ConfigError: nobody answers at RAY_ADDRESS, or this process may not start one.
        WorkerError: Ray did not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    _prepare_environment()
    check_limits()
    with ExitStack() as stack:
        if address:
            check_address(address)
            with _said_in_a_sentence(), kept_handlers():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            directory = own_directory()
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            with _said_in_a_sentence():
                helper = _start_private(processes, directory)
            stack.callback(helper.kill)
        stack.callback(ray.shutdown)
        yield


def _prepare_environment() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def _said_in_a_sentence() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise not_started(error) from error


def _start_private(processes: int, directory: Path) -> subprocess.Popen[bytes]:
    """Return a cluster of this machine; as many logical CPUs as the run has processes, so that each gets a place.

    Args:
        processes: of the run. directory: for Ray's session.

    Returns:
        What ends the helpers if this process is killed; to be killed when the cluster was shut down in order.
    """
    hardware = detect()  # where torch has no CUDA, Ray must not hand out a GPU either
    try:
        # Ray's own handler of SIGTERM ends Python with code 15; that of its C++ part prints where it was.
        with kept_handlers(), _of_one_machine():
            ray.init(
                address="local",
                num_cpus=processes,
                num_gpus=hardware.count if hardware.kind == "gpu" else 0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(directory),
                object_store_memory=_object_store_bytes(),
            )
    except SystemExit as ray_was_told_to_end:
        _kill_raylets()
        raise KeyboardInterrupt from ray_was_told_to_end
    except BaseException:  # Ctrl-C during the start as well
        _kill_raylets()
        raise
    return _end_helpers_after_this_process(directory)


@contextmanager
def _of_one_machine() -> Iterator[None]:
    """Let Ray be started for this machine only; what this process starts afterwards may join other clusters."""
    before = os.environ.get(_ONE_MACHINE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_ONE_MACHINE] = "0"  # for Ray's processes; this one has read it when it imported ray
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        os.environ.pop(_ONE_MACHINE)
        if before[0] is not None:
            os.environ[_ONE_MACHINE] = before[0]
        ray_constants.ENABLE_RAY_CLUSTER = before[1]


def _raylets() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "raylet"]


def _kill_raylets() -> None:
    """Kill what this process has started of a cluster, helpers included; Ray kills the rest when Python exits."""
    for raylet in _raylets():
        with suppress(psutil.NoSuchProcess):
            raylet.suspend()  # so that it starts nothing more
            signal_all([*descendants(raylet.pid), raylet.pid], signal.SIGKILL)


def _end_helpers_after_this_process(directory: Path) -> subprocess.Popen[bytes]:
    """Return a shell that kills the children of this process's raylet, and removes its directory, soon after its
    end."""
    (raylet,) = _raylets()
    pids = [str(child.pid) for child in raylet.children()]
    command = ["/bin/sh", "-c", _END_HELPERS, "megatron-daro-ray-helpers", str(directory), str(raylet.pid), *pids]
    # Its input ends with this process. A session of its own keeps Ctrl-C and the signals of a job away from it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _object_store_bytes() -> int:
    """Return a tenth of the shared memory or memory, between 80 MB (Ray's least) and 8 GB."""
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    shared = os.statvfs("/dev/shm")
    room = min(pages * size // 10, shared.f_bavail * shared.f_frsize // 2)
    return int(min(max(room, 80_000_000), 8_000_000_000))
