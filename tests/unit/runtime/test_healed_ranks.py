"""Ranks that die at any call: each step is trained once and in order on every rank, or the run ends and says why.

The driver's part is real, and so are the snapshots that processes keep; the processes are objects here, whose calls are
done at once, and which die before or after a call that hypothesis chooses.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from megatron_daro.actor.double_buffer import KINDS
from megatron_daro.errors import WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import healing, kept_states
from megatron_daro.runtime.healing import Healing, HealingLimits
from megatron_daro.runtime.supervisor import WorkerGroup
from megatron_daro.runtime.workers import Place

WORLD, STEPS, ROOM = 4, 5, 16


class Process:
    """One rank's process: the steps that its weights and its optimizer have seen, and the snapshots that it keeps."""

    def __init__(self, rank, fate):
        self.rank, self.alive, self._fate = rank, True, fate
        self.states = kept_states.KeptStates()
        self.seen: dict[str, list[int]] | None = None
        self.snapshot_bytes = lambda: (dict.fromkeys(KINDS, ROOM), 10**6)
        self.keep_own_twice, self.adopt = self.states.keep_own_twice, self.states.adopt
        for name in ("open_copy", "take_block", "seal_copy", "describe", "block"):
            setattr(self, name, getattr(self.states, name))

    def __call__(self, name, arguments):
        """The answer, as a future that is done."""
        answer = asyncio.get_running_loop().create_future()
        before = self.alive and self._fate(self.rank)
        if before == "before":
            self.alive = False
        try:
            if not self.alive:
                raise RayActorError
            result = getattr(self, name)(*arguments)
            if before == "after":
                self.alive = False
                raise RayActorError
            answer.set_result(result)
        except Exception as error:
            answer.set_exception(error)
            answer.exception()
        return answer

    def kept(self):
        return self.states.kept

    def abort(self):
        pass

    def load_code(self):
        pass

    def leave(self):
        self.seen = None

    def setup(self, fresh):
        self.seen = {kind: [0] if fresh else [99] for kind in KINDS}

    def train(self, step, torn):
        for kind in KINDS[:1] if torn else KINDS:
            self.seen[kind].append(step)
        if torn:
            raise WorkerError("connection closed by peer")

    def start_snapshot(self, serial, keep):
        slot = self.states.own.open(keep)
        for kind in KINDS:
            values = np.zeros(ROOM, np.uint8)
            values[: len(self.seen[kind])] = self.seen[kind]
            slot.blocks[kind] = [torch.from_numpy(values)]
        slot.layout, slot.rest = dict.fromkeys(KINDS, (ROOM,)), {"rank": self.rank}
        self.pending = slot, serial

    def finish_snapshot(self, serial, keep, peer, kinds):
        slot, slot.serial = self.pending[0], serial
        self.states.send(self.rank, serial, keep, peer, kinds)

    def restore(self, serial):
        slot = self.states.whole(serial)
        assert slot.rest == {"rank": self.rank}
        for kind in KINDS:
            (block,) = slot.blocks[kind]
            self.seen[kind] = [0, *(int(step) for step in block if step)]


class Handle:
    def __init__(self, process):
        self.process = process

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self.process(name, arguments))


