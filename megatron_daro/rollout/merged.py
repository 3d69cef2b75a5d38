"""Several streams of rollouts as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

from megatron_daro.types import Rollout

Rollouts = AsyncIterator[tuple[Rollout, ...]]


async def merged(streams: Iterable[Rollouts]) -> AsyncGenerator[tuple[Rollout, ...], None]:
    """Yield the rollouts of all these streams as they come; closing it ends all streams. Raises what a stream
    raises."""
    queue: asyncio.Queue[tuple[Rollout, ...] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: Rollouts) -> None:
        async for rollouts in stream:
            queue.put_nowait(rollouts)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in pumps:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
