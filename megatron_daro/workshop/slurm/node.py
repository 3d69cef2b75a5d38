"""Run one node of a job: `python -m megatron_daro.workshop.slurm.node`, started by the batch script through srun.

Health check -> the nodes find each other (rendezvous.py) -> Ray on all -> on the first node the
training (training.py). The first node writes how it ended into `result` (a word of training.Ending, a sentence, and
nodes). A file `save` beside it, which the batch script makes, means: save and end; so does USR1. TERM: end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_daro.errors import DaroError, DeadlineError, WorkerError
from megatron_daro.ports import reserve_port
from megatron_daro.workshop.slurm.rendezvous import (
    Greeter,
    Line,
    Message,
    Wanted,
    gpu_problems,
    own_address,
    problems,
    reach_head,
    write_private,
)
from megatron_daro.workshop.slurm.training import (
    RAY_START_S,
    EndedError,
    Ending,
    PortTakenError,
    Process,
    SlowStartError,
    StoppedError,
    Stops,
    kill_descendants,
    start_ray,
    train,
)

T = TypeVar("T")
PORTS_TRIED = 5
RAY_STARTS = 3
"""Starts of Ray on a node; each may take RAY_START_S."""
CHECK_S = 45.0
"""Until every node has looked at its GPUs after a failure."""
IN_A_ROW = 3
"""Attempts that may end in the same way, unstarted or by a fault of a GPU, before the job stays down."""
LARGE_JOB_NODES = 16
_LARGE_JOB = {
    "worker_register_timeout_seconds": 180,
    "gcs_rpc_server_connect_timeout_s": 120,
    "gcs_rpc_server_reconnect_timeout_s": 120,
    "gcs_server_request_timeout_seconds": 120,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 10000,
    "health_check_period_ms": 10000,
}
"""Ray's own settings (ray_config_def.h) for many nodes: hundreds of processes register at once with one control
service, which must answer late rather than be given up, and is spared reports that nobody reads meanwhile."""
PROCESSES_BESIDE_GPUS = 32
"""Ray's CPUs are places for processes here: two for each GPU, and these; more where the machine has more cores. Without
GPUs a place is a core that the cluster file asks for, so that ranks and servers spread over the nodes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process runs: node's name, whether it is the first one, how many there are, its address."""

    node: str
    first: bool
    nodes: int
    address: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part. Returns 0, or 1 where the job must end because of this node."""
    options = _parser().parse_args(arguments)
    return asyncio.run(_run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron_daro.workshop.slurm.node", description=__doc__.split("\n")[0])
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--cores", type=int, help="of a node without GPUs; unset: as many processes as there are")
    parser.add_argument("--free-disk-gib", type=float, required=True)
    parser.add_argument("--check-minutes", type=float, required=True)
    parser.add_argument("--stall-minutes", type=float, required=True)
    parser.add_argument("--term-grace-s", type=float, required=True)
    parser.add_argument("--may-lose", type=int, default=0)
    parser.add_argument("--interface")
    parser.add_argument("--address", action="append", default=[], metavar="NODE=ADDRESS")
    parser.add_argument("train", nargs="+", help="after --: arguments of `megatron-daro train`")
    return parser


async def _run(options: argparse.Namespace) -> int:
    stops = Stops()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stops.end)
    loop.add_signal_handler(signal.SIGUSR1, stops.saving.set)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    watching = asyncio.create_task(stops.watch(options.attempt_dir / "save"))
    for left in Path(tempfile.gettempdir()).glob(f"daro{_job()}_*"):  # of an attempt that was killed on this node
        shutil.rmtree(left, ignore_errors=True)
    try:
        address = own_address(node, dict(pair.split("=", 1) for pair in options.address), options.interface)
        place = Place(node, first, int(os.environ.get("SLURM_NNODES", "1")), address)
        ending = await (_first(place, options, stops) if first else _other(place, options, stops))
    except EndedError as error:
        ending = Ending("ended", str(error))
    except StoppedError as error:
        ending = Ending("stopped", str(error))
    except SlowStartError as error:
        ending = Ending("unstarted", f"{node}: {error}", node)
    except DaroError as error:
        ending = Ending("failed", str(error))
    except (ImportError, FileNotFoundError, PermissionError) as error:  # another attempt would meet it again
        traceback.print_exc()
        ending = Ending("failed", f"{node}: {type(error).__name__}: {error}")
    finally:
        watching.cancel()
        kill_descendants()
        shutil.rmtree(_temporary(options), ignore_errors=True)
    if ending.kind in ("unstarted", "gpu_fault") and _in_a_row(ending.kind, options) >= IN_A_ROW:
        ending = Ending("failed", f"{ending.cause}; so ended {IN_A_ROW} attempts in a row")
    print(f"{node}: {ending.cause}", flush=True)
    if first:
        write_private(options.attempt_dir / "result", "\n".join([ending.kind, _one_line(ending.cause), ending.nodes]))
    elif ending.kind == "failed":
        write_private(options.attempt_dir / f"failed_{node}", _one_line(ending.cause) + "\n")
    return ending.kind in ("failed", "ended")


def _job() -> str:
    return os.environ.get("SLURM_JOB_ID", str(os.getpid()))


def _temporary(options: argparse.Namespace) -> Path:
    """Return the directory of Ray's session, a short path: those of its sockets are limited to 107 bytes."""
    return Path(tempfile.gettempdir()) / f"daro{_job()}_{options.attempt}"


