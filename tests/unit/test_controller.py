"""The loop over fakes: determinism, overlap, staleness, faults, stop and resume."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books, recorded_once
from loop_fakes import FAST, Crash, K, make_stack, resume_stack, run_stack

from megatron_daro.errors import CheckpointError, DataError, DeadlineError, EngineError, NonFiniteError
from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.recovery import find_latest_valid, step_directories
from megatron_daro.rollout.recorder import read_groups, read_step, read_update, read_waiting, recorded_steps
from megatron_daro.rollout.sampled_batch import epoch_order
from megatron_daro.runtime.interrupts import stop_on_signals

EVALUATE = {"eval_every_steps": 3}


def files(run: Path) -> dict:
    """Everything in a run directory that must not depend on time, order of arrival or crashes."""
    rollouts = {step: (run / "rollouts" / f"step_{step:06d}.parquet").read_bytes() for step in recorded_steps(run)}
    return {"metrics": [comparable(line) for line in read_metrics(run)], "rollouts": rollouts}


def test_a_run_writes_every_step_and_its_books_add_up(tmp_path):
    stack = make_stack(tmp_path, trainer=EVALUATE)
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step) == ("finished", 6)
    assert stack.policy.steps == 6 and stack.progress.steps == [1, 2, 3, 4, 5, 6]
    before, *lines = read_metrics(tmp_path)
    assert before["step"] == 0 and "eval/held_out/accuracy" in before
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    check_books(tmp_path)
    expected = {
        "accuracy/mean",
        "reward/mean",
        "response/length_mean",
        "response/truncated_fraction",
        "loss/policy",
        "rollout/staleness_mean",
        "throughput/rollout_tokens_per_s",
        *(f"difficulty/groups/{k}" for k in range(K + 1)),
    }
    assert all(expected <= set(line) for line in lines)
    assert [line["step"] for line in lines if "eval/held_out/accuracy" in line] == [3, 6]
    assert {line["rollout/staleness_mean"] for line in lines} == {0.0}
    groups = [group for group, used in read_step(tmp_path, 4) if used == "trained"]
    assert {r.weight_version for group in groups for r in group.rollouts} == {3}
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_accuracy_counts_filtered_groups_too(tmp_path):
    run_stack(make_stack(tmp_path))
    for line in read_metrics(tmp_path):
        verdicts = [v for group, _ in read_step(tmp_path, line["step"]) for v in group.verdicts]
        assert line["accuracy/mean"] == pytest.approx(sum(v.correct for v in verdicts) / len(verdicts), abs=1e-12)
        bins = [g.bin for g, used in read_step(tmp_path, line["step"]) if used != "dropped"]
        assert [line[f"difficulty/groups/{k}"] for k in range(K + 1)] == [bins.count(k) for k in range(K + 1)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_files_do_not_depend_on_the_order_of_arrival(tmp_path, staleness):
    runs = []
    for order_seed in (0, 1, 2):
        stack = make_stack(tmp_path / str(order_seed), order_seed=order_seed, rollout={"max_staleness": staleness})
        run_stack(stack)
        written = files(stack.run)
        if staleness:  # The books are read while the next batch is being generated; everything else is fixed.
            for line in written["metrics"]:
                for key in [key for key in line if key.startswith("rollout/groups_")]:
                    del line[key]
        runs.append((written, stack.policy.weights))
    assert runs[0] == runs[1] == runs[2]


def test_synchronous_training_never_overlaps_generation(tmp_path):
    stack = make_stack(tmp_path)
    run_stack(stack)
    generating = 0
    for kind, _ in stack.events:
        generating += {"generate": 1, "generated": -1}.get(kind, 0)
        assert not (generating and kind in ("train", "trained", "sync", "evaluate"))


def generating(events):
    """Passes of the engine that have not ended."""
    kinds = [kind for kind, _ in events]
    return kinds.count("generate") - kinds.count("generated")


def test_staleness_one_generates_the_next_batch_while_this_one_trains(tmp_path):
    stack = make_stack(tmp_path, rollout={"max_staleness": 1})

    async def go():
        stack.policy.gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        while stack.source.cursor < 6 or generating(stack.events) or ("train", 1) not in stack.events:
            await asyncio.sleep(0)
        for _ in range(200):  # The trainer is held inside step 1; batch 2 is complete, batch 3 must not begin.
            await asyncio.sleep(0)
        held = list(stack.events)
        stack.policy.gate.set()
        await run
        return held

    held = asyncio.run(go())
    assert ("train", 1) in held and not generating(held)  # Generation ended while step 1 was training.
    assert ("trained", 1) not in held and ("sync", 1) not in held
    lines = read_metrics(tmp_path)
    assert [line["rollout/staleness_mean"] for line in lines] == [0, 1, 1, 1, 1, 1]
    check_books(tmp_path)
    for step in range(2, 7):
        versions = {r.weight_version for g, used in read_step(tmp_path, step) if used == "trained" for r in g.rollouts}
        assert versions == {step - 2}


def test_weights_are_never_replaced_during_generation_or_evaluation(tmp_path):
    stack = make_stack(tmp_path, rollout={"max_staleness": 2}, trainer={"steps": 12, **EVALUATE})
    run_stack(stack)
    generating = 0
    for kind, _ in stack.events:
        generating += {"generate": 1, "generated": -1}.get(kind, 0)
        assert not (generating and kind in ("sync", "evaluate"))
    assert max(line["rollout/staleness_mean"] for line in read_metrics(tmp_path)[1:]) <= 2


def test_groups_that_are_too_old_at_the_moment_of_use_are_dropped_and_counted(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 4})
    answer = stack.engine._answer
    # A replica that lags one version behind for the groups 12..17.
    stack.engine._answer = lambda request: tuple(
        replace(r, weight_version=r.weight_version - 1) if 12 <= r.group_id <= 17 else r for r in answer(request)
    )
    run_stack(stack)
    check_books(tmp_path)
    used = {g.group_id: (u, g.weight_version) for step in range(1, 5) for g, u in read_step(tmp_path, step)}
    stale = [i for i, (u, _) in used.items() if 12 <= i <= 17 and u != "filtered"]
    assert stale and all(used[i][0] == "dropped" for i in stale)
    assert len(used) == read_metrics(tmp_path)[-1]["rollout/groups_admitted"]


def test_batches_that_are_always_too_old_end_the_run(tmp_path):
    stack = make_stack(tmp_path)
    answer = stack.engine._answer
    stack.engine._answer = lambda request: tuple(replace(r, weight_version=-1) for r in answer(request))
    with pytest.raises(DataError, match=r"5 batches in a row trained nothing; the last: all 3 groups .* max_staleness"):
        run_stack(stack)
    assert stack.policy.steps == 0


def test_several_updates_per_batch_are_one_line_each(tmp_path):
    stack = make_stack(tmp_path, rollout={"prompts_per_step": 5}, trainer={"updates_per_batch": 2, "steps": 7})
    run_stack(stack)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    check_books(tmp_path)
    groups = {step: [g for g, used in read_step(tmp_path, step) if used == "trained"] for step in range(1, 8)}
    assert [len(groups[step]) for step in range(1, 8)] == [2, 3, 2, 3, 2, 3, 2]
    assert {g.weight_version for g in groups[2]} == {0} and {g.weight_version for g in groups[4]} == {2}
    # Old log-probs are taken before the first update of a batch, for all of its updates.
    assert [event for event in stack.events if event[0] in ("prepare", "trained")][:6] == [
        *[("prepare", 0)] * 2,
        ("trained", 1),
        ("trained", 2),
        *[("prepare", 2)] * 2,
    ]
    assert [event for event in stack.events if event[0] == "sync"] == [("sync", v) for v in (0, 2, 4, 6, 7)]
    # The last batch has groups for a step that the run does not have.
    assert sum(used == "dropped" for _, used in read_step(tmp_path, 7)) >= 3


EPOCHS = {"rollout": {"prompts_per_step": 5}, "trainer": {"updates_per_batch": 2, "epochs_per_batch": 3, "steps": 12}}


def test_several_epochs_take_each_group_once_each_in_other_mini_batches(tmp_path):
    stack = make_stack(tmp_path, **EPOCHS)
    run_stack(stack)
    assert [line["rollout/epoch"] for line in read_metrics(tmp_path)] == [1, 1, 2, 2, 3, 3] * 2
    updates = {step: read_update(tmp_path, step) for step in range(1, 13)}
    assert [one.first_step for one in updates.values()] == [1] * 6 + [7] * 6
    for first in (1, 7):
        epochs = [(*updates[step].group_ids, *updates[step + 1].group_ids) for step in (first, first + 2, first + 4)]
        assert len({frozenset(ids) for ids in epochs}) == 1 and len(set(epochs)) == 3 and len(set(epochs[0])) == 5
        recorded = [[g.group_id for g, used in read_step(tmp_path, step) if used == "trained"] for step in updates]
        assert tuple(recorded[first - 1] + recorded[first]) == epochs[0] == tuple(sorted(epochs[0]))
    assert not any(read_step(tmp_path, step) for step in (3, 4, 5, 6, 9, 10, 11, 12))
    recorded_once(tmp_path)
    check_books(tmp_path)
    prepared = [event for event in stack.events if event[0] == "prepare"]
    assert prepared == [*[("prepare", 0)] * 2, *[("prepare", 6)] * 2], "passes are made before the first epoch alone"
    assert [event for event in stack.events if event[0] == "sync"] == [("sync", v) for v in (0, 6, 12)]


def test_a_run_of_epochs_that_crashed_goes_on_bit_for_bit(tmp_path):
    whole = make_stack(tmp_path / "whole", **EPOCHS)
    run_stack(whole)
    stack = make_stack(tmp_path / "crashed", crash=("train", 10, "exit"), **EPOCHS)
    with pytest.raises(Crash):
        run_stack(stack)
    stack = make_stack(tmp_path / "crashed", **EPOCHS)
    resume_stack(stack)
    assert stack.policy.weights == whole.policy.weights
    assert files(tmp_path / "crashed") == files(tmp_path / "whole")


def test_a_group_is_counted_by_its_first_epoch(tmp_path):
    """A step that was not finite dropped its groups, although a later epoch trained them."""
    trainer = {**EPOCHS["trainer"], "on_nonfinite": "skip", "steps": 6}
    stack = make_stack(tmp_path, **{**EPOCHS, "trainer": trainer})
    stack.policy.nonfinite_steps = {2: "skip", 5: "skip"}
    run_stack(stack)
    assert [read_update(tmp_path, step).applied for step in range(1, 7)] == [True, False, True, True, False, True]
    counts, outcomes = stack.sampler.ledger.counts(), [used for *_, used in recorded_once(tmp_path)]
    assert counts["trained"] == outcomes.count("trained") == 2 and len(read_update(tmp_path, 2).group_ids) == 3
    check_books(tmp_path)


def test_an_order_of_an_epoch_follows_from_seed_batch_and_epoch():
    assert sorted(epoch_order(7, 0, 1, 2)) == list(range(7)) and epoch_order(7, 0, 1, 2) == epoch_order(7, 0, 1, 2)
    others = [epoch_order(7, *numbers) for numbers in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))]
    assert len(set(map(tuple, others))) == 4


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_stops_the_run_and_is_written_out(tmp_path, how):
    stack = make_stack(tmp_path)
    stack.policy.nonfinite_steps = {3: how}
    with pytest.raises(
        NonFiniteError, match=r"step 3: .*no optimizer step; the batch is in .*failed/step_000003.parquet"
    ):
        run_stack(stack)
    failed = read_groups(tmp_path / "failed" / "step_000003.parquet")
    assert len(failed) == 3
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_a_step_that_is_not_finite_can_be_skipped_and_is_counted(tmp_path, how):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip"})
    stack.policy.nonfinite_steps = {3: how}
    outcome = run_stack(stack)
    assert outcome.step == 6 and stack.policy.steps == 5
    assert [line["rollout/steps_skipped"] for line in read_metrics(tmp_path)] == [0, 0, 1, 1, 1, 1]
    assert {used for _, used in read_step(tmp_path, 3)} <= {"filtered", "dropped"}
    assert len(read_groups(tmp_path / "failed" / "step_000003.parquet")) == 3
    check_books(tmp_path)


def test_skipping_for_ever_is_an_error(tmp_path):
    stack = make_stack(tmp_path, trainer={"on_nonfinite": "skip", "steps": 50})
    stack.policy.nonfinite_steps = dict.fromkeys(range(2, 50), "skip")
    with pytest.raises(DataError, match=r"5 batches in a row trained nothing; the last: step 6: gradient norm is inf"):
        run_stack(stack)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("generate", lambda s: setattr(s.engine, "hang_after", 9)),
        ("train", lambda s: setattr(s.policy, "hang", True)),
        ("score", lambda s: setattr(s.sampler._rollouter._scorer, "hang", True)),
    ],
)
def test_what_hangs_is_named_and_everything_is_closed(tmp_path, name, break_it):
    stack = make_stack(tmp_path, deadlines=replace(FAST, **{name: 0.05}))
    break_it(stack)
    with pytest.raises(DeadlineError, match=f"deadline '{name}'"):
        run_stack(stack)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_an_engine_that_dies_ends_the_run_with_its_own_error(tmp_path):
    stack = make_stack(tmp_path, rollout={"max_staleness": 1})
    stack.engine.fail_after = 20
    with pytest.raises(EngineError, match="replica 0 died"):
        run_stack(stack)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_a_close_that_fails_is_reported_and_the_rest_is_closed(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})

    async def fail():
        raise OSError("socket is gone")

    closed = []

    async def close_pool():
        closed.append("pool")

    stack.engine.close = fail
    stack.controller._parts = replace(stack.parts, closers={"verifiers": close_pool})
    assert run_stack(stack).status == "finished"
    assert any("closing the engine failed: OSError: socket is gone" in m for m in stack.progress.messages)
    assert stack.policy.closed == 1 and closed == ["pool"]


def test_a_cancellation_while_a_run_is_closed_leaves_nothing_open(tmp_path):
    """The supervisor's, when it notices a death while a run that has failed already is closing its engine."""
    stack = make_stack(tmp_path, trainer={"steps": 1})

    async def cancel():
        task.cancel()
        await asyncio.sleep(0.001)

    async def go():
        nonlocal task
        task = asyncio.ensure_future(stack.controller.run())
        await task

    task, stack.engine.close = None, cancel
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    assert stack.policy.closed == 1


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("where", ["generating", "training"])
def test_ctrl_c_ends_with_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path, where, staleness):
    whole = make_stack(tmp_path / "whole", rollout={"max_staleness": staleness}, trainer={"save_every_steps": 0})
    run_stack(whole)
    stack = make_stack(tmp_path / "cut", rollout={"max_staleness": staleness}, trainer={"save_every_steps": 0})
    watched = "generate" if where == "generating" else "train"

    async def go():
        run = asyncio.ensure_future(stack.controller.run())
        while (watched, 3) not in stack.events:
            await asyncio.sleep(0)
        with stop_on_signals(stack.controller):
            os.kill(os.getpid(), signal.SIGINT)
            return await run

    outcome = asyncio.run(go())
    assert outcome.status == "stopped" and 3 <= outcome.step < 6
    assert find_latest_valid(stack.run, stack.progress)[1]["step"] == outcome.step
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
    resumed = make_stack(tmp_path / "cut", rollout={"max_staleness": staleness})
    assert resume_stack(resumed).status == "finished"
    if staleness == 0:
        assert files(tmp_path / "cut") == files(tmp_path / "whole")
        assert resumed.policy.weights == whole.policy.weights
    check_books(tmp_path / "cut")


