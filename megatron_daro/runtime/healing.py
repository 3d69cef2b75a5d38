"""Ranks that die are replaced, and all go back to the newest snapshot that every rank has.

After each optimizer step the ranks take a snapshot (actor/snapshot.py) and each sends a copy to its peer, a rank of
another node where there is one. The snapshot counts once all of that is done: `_committed`. When a rank dies, living
ranks stay processes: they leave their process groups, get a new process in the place of the dead one, build the policy
around new groups, and fill it from the snapshot. The step that came after it, if one did, is repeated from its batch:
the next step begins when the snapshot before it counts. Whatever cannot be healed ends the run with the cause, as
without all this: it resumes from a checkpoint. A process that is frozen is killed, and is a dead one from then on.

PolicyGroup calls this with its lock held; the watch over the processes is the only other caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megatron_daro.errors import WorkerError
from megatron_daro.rollout.deadlines import mark_as_seen
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.kept_states import Kept, Source
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.snapshot_keepers import Keeps, affordable, kinds_sent, peers_of, sources_of
from megatron_daro.runtime.supervisor import end_frozen, gather
from megatron_daro.types import MemoryKind, TrainBatch

T = TypeVar("T")
_HOUR_S = 3600.0
_LEAVE_S = 120.0
"""Until a rank has aborted its collective calls, and then until it has left its groups."""


@dataclass(frozen=True, slots=True)
class HealingLimits:
    """memory_gib: of each node, for snapshots; None: half of what is free. per_hour: most ranks that are replaced.
    hung_s: until a process that neither answers nor uses the CPU is killed."""

    memory_gib: float | None
    per_hour: int
    hung_s: float


class Healing:
    """The snapshots of one policy, and the replacement of its ranks."""

    def __init__(
        self,
        ranks: Ranks,
        repeat: Callable[[TrainBatch, int], Awaitable[object]],
        limits: HealingLimits,
        run: RunContext,
    ) -> None:
        """Do nothing yet. Args: repeat: does an optimizer step once more."""
        self._ranks, self._repeat, self._limits = ranks, repeat, limits
        self._deadlines, self._warn = run.deadlines, run.progress.warn
        self.keeps: Keeps = "none"
        self.remark = ""
        self.epoch = 0
        """How often ranks were replaced."""
        self.counts = dict.fromkeys(("recovery/ranks_replaced", "recovery/steps_repeated", "recovery/total_s"), 0.0)
        """Metrics, since the run began or was resumed."""
        self._peers: list[int | None] = []
        self._sent: list[tuple[MemoryKind, ...]] = []
        self._serial = 0
        self._committed: int | None = None
        self._pending: asyncio.Task[None] | None = None
        # Steps since the snapshot that counts: number of the first snapshot that has it -> batch and step.
        self._updates: list[tuple[int, TrainBatch, int]] = []
        self._dead: set[str] = set()
        self._starting: set[str] = set()
        self._under_way = False
        self._failure: Exception | None = None
        self._replaced: deque[float] = deque()

    async def prepare(self) -> None:
        """Settle who keeps what, and take the first snapshot. The ranks have their policy."""
        answers = await self._ranks.all(lambda worker: worker.snapshot_bytes.remote())
        sizes, free = [size for size, _ in answers], [available for _, available in answers]
        infos = self._ranks.infos
        self.keeps, taken, allowed = affordable(infos, sizes, free, self._limits.memory_gib)
        self._peers, self._sent = peers_of([info.host for info in infos]), kinds_sent(infos, self.keeps)
        memory = f"{taken:.2g} GiB of a node's memory (up to {allowed:.2g}: trainer.snapshot_gib)"
        self.remark = {
            "both": f"a lost rank is replaced, and at most one step repeated; snapshots take {memory}",
            "peer": "a lost rank is replaced, and at most one step repeated, unless its peer is lost too or it dies "
            f"while a snapshot is taken: memory is short, so that only peers keep snapshots, in {memory}",
            "none": "a lost rank ends the run, and --resume goes back to the newest checkpoint: "
            + ("there is one rank only" if len(infos) == 1 else f"snapshots would take {memory}"),
        }[self.keeps]
        if self.keeps != "none":
            await self._ranks.all(lambda worker: worker.keep_own_twice.remote(self.keeps == "both"))
            await self.snapshot_now()

    def watched(self, name: str, worker: ActorHandle) -> None:
        """Have the others stop waiting for a process of the group that is gone."""
        if self._ranks.workers.get(name) is not worker:
            return  # it was replaced
        self._dead.add(name)
        if not self._under_way:
            for other, living in self._ranks.workers.items():
                if other not in self._dead:
                    living.abort.remote()

    async def end_hung(self) -> None:
        """For ever: kill each process that is frozen. Its death is noticed then as any other is."""

        def looked_at() -> Mapping[str, ActorHandle]:
            ranks = self._ranks.workers
            return {} if ranks.dismissed else {n: w for n, w in ranks.items() if n not in self._starting}

        # Those that are being started have a deadline of their own.
        await end_frozen(looked_at, lambda rank: rank.kept.remote(), hung_s=self._limits.hung_s, warn=self._warn)

    async def repeated(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what collective work gives; where ranks are lost meanwhile, heal and do it again.

        Raises:
            WorkerError: no rank died, or it cannot be healed.
        """
        while True:
            await self.heal()
            try:
                return await work()
            except WorkerError:
                if not await self.lost_ranks():
                    raise

    async def lost_ranks(self) -> bool:
        """Whether processes are gone, and not replaced yet. Looks at all of them."""
        if self.keeps == "none":
            return False
        await self._look()
        return bool(self._dead)

    async def _look(self) -> dict[int, Kept]:
        """Return what living processes keep, by rank. Waits for slow ones; frozen ones `end_hung` kills meanwhile."""
        calls = {name: asyncio.ensure_future(_answer(w.kept.remote(), None)) for name, w in self._ranks.workers.items()}
        kept = {}
        for rank, (name, call) in enumerate(calls.items()):
            answer = await call
            if answer is None:
                self._dead.add(name)
            elif name not in self._dead:
                kept[rank] = answer
        return kept

    async def settle(self) -> None:
        """Wait until the snapshot that is under way counts, so that a death costs the next step alone."""
        if self.keeps != "none":
            await self.repeated(self._finish_pending)

    async def trained(self, batch: TrainBatch, step: int) -> None:
        """Take note of a step that was done, and begin a snapshot of what the ranks are now."""
        if self.keeps == "none":
            return
        self._updates.append((self._serial + 1, batch, step))
        await self.repeated(self._snapshot_if_needed)

    async def _snapshot_if_needed(self) -> None:
        """Begin a snapshot, unless healing took one of the same state."""
        if not self._updates:
            return
        await self._start_snapshot()

    async def snapshot_now(self) -> None:
        """Take a snapshot and wait until it counts; what came before is not repeated any more."""
        if self.keeps == "none":
            return
        await self._finish_pending()
        await self._start_snapshot()
        await self._finish_pending(needed=True)

    async def _start_snapshot(self) -> None:
        self._serial += 1
        serial, keep = self._serial, self._committed
        await self._ranks.all(lambda worker: worker.start_snapshot.remote(serial, keep))
        self._pending = asyncio.ensure_future(self._commit(serial, keep))

    async def _commit(self, serial: int, keep: int | None) -> None:
        """Wait until every rank has the snapshot, and its peer a copy: it counts from now on."""
        workers = list(self._ranks.workers.values())
        calls = {}
        for rank, (name, worker) in enumerate(self._ranks.workers.items()):
            peer = self._peers[rank]
            to = None if peer is None else workers[peer]
            calls[name] = worker.finish_snapshot.remote(serial, keep, to, self._sent[rank])
        await gather(calls)
        self._committed = serial
        self._updates = [update for update in self._updates if update[0] > serial]

    async def _finish_pending(self, *, needed: bool = False) -> None:
        """Wait until the snapshot before counts, or failed; the one that is taken next will do. needed: raise that."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        await asyncio.wait({pending})
        error = pending.exception()
        if isinstance(error, WorkerError) and (needed or not await self.lost_ranks()):
            raise error
        if error is not None and not isinstance(error, WorkerError):
            raise error

    def close(self) -> None:
        """Give up the snapshot that is under way. May be called twice."""
        if self._pending is not None:
            self._pending.cancel()

    async def heal(self) -> None:
        """Replace every rank that is known to be dead; nothing where none is.

        Raises:
            WorkerError: that is not possible, and why; the run ends, and whoever asks again is told the same.
        """
        if self._failure:
            raise self._failure
        started, died = time.perf_counter(), list[int]()
        while self._dead:
            self._under_way = True
            try:
                await self._deadlines.within("heal", self._replace(started, died), what=", ".join(sorted(self._dead)))
            except Exception as error:
                may_heal = isinstance(error, WorkerError) and not isinstance(error, _FinalError)
                if not may_heal or not await self.lost_ranks():
                    self._failure = error
                    raise
            finally:
                self._under_way = False

    async def _replace(self, started: float, died: list[int]) -> None:
        """Replace the dead and go back to the snapshot. started: when this began. died: ranks so far, those of rounds
        that failed, for another one died in them, included."""
        names = list(self._ranks.workers)
        if self._pending is not None:
            await asyncio.wait({self._pending})  # it counts, or its failure is that of a dead rank, or the run closed
            mark_as_seen(self._pending)
            self._pending = None
        kept = await self._living()
        if self._ranks.workers.dismissed:
            raise _FinalError("a rank died while the run ended")
        dead = sorted(names.index(name) for name in self._dead)
        self._check_limit(dead)
        for rank in dead:
            ray.kill(self._ranks.workers[names[rank]], no_restart=True)
            self._ranks.workers[names[rank]] = self._ranks.start_process(rank)
        await self._answered_first(names, dead)
        died += dead
        repeated = await self._go_back(kept)
        self.epoch += 1
        seconds, what = time.perf_counter() - started, ", ".join(f"rank {rank}" for rank in dict.fromkeys(died))
        self.counts["recovery/ranks_replaced"] += len(died)
        self.counts["recovery/steps_repeated"] += repeated
        self.counts["recovery/total_s"] += seconds
        self._warn(f"{what} died and was replaced in {seconds:.1f} s; steps repeated: {repeated}")

    async def _living(self) -> dict[int, Kept]:
        """Return what living processes keep when all have left their groups. Raises WorkerError."""
        workers = dict(self._ranks.workers)
        names = list(workers)
        living = {rank: workers[names[rank]] for rank in await self._look()}
        await self._each(names, {rank: worker.abort.remote() for rank, worker in living.items()}, _LEAVE_S)
        await self._each(names, {rank: worker.leave.remote() for rank, worker in living.items()}, _LEAVE_S)
        return await self._look()  # by now the snapshots that were being taken are whole

    async def _answered_first(self, names: Sequence[str], started: Sequence[int]) -> None:
        """Wait until new processes answer. Raises WorkerError: one died, found no place, or is frozen."""
        limit_s = self._deadlines.placement + self._deadlines.workers_start
        self._starting = {names[rank] for rank in started}
        self._dead -= self._starting
        calls = {rank: self._ranks.workers[names[rank]].kept.remote() for rank in started}
        try:
            await self._each(names, calls, limit_s)
        finally:
            self._starting = set()
        if failed := sorted(self._dead):
            raise WorkerError(f"{', '.join(failed)} did not start within {limit_s:g} s")

    async def _each(self, names: Sequence[str], calls: Mapping[int, Any], limit_s: float) -> None:
        """Wait for calls to living ranks; those that do not answer in time count as dead."""
        tasks = {rank: asyncio.ensure_future(_answer(call, limit_s, default=True)) for rank, call in calls.items()}
        for rank, task in tasks.items():
            if await task is None:
                self._dead.add(names[rank])

    def _check_limit(self, dead: Sequence[int]) -> None:
        now = time.monotonic()
        while self._replaced and now - self._replaced[0] > _HOUR_S:
            self._replaced.popleft()
        if len(self._replaced) + len(dead) > self._limits.per_hour:
            raise _FinalError(
                f"rank {', '.join(map(str, dead))} died, and {len(self._replaced)} ranks were replaced within the last "
                f"hour; allowed: {self._limits.per_hour} (trainer.max_replacements)"
            )
        self._replaced.extend([now] * len(dead))

    async def _go_back(self, kept: Mapping[int, Kept]) -> int:
        """Bring all ranks to the newest snapshot that all have, and repeat what came after it. Returns how many
        steps."""
        serial = await self._back_to_snapshot(kept)
        updates = [update for update in self._updates if update[0] > serial]
        for _, batch, step in updates:
            await self._repeat(batch, step)
        await self.snapshot_now()
        return len(updates)

    async def _back_to_snapshot(self, kept: Mapping[int, Kept]) -> int:
        """Bring all ranks to the newest snapshot that all have; returns its number. Until the next one is whole, the
        one that counted before does: of a newer one some peers may have no copy."""
        workers, names = list(self._ranks.workers.values()), list(self._ranks.workers)
        serial, sources = self._newest(kept, workers)
        twice = self.keeps == "both"
        lost = [rank for rank in range(len(workers)) if rank not in kept]
        await gather({names[rank]: workers[rank].keep_own_twice.remote(twice) for rank in lost})
        await gather({names[rank]: workers[rank].load_code.remote() for rank in lost})
        await gather({names[rank]: workers[rank].adopt.remote(serial, parts) for rank, parts in sources.items()})
        if await self.lost_ranks():  # who meets without them can neither go on nor leave
            raise WorkerError(f"{', '.join(sorted(self._dead))} died meanwhile")
        await self._ranks.join()
        self._peers = peers_of([info.host for info in self._ranks.infos])
        self._sent = kinds_sent(self._ranks.infos, self.keeps)
        await self._ranks.all(lambda worker: worker.restore.remote(serial))
        return serial

    def _newest(self, kept: Mapping[int, Kept], workers: Sequence[ActorHandle]) -> tuple[int, dict[int, list[Source]]]:
        """Return the newest snapshot that every rank has or gets, which may be one whose copies were just sealed, and
        from where. Raises WorkerError: there is none."""
        assert self._committed is not None, "prepare comes first"
        missing = 0
        for serial in sorted({self._serial, self._committed}, reverse=True):
            sources = sources_of(serial, kept, self._ranks.infos, workers)
            if not isinstance(sources, int):
                return serial, sources
            missing = sources
        raise _FinalError(
            f"rank {missing} and the rank that kept its copy (rank {self._peers[missing]}) died: nobody has the "
            "state of that rank any more"
        )


class _FinalError(WorkerError):
    """A loss that cannot be healed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. --resume goes on from the newest checkpoint")


async def _answer(call: Awaitable[T], limit_s: float | None, default: T | None = None) -> T | None:
    """Return what a process answers; None where it is gone, or does not answer in time. default: in place of None that
    it answered."""
    try:
        async with asyncio.timeout(limit_s):  # `wait_for` of Python 3.11 loses a cancellation that meets the answer
            answer = await call
    except (RayError, TimeoutError):
        return None
    return default if answer is None else answer
