"""Whole runs of the loop under drawn faults of ranks and servers, and the laws that hold after each.

Real: the controller, sampler, ledger, ways to fill a batch, collector, columns of a batch, weight sync, the policy
group with its healing, `supervised`. Not: processes (simulated_ranks.py, simulated_servers.py), files, time.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from run_configuration import run_context

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "rollout"))

from loop_fakes import GRPO, FakePhases, FakeProgress, FakeScorer, FakeSource, batch_digest, make_sampler
from rank_schedules import DEADLINE_S, Group, healing_of
from simulated_ranks import Cluster, Fault, unbroken
from simulated_servers import FIRST_TOKEN, Servers
from virtual_loop import VirtualLoop, run

from megatron_daro import controller as controller_module
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.sections import TrainerSection
from megatron_daro.controller import Controller, LoopParts
from megatron_daro.data.batch import build_step_batch
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import DaroError
from megatron_daro.rollout import sampler as sampler_module
from megatron_daro.rollout.ledger import OUTCOMES
from megatron_daro.runtime import healing
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.launch import supervised
from megatron_daro.runtime.step_shards import Shard
from megatron_daro.types import PreparedStep

STEPS = 4


@dataclass(frozen=True)
class LoopSchedule:
    """Drawn from a seed. deaths: (seconds, server). stop_s: when the run is stopped with a checkpoint, to be resumed;
    crash: it ends at once instead."""

    seed: int
    staleness: int
    early: bool
    minibatches: int
    servers: int
    faults: tuple[Fault, ...] = ()
    deaths: tuple[tuple[float, int], ...] = ()
    stop_s: float | None = None
    crash: bool = False
    shuffled: bool = False


def draw_loop(seed: int) -> LoopSchedule:
    """Most schedules have a fault or two; a third is cut and resumed."""
    random = Random(seed)
    return LoopSchedule(
        seed=seed,
        staleness=random.choice((0, 0, 1, 2)),
        early=random.random() < 0.3,
        minibatches=random.choice((1, 1, 2)),
        servers=random.choice((1, 2, 3)),
        faults=tuple(
            Fault(random.randrange(2), "dies", at_s=12 * random.random()) for _ in range(random.choice((0, 1, 1)))
        ),
        deaths=tuple((12 * random.random(), random.randrange(3)) for _ in range(random.choice((0, 1, 2, 4)))),
        stop_s=12 * random.random() if random.random() < 0.35 else None,
        crash=random.random() < 0.5,
        shuffled=random.random() < 0.3,
    )


@dataclass
class Disk:
    """What outlives a process of the driver."""

    ranks: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)
    states: dict[int, tuple[Path, str]] = field(default_factory=dict)
    lines: dict[int, Any] = field(default_factory=dict)
    records: dict[int, Any] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)

    # CheckpointStore, Recorder and MetricsSink of the controller.

    async def save(self, step: int, write: Any, state: Any, notices: Any) -> Path:
        directory = Path(f"/checkpoints/step_{step}")
        await write(directory)
        self.states[step] = directory, json.dumps(state)
        return directory

    def write_step(self, step: int, groups: Any, minibatch: Any) -> Path:
        assert step not in self.records, f"step {step} is recorded twice"
        self.records[step] = {used: tuple(some) for used, some in groups.items()}, minibatch
        return Path("/")

    def write_untrainable(self, step: int, groups: Any) -> Path:
        return Path("/")

    def write(self, step: int, metrics: Any) -> None:
        assert step not in self.lines and step in self.records, f"line {step}"
        self.lines[step] = metrics

    def truncate_after(self, step: int) -> int:
        for kept in (self.lines, self.records, self.batches):
            for later in [one for one in kept if one > step]:
                del kept[later]
        return 0


class LoopGroup(Group):
    """Ranks are told a batch by its digest."""

    disk: Disk

    def _shards(self, batch: Any) -> list[Shard]:
        numbered = SimpleNamespace(number=batch_digest(batch))
        return [Shard((i,), numbered, ((0,),)) for i in range(self._actor.data_parallel)]

    async def train(self, prepared: PreparedStep, step: int) -> Any:
        assert step not in self.disk.batches, f"the controller trains step {step} twice"
        result = await super().train(prepared, step)
        self.disk.batches[step] = batch_digest(prepared.batch)
        assert result.metrics["loss"] == self.expected(step), "metrics of another state"
        return result

    def expected(self, step: int) -> int:
        return unbroken(0, [self.disk.batches[i] for i in range(1, step + 1)])


@dataclass
class Life:
    """One process of the driver: its parts, and how it ended."""

    cluster: Cluster
    engine: Servers
    group: LoopGroup
    controller: Controller
    sampler: Any
    status: str = ""
    error: DaroError | None = None


def _life(schedule: LoopSchedule, disk: Disk, loop: VirtualLoop, faults: tuple[Fault, ...]) -> Life:
    cluster = Cluster(loop, tensor=1, data=2, hosts=1, free=10**6, gloo=schedule.seed % 2 == 0, faults=list(faults))
    cluster.disk = disk.ranks
    group = LoopGroup(
        run_context(
            warn=lambda message: None,
            actor=ActorSection(data_parallel=2),
            trainer={"minibatches_per_batch": schedule.minibatches},
        ),
        SimpleNamespace(model_path=Path("/")),
        SimpleNamespace(passes=lambda columns: (), old_logprobs="rollout"),
        SimpleNamespace(take_gpus=lambda gpus: None, has_gpus=False),
        healing=HealingLimits(None, per_hour=100, hung_s=60.0),
    )
    group.ranks.cluster, group.disk = cluster, disk
    group.ranks.outcome = outcome = SimpleNamespace(unhealable=False)

    def note(process: Any) -> None:
        outcome.unhealable |= group.ranks.joining or healing_of(group).under_way

    cluster.on_death = note

    def sent(version: int) -> int:
        assert cluster.sent == (group.expected(version), version), "weights of another step were sent"
        return version

    engine = Servers(loop, schedule.servers, sent)
    section = TrainerSection(steps=STEPS, save_every_steps=1, minibatches_per_batch=schedule.minibatches)
    progress, phases = FakeProgress(), FakePhases()
    rollout = {"prompts_per_batch": 2, "oversampling": 2.0, "max_staleness": schedule.staleness}
    sampler = make_sampler(
        engine,
        FakeSource(),
        progress,
        phases,
        rollout=rollout | ({"keep_surplus": True} if schedule.early and schedule.staleness else {}),
        steps_per_batch=schedule.minibatches,
        finish_batch="enough" if schedule.early else "all",
        deadlines=Deadlines(),
        scorer=FakeScorer(schedule.seed),
    )
    parts = LoopParts(
        policy=group,
        batches=sampler,
        build=lambda groups, step: build_step_batch(groups, GRPO),
        metrics=disk,
        progress=progress,
        phases=phases,
        engine=engine,
        checkpoints=disk,
        recorder=disk,
    )
    return Life(cluster, engine, group, Controller(section, parts, batches_ahead=schedule.staleness), sampler)


async def _live(life: Life, schedule: LoopSchedule, disk: Disk, stop_s: float | None) -> None:
    loop, resume = life.cluster.loop, max(disk.states, default=None)
    await life.group.start()
    life.cluster.arm()
    for at_s, number in schedule.deaths:
        loop.call_later(at_s, life.engine.die, number)
    if stop_s is not None:
        for _ in range(2 if schedule.crash else 1):
            loop.call_later(stop_s, life.controller.request_stop, "SIGTERM")
    if resume is None:
        await life.controller.truncate_files()
    else:
        directory, state = disk.states[resume]
        await life.controller.resume(directory, json.loads(state))
    try:
        outcome = await supervised(life.controller.run(), [life.group.watch_and_heal()])
        life.status = outcome.status
    except DaroError as error:
        life.error = error


def simulate_loop(schedule: LoopSchedule) -> Disk:
    """Run a schedule, resume it where it was cut, and check its laws."""
    disk, stop_s, faults, lives = Disk(), schedule.stop_s, schedule.faults, list[Life]()
    random = Random(schedule.seed + 7)
    while not lives or lives[-1].status != "finished":
        assert len(lives) < 4, [life.error for life in lives]
        loop = VirtualLoop(random, deadline_s=3 * DEADLINE_S, shuffled=schedule.shuffled)
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(perf_counter=loop.time, monotonic=loop.time)
            for module in (healing, sampler_module):
                patch.setattr(module, "time", clock)
            patch.setattr(controller_module, "write_waiting", disk.waiting.__setitem__)
            patch.setattr(controller_module, "read_waiting", lambda directory: disk.waiting.get(directory, []))
            lives.append(_life(schedule, disk, loop, faults))
            run(loop, _live(lives[-1], schedule, disk, stop_s))
        _check_life(lives[-1])
        stop_s, faults = None, ()
    _check_books(schedule, disk, lives[-1])
    if not schedule.early and schedule.staleness == 0:
        assert disk.batches == _unbroken_batches(schedule.minibatches), "another run than the unbroken one"
    return disk


@cache
def _unbroken_batches(minibatches: int) -> dict[int, int]:
    """Digest of each step's batch where nothing happens."""
    schedule, disk = LoopSchedule(10**6, staleness=0, early=False, minibatches=minibatches, servers=2), Disk()
    loop = VirtualLoop(Random(1), deadline_s=DEADLINE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "write_waiting", disk.waiting.__setitem__)
        run(loop, _live(_life(schedule, disk, loop, ()), schedule, disk, None))
    return disk.batches


