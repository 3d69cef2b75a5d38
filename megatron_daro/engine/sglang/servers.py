"""Where servers come from: processes of this machine, or servers that run already, behind one small Protocol.

Place in the data flow: the engine launches, asks for deaths and stops through it; runtime/ has a third kind, processes
that Ray placed on some node. What a server is, is looked at by supervision.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_daro.engine.sglang.arguments import router_command, server_command
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.engine.sglang.environment_variables import CPU_SERVER
from megatron_daro.engine.sglang.ports import Reservation, reserve_port
from megatron_daro.engine.sglang.process import ManagedProcess
from megatron_daro.errors import EngineError

_TAIL_LINES = 12
_ROUTER_START_S = 60.0
_CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How one server process is started; plain values, so that they travel to other nodes."""

    python: Path
    model_path: Path
    tensor_parallel: int
    seed: int
    arguments: Mapping[str, Any]
    env: Mapping[str, str]
    log_path: Path


class ServerHandle(Protocol):
    """One server's process, wherever it is."""

    restartable: bool

    async def launch(self) -> str:
        """Start the process and return the URL at which it will answer; not yet that it does. EngineError."""
        ...

    async def death(self) -> str:
        """Why the process is gone; empty while it lives."""
        ...

    async def stop(self) -> None:
        """End the process. May be called twice."""
        ...


class ExternalServer:
    """A server that somebody else started."""

    restartable = False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def launch(self) -> str:
        """Its URL."""
        return self._url

    async def death(self) -> str:
        """Nobody knows."""
        return ""

    async def stop(self) -> None:
        """Do nothing: it is not ours to stop."""


class ServerProcess:
    """One server process of this machine, with its reserved ports. Synchronous; see LocalServer and runtime/."""

    def __init__(self, options: LaunchOptions, host: str) -> None:
        self._options, self._host = options, host
        self._process: ManagedProcess | None = None
        self._ports: list[Reservation] = []

    def launch(self) -> str:
        """Start the process, under new ports. Returns its URL. Raises EngineError, also where the model is not."""
        self.stop()
        if not (self._options.model_path / "config.json").is_file():  # it would say so after half a minute of imports
            raise EngineError(
                f"model.path: {self._options.model_path} has no config.json on the host of this server; allowed: a "
                "Hugging Face checkpoint at the same path on every host"
            )
        self._ports = [reserve_port(self._host), reserve_port(self._host)]
        port, nccl_port = (reservation.port for reservation in self._ports)
        options = self._options
        command = server_command(
            options.python,
            model_path=options.model_path,
            host=self._host,
            port=port,
            nccl_port=nccl_port,
            tensor_parallel=options.tensor_parallel,
            seed=options.seed,
            arguments=options.arguments,
        )
        env = {**(CPU_SERVER if options.arguments.get("device") == "cpu" else {}), **options.env}
        self._process = _process(command, self._host, env, options.log_path, options.python)
        self._process.start()
        return f"http://{self._host}:{port}"

    def death(self) -> str:
        """Why the process is gone, with the end of its log; empty while it lives."""
        return _death(self._process, self._options.log_path)

    def stop(self) -> None:
        """End the process at once: it holds nothing that must be saved."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        for reservation in self._ports:
            reservation.close()
        self._ports = []


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


@dataclass
class Router:
    """sglang-router in front of the servers: started here (python given), or running already (url given)."""

    python: Path | None
    url: str | None
    log_path: Path
    host: str = "127.0.0.1"
    client: SGLangClient | None = None
    _process: ManagedProcess | None = None
    _ports: list[Reservation] = field(default_factory=list)

    async def start(self) -> None:
        """Start it, or check that it answers. Raises EngineError."""
        if self.python is not None:
            self.url = await asyncio.to_thread(self._launch, self.python)
        assert self.url is not None
        self.client = SGLangClient(self.url)
        try:
            async with asyncio.timeout(_ROUTER_START_S):
                while not await self._answers():
                    reason = _death(self._process, self.log_path) if self._process else ""
                    if reason:
                        raise EngineError(f"the router ended: {reason}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            field_name = "engine.sglang.router_url" if self._process is None else "engine.sglang.router_python"
            raise EngineError(f"{field_name}: no router answered at {self.url} within {_ROUTER_START_S:g} s") from None

    async def add(self, url: str) -> None:
        """Tells it of a server that serves, and waits a while until it sends requests there. Raises EngineError."""
        if self.client is None or url in await self._workers():
            return
        await self.client.post("/workers", {"url": url}, timeout_s=_CALL_S)
        with contextlib.suppress(TimeoutError):  # slow to look at it: requests are made again until it has
            async with asyncio.timeout(_CALL_S):
                while url not in await self._workers():
                    await asyncio.sleep(0.1)

    async def remove(self, url: str) -> None:
        """Tells it to forget a server; one that it does not know is fine, and so is a router that is gone."""
        try:
            found = (await self._workers()).get(url)
            if self.client and found:
                await self.client.delete(f"/workers/{found}", timeout_s=_CALL_S)
        except EngineError:
            return

    async def restart_if_dead(self) -> str:
        """Start a router of ours again if it died. Returns why it had; empty if it lives."""
        reason = _death(self._process, self.log_path) if self._process else ""
        if reason:
            await self.close()
            await self.start()
        return reason

    async def close(self) -> None:
        """End it, if it is ours. May be called twice."""
        client, self.client = self.client, None
        process, self._process = self._process, None
        if client is not None:
            await client.close()
        if process is not None:
            await asyncio.to_thread(process.kill)
        for reservation in self._ports:
            reservation.close()
        self._ports = []

    async def _answers(self) -> bool:
        try:
            await self._workers()
        except EngineError:
            return False
        return True

    async def _workers(self) -> dict[str, str]:
        """URL -> id of the servers it knows."""
        assert self.client is not None
        listed = await self.client.get("/workers", timeout_s=_CALL_S)
        if not isinstance(listed, dict) or "workers" not in listed:
            raise EngineError(f"{self.url}: /workers lists no workers; this is no sglang-router")
        return {str(worker["url"]).rstrip("/"): str(worker["id"]) for worker in listed["workers"]}

    def _launch(self, python: Path) -> str:
        self._ports = [reserve_port(self.host), reserve_port(self.host)]
        port, prometheus_port = (reservation.port for reservation in self._ports)
        command = router_command(python, host=self.host, port=port, worker_urls=(), prometheus_port=prometheus_port)
        self._process = _process(command, self.host, {}, self.log_path, python)
        self._process.start()
        return f"http://{self.host}:{port}"


def _process(command: list[str], host: str, env: Mapping[str, str], log_path: Path, python: Path) -> ManagedProcess:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return ManagedProcess(command, host=host, env=env, log_path=log_path, python=python)


def _death(process: ManagedProcess | None, log_path: Path) -> str:
    if process is None:
        return "it was not started"
    code = process.poll()
    if code is None:
        return ""
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    tail = " | ".join(line.strip() for line in process.log_tail(_TAIL_LINES).splitlines() if line.strip())
    return f"its process ended with {how}; log {log_path}: {tail[-600:]}"
