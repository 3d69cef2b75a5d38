"""One schedule of deaths against the real policy group, and the laws that hold after it.

The driver does what the controller does with a policy, in its order: prepare, train, weights to an engine that also
asks for them in between, checkpoints beside it (controller.py `_train_batch`, `_sync_weights`, `_checkpoint`).
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from run_configuration import run_context
from simulated_ranks import Cluster, Fault, unbroken
from virtual_loop import VirtualLoop, collecting_after_runs, run

from megatron_daro.config.actor import ActorSection
from megatron_daro.errors import DaroError, LostSaveError
from megatron_daro.runtime import frozen_workers, healing, policy_group
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.launch import supervised
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.ranks import Ranks
from megatron_daro.runtime.step_shards import Shard
from megatron_daro.sync.plan import SendPlan
from megatron_daro.sync.publish import WeightSync

DEADLINE_S = 40_000.0
"""Virtual seconds after which a schedule waits for ever: longer than all deadlines that a fault may run into."""
BATCHES = (101, 202, 303)


@dataclass
class Batch:
    """What the ranks get: a number, and the columns that PolicyGroup itself reads."""

    number: int
    rollout_logprobs_R: Any = None
    old_logprobs_R: Any = None
    response_lengths_N: Any = field(default_factory=lambda: np.ones(3, np.int64))
    opens_batch: bool = True


@dataclass(frozen=True)
class Schedule:
    """Drawn from a seed; see `draw`."""

    seed: int
    tensor: int
    data: int
    hosts: int
    keeps: str
    gloo: bool
    passes: bool
    shuffled: bool
    per_hour: int
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    """Small worlds, few steps, and faults that like to come together: most bugs need no more."""
    random = Random(seed)
    tensor, data = random.choice(((2, 1), (1, 2), (1, 2), (1, 2), (2, 2), (1, 3)))
    faults, at_s = list[Fault](), 0.0
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 2, 3, 4))):
        rank, how = random.randrange(tensor * data), "freezes" if random.random() < 0.15 else "dies"
        if random.random() < 0.3:
            faults.append(Fault(rank, how, call=random.randrange(1, 80)))
        else:
            close = at_s and random.random() < 0.6
            at_s += random.choice((0.02, 0.3, 4.0)) * random.random() if close else random.random() * 10.0
            faults.append(Fault(rank, how, at_s=at_s))
    return Schedule(
        seed=seed,
        tensor=tensor,
        data=data,
        hosts=random.choice((1, 2)),
        keeps=random.choice(("both", "both", "peer")),
        gloo=random.random() < 0.7,
        passes=random.random() < 0.3,
        shuffled=random.random() < 0.5,
        per_hour=random.choice((100, 100, 100, 2)),
        faults=tuple(faults),
    )


@contextmanager
def no_ray():
    """What the driver imports of Ray and of the model's files, for the time of many schedules."""
    with collecting_after_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "kill", lambda handle, no_restart: handle.process.die())
        patch.setattr(frozen_workers, "cpu_time", _cpu_time)
        patch.setattr(policy_group, "Ranks", SimulatedRanks)
        patch.setattr(policy_group, "read_model_shape", lambda path: None)
        patch.setattr(policy_group, "CostModel", SimpleNamespace(of_model=lambda shape: None))
        patch.setattr(policy_group, "_empty", lambda directory: None)
        yield patch


async def _cpu_time(handle: Any) -> float:
    """That of a process which works all the time, unless it is frozen."""
    return -1.0 if handle.process.frozen else handle.process.loop.time()


class SimulatedRanks(Ranks):
    """The real ones over these processes."""

    cluster: Cluster
    outcome: Outcome
    joining = False

    def start_process(self, rank: int) -> Any:
        return self.cluster.start(rank)

    async def join(self, *, to_be_restored: bool = True) -> None:
        self.joining = True
        if not all(handle.process.alive for handle in self.workers.values()):
            self.outcome.unhealable = True  # Ray had not told of it yet
        try:
            await super().join(to_be_restored=to_be_restored)
        finally:
            self.joining = False