def _check_life(life: Life) -> None:
    assert not life.cluster.loop.faults, life.cluster.loop.faults
    assert all(not process.alive for process in life.cluster.processes), "a process outlives the run"
    if life.error is not None:
        assert life.group.ranks.outcome.unhealable, f"one rank died, and the run ended: {life.error}"


def _check_books(schedule: LoopSchedule, disk: Disk, life: Life) -> None:
    assert sorted(disk.lines) == sorted(disk.records) == list(range(1, STEPS + 1))
    seen = dict[int, str]()
    for step, (groups, minibatch) in disk.records.items():
        for used, some in groups.items():
            for group in some:
                assert group.group_id not in seen, f"group {group.group_id} is {used} and {seen[group.group_id]}"
                seen[group.group_id] = used
        first, oldest = minibatch.first_step - 1, schedule.staleness * schedule.minibatches
        for group in groups.get("trained", ()):
            for one in group.rollouts:
                made_by = one.tokens[one.prompt_length :] - FIRST_TOKEN
                assert one.weight_version == made_by.min(), "a rollout says another age than its tokens have"
                assert first - made_by.min() <= oldest, f"step {step}: a token of weights {made_by.min()}"
        line = disk.lines[step]
        books = [line[f"rollout/groups_{state}"] for state in ("trained", "filtered", "dropped", "outstanding")]
        assert line["rollout/groups_admitted"] == sum(books)
    counts = life.sampler.ledger.counts()
    outcomes = Counter(seen.values())
    assert {used: counts[used] for used in OUTCOMES} == {used: outcomes[used] for used in OUTCOMES}
    assert counts["admitted"] - counts["outstanding"] == len(seen), "a group is lost"
    assert life.engine.restarts <= life.engine.deaths