def test_ctrl_c_does_not_wait_for_the_generation(tmp_path):
    stack = make_stack(tmp_path, trainer={"save_every_steps": 0})

    async def go():
        stack.engine.gate = asyncio.Event()
        stack.engine.gate.set()
        run = asyncio.ensure_future(stack.controller.run())
        while ("trained", 2) not in stack.events:
            await asyncio.sleep(0)
        stack.engine.gate.clear()  # From here on no group is ever completed.
        while ("generate", 2) not in stack.events:
            await asyncio.sleep(0)
        stack.controller.request_stop("SIGINT")
        return await run

    outcome = asyncio.run(go())
    assert (outcome.status, outcome.step) == ("stopped", 2)
    assert stack.events[-1] == ("save", 2) and ("generated", 2) in stack.events
    assert stack.engine.iterators_closed == len(stack.engine.requests)
    assert find_latest_valid(tmp_path, stack.progress)[1]["step"] == 2


def test_skipped_steps_are_still_counted_after_a_resume(tmp_path):
    def make(run, crash=None):
        stack = make_stack(run, crash=crash, trainer={"on_nonfinite": "skip"})
        stack.policy.nonfinite_steps = {1: "skip", 6: "raise"}
        return stack

    with pytest.raises(Crash):
        run_stack(make(tmp_path / "cut", crash=("train", 5, "enter")))
    resume_stack(make(tmp_path / "cut"))
    run_stack(make(tmp_path / "whole"))
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert [line["rollout/steps_skipped"] for line in read_metrics(tmp_path / "cut")] == [1, 1, 1, 1, 1, 2]


