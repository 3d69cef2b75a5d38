"""SGLang's processes in Ray actors: Ray places each server with its GPUs, and a process ends with its actor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from megatron_daro.config.sections import SHARED_FRACTION
from megatron_daro.engine.sglang.servers import LaunchOptions, ServerProcess
from megatron_daro.errors import EngineError
from megatron_daro.runtime.ray_calls import actor_class, remote_class, translated

_CALL_S = 30.0
_ACTOR = "the Ray actor of a server"
_Result = TypeVar("_Result")


@remote_class(max_restarts=0, max_task_retries=0)
class ServerWorker:
    """One SGLang server process, or one of several of a server that is spread over nodes, on the node and with the GPUs
    that Ray gave this actor; it ends with the actor."""

    def __init__(self, options: LaunchOptions) -> None:
        self._server = ServerProcess(options, ray.util.get_node_ip_address())

    def launch(self, meeting: str = "") -> tuple[str, str]:
        """Start the process; return its URL, and the address at which the other parts of its server meet it. meeting:
        this address of the first part."""
        return self._server.launch(meeting), self._server.meeting

    def death(self) -> str:
        """Return why the process is gone; empty while it lives."""
        return self._server.death()

    def stop(self) -> None:
        """End the process."""
        self._server.stop()


class RayServer:
    """The processes of one server, each in a Ray actor: one, or one for each part of a server that is spread over
    nodes. Each start makes new actors. If a node dies, Ray moves its bundle to another one. If one part ends, the
    server counts as dead: the other parts would wait for it for ever."""

    restartable = True

    def __init__(
        self,
        parts: Sequence[LaunchOptions],
        place: Callable[[int], dict[str, Any]],
        gpus: Callable[[], str | None],
        launch_s: float,
    ) -> None:
        """Start nothing. Args: parts: options of each process. place: part -> options of its actor. gpus: returns the
        GPUs that the server shares with ranks. Both are called at each start. launch_s: how long an actor may take to
        start its process."""
        self._parts, self._place, self._gpus, self._launch_s = parts, place, gpus, launch_s
        self._workers: list[ActorHandle] = []

    async def launch(self) -> str:
        """Start actors and processes. Raises EngineError."""
        await self.stop()
        self._workers = [
            actor_class(ServerWorker).options(**self._place(part.part)).remote(_sharing(part, self._gpus()))
            for part in self._parts
        ]
        first, *others = self._workers
        launched: tuple[str, str] = await self._call(first.launch.remote(), self._launch_s)
        url, meeting = launched
        await asyncio.gather(*(self._call(worker.launch.remote(meeting), self._launch_s) for worker in others))
        return url

    async def death(self) -> str:
        """Return why a process or its actor is gone; empty while all live."""
        if not self._workers:
            return "it was not started"
        reasons = await asyncio.gather(*(self._death(worker) for worker in self._workers))
        return next(filter(None, reasons), "")

    async def stop(self) -> None:
        """End actors and processes. A process ends with its actor, even if the actor does not answer."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(self._stop(worker) for worker in workers))

    async def _death(self, worker: ActorHandle) -> str:
        """Return why one process is gone. Silence is not a death: `Supervision` checks whether tokens come, and Ray
        reports in the end what is gone."""
        try:
            async with asyncio.timeout(_CALL_S):
                return await worker.death.remote()
        except (TimeoutError, ActorUnavailableError):
            return ""
        except RayError as error:
            return str(translated(_ACTOR, error))

    async def _stop(self, worker: ActorHandle) -> None:
        try:
            with contextlib.suppress(EngineError):
                await self._call(worker.stop.remote(), _CALL_S)
        finally:
            ray.kill(worker, no_restart=True)

    async def _call(self, reference: Awaitable[_Result], timeout_s: float) -> _Result:
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise EngineError(f"{_ACTOR} did not answer within {timeout_s:g} s") from None
        except RayError as error:
            raise EngineError(str(translated(_ACTOR, error))) from None


def _sharing(options: LaunchOptions, gpus: str | None) -> LaunchOptions:
    """Return the options of a server that shares these GPUs with ranks, in turns; unchanged if it shares none.

    While an update is checked, the ranks' weights are on the GPUs beside a server's weights and cache, so less is left
    for the cache than on GPUs of its own. CUDA graphs of the decode phase release their memory too; those of the
    prefill phase cannot, so there are none (SGLang 0.5.23, runner_backend/breakable_cuda_graph_backend.py).
    """
    if gpus is None or options.arguments.get("device") == "cpu":
        return options
    arguments = {
        "enable_memory_saver": True,
        "mem_fraction_static": SHARED_FRACTION,
        "cuda_graph_backend_prefill": "disabled",
        **options.arguments,
    }
    env = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true", **options.env}
    return replace(options, gpus=gpus, arguments=arguments, env=env)