class Group(PolicyGroup):
    """The real one; each data-parallel rank's shard is the batch itself."""

    ranks: SimulatedRanks

    def _shards(self, batch: Any) -> list[Shard]:
        return [Shard((i,), batch, ((0,),)) for i in range(self._actor.data_parallel)]


_PLAN = SendPlan(transport="distributed", targets=(), bucket_bytes=1, timeout_s=600.0)


class Engine:
    """Takes weights, and asks for them in between, as servers that were started again do."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.version = outcome, -1

    def when_back(self, call: Any) -> None:
        self.came_back = call

    def begin_update(self, version: int, only: str | None = None) -> Engine:
        self.updated = version
        return self

    async def prepare(self) -> SendPlan:
        return _PLAN

    async def install(self, report: Any) -> None:
        key, sent = self.outcome.cluster.sent
        assert (key, sent) == (self.outcome.expected(0, self.updated), self.updated), "weights of another step"
        self.version = self.updated

    async def probe(self) -> dict:
        return {}

    async def accept(self) -> dict:
        return {}

    def abandon(self, error: Exception) -> None:
        """Nothing to fence."""


@dataclass
class Outcome:
    """What a schedule did."""

    cluster: Cluster
    done: int = 0
    error: BaseException | None = None
    lost_saves: int = 0
    saved: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    group: Any = None
    ready: bool = False
    together: set[int] = field(default_factory=set)
    unhealable: bool = False

    def expected(self, rank: int, steps: int) -> int:
        """A rank's weights after so many steps."""
        return unbroken(rank % self.cluster.tensor, list(BATCHES[:steps]))


