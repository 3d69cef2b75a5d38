"""The embedded engine: rollouts from a model in this process, in a worker thread, behind the Engine Protocol.

    requests -> batches of rows -> the thread: EmbeddedGenerator (generator.py) -> rollouts, group by group
    buckets of weights -> `receive` -> WeightStage (weight_stage.py) -> the thread: applied between two batches

One thread does all work on the model, so a weight update never falls into a batch. Owns no process and imports no Ray.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_daro.engine.decoding import AbortSignal, Row
from megatron_daro.engine.generator import EmbeddedGenerator
from megatron_daro.engine.weight_stage import WeightStage
from megatron_daro.errors import EngineError
from megatron_daro.sync.buckets import WeightBucket
from megatron_daro.types import GroupRequest, Rollout

_Result = TypeVar("_Result")
_Item = tuple[Rollout, ...] | Exception | None


class EmbeddedEngine:
    """Rollouts from a model in this process. Takes EmbeddedGenerator's arguments; loads nothing before `start`."""

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int,
        batch_size: int,
        dtype: Literal["fp32", "bf16"] = "fp32",
        threads: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "dtype": dtype}
        self._settings |= {"threads": threads, "decode": decode}
        self._path = Path(path)
        self._generator: EmbeddedGenerator | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._live: set[AbortSignal] = set()
        self._stage: WeightStage | None = None

    async def start(self) -> None:
        """Load the model. Raises ModelError if the checkpoint cannot be loaded, EngineError if already started."""
        if self._worker is not None:
            raise EngineError("the embedded engine was started already.")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-engine")
        try:
            self._generator = await self._run(lambda: EmbeddedGenerator(self._path, **self._settings))
        except BaseException:
            self._worker.shutdown(wait=False)
            self._worker = None
            raise

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request, in the order of its indices, as soon as the last of them is complete.

        Generation goes on while the consumer works on what was yielded. Closing the iterator stops it.

        Raises:
            EngineError: a request cannot be generated (raised before any generation), or the model failed.
        """
        batches = self._started().plan(requests)
        signal, finished = AbortSignal(), asyncio.Queue[_Item]()
        self._live.add(signal)
        producer = asyncio.create_task(self._produce(batches, requests, signal, finished))
        try:
            while (item := await finished.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            signal.abort()
            self._live.discard(signal)
            await asyncio.gather(producer, return_exceptions=True)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """End the given groups (None: all) of the running `generate` calls; these yield the tokens so far, with finish
        reason "abort"."""
        for signal in list(self._live):
            signal.abort(group_ids)

    def open_update(self) -> None:
        """Begin an update. One that is still open is dropped, with the weights it has received."""
        self._stage = self._started().stage_weights()

    async def receive(self, bucket: WeightBucket) -> None:
        """Take one bucket into the open update. Raises EngineError: no update is open, or a tensor is unknown, came
        before, or has another shape; SyncError: the bucket is torn."""
        await asyncio.to_thread(self._open_stage().add, bucket)

    async def commit_update(self, version: int) -> None:
        """Replace all weights, between two batches; on any error the old ones stay, with their version.

        Args:
            version: what rollouts are stamped with from then on.

        Raises:
            EngineError: no update is open, or tensors are missing (a tied lm_head may be).
        """
        stage, generator = self._open_stage(), self._started()
        self._stage = None
        stage.check_complete()
        await self._run(lambda: generator.apply_weights(stage, version))

    def _open_stage(self) -> WeightStage:
        if self._stage is None:
            raise EngineError("the embedded engine has no weight update open.")
        return self._stage

    async def close(self) -> None:
        """Abort everything, wait for the work that is running, and drop the model. May be called twice."""
        await self.abort()
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.shutdown, wait=True, cancel_futures=True)
        self._generator = None

    async def _produce(
        self,
        batches: Sequence[Sequence[Row]],
        requests: Sequence[GroupRequest],
        signal: AbortSignal,
        finished: asyncio.Queue[_Item],
    ) -> None:
        """Run the batches one after the other; put every complete request into the queue, then None or an error."""
        generator = self._started()
        loop = asyncio.get_running_loop()
        waiting: dict[int, dict[int, Rollout]] = {id(request): {} for request in requests}

        def collect(row: Row, rollout: Rollout) -> None:
            held = waiting[id(row.request)]
            held[row.index] = rollout
            if len(held) == len(row.request.indices):
                complete = tuple(held[index] for index in row.request.indices)
                loop.call_soon_threadsafe(finished.put_nowait, complete)

        try:
            for batch in batches:
                await self._run(functools.partial(generator.generate_rows, batch, signal, collect))
            finished.put_nowait(None)
        except asyncio.CancelledError:
            finished.put_nowait(EngineError("the embedded engine was closed while it generated."))
        except Exception as error:  # whatever it is, the consumer must see it: it waits on this queue
            finished.put_nowait(error)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        if self._worker is None:
            raise EngineError("the embedded engine is not running: it was not started, or it was closed.")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _started(self) -> EmbeddedGenerator:
        if self._generator is None:
            raise EngineError("the embedded engine is not running: it was not started, or it was closed.")
        return self._generator