def test_the_second_ctrl_c_stops_at_once(tmp_path):
    stack = make_stack(tmp_path)

    async def go():
        stack.policy.gate = asyncio.Event()
        run = asyncio.ensure_future(stack.controller.run())
        while ("train", 1) not in stack.events:
            await asyncio.sleep(0)
        with stop_on_signals(stack.controller):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not run.done()
            os.kill(os.getpid(), signal.SIGINT)
            return await run

    outcome = asyncio.run(go())
    assert (outcome.status, outcome.step) == ("interrupted", 0)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)
    assert not step_directories(tmp_path / "checkpoints")


def _borders() -> list[tuple[str, int, str]]:
    names = ["rollout", "reward", "build", "logprob", "train", "sync", "evaluate", "write", "checkpoint"]
    numbers = {"reward": (1, 13, 30), "evaluate": (1,), "checkpoint": (1, 2)}
    return [(n, i, side) for n in names for i in numbers.get(n, (1, 3, 5)) for side in ("enter", "exit")]


BORDERS = [
    border if number % 3 == 0 else pytest.param(border, marks=pytest.mark.heavy)
    for number, border in enumerate(_borders())
]


@pytest.mark.parametrize("border", BORDERS, ids=lambda b: f"{b[0]}-{b[1]}-{b[2]}")
def test_a_run_that_crashed_at_any_phase_resumes_bit_for_bit(tmp_path, border, unbroken):
    stack = make_stack(tmp_path, crash=border, trainer=EVALUATE)
    with pytest.raises(Crash):
        run_stack(stack)
    assert border in stack.phases.borders
    resumed = make_stack(tmp_path, order_seed=7, trainer=EVALUATE)
    assert resume_stack(resumed).step == 6
    assert files(tmp_path) == files(unbroken.run)
    assert resumed.policy.weights == unbroken.policy.weights
    assert resumed.sampler.ledger.state_dict() == unbroken.sampler.ledger.state_dict()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    stack = make_stack(tmp_path_factory.mktemp("unbroken"), trainer=EVALUATE)
    run_stack(stack)
    return stack


