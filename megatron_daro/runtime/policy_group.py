"""The policy as the controller sees it: the Policy Protocol, carried out by the Megatron ranks.

The mini-batch of a step is split into one shard per data-parallel rank (step_shards.py). Each shard is put into Ray's
object store once a step, and the log-probs that ranks compute for it are put there too. The driver gets a copy of these
as a column of the `StepBatch`, for later epochs and for steps that are repeated. Weights go from the ranks to the
receivers, never through the driver (weight_export.py).

When a rank dies, `Healing` replaces it, takes all ranks back to a snapshot, and the collective call that was under way
is made again (healing.py). In a run that does not heal, the call raises, and the group cannot be used any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

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


class PolicyGroup:
    """The policy on its ranks, which work on one collective call at a time.

    version: of the weights: the number of the last optimizer step. `train` sets it; each publication sets it, too,
    since steps before a resume, and steps that raised, count as well.
    """

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
        """Start nothing; `start` does.

        Args:
            algorithm: with absolute paths. placement: where each rank goes; started before this group.
            token_columns: of the algorithm. healing: None: the death of a rank ends the run.
        """
        self._run, self._actor = run, run.config.actor
        self._settings, self._algorithm, self._placement = settings, algorithm, placement
        self._passes = algorithm.passes(token_columns)
        self._cost = CostModel.of_model(read_model_shape(settings.model_path))
        # Shards that `prepare` put into the object store, by the number of their PreparedStep and the count of
        # replacements then: after a replacement they are made anew, since a lost node's store had columns of them.
        self._prepared: dict[tuple[int | None, int], list[Shard]] = {}
        self._numbers = itertools.count()
        self.version, self._steps_done = 0, 0
        # One collective call at a time on all ranks, and no change of weights while they are being sent.
        self._busy = asyncio.Lock()
        self.ranks = Ranks(run, settings, algorithm, placement, outlive_groups=healing is not None)
        self._healing = Healing(self.ranks, self.repeat, healing, run)
        self._slow = SlowReplicas()

    async def start(self) -> None:
        """Start the processes and build the policy in them. Raises ModelError, ConfigError, WorkerError."""
        await self.start_processes()
        await self.build()

    async def start_processes(self) -> None:
        """Start the processes, which use no GPU before `build`. Raises WorkerError."""
        await self.ranks.start()

    async def build(self) -> None:
        """Build the policy in the processes. Raises ModelError, ConfigError, WorkerError."""
        await self.ranks.join(to_be_restored=False)
        await self._healing.take_first_snapshot()

    async def watch_and_heal(self) -> Exception:
        """Watch the ranks, and have those that die or freeze replaced; return why the run cannot go on. Until this is
        awaited, the death of an idle rank is noticed only by the next call, and frozen ranks are not killed."""
        if self._healing.keeps == "none":
            return (await first_death(self.ranks.workers))[-1]
        watch, hung = asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._healing.end_hung())
        try:
            await asyncio.wait({watch, hung}, return_when=asyncio.FIRST_COMPLETED)
            return watch.result() if watch.done() else cast(Exception, hung.exception())
        finally:
            watch.cancel()
            hung.cancel()
            await asyncio.wait({watch})

    async def _watch(self) -> Exception:
        while True:
            name, worker, _ = await first_death(self.ranks.workers)
            # This ends the calls that wait for the dead rank. A call under way heals before it releases the lock.
            self._healing.note_death(name, worker)
            async with self._busy:
                try:
                    await self._healing.heal()
                except Exception as failure:  # the supervisor's border: it ends the run
                    if not self.ranks.workers.dismissed:
                        return failure
                    await asyncio.Future()  # for ever: the run has ended already, for a reason of its own

    @property
    def remarks(self) -> list[str]:
        """What users should know about how the ranks compute; known after `start`."""
        remarks = list(dict.fromkeys(remark for info in self.ranks.infos for remark in info.remarks))
        remarks += [self._healing.remark] if self._healing.remark else []
        idle = [rank for rank, info in enumerate(self.ranks.infos) if info.device == "cpu"]
        if not self._placement.has_gpus or not idle:
            return remarks
        return [
            *remarks,
            f"{len(idle)} of {len(self.ranks.infos)} ranks (the first: rank {idle[0]}) were given a GPU by Ray, but "
            "their torch sees none: they compute on the CPU; install torch for CUDA on the nodes",
        ]

    async def prepare(self, batch: StepBatch) -> PreparedStep:
        """Return the batch with the columns that `AlgorithmSection.passes` names, computed with the current weights, or
        with the reference's for its column. The shards stay in Ray's store for `train`."""
        async with self._busy:
            return await self._healing.retried(lambda: self._prepare(batch))

    async def _prepare(self, batch: StepBatch) -> PreparedStep:
        if self._algorithm.old_logprobs == "rollout":
            batch = dataclasses.replace(batch, old_logprobs_R=batch.rollout_logprobs_R)
        if batch.opens_batch:
            self._prepared.clear()  # left over from steps that were prepared but, in a replay, skipped
        shards, columns = await asyncio.to_thread(self._shards, batch), dict[str, Any]()
        for name in self._passes:
            columns[f"{name}_R"] = await self._run_pass(name, batch, shards)
        number = next(self._numbers)
        self._prepared[number, self._healing.replacements] = shards
        return PreparedStep(dataclasses.replace(batch, **columns), number)

    async def train(self, prepared: PreparedStep, step: int) -> StepResult:
        """Do one optimizer step. The shards of a step from `prepare` are in Ray's store already."""
        async with self._busy:
            await self._healing.finish_snapshot()
            result = await self._healing.retried(lambda: self._train(prepared, step))
            await self._healing.trained(prepared.batch, step)
            self.version, self._steps_done = step, self._steps_done + 1
        return dataclasses.replace(result, metrics={**result.metrics, **self._healing.counts})

    async def repeat(self, batch: StepBatch, step: int) -> StepResult:
        """Do a step again, from a batch that has its columns. For `Healing` alone: the caller holds `_busy`."""
        return await self._train(PreparedStep(batch), step)

    async def _train(self, prepared: PreparedStep, step: int) -> StepResult:
        shards = self._prepared.pop((prepared.number, self._healing.replacements), None)
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
    async def hold(self) -> AsyncIterator[None]:
        """Keep the weights unchanged within the block. `export`, `write` and `logprobs_of` are called only there; all
        other calls wait but `close` and the writing of files by `save`."""
        async with self._busy:
            yield

    async def export(self, plan: SendPlan) -> SendReport:
        """Send the weights as the plan says. Raises LostSenderError: a rank died and was replaced; send again."""
        await self._healing.heal()
        try:
            report = await weight_export.export(self.ranks, plan)
        except WorkerError as error:
            if not await self._healing.lost_ranks():
                raise
            await self._healing.heal()
            raise LostSenderError(f"the weights were not sent: {error}") from error
        if self._healing.state.lost:  # a call that was aborted may return all the same
            await self._healing.heal()
            raise LostSenderError("the weights were not all sent: a rank died meanwhile")
        return report

    async def write(self, files: WeightFiles) -> SendReport:
        """Write the weights as one HF checkpoint, whole or not at all."""
        return await self._healing.retried(lambda: weight_export.write(self.ranks, files))

    async def logprobs_of(
        self, rollouts: Sequence[Rollout], *, temperature: float, base: bool = False
    ) -> list[np.ndarray]:
        """Return float32 [R] log-probs of each rollout's response, from logits divided by `temperature`. base: without
        adapters."""
        return await self._healing.retried(lambda: self._logprobs_of(rollouts, temperature, base))

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
        """Move these kinds of memory of every rank to the host."""
        return await self._move(kinds, away=True)

    async def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move them back, bit for bit; gradients come back as zeros."""
        return await self._move(kinds, away=False)

    async def _move(self, kinds: Collection[MemoryKind], *, away: bool) -> MemoryMove:
        async with self._busy:
            moves: list[MemoryMove] = await self.ranks.all(lambda worker: worker.move.remote(tuple(kinds), away))
        return MemoryMove(
            *(max(getattr(move, name) for move in moves) for name in ("moved", "left", "seconds", "others"))
        )

    async def save(self, directory: Path, captured: Callable[[], None]) -> None:
        """Write the policy's checkpoint into an existing directory. Calls `captured` as soon as the ranks have copied
        their state; they train on while files are written.

        Raises:
            LostSaveError: a rank died and was replaced meanwhile, and a step was done since.
        """
        async with self._busy:
            await self._healing.retried(lambda: self._start_save(directory))
            steps_done, replacements = self._steps_done, self._healing.replacements
        captured()
        try:
            await self.ranks.all(lambda worker: worker.finish_save.remote())
        except WorkerError as error:
            await self._save_again(directory, steps_done, replacements, error)

    async def _start_save(self, directory: Path) -> None:
        await asyncio.to_thread(_empty, directory)  # of what an earlier try left
        await self.ranks.all(lambda worker: worker.start_save.remote(directory.absolute()))

    async def _save_again(self, directory: Path, steps_done: int, replacements: int, error: WorkerError) -> None:
        """Write the checkpoint again if saving failed since a rank was lost, and the weights are still the same."""
        async with self._busy:
            if not await self._healing.lost_ranks() and self._healing.replacements == replacements:
                raise error

            async def anew() -> None:
                if self._steps_done != steps_done:
                    raise LostSaveError(f"a rank died while a checkpoint was saved: {error}") from error
                await self._start_save(directory)
                await self.ranks.all(lambda worker: worker.finish_save.remote())

            await self._healing.retried(anew)

    async def load(self, directory: Path) -> None:
        """Continue from a directory that `save` wrote."""
        async with self._busy:
            await self.ranks.all(lambda worker: worker.load.remote(directory.absolute()))
            await self._healing.snapshot_now()

    async def close(self) -> None:
        """End the processes. May be called twice."""
        self._healing.close()
        self.ranks.dismiss()

    def _shards(self, batch: Sequences) -> list[Shard]:
        return shards_of(batch, self._actor, self._cost)

    async def _run_pass(self, name: str, batch: Sequences, shards: Sequence[Shard]) -> np.ndarray:
        """Run one forward pass. Returns float32 [R] of the whole batch; the shards keep references to their parts."""
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
    """Raise WorkerError where ranks decided differently: from here on they would train different models."""
    if any(result.skipped != results[0].skipped for result in results):
        raise WorkerError("ranks disagree on whether the optimizer step was applied; resume from the last checkpoint")
