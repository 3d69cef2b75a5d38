"""Replicas of the embedded engine as Ray actors, behind the Engine Protocol; one whose process ends is started again.

The requests of a call are dealt out to the replicas in turn, a single request by its group's id (so a repeated run
repeats its batches). The policy's ranks send buckets of weights to every replica.

A restarted replica gets the current weights and is asked all of its requests again, even those that it had answered:
rows that are decoded together affect each other's last bits. Answers that were passed on already are not passed on
twice. So with `rollout.max_staleness` 0 the run goes on as if no replica had died; otherwise the current weights may be
newer than those before. A replica that refuses its weights ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megatron_daro import garbage
from megatron_daro.config.base import filled
from megatron_daro.errors import DaroError, EngineError, LostReceiversError, SyncError
from megatron_daro.observe import logs
from megatron_daro.rollout.merged import merged
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.frozen_workers import end_frozen
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.ray_calls import WorkerDiedError, actor_class, gather, remote_class, translated
from megatron_daro.runtime.worker_group import death_of
from megatron_daro.sync.buckets import WeightBucket
from megatron_daro.sync.plan import SendPlan, SendReport, Target
from megatron_daro.types import GroupRequest, Rollout

_BUCKET_BYTES = 64 * 2**20
# For one bucket, which is only copied.
_RECEIVE_S = 300.0


@remote_class(max_restarts=0, max_task_retries=0)
class EngineWorker:
    """One replica of the embedded engine: the methods of the Engine Protocol and those of a weight update, on
    Ray's event loop."""

    def __init__(
        self,
        number: int,
        path: Path,
        trust_remote_code: bool,
        options: dict[str, Any],
        log_folder: Path | None = None,
    ) -> None:
        logs.take_over(log_folder, f"engine {number}")
        with garbage.paused():
            from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
            from megatron_daro.engine.embedded import EmbeddedEngine

        tokenizer = load_tokenizer(path, trust_remote_code)
        self._engine = EmbeddedEngine(path, decode=response_decoder(tokenizer), **options)

    async def sentinel(self) -> None:
        """Block for as long as the process lives."""
        await asyncio.Event().wait()

    async def lives(self) -> None:
        """Answer, even while it generates."""

    async def start(self) -> None:
        """Load the model."""
        with garbage.paused():
            await self._engine.start()

    @ray.method(num_returns="streaming")
    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Return the rollouts of each request as soon as they are complete."""
        async for rollouts in self._engine.generate(requests):
            yield rollouts

    async def abort(self, group_ids: Sequence[int] | None) -> None:
        """Stop these groups, or all."""
        await self._engine.abort(group_ids)

    async def open_update(self) -> None:
        """Begin a weight update; buckets follow."""
        self._engine.open_update()

    async def receive(self, bucket: WeightBucket) -> None:
        """Take one more bucket of the update that was begun."""
        await self._engine.receive(bucket)

    async def commit_update(self, version: int) -> None:
        """Install the new weights: all buckets were sent."""
        await self._engine.commit_update(version)


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine. state: away until its process has loaded the model, joining until it has the policy's weights."""

    number: int
    worker: ActorHandle | None = None
    state: Literal["away", "joining", "serving"] = "away"
    restarts: int = 0

    @property
    def name(self) -> str:
        return f"engine {self.number}"


@dataclass(slots=True, eq=False)
class _Share:
    """What one call of `generate` asks of one replica: its requests that were not aborted."""

    requests: tuple[GroupRequest, ...]


