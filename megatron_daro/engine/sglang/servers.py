"""Where SGLang servers come from: processes of this machine, servers that somebody else started, or servers that Ray
placed on some node (runtime/ray_servers.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_daro.config.hardware import gpus_with_own_first
from megatron_daro.engine.sglang.command import CPU_SERVER, ServerPart, server_command
from megatron_daro.engine.sglang.process import ManagedProcess
from megatron_daro.errors import EngineError
from megatron_daro.observe.logs import safe_text
from megatron_daro.ports import Reservation, in_address, reserve_port
from megatron_daro.sync import in_server

_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How one server process is started; plain values, so that they can be sent to other nodes.

    part, parts: which part this is of a server that is spread over nodes, and of how many; the first part answers
    requests. maps_memory: it gets weights as handles of memory on the node's other GPUs, and must see these. loader:
    our function that loads its weights, as `--custom-weight-loader` names it; empty: none. gpus: the GPUs that it
    shares with the trainer, as CUDA_VISIBLE_DEVICES lists them; None: it has GPUs of its own, given by Ray.
    """

    python: Path
    model_path: Path
    tensor_parallel: int
    seed: int
    arguments: Mapping[str, Any]
    env: Mapping[str, str]
    log_path: Path
    part: int = 0
    parts: int = 1
    maps_memory: bool = False
    loader: str = ""
    gpus: str | None = None


class ServerHandle(Protocol):
    """One server's process, wherever it is."""

    restartable: bool

    async def launch(self) -> str:
        """Start the process; return the URL at which it will answer, without waiting for that. Raises EngineError."""
        ...

    async def death(self) -> str:
        """Return why the process is gone; empty while it lives."""
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
        """Return its URL; there is nothing to start."""
        return self._url

    async def death(self) -> str:
        """Return an empty text: it cannot be seen from here."""
        return ""

    async def stop(self) -> None:
        """Do nothing: it is not ours to stop."""


class ServerProcess:
    """One server process of this machine, or this machine's process of a server that is spread over nodes, with its
    reserved ports. Synchronous; its `ServerHandle` is in runtime/ray_servers.py."""

    def __init__(self, options: LaunchOptions, host: str) -> None:
        self._options, self._host = options, host
        self._process: ManagedProcess | None = None
        self._ports: list[Reservation] = []

    @property
    def meeting(self) -> str:
        """host:port at which the parts of one server meet; read it from the first part, after its launch."""
        return f"{in_address(self._host)}:{self._ports[1].port}"

    def launch(self, meeting: str = "") -> str:
        """Start the process, under new ports. Returns its URL.

        Args:
            meeting: for all parts except the first, the first one's `meeting`.

        Raises:
            EngineError: it cannot be started, or the model is not there.
        """
        self.stop()
        if not (self._options.model_path / "config.json").is_file():  # it would say so after half a minute of imports
            raise EngineError(
                f"model.path: {self._options.model_path} has no config.json on the host of this server; allowed: a "
                "Hugging Face checkpoint at the same path on every host"
            )
        self._ports = [reserve_port(self._host), reserve_port(self._host)]
        port, nccl_port = (reservation.port for reservation in self._ports)
        options = self._options
        arguments = dict(options.arguments)
        if options.loader:
            arguments["custom_weight_loader"] = [*_listed(arguments.get("custom_weight_loader")), options.loader]
        command = server_command(
            options.python,
            model_path=options.model_path,
            host=self._host,
            port=port,
            nccl_port=nccl_port,
            tensor_parallel=options.tensor_parallel,
            seed=options.seed,
            arguments=arguments,
            part=ServerPart(options.part, options.parts, meeting or self.meeting) if options.parts > 1 else None,
        )
        self._process = ManagedProcess(
            command, host=self._host, env=_variables(options), log_path=options.log_path, python=options.python
        )
        self._process.start()
        return f"http://{in_address(self._host)}:{port}"

    def death(self) -> str:
        """Return why the process is gone, with the end of its log; empty while it lives."""
        process = self._process
        if process is None:
            return "it was not started"
        code = process.poll()
        if code is None:
            return ""
        how = f"signal {code - 128}" if 128 < code <= 128 + signal.SIGRTMAX else f"exit code {code}"
        tail = " | ".join(line.strip() for line in process.log_tail(_TAIL_LINES).splitlines() if line.strip())
        last_words = safe_text(tail[-600:], one_line=True)
        return f"its process ended with {how}; log {self._options.log_path}: {last_words}"

    def stop(self) -> None:
        """Kill the process at once, since it holds nothing that must be saved, and free its ports."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        for reservation in self._ports:
            reservation.close()
        self._ports = []


def _variables(options: LaunchOptions) -> dict[str, str]:
    """Return the environment variables of this server in addition to those of every server; the user's own win."""
    variables = {**(CPU_SERVER if options.arguments.get("device") == "cpu" else {}), **options.env}
    if options.loader:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(in_server.FOLDER), options.env.get("PYTHONPATH")]))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if options.gpus is None else options.gpus
    if options.maps_memory:
        gpus = gpus_with_own_first(gpus)
    if options.maps_memory or options.gpus is not None:
        variables = {"CUDA_VISIBLE_DEVICES": gpus or "", **variables}
    return variables


def _listed(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
