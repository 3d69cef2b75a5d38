"""The Ray cluster of a run: the one that RAY_ADDRESS names, or a private one on this machine.

The cluster is started or joined before any worker, and left after the last. A named one is asked for its resources
without joining it, so that a layout is checked against the machines that will run it. A private one listens on loopback
only, has no dashboard, and dies with this process, however it dies. What keeps Ray from starting is found beforehand or
reported in a sentence: Ray itself waits a quarter of an hour for an address where nothing listens, and ends with a
traceback if a file cannot be written or a limit is too low.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray

from megatron_daro import temporary
from megatron_daro.config import detect
from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.errors import ConfigError, WorkerError
from megatron_daro.process_tree import descendants, kill_all
from megatron_daro.runtime.interrupts import signals_after
from megatron_daro.runtime.ray_private import (
    canonical_address,
    raylets,
    resources_of_nodes,
    start_on_loopback,
    without_sigterm_handler,
)

CONNECT_TIMEOUT_S = 10.0
_TYPE = "accelerator_type:"
_UNSET = "fix: start the cluster, correct the address, or unset RAY_ADDRESS for a private cluster on this machine"


def ask() -> Hardware | None:
    """Return the hardware of the cluster at RAY_ADDRESS; None if that is not set.

    Raises:
        ConfigError: nothing answers there, or not in time.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return None
    canonical = check_address(address)
    try:
        totals = resources_of_nodes(canonical, CONNECT_TIMEOUT_S)
    except Exception as error:  # Ray's own classes of this layer are private
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, which did not say what its nodes have ({plain(str(error))}); allowed: a "
            "Ray cluster that runs"
        ) from error
    gpus = [int(total["GPU"]) for total in totals if total.get("GPU")]
    place = f"the Ray cluster at {canonical}"
    if gpus:
        types = {name.removeprefix(_TYPE) for total in totals for name in total if name.startswith(_TYPE)}
        return gpu_nodes(gpus, types.pop() if len(types) == 1 else None, place)
    cpus = [int(total.get("CPU", 0)) for total in totals]
    return Hardware("cpu", sum(cpus), nodes=tuple(cpus), place=place)


def check_address(address: str) -> str:
    """Return the value of RAY_ADDRESS as the host:port that Ray makes of it; refuse one where nothing listens.

    Raises:
        ConfigError: within twice CONNECT_TIMEOUT_S.
    """
    given = re.sub(r"^\w+://", "", address)
    try:
        canonical = canonical_address(given)
    except (ValueError, OSError) as error:
        raise ConfigError(f"RAY_ADDRESS: got {address!r} ({error}); allowed: host:port or auto; {_UNSET}") from error
    if canonical is None:
        raise ConfigError(f"RAY_ADDRESS: got {address!r}, but no Ray cluster runs on this machine; {_UNSET}")
    # Ray replaces a loopback address by that of the network card; the cluster may listen on either.
    failures = [_failure(one) for one in dict.fromkeys((canonical, given)) if one != "auto"]
    if all(failures):
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, but nobody answers at {canonical} ({failures[0]}); allowed: a Ray cluster "
            f"that runs; {_UNSET}"
        )
    return canonical


def _failure(address: str) -> str:
    """Return why no connection to host:port can be made; empty if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


_TRY_S = 150.0
"""For each try to start a private cluster: a busy machine exceeds the 30 s that Ray gives its own processes."""
_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without GPUs of its own keeps CUDA_VISIBLE_DEVICES
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_port_wait_time_s": f"{_TRY_S:.0f}",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of Ray's processes and workers, except for variables that the user has set."""


