"""A server that this process starts, for tests and benchmarks without Ray."""

from __future__ import annotations

import asyncio

from megatron_daro.engine.sglang.servers import LaunchOptions, ServerProcess


class LocalServer:
    """A ServerProcess of this process."""

    restartable = True

    def __init__(self, options: LaunchOptions, host: str = "127.0.0.1") -> None:
        self._process = ServerProcess(options, host)

    async def launch(self) -> str:
        """Start the process."""
        return await asyncio.to_thread(self._process.launch)

    async def death(self) -> str:
        """Why it is gone."""
        return await asyncio.to_thread(self._process.death)

    async def stop(self) -> None:
        """End it."""
        await asyncio.to_thread(self._process.stop)
