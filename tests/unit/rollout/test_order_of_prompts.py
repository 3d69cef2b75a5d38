"""Orders that look at difficulty, in the loop: what the source is told, resume after a crash, replay."""

from __future__ import annotations

import asyncio

import pytest
from loop_fakes import (
    FakeEngine,
    FakePhases,
    FakeProgress,
    FakeSource,
    make_sampler,
    make_stack,
    resume_stack,
    run_stack,
)

from megatron_daro.config.sections import CurriculumSection, PrioritisedSection
from megatron_daro.data.orders import Curriculum, Prioritised
from megatron_daro.types import Prompt


def prompts():
    kinds = ("easy", "mixed", "hard", "mixed", "mixed")
    return [Prompt(f"p{i}", kinds[i % 5], "fake", text=f"problem {i}", tokens=(1, 2 + i % 7)) for i in range(20)]


def prioritised():
    return Prioritised(prompts(), {}, PrioritisedSection(), seed=3)


def curriculum():
    return Curriculum(prompts(), {f"p{i}": i / 20 for i in range(20)}, CurriculumSection(), seed=3, ramp=24)


def test_the_source_is_told_of_each_complete_group_once_before_the_snapshot():
    engine, source = FakeEngine(), FakeSource()
    engine.version = 0
    rollout = {"max_staleness": 2, "keep_surplus": True, "oversampling": 2.0}
    sampler = make_sampler(engine, source, FakeProgress(), FakePhases(), rollout=rollout)
    engine.lose_groups = {(1, attempt) for attempt in range(4)}
    ended, told = set(), []
    for _ in range(4):
        batch = asyncio.run(sampler.sample(0))
        ended |= {group.group_id for group in (*batch.groups, *batch.filtered, *batch.snapshot.surplus)}
        assert source.observed == told + sorted(source.observed[len(told) :])
        told = list(source.observed)
        assert set(told) == ended and len(told) == len(ended) and 1 not in told


@pytest.mark.parametrize("make", [prioritised, curriculum])
def test_a_run_that_crashed_resumes_bit_for_bit(tmp_path, make):
    whole = make_stack(tmp_path / "whole", source=make())
    run_stack(whole)
    for border in (("train", 3, "enter"), ("rollout", 4, "exit"), ("train", 5, "exit")):
        run = tmp_path / "_".join(map(str, border))
        cut = make_stack(run, source=make(), crash=border)
        with pytest.raises(BaseException):  # noqa: B017 - the crash, alone or in a group
            run_stack(cut)
        resumed = make_stack(run, source=make(), order_seed=7)
        assert resume_stack(resumed).step == 6
        assert resumed.policy.weights == whole.policy.weights
        assert resumed.source.state_dict() == whole.source.state_dict()


def test_priorities_change_what_is_drawn(tmp_path):
    drawn = []
    for floor in (0.0, 1.0):
        source = Prioritised(prompts(), {}, PrioritisedSection(floor=floor), seed=3)
        stack = make_stack(tmp_path / str(floor), source=source)
        run_stack(stack)
        drawn.append([group.prompt.id for request in stack.engine.requests for group in request])
    assert drawn[0] != drawn[1]