@contextmanager
def cluster(processes: int, *, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    Args:
        processes: how many of the run need a place; a private cluster has as many logical CPUs, and this machine's
            GPUs.
        tell: told what is being started, and which try it is.

    Raises:
        ConfigError: nothing answers at RAY_ADDRESS, or a limit or directory of this process does not allow a cluster.
        WorkerError: Ray did not start.
    """
    address = os.environ.get("RAY_ADDRESS")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    check_limits()
    with ExitStack() as stack:
        if address:
            check_address(address)
        directory = None if address else own_directory(stack)
        try:
            with signals_after(), without_sigterm_handler():
                if directory:
                    stack.callback(_start_private(processes, directory, tell).kill)
                else:
                    tell("joining the Ray cluster")
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                stack.callback(ray.shutdown)
        except Exception as error:
            raise not_started(error) from error
        yield


LEAST_OPEN_FILES = 512
"""A driver with few workers holds about 150; Ray's own servers hold more."""
# Linux limits the path of a socket to 107 bytes, and Ray nests its sockets deep below its directory.
_MOST_TEMP_PATH = 40


def check_limits() -> None:
    """Raise the limit of open files to 65,536, or as far as this user may.

    Raises:
        ConfigError: it stays too low for Ray.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raise ConfigError(
            f"open files: this process may have {soft} (`ulimit -n`); allowed: at least {LEAST_OPEN_FILES}; fix: raise "
            "the limit of the shell, the container or the service"
        )


def own_directory(stack: ExitStack) -> Path:
    """Return a new directory for Ray's session: sockets, logs and spilled objects. It is removed when the stack closes.

    Raises:
        ConfigError: no temporary directory can be written.
    """
    try:
        base = tempfile.gettempdir()
        return stack.enter_context(temporary.own_directory("ray", base if len(base) <= _MOST_TEMP_PATH else "/tmp"))
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: no temporary directory can be written ({error}); fix: free space there, or set TMPDIR "
            f"(at most {_MOST_TEMP_PATH} characters)"
        ) from error


_TRIES, _TOO_SLOW = ("", ", second try", ", third try"), "timed out during startup"


def _start_private(processes: int, directory: Path, tell: Callable[[str], None]) -> subprocess.Popen[bytes]:
    """Start a cluster on this machine, with as many logical CPUs as the run has processes, so that each gets a place.

    Args:
        processes: of the run. directory: for Ray's session. tell: told of each try.

    Returns:
        The process that ends Ray's helpers if this process is killed; kill it once the cluster was shut down in order.
    """
    hardware = detect()  # where torch has no CUDA, Ray must not hand out a GPU either
    gpus = hardware.count if hardware.kind == "gpu" else 0
    for attempt in _TRIES:
        tell(f"starting Ray{attempt}")
        try:
            store_bytes = _object_store_bytes()
            start_on_loopback(directory, cpus=processes, gpus=gpus, store_bytes=store_bytes, patience_s=_TRY_S)
            break
        except BaseException as error:
            _kill_raylets()
            if _TOO_SLOW not in str(error) or attempt == _TRIES[-1]:
                raise
    return _end_helpers_after_this_process(directory)


def _object_store_bytes() -> int:
    """Return half of the free shared memory, at most a tenth of the free memory; 80 MB (Ray's least) to 8 GB."""
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    shared = os.statvfs("/dev/shm")
    room = min(pages * size // 10, shared.f_bavail * shared.f_frsize // 2)
    return int(min(max(room, 80_000_000), 8_000_000_000))


def _kill_raylets() -> None:
    """Kill the raylets that this process has started, and their children; Ray kills the rest when Python exits."""
    for raylet in raylets():
        with suppress(psutil.NoSuchProcess):
            raylet.suspend()  # so that it starts nothing more
            kill_all([*descendants(raylet.pid), raylet.pid])


# If Ray's raylet is killed with the driver, its helpers (dashboard, environments) try for a minute to report that to a
# server which is dead as well (ray/_private/process_watcher.py, Ray 2.60). This shell ends them after 3 seconds, and
# removes the session's directory. If the raylet dies first, Ray's C++ part ends this process; this shell then prints
# the cause.
_END_HELPERS = """
dir=$1 raylet=$2; shift 2; read -r _
grep -q . "/proc/$raylet/cmdline" 2> /dev/null || echo "WorkerError: the raylet of this run (Ray's process $raylet) \
died, and the run with it. Look for oom-kill in the kernel log; \
--resume goes on from the newest checkpoint, if there is one" >&2
sleep 3; kill -9 "$@" 2> /dev/null; sleep 1; rm -rf -- "$dir"
"""


def _end_helpers_after_this_process(directory: Path) -> subprocess.Popen[bytes]:
    """Return a shell that kills the children of this process's raylet, and removes the session's directory, soon after
    this process ends."""
    (raylet,) = raylets()
    pids = [str(child.pid) for child in raylet.children()]
    command = ["/bin/sh", "-c", _END_HELPERS, "megatron-daro-ray-helpers", str(directory), str(raylet.pid), *pids]
    # The shell's input ends with this process. A session of its own keeps Ctrl-C and a job's signals away from it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def not_started(error: Exception) -> WorkerError | ConfigError:
    """Return the error that Ray raised at its start as one of this package, told in a sentence."""
    if isinstance(error, OSError) and error.filename:
        return ConfigError(
            f"Ray cannot write {error.filename} ({error.strerror}); fix: set HOME and TMPDIR to directories that exist "
            "and can be written"
        )
    look = "look at free memory, free disk space and `ulimit -a`"
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if _TOO_SLOW in str(error) and load > cpus:
        look = f"the machine is busy (load {load:.0f} on {cpus} CPUs): end what else runs there"
    return WorkerError(f"Ray did not start: {plain(str(error)).rstrip('.')}; {look}, and start again")


_MOST_TEXT = 300


def plain(text: str) -> str:
    """Return a message of Ray on one line, without colours, cut to a few hundred characters."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
