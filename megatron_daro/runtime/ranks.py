"""The ranks of the policy as Ray actors: their start, their process groups, and calls to all of them at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.actor import ActorHandle

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import WorkerError
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.ray_calls import actor_class, gather, yielding_to_event_loop
from megatron_daro.runtime.step_shards import Shard, joined_column
from megatron_daro.runtime.train_worker import TrainWorker
from megatron_daro.runtime.worker_group import WorkerGroup
from megatron_daro.types import Sequences


class Ranks:
    """All ranks, in order. `workers` has their processes by name, `infos` their parts once they have joined."""

    def __init__(
        self,
        run: RunContext,
        settings: PolicySettings,
        algorithm: AlgorithmSection,
        placement: Placement,
        *,
        outlive_groups: bool,
    ) -> None:
        """Start nothing. Args: outlive_groups: whether processes leave their groups when one dies, and join new
        ones."""
        self._run, self._placement = run, placement
        self.actor, self.settings, self.algorithm = run.config.actor, settings, algorithm
        self._outlive_groups = outlive_groups
        self._address = ""
        self.workers = WorkerGroup()
        self.infos: list[RankInfo] = []
        self._relays: set[tuple[int, ...]] = set()

    async def start(self) -> None:
        """Start the processes, and tell the placement their GPUs. Raises WorkerError."""
        self.workers.update({f"actor rank {rank}": self.start_process(rank) for rank in range(self.actor.world_size)})
        gpus = await self.all(lambda worker: worker.gpu.remote())
        self._placement.take_gpus(dict(enumerate(gpus)))

    def start_process(self, rank: int) -> ActorHandle:
        """Start the process of one rank, and return its handle."""
        actor = actor_class(TrainWorker).options(**self._placement.rank(rank))
        return actor.remote(rank, self._run.log_dir, self._placement.shares_gpus)

    async def join(self, *, to_be_restored: bool = True) -> None:
        """Have all processes meet in new groups, and build the policy in each."""
        self._forget_meeting_place()
        first = next(iter(self.workers.values()))
        (self._address,) = await gather({"actor rank 0": first.rendezvous.remote()})
        seed, collective_s = self._run.config.trainer.seed, self._run.deadlines.collective
        arguments = (self._address, self.settings, self.actor, self.algorithm, seed, collective_s)
        options = {"heals": self._outlive_groups, "to_be_restored": to_be_restored}
        await self.all(lambda worker: worker.setup.remote(*arguments, **options))
        self.infos, self._relays = await self.all(lambda worker: worker.info.remote()), set()

    async def join_relays(self, members: tuple[int, ...]) -> None:
        """Make the group in which buckets of weights go to other hosts, once."""
        if members not in self._relays:
            self._relays.add(members)
            await self.all(lambda worker: worker.join_relays.remote([members]))

    async def all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Call every rank, and return the results in order. Raises DaroError: of the first call that fails."""
        if not self.workers:
            raise WorkerError("the ranks were not started, or have been dismissed")
        return await gather({name: call(worker) async for name, worker in yielding_to_event_loop(self.workers.items())})

    async def with_shards(self, shards: Sequence[Shard], call: Callable[[Any, Shard], Any]) -> dict[str, Any]:
        """Call `call(worker, shard)` for every rank, with the shard of its data-parallel rank; return references by the
        rank's name."""
        return {
            name: call(worker, shards[info.data_parallel])
            async for (name, worker), info in yielding_to_event_loop(zip(self.workers.items(), self.infos, strict=True))
        }

    async def column(self, batch: Sequences, shards: Sequence[Shard], calls: Mapping[str, Any]) -> np.ndarray:
        """Return float32 [R] of the whole batch, joined from what the ranks return for their shards."""
        answers = await gather(calls)
        parts = {info.data_parallel: answer for info, answer in zip(self.infos, answers, strict=True) if info.reports}
        return await asyncio.to_thread(joined_column, batch, shards, parts)

    def dismiss(self) -> None:
        """End the processes. May be called twice."""
        self.workers.dismiss()
        self._forget_meeting_place()

    def _forget_meeting_place(self) -> None:
        if self._address.startswith("file://"):
            shutil.rmtree(Path(self._address.removeprefix("file://")).parent, ignore_errors=True)
