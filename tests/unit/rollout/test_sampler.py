"""Filling a batch: determinism, retries, refills, surplus, staleness, and engines that misbehave."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from group_forms import plain_group, through_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_fakes import FAST, FakeEngine, FakePhases, FakeProgress, FakeScorer, FakeSource, K, make_sampler, verdict

sys.path.insert(0, str(Path(__file__).parents[2] / "simulation"))

from virtual_loop import VirtualLoop, run

from megatron_daro.errors import CheckpointError, DataError, DeadlineError, EngineError, RewardError
from megatron_daro.routed_experts import StoredExperts


def setup(order_seed=0, **options):
    engine, source, progress = FakeEngine(order_seed), FakeSource(), FakeProgress()
    engine.version = 0
    sampler = make_sampler(engine, source, progress, FakePhases(), order_seed=order_seed, **options)
    return SimpleNamespace(engine=engine, source=source, progress=progress, sampler=sampler)


def sample(parts, use_version=0):
    return asyncio.run(parts.sampler.sample(use_version))


def plain(groups):
    return [plain_group(group) for group in groups]


@given(st.integers(1, 1000))
@settings(max_examples=12, deadline=None)
def test_the_batch_does_not_depend_on_the_order_of_arrival(order_seed):
    batches = []
    for seed in (0, order_seed):
        parts = setup(seed)
        batches.append([sample(parts), sample(parts)])
    for one, other in zip(*batches, strict=True):
        for name in ("groups", "filtered", "dropped"):
            assert plain(getattr(one, name)) == plain(getattr(other, name))
        assert one.snapshot == other.snapshot
        assert one.rounds == other.rounds


def test_groups_are_complete_filtered_and_in_order():
    parts = setup()
    batch = sample(parts)
    assert len(batch.groups) == 3
    ids = [group.group_id for group in batch.groups]
    assert ids == sorted(ids)
    for group in batch.groups:
        assert [r.index for r in group.rollouts] == list(range(K))
        assert 0 < group.bin < K
        assert group.verdicts == tuple(verdict(r.text, group.prompt.answer) for r in group.rollouts)
    assert {group.bin for group in batch.filtered} <= {0, K} and batch.filtered
    counts = parts.sampler.ledger.counts()
    assert counts["outstanding"] == 3 and counts["filtered"] == len(batch.filtered)
    assert parts.engine.iterators_closed == len(parts.engine.requests)


def test_without_the_filter_every_group_trains():
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0})
    batch = sample(parts)
    assert [group.prompt.id for group in batch.groups] == ["p0", "p1", "p2"]
    assert batch.rounds == 1 and not batch.filtered


def test_only_missing_rollouts_are_requested_again_under_the_same_group_id():
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0})
    parts.engine.abort_rollouts = {(1, 0, 2), (1, 0, 3), (1, 1, 3)}
    parts.engine.lose_groups = {(2, 0)}
    batch = sample(parts)
    asked = [[(r.group_id, r.attempt, r.indices) for r in requests] for requests in parts.engine.requests]
    assert asked[1:] == [[(1, 1, (2, 3)), (2, 1, (0, 1, 2, 3))], [(1, 2, (3,))]]
    assert [group.group_id for group in batch.groups] == [0, 1, 2]
    assert [r.attempt for r in batch.groups[1].rollouts] == [0, 0, 1, 2]
    assert parts.sampler.ledger.retries == 3


def test_late_answers_of_an_old_attempt_are_refused_and_counted():
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0})
    parts.engine.abort_rollouts, parts.engine.keep_late = {(1, 0, 2)}, True
    batch = sample(parts)
    assert parts.sampler.ledger.late_refused == 1
    assert batch.groups[1].rollouts[2].attempt == 1
    parts.engine.late = [batch.groups[0].rollouts[0]]  # A second answer to an index that has one.
    sample(parts)
    assert parts.sampler.ledger.late_refused == 2


def test_a_group_that_stays_incomplete_is_dropped_and_refilled():
    parts = setup(filter_groups=False, rollout={"oversampling": 1.0})
    parts.engine.lose_groups = {(1, 0), (1, 1)}
    parts.engine.abort_rollouts = {(1, 2, 3)}
    batch = sample(parts)
    assert [group.group_id for group in batch.groups] == [0, 2, 3]
    assert [group.group_id for group in batch.dropped] == [
        1,
        4,
    ]  # Two are refilled where a third is lost; one is surplus.
    assert len(batch.dropped[0].rollouts) == 3
    assert any("group 1" in m for m in parts.progress.messages)
    assert parts.sampler.ledger.counts()["dropped"] == 2


@pytest.mark.parametrize("rounds", [0, 1])
def test_refills_are_bounded_and_a_short_batch_is_said(rounds):
    parts = setup(rollout={"prompts_per_batch": 40, "oversampling": 1.0, "max_refill_rounds": rounds})
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="mixed" if int(p.id[1:]) % 20 == 1 else "hard") for p in give(n)
    ]
    batch = sample(parts)
    assert batch.rounds == 1 + rounds == len(parts.engine.requests)
    assert 0 < len(batch.groups) < 40
    assert [m for m in parts.progress.messages if f"{len(batch.groups)} of 40" in m]


def test_batches_without_a_trainable_group_are_skipped_and_then_an_error():
    parts = setup(rollout={"max_refill_rounds": 1})
    parts.source.next = lambda n, give=parts.source.next: [replace(p, answer="easy") for p in give(n)]
    with pytest.raises(DataError, match="3 batches"):
        sample(parts)
    assert len(parts.engine.requests) == 3 * 2


def test_batches_whose_groups_all_fail_end_in_an_error_that_does_not_blame_the_prompts():
    parts = setup(rollout={"max_refill_rounds": 0})
    parts.engine.lose_groups = {(group, attempt) for group in range(99) for attempt in range(3)}
    with pytest.raises(DataError, match="3 batches") as failed:
        sample(parts)
    assert "failed" in str(failed.value) and "prompts" not in str(failed.value)


def test_an_empty_batch_is_counted_and_its_groups_are_handed_on():
    parts = setup(rollout={"max_refill_rounds": 0, "prompts_per_batch": 2, "oversampling": 1.0})
    parts.source.next = lambda n, give=parts.source.next: [
        replace(p, answer="easy" if int(p.id[1:]) < 2 else "mixed") for p in give(n)
    ]
    batch = sample(parts)
    assert [group.group_id for group in batch.filtered][:2] == [0, 1]
    assert batch.counters["rollout/batches_empty"] == 1
    again = setup()
    again.sampler.load_state_dict(batch.snapshot.to_json(dict.fromkeys(parts.sampler.ledger.outstanding, "trained")))
    assert sample(again).counters["rollout/batches_empty"] == 1


def test_surplus_is_chosen_by_id_and_dropped():
    parts = setup(filter_groups=False, rollout={"oversampling": 2.0})
    batch = sample(parts)
    assert [group.group_id for group in batch.groups] == [0, 1, 2]
    assert [group.group_id for group in batch.dropped] == [3, 4, 5]
    assert batch.snapshot.surplus == ()


@pytest.mark.parametrize(
    ("steps_per_batch", "use_version", "carried"),
    [(1, 0, True), (1, 1, True), (1, 2, False), (3, 3, True), (3, 4, False)],
)
def test_surplus_is_kept_while_it_is_young_enough(steps_per_batch, use_version, carried):
    rollout = {"oversampling": 2.0, "keep_surplus": True, "max_staleness": 1}
    parts = setup(filter_groups=False, rollout=rollout, steps_per_batch=steps_per_batch)
    first = sample(parts)
    assert not first.dropped
    state = first.snapshot.to_json(dict.fromkeys([0, 1, 2], "trained"))
    waiting = through_parquet(first.snapshot.waiting())
    assert [record.group.group_id for record in waiting] == [3, 4, 5]
    resumed = setup(filter_groups=False, rollout=rollout, steps_per_batch=steps_per_batch)
    resumed.sampler.load_state_dict(state, waiting)
    parts.sampler.ledger.finish([0, 1, 2], "trained")
    for sampler_parts in (parts, resumed):
        batch = sample(sampler_parts, use_version)
        assert ([group.group_id for group in batch.groups] == [3, 4, 5]) == carried
        assert [group.group_id for group in batch.dropped] == ([] if carried else [3, 4, 5])
    assert parts.sampler.ledger.state_dict() == resumed.sampler.ledger.state_dict()
    shorter = max(r.response_length for record in waiting for r in record.group.rollouts) - 1
    with pytest.raises(CheckpointError, match="max_response_tokens"):
        setup(rollout={"max_response_tokens": shorter}).sampler.load_state_dict(state, waiting)


def test_a_dead_engine_ends_sampling_with_its_own_error():
    parts = setup()
    parts.engine.fail_after = 2
    with pytest.raises(EngineError, match="replica 0 died"):
        sample(parts)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_hanging_engine_is_named(stubborn):
    parts = setup(deadlines=replace(FAST, next_group=0.05, abort=0.05))
    parts.engine.hang_after, parts.engine.stubborn = 1, stubborn

    async def go():
        with pytest.raises(DeadlineError, match="next_group"):
            await parts.sampler.sample(0)
        parts.engine.stubborn = False

    run(VirtualLoop(Random(0), deadline_s=60.0), go())


def test_a_hanging_verifier_is_named():
    scorer = FakeScorer()
    scorer.hang = True
    parts = setup(deadlines=replace(FAST, score=0.05), scorer=scorer)
    with pytest.raises(DeadlineError, match="score"):
        sample(parts)


def test_a_verifier_that_loses_a_verdict_is_an_error():
    class Loses(FakeScorer):
        async def score_async(self, pairs):
            return (await super().score_async(pairs))[:-1]

    parts = setup(scorer=Loses())
    with pytest.raises(RewardError, match=r"3 .*4"):
        sample(parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, logprobs=r.logprobs[:-1]), "logprobs"),
        (lambda r: replace(r, loss_mask=np.append(r.loss_mask, 1)), "loss_mask"),
        (lambda r: replace(r, tokens=np.where(np.arange(len(r.tokens)) == 0, 99, r.tokens)), "prompt"),
        (lambda r: replace(r, routed_experts=StoredExperts((), (99, 1, 1))), "routed_experts"),
        (lambda r: replace(r, group_id=77), "group 77"),
    ],
)
def test_rollouts_that_do_not_fit_are_refused(change, message):
    parts = setup()
    answer = parts.engine.answer
    parts.engine.answer = lambda request: tuple(map(change, answer(request)))
    with pytest.raises(EngineError, match=message):
        sample(parts)


def test_a_prompt_source_that_ends_is_an_error():
    parts = setup()
    parts.source.next = lambda n: []
    with pytest.raises(DataError, match="0 prompts"):
        sample(parts)


def test_a_batch_says_what_it_took_and_what_was_counted_since_the_beginning():
    parts = setup(filter_groups=False, rollout={"oversampling": 2.0})
    parts.engine.abort_rollouts = {(0, 0, 1)}
    batch = sample(parts)
    assert 0 < batch.rollout_s < 60 and batch.rounds == 1
    tokens = sum(r.response_length for one in (*batch.groups, *batch.dropped) for r in one.rollouts)
    again = next(r for r in batch.groups[0].rollouts if r.index == 1)
    assert again.attempt == 1 and batch.generated_tokens >= tokens
    assert batch.counters == {
        "rollout/batches_empty": 0, "rollout/groups_unfinished": 0, "rollout/groups_aborted": 0,
        "rollout/groups_resumed": 0, "rollout/aborted_tokens": batch.generated_tokens - tokens,
        "reward/failed_worker_starts": 0,
    }  # fmt: skip
    second = sample(parts)
    whole = sum(r.response_length for one in (*second.groups, *second.dropped) for r in one.rollouts)
    assert second.generated_tokens == whole, "those of the batch before are not counted again"


def test_a_failed_start_of_a_verifier_is_counted():
    scorer = FakeScorer()
    scorer.failed_starts = 3
    assert sample(setup(scorer=scorer)).counters["reward/failed_worker_starts"] == 3


def test_a_state_that_does_not_fit_names_what_is_there():
    parts = setup(filter_groups=False, rollout={"oversampling": 2.0, "keep_surplus": True, "max_staleness": 1})
    batch = sample(parts)
    state = batch.snapshot.to_json(dict.fromkeys([0, 1, 2], "trained"))
    other = setup(filter_groups=False)
    with pytest.raises(CheckpointError, match=r"\[3, 4, 5\]"):
        other.sampler.load_state_dict(state)
