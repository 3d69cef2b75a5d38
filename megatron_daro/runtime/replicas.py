"""With which data-parallel replicas the policy goes on while ranks are missing, and how its state gets there.

Healing.py calls this. `ReplicaPlan` says which processes are the ranks when some have no place, `Aside` has the others,
and `MovedState` the state of the ranks as they were, written from their snapshots, until the new ones have snapshots of
their own. A replica is whole or takes no part; the others keep their order, which is Megatron's in the smaller world as
well (TP fastest, then CP, DP, PP). Rejects a world whose experts would not split over its ranks.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from megatron_daro.config.actor import ActorSection
from megatron_daro.convert.daro_format import StoredShard, write_index
from megatron_daro.runtime.kept_states import Source
from megatron_daro.runtime.supervisor import gather
from megatron_daro.runtime.workers import Place


def name_of(number: int) -> str:
    """Return what the process is called that was started for this rank."""
    return f"actor rank {number}"


def number_of(name: str) -> int:
    """Return the rank that a process of this name was started for."""
    return int(name.rpartition(" ")[2])


class ReplicaPlan:
    """Which processes belong to which replica, for the whole run."""

    def __init__(self, actor: ActorSection, names: Sequence[str], places: Sequence[Place]) -> None:
        """Args: actor: as configured. names, places: of all ranks, in order."""
        self._actor = actor
        self._replica = {name: place.data_parallel for name, place in zip(names, places, strict=True)}

    @property
    def most(self) -> int:
        """How many replicas there are when nothing is missing."""
        return self._actor.data_parallel

    def names(self, gone: Collection[str]) -> list[str]:
        """Return the processes of the most replicas that can train without these, in the order of their ranks. Empty:
        none can."""
        whole = sorted(set(self._replica.values()) - {self._replica[name] for name in gone})
        while whole and self._stage_size(len(whole)) % self._actor.expert_group_size:
            whole.pop()
        return [name for name, replica in self._replica.items() if replica in whole]

    def replicas(self, names: Collection[str]) -> int:
        """Return how many replicas these processes are."""
        return len({self._replica[name] for name in names})

    def _stage_size(self, replicas: int) -> int:
        return self._actor.tensor_parallel * self._actor.context_parallel * replicas


class Aside:
    """Processes that take no part: living ones of replicas that miss a rank, and new ones that have no place yet."""

    def __init__(self, start_process: Callable[[int], ActorHandle]) -> None:
        """Args: start_process: for a rank."""
        self._start_process = start_process
        self.workers: dict[str, ActorHandle] = {}
        self._awaited: dict[str, asyncio.Future[Any]] = {}

    def wait_for(self, name: str, answer: asyncio.Future[Any]) -> None:
        """Take in that a process has no place until this call of it is answered."""
        if name in self._awaited:
            self._awaited[name].cancel()  # of one that was given up
        self._awaited[name] = answer

    def back(self) -> set[str]:
        """Return the processes that have answered since this was last asked; those that died are started again."""
        answered = {name for name, call in self._awaited.items() if call.done() and not call.cancelled()}
        died = {name for name in answered & self.workers.keys() if self._awaited[name].exception()}
        for name in died:
            ray.kill(self.workers[name], no_restart=True)
            self.workers[name] = self._start_process(number_of(name))
        asked = {name: call for name, call in self._awaited.items() if name in self.workers and name not in answered}
        for name, worker in self.workers.items():
            if name not in asked:
                asked[name] = asyncio.ensure_future(worker.kept.remote())
        self._awaited = asked
        return (answered - died) & self.workers.keys()

    def close(self) -> None:
        """End all of them."""
        for call in self._awaited.values():
            call.cancel()
        for worker in self.workers.values():
            ray.kill(worker, no_restart=True)
        self.workers.clear()


class MovedState:
    """The files of one state, in a folder that every node sees."""

    def __init__(self, folder: Path | None) -> None:
        """Args: folder: of the run, for these files alone; None: there will be none."""
        self._folder = folder and folder.absolute()
        self.directory: Path | None = None
        """Where the newest state is; None while snapshots have it."""

    async def write(
        self, serial: int, workers: Mapping[str, ActorHandle], sources: Mapping[int, Sequence[Source]]
    ) -> None:
        """Have the ranks write their snapshots, and those of lost ranks be written where a copy is.

        Args:
            serial: of the snapshot. workers: of all ranks in order, the lost ones too. sources: of lost ranks.

        Raises:
            WorkerError: one was lost meanwhile. CheckpointError: the disk refused.
        """
        assert self._folder, "HealingLimits.folder comes with fewer_after_s"
        directory = self._folder / f"snapshot_{serial}"
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        calls: dict[str, Any] = {}
        for rank, (name, own) in enumerate(workers.items()):
            parts = sources.get(rank, ())
            writer = parts[-1].worker if parts else own  # who has the copy
            assert writer, "sources are of other processes"
            parts = [replace(part, worker=None) if part.worker is writer else part for part in parts]
            calls[name] = writer.write_snapshot.remote(serial, rank, parts, directory)
        shards: list[dict[str, list[StoredShard]]] = await gather(calls)
        await asyncio.to_thread(_write_indices, directory, shards)
        self.directory = directory

    def clear(self) -> None:
        """Remove the files: others have the state now."""
        self.directory = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _write_indices(directory: Path, shards: Sequence[Mapping[str, Sequence[StoredShard]]]) -> None:
    for folder in shards[0]:
        write_index(directory / folder, [shard for rank in shards for shard in rank[folder]])
