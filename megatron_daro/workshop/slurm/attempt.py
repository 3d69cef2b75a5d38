"""One start of a run on one node: what it was told, what may be asked of it meanwhile, and how it can end."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_daro.errors import DaroError

T = TypeVar("T")
_LOOK_S = 1.0
_ABORT_S = 5.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the command line and srun's environment say.

    node: this node's name; first: whether it is the first of `nodes`. job: its number in Slurm. number, directory: of
    this start; the nodes share the directory. gpus: of the node; cores: places for processes on a node without GPUs,
    None to leave them to `ray_start`. free_disk_gib: least free space in run_dir. check_s: seconds until every node
    must have reported; stall_s: seconds without a new step after which the attempt ends; term_grace_s: seconds that the
    training has after SIGTERM. may_lose: how many nodes may be lost. interface: network interface; addresses: of nodes,
    by their
    names. train: arguments of `megatron-daro train`.
    """

    node: str
    first: bool
    nodes: int
    job: str
    number: int
    directory: Path
    run_dir: Path
    gpus: int
    cores: int | None
    free_disk_gib: float
    check_s: float
    stall_s: float
    term_grace_s: float
    may_lose: int
    interface: str | None
    addresses: Sequence[tuple[str, str]]
    train: Sequence[str]

    @property
    def temporary(self) -> Path:
        """Directory of Ray's session, a short path: those of its sockets are limited to 107 bytes."""
        return Path(tempfile.gettempdir()) / f"daro{self.job}_{self.number}"

    def ended_before(self, kind: str) -> int:
        """Count the attempts right before this one that ended in this way."""
        count = 0
        while (file := self.directory.with_name(f"attempt_{self.number - count - 1:03d}") / "result").exists():
            if file.read_text(encoding="utf-8").partition("\n")[0] != kind:
                break
            count += 1
        return count


def read_attempt(arguments: Sequence[str] | None, about: str) -> Attempt:
    """Read the command line that the batch script gives to srun, and the environment that srun gives to a node."""
    parser = argparse.ArgumentParser(prog="megatron_daro.workshop.slurm.node", description=about)
    parser.add_argument("--attempt-dir", dest="directory", type=Path, required=True)
    parser.add_argument("--attempt", dest="number", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--cores", type=int, help="of a node without GPUs; unset: as many processes as there are")
    parser.add_argument("--free-disk-gib", type=float, required=True)
    parser.add_argument("--check-minutes", dest="check_s", type=_minutes, required=True)
    parser.add_argument("--stall-minutes", dest="stall_s", type=_minutes, required=True)
    parser.add_argument("--term-grace-s", type=float, required=True)
    parser.add_argument("--may-lose", type=int, default=0)
    parser.add_argument("--interface")
    parser.add_argument("--address", dest="addresses", action="append", default=[], type=_pair, metavar="NODE=ADDRESS")
    parser.add_argument("train", nargs="+", help="after --: arguments of `megatron-daro train`")
    parser.set_defaults(
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        first=os.environ.get("SLURM_PROCID", "0") == "0",
        nodes=int(os.environ.get("SLURM_NNODES", "1")),
        job=os.environ.get("SLURM_JOB_ID", str(os.getpid())),
    )
    return Attempt(**vars(parser.parse_args(arguments)))


def _minutes(text: str) -> float:
    return 60 * float(text)


def _pair(text: str) -> tuple[str, str]:
    name, _, address = text.partition("=")
    return name, address


Kind = Literal["finished", "saved", "stopped", "node_lost", "bad_nodes", "unstarted", "gpu_fault", "ended", "failed"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: finished; saved; stopped (asked to save, with nothing to save or no time); node_lost;
    bad_nodes (failed their check); unstarted (Ray did not come up); gpu_fault (on nodes whose check finds nothing);
    ended (by SIGTERM, whose sender knows why); failed. cause: a sentence. nodes: those that it is about, with commas
    between them."""

    kind: Kind
    cause: str
    nodes: str = ""


class EndedError(DaroError):
    """SIGTERM came before training began."""


class StoppedError(DaroError):
    """A request to save came before training began."""


class EndRequests:
    """What the batch script and signals ask for: `saving` (save, then end), and `ended` (the end, at once)."""

    def __init__(self) -> None:
        self.saving = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch(self, file: Path) -> None:
        """Wait for the file by which the batch script asks for a checkpoint, then the end."""
        while not file.exists():
            await asyncio.sleep(_LOOK_S)
        self.saving.set()

    def end(self) -> None:
        """Ask for the end at once."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def or_end(self, work: Awaitable[T]) -> T:
        """Return what `work` returns; cancel it if an end or a save is asked for before that.

        Raises:
            EndedError: SIGTERM came first. StoppedError: the request to save came first.
        """
        task, saving = asyncio.ensure_future(work), asyncio.ensure_future(self.saving.wait())
        either: set[asyncio.Future[Any]] = {task, saving, self.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        saving.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=_ABORT_S)
        if self.ended.done():
            raise EndedError("ended by SIGTERM before training began")
        raise StoppedError("asked to end before training began; nothing is lost")
