"""The Ray cluster of a run: a private one on this machine, or the one that RAY_ADDRESS names.

Started before any worker, shut down after the last. A private cluster listens on loopback only, has no dashboard, and
dies with this process, however it dies. What keeps Ray from starting is found beforehand or told in a sentence: Ray
itself waits a quarter of an hour for an address where nobody listens, and ends with a traceback where a file cannot
be written or a limit is too low. The nodes of a named cluster are inspected without joining it, so that a layout is
judged by the machines that will run it.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray
import ray._private.utils
from ray._private import ray_constants, services
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from megatron_daro import temporary
from megatron_daro.config import detect
from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.engine.sglang.watchdog import descendants, signal_all
from megatron_daro.errors import ConfigError, WorkerError
from megatron_daro.runtime.interrupts import signals_after

CONNECT_TIMEOUT_S = 10.0
LEAST_OPEN_FILES = 512
"""A driver with few workers holds about 150; Ray's own servers hold more."""
_MOST_TEXT = 300
# Linux limits the path of a socket to 107 bytes, and Ray nests its sockets deep below its directory.
_MOST_TEMP_PATH = 40
_UNSET = "fix: start the cluster, correct the address, or unset RAY_ADDRESS for a private cluster on this machine"


def check_address(address: str) -> None:
    """Refuses an address of RAY_ADDRESS where nobody listens.

    Raises:
        ConfigError: within twice CONNECT_TIMEOUT_S.
    """
    given = re.sub(r"^\w+://", "", address)
    try:
        found = services.canonicalize_bootstrap_address(given)
    except ConnectionError:
        found = None
    except (ValueError, OSError) as error:
        raise ConfigError(f"RAY_ADDRESS: got {address!r} ({error}); allowed: host:port or auto; {_UNSET}") from error
    if found is None:
        raise ConfigError(f"RAY_ADDRESS: got {address!r}, but no Ray cluster runs on this machine; {_UNSET}")
    # Ray puts the address of the network card in the place of a loopback one; either may be listened on.
    failures = [_failure(one) for one in dict.fromkeys((found, given)) if one != "auto"]
    if all(failures):
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, but nobody answers at {found} ({failures[0]}); allowed: a Ray cluster that "
            f"runs; {_UNSET}"
        )


def _failure(address: str) -> str:
    """Why no connection to host:port can be made; empty if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_limits() -> None:
    """Raise the limit of open files as far as this user may.

    Raises:
        ConfigError: it stays too low for Ray.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raise ConfigError(
            f"open files: this process may have {soft} (`ulimit -n`); allowed: at least {LEAST_OPEN_FILES}; fix: raise "
            "the limit of the shell, the container or the service"
        )


def own_directory(stack: ExitStack) -> Path:
    """Return a new directory for Ray's session: sockets, logs and spilled objects. It goes with the stack.

    Raises:
        ConfigError: no temporary directory can be written.
    """
    try:
        base = tempfile.gettempdir()
        return stack.enter_context(temporary.own_directory("ray", base if len(base) <= _MOST_TEMP_PATH else "/tmp"))
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: no temporary directory can be written ({error}); fix: free space there, or set TMPDIR"
        ) from error


def not_started(error: Exception) -> WorkerError | ConfigError:
    """Return what Ray raised when it should have started, as a sentence."""
    if isinstance(error, OSError) and error.filename:
        return ConfigError(
            f"Ray cannot write {error.filename} ({error.strerror}); fix: set HOME and TMPDIR to directories that exist "
            "and can be written"
        )
    return WorkerError(
        f"Ray did not start: {plain(str(error))}; look at free memory, free disk space and `ulimit -a`, and start again"
    )


def plain(text: str) -> str:
    """Ray's words on one line, without colours, cut to a few hundred characters."""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."


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
        directory = None if address else own_directory(stack)
        with _said_in_a_sentence(), signals_after(), _without_handler_of_ray():
            if directory:
                stack.callback(_start_private(processes, directory).kill)
            else:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
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
        with _of_one_machine():
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
    except BaseException:
        _kill_raylets()
        raise
    return _end_helpers_after_this_process(directory)


@contextmanager
def _without_handler_of_ray() -> Iterator[None]:
    """Keep Ray's handler of SIGTERM out: it ends Python with code 15 from wherever the start stands."""
    original = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = original


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


_ALIVE = 0  # ray's GcsNodeInfo.ALIVE
_TYPE = "accelerator_type:"


def ask(address: str | None = None) -> Hardware | None:
    """Return what the cluster of RAY_ADDRESS has; None without one.

    Args:
        address: host:port or auto; that of the environment if not given.

    Raises:
        ConfigError: nobody answers there, or not in time.
    """
    address = os.environ.get("RAY_ADDRESS") if address is None else address
    if not address:
        return None
    check_address(address)
    found = services.canonicalize_bootstrap_address(re.sub(r"^\w+://", "", address))
    try:
        nodes = GcsClient(address=found).get_all_node_info(timeout=CONNECT_TIMEOUT_S).values()
    except Exception as error:  # Ray's own classes of this layer are private
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, which did not say what its nodes have ({plain(str(error))}); allowed: a "
            "Ray cluster that runs"
        ) from error
    totals = [dict(node.resources_total) for node in nodes if node.state == _ALIVE]
    gpus = [int(total["GPU"]) for total in totals if total.get("GPU")]
    place = f"the Ray cluster at {found}"
    if gpus:
        types = {name.removeprefix(_TYPE) for total in totals for name in total if name.startswith(_TYPE)}
        return gpu_nodes(gpus, types.pop() if len(types) == 1 else None, place)
    cpus = [int(total.get("CPU", 0)) for total in totals]
    return Hardware("cpu", sum(cpus), nodes=tuple(cpus), place=place)
