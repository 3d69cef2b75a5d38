"""The pool of killable verifier workers: scores pairs in order, within limits, without one answer harming another.

(rollout text, gold) -> screen here -> worker processes -> Verdict. One job is in flight per
worker and idle workers take the next from one queue, so a slow answer holds up its own worker only.
Refuses to start with limits that cannot work, and to score after close. A timed-out, oversized or crashing answer
is a Verdict (`timeout`, `memory`, `crash`), never an exception.

Why not pebble (5.2.3, tried): its ProcessPool keeps order, kills at a time-out, passes over a stopped idle worker and
is as fast. It lacks: a limit on resident memory (an answer that took 800 MiB came back), and its workers' ids are not
public, so none can be added; word of whether a worker was stopped or starved (both are its TimeoutError), and a bound
when all workers are stopped (its time-out counts from the taking of a task); an end of busy workers when the driver
is killed (one went on computing); a start without importing the driver's main module again; replies that are no pickle.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_daro.errors import RewardError
from megatron_daro.reward.base import Job, StagedVerifier, VerifierSpec
from megatron_daro.reward.factory import verifier_of
from megatron_daro.reward.process import (
    PATIENCE,
    START_TIMEOUT_S,
    WorkerCrashError,
    WorkerKilledError,
    WorkerMemoryError,
    WorkerProcess,
    WorkerTimeoutError,
    WorkerUnreachedError,
)
from megatron_daro.reward.worker import REFUSED
from megatron_daro.types import Verdict

if TYPE_CHECKING:
    from megatron_daro.config.sections import RewardSection

_IN_PROCESS = ("integer", "exact")
_RESTART_ATTEMPTS = 3
_ATTEMPTS_IF_KILLED = 10
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MAX_CRASHES = 2
_MAX_UNREACHED = 3
_JOIN_TIMEOUT_S = 10.0
_Task = tuple[dict[str, Any], "Future[dict[str, Any]]"]


def longest_wait_s(waiting: int, workers: int, timeout_s: float) -> float:
    """Seconds in which a live pool has scored the last of `waiting` answers, each tried as often as it may be."""
    rounds = waiting // max(1, workers) + 2
    return rounds * (_MAX_CRASHES + _MAX_UNREACHED) * PATIENCE * (timeout_s + START_TIMEOUT_S)


@dataclass(slots=True)
class PoolCounters:
    """What happened so far. screened: decided without a worker. judged: replies of workers, golds included.
    restarts: workers started again. deduplicated: pairs equal to another of the same call. failures: answers on which
    the verifier itself failed. asked_again: answers that a stopped worker never took, given to another one.
    failed_starts: starts of a worker that ended before it was ready, and that were tried again."""

    screened: int = 0
    judged: int = 0
    deduplicated: int = 0
    timeouts: int = 0
    memory_kills: int = 0
    crashes: int = 0
    restarts: int = 0
    failures: int = 0
    asked_again: int = 0
    failed_starts: int = 0


class RewardPool:
    """Scores answers in worker processes. A context manager; usable from several threads at once."""

    def __init__(
        self, verifier: VerifierSpec | str = "math", workers: int = 2, timeout_s: float = 5.0, memory_mib: int = 512
    ) -> None:
        """
        Args:
            verifier: spec, or name for a spec with its defaults.
            workers: processes; 0 runs in the calling thread, `integer` and `exact` only (their work is linear).
            timeout_s: for one answer, seconds; the worker is killed and replaced after it.
            memory_mib: resident memory of one worker, MiB, interpreter and sympy (about 80) included.

        Raises: RewardError for values that cannot work.
        """
        self._spec = VerifierSpec(verifier) if isinstance(verifier, str) else verifier
        if workers < 0 or (workers == 0 and self._spec.name not in _IN_PROCESS):
            raise RewardError(
                f"reward.workers: got {workers} with verifier {self._spec.name!r}, allowed 1 or more "
                f"(0 for {' and '.join(_IN_PROCESS)} only); set workers to the number of free cores"
            )
        if timeout_s <= 0 or memory_mib <= 0:
            raise RewardError(
                f"reward.timeout_s and reward.memory_mib: got {timeout_s} and {memory_mib}, allowed above 0; "
                "5 seconds and 512 MiB are usual"
            )
        stage = verifier_of(self._spec)
        assert isinstance(stage, StagedVerifier)
        self._verifier = stage
        self._workers, self._timeout_s, self._memory_mib = workers, timeout_s, memory_mib
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        self._counters = PoolCounters()
        self._closing = threading.Event()
        self._broken: RewardError | None = None

    @classmethod
    def from_section(cls, section: RewardSection) -> RewardPool:
        """Return the pool of the configuration's reward section."""
        spec = VerifierSpec(
            name=section.verifier,
            strict=section.strict,
            correct_reward=section.correct_reward,
            incorrect_reward=section.incorrect_reward,
            marker=section.marker,
            refuse_restated=section.refuse_restated,
            options=section.options,
        )
        return cls(spec, section.workers, section.timeout_s, section.memory_mib)

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters by name."""
        with self._lock:
            return asdict(self._counters)

    @property
    def failed_starts(self) -> int:
        """Starts of workers that were tried again so far."""
        return self.counters["failed_starts"]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are alive now."""
        with self._lock:
            return tuple(self._pids.values())

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all workers and wait until they are ready; a second call does nothing.

        Raises: RewardError when a worker cannot start, or after close.
        """
        with self._lock:
            if self._closing.is_set():
                raise RewardError("reward pool: already closed; make a new one to score more answers")
            if self._threads or self._needs_no_worker():
                return
            ready: list[Future[None]] = [Future() for _ in range(self._workers)]
            for slot, future in enumerate(ready):
                name = f"reward-worker-{slot}"
                self._threads.append(
                    threading.Thread(target=self._dispatch, args=(slot, future), name=name, daemon=True)
                )
            for thread in self._threads:
                thread.start()
        try:
            limit_s = START_TIMEOUT_S * (PATIENCE + 1)
            _, late = wait(ready, timeout=limit_s, return_when=FIRST_EXCEPTION)
            for future in ready:
                if future not in late:
                    future.result()
            if late:
                raise RewardError(
                    f"reward pool: {len(late)} of {self._workers} workers were not ready within {limit_s:g} s; the "
                    "machine is overloaded, or something ends them as they start; lower reward.workers, or look at the "
                    "system's log"
                )
        except BaseException:
            self.close()
            raise

    def score(self, pairs: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """Verdicts of (answer text, gold) or (answer text, gold, statement) tuples, in their order.

        Args:
            pairs: what is not text gives the reason `not_text` or `gold_not_text`. No text raises: a fault of the
                verifier itself is the reason `verifier_failed`. The statement is the problem's own text.

        Returns: one verdict per pair.
        Raises: RewardError when the pool is closed or its workers no longer start.
        """
        self.start()
        screened = [self._screen(*pair) for pair in pairs]
        jobs = list(dict.fromkeys(item for item in screened if isinstance(item, Job)))
        requests = [{"kind": "judge", **asdict(job)} for job in jobs]
        replies = dict(zip(jobs, self._ask_all(requests), strict=True))
        num_jobs = sum(isinstance(item, Job) for item in screened)
        self._count(screened=len(screened) - num_jobs, deduplicated=num_jobs - len(jobs))
        return [item if isinstance(item, Verdict) else self._verdict(replies[item]) for item in screened]

    async def score_async(self, pairs: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """`score` without blocking the event loop."""
        return await asyncio.to_thread(self.score, pairs)

    def check_golds(self, golds: Sequence[Any]) -> dict[int, str]:
        """Which golds are unusable or can only be matched literally; to be reported when data are loaded.

        Returns: index -> `gold_empty`, `gold_not_text`, `gold_unparsed` (or `timeout`, `memory`, `crash`).
        """
        self.start()
        problems: dict[int, str] = {}
        if self._needs_no_worker():
            found = {i: self._verifier.gold_problem(gold) for i, gold in enumerate(golds)}
            return {i: problem for i, problem in found.items() if problem}
        problems |= {i: "gold_not_text" for i, gold in enumerate(golds) if not isinstance(gold, str)}
        asked = [i for i in range(len(golds)) if i not in problems]
        replies = self._ask_all([{"kind": "gold", "gold": golds[i]} for i in asked])
        problems |= {i: r["reason"] for i, r in zip(asked, replies, strict=True) if r["reason"] != "usable"}
        return dict(sorted(problems.items()))

    def close(self) -> None:
        """End all workers, busy ones too, and wait for them. Pairs that were being scored raise RewardError."""
        self._closing.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_JOIN_TIMEOUT_S)
        self._fail_waiting(RewardError("reward pool: closed while answers were waiting; close it after scoring"))

    def _screen(self, answer_text: object, gold: object, statement: str = "") -> Verdict | Job:
        try:
            return self._verifier.screen(answer_text, gold, statement)
        except Exception:  # The border of the verifier: one answer must not end a run. Counted.
            self._count(failures=1)
            return self._spec.verdict(False, "verifier_failed")

    def _needs_no_worker(self) -> bool:
        return self._spec.name in _IN_PROCESS

    def _verdict(self, reply: dict[str, Any]) -> Verdict:
        verdict = self._spec.verdict(reply.get("correct") is True, str(reply["reason"]))
        return replace(verdict, reward=reply["reward"]) if "reward" in reply else verdict

    def _ask_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        futures: list[Future[dict[str, Any]]] = [Future() for _ in requests]
        if not futures:
            return []
        for task in zip(requests, futures, strict=True):
            self._tasks.put(task)
        if self._broken is not None or self._closing.is_set():
            self._fail_waiting(self._broken or RewardError("reward pool: closed; make a new one"))
        bound_s = longest_wait_s(self._tasks.qsize(), self._workers, self._timeout_s)
        if wait(futures, timeout=bound_s).not_done:
            raise RewardError(
                f"reward pool: {len(futures)} answers were not scored within {bound_s:.0f} s, the bound for "
                f"{self._workers} workers of {self._timeout_s:g} s each; the machine is overloaded, add workers"
            )
        return [future.result() for future in futures]

    def _fail_waiting(self, error: RewardError) -> None:
        num_stops = 0
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is None:
                num_stops += 1
            else:
                task[1].set_exception(error)
        for _ in range(num_stops):
            self._tasks.put(None)

    def _dispatch(self, slot: int, ready: Future[None]) -> None:
        """Body of one dispatcher thread: owns one worker for the life of the pool."""
        worker: WorkerProcess | None = None
        try:
            worker = self._new_worker(slot, attempts=1)
            ready.set_result(None)
            while (task := self._tasks.get()) is not None:
                request, future = task
                try:
                    reply, worker = self._serve(slot, worker, request)
                    future.set_result(reply)
                except Exception as error:
                    future.set_exception(error)
                    raise
                # Replaced before the next job is taken: a job never waits for a worker to load while another is idle.
                worker = worker or self._replacement(slot)
        except Exception as fault:  # The border of the thread: whoever waits for it must hear of it.
            broken = fault if isinstance(fault, RewardError) else RewardError(f"reward pool: {fault!r}; report this")
            self._broken = broken
            if not ready.done():
                ready.set_exception(broken)
            self._fail_waiting(broken)
        finally:
            self._discard(slot, worker)

    def _serve(
        self, slot: int, worker: WorkerProcess | None, request: dict[str, Any]
    ) -> tuple[dict[str, Any], WorkerProcess | None]:
        """Return the reply to one request and the worker for the next one (None: to be started then)."""
        crashes = unreached = 0
        while crashes < _MAX_CRASHES and unreached < _MAX_UNREACHED:
            if self._closing.is_set():
                raise RewardError("reward pool: closed while an answer was being scored; close it after scoring")
            worker = worker or self._replacement(slot)
            try:
                reply = worker.ask(request, self._closing.is_set)
            except WorkerTimeoutError:
                reply = {"reason": "timeout"}
            except WorkerMemoryError:
                reply = {"reason": "memory"}
            except WorkerUnreachedError:
                unreached += 1
                self._count(asked_again=unreached < _MAX_UNREACHED)
                self._discard(slot, worker)
                worker = None
                continue
            except WorkerCrashError:
                crashes += 1
                if not self._closing.is_set():
                    self._count(crashes=1)
                self._discard(slot, worker)
                worker = None
                continue
            reason = reply["reason"]
            if reason == REFUSED:
                self._discard(slot, worker)
                raise RewardError(str(reply["error"]))
            self._count(
                judged=1,
                timeouts=reason == "timeout",
                memory_kills=reason == "memory",
                failures=reason == "verifier_failed",
            )
            if reason in ("timeout", "memory"):
                self._discard(slot, worker)
                worker = None
            return reply, worker
        if self._closing.is_set():
            raise RewardError("reward pool: closed while an answer was being scored; close it after scoring")
        return {"reason": "crash" if crashes == _MAX_CRASHES else "unreached"}, None

    def _replacement(self, slot: int) -> WorkerProcess:
        worker = self._new_worker(slot, attempts=_RESTART_ATTEMPTS)
        self._count(restarts=1)
        return worker

    def _new_worker(self, slot: int, *, attempts: int) -> WorkerProcess:
        """Return a worker that is ready. One that ends by itself is started `attempts` times, one that a signal ends
        more often: the next start may well succeed."""
        attempt = 0
        while True:
            worker = WorkerProcess(self._spec, timeout_s=self._timeout_s, memory_mib=self._memory_mib)
            try:
                worker.start(self._closing.is_set)
            except RewardError as error:
                attempt += 1
                most = _ATTEMPTS_IF_KILLED if isinstance(error, WorkerKilledError) else attempts
                if attempt >= most or self._closing.wait(min(_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)):
                    raise
                self._count(failed_starts=1)
                continue
            with self._lock:
                self._pids[slot] = worker.pid or 0
            return worker

    def _discard(self, slot: int, worker: WorkerProcess | None) -> None:
        with self._lock:
            self._pids.pop(slot, None)
        if worker is not None:
            worker.kill()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)