class World:
    """What is healed: two replicas of two tensor-parallel ranks."""

    def __init__(self, deaths):
        self._deaths, self.calls, self.warnings = list(deaths), -(10**6), []
        self.places = [
            Place(rank // 2, 0, exports=False, sends=False, answers=False, host="a", weights_key=(rank % 2,))
            for rank in range(WORLD)
        ]
        self.workers = WorkerGroup()
        self.workers.update({f"actor rank {rank}": self.start_process(rank) for rank in range(WORLD)})
        limits = HealingLimits(1.0, per_hour=100, hung_s=60.0)
        self.healing = Healing(self, limits, Deadlines(), self.warnings.append)

    def fate(self, rank):
        """Whether a process dies at this call, counted from the first snapshot on, and when."""
        self.calls += 1
        if not self._deaths or self._deaths[0][0] != rank or self._deaths[0][1] > self.calls:
            return None
        self.calls = 0
        return self._deaths.pop(0)[2]

    def start_process(self, rank):
        return Handle(Process(rank, self.fate))

    async def join(self):
        await self._all("setup", False)

    async def repeat(self, batch, step):
        torn = not all(handle.process.alive for handle in self.workers.values())
        await self._all("train", step, torn)

    async def _all(self, name, *arguments):
        calls = {who: getattr(handle, name).remote(*arguments) for who, handle in self.workers.items()}
        return await healing.gather(calls)

    async def run(self):
        await self._all("setup", True)
        await self.healing.prepare()
        self.calls = 0
        for step in range(1, STEPS + 1):
            await self.healing.settle()
            await self.healing.repeated(lambda step=step: self.repeat("batch", step))
            await self.healing.trained("batch", step)
            assert len(self.healing._updates) <= 1, "what a death costs"
        await self.healing.settle()
        return [handle.process.seen for handle in self.workers.values()]


@pytest.fixture(autouse=True, scope="module")
def no_ray():
    """Answers are there at once, and a process that is killed is one that is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_states, "ray", SimpleNamespace(get=lambda answer, timeout: answer.result()))
        patch.setattr(healing, "ray", SimpleNamespace(kill=lambda handle, no_restart: None))
        yield


# Rank, calls since the death before it, and whether the last of them is done.
DEATH = st.tuples(st.integers(0, WORLD - 1), st.integers(1, 60), st.sampled_from(["before", "after"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(DEATH, max_size=4))
@example([])
def test_every_step_is_trained_once_and_in_order(deaths):
    world = World(deaths)
    try:
        found = asyncio.run(world.run())
    except WorkerError as error:
        assert "nobody has the state of that rank any more. --resume goes on" in str(error)
        ranks = {rank for rank, *_ in deaths}
        assert {0, 2} <= ranks or {1, 3} <= ranks, "a rank and its peer"
        return
    assert found == [{kind: list(range(STEPS + 1)) for kind in KINDS}] * WORLD
    assert all("steps repeated: 0" in line or "steps repeated: 1" in line for line in world.warnings)


def test_a_death_is_found_at_every_call():
    """Of one rank at each call of a run in which nobody else dies."""
    unbroken = World([])
    asyncio.run(unbroken.run())
    healed = 0
    for call in range(1, unbroken.calls):
        world = World([(call % WORLD, call, "after")])
        assert asyncio.run(world.run()) == [{kind: list(range(STEPS + 1)) for kind in KINDS}] * WORLD
        healed += len(world.warnings)
    assert healed > 0.8 * unbroken.calls, "only deaths in the end of the last step are not seen"


def test_who_asks_again_after_the_last_failure_is_told_the_same():
    """The watch heals too, once the step that failed has given the lock back and the run is being closed."""
    world = World([(1, 1, "before"), (1, 1, "before")])
    world.healing = Healing(world, HealingLimits(1.0, per_hour=1, hung_s=60.0), Deadlines(), world.warnings.append)

    async def run():
        with pytest.raises(WorkerError, match=r"allowed: 1 \(trainer.max_replacements\)") as first:
            await world.run()
        world.workers.data.clear()  # dismissed
        with pytest.raises(WorkerError) as second:
            await world.healing.heal()
        assert second.value is first.value

    asyncio.run(run())


def test_a_group_that_is_dismissed_while_it_is_healed_gets_no_new_process():
    world = World([(1, 1, "before")])

    async def run():
        await world._all("setup", True)
        await world.healing.prepare()
        world.healing._dead.add("actor rank 1")
        started, look = [], world.healing._look
        world.start_process = started.append

        async def slow_look():
            kept = await look()
            world.workers.dismissed = True
            world.workers.data.clear()
            return kept

        world.healing._look = slow_look
        with pytest.raises(WorkerError, match="while the run ended"):
            await world.healing.heal()
        assert started == [] and world.workers == {}

    asyncio.run(run())
