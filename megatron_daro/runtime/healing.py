"""Ranks that die are replaced, and all ranks go back to the newest snapshot that every one of them has.

After each optimizer step every rank copies its state to host memory (actor/snapshot.py) and sends a copy to its peer, a
rank of another node where there is one. The snapshot is committed once every rank and its peer have it. The next step
waits for that, so a death costs at most one step. When a rank dies:

    abort     living ranks give up the collective calls in which they wait for it
    leave     living ranks leave their process groups without exiting, and report which snapshots they keep
    replace   a new process takes the place of each dead one and gets its state from processes that keep a copy; all
              ranks join new groups, build the policy anew and restore it from the snapshot
    repeat    the step after the snapshot, if there was one, is repeated from its batch

If healing fails, the run ends with the cause, as it would without healing, and can resume from a checkpoint. A frozen
process is killed, and counts as dead from then on.

healing_states.py decides how to react to a loss; this file carries it out. Once a run trains, PolicyGroup calls
`Healing` with its lock held, except for `close` and the watch over the processes (`note_death`, `end_hung`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megatron_daro.deadlines import mark_as_seen
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import healing_states as states
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.frozen_workers import end_frozen
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.ray_calls import gather
from megatron_daro.runtime.snapshot_keepers import Keeps, affordable, kinds_sent, peers_of
from megatron_daro.runtime.snapshot_store import SnapshotSerials
from megatron_daro.types import MemoryKind, StepBatch

T = TypeVar("T")
_GONE = object()


@dataclass(frozen=True, slots=True)
class HealingLimits:
    """memory_gib: limit of snapshots on each node; None: half of the free memory. per_hour: how many ranks may be
    replaced within an hour. hung_s: a process that neither answers nor uses the CPU for so long is killed."""

    memory_gib: float | None
    per_hour: int
    hung_s: float


class Healing:
    """The snapshots of one policy, and the replacement of its ranks."""

    def __init__(
        self,
        ranks: Ranks,
        repeat: Callable[[StepBatch, int], Awaitable[object]],
        limits: HealingLimits | None,
        run: RunContext,
    ) -> None:
        """Do nothing yet. Args: repeat: repeats an optimizer step. limits: None: no rank is ever replaced."""
        self._ranks, self._repeat, self._limits = ranks, repeat, limits
        self._deadlines, self._warn = run.deadlines, run.progress.warn
        self.keeps: Keeps = "none"
        """Who keeps snapshots. As long as nobody does, no rank is replaced, and calls only pass errors on."""
        self.remark = ""
        """What users should know: whether lost ranks are replaced; empty without `limits`."""
        self.replacements = 0
        """How often lost ranks were replaced; ranks replaced together count once."""
        names = "recovery/ranks_replaced", "recovery/steps_repeated", "recovery/total_s"
        self.counts = dict.fromkeys(names if limits else (), 0.0)
        """Metrics, since the run began or was resumed; empty without `limits`."""
        self._peers: list[int | None] = []
        self._sent: list[tuple[MemoryKind, ...]] = []
        self._pending: asyncio.Task[None] | None = None  # the snapshot that is being taken
        self.state = states.State(limits.per_hour if limits else 0)

    async def take_first_snapshot(self) -> None:
        """Decide which ranks keep snapshots, as memory allows, and take the first one. The ranks have built their
        policy."""
        if self._limits is None:
            return
        answers = await self._ranks.all(lambda worker: worker.snapshot_bytes.remote())
        sizes, free = [size for size, _ in answers], [available for _, available in answers]
        infos = self._ranks.infos
        self.keeps, taken, allowed = affordable(infos, sizes, free, self._limits.memory_gib)
        self._choose_peers()
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

    def _choose_peers(self) -> None:
        infos = self._ranks.infos
        self._peers, self._sent = peers_of(infos), kinds_sent(infos, self.keeps)

    def note_death(self, name: str, worker: ActorHandle) -> None:
        """Note that a process is gone, and have the others stop waiting for it; do nothing if it was replaced
        already."""
        workers = self._ranks.workers
        if workers.get(name) is worker:
            self._lose([list(workers).index(name)])

    async def end_hung(self) -> None:
        """For ever, kill processes that are frozen; their deaths are then noticed like any other."""

        def looked_at() -> Mapping[str, ActorHandle]:
            return {} if self._ranks.workers.dismissed else self._ranks.workers

        assert self._limits is not None, "who replaces nobody kills nobody"
        await end_frozen(looked_at, lambda rank: rank.snapshots.remote(), hung_s=self._limits.hung_s, warn=self._warn)

    async def retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of collective work. If ranks are lost meanwhile, heal and repeat it, even if it returned: a
        call that is aborted may return an incomplete result.

        Raises:
            DaroError: the work failed although no rank died, or healing failed.
        """
        while True:
            await self.heal()
            try:
                result = await work()
            except WorkerError:
                if not await self.lost_ranks():
                    raise
            else:
                if not self.state.lost:
                    return result

    async def lost_ranks(self) -> bool:
        """Whether processes are gone and not replaced yet. Asks all of them."""
        if self.keeps == "none":
            return False
        await self._look()
        return bool(self.state.lost)

    async def finish_snapshot(self) -> None:
        """Wait until the snapshot under way is committed, so that a death during the next step costs only that step."""
        await self.retried(self._finish_pending)

    async def trained(self, batch: StepBatch, step: int) -> None:
        """Record a finished step, and begin a snapshot of the ranks' present state."""
        if self.keeps == "none":
            return
        self._take(states.Trained(batch, step))
        await self.retried(self._snapshot_if_needed)

    async def _snapshot_if_needed(self) -> None:
        """Begin a snapshot, unless healing has already taken one of this state."""
        if self.state.steps:
            await self._start_snapshot()

    async def snapshot_now(self) -> None:
        """Take a snapshot and wait until it is committed; earlier steps are then no longer repeated."""
        if self.keeps == "none":
            return
        await self._finish_pending()
        await self._start_snapshot()
        await self._finish_pending(needed=True)

    async def _start_snapshot(self) -> None:
        self._take(states.SnapshotBegun())
        serial, keep = self.state.begun, self.state.committed or None
        await self._ranks.all(lambda worker: worker.start_snapshot.remote(serial, keep))
        self._pending = asyncio.ensure_future(self._commit(serial, keep))

    async def _commit(self, serial: int, keep: int | None) -> None:
        """Wait until every rank has the snapshot and its peer a copy, then commit it."""
        workers = list(self._ranks.workers.values())
        calls = {}
        for rank, (name, worker) in enumerate(self._ranks.workers.items()):
            peer = self._peers[rank]
            to = None if peer is None else workers[peer]
            calls[name] = worker.finish_snapshot.remote(serial, keep, to, self._sent[rank])
        await gather(calls)
        self._take(states.SnapshotCommitted(serial))

    async def _finish_pending(self, *, needed: bool = False) -> None:
        """Wait until the pending snapshot, if any, is committed. Its failure is ignored if ranks were lost, since
        healing takes another one. needed: raise even then."""
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
        """Replace every rank that is known to be dead; do nothing if none is.

        Raises:
            DaroError: why they cannot be replaced. The run ends; later calls raise the same error.
        """
        started = time.perf_counter()
        while action := self._take(states.Stopped()):
            lost = ", ".join(map(self._name, sorted(self.state.lost)))
            try:
                await self._deadlines.within("heal", self._round(action, started), what=lost)
            except Exception as error:
                if isinstance(error, WorkerError):
                    await self._look()
                self._take(states.Failed(error))
        if self.state.failure:
            raise self.state.failure

    async def _round(self, action: states.Action | None, started: float) -> None:
        """Carry out actions until the ranks can train again, or healing has failed. started: when healing began."""
        while action is not None:
            match action:
                case states.Leave():
                    event: states.Event = await self._leave()
                case states.Replace():
                    event = await self._replace(action)
                case states.Repeat(steps):
                    event = await self._repeat_steps(steps)
                case states.Report(ranks, num_steps):
                    self._report(ranks, num_steps, time.perf_counter() - started)
                    return
            action = self._take(event)

    def _take(self, event: states.Event) -> states.Action | None:
        self.state, action = states.after(self.state, event)
        return action

    def _lose(self, ranks: Iterable[int]) -> None:
        if self._take(states.Lost(frozenset(ranks))):
            for rank, worker in enumerate(self._ranks.workers.values()):
                if rank not in self.state.lost:
                    worker.abort.remote()

    async def _leave(self) -> states.Event:
        """Have living ranks leave their groups."""
        if self._pending is not None:
            await asyncio.wait({self._pending})  # it succeeds, fails because of a dead rank, or is cancelled by `close`
            mark_as_seen(self._pending)
            self._pending = None
        await self._look()
        await self._answers(lambda worker: worker.abort.remote(), self._deadlines.leave)
        await self._answers(lambda worker: worker.leave.remote(), self._deadlines.leave)
        serials = await self._look()  # by now the snapshots that were being taken are whole
        workers = self._ranks.workers
        if workers.dismissed:
            return states.Hopeless("a rank died while the run ended")
        return states.Left(serials, self._ranks.infos, list(workers.values()), time.monotonic())

    async def _replace(self, plan: states.Replace) -> states.Event:
        """Start new processes, give them their states, and have all ranks join new groups and restore the snapshot. The
        last committed snapshot is kept until the next one is whole: some peers may lack a copy of a newer one."""
        workers, names = self._ranks.workers, list(map(self._name, plan.ranks))
        for rank, name in zip(plan.ranks, names, strict=True):
            ray.kill(workers[name], no_restart=True)
            workers[name] = self._ranks.start_process(rank)
        limit_s = self._deadlines.placement + self._deadlines.workers_start
        try:
            async with asyncio.timeout(limit_s):
                await self._look()
        except TimeoutError:
            return states.Hopeless(
                f"{', '.join(names)} died, and no new process answered within {limit_s:g} s: no node has room, or it "
                "starts too slowly"
            )
        self._check_all_live()
        twice = self.keeps == "both"
        await gather({name: workers[name].keep_own_twice.remote(twice) for name in names})
        await gather({name: workers[name].load_code.remote() for name in names})
        adopting = {self._name(rank): sources for rank, sources in plan.sources.items()}
        await gather({name: workers[name].adopt.remote(plan.snapshot, some) for name, some in adopting.items()})
        await self._look()
        self._check_all_live()  # ranks that join groups with a dead one can neither go on nor leave
        await self._ranks.join()
        self._choose_peers()
        await self._ranks.all(lambda worker: worker.restore.remote(plan.snapshot))
        return states.Restored(plan.snapshot)

    async def _repeat_steps(self, steps: tuple[states.DoneStep, ...]) -> states.Event:
        for _, batch, step in steps:
            await self._repeat(batch, step)
        await self.snapshot_now()
        kept_by: dict[str, list[int]] = {name: [] for name in self._ranks.workers}
        for rank, peer in enumerate(self._peers):
            if peer is not None:
                kept_by[self._name(peer)].append(rank)
        await gather({name: self._ranks.workers[name].keep_copies.remote(ranks) for name, ranks in kept_by.items()})
        return states.Repeated(len(steps))

    def _report(self, ranks: tuple[int, ...], num_steps: int, seconds: float) -> None:
        self.replacements += 1
        self.counts["recovery/ranks_replaced"] += len(ranks)
        self.counts["recovery/steps_repeated"] += num_steps
        self.counts["recovery/total_s"] += seconds
        what = ", ".join(f"rank {rank}" for rank in dict.fromkeys(ranks))
        self._warn(f"{what} died and was replaced in {seconds:.1f} s; steps repeated: {num_steps}")

    async def _look(self) -> dict[int, SnapshotSerials]:
        """Return the snapshots that living ranks keep. Waits for slow ranks; `end_hung` kills frozen ones meanwhile."""
        return await self._answers(lambda worker: worker.snapshots.remote())

    async def _answers(self, call: Callable[[ActorHandle], Any], limit_s: float | None = None) -> dict[int, Any]:
        """Return the answers of living ranks; those that are gone, or do not answer in time, count as lost."""
        workers = {r: worker for r, worker in enumerate(self._ranks.workers.values()) if r not in self.state.lost}
        answers = await asyncio.gather(*(_answer(call(worker), limit_s) for worker in workers.values()))
        answered = {rank: answer for rank, answer in zip(workers, answers, strict=True) if answer is not _GONE}
        self._lose(workers.keys() - answered.keys())
        return {rank: answer for rank, answer in answered.items() if rank not in self.state.lost}

    def _check_all_live(self) -> None:
        if self.state.lost:
            raise WorkerError(f"{', '.join(map(self._name, sorted(self.state.lost)))} died meanwhile")

    def _name(self, rank: int) -> str:
        return list(self._ranks.workers)[rank]


async def _answer(call: Awaitable[Any], limit_s: float | None) -> Any:
    """Return a process's answer; _GONE if it is gone, or does not answer in time."""
    try:
        async with asyncio.timeout(limit_s):  # `wait_for` of Python 3.11 may lose a cancellation that meets the answer
            return await call
    except (RayError, TimeoutError):
        return _GONE
