"""The Ray cluster of a run, and which node each rank and each server is on.

A cluster is a private one on this machine, or the one that RAY_ADDRESS names; started before any worker, shut down
after the last. A private one listens on loopback only, has no dashboard, and dies with this process, however it dies.
What keeps Ray from starting is found beforehand or told in a sentence: Ray itself waits a quarter of an hour for an
address where nobody listens, and ends with a traceback where a file cannot be written or a limit is too low. The nodes
of a named cluster are inspected without joining it, so that a layout is judged by the machines that will run it.

`Placement` is a Ray placement group, made whole or not at all. A tensor-parallel group is one bundle, and so is a
server, or each part of one that is spread over nodes, because a bundle never spans nodes. Servers that share GPUs with
ranks are in a bundle with these: by Ray the ranks have its GPUs, one each, and the servers are told which these are.
The groups of one replica (its experts' and context parts, then its pipeline stages) are next to each other. Refuses a
run that does not fit, with the numbers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.utils
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_daro import temporary
from megatron_daro.config import detect
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import Hardware, gpu_nodes
from megatron_daro.config.placement import Demand, misfit
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import ConfigError, DeadlineError, WorkerError
from megatron_daro.process_tree import descendants, kill_all
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
        canonical = services.canonicalize_bootstrap_address(given)
    except ConnectionError:
        canonical = None
    except (ValueError, OSError) as error:
        raise ConfigError(f"RAY_ADDRESS: got {address!r} ({error}); allowed: host:port or auto; {_UNSET}") from error
    if canonical is None:
        raise ConfigError(f"RAY_ADDRESS: got {address!r}, but no Ray cluster runs on this machine; {_UNSET}")
    # Ray puts the address of the network card in the place of a loopback one; either may be listened on.
    failures = [_failure(one) for one in dict.fromkeys((canonical, given)) if one != "auto"]
    if all(failures):
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, but nobody answers at {canonical} ({failures[0]}); allowed: a Ray cluster "
            f"that runs; {_UNSET}"
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
    look = "look at free memory, free disk space and `ulimit -a`"
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if _TOO_SLOW in str(error) and load > cpus:
        look = f"the machine is busy (load {load:.0f} on {cpus} CPUs): end what else runs there"
    return WorkerError(f"Ray did not start: {plain(str(error)).rstrip('.')}; {look}, and start again")


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


_TRIES, _TOO_SLOW = ("", ", second try", ", third try"), "timed out during startup"
_TRY_S = 150.0
"""A busy machine exceeds the 30 s that Ray gives its own processes, a constant in the code of `Node.__init__`
(`raylet_start_wait_time_s` in ray/_private/node.py, 2.60)."""


@contextmanager
def cluster(processes: int, *, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    Args:
        processes: of the run that get a place; a private cluster has as many logical CPUs, and this machine's GPUs.
        tell: told what is being started, and which try it is.

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
                stack.callback(_start_private(processes, directory, tell).kill)
            else:
                tell("joining the Ray cluster")
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            stack.callback(ray.shutdown)
        yield


def _prepare_environment() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{_TRY_S:.0f}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def _said_in_a_sentence() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise not_started(error) from error


def _start_private(processes: int, directory: Path, tell: Callable[[str], None]) -> subprocess.Popen[bytes]:
    """Return a cluster of this machine; as many logical CPUs as the run has processes, so that each gets a place.

    Args:
        processes: of the run. directory: for Ray's session. tell: told of each try.

    Returns:
        What ends the helpers if this process is killed; to be killed when the cluster was shut down in order.
    """
    hardware = detect()  # where torch has no CUDA, Ray must not hand out a GPU either
    for attempt in _TRIES:
        tell(f"starting Ray{attempt}")
        try:
            with _of_one_machine(), _without_helpers(), _patient():
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
            break
        except BaseException as error:
            _kill_raylets()
            if _TOO_SLOW not in str(error) or attempt == _TRIES[-1]:
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


# Three Python processes that Ray starts and nobody here asks: the autoscaler's (a private cluster never grows), the one
# that sends workers' output to the driver (log_to_driver is off), and the dashboard's server (include_dashboard=False
# takes its pages away, not the process). Each costs a start half a second of work and 80 to 110 MB. Source: Ray 2.60,
# `start_head_processes` and `start_ray_processes` in ray/_private/node.py.
_HELPERS = ("start_monitor", "start_log_monitor", "start_api_server")


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Let Ray start without the processes that a run does not use."""
    originals = {name: getattr(Node, name) for name in _HELPERS}
    for name in _HELPERS:
        setattr(Node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


@contextmanager
def _patient() -> Iterator[None]:
    """Let Ray wait longer for its own raylet, as long as that lives: each time that Ray asks for it counts as one ask
    that takes until there is an answer."""
    original = services.get_node

    def get_node(*arguments: str) -> Any:
        end = time.monotonic() + _TRY_S
        while True:
            try:
                return original(*arguments)
            except RuntimeError:
                if time.monotonic() > end or not _raylets():
                    raise
                time.sleep(_LOOK_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = original


def _raylets() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # ended since
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _kill_raylets() -> None:
    """Kill what this process has started of a cluster, helpers included; Ray kills the rest when Python exits."""
    for raylet in _raylets():
        with suppress(psutil.NoSuchProcess):
            raylet.suspend()  # so that it starts nothing more
            kill_all([*descendants(raylet.pid), raylet.pid])


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
    canonical = services.canonicalize_bootstrap_address(re.sub(r"^\w+://", "", address))
    try:
        nodes = GcsClient(address=canonical).get_all_node_info(timeout=CONNECT_TIMEOUT_S).values()
    except Exception as error:  # Ray's own classes of this layer are private
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}, which did not say what its nodes have ({plain(str(error))}); allowed: a "
            "Ray cluster that runs"
        ) from error
    totals = [dict(node.resources_total) for node in nodes if node.state == _ALIVE]
    gpus = [int(total["GPU"]) for total in totals if total.get("GPU")]
    place = f"the Ray cluster at {canonical}"
    if gpus:
        types = {name.removeprefix(_TYPE) for total in totals for name in total if name.startswith(_TYPE)}
        return gpu_nodes(gpus, types.pop() if len(types) == 1 else None, place)
    cpus = [int(total.get("CPU", 0)) for total in totals]
    return Hardware("cpu", sum(cpus), nodes=tuple(cpus), place=place)


