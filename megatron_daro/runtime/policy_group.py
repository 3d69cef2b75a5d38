"""The policy as the controller sees it: what a step asks of the Megatron ranks, behind the Policy Protocol.

The mini-batch of a step is split into one shard per data-parallel rank (step_shards.py), and each shard is put into the
object store once a step. The log-probs that ranks compute for a shard are put there too, for its step; the driver joins
a copy of them, a column of the `StepBatch`, for later epochs and for a step that is repeated. Weights go from ranks to
receivers, never through the driver (weight_export.py). After one rank has failed the group is not usable, unless it
heals: then dead ranks are replaced, all go back to a snapshot, and what was under way is done again (healing.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.data.schedule import CostModel
from megatron_daro.errors import LostSaveError, LostSenderError, WorkerError
from megatron_daro.runtime import weight_export
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.healing import Healing, HealingLimits
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.ray_calls import gather
from megatron_daro.runtime.slow_replicas import SlowReplicas
from megatron_daro.runtime.step_shards import Shard, shards_of
from megatron_daro.runtime.worker_group import first_death
from megatron_daro.sync.plan import SendPlan, SendReport, WeightFiles
from megatron_daro.types import MemoryKind, MemoryMove, PreparedStep, Rollout, Sequences, StepBatch, StepResult

T = TypeVar("T")


class PolicyGroup:
    """The policy on its ranks: what the controller asks of them, one collective call at a time."""

    def __init__(
        self,
        run: RunContext,
        settings: PolicySettings,
        algorithm: AlgorithmSection,
        placement: Placement,
        *,
        token_columns: Sequence[str] = (),
        healing: HealingLimits | None = None,
    ) -> None:
        """Start nothing; `start` does. Args: algorithm: with paths that every process reads alike. placement: where
        each rank goes, started before. token_columns: of the algorithm. healing: None: a death ends the run."""
        self._run, self._actor = run, run.config.actor
        self._settings, self._algorithm, self._placement = settings, algorithm, placement
        self._passes = algorithm.passes(token_columns)
        self._cost = CostModel.of_model(read_model_shape(settings.model_path))
        # Shards that are in the object store since `prepare`, by the number of their PreparedStep and of replacements
        # so far: the store of a lost node had columns of them.
        self._prepared: dict[tuple[int | None, int], list[Shard]] = {}
        self._numbers = itertools.count()
        self._version, self._steps_done = 0, 0
        # One collective call at a time on all ranks, and no change of weights while they are being sent.
        self._busy = asyncio.Lock()
        self.ranks = Ranks(run, settings, algorithm, placement, outlive_groups=healing is not None)
        self._healing = Healing(self.ranks, self.repeat, healing, run) if healing else None
        self._slow = SlowReplicas()

    async def start(self) -> None:
        """Start the processes and build the policy in them. Raises ModelError, ConfigError, WorkerError."""
        await self.start_processes()
        await self.build()

    async def start_processes(self) -> None:
        """Start the processes; they use no GPU before `build`. Raises WorkerError."""
        await self.ranks.start()

    async def build(self) -> None:
        """Build the policy in the processes. Raises ModelError, ConfigError, WorkerError."""
        await self.ranks.join(to_be_restored=False)
        if self._healing:
            await self._healing.take_first_snapshot()

    async def watch_and_heal(self) -> Exception:
        """Watch the ranks, and replace those that die where that is done; return why the run cannot go on. While this
        is not awaited, an idle rank that dies is noticed by the next call, and one that freezes is not killed."""
        if self._healing is None or self._healing.keeps == "none":
            return (await first_death(self.ranks.workers))[-1]
        hung = asyncio.ensure_future(self._healing.end_hung())
        try:
            return await self._watch(self._healing)
        finally:
            hung.cancel()

    async def _watch(self, healing: Healing) -> Exception:
        while True:
            name, worker, _ = await first_death(self.ranks.workers)
            # The calls that wait for it end; where one of them is under way it heals before its lock is free.
            healing.note_death(name, worker)
            async with self._busy:
                try:
                    await healing.heal()
                except Exception as failure:  # the supervisor's border: it ends the run
                    if not self.ranks.workers.dismissed:
                        return failure
                    await asyncio.Future()  # for ever: the run has ended already, for a reason of its own

    @property
    def _replacements(self) -> int:
        return self._healing.replacements if self._healing else 0

    async def _repeated(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what collective work gives, done again where a rank was lost and replaced meanwhile."""
        return await (self._healing.repeated(work) if self._healing else work())

    @property
    def remarks(self) -> list[str]:
        """What a person should know about how the ranks compute; known after `start`."""
        remarks = list(dict.fromkeys(remark for info in self.ranks.infos for remark in info.remarks))
        remarks += [self._healing.remark] if self._healing else []
        idle = [rank for rank, info in enumerate(self.ranks.infos) if info.device == "cpu"]
        if not self._placement.has_gpus or not idle:
            return remarks
        return [
            *remarks,
            f"{len(idle)} of {len(self.ranks.infos)} ranks (the first: rank {idle[0]}) were given a GPU by Ray, but "
            "their torch sees none: they compute on the CPU; install torch for CUDA on the nodes",
        ]

    async def prepare(self, batch: StepBatch) -> PreparedStep:
        """Return the batch with the columns of `AlgorithmSection.passes`, the reference's under its weights, the others
        under the current ones; its shards stay in Ray's store for `train`."""
        async with self._busy:
            return await self._repeated(lambda: self._prepare(batch))

    async def _prepare(self, batch: StepBatch) -> PreparedStep:
        if self._algorithm.old_logprobs == "rollout":
            batch = dataclasses.replace(batch, old_logprobs_R=batch.rollout_logprobs_R)
        if batch.opens_batch:
            self._prepared.clear()  # steps that were not trained, of the batch before or a replayed one
        shards, columns = await asyncio.to_thread(self._shards, batch), dict[str, Any]()
        for name in self._passes:
            columns[f"{name}_R"] = await self._run_pass(name, batch, shards)
        number = next(self._numbers)
        self._prepared[number, self._replacements] = shards
        return PreparedStep(dataclasses.replace(batch, **columns), number)

    async def train(self, prepared: PreparedStep, step: int) -> StepResult:
        """One optimizer step; the shards of one that `prepare` gave are in Ray's store already."""
        async with self._busy:
            if self._healing:
                await self._healing.settle()
            result = await self._repeated(lambda: self._train(prepared, step))
            if self._healing:
                await self._healing.trained(prepared.batch, step)
                result = dataclasses.replace(result, metrics={**result.metrics, **self._healing.counts})
            self._version, self._steps_done = step, self._steps_done + 1
        return result

    async def repeat(self, batch: StepBatch, step: int) -> StepResult:
        """Do a step once again; the batch travels whole, with the columns that it has."""
        return await self._train(PreparedStep(batch), step)

    async def _train(self, prepared: PreparedStep, step: int) -> StepResult:
        shards = self._prepared.pop((prepared.number, self._replacements), None)
        calls = await self.ranks.with_shards(
            await asyncio.to_thread(self._shards, prepared.batch) if shards is None else shards,
            lambda worker, s: worker.train.remote(s.reference, s.micro_batches, step, **s.columns),
        )
        results = await gather(calls)
        _check_agreement(results)
        result = next(result for result, info in zip(results, self.ranks.infos, strict=True) if info.reports)
        metrics, warning = self._slow.observe([result.own_s for result in results], self.ranks.infos)
        if warning:
            self._run.progress.warn(f"step {step}: {warning}")
        return dataclasses.replace(result, metrics={**result.metrics, **metrics})

    @asynccontextmanager
    async def hold(self, new_version: int | None = None) -> AsyncIterator[int]:
        """While it is held the weights do not change: `export`, `write`, `logprobs_of` are for within, all else waits.
        Yields their version, the number of the last optimizer step; `new_version`, where given, is what they are called
        from now on: each publication says it, for steps before a resume, or that ended in an exception, count too."""
        async with self._busy:
            self._version = self._version if new_version is None else new_version
            yield self._version

    async def export(self, plan: SendPlan) -> SendReport:
        """Send the weights as the plan says."""
        if self._healing is None:
            return await weight_export.export(self.ranks, plan)
        await self._healing.heal()
        try:
            report = await weight_export.export(self.ranks, plan)
        except WorkerError as error:
            if not await self._healing.lost_ranks():
                raise
            await self._healing.heal()
            raise LostSenderError(f"the weights were not sent: {error}") from error
        if self._healing.state.lost:  # a call that is aborted may return
            await self._healing.heal()
            raise LostSenderError("the weights were not all sent: a rank died meanwhile")
        return report

    async def write(self, files: WeightFiles) -> SendReport:
        """Write the weights as one HF checkpoint, whole or not at all."""
        return await self._repeated(lambda: weight_export.write(self.ranks, files))

    async def logprobs_of(
        self, rollouts: Sequence[Rollout], *, temperature: float, base: bool = False
    ) -> list[np.ndarray]:
        """float32 [R] log-probs of each rollout's response, of logits divided by `temperature`. base: without
        adapters."""
        return await self._repeated(lambda: self._logprobs_of(rollouts, temperature, base))

    async def _logprobs_of(self, rollouts: Sequence[Rollout], temperature: float, base: bool) -> list[np.ndarray]:
        batch = Sequences.of(rollouts)
        shards = await asyncio.to_thread(self._shards, batch)
        calls = await self.ranks.with_shards(
            shards, lambda worker, s: worker.logprobs_of.remote(s.reference, s.micro_batches, temperature, base)
        )
        column = await self.ranks.column(batch, shards, calls)
        ends = np.cumsum(batch.response_lengths_N)
        return np.split(column, ends[:-1])

    async def offload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move these kinds of every rank's memory to the host."""
        return await self._move(kinds, away=True)

    async def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move them back, bit for bit."""
        return await self._move(kinds, away=False)

    async def _move(self, kinds: Collection[MemoryKind], *, away: bool) -> MemoryMove:
        async with self._busy:
            moves: list[MemoryMove] = await self.ranks.all(lambda worker: worker.move.remote(tuple(kinds), away))
        return MemoryMove(
            *(max(getattr(move, name) for move in moves) for name in ("moved", "left", "seconds", "others"))
        )

    async def save(self, directory: Path, captured: Callable[[], None]) -> None:
        """Write the policy's checkpoint into an existing directory; ranks train on while their files are written.

        Raises:
            LostSaveError: a rank died and was replaced meanwhile, and a step was made since.
        """
        async with self._busy:
            await self._repeated(lambda: self._start_save(directory))
            steps_done, replacements = self._steps_done, self._replacements
        captured()
        try:
            await self.ranks.all(lambda worker: worker.finish_save.remote())
        except WorkerError as error:
            await self._save_again(directory, steps_done, replacements, error)

    async def _start_save(self, directory: Path) -> None:
        if self._healing:  # what an earlier try left behind goes
            await asyncio.to_thread(_empty, directory)
        await self.ranks.all(lambda worker: worker.start_save.remote(directory.absolute()))

    async def _save_again(self, directory: Path, steps_done: int, replacements: int, error: WorkerError) -> None:
        """Write the checkpoint anew, if what failed was a rank that was lost, and the weights are still those."""
        healing = self._healing
        if healing is None:
            raise error
        async with self._busy:
            if not await healing.lost_ranks() and healing.replacements == replacements:
                raise error

            async def anew() -> None:
                if self._steps_done != steps_done:
                    raise LostSaveError(f"a rank died while a checkpoint was saved: {error}") from error
                await self._start_save(directory)
                await self.ranks.all(lambda worker: worker.finish_save.remote())

            await healing.repeated(anew)

    async def load(self, directory: Path) -> None:
        """Continue from such a directory."""
        async with self._busy:
            await self.ranks.all(lambda worker: worker.load.remote(directory.absolute()))
            if self._healing:
                await self._healing.snapshot_now()

    async def close(self) -> None:
        """End the processes. May be called twice."""
        if self._healing:
            self._healing.close()
        self.ranks.dismiss()

    def _shards(self, batch: Sequences) -> list[Shard]:
        return shards_of(batch, self._actor, self._cost)

    async def _run_pass(self, name: str, batch: Sequences, shards: Sequence[Shard]) -> np.ndarray:
        """float32 [R] of the whole batch; the shards keep references to their parts."""
        calls = await self.ranks.with_shards(
            shards, lambda worker, s: worker.run_pass.remote(name, s.reference, s.micro_batches)
        )
        for info, call in zip(self.ranks.infos, calls.values(), strict=True):
            if info.reports:
                shards[info.data_parallel].columns[f"{name}_R"] = call
        return await self.ranks.column(batch, shards, calls)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_agreement(results: Sequence[StepResult]) -> None:
    """All ranks must have taken the same decision; one that differs would train another model from here on."""
    if any(result.skipped != results[0].skipped for result in results):
        raise WorkerError("ranks disagree on whether the optimizer step was applied; resume from the last checkpoint")