class EmbeddedEngines:
    """The embedded engines of a run."""

    def __init__(self, run: RunContext, placement: Placement) -> None:
        """Start nothing. Args: placement: where each engine goes; already started."""
        section, model = run.config.engine, run.config.model
        self._run, self._placement, self._warn = run, placement, run.progress.warn
        self._path, self._trust = model.path.absolute(), model.trust_remote_code
        self._max_restarts, self._hung_s = section.embedded.max_restarts, run.config.trainer.hung_rank_s
        self._options = {
            "seed": filled(section.seed),
            "batch_size": section.embedded.batch_size,
            "threads": section.embedded.threads,
            "dtype": run.config.actor.dtype,
        }
        self._replicas = [_Replica(number) for number in range(section.replicas)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares: set[_Share] = set()
        self._changed = asyncio.Event()
        self._fatal: Exception | None = None
        self._when_back: Callable[[str], Awaitable[None]] | None = None
        self._fenced = self._closed = False

    async def start(self) -> None:
        """Start the processes and load the model in each; do nothing if they run. Raises ModelError, WorkerError."""
        if self._tasks:
            return
        self._run.progress.stage("engine", f"{len(self._replicas)} engines load the model")
        await gather({replica.name: self._begin(replica).start.remote() for replica in self._replicas})
        for replica in self._replicas:
            replica.state = "joining"
            self._go_on(self._watch(replica))
        self._go_on(self._end_hung())

    def serve_as_loaded(self) -> None:
        """Let replicas, also restarted ones, serve with the weights that they load: no policy sends them others."""

        async def serve(name: str) -> None:
            for replica in self._replicas:
                if replica.name == name and replica.state == "joining":
                    self.set_serving([replica])

        self.when_back(serve)
        self.set_serving([replica for replica in self._replicas if replica.state == "joining"])

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Return the rollouts of each request as soon as they are complete; closing the iterator aborts the rest."""
        self._check()
        if self._fenced:
            raise EngineError(
                "the engines hold mixed weights after a failed update and do not generate; resume the run"
            )
        number = len(self._replicas)
        # A single group goes to the replica of its id, so that a repeated run repeats its batches.
        first = requests[0].group_id if len(requests) == 1 else 0
        shares = [(replica, requests[(replica.number - first) % number :: number]) for replica in self._replicas]
        finished = False
        try:
            async with contextlib.aclosing(merged(self._ask(*pair) for pair in shares if pair[1])) as answers:
                async for rollouts in answers:
                    yield rollouts
            finished = True
        finally:
            if not finished:
                await self.abort([request.group_id for request in requests])

    async def _ask(self, replica: _Replica, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield one replica's rollouts, each once, however often the replica is restarted meanwhile."""
        given: set[tuple[int, int, int]] = set()
        share = _Share(tuple(requests))
        self._shares.add(share)
        try:
            while (worker := await self._serving(replica, share)) is not None:
                try:
                    async for reference in worker.generate.remote(share.requests):
                        rollouts = await reference
                        first = rollouts[0].group_id, rollouts[0].attempt, rollouts[0].index
                        if first not in given:
                            given.add(first)
                            yield rollouts
                    return
                except RayError as error:
                    self.lose(replica, worker, translated(replica.name, error))
        finally:
            self._shares.discard(share)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all): on every replica that runs, and where they wait for a restarted one."""
        ids = None if group_ids is None else list(group_ids)
        for share in self._shares:
            share.requests = tuple(one for one in share.requests if ids is not None and one.group_id not in ids)
        self._tell()
        errors = await self.on_each(self.present(), lambda worker: worker.abort.remote(ids))
        for error in errors.values():
            if not isinstance(error, WorkerDiedError):
                raise error

    def begin_update(self, version: int, only: str | None = None) -> _GroupUpdate | None:
        """Begin an update of all replicas together, or of the restarted replica named `only`; return None if that one
        no longer waits for weights. Raises what `fatal_error` returns; EngineError: closed."""
        self._check()
        if only is None:
            return _GroupUpdate(self, version)
        replica = next(one for one in self._replicas if one.name == only)
        return _GroupUpdate(self, version, replica) if replica.state == "joining" else None

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Have `call` called with the name of each replica that was restarted and needs weights."""
        self._when_back = call

    def fence(self, fenced: bool) -> None:
        """Fence or release all replicas. While they are fenced none generates, since their weights may differ."""
        self._fenced = fenced

    @property
    def restarts(self) -> int:
        """How often replicas were restarted since the start."""
        return sum(replica.restarts for replica in self._replicas)

    def present(self) -> dict[_Replica, ActorHandle]:
        """Return the replicas whose process runs and has loaded the model."""
        return {one: one.worker for one in self._replicas if one.state != "away" and one.worker is not None}

    async def any_present(self) -> dict[_Replica, ActorHandle]:
        """Wait until some replica is present, and return `present`. Raises what `fatal_error` returns."""
        while not (there := self.present()):
            self._check()
            await self._changed.wait()
        return there

    async def on_each(
        self, workers: Mapping[_Replica, ActorHandle], call: Callable[[ActorHandle], Awaitable[None]]
    ) -> dict[_Replica, DaroError]:
        """Call each of these workers, and return their errors; a worker whose process is gone is restarted."""

        async def one(replica: _Replica, worker: ActorHandle) -> DaroError | None:
            try:
                await call(worker)
            except RayError as error:
                failure = translated(replica.name, error)
                with contextlib.suppress(DaroError):
                    self.lose(replica, worker, failure)
                return failure
            return None

        errors = await asyncio.gather(*(one(*pair) for pair in workers.items()))
        return {replica: error for replica, error in zip(workers, errors, strict=True) if error}

    def set_serving(self, replicas: Collection[_Replica]) -> None:
        """Let these replicas generate: they have the right weights."""
        for replica in replicas:
            replica.state = "serving"
        self._tell()

    def lose(self, replica: _Replica, worker: ActorHandle, failure: DaroError) -> None:
        """Kill what is left of a dead replica's process; `_watch` starts the next one. Raises `failure` if it is not a
        death."""
        if not isinstance(failure, WorkerDiedError):
            raise failure
        if replica.worker is worker:
            replica.state = "away"
        ray.kill(worker, no_restart=True)  # Ray may only have lost the connection

    def end(self, error: Exception) -> None:
        """Note that the run cannot go on, and wake everything that waits for a replica."""
        self._fatal = self._fatal or error
        self._tell()

    async def fatal_error(self) -> Exception:
        """Wait until the run cannot go on, because a replica died too often, could not be started again
        or refused its weights, and return why."""
        while self._fatal is None:
            await self._changed.wait()
        return self._fatal

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self._closed = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        for replica in self._replicas:
            worker, replica.worker, replica.state = replica.worker, None, "away"
            if worker is not None:
                ray.kill(worker, no_restart=True)
        self._tell()

    def _begin(self, replica: _Replica) -> ActorHandle:
        """Start a replica's process, which loads nothing yet, and return it."""
        made = actor_class(EngineWorker).options(**self._placement.server(replica.number))
        replica.worker = made.remote(replica.number, self._path, self._trust, self._options, self._run.log_dir)
        return replica.worker

    async def _watch(self, replica: _Replica) -> None:
        """Start a replica again whenever its process ends, as often as is allowed."""
        while True:
            worker = replica.worker
            assert worker is not None, "it was started"
            failure = await death_of(replica.name, worker)
            replica.state = "away"
            ray.kill(worker, no_restart=True)  # Ray may only have lost the connection
            if replica.restarts >= self._max_restarts:
                again = f"; it was started again {replica.restarts} times (engine.embedded.max_restarts)"
                raise WorkerDiedError(f"{failure}{again if replica.restarts else ''}")
            replica.restarts += 1
            self._warn(f"{failure}. It is started again, and asked again")
            with contextlib.suppress(WorkerDiedError):
                await self._load(replica)
                self._go_on(self._join(replica))

    async def _end_hung(self) -> None:
        """For ever, kill processes that are frozen; `_watch` notices their deaths."""

        def looked_at() -> Mapping[str, ActorHandle]:
            return {replica.name: worker for replica, worker in self.present().items()}

        await end_frozen(looked_at, lambda engine: engine.lives.remote(), hung_s=self._hung_s, warn=self._warn)

    async def _load(self, replica: _Replica) -> None:
        """Start the replica's next process and load the model. Raises ModelError, DeadlineError; WorkerDiedError: it
        died again."""
        started = gather({replica.name: self._begin(replica).start.remote()})
        await self._run.deadlines.within("engine_start", started, what=replica.name)
        replica.state = "joining"
        self._tell()

    async def _join(self, replica: _Replica) -> None:
        """Ask for weights. Before the first update of all, none are sent: that update brings them."""
        if self._when_back:
            await self._when_back(replica.name)

    async def _serving(self, replica: _Replica, share: _Share) -> ActorHandle | None:
        """Wait until a replica has the weights; returns None once its share was aborted. Raises what `fatal_error`
        returns."""
        while share.requests and (replica.state != "serving" or replica.worker is None):
            self._check()
            await self._changed.wait()
        return replica.worker if share.requests else None

    def _go_on(self, work: Coroutine[None, None, None]) -> None:
        """Run this in the background until `close`; its failure ends the run."""

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                self.end(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(over)

    def _tell(self) -> None:
        """Wake everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed or not self._tasks:
            raise EngineError("the embedded engines do not run: they were not started, or were closed")


class _GroupUpdate:
    """One update of all replicas, or of a restarted one. A replica that dies meanwhile drops out; after its restart it
    gets an update of its own. No probe is needed: a replica knows every tensor that it must get, and refuses if one is
    missing."""

    def __init__(self, group: EmbeddedEngines, version: int, only: _Replica | None = None) -> None:
        self._group, self._version, self._only = group, version, only
        self._taking: dict[_Replica, ActorHandle] = {}
        self._installed = False

    async def prepare(self) -> SendPlan | None:
        """Open the update on each replica. Returns None if the update is of one replica and that one is gone. Raises
        SyncError."""
        if self._only is None:
            self._group.fence(True)
        self._taking = {}
        while not self._taking:
            there = self._group.present() if self._only else await self._group.any_present()
            self._taking = {one: worker for one, worker in there.items() if self._only in (None, one)}
            if not self._taking:
                return None
            await self._each(lambda worker: worker.open_update.remote())
        return SendPlan(
            transport="ray",
            targets=tuple(Target(one.name, worker=worker) for one, worker in self._taking.items()),
            bucket_bytes=_BUCKET_BYTES,
            timeout_s=_RECEIVE_S,
        )

    async def blame(self, report: SendReport) -> None:
        """Give up the replicas that did not answer. Raises SyncError if any refused what it got, with what each
        said."""
        refused = {name: failure for name, failure in report.failures.items() if failure.kind == "refused"}
        if refused:
            raise self._error("; ".join(f"{name}: {failure}" for name, failure in refused.items()))
        for one, worker in list(self._taking.items()):
            if one.name in report.failures:
                self._group.lose(one, worker, WorkerDiedError(str(report.failures[one.name])))
                del self._taking[one]

    async def install(self, report: SendReport) -> None:
        """Install the weights in every replica. Raises SyncError."""
        await self._each(lambda worker: worker.commit_update.remote(self._version))
        self._installed = True

    async def accept(self) -> Mapping[str, float]:
        """Let the remaining replicas generate; return how often replicas were restarted. Raises LostReceiversError:
        none is left."""
        there = self._group.present()
        left = [one for one, worker in self._taking.items() if there.get(one) is worker]
        if not self._installed or not left:
            raise LostReceiversError(f"weights of version {self._version} reached no engine: all died meanwhile")
        if self._only is None:
            self._group.fence(False)
        self._group.set_serving(left)
        return {"recovery/engine_restarts": float(self._group.restarts)}

    def abandon(self, error: SyncError) -> None:
        """Leave replicas fenced after an update of all. End the run after an update of one replica that lives: it will
        never get its weights."""
        worker = self._taking.get(self._only) if self._only else None
        if self._only and worker and self._group.present().get(self._only) is worker:
            self._group.end(error)

    async def _each(self, call: Callable[[ActorHandle], Awaitable[None]]) -> None:
        """Call each replica of the update; those that died drop out. Raises SyncError: a living one failed."""
        errors = await self._group.on_each(self._taking, call)
        failed = {one: error for one, error in errors.items() if not isinstance(error, WorkerDiedError)}
        if failed:
            raise self._error("; ".join(f"{one.name}: {error}" for one, error in failed.items()))
        self._taking = {one: worker for one, worker in self._taking.items() if one not in errors}

    def _error(self, text: str) -> SyncError:
        return SyncError(f"weights of version {self._version} did not reach every engine: {text}")
