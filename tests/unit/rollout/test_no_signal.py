"""Batches that teach nothing: recorded, shown with verdicts and two answers, warned of where nothing is filtered."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fleet_fakes import FleetEngine
from loop_fakes import FakeScorer, K, make_rollout, make_stack, run_stack

from megatron_daro.errors import DataError
from megatron_daro.rollout.recorder import Recorder, read_groups, recorded_steps
from megatron_daro.rollout.summary import SignalWatch, describe
from megatron_daro.types import Group, Prompt, Verdict


def group_of(group_id, reasons, texts=None, correct=()):
    prompt = Prompt(f"p{group_id}", "42", "unit", text="6 * 7?", tokens=(1,))
    rollouts = [make_rollout(group_id, 0, i, prompt, version=0) for i in range(len(reasons))]
    if texts:
        rollouts = [replace(r, text=text) for r, text in zip(rollouts, texts, strict=True)]
    verdicts = tuple(Verdict(i in correct, 0.0, reason) for i, reason in enumerate(reasons))
    return Group(group_id, prompt, tuple(rollouts), verdicts)


def test_verdicts_are_counted_no_answer_first_and_two_answers_are_shown():
    groups = [
        group_of(1, ["no_match", "no_match", "timeout"], ["it is 41", "it is 40", "x" * 999]),
        group_of(2, ["no_match", "no_match", "no_answer"], ["a", "b", "y" * 500 + " so forty\ntwo\x1b[2J"]),
    ]
    said = describe(groups)
    assert said.startswith("Verdicts of 6 answers: no_answer 1, no_match 4, timeout 1. For example ")
    assert "no_answer: prompt p2 (answer '42') got '...yyy" in said and r"so forty\ntwo\x1b[2J'; " in said
    assert "no_match: prompt p1 (answer '42') got 'it is 41'" in said
    assert "\n" not in said and "\x1b" not in said and len(said) < 700


def test_two_answers_of_one_reason_are_of_two_problems():
    said = describe([group_of(1, ["no_answer"] * 2, ["one", "two"]), group_of(2, ["no_answer"], ["three"])])
    assert "'one'" in said and "'three'" in said and "'two'" not in said
    assert describe([Group(1, group_of(1, []).prompt, (), ())]) == "No answer was verified."


class NeverRight(FakeScorer):
    async def score_async(self, pairs):
        return [Verdict(False, -0.1, "no_answer" if i % 2 else "no_match") for i, _ in enumerate(pairs)]


@pytest.mark.parametrize("early", [False, True])
def test_a_run_whose_answers_are_all_wrong_records_them_and_says_what_they_were(tmp_path, early):
    fleet = {"engine_class": FleetEngine, "finish_early": True} if early else {}
    stack = make_stack(tmp_path, scorer=NeverRight(), recorder=Recorder(tmp_path), **fleet)
    with pytest.raises(DataError, match=r"3 batches in a row without a trainable group") as caught:
        run_stack(stack)
    path = tmp_path / "rollouts" / "skipped_000001.parquet"
    said = str(caught.value)
    assert str(path) in said and "no_answer: prompt p" in said and "no_match: prompt p" in said
    recorded = read_groups(path)
    verdicts = [v.reason for group, _ in recorded for v in group.verdicts]
    assert f"Verdicts of {len(verdicts)} answers: no_answer {verdicts.count('no_answer')}, no_match" in said
    assert {used for _, used in recorded} == {"filtered"}
    assert len(recorded) == stack.sampler.ledger.counts()["filtered"]
    assert len([text for text in stack.progress.messages if "it is skipped; its answers are in" in text]) == 3
    assert recorded_steps(tmp_path) == []


def test_what_was_skipped_is_part_of_the_step_that_is_trained_at_last(tmp_path):
    stack = make_stack(tmp_path, recorder=Recorder(tmp_path), rollout={"max_refill_rounds": 0, "oversampling": 1.0})
    give, seen = stack.source.next, []

    def next_prompts(count):
        seen.extend(path.name for path in (tmp_path / "rollouts").glob("skipped_*"))
        return [replace(p, answer="hard" if int(p.id[1:]) < 6 else "mixed") for p in give(count)]

    stack.source.next = next_prompts
    run_stack(stack)
    assert seen == ["skipped_000001.parquet"] * 2
    assert [path.name for path in (tmp_path / "rollouts").glob("skipped_*")] == []
    assert len([used for _, used in read_groups(tmp_path / "rollouts/step_000001.parquet") if used == "filtered"]) >= 6


def test_without_recorded_rollouts_the_message_says_so(tmp_path):
    stack = make_stack(tmp_path, scorer=NeverRight())
    with pytest.raises(DataError, match=r"observe.save_rollouts is off"):
        asyncio.run(stack.sampler.sample(0))


def test_the_watch_warns_at_the_third_step_without_signal_and_ever_more_rarely():
    watch = SignalWatch()
    wrong, mixed = [group_of(1, ["no_answer"] * K)], [group_of(2, ["m", "n"], correct=(0,))]
    said = [watch.observe(step, wrong) for step in range(1, 14)]
    assert [i for i, text in enumerate(said, start=1) if text] == [3, 6, 12]
    assert "step 3: for 3 steps no group had both right and wrong answers (now 0 all right, 1 all wrong)" in said[2]
    assert f"no_answer {K}" in said[2]
    assert watch.observe(14, mixed) is None
    assert [bool(watch.observe(step, wrong)) for step in (15, 16, 17)] == [False, False, True]


def test_a_run_without_a_filter_warns_when_every_answer_is_wrong(tmp_path):
    stack = make_stack(tmp_path, scorer=NeverRight(), filter_groups=False)
    assert run_stack(stack).step == 6
    warnings = [text for text in stack.progress.messages if "no group had both right and wrong answers" in text]
    assert [text.split(":")[1].strip() for text in warnings] == ["step 3", "step 6"]


def test_the_watch_warns_where_every_answer_is_right_too():
    watch = SignalWatch()
    groups = [group_of(1, ["match"] * K, correct=range(K)), group_of(2, ["no_match"] * K)]
    assert [watch.observe(step, groups) for step in (1, 2)] == [None, None]
    assert "(now 1 all right, 1 all wrong)" in (watch.observe(3, groups) or "")
    watch = SignalWatch()
    assert [bool(watch.observe(step, groups[:1])) for step in (1, 2, 3)] == [False, False, True]
