"""The policy as the controller sees it: Megatron ranks as Ray actors behind the Policy Protocol.

A batch is split into one shard per data-parallel rank, and each shard is put into the object store once a step.
Log-probs that ranks compute stay there too and travel as references. Weights go from ranks to receivers, never
through the driver. After one rank has failed the group is not usable, unless it heals: then dead ranks are replaced,
all go back to a snapshot, and what was under way is done again (healing.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.model_shape import CRITIC_HEADS, read_model_shape
from megatron_daro.convert.mapping import critic_config
from megatron_daro.data.schedule import CostModel, schedule
from megatron_daro.errors import LostSaveError, LostSenderError, WorkerError
from megatron_daro.runtime.cluster import Placement
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.healing import Healing, HealingLimits
from megatron_daro.runtime.slow_replicas import SlowReplicas
from megatron_daro.runtime.supervisor import WorkerGroup, actor_class, first_death, gather, unhurried
from megatron_daro.runtime.workers import RankInfo, TrainWorker
from megatron_daro.sync import files
from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.sync.routes import RankRole, joined_report, routes
from megatron_daro.sync.shard_tcp import check_offers
from megatron_daro.sync.transports import transport_of
from megatron_daro.types import MemoryKind, MemoryMove, Rollout, StepResult, TrainBatch

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Shard:
    """What one data-parallel rank computes.

    rows: of the batch. reference: to its TrainBatch in the object store. micro_batches: row numbers within that one.
    columns: names of TrainBatch -> references to columns that were computed for this shard since.
    """

    rows: tuple[int, ...]
    reference: ObjectRef[TrainBatch]
    micro_batches: tuple[tuple[int, ...], ...]
    columns: dict[str, Any] = field(default_factory=dict)


def shards_of(batch: TrainBatch, actor: ActorSection, cost: CostModel) -> list[Shard]:
    """Return the batch split over data-parallel ranks, each part put once into the object store.

    Args:
        batch: all samples of an optimizer step.
        actor: how many ranks, and the token budget of a micro-batch.
        cost: what a sample costs: ranks get equal sums of it.

    Raises:
        DataError: the batch does not split.
    """
    plan = schedule(
        batch.lengths_N,
        actor.data_parallel,
        actor.micro_batch_tokens,
        cost=cost,
        sequence_multiple=2 * actor.context_parallel if actor.context_parallel > 1 else 1,
        total_multiple=actor.sequence_multiple,
    )
    return [_shard(batch, micro_batches) for micro_batches in plan.ranks]


def joined_column(batch: TrainBatch, shards: Sequence[Shard], parts: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return a response column of the batch from those of its shards.

    Args:
        batch: what the shards were made of.
        shards: one per data-parallel rank.
        parts: data-parallel rank -> float32 [R of its shard].

    Returns:
        float32 [R] in the batch's own order.
    """
    lengths_N = batch.response_lengths_N
    starts_N = np.cumsum(lengths_N) - lengths_N
    out = np.empty(int(lengths_N.sum()), dtype=np.float32)
    for rank, shard in enumerate(shards):
        position = 0
        for row in shard.rows:
            length = int(lengths_N[row])
            out[starts_N[row] : starts_N[row] + length] = parts[rank][position : position + length]
            position += length
    return out