async def _drive(group: Group, outcome: Outcome) -> None:
    """The loop, as far as the policy sees it."""
    sync, saving = WeightSync(group, engine := Engine(outcome)), None
    extras = list[asyncio.Future]()
    try:
        await sync.publish(0)
        for step, number in enumerate(BATCHES, 1):
            prepared = await group.prepare(Batch(number, np.zeros(3)))
            result = await group.train(prepared, step)
            assert result.metrics["loss"] == outcome.expected(0, step), "metrics of another state"
            outcome.done = step
            if outcome.cluster.random.random() < 0.3:
                extras.append(asyncio.ensure_future(engine.came_back("server 1")))
            await sync.publish(step)
            assert engine.version == step
            if step % 2 == 0:
                captured = asyncio.Event()
                saving = asyncio.ensure_future(_save(group, outcome, step, captured))
                waiting = asyncio.ensure_future(captured.wait())
                await asyncio.wait({saving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        await saving
        await asyncio.gather(*extras)
    finally:
        await group.close()
        for task in filter(None, (saving, *extras)):
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _save(group: Group, outcome: Outcome, step: int, captured: asyncio.Event) -> None:
    directory = Path(f"/step_{step}")
    try:
        await group.save(directory, captured.set)
    except LostSaveError:
        outcome.lost_saves += 1
        return
    for rank in range(outcome.cluster.world):
        held = outcome.cluster.disk.get((directory, rank))
        assert held and held[:2] == (step, outcome.expected(rank, step)), f"a checkpoint without rank {rank}: {held}"
    outcome.saved.append(step)


async def _run(group: Group, outcome: Outcome) -> None:
    cluster = outcome.cluster
    await group.start()
    outcome.ready = True
    cluster.arm()
    try:
        await supervised(_drive(group, outcome), [group.watch_and_heal()])
    except DaroError as error:
        outcome.error = error


def simulate(schedule: Schedule) -> Outcome:
    """Run a schedule, and check its laws. Raises AssertionError: one is broken."""
    random = Random(schedule.seed + 1)
    loop = VirtualLoop(random, deadline_s=DEADLINE_S, shuffled=schedule.shuffled)
    free = {"both": 10**6, "peer": 2 * _PEERS_ALONE[schedule.tensor * schedule.data, schedule.hosts]}[schedule.keeps]
    cluster = Cluster(
        loop,
        tensor=schedule.tensor,
        data=schedule.data,
        hosts=schedule.hosts,
        free=free,
        gloo=schedule.gloo,
        faults=list(schedule.faults),
    )
    outcome = Outcome(cluster)
    actor = _actor(schedule.data, schedule.tensor)
    names = ("old_logprobs",) if schedule.passes else ()
    algorithm = SimpleNamespace(passes=lambda columns: names, old_logprobs="recompute")
    placement = SimpleNamespace(take_gpus=lambda gpus: None, has_gpus=False)
    group = Group(
        run_context(warn=outcome.warnings.append, actor=actor),
        SimpleNamespace(model_path=Path("/")),
        algorithm,
        placement,
        healing=HealingLimits(None, schedule.per_hour, hung_s=60.0),
    )
    group.ranks.cluster, group.ranks.outcome, outcome.group = cluster, outcome, group
    cluster.on_death = lambda process: _note_death(outcome, process)
    with pytest.MonkeyPatch.context() as patch:
        for module in (healing, policy_group, frozen_workers):
            if hasattr(module, "time"):
                patch.setattr(module, "time", SimpleNamespace(perf_counter=loop.time, monotonic=loop.time))
        run(loop, _run(group, outcome))
    _check(schedule, outcome)
    return outcome


@cache
def _actor(data: int, tensor: int) -> ActorSection:
    return ActorSection(data_parallel=data, tensor_parallel=tensor)


# Bytes that peers' copies take on the fullest host, by (ranks, hosts): one own snapshot of 16, two of a peer.
_PEERS_ALONE = {(2, 1): 96, (2, 2): 48, (3, 1): 144, (3, 2): 112, (4, 1): 192, (4, 2): 96}


def healing_of(group: PolicyGroup) -> SimpleNamespace:
    """What the laws must know of the inside of healing, all in one place. busy: somebody is being replaced."""
    heal = group._healing
    return SimpleNamespace(
        keeps=heal.keeps,
        peers=heal._peers,
        committed=heal.state.committed,
        newest=heal.state.begun,
        busy=bool(heal.state.phase != "training" or heal.state.lost),
        under_way=heal.state.phase != "training",
    )


def _note_death(outcome: Outcome, process: Any) -> None:
    """Before a process dies: what may be lost with it. Where all was well, the snapshot that counts is with every rank
    and with its peer."""
    workers, rank = outcome.group.ranks.workers, process.rank
    processes = [handle.process for handle in workers.values()]
    if not outcome.ready or workers.dismissed or process not in processes:
        return
    heal = healing_of(outcome.group)
    all_are_well = all(process.alive and not process.frozen for process in processes)
    if heal.busy or not all_are_well:
        outcome.together.add(rank)
    else:
        outcome.together = {rank}
        for number, process in enumerate(processes):
            copies = processes[heal.peers[number]].states.serials.copies.get(number, ())
            assert heal.committed in copies, f"snapshot {heal.committed} of rank {number} counts; its peer: {copies}"
            assert heal.keeps != "both" or heal.committed in process.states.serials.own
    # What docs/recovery.md excepts: where peers alone keep snapshots, a death while one is taken; a death in a meeting.
    outcome.unhealable |= outcome.group.ranks.joining


def _check(schedule: Schedule, outcome: Outcome) -> None:
    cluster, happened = outcome.cluster, outcome.cluster.happened
    assert not cluster.loop.faults, cluster.loop.faults
    assert all(not process.alive for process in cluster.processes), "a process outlives the run"
    repeated = [int(line.rsplit(" ", 1)[1]) for line in outcome.warnings if "steps repeated" in line]
    assert max(repeated, default=0) <= 1, outcome.warnings
    if outcome.error is None:
        assert outcome.done == len(BATCHES)
        assert len(outcome.saved) + outcome.lost_saves == len(BATCHES) // 2
        return
    heal = healing_of(outcome.group)
    text, peers = str(outcome.error), heal.peers
    outcome.unhealable |= heal.keeps == "peer" and heal.newest != heal.committed
    if "trainer.max_replacements" in text:
        assert outcome.unhealable or len(happened) > schedule.per_hour, (text, happened)
    elif "nobody has the state" in text:
        both = any(peers[rank] in outcome.together for rank in outcome.together)
        assert outcome.unhealable or both, (text, happened)
    else:
        raise AssertionError(f"a run that ends for no reason that a person is told of: {text}")
