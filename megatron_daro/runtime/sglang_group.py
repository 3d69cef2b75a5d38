"""SGLang servers in Ray actors, behind the Engine Protocol, and the workers that ask them.

Ray places each server with its GPUs. Before any starts, interpreters, argument names and models that cannot
work are rejected with the field that is wrong. Answer workers send requests to servers, parse, check and decode close
to them; the driver maps their arrays from Ray's object store without a copy. A worker that dies loses no group: its
requests fail as LostWorkerError and the engine makes them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megatron_daro.config.base import filled
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.sections import SHARED_FRACTION, Config
from megatron_daro.engine.sglang import supervision
from megatron_daro.engine.sglang.command import check_environments, interpreter
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.generation import EndedAnswer, LostWorkerError, Question, probe_text
from megatron_daro.engine.sglang.servers import ExternalServer, LaunchOptions, ServerHandle
from megatron_daro.engine.sglang.supervision import Expected
from megatron_daro.errors import EngineError
from megatron_daro.observe import logs
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.runtime.cluster import Placement
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.node_workers import AnswerWorker, NodeWorkers, ServerWorker, alive_nodes
from megatron_daro.runtime.supervisor import WorkerDiedError, actor_class, translated
from megatron_daro.types import Rollout

# A worker answers by the deadline of the request itself; one that does not within this more is hung.
_GRACE_S = 60.0


class AnswerWorkers:
    """`engine.sglang.answers.Answers`, by actors."""

    def __init__(self, run: RunContext) -> None:
        """Start nothing. `engine.sglang.answer_workers` are dealt out to the nodes in turn; unset: one on each."""
        self._count = run.config.engine.sglang.answer_workers
        model = run.config.model
        # Where the experts that servers chose are written to.
        experts = ExpertsFolder(run.run_dir) if run.config.actor.routing_replay else None

        def make(options: dict[str, Any], number: int) -> ActorHandle:
            worker = actor_class(AnswerWorker).options(**options)
            return worker.remote(number, model.path.absolute(), model.trust_remote_code, run.log_dir, experts)

        self.workers = NodeWorkers("answer worker", make, run)
        self._started = False
        self._take_ended: Callable[[Sequence[EndedAnswer]], None] = lambda ended: None

    @property
    def restarts(self) -> int:
        """Workers that were started again."""
        return self.workers.restarts

    async def start(self) -> None:
        """Start the processes and load the tokenizer in each; again is nothing. Raises DaroError."""
        if self._started:
            return
        self._started = True
        nodes = alive_nodes()
        await self.workers.start([nodes[i % len(nodes)] for i in range(self._count or len(nodes))])
        self.workers.listen("ended", lambda ended: self._take_ended(ended))

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Has `take` called with answers that have ended, those of a few moments together."""
        self._take_ended = take

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises as `Answers.ask` says; WorkerError when no worker is left."""
        try:
            return await self.workers.call("ask", question, timeout_s=question.timeout_s + _GRACE_S)
        except WorkerDiedError as error:
            raise LostWorkerError(str(error)) from None

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self.workers.close()


_LAUNCH_S = 300.0
_CALL_S = 30.0


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Text:
    """How the trainer's tokenizer reads text, the number of its tokens, and whether answers end at texts."""

    encode: Callable[[str], list[int]]
    vocabulary: int
    stops: bool = False


