"""Replicas of the embedded engine as Ray actors, behind the Engine Protocol.

Requests are dealt out to the replicas in turn (a function of their order alone, so a repeated
run repeats its batches); the policy's ranks hand buckets of weights to every replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from megatron_daro.config.base import filled
from megatron_daro.config.sections import EngineSection
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.runtime.calls import gather, translated
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.supervisor import WorkerGroup
from megatron_daro.runtime.workers import EngineWorker
from megatron_daro.sync.check import ProbeAnswer
from megatron_daro.sync.plan import SendPlan, SendReport, Target
from megatron_daro.types import GroupRequest, Rollout

_BUCKET_BYTES = 64 * 2**20
# For one bucket, which is copied and nothing more.
_RECEIVE_S = 300.0


class EngineGroup:
    """The rollout engines of a run."""

    def __init__(
        self,
        section: EngineSection,
        *,
        model_path: Path,
        trust_remote_code: bool,
        dtype: str,
        placement: Placement,
        logs: Path | None = None,
    ) -> None:
        """Start nothing; `start` does. Args: placement: where each goes, started before. logs: folder
        for the logs of the engines."""
        self._placement, self._logs = placement, logs
        self._section, self._path, self._trust = section, model_path, trust_remote_code
        self._options = {
            "seed": filled(section.seed),
            "batch_size": section.embedded.batch_size,
            "threads": section.embedded.threads,
            "dtype": dtype,
        }
        self.workers = WorkerGroup()
        self._fenced = False

    async def start(self) -> None:
        """Start the processes and load the model in each; again is nothing. Raises ModelError, WorkerError."""
        if self.workers:
            return
        make: Any = EngineWorker
        self.workers.update(
            {
                f"engine {i}": make.options(**self._placement.server(i)).remote(
                    i, self._path, self._trust, self._options, self._logs
                )
                for i in range(self._section.replicas)
            }
        )
        await gather({name: worker.start.remote() for name, worker in self.workers.items()})

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Return the rollouts of each request as soon as they are complete; closing the iterator aborts the rest."""
        if self._fenced:
            raise EngineError(
                "the engines hold mixed weights after a failed update and do not generate; resume the run"
            )
        names = list(self.workers)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        pumps = [
            asyncio.create_task(self._pump(name, requests[i :: len(names)], queue))
            for i, name in enumerate(names)
            if requests[i :: len(names)]
        ]
        finished = False
        try:
            left = len(pumps)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
            finished = True
        finally:
            for task in pumps:
                task.cancel()
            if not finished and self.workers:
                await self.abort([request.group_id for request in requests])

    async def _pump(self, name: str, requests: Sequence[GroupRequest], queue: asyncio.Queue[Any]) -> None:
        """One replica's rollouts into the queue, then None, or the error."""
        try:
            async for reference in self.workers[name].generate.remote(requests):
                queue.put_nowait(await reference)
            queue.put_nowait(None)
        except RayError as error:
            queue.put_nowait(translated(name, error))

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all) on every replica."""
        ids = None if group_ids is None else list(group_ids)
        await gather({name: worker.abort.remote(ids) for name, worker in self.workers.items()})

    def update(self, version: int, only: str | None = None) -> _GroupUpdate | None:
        """Return an update of all replicas together; there is none of a single one: the death of a replica ends the
        run."""
        return None if only else _GroupUpdate(self, version)

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """No replica ever comes back."""

    def fence(self, fenced: bool) -> None:
        """While fenced no replica generates: their weights may differ."""
        self._fenced = fenced

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self.workers.dismiss()


class _GroupUpdate:
    """One update of all replicas: all of them take it, or none generates any more."""

    def __init__(self, group: EngineGroup, version: int) -> None:
        self._group, self._version = group, version

    async def prepare(self) -> SendPlan:
        """Open the update everywhere. Raises SyncError."""
        self._group.fence(True)
        await self._each("open_update")
        return SendPlan(
            transport="actor",
            targets=tuple(Target(name, actor=worker) for name, worker in self._group.workers.items()),
            bucket_bytes=_BUCKET_BYTES,
            timeout_s=_RECEIVE_S,
        )

    async def blame(self, report: SendReport) -> None:
        """Every replica counts. Raises SyncError, with what each said."""
        raise self._error("; ".join(f"{name}: {failure}" for name, failure in report.failures.items()))

    async def install(self, report: SendReport) -> None:
        """Return the weights change everywhere. Raises SyncError."""
        await self._each("commit_update", self._version)

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Nothing: a replica knows every tensor that it must get, and has it or refuses."""
        return {}

    def reject(self, name: str, reason: str) -> None:
        """Not called, since nothing is probed."""
        raise self._error(f"{name}: {reason}")

    async def accept(self) -> Mapping[str, float]:
        """Return the replicas generate again."""
        self._group.fence(False)
        return {}

    def abandon(self, error: SyncError) -> None:
        """They stay fenced."""

    async def _each(self, call: str, *arguments: object) -> None:
        workers = self._group.workers.items()
        try:
            await gather({name: getattr(worker, call).remote(*arguments) for name, worker in workers})
        except EngineError as error:
            raise self._error(str(error)) from error

    def _error(self, text: str) -> SyncError:
        return SyncError(f"weights of version {self._version} did not reach every engine: {text}")
