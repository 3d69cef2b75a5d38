"""A proxy in front of a real SGLang server that breaks requests when told to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web
from loopback_server import cut_off, listen, pass_on, passing_session
from sglang_pool import ManagedServer, PooledServer

Rule = Callable[[str], str]
"""Path of a request -> "" (passes), "500", "reset" (before the server sees it), "reset_answer" (after it answered),
"pretend" (told to have succeeded; the server never sees it)."""

Edit = Callable[[str, Any], Awaitable[Any]]
"""Path and JSON body of a request -> the body that the server gets."""


class Proxy:
    """Use as an async context manager. url: where it listens; rule: looked at for every request; edit: awaited for
    what the server gets in place of the body; done: what it did; seen: requests by path."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.rule: Rule = lambda path: ""
        self.edit: Edit | None = None
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    async def __aenter__(self) -> Proxy:
        self.session = passing_session()
        self._runner, self.url = await listen(self.answer, largest_body=2**26)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self.session.close()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.edit is not None and body:
            body = json.dumps(await self.edit(request.path, json.loads(body))).encode()
        action = self.rule(request.path)
        self.done[action] += 1
        self.seen[request.path] += 1
        if action == "500":
            return web.json_response({"error": {"message": "the proxy was told to"}}, status=500)
        if action == "pretend":
            return web.json_response({"success": True, "message": "Success"})
        if action == "reset":
            return cut_off(request)
        try:
            answer = await pass_on(self.session, self.target, request, body)
        except aiohttp.ClientError:
            return cut_off(request)
        return cut_off(request) if action == "reset_answer" else answer


class ProxiedServer(ManagedServer):
    """A server of the pool that the engine may start again, behind a proxy."""

    def __init__(self, server: PooledServer, proxy: Proxy) -> None:
        super().__init__(server)
        self._proxy = proxy

    async def launch(self) -> str:
        """Return the proxy's address."""
        await super().launch()
        return self._proxy.url
