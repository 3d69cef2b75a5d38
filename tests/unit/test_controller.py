"""The loop over fakes: determinism, overlap, staleness, epochs, syncs, deadlines, numbers of a step, what fails."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from books import check_books, files_of, recorded_once
from loop_fakes import EVALUATE, FAST, Crash, FakeScorer, K, make_stack, resume_stack, run_stack, with_parts

from megatron_daro.errors import DeadlineError, EngineError
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.observe.phases import Phases
from megatron_daro.rollout.filling import FILLINGS
from megatron_daro.rollout.minibatches import epoch_order
from megatron_daro.rollout.recorder import read_minibatch, read_step
from megatron_daro.routed_experts import ExpertsFolder


def test_a_run_writes_every_step_and_its_books_add_up(tmp_path):
    stack = make_stack(tmp_path, trainer=EVALUATE | {"steps": 7})
    outcome = run_stack(stack)
    assert (outcome.status, outcome.step) == ("finished", 7)
    assert stack.policy.steps == 7 and stack.progress.steps == [1, 2, 3, 4, 5, 6, 7]
    before, *lines = read_metrics(tmp_path)
    assert before["step"] == 0 and "eval/held_out/accuracy" in before
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    check_books(tmp_path)
    expected = {
        *(f"rollout/groups_{state}" for state in ("admitted", "trained", "filtered", "dropped", "outstanding")),
        "rollout/retries",
        "rollout/late_refused",
        "rollout/steps_skipped",
        "rollout/generated_tokens",
        "rollout/epoch",
        "sync/bytes",
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
    assert [line["step"] for line in lines if "eval/held_out/accuracy" in line] == [3, 6, 7], "at the end too"
    phases = {"rollout", "reward", "build", "logprob", "train", "sync", "evaluate", "write", "checkpoint"}
    assert phases <= set(stack.phases.counts)
    assert {line["rollout/staleness_mean"] for line in lines} == {0.0}
    groups = [group for group, used in read_step(tmp_path, 4) if used == "trained"]
    assert {r.weight_version for group in groups for r in group.rollouts} == {3}
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def check_accuracy(run_dir):
    """It is that of all recorded answers of a step."""
    for line in read_metrics(run_dir):
        verdicts = [v for group, _ in read_step(run_dir, line["step"]) for v in group.verdicts]
        assert line["accuracy/mean"] == pytest.approx(sum(v.correct for v in verdicts) / len(verdicts), abs=1e-12)


def test_accuracy_counts_filtered_groups_too(tmp_path):
    run_stack(make_stack(tmp_path))
    check_accuracy(tmp_path)
    for line in read_metrics(tmp_path):
        bins = [g.bin for g, used in read_step(tmp_path, line["step"]) if used != "dropped"]
        assert [line[f"difficulty/groups/{k}"] for k in range(K + 1)] == [bins.count(k) for k in range(K + 1)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_files_do_not_depend_on_the_order_of_arrival(tmp_path, staleness):
    runs = []
    for order_seed in (0, 1, 2):
        stack = make_stack(tmp_path / str(order_seed), order_seed=order_seed, rollout={"max_staleness": staleness})
        run_stack(stack)
        written = files_of(stack.run)
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


def test_what_a_sync_waits_for_the_batch_under_way_is_a_metric(tmp_path):
    stack, phases = make_stack(tmp_path, rollout={"max_staleness": 1}), Phases()
    with_parts(stack, phases=phases)
    generate = stack.engine.generate

    async def go():
        more = asyncio.Event()

        async def slow(requests):
            if ("sync", 1) in stack.events:
                await more.wait()
            async for rollouts in generate(requests):
                yield rollouts

        stack.engine.generate = slow
        run = asyncio.ensure_future(stack.controller.run())
        async with asyncio.timeout(20):
            while ("trained", 2) not in stack.events or "sync_wait" not in phases.active():
                await asyncio.sleep(0)
        more.set()
        await run

    asyncio.run(go())
    assert all(line["timing/sync_wait_s"] > 0 for line in read_metrics(tmp_path))


def test_weights_are_never_replaced_during_generation_or_evaluation(tmp_path):
    stack = make_stack(tmp_path, rollout={"max_staleness": 2}, trainer={"steps": 12, **EVALUATE})
    run_stack(stack)
    generating = 0
    for kind, _ in stack.events:
        generating += {"generate": 1, "generated": -1}.get(kind, 0)
        assert not (generating and kind in ("sync", "evaluate"))
    assert max(line["rollout/staleness_mean"] for line in read_metrics(tmp_path)[1:]) <= 2


def test_several_minibatches_per_batch_are_one_line_each(tmp_path):
    stack = make_stack(tmp_path, rollout={"prompts_per_batch": 5}, trainer={"minibatches_per_batch": 2, "steps": 7})
    run_stack(stack)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    check_books(tmp_path)
    groups = {step: [g for g, used in read_step(tmp_path, step) if used == "trained"] for step in range(1, 8)}
    assert [len(groups[step]) for step in range(1, 8)] == [2, 3, 2, 3, 2, 3, 2]
    assert {g.weight_version for g in groups[2]} == {0} and {g.weight_version for g in groups[4]} == {2}
    # Old log-probs are taken before the first step of a batch, for all of its steps.
    assert [event for event in stack.events if event[0] in ("prepare", "trained")][:6] == [
        *[("prepare", 0)] * 2,
        ("trained", 1),
        ("trained", 2),
        *[("prepare", 2)] * 2,
    ]
    assert [event for event in stack.events if event[0] == "sync"] == [("sync", v) for v in (0, 2, 4, 6, 7)]
    # The last batch has groups for a step that the run does not have.
    assert sum(used == "dropped" for _, used in read_step(tmp_path, 7)) >= 3


EPOCHS = {
    "rollout": {"prompts_per_batch": 5},
    "trainer": {"minibatches_per_batch": 2, "epochs_per_batch": 3, "steps": 12},
}


def test_several_epochs_take_each_group_once_each_in_other_mini_batches(tmp_path):
    stack = make_stack(tmp_path, **EPOCHS)
    run_stack(stack)
    assert [line["rollout/epoch"] for line in read_metrics(tmp_path)] == [1, 1, 2, 2, 3, 3] * 2
    minibatches = {step: read_minibatch(tmp_path, step) for step in range(1, 13)}
    assert [one.first_step for one in minibatches.values()] == [1] * 6 + [7] * 6
    for first in (1, 7):
        epochs = [
            (*minibatches[step].group_ids, *minibatches[step + 1].group_ids) for step in (first, first + 2, first + 4)
        ]
        assert len({frozenset(ids) for ids in epochs}) == 1 and len(set(epochs)) == 3 and len(set(epochs[0])) == 5
        recorded = [[g.group_id for g, used in read_step(tmp_path, step) if used == "trained"] for step in minibatches]
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
    assert files_of(tmp_path / "crashed") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("skipped", [(2, 5), (2, 3, 4, 5)])
def test_a_group_is_booked_with_the_first_step_that_trains_it_and_dropped_where_none_does(tmp_path, skipped):
    trainer = {**EPOCHS["trainer"], "on_nonfinite": "skip", "steps": 6}
    stack = make_stack(tmp_path, **{**EPOCHS, "trainer": trainer})
    stack.policy.nonfinite_steps = dict.fromkeys(skipped, "skip")
    run_stack(stack)
    expected, ids = {}, {step: read_minibatch(tmp_path, step).group_ids for step in range(1, 7)}
    for group_id in (*ids[1], *ids[2]):
        steps = [step for step in ids if group_id in ids[step]]
        trained = [step for step in steps if step not in skipped]
        expected[group_id] = (trained[0], "trained") if trained else (steps[-1], "dropped")
    recorded = {group.group_id: (step, used) for step, group, used in recorded_once(tmp_path)}
    assert {group_id: recorded[group_id] for group_id in expected} == expected
    outcomes = [used for _, used in expected.values()]
    assert stack.sampler.ledger.counts()["trained"] == outcomes.count("trained")
    assert ("dropped" in outcomes) == (skipped != (2, 5)) and (1, "trained") in expected.values()
    check_books(tmp_path)


def test_an_order_of_an_epoch_follows_from_seed_batch_and_epoch():
    assert sorted(epoch_order(7, 0, 1, 2)) == list(range(7)) and epoch_order(7, 0, 1, 2) == epoch_order(7, 0, 1, 2)
    others = [epoch_order(7, *numbers) for numbers in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))]
    assert len(set(map(tuple, others))) == 4


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("next_group", lambda engine, policy, scorer: setattr(engine, "hang_after", 9)),
        ("train", lambda engine, policy, scorer: setattr(policy, "hang", True)),
        ("score", lambda engine, policy, scorer: setattr(scorer, "hang", True)),
    ],
)
def test_what_hangs_is_named_and_everything_is_closed(tmp_path, name, break_it):
    scorer = FakeScorer()
    stack = make_stack(tmp_path, scorer=scorer, deadlines=replace(FAST, **{name: 0.05}))
    break_it(stack.engine, stack.policy, scorer)
    with pytest.raises(DeadlineError, match=name):
        run_stack(stack)
    assert (stack.engine.closed, stack.policy.closed) == (1, 1)


def test_a_disk_that_hangs_under_the_metrics_is_named(tmp_path):
    stack = with_parts(make_stack(tmp_path, deadlines=replace(FAST, write=0.5)), recorder=None)
    stack.parts.metrics.write = lambda step, metrics: time.sleep(2)
    with pytest.raises(DeadlineError, match=r"write.*metrics of step 1"):
        run_stack(stack)


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
    assert run_stack(with_parts(stack, closers={"verifiers": close_pool})).status == "finished"
    assert any("socket is gone" in m for m in stack.progress.messages)
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


@given(
    staleness=st.integers(0, 3),
    order_seed=st.integers(0, 10_000),
    minibatches=st.integers(1, 3),
    epochs=st.integers(1, 2),
    oversampling=st.sampled_from([1.0, 1.7, 3.0]),
    keep_surplus=st.booleans(),
    filter_groups=st.booleans(),
    finish_batch=st.sampled_from(sorted(FILLINGS)),
    aborts=st.sets(st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(0, K - 1)), max_size=30),
    skips=st.sets(st.integers(2, 8), max_size=2),
    crash_at=st.one_of(st.none(), st.integers(2, 6)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_books_add_up_and_nothing_stale_or_twice_is_trained(
    tmp_path_factory,
    staleness,
    order_seed,
    minibatches,
    epochs,
    aborts,
    skips,
    crash_at,
    filter_groups,
    finish_batch,
    **rollout,
):
    run = tmp_path_factory.mktemp("any")
    options = {
        "rollout": {"max_staleness": staleness, **rollout},
        "trainer": {
            "minibatches_per_batch": minibatches,
            "epochs_per_batch": epochs,
            "on_nonfinite": "skip",
            "steps": 7,
        },
        "filter_groups": filter_groups,
        "finish_batch": finish_batch,
        "order_seed": order_seed,
    }
    stack = make_stack(run, crash=("train", crash_at, "exit") if crash_at else None, **options)
    _misbehave(stack, aborts, skips)
    if crash_at:
        with pytest.raises(Crash):
            run_stack(stack)
        stack = make_stack(run, **options)
        _misbehave(stack, aborts, skips)
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
            assert read_minibatch(run, step).first_step - 1 - group.weight_version <= staleness * minibatches * epochs


def _misbehave(stack, aborts, skips) -> None:
    """Rollouts that abort, steps that are not finite."""
    stack.engine.abort_rollouts = aborts
    stack.policy.nonfinite_steps = dict.fromkeys(skips, "skip")


def test_a_drift_of_engine_and_trainer_is_a_warning(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 14})
    train = stack.policy.train

    async def drifts(batch, step):
        result = await train(batch, step)
        return replace(result, metrics={**result.metrics, "mismatch/kl": 0.001 if step < 10 else 0.05})

    stack.policy.train = drifts
    run_stack(stack)
    (warning,) = [message for message in stack.progress.messages if message.startswith("warning: ")]
    assert "step 12" in warning


def test_throughput_is_tokens_over_the_time_that_training_took(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 2})
    tokens, build = [], stack.parts.build

    def built(groups, step):
        columns = build(groups, step)
        tokens.append(len(columns.tokens_T))
        return columns

    times = iter([{}, {"timing/train_s": 2.0}, {}])
    stack.phases.collect = lambda: next(times)
    run_stack(with_parts(stack, build=built))
    first, second = read_metrics(tmp_path)
    assert first["throughput/train_tokens_per_s"] == tokens[0] / 2.0
    assert "throughput/train_tokens_per_s" not in second


@pytest.mark.parametrize("recorded", [True, False])
def test_experts_stay_on_the_disk_of_what_a_record_names(tmp_path, recorded):
    stack, folder = make_stack(tmp_path, trainer={"steps": 3}), ExpertsFolder(tmp_path)
    answer = stack.engine.answer

    def routed(rollout):
        experts_TLK = np.full((len(rollout.tokens) - 1, 1, 1), rollout.index)
        stored = folder.store((rollout.group_id, rollout.attempt, rollout.index), experts_TLK, len(rollout.tokens))
        return replace(rollout, routed_experts=stored)

    stack.engine.answer = lambda request: tuple(map(routed, answer(request)))
    changes = {} if recorded else {"recorder": None}
    run_stack(with_parts(stack, experts=folder, **changes))
    kept = set(map(str, folder.path.rglob("*.npy")))
    if not recorded:
        assert kept == set()
        return
    trained = [g for step in (1, 2, 3) for g, used in read_step(tmp_path, step) if used == "trained"]
    assert kept == {part.path for g in trained for r in g.rollouts for part in r.routed_experts.parts} != set()
