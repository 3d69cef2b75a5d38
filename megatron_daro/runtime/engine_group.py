"""Replicas of the embedded engine as Ray actors, behind the Engine Protocol.

Place in the data flow: requests are dealt out to the replicas in turn (a function of their order alone, so a repeated
run repeats its batches); buckets of weights go to every replica by reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from megatron_daro.config.sections import EngineSection
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.runtime.calls import gather, translated
from megatron_daro.runtime.crew import Crew
from megatron_daro.runtime.workers import EngineWorker
from megatron_daro.types import GroupRequest, Rollout


class EngineGroup:
    """The rollout engines of a run."""

    def __init__(
        self, section: EngineSection, *, model_path: Path, trust_remote_code: bool, seed: int, dtype: str
    ) -> None:
        """Starts nothing; `start` does."""
        self._section, self._path, self._trust = section, model_path, trust_remote_code
        self._options = {
            "seed": seed if section.seed is None else section.seed,
            "batch_size": section.embedded.batch_size,
            "threads": section.embedded.threads,
            "dtype": dtype,
        }
        self.workers = Crew()
        self._fenced = False

    async def start(self) -> None:
        """Start the processes and load the model in each; again is nothing. Raises ModelError, WorkerError."""
        if self.workers:
            return
        make: Any = EngineWorker.options(num_cpus=1)  # type: ignore[attr-defined]
        self.workers.update(
            {f"engine {i}": make.remote(self._path, self._trust, self._options) for i in range(self._section.replicas)}
        )
        await gather({name: worker.start.remote() for name, worker in self.workers.items()})

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """The rollouts of each request as soon as they are complete; closing the iterator aborts the rest."""
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

    async def update_weights(self, buckets: AsyncIterator[Any], version: int) -> None:
        """Replace the weights of every replica.

        Args:
            buckets: WeightBuckets, or Ray references to them (then their bytes do not pass through this process).

        Raises:
            SyncError: a replica failed; no replica generates any more.
        """
        self._fenced = True
        try:
            await self._each(lambda worker: worker.begin_update.remote(version))
            async for bucket in buckets:
                await self._each(lambda worker, sent=bucket: worker.add_bucket.remote(sent))
            await self._each(lambda worker: worker.end_update.remote())
        except EngineError as error:
            raise SyncError(f"weights of version {version} did not reach every engine: {error}") from error
        self._fenced = False

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self.workers.dismiss()

    async def _each(self, call: Any) -> None:
        await gather({name: call(worker) for name, worker in self.workers.items()})
