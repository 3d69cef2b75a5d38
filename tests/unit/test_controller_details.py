"""The loop in detail: which deadline each wait has and what it is called, what is said, counted, synced and saved."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from fleet_fakes import FleetEngine
from loop_fakes import NEVER, make_rollout, make_stack, resume_stack, run_stack

from megatron_daro.controller import Controller
from megatron_daro.errors import CheckpointError, DataError, NonFiniteError
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.recovery import STATE_FORMAT, find_latest_valid, step_directories
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.sampled_batch import Update
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Group, Prompt, StepResult, Verdict


class Noted(Deadlines):
    """The real table, which writes down what it is asked."""

    waits: list = []

    async def within(self, name, awaitable, *, what=""):
        self.waits.append((name, what))
        return await super().within(name, awaitable, what=what)


@pytest.fixture
def noted():
    Noted.waits = []
    yield Noted()
    Noted.waits = []


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


def test_a_stop_is_said_and_the_second_one_too_and_the_third_is_nothing(tmp_path):
    stack = make_stack(tmp_path)
    cancelled = []
    stack.controller._task = SimpleNamespace(cancel=lambda: cancelled.append(True))
    stack.controller.request_stop("SIGTERM")
    assert stack.progress.messages == ["SIGTERM: stopping with a checkpoint (once more to stop at once)"]
    assert not cancelled
    for _ in range(2):
        stack.controller.request_stop("SIGINT")
    assert stack.progress.messages[1:] == ["SIGINT again: stopping at once, without a checkpoint"]
    assert cancelled == [True]


def test_a_second_stop_before_the_run_is_nothing(tmp_path):
    stack = make_stack(tmp_path)
    for _ in range(2):
        stack.controller.request_stop("SIGTERM")
    assert len(stack.progress.messages) == 1


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    stack = make_stack(tmp_path)
    stack.controller.request_stop("asked")
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step) == ("stopped", 0) and stack.policy.steps == 0
    assert not step_directories(tmp_path / "checkpoints") and stack.policy.closed == 1


def test_the_state_of_a_checkpoint(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 3, "on_nonfinite": "skip"})
    stack.policy.nonfinite_steps = {2: "skip"}
    train = stack.policy.train

    async def more(batch, step):
        result = await train(batch, step)
        odd = {"difficulty/weight/1": float("nan"), "difficulty/other": 1.0}
        return replace(result, metrics={**result.metrics, **odd})

    stack.policy.train = more
    run_stack(stack)
    _, state = find_latest_valid(tmp_path, stack.progress)
    assert (state["format"], state["step"], state["batches_done"], state["skipped_steps"]) == (STATE_FORMAT, 3, 3, 1)
    assert list(state["difficulty_weights"]) == ["difficulty/weight/2"] and state["identity"] == {"seed": 1}


def test_a_resumed_run_goes_on_with_the_counts_and_saves_nothing_twice(tmp_path):
    run_stack(make_stack(tmp_path, trainer={"steps": 4, "updates_per_batch": 2}))
    again = make_stack(tmp_path, trainer={"steps": 4, "updates_per_batch": 2})
    saved = step_directories(tmp_path / "checkpoints")[0]
    before = saved.stat().st_ino
    resume_stack(again)
    controller = again.controller
    assert (controller.step, controller._batches_done, controller._skipped_steps) == (4, 2, 0)
    assert controller._planned_step == 4 and "difficulty/weight/2" in controller._weights
    assert saved.stat().st_ino == before and not any(event[0] == "save" for event in again.events)


def test_files_are_taken_back_to_the_step_of_the_checkpoint(tmp_path):
    taken = []
    stack = make_stack(tmp_path)
    note = SimpleNamespace(truncate_after=taken.append)
    stack.controller._parts = replace(stack.parts, metrics=note, recorder=note)
    stack.controller.truncate_files()
    stack.controller.step = 3
    stack.controller.truncate_files()
    assert taken == [-1, 0, 3, 3]


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_says_what_the_policy_said(tmp_path, how):
    stack = make_stack(tmp_path, trainer={"steps": 1, "save_every_steps": 0})
    stack.policy.nonfinite_steps = {1: how}
    said = "loss is nan in micro-batch 3" if how == "raise" else "gradient norm is inf"
    with pytest.raises(NonFiniteError, match=rf"^step 1: {said}; no .*set trainer\.on_nonfinite=skip$"):
        run_stack(stack)


def test_without_a_reason_and_a_recorder_the_message_still_says_what_happened(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})

    async def skips(batch, step):
        return StepResult(step, {}, skipped=True)

    stack.policy.train = skips
    stack.controller._parts = replace(stack.parts, recorder=None)
    words = "step 1: loss or gradient is not finite; no optimizer step; observe.save_rollouts is off, so"
    with pytest.raises(NonFiniteError, match=words):
        run_stack(stack)


def test_lost_batches_are_counted_in_a_row_only(tmp_path):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip", "steps": 15, "save_every_steps": 0})
    stack.policy.nonfinite_steps = dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14), "skip")
    assert run_stack(stack).step == 15
    warnings = [text for text in stack.progress.messages if "no optimizer step" in text]
    assert len(warnings) == 12 and warnings[0].startswith("warning: step 1: gradient norm is inf; ")


def test_a_batch_that_trained_nothing_is_synced_again_only_where_gpus_are_shared(tmp_path):
    stack = make_stack(tmp_path)
    answer = stack.engine._answer
    stack.engine._answer = lambda request: tuple(replace(r, weight_version=-1) for r in answer(request))
    with pytest.raises(DataError, match="5 batches in a row"):
        run_stack(stack)
    assert [event for event in stack.events if event[0] == "sync"] == [("sync", 0)]


def test_throughput_is_tokens_over_the_time_that_training_took(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 2})
    tokens, build = [], stack.parts.build

    def built(groups, step):
        columns = build(groups, step)
        tokens.append(len(columns.tokens_T))
        return columns

    times = iter([{}, {"timing/train_s": 2.0}, {}])
    stack.phases.collect = lambda: next(times)
    stack.controller._parts = replace(stack.parts, build=built)
    run_stack(stack)
    first, second = read_metrics(tmp_path)
    assert first["throughput/train_tokens_per_s"] == tokens[0] / 2.0
    assert "throughput/train_tokens_per_s" not in second


def test_a_step_has_the_numbers_of_books_samples_and_policy(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})
    run_stack(stack)
    (line,) = read_metrics(tmp_path)
    books = {f"rollout/groups_{state}" for state in ("admitted", "trained", "filtered", "dropped", "outstanding")}
    others = {"rollout/retries", "rollout/late_refused", "rollout/steps_skipped", "loss/policy", "sync/bytes"}
    assert books | others | {"accuracy/mean", "rollout/epoch", "rollout/generated_tokens"} <= set(line)
    assert line["rollout/groups_trained"] == 3.0 and line["rollout/retries"] == line["rollout/late_refused"] == 0.0
    assert line["throughput/rollout_tokens_per_s"] > 0 and line["rollout/generated_tokens"] > 0


def test_each_part_of_a_step_is_timed_under_its_name(tmp_path):
    names = []

    class Timed:
        @contextmanager
        def measure(self, name):
            names.append(name)
            yield

        def collect(self):
            return {}

    stack = make_stack(tmp_path, trainer={"steps": 1})
    stack.controller._parts = replace(stack.parts, phases=Timed())
    run_stack(stack)
    assert names == ["rollout", "build", "logprob", "train", "sync", "write", "checkpoint", "checkpoint"]


def routed(group_id) -> Group:
    prompt = Prompt("p", "4", "unit", tokens=(1, 2))
    experts = StoredExperts((Part(f"{group_id}.npy", 0, 1),), (4, 1, 1))
    one = replace(make_rollout(group_id, 0, 0, prompt, 0, length=2), routed_experts=experts)
    return Group(group_id, prompt, (one, replace(one, routed_experts=None)), (Verdict(True, 1.0, ""),) * 2)


@pytest.mark.parametrize("recorded", [True, False])
def test_experts_are_kept_of_what_a_record_names_or_a_later_epoch_trains(tmp_path, recorded):
    stack = make_stack(tmp_path)
    settled = []
    parts = stack.parts if recorded else replace(stack.parts, recorder=None)
    controller = Controller(stack.section, parts, max_staleness=0)
    update = Update(1, 0, (routed(1), routed(2)), 1, again=frozenset({2}), filtered=(routed(3),), dropped=(routed(4),))
    controller._settle_experts(SimpleNamespace(settle=settled.append), update)
    kept = {i: (routed(i).rollouts[0].routed_experts, None) for i in ((1, 2) if recorded else (2,))}
    assert settled == [{1: (), 2: (), 3: (), 4: ()} | kept]


def test_experts_of_a_step_are_settled_before_its_line_is_written(tmp_path, noted):
    stack = make_stack(tmp_path, deadlines=noted, trainer={"steps": 1})
    lines = []
    folder = SimpleNamespace(settle=lambda groups: lines.append((sorted(groups), read_metrics(tmp_path))))
    stack.controller._parts = replace(stack.parts, experts=folder)
    run_stack(stack)
    ((groups, written),) = lines
    assert len(groups) >= 3 and written == [] and ("write", "experts of step 1") in noted.waits


def test_work_that_a_stop_ends_is_cancelled_and_what_it_raised_is_raised(tmp_path):
    stack = make_stack(tmp_path)
    ended = []

    async def work():
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append(True)

    async def fails():
        raise DataError("no")

    async def go():
        assert await stack.controller.unless_stopped(asyncio.sleep(0)) is True
        with pytest.raises(DataError, match="no"):
            await stack.controller.unless_stopped(fails())
        asyncio.get_running_loop().call_later(0.01, stack.controller.request_stop, "asked")
        assert await stack.controller.unless_stopped(work()) is False
        assert ended == [True]

    asyncio.run(go())


def test_a_policy_without_an_engine_syncs_nothing(tmp_path):
    stack = make_stack(tmp_path)
    controller = Controller(stack.section, replace(stack.parts, engine=None), max_staleness=0)
    assert asyncio.run(controller._publish("x")) == {}


def test_steps_that_are_saved_are_multiples_of_the_distance(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 5, "save_every_steps": 2, "keep_checkpoints": 2})
    saved = []
    save = stack.parts.checkpoints.save

    async def noted_save(step, *others):
        saved.append(step)
        return await save(step, *others)

    stack.parts.checkpoints.save = noted_save
    run_stack(stack)
    assert saved == [2, 4, 5]


def test_a_last_checkpoint_that_fails_while_it_is_written_ends_the_run(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})
    stack.policy.save_error = OSError(28, "No space left on device")

    async def go():
        stack.policy.save_gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        async with asyncio.timeout(20):
            while not any(event[0] == "save" for event in stack.events):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            stack.policy.save_gate.set()
            await run

    with pytest.raises(CheckpointError, match="step_000001: checkpoint not saved, the disk is full"):
        asyncio.run(go())


def test_a_run_that_is_cancelled_is_cancelled_and_closed(tmp_path):
    stack = make_stack(tmp_path)

    async def go():
        stack.policy.gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        async with asyncio.timeout(20):
            while ("train", 1) not in stack.events:
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait([run])
        return run.cancelled()

    assert asyncio.run(go()) is True
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_where_gpus_are_shared_the_engine_gets_them_back_after_a_batch_that_trained_nothing(tmp_path, noted):
    stack = make_stack(tmp_path, deadlines=noted)
    answer, events = stack.engine._answer, []
    stack.engine._answer = lambda request: tuple(replace(r, weight_version=-1) for r in answer(request))

    async def publish(sync, version):
        events.append(version)
        return {}

    async def to_policy():
        events.append("policy")

    shared = SimpleNamespace(publish=publish, to_policy=to_policy)
    controller = Controller(stack.section, replace(stack.parts, colocation=shared), max_staleness=0)
    with pytest.raises(DataError, match="5 batches in a row"):
        asyncio.run(controller.run())
    assert events == [0, *["policy", 0] * 4, "policy"]
    assert noted.waits.count(("sync", "again, after a batch that trained nothing")) == 4
