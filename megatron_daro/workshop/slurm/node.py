"""Run one node of a job: `python -m megatron_daro.workshop.slurm.node`, started by the batch script through srun.

    every node:      health check -> the nodes find each other (rendezvous.py) -> Ray (ray_start.py)
    the first one:   the training (training.py), once Ray runs on all

The first node writes how it ended into `result` (a word of Ending, a sentence, and nodes). A file `save` beside it,
which the batch script makes, means: save and end; so does USR1. TERM: end.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.errors import DaroError, DeadlineError, WorkerError
from megatron_daro.workshop.slurm.attempt import (
    Attempt,
    EndedError,
    Ending,
    EndRequests,
    StoppedError,
    read_attempt,
)
from megatron_daro.workshop.slurm.health import Wanted, gpu_problems, problems
from megatron_daro.workshop.slurm.processes import Process, kill_descendants
from megatron_daro.workshop.slurm.ray_start import RAY_START_S, RAY_STARTS, RayNode, SlowStartError
from megatron_daro.workshop.slurm.rendezvous import (
    Greeter,
    Line,
    Message,
    own_address,
    reach_head,
    write_private,
)
from megatron_daro.workshop.slurm.training import train

CHECK_S = 45.0
"""Seconds until every node must have checked its GPUs after a failure."""
IN_A_ROW = 3
"""Attempts in a row that end in the same way, unstarted or by a fault of a GPU, after which the job has failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part. Return 0, or 1 where the job must end because of this node."""
    return asyncio.run(_run(read_attempt(arguments, __doc__.split("\n")[0])))


async def _run(attempt: Attempt) -> int:
    requests = EndRequests()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, requests.end)
    loop.add_signal_handler(signal.SIGUSR1, requests.saving.set)
    watching = asyncio.create_task(requests.watch(attempt.directory / "save"))
    for left in Path(tempfile.gettempdir()).glob(f"daro{attempt.job}_*"):  # of an attempt that was killed on this node
        shutil.rmtree(left, ignore_errors=True)
    try:
        ray = RayNode(attempt, own_address(attempt.node, dict(attempt.addresses), attempt.interface))
        ending = await (_first(attempt, ray, requests) if attempt.first else _other(attempt, ray, requests))
    except EndedError as error:
        ending = Ending("ended", str(error))
    except StoppedError as error:
        ending = Ending("stopped", str(error))
    except SlowStartError as error:
        ending = Ending("unstarted", f"{attempt.node}: {error}", attempt.node)
    except DaroError as error:
        ending = Ending("failed", str(error))
    except (ImportError, FileNotFoundError, PermissionError) as error:  # another attempt would meet it again
        traceback.print_exc()
        ending = Ending("failed", f"{attempt.node}: {type(error).__name__}: {error}")
    finally:
        watching.cancel()
        kill_descendants()
        shutil.rmtree(attempt.temporary, ignore_errors=True)
    if ending.kind in ("unstarted", "gpu_fault") and attempt.ended_before(ending.kind) + 1 >= IN_A_ROW:
        ending = Ending("failed", f"{ending.cause}; so ended {IN_A_ROW} attempts in a row")
    print(f"{attempt.node}: {ending.cause}", flush=True)
    cause = "; ".join(line.strip() for line in ending.cause.splitlines() if line.strip())
    if attempt.first:
        write_private(attempt.directory / "result", "\n".join([ending.kind, cause, ending.nodes]))
    elif ending.kind == "failed":
        write_private(attempt.directory / f"failed_{attempt.node}", cause + "\n")
    return int(ending.kind in ("failed", "ended"))


async def _first(attempt: Attempt, ray: RayNode, requests: EndRequests) -> Ending:
    """Run the first node, to the end of the training."""
    own = problems(Wanted(attempt.gpus, attempt.free_disk_gib, attempt.run_dir))
    if own:  # perhaps nothing is writable; the others end when this process does
        return Ending("bad_nodes", f"{attempt.node}: {'; '.join(own)}", attempt.node)
    write_private(attempt.directory / "ray_token", secrets.token_hex(32))
    greeter = Greeter(attempt.directory, ray.address, attempt.nodes - 1)
    await greeter.start()
    try:
        keeps_from_start = await requests.or_end(_check_nodes(greeter, attempt, ray.address))
        return keeps_from_start or await _with_ray(attempt, ray, requests, greeter)
    finally:
        await greeter.close()


async def _check_nodes(greeter: Greeter, attempt: Attempt, address: str) -> Ending | None:
    """Wait for the other nodes, and return what prevents a start, or None."""
    there = await greeter.gather(attempt.check_s)
    if len(there) == attempt.nodes - 1:
        return _bad_nodes({member.name: member.problems for member in greeter.members.values()})
    started = {path.name.removeprefix("started_") for path in attempt.directory.glob("started_*")}
    silent = sorted(started - set(there))
    names = f" ({', '.join(silent)} started, and did not reach {address})" if silent else ""
    return Ending(
        "failed",
        f"{attempt.nodes - 1 - len(there)} of {attempt.nodes} nodes did not report to {attempt.node} within "
        f"{attempt.check_s:g} s{names}: is {attempt.directory} on a file system that all nodes share, and the network "
        f"open between them? reported: {', '.join(there) or 'none'}",
    )


def _bad_nodes(problems_of: Mapping[str, Sequence[str]]) -> Ending | None:
    bad = {name: problems for name, problems in sorted(problems_of.items()) if problems}
    words = "; ".join(f"{name}: {', '.join(problems)}" for name, problems in bad.items())
    return Ending("bad_nodes", words, ",".join(bad)) if bad else None


async def _with_ray(attempt: Attempt, ray: RayNode, requests: EndRequests, greeter: Greeter) -> Ending:
    """Start Ray on all nodes, then train."""
    head, port = await requests.or_end(ray.start_head())
    address = f"{ray.address}:{port}"
    await greeter.order(Message(order="join", address=address, temporary=str(attempt.temporary)))
    try:
        await requests.or_end(greeter.all_joined(RAY_STARTS * RAY_START_S))
    except (DeadlineError, WorkerError) as error:
        return Ending("unstarted", str(error))
    environment = {**ray.environment, "RAY_ADDRESS": address, "MEGATRON_DARO_ATTEMPT": str(attempt.number)}
    _let_attach(attempt, environment)

    async def look() -> Ending | None:
        return await _look_at_gpus(greeter, attempt)

    greeter.may_lose = attempt.may_lose
    lost = [greeter.trouble, _end_of_ray(head, attempt.node)]
    return await train(attempt, requests, environment, lost=lost, first_loss=greeter.first_loss, look=look)


def _let_attach(attempt: Attempt, environment: Mapping[str, str]) -> None:
    """Write what the batch script's attach.sh needs to start a shell beside this attempt's training."""
    exports = (f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    lines = [f"first_node={shlex.quote(attempt.node)}", *exports]
    write_private(attempt.directory / "attach", "\n".join(lines) + "\n")


async def _look_at_gpus(greeter: Greeter, attempt: Attempt) -> Ending | None:
    """Check all nodes after a failed training, and return what is wrong: silent nodes, or GPUs."""
    own = asyncio.to_thread(gpu_problems, attempt.gpus, used=True)
    others, here = await asyncio.gather(greeter.check(CHECK_S), own)
    silent = sorted(name for name, problems in others.items() if problems is None)
    if silent:
        return Ending("node_lost", f"{', '.join(silent)} gave no answer within {CHECK_S:g} s", ",".join(silent))
    return _bad_nodes({attempt.node: here, **{name: problems or () for name, problems in others.items()}})


def _end_of_ray(ray: Process, node: str) -> asyncio.Future[str]:
    async def sentence() -> str:
        code = await ray.wait()
        return f"{node}: Ray ended with code {code}: {ray.last_line}"

    return asyncio.ensure_future(sentence())


async def _other(attempt: Attempt, ray: RayNode, requests: EndRequests) -> Ending:
    """Run a node that is not the first one, until the first one says that it is over."""
    own = problems(Wanted(attempt.gpus, attempt.free_disk_gib, attempt.run_dir))
    if not own:
        write_private(attempt.directory / f"started_{attempt.node}", "")
    line = await requests.or_end(reach_head(attempt.directory, attempt.node, own, attempt.check_s))
    order = await requests.or_end(line.receive())
    if order is None or order.get("order") != "join":
        return Ending("finished", "told to end")
    try:
        return await _joined(line, order["address"], attempt, ray, requests)
    except SlowStartError as error:
        await line.send(Message(event="unstarted", why=str(error)))
        raise
    finally:
        kill_descendants()
        # Ray uses the session path of the first node on all nodes.
        shutil.rmtree(order["temporary"], ignore_errors=True)


async def _joined(line: Line, head: str, attempt: Attempt, ray: RayNode, requests: EndRequests) -> Ending:
    process = await requests.or_end(ray.join(head))
    await line.send(Message(event="joined"))
    ended = _end_of_ray(process, attempt.node)
    over = asyncio.ensure_future(_follow(line, attempt.gpus))
    either: set[asyncio.Future[Any]] = {over, ended, requests.ended}
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if ended in done:
        await line.send(Message(event="failed", why=ended.result()))
        return Ending("failed", ended.result())
    return Ending("finished", "told to end" if over in done else "ended by SIGTERM")


async def _follow(line: Line, gpus: int) -> None:
    """Check the GPUs whenever the first node asks; return when it says that it is over, or is gone."""
    while (order := await line.receive()) is not None and order.get("order") == "check":
        await line.send(Message(event="checked", problems=await asyncio.to_thread(gpu_problems, gpus, used=True)))


if __name__ == "__main__":
    sys.exit(main())
