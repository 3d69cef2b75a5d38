"""Time per phase: union of overlapping measurements, split at the step's border; and which start of the run it was."""

from __future__ import annotations

import asyncio

import pytest

from megatron_daro.observe import Phases


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return Phases(clock=clock)


def test_phases_one_after_another_and_time_between_them(phases, clock):
    with phases.measure("rollout"):
        clock.now += 3
    clock.now += 0.5
    with phases.measure("train"):
        clock.now += 2
    assert phases.collect() == {
        "timing/rollout_s": 3,
        "timing/train_s": 2,
        "timing/other_s": 0.5,
        "timing/step_s": 5.5,
    }


def test_the_next_step_starts_at_zero_and_keeps_the_keys(phases, clock):
    with phases.measure("rollout"):
        clock.now += 3
    phases.collect()
    clock.now += 1
    assert phases.collect() == {"timing/rollout_s": 0.0, "timing/other_s": 1, "timing/step_s": 1}


def test_overlapping_phases_count_in_each_but_once_in_the_step(phases, clock):
    with phases.measure("rollout"):
        clock.now += 1
        with phases.measure("train"):
            clock.now += 2
    times = phases.collect()
    assert (times["timing/rollout_s"], times["timing/train_s"]) == (3, 2)
    assert (times["timing/step_s"], times["timing/other_s"]) == (3, 0)


def test_one_phase_in_several_coroutines_counts_the_union(phases, clock):
    async def score(start, end):
        await turn(start)
        with phases.measure("reward"):
            await turn(end)

    async def turn(until):
        while clock.now < until:
            await asyncio.sleep(0)

    async def tick():
        while clock.now < 112:
            await asyncio.sleep(0)
            clock.now += 1

    async def run():
        await asyncio.gather(score(101, 105), score(103, 107), score(109, 111), tick())

    asyncio.run(run())
    times = phases.collect()
    # The tick may come before or after a coroutine's turn in the same round: one second either way per edge.
    assert times["timing/reward_s"] == pytest.approx(8, abs=2)
    assert times["timing/reward_s"] < 10, "the sum of the three would be 10 or more"


def test_a_phase_over_the_border_of_a_step_is_split(phases, clock):
    with phases.measure("rollout"):
        clock.now += 3
        assert phases.active() == ("rollout",)
        assert phases.collect()["timing/rollout_s"] == 3
        clock.now += 4
    assert phases.active() == ()
    times = phases.collect()
    assert (times["timing/rollout_s"], times["timing/other_s"]) == (4, 0)


def test_a_phase_that_raises_or_is_cancelled_is_closed(phases, clock):
    with pytest.raises(KeyError), phases.measure("train"):
        clock.now += 2
        raise KeyError

    async def cancelled():
        with phases.measure("rollout"):
            await asyncio.sleep(3600)

    async def run():
        task = asyncio.ensure_future(cancelled())
        await asyncio.sleep(0)
        clock.now += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert phases.active() == ()
    times = phases.collect()
    assert (times["timing/train_s"], times["timing/rollout_s"]) == (2, 1)


def test_the_number_of_the_start_goes_into_the_times(monkeypatch):
    times = iter([0.0, 5.0, 6.0])
    phases = Phases(clock=lambda: next(times))
    monkeypatch.setenv("MEGATRON_DARO_ATTEMPT", "3")
    assert phases.collect() == {"timing/other_s": 5.0, "timing/step_s": 5.0, "timing/attempt": 3.0}
    monkeypatch.delenv("MEGATRON_DARO_ATTEMPT")
    assert phases.collect() == {"timing/other_s": 1.0, "timing/step_s": 1.0}
