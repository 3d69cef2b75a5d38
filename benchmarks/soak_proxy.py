"""What stands between a real SGLang server and everything that talks to it: a proxy, and a handle on its processes.

Place in the data flow: sglang_soak.py puts a `ProxiedServer` around the handle of each server, so that every request of
engine and trainer passes a small proxy; soak_faults.py says what the proxy breaks and whom the handle sends signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web
from loopback_server import cut_off, listen, pass_on, passing_session

from megatron_daro.engine.sglang import watchdog
from megatron_daro.engine.sglang.servers import ServerHandle

Rule = Callable[[str], str]
"""Path of a request -> what happens to it: "" (passes), "500", "reset", "reset_answer" or "kill"."""


class Proxy:
    """A server's front door on loopback: passes everything on, but for what its rule says."""

    def __init__(self) -> None:
        self.target = ""
        self.rule: Rule | None = None
        self.kill: Callable[[], None] = lambda: None
        self.active: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        """What the proxy did: "500", "reset", "reset_answer", "kill", and "cut": answers that the server broke off."""
        self.seen: list[tuple[float, str]] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self, target: str) -> str:
        """Listens for this server. Returns the proxy's URL."""
        await self.close()
        self.target = target
        self._session = passing_session()
        self._runner, url = await listen(self._handle, largest_body=2**30)
        return url

    async def close(self) -> None:
        """Stops listening. May be called twice."""
        runner, self._runner = self._runner, None
        session, self._session = self._session, None
        if runner:
            await runner.cleanup()
        if session:
            await session.close()

    async def _handle(self, request: web.Request) -> web.Response:
        assert self._session is not None
        body = await request.read()
        self.seen.append((time.monotonic(), request.path))
        action = self.rule(request.path) if self.rule else ""
        if action:
            self.done[action] += 1
        if action == "500":
            return web.json_response({"error": {"message": "a fault of the soak test"}}, status=500)
        if action == "reset":
            return cut_off(request)
        if action == "kill" and request.path != "/generate":
            self.kill()
        if action == "kill" and request.path == "/generate":
            asyncio.get_running_loop().call_later(random.uniform(0, 0.005), self.kill)
        self.active[request.path] += 1
        try:
            answer = await pass_on(self._session, self.target, request, body)
        except aiohttp.ClientError:
            self.done["cut"] += 1
            return cut_off(request)
        finally:
            self.active[request.path] -= 1
        return cut_off(request) if action == "reset_answer" else answer


class ProxiedServer:
    """A ServerHandle behind a proxy, whose processes can be sent signals."""

    restartable = True

    def __init__(self, inner: ServerHandle) -> None:
        self._inner = inner
        self.proxy = Proxy()

    async def launch(self) -> str:
        """Starts server and proxy; the proxy's URL."""
        self.proxy.rule = None
        return await self.proxy.start(await self._inner.launch())

    async def death(self) -> str:
        """As the server's own handle says."""
        return await self._inner.death()

    async def stop(self) -> None:
        """Ends both."""
        await self.proxy.close()
        await self._inner.stop()

    def signal(self, number: int, whom: str) -> int:
        """Sends a signal to "main", a "child" (the scheduler where it can be told), or "all". Returns how many."""
        main = _main_process(self.proxy.target.rsplit(":", 1)[1])
        if main is None:
            return 0
        children = watchdog.descendants(main)
        schedulers = [pid for pid in children if b"scheduler" in _command(pid)]
        pids = {"main": [main], "child": (schedulers or children)[:1], "all": [main, *children]}[whom]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)


def _main_process(port: str) -> int | None:
    """The server that was told to listen on this port (its watchdog has the same words, but below its own name)."""
    for directory in Path("/proc").glob("[0-9]*"):
        words = _command(int(directory.name)).split(b"\0")
        if b"--port" in words and port.encode() in words and not any(b"watchdog.py" in word for word in words):
            return int(directory.name)
    return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def set_sleep(proxy: Proxy, seconds: float) -> None:
    """Makes every forward pass of the server last so much longer; 0: no longer."""
    timeout = aiohttp.ClientTimeout(total=10)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{proxy.target}/slow_down", json={"forward_sleep_time": seconds}) as answer,
        ):
            await answer.read()