@given(
    staleness=st.integers(0, 3),
    order_seed=st.integers(0, 10_000),
    updates=st.integers(1, 3),
    epochs=st.integers(1, 2),
    oversampling=st.sampled_from([1.0, 1.7, 3.0]),
    keep_surplus=st.booleans(),
    filter_groups=st.booleans(),
    early=st.booleans(),
    lags=st.dictionaries(st.integers(0, 60), st.integers(1, 4), max_size=8),
    aborts=st.sets(st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(0, K - 1)), max_size=30),
    skips=st.sets(st.integers(2, 8), max_size=2),
    crash_at=st.one_of(st.none(), st.integers(2, 6)),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_books_add_up_and_nothing_stale_or_twice_is_trained(
    tmp_path_factory,
    staleness,
    order_seed,
    updates,
    epochs,
    lags,
    aborts,
    skips,
    crash_at,
    filter_groups,
    early,
    **rollout,
):
    run = tmp_path_factory.mktemp("any")
    options = {
        "rollout": {"max_staleness": staleness, **rollout},
        "trainer": {"updates_per_batch": updates, "epochs_per_batch": epochs, "on_nonfinite": "skip", "steps": 7},
        "filter_groups": filter_groups,
        "finish_early": early,
        "order_seed": order_seed,
    }
    stack = make_stack(run, crash=("train", crash_at, "exit") if crash_at else None, **options)
    _misbehave(stack, lags, aborts, skips)
    if crash_at:
        with pytest.raises(Crash):
            run_stack(stack)
        stack = make_stack(run, **options)
        _misbehave(stack, lags, aborts, skips)
        resume_stack(stack)
    else:
        run_stack(stack)
    check_books(run)
    recorded = recorded_once(run)
    counts, outcomes = stack.sampler.ledger.counts(), [used for *_, used in recorded]
    assert counts["trained"] == outcomes.count("trained")
    for step, group, used in recorded:
        if used == "trained":
            assert len(group.rollouts) == K and step not in skips
            earliest_start_of_its_batch = step - updates
            assert earliest_start_of_its_batch - group.weight_version <= staleness * updates * epochs


