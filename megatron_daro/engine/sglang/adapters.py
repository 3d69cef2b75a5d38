"""Servers that keep the weights of their files and get adapters: how they are started, which ones can be used, and when
an adapter is unloaded.

Each weight version is an adapter with its own name, which requests give: a request ends with the version that it began
with, and when the last request that names an old adapter has ended, the adapter is unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from megatron_daro.engine.sglang.client import ServerFacts, SGLangClient
from megatron_daro.engine.sglang.fleet import Server
from megatron_daro.errors import EngineError

_CLOSE_S = 10.0


def lora_arguments(adapter: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return arguments of a server that takes such adapters. Args: adapter: as `served_config` returns it."""
    arguments = {"enable_lora": True, "max_lora_rank": adapter["r"], "lora_target_modules": adapter["target_modules"]}
    return {**arguments, "lora_backend": "torch_native"} if on_cpu else arguments


def unfit_for(adapter: Mapping[str, Any], facts: ServerFacts) -> list[str]:
    """Return why a server cannot take these adapters; empty if it can."""
    rank, targets = adapter["r"], adapter["target_modules"]
    if not facts.lora:
        got = "it was started without LoRA"
    elif 0 < facts.lora_rank < rank:
        got = f"it takes adapters of rank {facts.lora_rank} at most"
    elif facts.lora_targets and not facts.lora_targets & {"all"} and not facts.lora_targets >= {*targets}:
        got = f"it takes adapters of {', '.join(sorted(facts.lora_targets))}"
    else:
        return []
    allowed = f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(targets)}"
    return [f"{got}; allowed: a server started with {allowed}, or engine.sglang.sync=distributed: merged weights"]


class Adapters:
    """Unloads adapters in the background."""

    def __init__(self, timeout_s: float) -> None:
        """Args: timeout_s: of a call."""
        self._timeout_s = timeout_s
        self._unloading: set[asyncio.Task[None]] = set()

    def unload_unused(self, server: Server) -> None:
        """Unload the adapters that no request names any more, except the newest."""
        for adapter in [name for name, count in server.adapters.items() if not count and name != server.adapter]:
            del server.adapters[adapter]
            task = asyncio.create_task(self._unload(server.url, adapter))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    def unload_all(self, server: Server) -> None:
        """Unload all adapters of a server that gets no more requests, each once its requests in flight have ended. One
        whose load was answered too late is not known, and stays."""
        server.adapter = ""
        self.unload_unused(server)

    async def _unload(self, url: str, adapter: str) -> None:
        async with SGLangClient(url) as client:  # the client of a fenced server may be closed
            with suppress(EngineError):  # an adapter that stays only takes room
                await client.post("/unload_lora_adapter", {"lora_name": adapter}, timeout_s=self._timeout_s)

    async def close(self, servers: Iterable[Server]) -> None:
        """Unload all adapters of these servers, which outlive the run. May be called twice."""
        for server in servers:
            self.unload_all(server)
        if self._unloading:
            await asyncio.wait(self._unloading, timeout=_CLOSE_S)
        for task in self._unloading:
            task.cancel()
