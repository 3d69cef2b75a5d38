"""What a rehearsal must find to hold, and what the driver's loop did when it did not wake."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.workshop.rehearse import loop
from megatron_daro.workshop.rehearse.loop import Watch
from megatron_daro.workshop.rehearse.report import verdict

GOOD = {
    "status": "finished",
    "error": "",
    "loss": None,
    "ports": {"chosen": 4, "clashes": 0},
    "planned": {"step_s": 60.0},
    "driver": {"busiest_ms": 100.0, "busiest_in": "controller.py:1 run", "cpu_s": [40.0, 10.0]},
}
LOST = {"node": 3, "ranks": [12, 13], "how": "killed", "named_by_the_driver": [12]}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"status": "failed", "error": "DeadlineError: x"}, "did not finish: DeadlineError: x"),
        ({"ports": {"chosen": 4, "clashes": 1}}, "1 ports were chosen twice"),
        ({"driver": {**GOOD["driver"], "busiest_ms": 5200.0}}, "did not wake for 5.2 s .* controller.py:1"),
        ({"driver": {**GOOD["driver"], "cpu_s": [1.0, 31.0]}}, "needs 31.0 CPU seconds"),
        ({"loss": LOST, "status": "failed"}, None),
        ({"loss": LOST}, "were lost, and the run went on"),
        ({"loss": {**LOST, "named_by_the_driver": []}, "status": "failed"}, "without naming a rank"),
        ({"loss": {**LOST, "how": "silent"}, "status": "failed", "error": "deadline 'train': not done"}, None),
        ({"loss": {**LOST, "how": "silent"}, "status": "failed", "error": "x"}, "did not show at the deadline"),
        ({"loss": {**LOST, "ranks": []}}, None),
        ({"loss": {**LOST, "ranks": []}, "status": "failed", "error": "EngineError"}, "did not finish: EngineError"),
    ],
)  # fmt: skip
def test_a_rehearsal_holds_or_says_why_not(changes, fault):
    import re

    holds, faults = verdict({**copy.deepcopy(GOOD), **changes})
    assert holds == (fault is None) == (not faults)
    assert fault is None or re.search(fault, faults[0])


def test_a_loop_that_works_is_told_from_one_that_waits_and_the_place_is_named(monkeypatch):
    monkeypatch.setattr(loop, "PACKAGE", str(Path(__file__).parent.parent.name))

    def work() -> None:
        end = time.thread_time() + 0.4
        while time.thread_time() < end:
            pass

    async def scene(stall) -> dict:
        with Watch() as watch:
            await asyncio.sleep(0.05)
            stall()
            await asyncio.sleep(0.05)
            return watch.found()

    found = asyncio.run(scene(work))
    assert found["busiest_ms"] >= 390 and " work" in found["busiest_in"]
    slept = asyncio.run(scene(lambda: time.sleep(0.5)))
    assert slept["latest_ms"] >= 490 and slept["busiest_ms"] < 390


def test_a_watch_does_not_count_what_was_before_its_block():
    async def scene() -> dict:
        watch = Watch()
        watch._ticked -= 3600  # made an hour ago
        with watch:
            await asyncio.sleep(0.05)
            return watch.found()

    assert asyncio.run(scene())["latest_ms"] < 3_000_000


def test_a_place_is_the_innermost_line_of_the_package(monkeypatch):
    assert loop._own_place(None) == "elsewhere"
    inner = SimpleNamespace(
        f_code=SimpleNamespace(co_filename="/lib/x/queue.py", co_name="get"), f_lineno=7, f_back=None
    )
    assert loop._own_place(inner) == "elsewhere"
    own = SimpleNamespace(
        f_code=SimpleNamespace(co_filename="/a/megatron_daro/b/c.py", co_name="run"), f_lineno=9, f_back=None
    )
    assert loop._own_place(own) == "b/c.py:9 run"
    inner.f_back = own
    assert loop._own_place(inner) == "b/c.py:9 run, in get of queue.py"


def test_waits_end_at_the_pace_of_the_rehearsal():
    """A run's wait for a batch is 8 hours: one that is endless must show here in minutes."""
    own = Deadlines()
    limits = loop.paced(own, pace=0.01, batch_s=0.8, answers=1536)
    assert limits.train == pytest.approx(loop.MOST_WAIT_S + 15.36)
    # What waits for training or generation must not be named for them.
    assert limits.turn == limits.batch == limits.engine_free == pytest.approx(1.5 * limits.train)
    assert limits.abort == own.abort == 60 and limits.score == loop.LEAST_WAIT_S
    assert limits.policy_start == loop.START_WAIT_S and limits.placement == loop.START_WAIT_S
    # A batch of many answers, or a slow pace, takes longer; never longer than in the run.
    assert loop.paced(own, pace=0.01, batch_s=0.8, answers=12288).logprob == pytest.approx(144)
    assert loop.paced(own, pace=0.1, batch_s=0.8, answers=12288).train == pytest.approx(120 + 122.88)
    assert loop.paced(own, pace=0.2, batch_s=20, answers=0).train == 400
    assert loop.paced(own, pace=1, batch_s=5000, answers=0).train == own.train
