"""The loop of `megatron-daro train` in this process alone: a run of the tiny world without starting six processes.

Controller, sampler, verifiers, evaluation, Megatron policy and embedded engine are the product's, put together as
runtime/launch.py does it; only the thin shells around policy and engine, which are Ray actors there, are plain objects
here. So the numbers are those of the command, and tests/unit/examples/test_lab_tiny.py compares them. Keeps no
checkpoint and records no rollouts. Refuses layouts of more than one rank and more than one engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from megatron_daro.actor import parallel
from megatron_daro.actor.policy import MegatronPolicy
from megatron_daro.actor.translation import layout_of
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.config import Config
from megatron_daro.config.base import filled
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.controller import Controller, LoopParts, RunOutcome
from megatron_daro.data.schedule import CostModel, schedule
from megatron_daro.data.tokenizer import response_decoder
from megatron_daro.engine.embedded import EmbeddedEngine
from megatron_daro.errors import ConfigError, SyncError
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.evaluation import Evaluations
from megatron_daro.runtime import parts
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.inputs import Inputs, read_inputs
from megatron_daro.runtime.step_shards import Shard, joined_column, renumbered
from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.plan import SendPlan, SendReport, Target, WeightFiles
from megatron_daro.types import PreparedStep, Rollout, StepBatch, StepResult

_BUCKET_BYTES = 64 * 2**20
_LIMIT_S = 300.0
T = TypeVar("T")


class OnePolicy:
    """The Megatron policy of one rank, behind the Policy Protocol."""

    def __init__(self, config: Config) -> None:
        self._actor, self._algorithm = config.actor, config.algorithm
        self._passes = config.algorithm.passes(parts.algorithm_of(config).token_columns or ())
        self._policy = MegatronPolicy(parts.policy_settings(config), config.actor, config.algorithm)
        self._cost = CostModel.of_model(read_model_shape(config.model.path))
        self._thread, self.version = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy"), 0

    async def prepare(self, batch: StepBatch) -> PreparedStep:
        """See `PolicyGroup.prepare`."""
        if self._algorithm.old_logprobs == "rollout":
            batch = dataclasses.replace(batch, old_logprobs_R=batch.rollout_logprobs_R)
        if not self._passes:
            return PreparedStep(batch)
        rows, local = self._scheduled(batch)
        mine, columns = batch.select(rows), dict[str, Any]()
        for name in self._passes:
            column_R = await self._in_thread(self._policy.run_pass, name, mine, local)
            assert column_R is not None  # one rank is every pipeline stage
            columns[f"{name}_R"] = joined_column(batch, [Shard(rows, cast(Any, None), local)], {0: column_R})
        return PreparedStep(dataclasses.replace(batch, **columns))

    async def train(self, prepared: PreparedStep, step: int) -> StepResult:
        """Take one optimizer step, with rows and micro-batches in the order of the product's schedule."""
        rows, local = self._scheduled(prepared.batch)
        return await self._in_thread(self._policy.train_step, prepared.batch.select(rows), local, step=step)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run work in one and the same thread, as in a rank: what torch keeps for each thread would pile up."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **options))

    def _scheduled(self, batch: StepBatch) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        (micro_batches,) = schedule(batch.lengths_N, 1, self._actor.micro_batch_tokens, cost=self._cost)
        return renumbered(micro_batches)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Do nothing: there is only one caller."""
        yield

    async def export(self, plan: SendPlan) -> SendReport:
        """Send all weights to the engine of the plan, as a rank sends them."""
        for bucket in bucketize(self._policy.export(), plan.bucket_bytes):
            await cast(OneEngine, plan.targets[0].worker).receive(bucket)
        return SendReport()

    async def write(self, files: WeightFiles) -> SendReport:
        """Not called: the engine reads no files."""
        raise NotImplementedError

    async def logprobs_of(
        self, rollouts: Sequence[Rollout], *, temperature: float, base: bool = False
    ) -> list[np.ndarray]:
        """Not called: the engine asks for no probes."""
        raise NotImplementedError

    async def save(self, directory: Path, captured: Callable[[], None]) -> None:
        """Not called: there are no checkpoints."""
        raise NotImplementedError

    async def load(self, directory: Path) -> None:
        """Not called: there are no checkpoints."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the thread, and free the model."""
        self._thread.shutdown()
        self.__dict__.pop("_policy", None)


