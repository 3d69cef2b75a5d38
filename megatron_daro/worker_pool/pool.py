"""A pool of killable workers: one queue of requests, limits, replacements, without one request harming another.

Requests -> worker processes -> replies. One request is in flight per worker and idle workers take the next from one
queue, so a slow request holds up its own worker only. A request that times out, takes too much memory, ends its worker,
or meets only workers that are stopped before they take it, gets a reply that says so (`timeout`, `memory`, `crash`,
`unreached`); a pool that cannot work raises.

Why not pebble (5.2.3, tried): its ProcessPool keeps order, kills at a time-out, passes over a stopped idle worker and
is as fast. It lacks: a limit on resident memory (an answer that took 800 MiB came back), and its workers' ids are not
public, so none can be added; a way to tell a stopped worker from a starved one (both are its TimeoutError), and a bound
when all workers are stopped (its time-out begins when a task is taken); an end of busy workers when the driver is
killed (one went on computing); a start without importing the driver's main module again; replies without pickle.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_daro.backoff import backoff_s
from megatron_daro.errors import DaroError
from megatron_daro.worker_pool.child import REFUSED
from megatron_daro.worker_pool.process import (
    PATIENCE,
    START_TIMEOUT_S,
    Program,
    WorkerCrashError,
    WorkerMemoryError,
    WorkerProcess,
    WorkerTimeoutError,
    WorkerUnreachedError,
)

_RESTART_ATTEMPTS = 3
_ATTEMPTS_IF_KILLED = 10
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MAX_CRASHES = 2
_MAX_UNREACHED = 3
_JOIN_TIMEOUT_S = 10.0
_Task = tuple[dict[str, Any], "Future[dict[str, Any]]", threading.Event]


def longest_wait_s(waiting: int, workers: int, timeout_s: float) -> float:
    """Return the seconds within which a live pool has answered the last of `waiting` requests, at the most tries of
    each."""
    rounds = waiting // max(1, workers) + 2
    return rounds * (_MAX_CRASHES + _MAX_UNREACHED) * PATIENCE * (timeout_s + START_TIMEOUT_S)


@dataclass(slots=True)
class PoolCounters:
    """What happened so far. answered: requests that a worker answered, or that ended as `timeout` or `memory`.
    restarts: workers started again. asked_again: requests that a stopped worker never took, and that were given to
    another. failed_starts: starts of workers that failed, and were tried again."""

    answered: int = 0
    timeouts: int = 0
    memory_kills: int = 0
    crashes: int = 0
    restarts: int = 0
    asked_again: int = 0
    failed_starts: int = 0


class WorkerPool:
    """Answers requests in worker processes. A context manager; usable from several threads at once."""

    def __init__(self, program: Program, workers: int, timeout_s: float, memory_mib: int) -> None:
        """
        Args:
            program: what each worker runs.
            workers: processes; with 0 nothing may be asked.
            timeout_s: for one request, seconds; the worker is killed and replaced after it.
            memory_mib: resident memory of one worker and of what it starts, MiB, the interpreter included.

        Raises: the program's error for values that cannot work.
        """
        if timeout_s <= 0 or memory_mib <= 0:
            raise program.error(
                f"{program.section}.timeout_s and {program.section}.memory_mib: got {timeout_s} and {memory_mib}, "
                "allowed above 0; 5 seconds and 512 MiB are usual"
            )
        self._program = program
        self._workers, self._timeout_s, self._memory_mib = workers, timeout_s, memory_mib
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._counters = PoolCounters()
        self._closing = threading.Event()
        self._broken: DaroError | None = None

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters by name."""
        with self._lock:
            return asdict(self._counters)

    @property
    def failed_starts(self) -> int:
        """Failed starts of workers that were tried again so far."""
        return self.counters["failed_starts"]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all workers and wait until they are ready; a second call does nothing.

        Raises: the program's error when a worker cannot start, or after close.
        """
        with self._lock:
            if self._closing.is_set():
                raise self._error("already closed; make a new one")
            if self._threads or not self._needs_workers():
                return
            ready: list[Future[None]] = [Future() for _ in range(self._workers)]
            for slot, future in enumerate(ready):
                name = f"{self._program.name}-worker-{slot}"
                self._threads.append(threading.Thread(target=self._dispatch, args=(future,), name=name, daemon=True))
            for thread in self._threads:
                thread.start()
        try:
            limit_s = START_TIMEOUT_S * (PATIENCE + 1)
            _, late = wait(ready, timeout=limit_s, return_when=FIRST_EXCEPTION)
            for future in ready:
                if future not in late:
                    future.result()
            if late:
                raise self._error(
                    f"{len(late)} of {self._workers} workers were not ready within {limit_s:g} s; the "
                    f"machine is overloaded, or something ends them as they start; lower {self._program.section}"
                    ".workers, or look at the system's log"
                )
        except BaseException:
            self.close()
            raise

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request. Raises as `ask_each`."""
        [reply] = await self.ask_each([request])
        return reply

    async def ask_each(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the replies to requests, in order, without blocking a thread.

        Raises: the program's error when the pool is closed, its workers no longer start, are far too few, or a user's
            class does not do what its Protocol says.
        """
        given_up = threading.Event()
        futures, bound_s = self._submit(requests, given_up)
        try:
            async with asyncio.timeout(bound_s):
                return [await asyncio.wrap_future(future) for future in futures]
        except TimeoutError:
            raise self._too_slow(len(futures), bound_s) from None
        finally:
            given_up.set()
            for future in futures:
                future.cancel()  # those that no worker took yet, where the caller was cancelled

    def close(self) -> None:
        """End all workers, busy ones too, and wait for them. Waiting requests raise the program's error."""
        self._closing.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_JOIN_TIMEOUT_S)
        self._fail_waiting(self._error("closed while requests were waiting; close it after the last reply"))

    def _needs_workers(self) -> bool:
        return self._workers > 0

    def _ask_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if not requests:
            return []
        futures, bound_s = self._submit(requests, threading.Event())
        if wait(futures, timeout=bound_s).not_done:
            raise self._too_slow(len(futures), bound_s)
        return [future.result() for future in futures]

    def _submit(
        self, requests: Sequence[dict[str, Any]], given_up: threading.Event
    ) -> tuple[list[Future[dict[str, Any]]], float]:
        """Queue requests. Returns futures of their replies, and the seconds within which a live pool has these."""
        futures: list[Future[dict[str, Any]]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._tasks.put((request, future, given_up))
        self._fail_if_over()
        return futures, longest_wait_s(self._tasks.qsize(), self._workers, self._timeout_s)

    def _too_slow(self, requests: int, bound_s: float) -> DaroError:
        return self._error(
            f"{requests} replies were not there within {bound_s:.0f} s, the bound for {self._workers} workers of "
            f"{self._timeout_s:g} s each; the machine is overloaded, add workers"
        )

    def _error(self, text: str) -> DaroError:
        return self._program.error(f"{self._program.name} pool: {text}")

    def _fail_if_over(self) -> None:
        if self._broken is not None or self._closing.is_set():
            self._fail_waiting(self._broken or self._error("closed; make a new one"))

    def _fail_waiting(self, error: DaroError) -> None:
        num_stops = 0
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is None:
                num_stops += 1
            else:
                _fail(task[1], error)
        for _ in range(num_stops):
            self._tasks.put(None)

    def _dispatch(self, ready: Future[None]) -> None:
        """Body of one dispatcher thread: owns one worker for the life of the pool."""
        worker: WorkerProcess | None = None
        try:
            worker = self._new_worker(attempts=1)
            ready.set_result(None)
            while (task := self._tasks.get()) is not None:
                request, future, given_up = task
                if not future.set_running_or_notify_cancel():
                    continue  # nobody waits for it any more
                try:
                    reply, worker = self._serve(worker, request, given_up)
                    future.set_result(reply)
                except Exception as error:
                    future.set_exception(error)
                    raise
                # Replaced before the next job is taken: a job never waits for a worker to load while another is idle.
                worker = worker or self._replacement()
        except Exception as fault:  # The border of the thread: whoever waits for it must hear of it.
            broken = fault if isinstance(fault, self._program.error) else self._error(f"{fault!r}; report this")
            self._broken = broken
            if not ready.done():
                ready.set_exception(broken)
            self._fail_waiting(broken)
        finally:
            if worker is not None:
                worker.kill()

    def _serve(
        self, worker: WorkerProcess | None, request: dict[str, Any], given_up: threading.Event
    ) -> tuple[dict[str, Any], WorkerProcess | None]:
        """Return the reply to one request and the worker for the next one (None: to be started then)."""
        crashes = unreached = 0
        once = self._program.once
        most_crashes = 1 if once else _MAX_CRASHES

        def stopping() -> bool:
            return self._closing.is_set() or (once and given_up.is_set())

        while crashes < most_crashes and unreached < _MAX_UNREACHED:
            if self._closing.is_set():
                raise self._error("closed while a request was under way; close it after the last reply")
            worker = worker or self._replacement()
            try:
                reply = worker.ask(request, stopping)
            except WorkerTimeoutError:
                reply = {"reason": "timeout"}
            except WorkerMemoryError:
                reply = {"reason": "memory"}
            except WorkerUnreachedError:
                unreached += 1
                self._count(asked_again=unreached < _MAX_UNREACHED)
                worker.kill()
                worker = None
                continue
            except WorkerCrashError:
                worker.kill()
                worker = None
                if once and given_up.is_set():
                    return {"reason": "given_up"}, None
                crashes += 1
                if not self._closing.is_set():
                    self._count(crashes=1)
                continue
            reason = reply["reason"]
            if reason == REFUSED:
                worker.kill()
                raise self._program.error(str(reply["error"]))
            self._count(
                answered=1,
                timeouts=reason == "timeout",
                memory_kills=reason == "memory",
            )
            if reason in ("timeout", "memory"):
                worker.kill()
                worker = None
            return reply, worker
        if self._closing.is_set():
            raise self._error("closed while a request was under way; close it after the last reply")
        return {"reason": "crash" if crashes == most_crashes else "unreached"}, None

    def _replacement(self) -> WorkerProcess:
        worker = self._new_worker(attempts=_RESTART_ATTEMPTS)
        self._count(restarts=1)
        return worker

    def _new_worker(self, *, attempts: int) -> WorkerProcess:
        """Return a worker that is ready. One that ends by itself is started `attempts` times; one that a signal ends,
        more often, since the next start may well succeed."""
        attempt = 0
        while True:
            worker = WorkerProcess(self._program, timeout_s=self._timeout_s, memory_mib=self._memory_mib)
            try:
                worker.start(self._closing.is_set)
            except self._program.error:
                attempt += 1
                most = _ATTEMPTS_IF_KILLED if worker.killed_at_start else attempts
                if attempt >= most or self._closing.wait(
                    backoff_s(attempt - 1, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
                ):
                    raise
                self._count(failed_starts=1)
                continue
            return worker

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)


def _fail(future: Future[dict[str, Any]], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
