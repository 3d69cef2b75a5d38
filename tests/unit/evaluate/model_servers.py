"""Servers that say which model they have, over HTTP, while a test calls a command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from stub_server import StubServer


@contextmanager
def serving(*models: tuple[Path, str]) -> Iterator[list[str]]:
    """The URLs of servers of (model directory, version of its weights)."""
    loop, servers = asyncio.new_event_loop(), [StubServer() for _ in models]
    for server, (model, version) in zip(servers, models, strict=True):
        info = {"model_type": "qwen2", "model_path": str(model), "weight_version": version}

        async def model_info(request: web.Request, body: object, info: dict = info) -> web.Response:
            return web.json_response(info)

        server.answers["/model_info"] = model_info
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield [asyncio.run_coroutine_threadsafe(one.__aenter__(), loop).result(30).url for one in servers]
    finally:
        for one in servers:
            asyncio.run_coroutine_threadsafe(one.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