def _misbehave(stack, lags, aborts, skips) -> None:
    """Replicas that lag behind, rollouts that abort, steps that are not finite."""
    answer = stack.engine._answer
    stack.engine._answer = lambda request: tuple(
        replace(r, weight_version=r.weight_version - lags.get(r.group_id, 0)) for r in answer(request)
    )
    stack.engine.abort_rollouts = aborts
    stack.policy.nonfinite_steps = dict.fromkeys(skips, "skip")


@pytest.mark.parametrize(("staleness", "saved"), [(0, 4), (1, 3), (2, 3)])  # From 1, every other batch is all carried.
def test_carried_groups_and_attempts_survive_a_crash(tmp_path, staleness, saved):
    rollout = {"max_staleness": staleness, "keep_surplus": True, "oversampling": 2.0}
    stack = make_stack(
        tmp_path,
        crash=("train", saved + 1, "enter"),
        rollout=rollout,
        trainer={"save_every_steps": 1},
        filter_groups=False,
    )
    stack.engine.abort_rollouts = {(i, 0, 1) for i in range(0, 90, 4)}
    with pytest.raises(Crash):
        run_stack(stack)
    checkpoint, state = find_latest_valid(tmp_path, stack.progress)
    assert state["step"] == saved and state["sampler"]["ledger"]["retries"]
    assert read_waiting(checkpoint), "no group waits in the checkpoint, so this test shows nothing"
    resumed = make_stack(tmp_path, rollout=rollout, filter_groups=False)
    resumed.engine.abort_rollouts = stack.engine.abort_rollouts
    resume_stack(resumed)
    check_books(tmp_path)
    seen = [g.group_id for step in range(1, 7) for g, used in read_step(tmp_path, step) if used == "trained"]
    assert len(seen) == len(set(seen))
    if staleness == 0:
        whole = make_stack(tmp_path / "whole", rollout=rollout, filter_groups=False)
        whole.engine.abort_rollouts = stack.engine.abort_rollouts
        run_stack(whole)
        assert files(tmp_path) == files(whole.run)
        assert resumed.policy.weights == whole.policy.weights


