"""The processes of a job on a node: Ray's, and on the first one the training, which is watched for progress.

Node.py owns them. Each ends with everything it has started; one whose parent is killed gets SIGKILL from the kernel.
Training is `megatron-daro train`, started or resumed when Ray runs on all nodes, and asked to save before the job ends;
its exit codes are in docs/troubleshooting.md, and what they mean for the job is here.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from megatron_daro.errors import WorkerError

_PR_SET_PDEATHSIG = 1
_RAY_STARTED = b"Ray runtime started"
_PORT_TAKEN = "The specified port is"
"""Of Ray's words where another program has the port of its control service."""
_SLOW = "timed out during startup"
"""Of Ray's words where it gave up by itself, after a minute (ray/_private/node.py)."""
_KEPT_LINES = 200
RAY_START_S = 150.0


class SlowStartError(WorkerError):
    """A start took longer than it may."""


class PortTakenError(WorkerError):
    """Another program took the port in the moment between its choice and its use."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child whose output is passed on to this process's, its last lines kept."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self.lines: list[str] = []
        self._saw: dict[bytes, asyncio.Event] = {}
        self._reader = asyncio.create_task(self._pass_on())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        """Start a command; standard error goes where standard output goes."""
        child = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        return cls(child)

    @property
    def last_line(self) -> str:
        """The last line with words that it printed."""
        return next((line for line in reversed(self.lines) if line.strip()), "")

    async def says(self, text: bytes) -> None:
        """Wait until a line with this text comes, unless one of the last lines has it; for ever, if none does."""
        event = self._saw.setdefault(text, asyncio.Event())
        if any(text.decode() in line for line in self.lines):
            event.set()
        await event.wait()

    async def wait(self) -> int:
        """Return the exit code once it has ended and all it printed was passed on."""
        code = await self._child.wait()
        with suppress(TimeoutError):  # a grandchild may hold the pipe open
            async with asyncio.timeout(5):
                await asyncio.shield(self._reader)
        return code

    async def kill(self) -> None:
        """Kill it with everything that it has started."""
        with suppress(psutil.NoSuchProcess):
            _kill_below(psutil.Process(self._child.pid))
        self.signal(signal.SIGKILL)
        await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            self._child.send_signal(number)

    async def _pass_on(self) -> None:
        assert self._child.stdout
        async for raw in self._child.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
            self.lines = [*self.lines[-_KEPT_LINES:], raw.decode(errors="replace").rstrip()]
            for text, event in self._saw.items():
                if text in raw:
                    event.set()


def kill_descendants() -> None:
    """Kill everything that this process has started, theirs included."""
    _kill_below(psutil.Process())


def _kill_below(process: psutil.Process) -> None:
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def start_ray(
    *, head: bool, address: str, port: int, gpus: int, cpus: int, temporary: Path, environment: Mapping[str, str],
    joins: str = "", limit_s: float = RAY_START_S,
) -> Process:  # fmt: skip
    """Start Ray on this node, and wait until it runs.

    Args:
        head: whether this node has Ray's control service, at `port`; else it joins the one at `joins` (host:port).
        address: of this node.
        gpus, cpus: of this node; cpus are places for processes.
        temporary: directory of Ray's session on the first node; a short path.
        environment: variables for it.
        limit_s: until it runs.

    Raises:
        WorkerError: it ended; PortTakenError: because of its port; SlowStartError: it did not start in time, by its own
            limit or this one, and is gone.
    """
    # Not the program `ray`: an environment upon another one's packages has none.
    program = [sys.executable, "-m", "ray.scripts.scripts"]
    role = ["--head", f"--port={port}", f"--temp-dir={temporary}", "--include-dashboard=false"]
    command = [*program, "start", *(role if head else [f"--address={joins}"]), "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
    ray = await Process.start(command, environment)
    started, ended = asyncio.create_task(ray.says(_RAY_STARTED)), asyncio.create_task(ray.wait())
    done, _ = await asyncio.wait({started, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if started in done:
        ended.cancel()
        return ray
    ended.cancel()
    if ended not in done:
        await ray.kill()
        raise SlowStartError(f"Ray did not start within {limit_s:g} s on {address}: {ray.last_line}")
    kinds = {_PORT_TAKEN: PortTakenError, _SLOW: SlowStartError}
    error = next((kind for words, kind in kinds.items() if any(words in line for line in ray.lines)), WorkerError)
    raise error(f"Ray ended with code {ended.result()} on {address}: {ray.last_line}")


T = TypeVar("T")
EXIT_INTERRUPTED = 130
_LOOK_S = 1.0
_ABORT_S = 5.0
_CANCELLED_S = 3.0
_NODE_LOSS_S = 15.0
"""After a failed training: until a lost node has shown itself as its cause."""
_HARDWARE = re.compile(
    r"uncorrectable ECC|GPU has fallen off|GPU is lost|NVLink|device is busy or unavailable|unspecified launch failure|"
    r"hardware stack error|cudaErrorDevicesUnavailable|no CUDA-capable device|unhandled system error|"
    r"remote process exited|ncclRemoteError|ncclSystemError|HSA_STATUS_ERROR|hipErrorNoDevice|Bus error",
    re.IGNORECASE,
)
"""Of errors that a machine makes and a program does not."""


Kind = Literal["finished", "saved", "stopped", "node_lost", "bad_nodes", "unstarted", "gpu_fault", "ended", "failed"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: finished; saved; stopped (asked to save, with nothing to save or no time); node_lost;
    bad_nodes (failed their check); unstarted (Ray did not come up); gpu_fault (on nodes whose check finds nothing);
    ended (by SIGTERM, whose cause others know); failed. cause: a sentence. nodes: that it is about, with commas."""

    kind: Kind
    cause: str
    nodes: str = ""


