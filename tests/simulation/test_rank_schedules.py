"""Schedules of deaths and freezes of ranks, drawn from seeds: the laws of rank_schedules.py hold after each."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rank_schedules import draw, no_ray, simulate

from megatron_daro.runtime import healing
from megatron_daro.runtime.healing import Healing


@pytest.fixture(autouse=True)
def patched():
    with no_ray() as patch:
        yield patch


def run_all(seeds):
    """Every schedule must hold its laws; returns how many healed, and how many ended the run for a good reason."""
    ends = Counter()
    for seed in seeds:
        schedule = draw(seed)
        try:
            outcome = simulate(schedule)
        except BaseException as error:
            error.add_note(f"tests/simulation: seed {seed} of ranks: {schedule}")
            raise
        ends["ended" if outcome.error else "healed" if outcome.warnings else "quiet"] += 1
    return ends


def test_five_hundred_schedules():
    ends = run_all(range(500))
    assert ends["healed"] > 100 and ends["ended"] > 25 and ends["quiet"] > 50, ends


def test_a_seed_gives_the_same_schedule_every_time():
    """Nothing may depend on where objects lie in memory, as the order of a set of tasks does."""
    for seed in range(100):
        first, again = (simulate(draw(seed)).cluster.random.getstate() for _ in range(2))
        assert first == again, f"seed {seed} draws other numbers the second time"


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # a part takes 20 to 26 s of a core
@pytest.mark.parametrize("part", range(10))
def test_fifty_thousand_schedules(part):
    """test_more_rank_schedules.py has as many again, for another process of pytest-xdist."""
    run_all(range(500 + 5_000 * part, 5_500 + 5_000 * part))


FOUND = {
    2: "a death while peers alone keep snapshots: the newer one, whose copies were sealed, was not gone back to",
    9: "a process that froze before it was first asked whether it lives was waited for without end",
    86: "what noticed a death while the run was being closed ended the closing, and processes outlived it",
    187: "a rank that died while another one was started: the ranks met without it, and could not leave",
    587: "the same, of three ranks",
    75787: "a rank that died before the others had copies again of what they went back to: the older one was forgotten",
    85417: "the same, of four ranks",
}


@pytest.mark.parametrize("seed", FOUND)
def test_what_the_simulation_found(seed):
    run_all([seed])


# What the laws must find: each is a fault in the real code, planted.


def commit_before_the_copies(patch):
    original = Healing._commit

    async def early(self, serial, keep):
        self._committed = serial
        self._updates = [update for update in self._updates if update[0] > serial]
        await original(self, serial, keep)

    patch.setattr(Healing, "_commit", early)


def repeat_what_the_snapshot_has(patch):
    original = Healing._back_to_snapshot

    async def forgetful(self, kept):
        await original(self, kept)
        return 0

    patch.setattr(Healing, "_back_to_snapshot", forgetful)


def repeat_no_step(patch):
    original = Healing._go_back

    async def forgetful(self, kept):
        self._updates = []
        return await original(self, kept)

    patch.setattr(Healing, "_go_back", forgetful)


def heal_again_after_the_end(patch):
    """What d3eee06 did: the watch healed a group that was dismissed."""

    async def again(self):
        self._failure = None
        await original(self)

    original = Healing.heal
    patch.setattr(Healing, "heal", again)


def leave_nobody(patch):
    """Without the end of what waits for the dead."""
    patch.setattr(Healing, "_living", lambda self: self._look())


def look_for_no_hung_process(patch):
    async def never(self):
        await asyncio.Future()

    patch.setattr(Healing, "end_hung", never)


def restore_the_dead_alone(patch):
    original = Healing._all

    async def some(self, call):
        if "restore" not in call.__code__.co_names:
            return await original(self, call)
        newest = list(self._ranks.workers.items())[-1:]
        return await healing.gather({name: call(worker) for name, worker in newest})

    patch.setattr(Healing, "_all", some)


def take_any_failure_for_the_last(patch):
    async def once(self):
        if self._dead:
            self._under_way = True
            await self._replace(0.0, [])

    patch.setattr(Healing, "heal", once)


@pytest.mark.parametrize(
    "plant",
    [
        commit_before_the_copies,
        repeat_what_the_snapshot_has,
        repeat_no_step,
        heal_again_after_the_end,
        leave_nobody,
        look_for_no_hung_process,
        restore_the_dead_alone,
        take_any_failure_for_the_last,
    ],
)
def test_a_planted_fault_is_found(patched, plant):
    plant(patched)
    with pytest.raises((AssertionError, RuntimeError)):
        run_all(range(400))
