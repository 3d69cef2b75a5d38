"""The Ray actors: one rank of the Megatron policy, one replica of the embedded engine, one SGLang server, one process
that asks servers, one pool of verifiers. Thin shells.

Place in the data flow: policy_group.py, engine_group.py, sglang_group.py and node_workers.py call them; all work is
done by actor/, engine/, sync/ and reward/. The first two have a `sentinel` call that never returns: its failure tells
the supervisor that the process died. A run outlives the others: whoever calls them sees that they are gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.sections import RewardSection
from megatron_daro.engine.sglang.answers import Question
from megatron_daro.engine.sglang.servers import LaunchOptions, ServerProcess
from megatron_daro.sync.source import BroadcastPlan, SendReport
from megatron_daro.types import GroupRequest, Rollout, StepResult, TrainBatch, Verdict, WeightBucket

# Ray's stubs know neither concurrency groups nor what a decorated class becomes.
_actor: Any = ray.remote

# Methods of the "work" group run one after the other on one thread; "watch" stays free for the sentinel.
_GROUPS = {"work": 1, "watch": 1}
# Calls that an asynchronous actor has under way at most: all groups of a large batch wait in it for their servers.
_MANY_CALLS = 100_000


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part. exports: it takes part in exports; speaks: it hands on its stage's.

    answers: what its tensor and context group computed for a shard comes from this rank, one per data-parallel rank.
    """

    data_parallel: int
    stage: int
    exports: bool
    speaks: bool
    answers: bool


@_actor(concurrency_groups=_GROUPS, max_restarts=0, max_task_retries=0)
class TrainWorker:
    """One rank of the policy. `setup` must be called on all ranks at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._policy: Any = None
        self._sender: Any = None

    @ray.method(concurrency_group="watch")
    def sentinel(self) -> None:
        """Blocks for as long as the process lives."""
        threading.Event().wait()

    @ray.method(concurrency_group="work")
    def rendezvous(self) -> str:
        """Where the ranks can meet: a file if this node is on loopback, else this node and a free port.

        torch's own rendezvous server would listen on every interface.
        """
        address = ray.util.get_node_ip_address()
        if ipaddress.ip_address(address).is_loopback:
            node: Any = ray._private.worker.global_worker.node
            session = node.get_session_dir_path()  # goes with the cluster
            return f"file://{tempfile.mkdtemp(prefix='megatron_daro_', dir=session)}/ranks"
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    @ray.method(concurrency_group="work")
    def setup(
        self,
        init_method: str,
        settings: Any,
        actor: ActorSection,
        algorithm: AlgorithmSection,
        seed: int,
        timeout_s: float,
    ) -> None:
        """Join the process group and build the policy. Collective."""
        if init_method.startswith("file:"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from megatron_daro.actor import parallel
        from megatron_daro.actor.policy import MegatronPolicy, layout_of

        parallel.initialize(layout_of(actor), rank=self._rank, init_method=init_method, seed=seed, timeout_s=timeout_s)
        self._policy = MegatronPolicy(settings, actor, algorithm)

    @ray.method(concurrency_group="work")
    def place(self) -> Place:
        """What part this rank has."""
        from megatron_daro.actor import parallel
        from megatron_daro.actor.weights import exports_weights, speaks_for_stage

        return Place(
            data_parallel=parallel.data_parallel_rank(),
            stage=parallel.pipeline_parallel_rank(),
            exports=exports_weights(),
            speaks=speaks_for_stage(),
            answers=parallel.answers_for_shard(),
        )

    @ray.method(concurrency_group="work")
    def train(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], step: int, **columns: Any) -> StepResult:
        """One optimizer step on this rank's shard. Collective; metrics come from the ranks that answer only.

        columns: of the shard, computed since it was sent; they take the place of those in `batch`.
        """
        result = self._policy.train_step(dataclasses.replace(batch, **columns), micro_batches, step=step)
        return result if self._answers() else dataclasses.replace(result, metrics={})

    @ray.method(concurrency_group="work")
    def logprobs(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], reference: bool) -> np.ndarray | None:
        """float32 [R] of the shard under the current (or the reference) weights; None where another rank answers."""
        compute = self._policy.reference_logprobs if reference else self._policy.logprobs
        found = compute(batch, micro_batches)
        return found if self._answers() else None

    def _answers(self) -> bool:
        from megatron_daro.actor import parallel

        return parallel.answers_for_shard()

    @ray.method(concurrency_group="work", num_returns="streaming")
    def export(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """This stage's weights in buckets; nothing from ranks that only take part in the gathers."""
        from megatron_daro.sync.buckets import bucketize

        if self._speaks():
            yield from bucketize(self._policy.export(), bucket_bytes)
        else:
            self._follow_export()

    @ray.method(concurrency_group="work")
    def send_weights(self, plan: BroadcastPlan, backend: str) -> SendReport | None:
        """This stage's weights to SGLang servers; collective over its tensor-parallel ranks, of which one sends."""
        if not self._speaks():
            self._follow_export()
            return None
        if self._sender is None:
            from megatron_daro.engine.sglang.update import post_to
            from megatron_daro.sync.broadcast import BroadcastSender

            self._sender = BroadcastSender(ray.util.get_node_ip_address(), backend, post_to)
        return self._sender.send(self._policy.export(), plan)

    @ray.method(concurrency_group="work")
    def push_weights(self, plan: BroadcastPlan) -> SendReport | None:
        """The same by handles of this GPU's memory, to servers of this host."""
        if not self._speaks():
            self._follow_export()
            return None
        from megatron_daro.engine.sglang.update import post_to
        from megatron_daro.sync.tensor import push

        return push(self._policy.export(), plan, post_to)

    @ray.method(concurrency_group="work")
    def write_weights(self, directory: Path, label: str, shard_bytes: int) -> dict[str, tuple[str, int]] | None:
        """The same as files. Returns what was written where."""
        if not self._speaks():
            self._follow_export()
            return None
        from megatron_daro.sync.disk import write_shards

        return write_shards(directory, label, self._policy.export(), shard_bytes)

    def _speaks(self) -> bool:
        from megatron_daro.actor.weights import speaks_for_stage

        return speaks_for_stage()

    def _follow_export(self) -> None:
        """Takes part in the gathers of an export that another rank hands on."""
        for _ in self._policy.export():
            pass

    @ray.method(concurrency_group="work")
    def save(self, directory: Path) -> None:
        """Write the checkpoint. Collective."""
        self._policy.save(directory)

    @ray.method(concurrency_group="work")
    def load(self, directory: Path) -> None:
        """Read a checkpoint. Collective."""
        self._policy.load(directory)


