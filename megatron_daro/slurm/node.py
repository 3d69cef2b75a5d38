"""What runs on each node of a job: `python -m megatron_daro.slurm.node`, started by the batch script through srun.

Place in the data flow: health check -> the nodes find each other (rendezvous.py) -> Ray on all -> on the first node the
training (training.py). The first node writes how it ended into `result` (a word of training.Ending, a sentence, and
nodes). A file `save` beside it, which the batch script makes, means: save and end. TERM: end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_daro.errors import DaroError, DeadlineError
from megatron_daro.slurm.health import Wanted, problems
from megatron_daro.slurm.processes import PortTakenError, Process, kill_descendants, start_ray
from megatron_daro.slurm.rendezvous import Greeter, Message, own_address, reach_head, write_private
from megatron_daro.slurm.training import EndedError, Ending, Stops, train

RAY_JOIN_S = 300.0
PORTS_TRIED = 5
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
    parser = argparse.ArgumentParser(prog="megatron_daro.slurm.node", description=__doc__.split("\n")[0])
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--cores", type=int, help="of a node without GPUs; unset: as many processes as there are")
    parser.add_argument("--free-disk-gib", type=float, required=True)
    parser.add_argument("--check-minutes", type=float, required=True)
    parser.add_argument("--stall-minutes", type=float, required=True)
    parser.add_argument("--term-grace-s", type=float, required=True)
    parser.add_argument("--interface")
    parser.add_argument("--address", action="append", default=[], metavar="NODE=ADDRESS")
    parser.add_argument("train", nargs="+", help="after --: arguments of `megatron-daro train`")
    return parser


async def _run(options: argparse.Namespace) -> int:
    stops = Stops()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stops.end)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    watching = asyncio.create_task(stops.watch(options.attempt_dir / "save"))
    try:
        address = own_address(node, dict(pair.split("=", 1) for pair in options.address), options.interface)
        place = Place(node, first, int(os.environ.get("SLURM_NNODES", "1")), address)
        ending = await (_first(place, options, stops) if first else _other(place, options, stops))
    except EndedError as error:
        ending = Ending("ended", str(error))
    except DaroError as error:
        ending = Ending("failed", str(error))
    except (ImportError, FileNotFoundError, PermissionError) as error:  # another attempt would meet it again
        traceback.print_exc()
        ending = Ending("failed", f"{node}: {type(error).__name__}: {error}")
    finally:
        watching.cancel()
        kill_descendants()
    print(f"{node}: {ending.cause}", flush=True)
    if first:
        write_private(options.attempt_dir / "result", "\n".join([ending.kind, _one_line(ending.cause), ending.nodes]))
    elif ending.kind == "failed":
        write_private(options.attempt_dir / f"failed_{node}", _one_line(ending.cause) + "\n")
    return ending.kind in ("failed", "ended")


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _ray_environment(options: argparse.Namespace) -> dict[str, str]:
    """Return what every process of Ray gets: without the token, nobody on the network can use the cluster."""
    return {
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
    words = "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(bad.items()))
    return Ending("bad_nodes", words, ",".join(sorted(bad)))


async def _with_ray(place: Place, options: argparse.Namespace, stops: Stops, greeter: Greeter) -> Ending:
    environment = _ray_environment(options)
    job = os.environ.get("SLURM_JOB_ID", str(os.getpid()))
    temporary = Path(tempfile.gettempdir()) / f"daro{job}_{options.attempt}"  # sockets' paths are limited to 107 bytes
    ray, port = await stops.or_end(_ray_head(place, options, temporary, environment))
    address = f"{place.address}:{port}"
    await greeter.order("join", address)
    try:
        await stops.or_end(greeter.all_joined(RAY_JOIN_S))
    except DeadlineError as error:
        return Ending("failed", str(error))
    environment |= {"RAY_ADDRESS": address, "MEGATRON_DARO_ATTEMPT": str(options.attempt)}
    return await train(options, stops, environment, lost=[greeter.trouble, _ray_ended(ray, place.node)])


async def _ray_head(
    place: Place, options: argparse.Namespace, temporary: Path, environment: dict[str, str]
) -> tuple[Process, int]:
    """Return Ray on the first node and its port; tries another port where a program was faster."""
    for left in reversed(range(PORTS_TRIED)):
        port = _free_port(place.address)
        try:
            ray = await start_ray(
                head=True, address=place.address, port=port, gpus=options.gpus, cpus=_places(options),
                temporary=temporary, environment=environment,
            )  # fmt: skip
            return ray, port
        except PortTakenError as error:
            if not left:
                raise
            print(f"{place.node}: port {port} was taken meanwhile, trying another: {error}", flush=True)
    raise AssertionError("the last try raises")


def _ray_ended(ray: Process, node: str) -> asyncio.Future[str]:
    async def say() -> str:
        code = await ray.wait()
        return f"{node}: Ray ended with code {code}: {ray.last_line}"

    return asyncio.ensure_future(say())


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


async def _other(place: Place, options: argparse.Namespace, stops: Stops) -> Ending:
    """Return how this node ended; it is not the first one."""
    found = problems(Wanted(options.gpus, options.free_disk_gib, options.run_dir))
    if not found:
        write_private(options.attempt_dir / f"started_{place.node}", "")
    line = await stops.or_end(reach_head(options.attempt_dir, place.node, found, 60 * options.check_minutes))
    first = await line.receive()
    if first is None or first.get("order") != "join":
        return Ending("finished", "told to end")
    ray = await stops.or_end(
        start_ray(
            head=False, address=place.address, port=0, gpus=options.gpus, cpus=_places(options),
            temporary=Path(), environment=_ray_environment(options), joins=first["address"],
        )
    )  # fmt: skip
    await line.send(Message(event="joined"))
    told = asyncio.ensure_future(line.receive())
    ended = _ray_ended(ray, place.node)
    either: set[asyncio.Future[Any]] = {told, ended, stops.ended}
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if ended in done:
        await line.send(Message(event="failed", why=ended.result()))
        return Ending("failed", ended.result())
    return Ending("finished", "told to end" if told in done else "ended by SIGTERM")


if __name__ == "__main__":
    sys.exit(main())
