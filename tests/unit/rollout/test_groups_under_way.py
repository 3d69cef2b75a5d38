"""Groups before a batch has them: what is missing, what waits, what a checkpoint keeps; and the steps of a batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fleet_fakes import NEVER
from loop_fakes import FAST, FakePhases, FakeProgress, K, make_rollout

from megatron_daro.config.sections import RolloutSection, TrainerSection
from megatron_daro.errors import DataError, EngineError, RewardError
from megatron_daro.rollout import batch_filler
from megatron_daro.rollout.batch_filler import EarlyFill, PartialBatch, RolloutContext, Rounds
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.recorder import RecordedUpdate
from megatron_daro.rollout.rollouter import (
    PartialGroup,
    Pending,
    RolloutCollector,
    SingleTurn,
    admit,
    check_shape,
    judge,
)
from megatron_daro.rollout.sampled_batch import (
    SampledBatch,
    Snapshot,
    Update,
    epoch_order,
    is_replay,
    last_step,
    passed,
    plan_updates,
)
from megatron_daro.routed_experts import StoredExperts
from megatron_daro.types import Group, Prompt, SamplingParams, Verdict

PROMPT = Prompt("p", "4", "unit", tokens=(1, 2))


def rollout(index=0, length=3, *, group_id=0, version=3, finish="stop", **changes):
    return replace(make_rollout(group_id, 0, index, PROMPT, version, finish=finish, length=length), **changes)


def group(group_id, right=1, size=K, version=3) -> Group:
    rollouts = tuple(rollout(i, group_id=group_id, version=version) for i in range(size))
    return Group(group_id, PROMPT, rollouts, tuple(Verdict(i < right, 1.0, "m") for i in range(size)))


def collector(ledger=None, *, most=8, segment=None, continues=True, progress=None, **options):
    return RolloutCollector(
        ledger or Ledger(),
        rollouter=SimpleNamespace(continues_partial=continues),
        sampling=SamplingParams(max_new_tokens=most),
        rollouts_per_prompt=K,
        deadlines=options.pop("deadlines", FAST),
        phases=FakePhases(),
        notices=progress or FakeProgress(),
        segment_tokens=segment,
        **options,
    )


def test_a_pending_group_says_what_is_missing_wanted_and_set_aside():
    entry = Pending(PROMPT, rollouts={1: rollout(1)}, set_aside={2})
    assert entry.missing(4) == (0, 2, 3) and entry.wanted(4) == (0, 3)
    assert not entry.waits(4) and entry.waits(2) is False
    entry.set_aside |= {0, 3}
    assert entry.waits(4) and not Pending(PROMPT, rollouts={0: rollout()}).waits(1)
    assert entry.unscored
    entry.verdicts[1] = Verdict(True, 1.0, "m")
    assert not entry.unscored


def test_a_group_is_what_is_verified_in_index_order():
    verdicts = {i: Verdict(i == 2, 0.0, str(i)) for i in (2, 0)}
    entry = Pending(PROMPT, rollouts={i: rollout(i) for i in (2, 1, 0)}, verdicts=verdicts)
    entry.partial = {i: rollout(i, finish="abort") for i in (5, 3)}
    kept = entry.kept(9)
    assert (kept.group_id, [r.index for r in kept.finished.rollouts]) == (9, [0, 2])
    assert [v.reason for v in kept.finished.verdicts] == ["0", "2"] and [r.index for r in kept.unfinished] == [3, 5]


def test_a_partial_group_knows_its_oldest_weights_and_its_tokens_and_goes_on():
    finished = replace(group(4, size=2), rollouts=(rollout(0, version=5), rollout(1, version=6)))
    one = PartialGroup(finished, (rollout(3, 2, version=4, finish="abort"),))
    assert (one.group_id, one.weight_version, one.response_tokens) == (4, 4, 8)
    assert PartialGroup(Group(4, PROMPT, (), ())).weight_version is None
    entry = one.pending()
    assert sorted(entry.rollouts) == sorted(entry.verdicts) == [0, 1] and entry.begun == {3: 2}
    assert list(entry.partial) == [3] and entry.prompt is PROMPT and entry.verdicts[0].correct
    record = one.to_record()
    assert (record.group, record.used, record.unfinished) == (finished, None, one.unfinished)


def record(finished, *unfinished) -> RecordedGroup:
    return RecordedGroup(group(4, size=finished), None, tuple(rollout(i, finish="abort") for i in unfinished))


@pytest.mark.parametrize("good", [record(0), record(2, 2), record(3), record(0, 3, 1)])
def test_what_a_checkpoint_may_hold_of_a_group(good):
    assert PartialGroup.from_record(good, K).unfinished == good.unfinished


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record(4), r"unfinished with the rollouts \[0, 1, 2, 3\], 4 of them finished; allowed: each of 0 to 3 once"),
        (record(2, 1), r"unfinished with the rollouts \[0, 1, 1\], 2 of them finished"),
        (record(2, 4), r"unfinished with the rollouts \[0, 1, 4\]"),
        (record(0, -1), r"unfinished with the rollouts \[-1\]"),
        (RecordedGroup(group(4, size=0), None, (rollout(0),)), "a rollout is finished and aborted at once"),
        (
            RecordedGroup(replace(group(4, size=1), rollouts=(rollout(0, finish="abort"),)), None),
            "a rollout is finished and aborted at once",
        ),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(bad, words):
    with pytest.raises(ValueError, match=f"group 4: {words}"):
        PartialGroup.from_record(bad, K)


def test_admitted_prompts_are_in_the_books():
    ledger = Ledger()
    source = SimpleNamespace(next=lambda n: [replace(PROMPT, id=str(i)) for i in range(n)])
    assert {i: entry.prompt.id for i, entry in admit(source, ledger, 3).items()} == {0: "0", 1: "1", 2: "2"}
    assert ledger.outstanding == (0, 1, 2)
    source.next = lambda n: [PROMPT] * (n + 1)
    with pytest.raises(DataError, match="gave 3 prompts instead of 2; it must not end"):
        admit(source, ledger, 2)


def test_a_request_has_what_is_missing_what_is_there_and_where_a_segment_ends():
    ledger = Ledger()
    (group_id,) = ledger.admit(1)
    ledger.retry(group_id)
    entry = Pending(PROMPT, rollouts={0: rollout(0)}, partial={1: rollout(1, 3, finish="abort")}, begun={1: 3})
    request = collector(ledger, segment=4).request(group_id, entry)
    assert (request.group_id, request.attempt, request.indices) == (0, 1, (1, 2, 3))
    assert list(request.partial) == [1] and request.limits == {1: 7, 2: 4, 3: 4}
    assert collector(ledger, segment=5).request(group_id, entry).limits == {2: 5, 3: 5}, "one may be whole"
    assert collector(ledger).request(group_id, entry).limits == {}
    entry.set_aside.add(1)
    assert collector(ledger).request(group_id, entry).partial == {}


def accepted(answers, *, entry=None, **options):
    ledger = Ledger()
    ledger.admit(1)
    one, entry = collector(ledger, **options), entry or Pending(PROMPT)
    return one.accept(answers, {0: entry}), entry, one


def test_tokens_of_an_answer_are_counted_once_and_those_thrown_away_too():
    whole = rollout(0, 5)
    part = replace(whole, tokens=whole.tokens[:4], logprobs=whole.logprobs[:2], loss_mask=whole.loss_mask[:2])
    entry = Pending(PROMPT, partial={0: part, 1: rollout(1, 3)})
    other = rollout(1, 4, logprobs=np.full(4, -9, np.float32))
    finished, entry, one = accepted([whole, other], entry=entry)
    assert [r.index for r in finished] == [0, 1] and not entry.partial
    assert (one.fresh_tokens, one.aborted_tokens) == (5 - 2 + 4, 3)


def test_what_an_abort_left_is_kept_where_one_can_go_on():
    cut = rollout(2, 3, finish="abort")
    for options, kept in (({}, True), ({"continues": False}, False), ({"most": 3}, False), ({"most": 4}, True)):
        finished, entry, one = accepted([cut], **options)
        assert finished == [] and (2 in entry.partial) is kept
        assert (one.fresh_tokens, one.aborted_tokens) == (3, 0 if kept else 3)


@pytest.mark.parametrize(
    ("finish", "length", "segment", "aside"),
    [("length", 3, 3, True), ("length", 8, 3, False), ("stop", 3, 3, False), ("length", 3, None, False)],
)
def test_an_answer_that_was_ended_by_its_segment_is_set_aside(finish, length, segment, aside):
    finished, entry, _ = accepted([rollout(1, length, finish=finish)], segment=segment)
    assert (entry.set_aside == {1}) is aside is (not finished)
    if aside:
        assert entry.partial[1].finish_reason == "abort"


def test_an_aborted_answer_that_nobody_waits_for_is_no_refusal():
    entry = Pending(PROMPT, rollouts={0: rollout(0)})
    ledger = Ledger()
    ledger.admit(2)
    one = collector(ledger)
    one.accept([rollout(0, finish="abort"), rollout(0, finish="abort", group_id=1)], {0: entry})
    assert ledger.late_refused == 0
    one.accept([rollout(0), rollout(0, group_id=1)], {0: entry})
    assert ledger.late_refused == 2 and one.fresh_tokens == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "3 response tokens, but logprobs has 2; allowed: the prompt, then one"),
        ({"loss_mask": np.zeros(4, np.uint8)}, "but loss_mask has 4;"),
        ({"routed_experts": StoredExperts((), (4, 1, 1))}, "but routed_experts are of 4 tokens in all;"),
        ({"tokens": np.array([1, 9, 3, 4, 5], np.int32)}, "but the first 2 tokens are not the prompt;"),
        (
            {"prompt_length": 1},
            "4 response tokens, but logprobs has 3 and loss_mask has 3 and the first 1 tokens are not the prompt",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, words):
    with pytest.raises(EngineError, match=f"group 0 rollout 2: .*{words}|group 0 rollout 2: {words}"):
        check_shape(rollout(2, 3, **change), np.array([1, 2]))


def test_columns_that_fit_are_taken():
    check_shape(rollout(2, 3, routed_experts=StoredExperts((), (5, 1, 1))), np.array([1, 2]))


def test_closing_an_iterator_that_is_stuck_is_reported():
    class Stuck:
        async def aclose(self):
            await asyncio.sleep(NEVER)

    class Running:
        async def aclose(self):
            raise RuntimeError("aclose(): asynchronous generator is already running")

    for iterator, words in ((Stuck(), "deadline 'abort'"), (Running(), "already running"), (object(), None)):
        progress = FakeProgress()
        asyncio.run(collector(progress=progress, deadlines=replace(FAST, abort=0.001)).close(iterator))
        assert [words in m and "generation could not be ended" in m for m in progress.messages] == [True] * bool(words)


def test_one_turn_hands_everything_on():
    async def score(pairs):
        return [Verdict(False, 0.0, "x") for _ in pairs][1:]

    aborted = []

    async def abort(ids):
        aborted.append(ids)

    engine = SimpleNamespace(generate=lambda requests: ("asked", requests), abort=abort)
    one = SingleTurn(engine, SimpleNamespace(score_async=score, failed_starts=7))
    assert one.generate([1]) == ("asked", [1]) and one.failed_verifier_starts == 7
    assert one.counters() == {} and one.continues_partial is True
    asyncio.run(one.abort([3]))
    asyncio.run(one.abort())
    assert aborted == [[3], None]
    with pytest.raises(RewardError, match="gave 0 verdicts for 1 answers; allowed: one each"):
        asyncio.run(one.score([(rollout(0), PROMPT)]))
    asked = []

    async def say(pairs):
        asked.extend(pairs)
        return [Verdict(gold == "5", 0.0, gold) for _, gold, _ in pairs]

    chat = replace(PROMPT, alternatives=("5",), text="2+3?")
    assert asyncio.run(judge(SimpleNamespace(score_async=say), [("a", chat)]))[0].reason == "5"
    assert asked == [("a", "4", "2+3?"), ("a", "5", "2+3?")]


def partial_batch(kept=(1, 2, 3)) -> PartialBatch:
    return PartialBatch(Ledger(), rollouts_per_prompt=K, kept_bins=kept)


def classified(batch, *groups, complete=True):
    for one in groups:
        batch._ledger.admit_recorded([one.group_id])
        batch.classify(one, complete)
    return batch


def test_a_batch_in_the_making_says_why_it_is_empty():
    batch = classified(partial_batch((2,)), group(0, 0), group(1, 4), group(2, 4), group(3, 1))
    assert batch.why_empty() == "filtered 2 all right and 1 all wrong and 1 partly right, 0 dropped"
    classified(batch, group(4, 0), complete=False)
    assert [one.group_id for one in batch.dropped] == [4] and batch.fresh_total == 5 and batch.fresh_kept == 0
    assert partial_batch().why_empty() == "filtered 0 all right and 0 all wrong, 0 dropped"
    assert batch._ledger.counts()["filtered"] == 4 and batch._ledger.counts()["dropped"] == 1


def test_the_share_that_the_filter_keeps_is_a_quarter_at_least():
    empty = partial_batch()
    assert (empty.keep_rate(), empty.keep_rate(0.5), empty.keep_rate(0.1)) == (1.0, 0.5, 0.25)
    assert empty.keep_rate(0.5, 8) == 0.5
    batch = classified(partial_batch(), group(0, 1), group(1, 0))
    assert batch.keep_rate() == 0.5 and batch.keep_rate(1.0, 8) == 0.9
    assert classified(partial_batch(), *(group(i, 0) for i in range(9))).keep_rate() == 0.25
    assert (batch_filler._PRIOR_GROUPS, batch_filler._BURST) == (8, 64)


def context(**section) -> RolloutContext:
    return RolloutContext(
        section=RolloutSection(rollouts_per_prompt=K, **section), rollouter=None, source=None, ledger=Ledger(),
        collector=None, notices=None, deadlines=FAST,
    )  # fmt: skip


def test_a_round_asks_for_more_where_the_filter_has_kept_fewer():
    rounds = Rounds(context(prompts_per_step=8, oversampling=1.5))
    assert rounds._round_size(partial_batch(), 3) == 5
    assert rounds._round_size(classified(partial_batch(), group(0, 1), group(1, 0)), 3) == 9
    assert not rounds.keeps_unfinished and EarlyFill.keeps_unfinished and context().max_attempts == 3
    assert Rounds(context(segment_tokens=4, max_staleness=1, keep_surplus=True)).keeps_unfinished


def test_a_batch_that_nothing_is_said_of_has_no_numbers():
    one = SampledBatch((), Snapshot({}, {}))
    assert (one.rounds, one.rollout_s, one.response_tokens, one.counters, one.recorded) == (0, 0.0, 0, {}, ())
    update = Update(1, 0, (), 1)
    assert (update.last, update.first, update.epoch, update.trains, update.outcome) == (
        False,
        False,
        1,
        True,
        "trained",
    )


def test_a_snapshot_is_written_without_the_groups_that_wait_which_stand_beside_it():
    ledger = Ledger()
    ledger.admit(4)
    carry, part = group(2), PartialGroup(group(1, size=2))
    one = Snapshot({"cursor": 4}, ledger.state_dict(), (carry,), {"x": 1}, (part,))
    state = one.to_json({0: "trained", 3: "dropped"})
    assert state["source"] == {"cursor": 4} and state["counters"] == {"x": 1}
    assert state["ledger"]["outstanding"] == [[1, 0], [2, 0]] and state["ledger"]["finished"]["dropped"] == 1
    assert [(r.group.group_id, r.used) for r in one.waiting()] == [(2, None), (1, None)]


def test_a_state_is_that_of_a_replay_by_its_source():
    assert is_replay({"source": {"last_step": 3}})
    assert not any(map(is_replay, ({"source": {"cursor": 3}}, {"source": "last_step"}, {})))


def batch_of(*ids, **others) -> SampledBatch:
    return SampledBatch(tuple(group(i) for i in ids), Snapshot({}, {}), **others)


def planned(batch, step=0, stale=(), **section):
    updates, unused = plan_updates(batch, stale, step, TrainerSection(**{"steps": 50} | section))
    return updates, [one.group_id for one in unused]


def test_mini_batches_are_consecutive_and_as_even_as_can_be():
    batch = batch_of(*range(5), filtered=(group(9),))
    updates, unused = planned(batch, 4, updates_per_batch=3)
    assert [[g.group_id for g in one.groups] for one in updates] == [[0], [1, 2], [3, 4]] and unused == []
    assert [(one.step, one.version, one.first_step, one.epoch) for one in updates] == [(i, 4, 5, 1) for i in (5, 6, 7)]
    assert [one.first for one in updates] == [True, False, False] == [one.last for one in reversed(updates)]
    assert [len(one.filtered) for one in updates] == [1, 0, 0]
    assert not any(g.group_id in one.again for one in updates for g in one.groups)
    assert updates[1].record == RecordedUpdate(6, 5, 1, (1, 2), True)
    updates[1].outcome = "dropped"
    assert updates[1].record.applied is False
    assert last_step(batch, 4, TrainerSection(updates_per_batch=3, epochs_per_batch=2)) == 10
    assert last_step(batch, 4, TrainerSection(updates_per_batch=9)) == 9


def test_further_epochs_take_all_groups_again_in_another_order():
    updates, _ = planned(batch_of(*range(6)), 4, updates_per_batch=2, epochs_per_batch=3, seed=1)
    assert [(one.step, one.epoch) for one in updates] == [(5, 1), (6, 1), (7, 2), (8, 2), (9, 3), (10, 3)]
    order = [[g.group_id for one in updates if one.epoch == epoch for g in one.groups] for epoch in (1, 2, 3)]
    assert order[0] == list(range(6)) and order[1:] == [epoch_order(6, 1, 5, epoch) for epoch in (2, 3)]
    assert [len(one.again) for one in updates] == [6, 6, 6, 6, 3, 0]
    assert updates[4].again == {g.group_id for g in updates[5].groups}


def test_stale_groups_and_those_beyond_the_last_step_are_unused():
    batch = batch_of(0, 1, 2, 3)
    updates, unused = planned(batch, 9, stale=batch.groups[:1], updates_per_batch=3, steps=11)
    assert [[g.group_id for g in one.groups] for one in updates] == [[1], [2]] and unused == [0, 3]
    assert updates[1].last and planned(batch, stale=batch.groups) == ([], [0, 1, 2, 3])


def test_a_recorded_batch_has_its_recorded_steps():
    records = RecordedUpdate(7, 7, 1, (1, 0), False), RecordedUpdate(8, 7, 2, (0, 1), True)
    batch = batch_of(0, 1, recorded=records)
    updates, _ = planned(batch, 6)
    assert [(one.step, one.trains, one.epoch, one.first_step, one.version) for one in updates] == [
        (7, False, 1, 7, 6), (8, True, 2, 7, 6),
    ]  # fmt: skip
    assert [[g.group_id for g in one.groups] for one in updates] == [[1, 0], [0, 1]]
    assert [one.first for one in updates] == [one.last for one in updates] == [False, True]
    assert last_step(batch, 6, TrainerSection()) == 8


@pytest.mark.parametrize(
    ("before", "after", "every", "yes"),
    [(0, 1, 2, False), (1, 2, 2, True), (2, 3, 2, False), (0, 5, 0, False), (1, 4, 2, True), (0, 1, 1, True)],
)
def test_a_multiple_lies_between_two_steps(before, after, every, yes):
    assert passed(before, after, every) is yes
