"""Starts Ray on a node, by Ray's own program, and again after mere bad luck: a port that was taken, a slow start."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_daro.errors import WorkerError
from megatron_daro.ports import reserve_port
from megatron_daro.workshop.slurm.attempt import Attempt
from megatron_daro.workshop.slurm.processes import Process

T = TypeVar("T")
RAY_START_S = 150.0
RAY_STARTS = 3
"""Starts of Ray on a node; each may take RAY_START_S."""
PORTS_TRIED = 5
_STARTED = b"Ray runtime started"
_PORT_TAKEN = "The specified port is"
"""Part of Ray's message where another program has the port of its control service."""
_SLOW = "timed out during startup"
"""Part of Ray's message where it gave up by itself, after a minute (ray/_private/node.py)."""
LARGE_JOB_NODES = 16
_LARGE_JOB = {
    "worker_register_timeout_seconds": 180,
    "gcs_rpc_server_connect_timeout_s": 120,
    "gcs_rpc_server_reconnect_timeout_s": 120,
    "gcs_server_request_timeout_seconds": 120,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 10000,
    "health_check_period_ms": 10000,
}
"""Ray's own settings (ray_config_def.h) for many nodes: hundreds of processes register at once with one control
service, which may answer late without being given up, and gets fewer reports that nobody reads meanwhile."""
PROCESSES_BESIDE_GPUS = 32
"""Ray's CPUs are places for processes here: two for each GPU and these, or the machine's cores where they are more.
Without GPUs they are the cores that the cluster file asks for, if it does, so that ranks and servers spread over the
nodes."""


class SlowStartError(WorkerError):
    """A start took longer than it may."""


class PortTakenError(WorkerError):
    """Another program took the port in the moment between its choice and its use."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """Ray as an attempt wants it on this node. address: of the node."""

    attempt: Attempt
    address: str

    @property
    def environment(self) -> dict[str, str]:
        """What every process of Ray gets: without the token, nobody on the network can use the cluster."""
        tuned = _LARGE_JOB if self.attempt.nodes >= LARGE_JOB_NODES else {}
        return {
            **{f"RAY_{name}": os.environ.get(f"RAY_{name}", str(value)) for name, value in tuned.items()},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.attempt.directory / "ray_token"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    async def start_head(self) -> tuple[Process, int]:
        """Start Ray with its control service, and wait until it runs.

        Returns:
            Ray, and the port of its control service.

        Raises:
            WorkerError: it ended; PortTakenError, SlowStartError: every allowed start failed for this reason.
        """

        async def start() -> tuple[Process, int]:
            with reserve_port(self.address) as reserved:
                session = f"--temp-dir={self.attempt.temporary}"
                role = ["--head", f"--port={reserved.port}", session, "--include-dashboard=false"]
                return await self._start(role), reserved.port

        return await _again(start)

    async def join(self, head: str) -> Process:
        """Start Ray where another node has its control service (host:port), and wait until it runs.

        Raises:
            WorkerError: it ended; SlowStartError: no start was in time.
        """
        return await _again(lambda: self._start([f"--address={head}"]))

    async def _start(self, role: Sequence[str]) -> Process:
        # Not the program `ray`: a virtual environment on top of another one's packages has none.
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block", "--disable-usage-stats"]
        command += [
            f"--node-ip-address={self.address}",
            f"--num-cpus={self._places}",
            f"--num-gpus={self.attempt.gpus}",
        ]
        ray = await Process.start(command, self.environment)
        started, ended = asyncio.create_task(ray.says(_STARTED)), asyncio.create_task(ray.wait())
        done, _ = await asyncio.wait({started, ended}, timeout=RAY_START_S, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        ended.cancel()
        if started in done:
            return ray
        if ended not in done:
            await ray.kill()
            raise SlowStartError(f"Ray did not start within {RAY_START_S:g} s on {self.address}: {ray.last_line}")
        kinds = {_PORT_TAKEN: PortTakenError, _SLOW: SlowStartError}
        error = next((kind for words, kind in kinds.items() if any(words in line for line in ray.lines)), WorkerError)
        raise error(f"Ray ended with code {ended.result()} on {self.address}: {ray.last_line}")

    @property
    def _places(self) -> int:
        if self.attempt.cores and not self.attempt.gpus:
            return self.attempt.cores
        return max(os.cpu_count() or 1, 2 * self.attempt.gpus + PROCESSES_BESIDE_GPUS)


async def _again(start: Callable[[], Awaitable[T]]) -> T:
    """Start until it works. Raises the error of the last allowed start."""
    starts_left: dict[type[WorkerError], int] = {PortTakenError: PORTS_TRIED - 1, SlowStartError: RAY_STARTS - 1}
    while True:
        try:
            return await start()
        except (PortTakenError, SlowStartError) as error:
            if not starts_left[type(error)]:
                raise
            starts_left[type(error)] -= 1
            print(f"{error}; trying again", flush=True)