class EndedError(WorkerError):
    """SIGTERM came before training began."""


class StoppedError(WorkerError):
    """A request to save came before training began."""


class Stops:
    """What the batch script and signals have asked for."""

    def __init__(self) -> None:
        self.saving = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch(self, file: Path) -> None:
        """Wait for the file by which the batch script asks for a checkpoint, then the end."""
        while not file.exists():
            await asyncio.sleep(_LOOK_S)
        self.saving.set()

    def end(self) -> None:
        """SIGTERM: the end."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def or_end(self, work: Awaitable[T]) -> T:
        """Return what `work` returns.

        Raises:
            EndedError: SIGTERM came first. StoppedError: the request to save did.
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


async def train(
    options: argparse.Namespace,
    stops: Stops,
    environment: Mapping[str, str],
    *,
    lost: Sequence[asyncio.Future[str]],
    first_loss: asyncio.Future[str],
    look: Callable[[], Awaitable[Ending | None]],
) -> Ending:
    """Train until the run is finished, or something ends it.

    Args:
        options: of the command line.
        stops: what is asked for.
        environment: of the training process.
        lost: done with a sentence when a node, or Ray on it, is lost, and that is the end.
        first_loss: done with a sentence when a node is lost; what fails after it is taken for its consequence.
        look: checks all nodes after a failure; returns what is wrong with them, or None.

    Returns:
        How it ended.
    """
    resume = ["--resume"] if _holds_a_run(options.run_dir) else []
    command = [sys.executable, "-m", "megatron_daro", "train", *options.train, *resume]
    process = await Process.start(command, environment)
    exit_code = asyncio.ensure_future(process.wait())
    saving = asyncio.ensure_future(_ask_to_save(stops, process))
    stalled = asyncio.ensure_future(_stall(options.run_dir, 60 * options.stall_minutes))
    any_of: set[asyncio.Future[Any]] = {exit_code, stalled, stops.ended, *lost}
    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
    for watcher in (saving, stalled):
        if not watcher.done():
            watcher.cancel()
    if exit_code.done():
        return await _exited(exit_code.result(), process, stops, [*lost, first_loss], look)
    trouble = next((future.result() for future in lost if future.done()), "")
    if trouble and not stops.ended.done():
        # When a job is cancelled, its nodes end one after another; the first one may be the last to know.
        await asyncio.wait({stops.ended}, timeout=_CANCELLED_S)
    if stops.ended.done():
        return await _ended_by_term(process, exit_code, options.term_grace_s, trouble)
    if trouble:
        return Ending("node_lost", trouble)
    last = process.last_line or "none"
    process.signal(signal.SIGABRT)  # Python's fault handler writes where every thread stands into the logs
    await asyncio.wait({exit_code}, timeout=_ABORT_S)
    return Ending("failed", f"{stalled.result()}; its last line: {last}")


