"""The training of a job, on its first node: started or resumed when Ray runs on all nodes, watched, and ended.

It is `megatron-daro train`, which is asked to save before the job ends; its exit codes are in docs/troubleshooting.md,
and what they mean for the job is here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_daro.errors import EXIT_INTERRUPTED
from megatron_daro.workshop.slurm.attempt import Attempt, Ending, EndRequests
from megatron_daro.workshop.slurm.processes import Process

_LOOK_S = 1.0
_ABORT_S = 5.0
_CANCELLED_S = 3.0
_NODE_LOSS_S = 15.0
"""How long after a failed training a lost node may take to show itself as the cause."""
_HARDWARE = re.compile(
    r"uncorrectable ECC|GPU has fallen off|GPU is lost|NVLink|device is busy or unavailable|unspecified launch failure|"
    r"hardware stack error|cudaErrorDevicesUnavailable|no CUDA-capable device|unhandled system error|"
    r"remote process exited|ncclRemoteError|ncclSystemError|HSA_STATUS_ERROR|hipErrorNoDevice|Bus error",
    re.IGNORECASE,
)
"""Words of errors that come from a machine, not from a program."""


async def train(
    attempt: Attempt,
    requests: EndRequests,
    environment: Mapping[str, str],
    *,
    lost: Sequence[asyncio.Future[str]],
    first_loss: asyncio.Future[str],
    look: Callable[[], Awaitable[Ending | None]],
) -> Ending:
    """Train until the run is finished, or something ends it.

    Args:
        attempt: where it is, what it trains.
        requests: what is asked for meanwhile.
        environment: of the training process.
        lost: done with a sentence when the loss of a node, or of Ray on it, ends the attempt.
        first_loss: done with a sentence when a node is lost; a failure after it counts as its consequence.
        look: checks all nodes after a failure; returns what is wrong with them, or None.

    Returns:
        How it ended.
    """
    resume = ["--resume"] if _holds_a_run(attempt.run_dir) else []
    command = [sys.executable, "-m", "megatron_daro", "train", *attempt.train, *resume]
    process = await Process.start(command, environment)
    exit_code = asyncio.ensure_future(process.wait())
    saving = asyncio.ensure_future(_ask_to_save(requests, process))
    stalled = asyncio.ensure_future(_stall(attempt.run_dir, attempt.stall_s))
    any_of: set[asyncio.Future[Any]] = {exit_code, stalled, requests.ended, *lost}
    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
    for watcher in (saving, stalled):
        if not watcher.done():
            watcher.cancel()
    if exit_code.done():
        return await _exited(exit_code.result(), process, requests, [*lost, first_loss], look)
    trouble = next((future.result() for future in lost if future.done()), "")
    if trouble and not requests.ended.done():
        # When a job is cancelled, its nodes end one after another; the first one may be the last to know.
        await asyncio.wait({requests.ended}, timeout=_CANCELLED_S)
    if requests.ended.done():
        return await _ended_by_term(process, exit_code, attempt.term_grace_s, trouble)
    if trouble:
        return Ending("node_lost", trouble)
    last = process.last_line or "none"
    process.signal(signal.SIGABRT)  # Python's fault handler writes every thread's stack into the logs
    await asyncio.wait({exit_code}, timeout=_ABORT_S)
    return Ending("failed", f"{stalled.result()}; its last line: {last}")


def _holds_a_run(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("step_*")) or (metrics.exists() and metrics.stat().st_size > 0)


async def _exited(
    code: int,
    process: Process,
    requests: EndRequests,
    lost: Sequence[asyncio.Future[str]],
    look: Callable[[], Awaitable[Ending | None]],
) -> Ending:
    """Return what the exit code of the training means for the job."""
    last = process.last_line or f"training ended with code {code} without a word"
    if code == 0:
        return Ending("finished", process.last_line or "finished")
    if requests.saving.is_set():
        return Ending("saved" if code == EXIT_INTERRUPTED else "stopped", last)
    if code not in (1, EXIT_INTERRUPTED) and code >= 0:  # wrong configuration or numbers: no machine caused it
        return Ending("failed", last)
    if lost:  # a worker on a lost node is missed before the node itself
        await asyncio.wait(lost, timeout=_NODE_LOSS_S, return_when=asyncio.FIRST_COMPLETED)
        trouble = next((future for future in lost if future.done()), None)
        if trouble:
            return Ending("node_lost", f"{trouble.result()} (training: {last})")
    if unwell := await look():
        return dataclasses.replace(unwell, cause=f"{unwell.cause} (training: {last})")
    fault = next((line for line in reversed(process.lines) if _HARDWARE.search(line)), "")
    return Ending("gpu_fault", f"{fault.strip()} (training: {last})") if fault else Ending("failed", last)


async def _ended_by_term(process: Process, exit_code: asyncio.Future[int], grace_s: float, trouble: str) -> Ending:
    # Slurm signals every process of a job; a second SIGTERM would end the training without a checkpoint.
    await asyncio.wait({exit_code}, timeout=grace_s)
    saved = exit_code.done() and exit_code.result() == EXIT_INTERRUPTED
    words = f"ended by SIGTERM; {process.last_line if saved else 'nothing was saved'}"
    return Ending("ended", f"{trouble}; {words}" if trouble else words)


async def _ask_to_save(requests: EndRequests, process: Process) -> None:
    await requests.saving.wait()
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
    """Return the last line of each of the three logs that were written last."""
    logs = sorted((run_dir / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)[:3]
    words = []
    for log in logs:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        words += [f"{log.name}: {lines[-1].strip()[:200]}"] if lines else []
    return "last words: " + (" | ".join(words) or "none in the logs")
