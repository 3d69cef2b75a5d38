"""Ray's private parts that a run needs, used in one place.

Each entry names the versions of Ray in which it was read, the code that it relies on (files are below ray/_private/),
the reason, and when it can go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.state
import ray._private.utils
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.actor import ActorHandle

_LOOPBACK = "127.0.0.1"
_HELPERS = ("start_monitor", "start_log_monitor", "start_api_server")
_LOOK_S = 1.0
_ALIVE = 0  # GcsNodeInfo.ALIVE


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def start_on_loopback(directory: Path, *, cpus: int, gpus: int, store_bytes: int, patience_s: float) -> None:
    """Start a cluster on this machine, and join it.

    Args:
        directory: for Ray's session. cpus, gpus: how many it offers. store_bytes: size of its object store.
        patience_s: how long its raylet may take.
    """
    with _of_one_machine(), _without_helpers(), _patient(patience_s):
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(directory),
        )


@contextmanager
def _of_one_machine() -> Iterator[None]:
    """Let Ray be started for this machine only.

    Ray 2.55 to 2.60: services.py, `get_node_ip_address`: `if not ray_constants.ENABLE_RAY_CLUSTER`. Reason: Ray binds
    its servers to loopback only if a node's address is 127.0.0.1 itself, and replaces that address
    (`resolve_ip_for_localhost`) by the one of the network card unless this switch, made for macOS and Windows, says
    that the cluster is of one machine. Can go: when `ray.init` keeps the address that it is given.
    """
    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Let Ray start without three Python processes that are not needed here: the autoscaler's (a private cluster never
    grows), the one that sends workers' output to the driver (log_to_driver is off), and the dashboard's server
    (include_dashboard=False removes its pages, not the process).

    Ray 2.55 to 2.60: node.py, `start_head_processes` and `start_ray_processes`. Reason: each costs a start half a
    second of work and 80 to 110 MB. Can go: when `ray.init` has options for them.
    """
    with ExitStack() as stack:
        for name in _HELPERS:
            stack.enter_context(_replaced(Node, name, lambda node, **options: None))
        yield


@contextmanager
def _patient(patience_s: float) -> Iterator[None]:
    """Let Ray wait longer for its own raylet, as long as that lives: each query of Ray for it is repeated until it is
    answered or `patience_s` is over.

    Ray 2.55 to 2.60: node.py, `Node.__init__`: `raylet_start_wait_time_s = 30`, and `services.get_node` until then.
    Reason: a busy machine takes longer. Can go: when that time can be set.
    """
    get_node: Callable[..., Any] = services.get_node

    def get_node_patiently(*arguments: str) -> Any:
        end = time.monotonic() + patience_s
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > end or not raylets():
                    raise
                time.sleep(_LOOK_S)

    with _replaced(services, "get_node", get_node_patiently):
        yield


@contextmanager
def without_sigterm_handler() -> Iterator[None]:
    """Keep Ray's handler of SIGTERM out of the block.

    Ray 2.55 to 2.60: worker.py, `init`: `set_sigterm_handler`, of utils.py. Reason: it exits Python with code 15
    wherever the start happens to be. Can go: when `ray.init` leaves the handlers of signals alone.
    """
    with _replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
        yield


def raylets() -> list[psutil.Process]:
    """Return the living raylets that this process has started.

    Ray 2.55 to 2.60: services.py, `start_raylet`: a child of this process, whose program is called raylet. Reason: Ray
    does not tell which processes are its own. Can go: when it does.
    """
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # ended since
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def canonical_address(address: str) -> str | None:
    """Return host:port of the cluster that Ray takes for `address` (host:port or auto); None for auto where none runs.

    Ray 2.55 to 2.60: services.py, `canonicalize_bootstrap_address`. Reason: `ray.init` waits long if nothing listens
    there, so the address is tried before. Can go: when it fails soon, and says where.

    Raises:
        ValueError, OSError: it is not an address, or there is no such host.
    """
    try:
        return services.canonicalize_bootstrap_address(address)
    except ConnectionError:
        return None


def resources_of_nodes(address: str, timeout_s: float) -> list[dict[str, float]]:
    """Return the resources of each living node of a cluster, without joining it. Args: address: a canonical one.

    Ray 2.55 to 2.60: ray/_raylet, `GcsClient.get_all_node_info`. Reason: `ray.nodes` is for processes that have joined.
    Can go: when Ray answers other processes, too. Raises errors of Ray that are private as well.
    """
    nodes = GcsClient(address=address).get_all_node_info(timeout=timeout_s).values()
    return [dict(node.resources_total) for node in nodes if node.state == _ALIVE]


def process_of(actor: ActorHandle) -> tuple[str, int] | None:
    """Return the id of an actor's node, and that of its process there; None while it waits for a place or starts.

    Ray 2.55 to 2.60: state.py, `actors`; ray/actor.py, `ActorHandle._actor_id`. Reason: `ray.util.state` asks the
    dashboard's server, which a private cluster is started without. Can go: when Ray itself answers.
    """
    row = ray._private.state.actors(actor._actor_id.hex())
    return (row["Address"]["NodeID"], row["Pid"]) if row["State"] == "ALIVE" else None