def _in_a_row(kind: str, options: argparse.Namespace) -> int:
    """Return how many attempts up to this one ended in this way, if this one does."""
    count = 1
    while (file := options.attempt_dir.with_name(f"attempt_{options.attempt - count:03d}") / "result").exists():
        if file.read_text(encoding="utf-8").partition("\n")[0] != kind:
            break
        count += 1
    return count


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _ray_environment(options: argparse.Namespace, nodes: int) -> dict[str, str]:
    """Return what every process of Ray gets: without the token, nobody on the network can use the cluster."""
    tuned = _LARGE_JOB if nodes >= LARGE_JOB_NODES else {}
    return {
        **{f"RAY_{name}": os.environ.get(f"RAY_{name}", str(value)) for name, value in tuned.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(options.attempt_dir / "ray_token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _places(options: argparse.Namespace) -> int:
    if options.cores and not options.gpus:
        return int(options.cores)
    return max(os.cpu_count() or 1, 2 * options.gpus + PROCESSES_BESIDE_GPUS)


async def _first(place: Place, options: argparse.Namespace, stops: Stops) -> Ending:
    """Return how the job ended; this is the first node."""
    limit_s = 60 * options.check_minutes
    own = problems(Wanted(options.gpus, options.free_disk_gib, options.run_dir))
    if own:  # nothing may be writable: the others end when this process does
        return Ending("bad_nodes", f"{place.node}: {'; '.join(own)}", place.node)
    write_private(options.attempt_dir / "ray_token", secrets.token_hex(32))
    greeter = Greeter(options.attempt_dir, place.address, place.nodes - 1)
    await greeter.start()
    try:
        bad = await stops.or_end(_bad_nodes(greeter, place, options.attempt_dir, limit_s))
        return bad or await _with_ray(place, options, stops, greeter)
    finally:
        await greeter.close()


async def _bad_nodes(greeter: Greeter, place: Place, directory: Path, limit_s: float) -> Ending | None:
    """Return what keeps the nodes from a start, or None."""
    there = await greeter.gather(limit_s)
    if len(there) < place.nodes - 1:
        silent = sorted({path.name.removeprefix("started_") for path in directory.glob("started_*")} - set(there))
        names = f" ({', '.join(silent)} started, and did not reach {place.address})" if silent else ""
        return Ending(
            "failed",
            f"{place.nodes - 1 - len(there)} of {place.nodes} nodes did not report to {place.node} within "
            f"{limit_s:g} s{names}: is {directory} on a file system that all nodes share, and the network open "
            f"between them? reported: {', '.join(there) or 'none'}",
        )
    bad = {member.name: member.problems for member in greeter.members.values() if member.problems}
    if not bad:
        return None
    words = "; ".join(f"{name}: {', '.join(problems)}" for name, problems in sorted(bad.items()))
    return Ending("bad_nodes", words, ",".join(sorted(bad)))


async def _with_ray(place: Place, options: argparse.Namespace, stops: Stops, greeter: Greeter) -> Ending:
    environment = _ray_environment(options, place.nodes)
    temporary = _temporary(options)
    ray, port = await stops.or_end(_ray_head(place, options, temporary, environment))
    address = f"{place.address}:{port}"
    await greeter.order("join", address, str(temporary))
    try:
        await stops.or_end(greeter.all_joined(RAY_STARTS * RAY_START_S))
    except (DeadlineError, WorkerError) as error:
        if isinstance(error, EndedError | StoppedError):
            raise
        return Ending("unstarted", str(error))
    environment |= {"RAY_ADDRESS": address, "MEGATRON_DARO_ATTEMPT": str(options.attempt)}
    _let_attach(options.attempt_dir / "attach", place, environment)

    async def look() -> Ending | None:
        return await _looked_at(greeter, place, options)

    greeter.may_lose = options.may_lose
    lost = [greeter.trouble, _ray_ended(ray, place.node)]
    return await train(options, stops, environment, lost=lost, first_loss=greeter.first_loss, look=look)


def _let_attach(file: Path, place: Place, environment: dict[str, str]) -> None:
    """Write what attach.sh of the batch script needs to be beside this attempt's training."""
    lines = [f"first_node={shlex.quote(place.node)}"]
    write_private(file, "\n".join([*lines, *(f"export {k}={shlex.quote(v)}" for k, v in environment.items())]) + "\n")


async def _looked_at(greeter: Greeter, place: Place, options: argparse.Namespace) -> Ending | None:
    """Return what is wrong with the nodes after a failed training: silent ones, or GPUs."""
    own = asyncio.to_thread(gpu_problems, options.gpus, used=True)
    others, here = await asyncio.gather(greeter.check(CHECK_S), own)
    silent = sorted(name for name, problems in others.items() if problems is None)
    if silent:
        return Ending("node_lost", f"{', '.join(silent)} gave no answer within {CHECK_S:g} s", ",".join(silent))
    bad = {name: problems for name, problems in {place.node: here, **others}.items() if problems}
    words = "; ".join(f"{name}: {', '.join(problems)}" for name, problems in sorted(bad.items()))
    return Ending("bad_nodes", words, ",".join(sorted(bad))) if bad else None


async def _ray_head(
    place: Place, options: argparse.Namespace, temporary: Path, environment: dict[str, str]
) -> tuple[Process, int]:
    """Return Ray on the first node and its port; tries another port where a program was faster."""
    for left in reversed(range(PORTS_TRIED)):
        with reserve_port(place.address) as reserved:

            async def start(port: int = reserved.port) -> Process:
                return await start_ray(
                    head=True, address=place.address, port=port, gpus=options.gpus, cpus=_places(options),
                    temporary=temporary, environment=environment,
                )  # fmt: skip

            try:
                return await _again_if_slow(start, place.node), reserved.port
            except PortTakenError as error:
                if not left:
                    raise
                print(f"{place.node}: port {reserved.port} was taken meanwhile, trying another: {error}", flush=True)
    raise AssertionError("the last try raises")


async def _again_if_slow(start: Callable[[], Awaitable[T]], node: str) -> T:
    """Return what the start gives. Raises SlowStartError: none of RAY_STARTS was in time."""
    for left in reversed(range(RAY_STARTS)):
        try:
            return await start()
        except SlowStartError as error:
            if not left:
                raise
            print(f"{node}: {error}; trying again", flush=True)
    raise AssertionError("the last try raises")


def _ray_ended(ray: Process, node: str) -> asyncio.Future[str]:
    async def say() -> str:
        code = await ray.wait()
        return f"{node}: Ray ended with code {code}: {ray.last_line}"

    return asyncio.ensure_future(say())


async def _other(place: Place, options: argparse.Namespace, stops: Stops) -> Ending:
    """Return how this node ended; it is not the first one."""
    found = problems(Wanted(options.gpus, options.free_disk_gib, options.run_dir))
    if not found:
        write_private(options.attempt_dir / f"started_{place.node}", "")
    line = await stops.or_end(reach_head(options.attempt_dir, place.node, found, 60 * options.check_minutes))
    order = await stops.or_end(line.receive())
    if order is None or order.get("order") != "join":
        return Ending("finished", "told to end")
    session = Path(order["temporary"])
    try:
        return await _joined(line, order["address"], place, options, stops)
    except SlowStartError as error:
        await line.send(Message(event="unstarted", why=str(error)))
        raise
    finally:
        kill_descendants()
        shutil.rmtree(session, ignore_errors=True)  # of this node; Ray takes the first one's path on all


async def _joined(line: Line, head: str, place: Place, options: argparse.Namespace, stops: Stops) -> Ending:
    """Run Ray on this node until the first one says that it is over."""

    async def start() -> Process:
        return await start_ray(
            head=False, address=place.address, port=0, gpus=options.gpus, cpus=_places(options),
            temporary=Path(), environment=_ray_environment(options, place.nodes), joins=head,
        )  # fmt: skip

    ray = await stops.or_end(_again_if_slow(start, place.node))
    await line.send(Message(event="joined"))
    ended = _ray_ended(ray, place.node)
    orders = asyncio.ensure_future(_follow(line, options))
    either: set[asyncio.Future[Any]] = {orders, ended, stops.ended}
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if ended in done:
        await line.send(Message(event="failed", why=ended.result()))
        return Ending("failed", ended.result())
    return Ending("finished", "told to end" if orders in done else "ended by SIGTERM")


async def _follow(line: Line, options: argparse.Namespace) -> None:
    """Check the GPUs whenever the first node wants to know; return when it says that it is over, or is gone."""
    while (order := await line.receive()) is not None and order.get("order") == "check":
        problems = await asyncio.to_thread(gpu_problems, options.gpus, used=True)
        await line.send(Message(event="checked", problems=problems))


if __name__ == "__main__":
    sys.exit(main())