class RayServer:
    """The process of a server in a Ray actor, or its processes, one in each part of a server that is spread over nodes;
    new actors for each start. Its place moves to another node when its own dies (Ray finds a new one for the bundle).
    The end of one part is the end of the server: the others would wait for it for ever."""

    restartable = True

    def __init__(
        self,
        parts: Sequence[LaunchOptions],
        place: Callable[[int], dict[str, Any]],
        gpus: Callable[[], str | None],
    ) -> None:
        """Args: parts: options of each process. place: part -> options of its actor, gpus: that it shares; asked at
        each start."""
        self._parts, self._place, self._gpus = parts, place, gpus
        self._workers: list[ActorHandle] = []

    async def launch(self) -> str:
        """Start actors and processes. Raises EngineError."""
        await self.stop()
        self._workers = [
            actor_class(ServerWorker).options(**self._place(part.part)).remote(_sharing(part, self._gpus()))
            for part in self._parts
        ]
        first, *others = self._workers
        launched: tuple[str, str] = await self._call(first.launch.remote(), _LAUNCH_S)
        url, meeting = launched
        await asyncio.gather(*(self._call(worker.launch.remote(meeting), _LAUNCH_S) for worker in others))
        return url

    async def death(self) -> str:
        """Why a process or its actor is gone."""
        if not self._workers:
            return "it was not started"
        reasons = await asyncio.gather(*(self._death(worker) for worker in self._workers))
        return next(filter(None, reasons), "")

    async def stop(self) -> None:
        """End actors and processes. A process ends with its actor, also where the actor does not answer."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(self._stop(worker) for worker in workers))

    async def _death(self, worker: ActorHandle) -> str:
        try:
            return await self._call(worker.death.remote(), _CALL_S)
        except EngineError as error:
            return str(error)

    async def _stop(self, worker: ActorHandle) -> None:
        with contextlib.suppress(EngineError):
            await self._call(worker.stop.remote(), _CALL_S)
        ray.kill(worker, no_restart=True)

    async def _call(self, reference: Awaitable[_Answer], timeout_s: float) -> _Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise EngineError(f"the Ray actor of a server did not answer within {timeout_s:g} s") from None
        except RayError as error:
            raise EngineError(str(translated("the Ray actor of a server", error))) from None


class SGLangGroup(SGLangEngine):
    """The servers of a run."""

    def __init__(self, run: RunContext, text: Text, placement: Placement) -> None:
        """Start nothing, but look at the interpreters.

        Raises:
            ConfigError: an interpreter without what it needs, or arguments that its SGLang does not know.
        """
        config, options = run.config, run.config.engine.sglang
        check_environments(options)
        rollout, model_path = config.rollout, config.model.path.absolute()
        model = json.loads((model_path / "config.json").read_text())
        expected = Expected(
            model_path,
            model["model_type"],
            config.data.max_prompt_tokens,
            config.data.max_prompt_tokens + rollout.max_response_tokens,
            text.encode,
            model.get("vocab_size"),
            placement.shares_gpus,
            text.stops,
        )
        super().__init__(
            _handles(run, placement, reads_text=text.stops),
            options,
            expected,
            answers=AnswerWorkers(run),
            warn=run.progress.warn,
            loads=partial(run.progress.stage, "engine"),
            run_dir=run.run_dir,
            temperature=rollout.temperature,
            probe_tokens=probe_text(
                min(text.vocabulary, model.get("vocab_size") or text.vocabulary),
                longest=config.data.max_prompt_tokens,
            ),
        )


def _handles(run: RunContext, placement: Placement, *, reads_text: bool) -> Mapping[str, ServerHandle]:
    config, options = run.config, run.config.engine.sglang
    if options.urls:
        return {f"server {i} ({url})": ExternalServer(url) for i, url in enumerate(options.urls)}
    # The engine speaks in token ids: without a tokenizer a server starts sooner and does less per answer.
    arguments = {"dtype": config.actor.torch_dtype, "skip_tokenizer_init": not reads_text, **options.named_arguments}
    if config.actor.routing_replay:
        arguments = {"enable_return_routed_experts": True, **arguments}
    if options.fp8_blocks:
        arguments |= supervision.fp8_arguments()
    if config.model.trust_remote_code:
        arguments = {"trust_remote_code": True, **arguments}
    first = LaunchOptions(
        python=interpreter(options),
        model_path=config.model.path.absolute(),
        tensor_parallel=options.tensor_parallel,
        seed=filled(config.engine.seed),
        arguments=arguments,
        env=options.env,
        log_path=run.log_dir,
        parts=options.nodes,
        maps_memory=options.sync == "tensor",
        takes_shards=options.sync == "shards",
    )
    return {
        f"server {i}": RayServer(_parts(first, i), partial(placement.server, i), partial(placement.gpus_of_server, i))
        for i in range(config.engine.replicas)
    }


def _parts(common: LaunchOptions, number: int) -> list[LaunchOptions]:
    """Return the options of each process of a server. common: those of all servers; log_path: the folder of logs."""
    names = [f"server {number}", *(f"server {number} part {part}" for part in range(1, common.parts))]
    seed = common.seed + number  # equal seeds would give equal answers to equal prompts
    return [
        replace(common, seed=seed, part=part, log_path=common.log_path / logs.file_name(name))
        for part, name in enumerate(names)
    ]


def _sharing(options: LaunchOptions, gpus: str | None) -> LaunchOptions:
    """Return the options of a server that shares these GPUs with ranks, in turns; as they are where it shares none.

    The weights of the ranks are on the GPUs beside a server's weights and cache while an update is checked, so less is
    left for the cache than elsewhere.
    """
    if gpus is None or options.arguments.get("device") == "cpu":
        return options
    arguments = {"enable_memory_saver": True, "mem_fraction_static": SHARED_FRACTION, **options.arguments}
    return replace(options, gpus=gpus, arguments=arguments)


def routed_experts(config: Config) -> tuple[int, int] | None:
    """Return (layers, experts of a token) where the engine shall say which it chose."""
    shape = read_model_shape(config.model.path) if config.actor.routing_replay else None
    return (shape.layers, shape.experts.chosen) if shape and shape.experts else None