_LOOK_S = 1.0
_REMEDY = "lower actor.*_parallel or engine.replicas, or start more nodes"


class Placement:
    """The places of one run. Nothing has one before `start`."""

    def __init__(self, demand: Demand, actor: ActorSection, deadlines: Deadlines) -> None:
        """Args: demand: the pieces. actor: their order. deadlines: `placement` bounds the wait for room."""
        self._demand, self._actor, self.deadlines = demand, actor, deadlines
        self._group: PlacementGroup | None = None
        self._gpus = False
        self._bundle_of_group: Mapping[int, int] = {}
        self._gpu_of_rank: Mapping[int, str] = {}

    @classmethod
    def of_engines(cls, demand: Demand, deadlines: Deadlines) -> Placement:
        """Return places for engines alone. Args: demand: without groups."""
        return cls(demand, ActorSection(), deadlines)

    @property
    def has_gpus(self) -> bool:
        """Whether ranks and servers get GPUs from Ray."""
        return self._gpus

    @property
    def shares_gpus(self) -> bool:
        """Whether servers have the GPUs of the ranks, in turns with them."""
        return self._demand.shared

    async def start(self) -> None:
        """Take room for everything.

        Raises:
            ConfigError: the cluster's nodes cannot hold the run. DeadlineError: others hold the room for too long.
        """
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        self._gpus = any(gpus)
        what = "GPUs" if self._gpus else "CPUs"
        have = gpus if self._gpus else [int(node["Resources"].get("CPU", 0)) for node in nodes]
        if why := misfit(self._demand, [count for count in have if count], what=what):
            raise ConfigError(f"the run does not fit the Ray cluster: {why}; {_REMEDY}")
        bundles = self._bundles()
        if not bundles:  # servers that run already, and no policy
            return
        self._group = placement_group(bundles, strategy="STRICT_PACK" if self._demand.together else "PACK")
        await self._until_placed(what)
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        order = group_order(self._actor) if self._demand.groups else []
        groups = self._demand.unit // self._demand.group_size  # of a bundle
        slots = assigned(order, [node_of[slot // groups] for slot in range(self._demand.groups)])
        self._bundle_of_group = {group: slot // groups for group, slot in slots.items()}

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank's Ray actor."""
        return self._options(self._bundle_of_group[rank // self._demand.group_size], int(self._gpus))

    def server(self, number: int, part: int = 0) -> dict[str, Any]:
        """Return the options of the Ray actor of an engine, or of a part of one that is spread over nodes. One that
        shares GPUs is told which by `gpus_of_server`."""
        if self._demand.shared:
            return self._options(number // self._demand.servers_of_unit, 0)
        bundle = self._demand.groups + number * self._demand.server_nodes + part
        return self._options(bundle, self._demand.part_size if self._gpus else 0)

    def take_gpus(self, gpu_of_rank: Mapping[int, str]) -> None:
        """Take in which GPU of its node Ray gave to each rank."""
        self._gpu_of_rank = gpu_of_rank

    def gpus_of_server(self, number: int) -> str | None:
        """Return the GPUs that this server shares with ranks of its bundle, as CUDA_VISIBLE_DEVICES has them; None
        where it has GPUs of its own, or there are none."""
        if not (self._demand.shared and self._gpus):
            return None
        bundle, place = divmod(number, self._demand.servers_of_unit)
        size, group_size = self._demand.server_size, self._demand.group_size
        gpus = [gpu for rank, gpu in self._gpu_of_rank.items() if self._bundle_of_group[rank // group_size] == bundle]
        gpus.sort(key=lambda gpu: (len(gpu), gpu))
        return ",".join(gpus[place * size : (place + 1) * size])

    def close(self) -> None:
        """Give the room back, for a driver that goes on; the end of a driver does the same. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def _options(self, bundle: int, gpus: int) -> dict[str, Any]:
        assert self._group, "start comes first"
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    def _bundles(self) -> list[dict[str, float]]:
        if self._demand.shared:
            sizes = zip(self._demand.sizes(gpus=False), self._demand.sizes(gpus=True), strict=True)
            return [_bundle(cpus, gpus if self._gpus else 0) for cpus, gpus in sizes]
        size = self._demand.group_size
        groups = [_bundle(size, size if self._gpus else 0)] * self._demand.groups
        return groups + [_bundle(1, self._demand.part_size if self._gpus else 0)] * self._demand.parts

    async def _until_placed(self, what: str) -> None:
        try:
            await self.deadlines.within("placement", self._wait())
        except DeadlineError as error:
            free = ray.available_resources()
            counts = f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"
            raise DeadlineError(
                f"{error}: {self._demand.text(gpus=what == 'GPUs')} found no room; free in the Ray cluster: {counts}; "
                f"end what else runs there, or {_REMEDY}"
            ) from None

    async def _wait(self) -> None:
        assert self._group
        while not await asyncio.to_thread(self._group.wait, _LOOK_S):
            pass


def group_order(actor: ActorSection) -> list[int]:
    """Return the tensor-parallel groups (rank // TP) so that neighbours exchange most: context parts of a stage and the
    replicas that share its experts, then the stages, then the other replicas. Megatron numbers ranks TP fastest, then
    CP, DP, PP, and experts lie on consecutive ranks of a stage."""
    context, data = actor.context_parallel, actor.data_parallel
    together = max(1, actor.expert_group_size // (actor.tensor_parallel * context))
    return [
        part + context * (replica + data * stage)
        for first in range(0, data, together)
        for stage in range(actor.pipeline_parallel)
        for replica in range(first, min(first + together, data))
        for part in range(context)
    ]


def assigned(order: Sequence[int], nodes: Sequence[str]) -> dict[int, int]:
    """Return group -> bundle, so that groups that follow each other are on one node as far as it has bundles.

    Args:
        order: groups, neighbours next to each other. nodes: the node of each bundle of a group.
    """
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    bundles = sorted(range(len(nodes)), key=lambda index: (-nodes.count(nodes[index]), first[nodes[index]], index))
    return dict(zip(order, bundles, strict=True))


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