class OneEngine(EmbeddedEngine):
    """The embedded engine, behind the whole Engine Protocol."""

    def begin_update(self, version: int, only: str | None = None) -> OneUpdate | None:
        """Begin an update of this engine."""
        return None if only else OneUpdate(self, version)

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Ignore the call: this engine never comes back."""


class OneUpdate:
    """One update of the engine, see `ReceiverUpdate`; nothing is probed."""

    def __init__(self, engine: OneEngine, version: int) -> None:
        self._engine, self._version = engine, version

    async def prepare(self) -> SendPlan:
        """Open the update."""
        self._engine.open_update()
        target = Target("engine", worker=cast(Any, self._engine))  # called directly, not by Ray
        return SendPlan(transport="ray", targets=(target,), bucket_bytes=_BUCKET_BYTES, timeout_s=_LIMIT_S)

    async def blame(self, report: SendReport) -> None:
        """Not called: nothing is sent that could fail by itself."""
        raise SyncError(str(report.failures))

    async def install(self, report: SendReport) -> None:
        """Change the weights."""
        await self._engine.commit_update(self._version)

    async def accept(self) -> Mapping[str, float]:
        """Return no metrics: nothing is left to do."""
        return {}

    def abandon(self, error: SyncError) -> None:
        """Do nothing: the run ends with the error."""


def train(config: Config) -> RunOutcome:
    """Train as the configuration says; RUN/metrics.jsonl is written.

    Raises:
        DaroError: the cause of a failure. ConfigError: the configuration takes more than one process.
    """
    if config.actor.world_size != 1 or config.engine.kind != "embedded" or config.engine.replicas != 1:
        raise ConfigError("actor, engine: allowed in one process are one rank and one embedded engine")
    run_dir, phases = filled(config.trainer.run_dir), Phases()
    run_dir.mkdir(parents=True)
    size = config.rollout.rollouts_per_prompt
    shown = Progress(
        total_steps=config.trainer.steps, rollouts_per_prompt=size, mode="off", title=str(run_dir), phases=phases
    )
    with shown as progress, MetricsLog(run_dir, tensorboard=False) as metrics:
        parallel.initialize(layout_of(config.actor), seed=config.trainer.seed, timeout_s=_LIMIT_S)
        try:
            inputs = read_inputs(config, progress)
            algorithm = parts.algorithm_of(config)
            return asyncio.run(_train(RunContext.of(config, progress, phases), algorithm, inputs, metrics))
        finally:
            parallel.shutdown()


async def _train(run: RunContext, algorithm: Algorithm, inputs: Inputs, metrics: MetricsLog) -> RunOutcome:
    config, section, pool = run.config, run.config.engine, RewardPool.from_section(run.config.reward)
    engine = OneEngine(
        config.model.path,
        decode=response_decoder(inputs.tokenizer),
        seed=filled(section.seed),
        batch_size=section.embedded.batch_size,
        threads=section.embedded.threads,
        dtype=config.actor.dtype,
    )
    pool.start()
    policy = OnePolicy(config)
    await engine.start()
    made = parts.generation_with(run, inputs, algorithm, cast(Any, engine), cast(Any, pool))
    assert made.evaluator, "the lab gives each run a set"
    controller = Controller(
        config.trainer,
        LoopParts(
            policy=policy,
            batches=made.sampler,
            build=parts.batch_builder(config, algorithm),
            metrics=metrics,
            progress=run.progress,
            phases=run.phases,
            engine=engine,
            evaluations=Evaluations(made.evaluator.evaluate, config.trainer, run.phases, run.deadlines),
            closers={"verifiers": lambda: asyncio.to_thread(pool.close)},
            deadlines=run.deadlines,
        ),
        batches_ahead=config.rollout.batches_ahead,
    )
    return await controller.run()