def _holds_a_run(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("step_*")) or (metrics.exists() and metrics.stat().st_size > 0)


async def _exited(
    code: int,
    process: Process,
    stops: Stops,
    lost: Sequence[asyncio.Future[str]],
    look: Callable[[], Awaitable[Ending | None]],
) -> Ending:
    """Return what the exit code of the training means for the job."""
    last = process.last_line or f"training ended with code {code} without a word"
    if code == 0:
        return Ending("finished", process.last_line or "finished")
    if stops.saving.is_set():
        return Ending("saved" if code == EXIT_INTERRUPTED else "stopped", last)
    if code not in (1, EXIT_INTERRUPTED) and code >= 0:  # of the configuration or the numbers: machines are no cause
        return Ending("failed", last)
    if lost:  # a worker on a lost node is missed before the node is
        await asyncio.wait(lost, timeout=_NODE_LOSS_S, return_when=asyncio.FIRST_COMPLETED)
        trouble = next((future for future in lost if future.done()), None)
        if trouble:
            return Ending("node_lost", f"{trouble.result()} (training: {last})")
    if found := await look():
        return dataclasses.replace(found, cause=f"{found.cause} (training: {last})")
    fault = next((line for line in reversed(process.lines) if _HARDWARE.search(line)), "")
    return Ending("gpu_fault", f"{fault.strip()} (training: {last})") if fault else Ending("failed", last)


async def _ended_by_term(process: Process, exit_code: asyncio.Future[int], grace_s: float, trouble: str) -> Ending:
    # Slurm signals every process of a job; a second SIGTERM would end the training without a checkpoint.
    await asyncio.wait({exit_code}, timeout=grace_s)
    saved = exit_code.done() and exit_code.result() == EXIT_INTERRUPTED
    words = f"ended by SIGTERM; {process.last_line if saved else 'nothing was saved'}"
    return Ending("ended", f"{trouble}; {words}" if trouble else words)


async def _ask_to_save(stops: Stops, process: Process) -> None:
    await stops.saving.wait()
    print(f"asked to save at {time.strftime('%H:%M:%S')}: the training gets SIGTERM", flush=True)
    process.signal(signal.SIGTERM)


async def _stall(run_dir: Path, limit_s: float) -> str:
    """Return a sentence when no step was recorded for `limit_s` seconds."""
    metrics, size, since = run_dir / "metrics.jsonl", -1, time.monotonic()
    while time.monotonic() - since <= limit_s:
        await asyncio.sleep(_LOOK_S)
        now = metrics.stat().st_size if metrics.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
    return f"no new step in {metrics} for {limit_s / 60:g} minutes; {_last_words(run_dir)}"


def _last_words(run_dir: Path) -> str:
    """Return the last line of each of the logs that were written last."""
    logs = sorted((run_dir / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)[:3]
    words = []
    for log in logs:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        words += [f"{log.name}: {lines[-1].strip()[:200]}"] if lines else []
    return "last words: " + (" | ".join(words) or "none in the logs")