def test_a_checkpoint_with_generation_far_ahead_loses_and_repeats_nothing(tmp_path):
    rollout = {"max_staleness": 2, "oversampling": 1.0}
    stack = make_stack(tmp_path, crash=("checkpoint", 2, "exit"), rollout=rollout, filter_groups=False)
    with pytest.raises(Crash):
        run_stack(stack)
    _, state = find_latest_valid(tmp_path, stack.progress)
    assert state["step"] == 4
    assert stack.source.cursor > 3 * 4
    # Checkpoint of step 4: exactly the prompts of four batches are used up, and their groups are the only ones known.
    assert state["sampler"]["source"] == {"cursor": 12}
    assert state["sampler"]["ledger"]["outstanding"] == []
    assert state["sampler"]["ledger"]["finished"] == {"trained": 12, "filtered": 0, "dropped": 0}
    resumed = make_stack(tmp_path, rollout=rollout, filter_groups=False)
    resume_stack(resumed)
    prompts = [g.prompt.id for step in range(1, 7) for g, _ in read_step(tmp_path, step)]
    assert prompts == [f"p{i}" for i in range(18)]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run_stack(make_stack(tmp_path))
    stack = make_stack(tmp_path)
    stack.controller._parts = replace(stack.parts, identity={"seed": 2})
    with pytest.raises(CheckpointError, match="belongs to another run: seed was 1, is 2"):
        resume_stack(stack)


def test_a_finished_run_resumes_to_nothing_and_to_more_steps(tmp_path):
    run_stack(make_stack(tmp_path, trainer={"steps": 4}))
    again = make_stack(tmp_path, trainer={"steps": 4})
    assert resume_stack(again).step == 4 and not again.policy.batches
    more = make_stack(tmp_path, trainer={"steps": 6})
    resume_stack(more)
    whole = make_stack(tmp_path / "whole", trainer={"steps": 6})
    run_stack(whole)
    assert files(tmp_path) == files(whole.run) and more.policy.weights == whole.policy.weights


def test_the_readable_copy_of_the_weights_is_in_the_state(tmp_path):
    run_stack(make_stack(tmp_path))
    _, state = find_latest_valid(tmp_path, make_stack(tmp_path / "x").progress)
    assert state["difficulty_weights"] == {"difficulty/weight/2": read_metrics(tmp_path)[-1]["difficulty/weight/2"]}


def test_a_drift_of_engine_and_trainer_is_a_warning(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 14})
    train = stack.policy.train

    async def drifts(batch, step):
        result = await train(batch, step)
        return replace(result, metrics={**result.metrics, "mismatch/kl": 0.001 if step < 10 else 0.05})

    stack.policy.train = drifts
    run_stack(stack)
    warnings = [message for message in stack.progress.messages if "engine and trainer disagree" in message]
    assert len(warnings) == 1 and warnings[0].startswith("warning: step 12: ")
