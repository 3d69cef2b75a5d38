"""A proxy in front of a real SGLang server that breaks requests when told to."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Callable

import aiohttp
from aiohttp import web

Rule = Callable[[str], str]
"""Path of a request -> "" (passes), "500", "reset" (before the server sees it), "reset_answer" (after it answered)."""


class Proxy:
    """Use as an async context manager. url: where it listens; rule: looked at for every request; done: what it did."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.rule: Rule = lambda path: ""
        self.done: Counter[str] = Counter()

    async def __aenter__(self) -> Proxy:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._answer)
        # A client that gives up must be seen by the server, as without a proxy.
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        action = self.rule(request.path)
        self.done[action] += 1
        if action == "500":
            return web.json_response({"error": {"message": "the proxy was told to"}}, status=500)
        if action == "reset":
            return _cut_off(request)
        try:
            answer = await self._pass_on(request, body)
        except aiohttp.ClientError:
            return _cut_off(request)
        return _cut_off(request) if action == "reset_answer" else answer

    async def _pass_on(self, request: web.Request, body: bytes) -> web.Response:
        url, kind = self.target + request.path_qs, request.headers.get("Content-Type", "application/json")
        async with self._session.request(
            request.method, url, data=body or None, headers={"Content-Type": kind}
        ) as answer:
            content = await answer.read()
            return web.Response(status=answer.status, body=content, content_type="application/json")


def _cut_off(request: web.Request) -> web.Response:
    """Ends the client's connection with a TCP reset."""
    if request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        request.transport.abort()
    return web.Response(status=500)
