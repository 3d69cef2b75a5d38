"""Schedules of deaths and freezes of ranks, drawn from seeds: the laws of rank_schedules.py hold after each."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rank_schedules import draw, no_ray, simulate

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


def test_a_planted_fault_is_found(patched):
    """The laws see it where nobody looks for hung processes."""

    async def never(self):
        await asyncio.Future()

    patched.setattr(Healing, "end_hung", never)
    with pytest.raises((AssertionError, RuntimeError)):
        run_all(range(400))