@_actor(max_restarts=0, max_task_retries=0)
class EngineWorker:
    """One replica of the embedded engine: its methods are those of the Engine Protocol, on Ray's event loop."""

    def __init__(self, path: Path, trust_remote_code: bool, options: dict[str, Any]) -> None:
        from megatron_daro.data.tokenizer import load_tokenizer
        from megatron_daro.engine.embedded import EmbeddedEngine

        tokenizer = load_tokenizer(path, trust_remote_code)
        self._engine = EmbeddedEngine(path, decode=lambda ids: _decode(tokenizer, ids), **options)
        self._buckets: asyncio.Queue[WeightBucket | None] = asyncio.Queue()
        self._update: asyncio.Task[None] | None = None

    async def sentinel(self) -> None:
        """Blocks for as long as the process lives."""
        await asyncio.Event().wait()

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()

    @ray.method(num_returns="streaming")
    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """The rollouts of each request as soon as they are complete."""
        async for rollouts in self._engine.generate(requests):
            yield rollouts

    async def abort(self, group_ids: Sequence[int] | None) -> None:
        """Stop these groups, or all."""
        await self._engine.abort(group_ids)

    async def begin_update(self, version: int) -> None:
        """Start a weight update; buckets follow."""
        self._buckets = asyncio.Queue()
        self._update = asyncio.create_task(self._engine.update_weights(self._received(), version))

    async def add_bucket(self, bucket: WeightBucket) -> None:
        """One more bucket of the update that was begun."""
        await self._buckets.put(bucket)

    async def end_update(self) -> None:
        """All buckets were sent: the weights change now. Raises what the update raised."""
        await self._buckets.put(None)
        if self._update is not None:
            await self._update

    async def _received(self) -> AsyncIterator[WeightBucket]:
        while (bucket := await self._buckets.get()) is not None:
            yield bucket


@_actor(max_restarts=0, max_task_retries=0)
class ServerWorker:
    """One SGLang server process, on the node and with the GPUs that Ray gave this actor; it ends with the actor."""

    def __init__(self, options: LaunchOptions) -> None:
        self._server = ServerProcess(options, ray.util.get_node_ip_address())

    def launch(self) -> str:
        """Start the process; its URL."""
        return self._server.launch()

    def death(self) -> str:
        """Why the process is gone; empty while it lives."""
        return self._server.death()

    def stop(self) -> None:
        """End the process."""
        self._server.stop()


@_actor(max_restarts=0, max_task_retries=0, max_concurrency=_MANY_CALLS)
class AnswerWorker:
    """Asks SGLang servers and makes rollouts of their answers, many at once on Ray's event loop."""

    def __init__(self, path: Path, trust_remote_code: bool) -> None:
        from megatron_daro.engine.sglang.answers import DirectAnswers

        self._path, self._trust = path, trust_remote_code
        self._tokenizer: Any = None
        self._answers = DirectAnswers(lambda ids: _decode(self._tokenizer, ids))

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the tokenizer is loaded. Raises ModelError: here, since Ray cuts what a start says."""
        from megatron_daro.data.tokenizer import load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path, self._trust)
        return _own_place()

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """The rollouts of one group. Raises as `Answers.ask` says."""
        return await self._answers.ask(question)


@_actor(max_restarts=0, max_task_retries=0, max_concurrency=_MANY_CALLS)
class VerdictWorker:
    """A pool of verifier processes on this node; they end with this process, however it ends."""

    def __init__(self, section: RewardSection, workers: int) -> None:
        from megatron_daro.reward.pool import RewardPool

        self._pool = RewardPool.from_section(section.model_copy(update={"workers": workers}))

    async def ready(self) -> tuple[str, int]:
        """Node and process, when the verifiers run."""
        await asyncio.to_thread(self._pool.start)
        return _own_place()

    async def score(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Verdicts in order. Raises RewardError."""
        return await self._pool.score_async(pairs)

    async def counters(self) -> dict[str, int]:
        """What the pool did so far."""
        return self._pool.counters

    async def stop(self) -> None:
        """End the verifiers in order."""
        await asyncio.to_thread(self._pool.close)


def _own_place() -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)