def _shard(batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> Shard:
    rows, local = renumbered(micro_batches)
    return Shard(rows, ray.put(batch.select(rows)), local)


def renumbered(micro_batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the rows of one rank in the order of its micro-batches, and these with rows numbered from 0 in it."""
    rows = tuple(row for micro_batch in micro_batches for row in micro_batch)
    local, start = [], 0
    for micro_batch in micro_batches:
        local.append(tuple(range(start, start + len(micro_batch))))
        start += len(micro_batch)
    return rows, tuple(local)


_COLLECTIVE_S = 1800.0
"""Limit of one collective operation of the ranks."""


class PolicyGroup:
    """All ranks of the policy."""

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
        self._settings, self._algorithm = settings, algorithm
        self._placement = placement
        self._passes = algorithm.passes(token_columns)
        self._cost = CostModel.of_model(read_model_shape(settings.model_path))
        # Batches whose shards are in the object store since `prepare`, oldest first: id -> (batch, shards).
        self._prepared: dict[int, tuple[TrainBatch, list[Shard]]] = {}
        self._most_prepared = run.config.trainer.updates_per_batch
        self.workers = WorkerGroup()
        self._infos: list[RankInfo] = []
        self._address = ""
        self._version = 0
        self._relayed: set[tuple[int, ...]] = set()  # groups of ranks that buckets go to other hosts in
        # One collective call at a time on all ranks, and no change of weights while they are being sent.
        self._busy = asyncio.Lock()
        self._healing = Healing(self, healing, run) if healing else None
        self._slow = SlowReplicas()

    async def start(self) -> None:
        """Start the processes and build the policy in them. Raises ModelError, ConfigError, WorkerError."""
        await self.start_processes()
        await self.build()

    async def start_processes(self) -> None:
        """Start the processes, and tell the placement their GPUs. They use none before `build`. Raises WorkerError."""
        self.workers.update({f"actor rank {rank}": self.start_process(rank) for rank in range(self._actor.world_size)})
        gpus = await self._all(lambda worker: worker.gpu.remote())
        self._placement.take_gpus(dict(enumerate(gpus)))

    def start_process(self, rank: int) -> ActorHandle:
        """Start the process of one rank, and return its handle."""
        return actor_class(TrainWorker).options(**self._placement.rank(rank)).remote(rank, self._run.log_dir)

    async def build(self) -> None:
        """Build the policy in the processes. Raises ModelError, ConfigError, WorkerError."""
        await self.join(to_be_restored=False)
        if self._healing:
            await self._healing.prepare()

    async def join(self, *, to_be_restored: bool = True) -> None:
        """Have all processes meet in new groups, and build the policy in each."""
        self._forget_meeting_place()
        first = next(iter(self.workers.values()))
        (self._address,) = await gather({"actor rank 0": first.rendezvous.remote()})
        seed = self._run.config.trainer.seed
        arguments = (self._address, self._settings, self._actor, self._algorithm, seed, _COLLECTIVE_S)
        options = {"heals": self._healing is not None, "to_be_restored": to_be_restored}
        await self._all(lambda worker: worker.setup.remote(*arguments, **options))
        self._infos, self._relayed = await self._all(lambda worker: worker.info.remote()), set()

    @property
    def infos(self) -> list[RankInfo]:
        """Each rank's part; known after `start`."""
        return self._infos

    async def ended(self) -> Exception:
        """Watch the ranks, and replace those that die where that is done; return why the run cannot go on."""
        if self._healing is None or self._healing.keeps == "none":
            return (await first_death(self.workers))[-1]
        hung = asyncio.ensure_future(self._healing.end_hung())
        try:
            return await self._ended(self._healing)
        finally:
            hung.cancel()

    async def _ended(self, healing: Healing) -> Exception:
        while True:
            name, worker, _ = await first_death(self.workers)
            # The calls that wait for it end; where one of them is under way it heals before its lock is free.
            healing.watched(name, worker)
            async with self._busy:
                try:
                    await healing.heal()
                except Exception as failure:  # the supervisor's border: it ends the run
                    if not self.workers.dismissed:
                        return failure
                    await asyncio.Future()  # for ever: the run has ended already, for a reason of its own

    async def _repeated(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what collective work gives, done again where a rank was lost and replaced meanwhile."""
        return await (self._healing.repeated(work) if self._healing else work())

    @property
    def remarks(self) -> list[str]:
        """What a person should know about how the ranks compute; known after `start`."""
        remarks = list(dict.fromkeys(remark for info in self._infos for remark in info.remarks))
        remarks += [self._healing.remark] if self._healing else []
        idle = [rank for rank, info in enumerate(self._infos) if info.device == "cpu"]
        if not self._placement.has_gpus or not idle:
            return remarks
        return [
            *remarks,
            f"{len(idle)} of {len(self._infos)} ranks (the first: rank {idle[0]}) were given a GPU by Ray, but their "
            "torch sees none: they compute on the CPU; install torch for CUDA on the nodes",
        ]

    async def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the columns of `AlgorithmSection.passes`, computed under the current weights."""
        async with self._busy:
            return await self._repeated(lambda: self._prepare(batch))

    async def _prepare(self, batch: TrainBatch) -> TrainBatch:
        if self._algorithm.old_logprobs == "rollout":
            batch = dataclasses.replace(batch, old_logprobs_R=batch.rollout_logprobs_R)
        if not self._passes:
            return batch
        shards, columns = await asyncio.to_thread(self._shards, batch), dict[str, Any]()
        for name in self._passes:
            columns[f"{name}_R"] = await self._run_pass(name, batch, shards)
        prepared = dataclasses.replace(batch, **columns)
        self._prepared[id(prepared)] = prepared, shards
        while len(self._prepared) > self._most_prepared:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    async def train(self, batch: TrainBatch, step: int) -> StepResult:
        """One optimizer step on the whole batch; one that `prepare` gave is with the ranks already."""
        async with self._busy:
            if self._healing:
                await self._healing.settle()
            result = await self._repeated(lambda: self.repeat(batch, step))
            if self._healing:
                await self._healing.trained(batch, step)
                result = dataclasses.replace(result, metrics={**result.metrics, **self._healing.counts})
            self._version = step
        return result

    async def repeat(self, batch: TrainBatch, step: int) -> StepResult:
        """Do the step; once again it travels whole, with the columns that it has."""
        _, prepared = self._prepared.pop(id(batch), (batch, None))
        calls = await self._calls(
            await asyncio.to_thread(self._shards, batch) if prepared is None else prepared,
            lambda worker, s: worker.train.remote(s.reference, s.micro_batches, step, **s.columns),
        )
        results = await gather(calls)
        _check_agreement(results)
        result = next(result for result, info in zip(results, self._infos, strict=True) if info.reports)
        metrics, warning = self._slow.observe([result.own_s for result in results], self._infos)
        if warning:
            self._run.progress.warn(f"step {step}: {warning}")
        return dataclasses.replace(result, metrics={**result.metrics, **metrics})

    @asynccontextmanager
    async def hold(self, version: int | None = None) -> AsyncIterator[int]:
        """While it is held the weights do not change, and may be exported and scored with. Yields their version, the
        number of the last optimizer step; `version`, where given, is what they are called from now on."""
        async with self._busy:
            self._version = self._version if version is None else version
            yield self._version

    async def export(self, plan: SendPlan) -> SendReport:
        """Every pipeline stage sends its weights as the plan says, one after the other, since receivers take one bucket
        at a time; after a failure the rest is not sent. Files become one HF checkpoint, whole or not at all."""
        if self._healing is None or plan.directory:
            return await self._repeated(lambda: self._export(plan))
        await self._healing.heal()
        try:
            return await self._export(plan)
        except WorkerError as error:
            if not await self._healing.lost_ranks():
                raise
            await self._healing.heal()
            raise LostSenderError(f"the weights were not sent: {error}") from error

    async def _export(self, plan: SendPlan) -> SendReport:
        if transport_of(plan.transport).rank_to_rank:
            return await self._export_shards(plan)
        started, report = time.perf_counter(), SendReport()
        directory = plan.directory.absolute() if plan.directory else None
        if directory:
            plan = dataclasses.replace(plan, directory=directory)
            await asyncio.to_thread(files.open_checkpoint, plan)
        for stage in self._stages():
            report = report.joined(await self._export_stage(stage, plan))
            if report.failures:
                return report
        if directory:
            path, changes = self._settings.model_path, dict[str, Any]()
            if plan.critic:
                path = self._algorithm.critic.path or path
                changes = critic_config(read_model_shape(path, CRITIC_HEADS).family)
            await asyncio.to_thread(
                files.complete_checkpoint, plan, report.files, path, self._actor.torch_dtype, changes
            )
            report = dataclasses.replace(report, send_s=time.perf_counter() - started)
        return report

    async def score(self, rollouts: Sequence[Rollout], *, temperature: float) -> list[np.ndarray]:
        """float32 [R] log-probs of each rollout's response, of logits divided by `temperature`."""
        return await self._repeated(lambda: self._score(rollouts, temperature))

    async def _score(self, rollouts: Sequence[Rollout], temperature: float) -> list[np.ndarray]:
        batch = _scored_batch(rollouts, at_least=self._actor.data_parallel)
        shards = await asyncio.to_thread(self._shards, batch)
        calls = await self._calls(
            shards, lambda worker, s: worker.score.remote(s.reference, s.micro_batches, temperature)
        )
        column = await self._joined(batch, shards, calls)
        ends = np.cumsum(batch.response_lengths_N)[: len(rollouts)]
        return np.split(column[: ends[-1]], ends[:-1])

    async def offload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move these kinds of every rank's memory to the host."""
        return await self._move(kinds, away=True)

    async def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move them back, bit for bit."""
        return await self._move(kinds, away=False)

    async def _move(self, kinds: Collection[MemoryKind], *, away: bool) -> MemoryMove:
        async with self._busy:
            moves: list[MemoryMove] = await self._all(lambda worker: worker.move.remote(tuple(kinds), away))
        return MemoryMove(
            *(max(getattr(move, name) for move in moves) for name in ("moved", "left", "seconds", "others"))
        )

    async def save(self, directory: Path, captured: Callable[[], None]) -> None:
        """Write the policy's checkpoint into an existing directory; ranks train on while their files are written.

        Raises:
            LostSaveError: a rank died and was replaced meanwhile, and the weights have changed since.
        """
        async with self._busy:
            await self._repeated(lambda: self._start_save(directory))
            version, epoch = self._version, self._healing.epoch if self._healing else 0
        captured()
        try:
            await self._all(lambda worker: worker.finish_save.remote())
        except WorkerError as error:
            await self._save_again(directory, version, epoch, error)

    async def _start_save(self, directory: Path) -> None:
        if self._healing:  # what an earlier try left behind goes
            await asyncio.to_thread(_empty, directory)
        await self._all(lambda worker: worker.start_save.remote(directory.absolute()))

    async def _save_again(self, directory: Path, version: int, epoch: int, error: WorkerError) -> None:
        """Write the checkpoint anew, if what failed was a rank that was lost, and the weights are still those."""
        healing = self._healing
        if healing is None:
            raise error
        async with self._busy:
            if not await healing.lost_ranks() and healing.epoch == epoch:
                raise error

            async def anew() -> None:
                if self._version != version:
                    raise LostSaveError(f"a rank died while step {version} was saved: {error}") from error
                await self._start_save(directory)
                await self._all(lambda worker: worker.finish_save.remote())

            await healing.repeated(anew)

    async def load(self, directory: Path) -> None:
        """Continue from such a directory."""
        async with self._busy:
            await self._all(lambda worker: worker.load.remote(directory.absolute()))
            if self._healing:
                await self._healing.snapshot_now()

    async def close(self) -> None:
        """End the processes. May be called twice."""
        if self._healing:
            self._healing.close()
        self.workers.dismiss()
        self._forget_meeting_place()

    def _forget_meeting_place(self) -> None:
        if self._address.startswith("file://"):
            shutil.rmtree(Path(self._address.removeprefix("file://")).parent, ignore_errors=True)

    def _shards(self, batch: TrainBatch) -> list[Shard]:
        return shards_of(batch, self._actor, self._cost)

    async def _run_pass(self, name: str, batch: TrainBatch, shards: Sequence[Shard]) -> np.ndarray:
        """float32 [R] of the whole batch; the shards keep references to their parts."""
        calls = await self._calls(shards, lambda worker, s: worker.run_pass.remote(name, s.reference, s.micro_batches))
        for info, call in zip(self._infos, calls.values(), strict=True):
            if info.reports:
                shards[info.data_parallel].columns[f"{name}_R"] = call
        return await self._joined(batch, shards, calls)

    async def _joined(self, batch: TrainBatch, shards: Sequence[Shard], calls: Mapping[str, Any]) -> np.ndarray:
        """float32 [R] of the whole batch, of what the ranks answer for their shards."""
        answers = await gather(calls)
        parts = {info.data_parallel: answer for info, answer in zip(self._infos, answers, strict=True) if info.reports}
        return await asyncio.to_thread(joined_column, batch, shards, parts)

    def _stages(self) -> list[int]:
        return sorted({info.stage for info in self._infos})

    async def _export_shards(self, plan: SendPlan) -> SendReport:
        """Have every rank send what it holds to the servers' ranks that need it, all at once."""
        offers = await self._all(lambda worker: worker.offer_shards.remote(plan))
        check_offers(offers, len(plan.targets))
        caller, *others = self.workers.items()
        calls = {caller[0]: caller[1].send_shards.remote(plan, offers)}
        calls |= {name: worker.send_shards.remote(plan, ()) async for name, worker in unhurried(others)}
        first, *rest = await gather(calls)
        return functools.reduce(SendReport.beside, rest, first)

    async def _export_stage(self, stage: int, plan: SendPlan) -> SendReport:
        """Have the exporting ranks of a stage export, and those that have servers of the plan on their host send."""
        stage_routes = routes(plan, self._roles(stage))
        members = stage_routes.members
        if members and members not in self._relayed:
            self._relayed.add(members)
            await self._all(lambda worker: worker.join_relays.remote([members]))
        calls, senders = dict[str, Any](), dict[str, int]()
        async for rank, ((name, worker), info) in unhurried(
            enumerate(zip(self.workers.items(), self._infos, strict=True))
        ):
            if rank in stage_routes.relays:
                calls[name] = worker.relay.remote(stage_routes.relays[rank], members)
            elif info.exports and info.stage == stage:
                group = members if rank == stage_routes.sender else ()
                calls[name] = worker.export.remote(stage_routes.plans.get(rank), group, critic=plan.critic)
            if rank in stage_routes.relays or rank in stage_routes.plans:
                senders[name] = rank
        results = dict(zip(calls, await gather(calls), strict=True))
        return joined_report(stage_routes, {rank: results[name] for name, rank in senders.items()})

    def _roles(self, stage: int) -> dict[int, RankRole]:
        """What each rank does, seen from the export of a stage."""
        return {
            rank: RankRole(p.host, p.exports and p.stage == stage, p.sends and p.stage == stage)
            for rank, p in enumerate(self._infos)
        }

    async def _calls(self, shards: Sequence[Shard], call: Callable[[Any, Shard], Any]) -> dict[str, Any]:
        """`call(worker, shard)` on every rank with the shard of its data-parallel rank: references by rank's name."""
        return {
            name: call(worker, shards[info.data_parallel])
            async for (name, worker), info in unhurried(zip(self.workers.items(), self._infos, strict=True))
        }

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        if not self.workers:
            raise WorkerError("the actor's workers were not started, or have been dismissed")
        return await gather({name: call(worker) async for name, worker in unhurried(self.workers.items())})


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _scored_batch(rollouts: Sequence[Rollout], *, at_least: int) -> TrainBatch:
    """Return the rollouts as a batch of which only log-probs are wanted; repeated until every rank has one."""
    rows = [rollouts[i % len(rollouts)] for i in range(max(len(rollouts), at_least))]
    zeros = np.zeros(len(rows), dtype=np.float32)
    counts = np.zeros(len(rows), dtype=np.int64)
    return TrainBatch(
        tokens_T=np.concatenate([r.tokens for r in rows]),
        lengths_N=np.array([len(r.tokens) for r in rows], dtype=np.int64),
        prompt_lengths_N=np.array([r.prompt_length for r in rows], dtype=np.int64),
        loss_mask_R=np.concatenate([r.loss_mask for r in rows]),
        rollout_logprobs_R=np.concatenate([r.logprobs for r in rows]),
        rewards_N=zeros,
        correct_N=counts.astype(np.uint8),
        bins_N=counts,
        group_ids_N=counts,
        advantages_N=zeros,
        truncated_N=counts.astype(np.uint8),
        rollouts_per_prompt=1,
    )


def _check_agreement(results: Sequence[StepResult]) -> None:
    """All ranks must have taken the same decision; one that differs would train another model from here on."""
    if any(result.skipped != results[0].skipped for result in results):
        raise WorkerError("ranks disagree on whether the optimizer step was applied; resume from the last checkpoint")
