"""A small HTTP server on loopback, and what a proxy needs: passing a request on, cutting a client off.

Used by the stub of an SGLang server, and by the proxies in front of real ones in tests/sglang and benchmarks.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def listen(handler: Handler, *, largest_body: int = 2**20) -> tuple[web.AppRunner, str]:
    """Starts a server on a free port that gives every request to `handler`. Returns its runner and its URL."""
    application = web.Application(client_max_size=largest_body)
    application.router.add_route("*", "/{path:.*}", handler)
    # A client that gives up must be seen by the handler.
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def passing_session() -> aiohttp.ClientSession:
    """For `pass_on`: no limit on time or number, a new connection for every request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def pass_on(session: aiohttp.ClientSession, target: str, request: web.Request, body: bytes) -> web.Response:
    """The answer of `target` to this request. Raises aiohttp.ClientError where it breaks off."""
    kind = {"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {}
    async with session.request(request.method, target + request.path_qs, data=body or None, headers=kind) as answer:
        content = await answer.read()
        headers = {"Content-Type": answer.headers.get("Content-Type", "")}
        return web.Response(status=answer.status, body=content, headers=headers)


def cut_off(request: web.Request) -> web.Response:
    """Ends the client's connection with a TCP reset."""
    if request.transport is not None:
        linger = struct.pack("ii", 1, 0)
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.transport.abort()
    return web.Response(status=500)
