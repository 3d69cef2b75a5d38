"""Every wait of the loop has a deadline, and says what it waits for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from fleet_fakes import FleetEngine
from loop_fakes import make_stack, resume_stack, run_stack


def test_every_wait_of_a_run_says_what_it_waits_for(tmp_path, noted):
    trainer = {"steps": 2, "save_every_steps": 1, "eval_every_steps": 2}
    stack = make_stack(tmp_path, deadlines=noted, trainer=trainer)

    async def nothing(*_):
        return None

    stack.controller._parts = replace(stack.parts, closers={"verifiers": nothing}, export=nothing)
    run_stack(stack)
    waits = dict.fromkeys(noted.waits)
    groups = {(name, what) for name, what in waits if name == "score"}
    assert groups and all(what.startswith("group ") for _, what in groups)
    abort = {("abort", "")}  # the end of an iterator
    generate = {(name, what) for name, what in waits if name == "generate"}
    assert all(what.startswith("the engine, with ") and what.endswith(" groups requested") for _, what in generate)
    steps = ("logprob", "build", "train")
    assert set(waits) - groups - abort - generate == {
        ("sync", "first sync"), ("sync", "step 1"), ("sync", "step 2"),
        ("evaluate", "before training"), ("evaluate", "step 2"),
        *(("turn", f"batch {i}") for i in range(3)), ("engine_free", ""),
        ("batch", "for step 1"), ("batch", "for step 2"),
        *((name, f"step {step}") for name in steps for step in (1, 2)),
        ("write", "rollouts of step 1"), ("write", "rollouts of step 2"),
        ("save", "checkpoint of step 1"), ("save", "checkpoint of step 2"),
        ("export", "all steps are trained and saved"),
        ("close", "engine"), ("close", "policy"), ("close", "verifiers"),
    }  # fmt: skip
    assert [what for name, what in noted.waits if name == "close"] == ["engine", "policy", "verifiers"]
    noted.waits.clear()
    resume_stack(make_stack(tmp_path, deadlines=noted, trainer=trainer))
    path = str(tmp_path / "checkpoints" / "step_000002")
    assert noted.waits.count(("load", path)) == 2, "of the policy, and of the groups that wait"


def test_every_wait_for_a_fleet_says_how_many_groups_are_in_flight(tmp_path, noted):
    options = {"engine_class": FleetEngine, "finish_early": True, "rollout": {"oversampling": 2.0}}
    stack = make_stack(tmp_path, deadlines=noted, trainer={"steps": 1}, **options)
    stack.engine.pace = lambda group_id: 1 if group_id < 3 else 1000
    run_stack(stack)
    waits = set(noted.waits)
    assert {what for name, what in waits if name == "generate"} >= {"the engine, with 6 groups in flight"}
    assert any(name == "abort" and what.endswith(" unfinished groups") for name, what in waits)
