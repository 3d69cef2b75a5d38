"""Server processes: started on this machine, or running already, behind one small Protocol.

The engine launches servers, watches for deaths and stops them through it; runtime/ adds servers that Ray placed on
some node. A process started here runs under a watchdog (watchdog.py), so that nothing outlives its owner, even one
that is killed. Every call ends within a bounded time. An object starts one process once; a restart is a new object.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_daro.config.hardware import gpus_with_own_first
from megatron_daro.engine.sglang import watchdog
from megatron_daro.engine.sglang.command import CPU_SERVER, ServerPart, server_command, server_environment
from megatron_daro.errors import EngineError
from megatron_daro.observe.logs import safe_text
from megatron_daro.ports import Reservation, reserve_port
from megatron_daro.sync import in_server

START_TIMEOUT_S = 60.0
"""For the watchdog to start the command; it takes 0.1 s on an idle machine."""
OWNER_GONE_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL when the owner is gone."""
_WATCHDOG_MARGIN_S = watchdog.KILL_LIMIT_S + 5.0
_WATCHDOG_KILL_AFTER_S = 2.0
_TAIL_BYTES = 65536


class ManagedProcess:
    """A command that ends with its owner.

    The owner is the operating-system process that called start(); the command also ends when this object is dropped.

    Args:
        command: program and arguments.
        host: where the command will listen; see server_environment.
        env: environment variables of the user; they win.
        log_path: gets standard output and standard error, after what is in it.
        python: the interpreter of the server, which also runs the watchdog.
    """

    def __init__(
        self, command: Sequence[str], *, host: str, env: Mapping[str, str], log_path: Path, python: Path
    ) -> None:
        self._command = list(command)
        self._environment = server_environment(env, host=host, python=python)
        self._log_path = log_path
        self._python = python
        self._log_start = 0
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._input: IO[bytes] | None = None
        self._pid: int | None = None
        self._ending = threading.Lock()
        self._swept = False

    @property
    def pid(self) -> int | None:
        """Process id of the command, which is also that of its session; None before start()."""
        return self._pid

    @property
    def watchdog_pid(self) -> int | None:
        """Process id of the watchdog; None before start()."""
        return None if self._watchdog is None else self._watchdog.pid

    def start(self) -> None:
        """Start the command; returns when it exists, not when it serves.

        Raises:
            EngineError: started before, or the watchdog could not be started. A command that cannot be executed is no
                error here: poll() then gives 127 and the log has the reason.
        """
        if self._watchdog is not None:
            raise EngineError(f"process: got start() for {self._command[0]!r} twice; allowed: once per ManagedProcess")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        try:
            with self._log_path.open("ab") as log:
                self._log_start = log.tell()
                self._watchdog = self._start_watchdog(log.fileno(), write_end)
            # Held here and not by Popen, which outlives this object as long as its process does.
            self._input, self._watchdog.stdin = self._watchdog.stdin, None
        except OSError as error:
            os.close(read_end)
            raise EngineError(
                f"process: could not run {self._python} ({error}); allowed: an executable Python and a log that can be "
                f"written at {self._log_path}"
            ) from error
        finally:
            os.close(write_end)
        self._pid = self._read_pid(read_end)

    def poll(self) -> int | None:
        """Exit status of the command, 128 + n after signal n; None while it, or anything it started, lives."""
        if self._watchdog is None:
            return None
        code = self._watchdog.poll()
        if code is None or code >= 0:
            return code
        self._sweep_session()  # The watchdog itself was killed; the command died with it, its children may not have.
        return 128 - code

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that this process wrote, of at most the last 64 KiB; empty when there are none."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:]) if lines > 0 else ""

    def stop(self, grace_s: float = 10.0) -> int | None:
        """SIGTERM, after the grace SIGKILL, to the command and all it started. Safe to call twice.

        Args:
            grace_s: seconds; the call takes at most 17 s more.

        Returns: what poll() returns; None only if never started or SIGKILL had no effect.
        """
        if self._watchdog is None or self.poll() is not None:
            self._close_input(None)
            return self.poll()
        self._close_input(grace_s)
        try:
            self._watchdog.wait(grace_s + _WATCHDOG_MARGIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.poll()

    def kill(self) -> None:
        """SIGKILL to the command and all it started, then to the watchdog if it does not end by itself. At most 8 s."""
        if self._watchdog is None:
            return
        begin = time.monotonic()
        while (
            self._watchdog.poll() is None and time.monotonic() < begin + _WATCHDOG_KILL_AFTER_S + watchdog.KILL_LIMIT_S
        ):
            watchdog.signal_all(watchdog.descendants(self._watchdog.pid), signal.SIGKILL)
            if time.monotonic() > begin + _WATCHDOG_KILL_AFTER_S:
                self._watchdog.kill()
            time.sleep(0.02)
        self._close_input(None)
        self.poll()

    def _start_watchdog(self, log: int, report: int) -> subprocess.Popen[bytes]:
        options = ["--parent-pid", str(os.getpid()), "--grace-s", str(OWNER_GONE_GRACE_S), "--report-fd", str(report)]
        # -I and -S: nothing of a site directory or the environment can change or slow the watchdog.
        return subprocess.Popen(
            [str(self._python), "-I", "-S", watchdog.__file__, *options, "--", *self._command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            pass_fds=(report,),
            start_new_session=True,
        )

    def _read_pid(self, read_end: int) -> int:
        with os.fdopen(read_end, "rb", buffering=0) as report:
            poller = select.poll()  # select.select fails above 1023 open descriptors
            poller.register(report, select.POLLIN | select.POLLHUP)
            pid_text = report.read(64) if poller.poll(1000 * START_TIMEOUT_S) else b""
        if pid_text:
            return int(pid_text)
        self.kill()
        raise EngineError(
            f"process: the watchdog did not start {self._command[0]!r} within {START_TIMEOUT_S:g} s; it wrote: "
            f"{self.log_tail() or 'nothing'}. Allowed: Python 3.9 or newer on Linux, got {self._python}"
        )

    def _close_input(self, grace_s: float | None) -> None:
        """End the watchdog's input, which is the order to end the command."""
        with self._ending:
            stream, self._input = self._input, None
            if stream is None:
                return
            try:
                if grace_s is not None:
                    stream.write(f"{grace_s}\n".encode())
                stream.close()
            except BrokenPipeError:
                return  # The watchdog has ended; close() released the descriptor all the same.

    def _sweep_session(self) -> None:
        """Once: kill the command's process group, which outlived the watchdog."""
        if self._swept or self._pid is None:
            return
        self._swept = True
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return


_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How one server process is started; plain values, so that they travel to other nodes.

    part, parts: which part of a server that is spread over nodes, and of how many; the first one answers requests.
    maps_memory: it takes weights as handles of memory of the node's other GPUs, and must see these. takes_shards: it
    takes them from the trainer's ranks, through a loader of ours. gpus: those that it
    shares, as CUDA_VISIBLE_DEVICES has them; None: those that it was given.
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
    takes_shards: bool = False
    gpus: str | None = None


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
    """One server process of this machine, or one of the processes of a server that is spread over nodes, with its
    reserved ports. Synchronous; see LocalServer and runtime/."""

    def __init__(self, options: LaunchOptions, host: str) -> None:
        self._options, self._host = options, host
        self._process: ManagedProcess | None = None
        self._ports: list[Reservation] = []

    @property
    def meeting(self) -> str:
        """host:port at which all parts meet that are started with it; of the first part, after its launch."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._ports[1].port}"

    def launch(self, meeting: str = "") -> str:
        """Start the process, under new ports. Returns its URL.

        Args:
            meeting: of the first part, for the others.

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
        arguments, paths = dict(options.arguments), options.env.get("PYTHONPATH", "")
        if options.takes_shards:
            arguments["custom_weight_loader"] = [*_listed(arguments.get("custom_weight_loader")), in_server.LOADER]
            paths = os.pathsep.join(filter(None, [str(in_server.FOLDER), paths]))
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
        env = {**(CPU_SERVER if arguments.get("device") == "cpu" else {}), **options.env}
        env |= {"PYTHONPATH": paths} if paths else {}
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if options.gpus is None else options.gpus
        if options.maps_memory:
            gpus = gpus_with_own_first(gpus)
        if options.maps_memory or options.gpus is not None:
            env = {"CUDA_VISIBLE_DEVICES": gpus or "", **env}
        self._process = ManagedProcess(
            command, host=self._host, env=env, log_path=options.log_path, python=options.python
        )
        self._process.start()
        return f"http://{self._host}:{port}"

    def death(self) -> str:
        """Why the process is gone, with the end of its log; empty while it lives."""
        process = self._process
        if process is None:
            return "it was not started"
        code = process.poll()
        if code is None:
            return ""
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        tail = " | ".join(line.strip() for line in process.log_tail(_TAIL_LINES).splitlines() if line.strip())
        said = safe_text(tail[-600:], one_line=True)
        return f"its process ended with {how}; log {self._options.log_path}: {said}"

    def stop(self) -> None:
        """End the process at once: it holds nothing that must be saved."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        for reservation in self._ports:
            reservation.close()
        self._ports = []


def _listed(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


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
