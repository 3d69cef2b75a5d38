"""Batches that teach nothing: recorded, shown with verdicts and two answers, warned of where nothing is filtered."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fleet_fakes import FleetEngine
from loop_fakes import FakeScorer, make_rollout, make_stack, run_stack

from megatron_daro.errors import DataError
from megatron_daro.rollout.no_signal import describe
from megatron_daro.rollout.recorder import Recorder, read_groups, recorded_steps
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
    assert all(count in said for count in ("no_answer 1", "no_match 4", "timeout 1"))
    assert "p2" in said and r"so forty\ntwo\x1b[2J" in said and "p1" in said and "it is 41" in said
    assert "\n" not in said and "\x1b" not in said and len(said) < 700


class NeverRight(FakeScorer):
    async def score_async(self, pairs):
        return [Verdict(False, -0.1, "no_answer" if i % 2 else "no_match") for i, _ in enumerate(pairs)]


@pytest.mark.parametrize("early", [False, True])
def test_a_run_whose_answers_are_all_wrong_records_them_and_says_what_they_were(tmp_path, early):
    fleet = {"engine_class": FleetEngine, "finish_batch": "enough"} if early else {}
    stack = make_stack(tmp_path, scorer=NeverRight(), recorder=Recorder(tmp_path), **fleet)
    with pytest.raises(DataError, match="3 batches") as caught:
        run_stack(stack)
    path = tmp_path / "rollouts" / "untrainable_000001.parquet"
    said = str(caught.value)
    assert str(path) in said
    recorded = read_groups(path)
    verdicts = [v.reason for group, _ in recorded for v in group.verdicts]
    assert f"no_answer {verdicts.count('no_answer')}" in said
    assert {used for _, used in recorded} == {"filtered"}
    assert len(recorded) == stack.sampler.ledger.counts()["filtered"]
    assert len([text for text in stack.progress.messages if str(path) in text]) == 3
    assert recorded_steps(tmp_path) == []


def test_what_was_skipped_is_part_of_the_step_that_is_trained_at_last(tmp_path):
    stack = make_stack(tmp_path, recorder=Recorder(tmp_path), rollout={"max_refill_rounds": 0, "oversampling": 1.0})
    give, seen = stack.source.next, []

    def next_prompts(count):
        seen.extend(path.name for path in (tmp_path / "rollouts").glob("untrainable_*"))
        return [replace(p, answer="hard" if int(p.id[1:]) < 6 else "mixed") for p in give(count)]

    stack.source.next = next_prompts
    run_stack(stack)
    # Before the second attempt; the next batch may be asked for before the step is written.
    assert set(seen) == {"untrainable_000001.parquet"}
    assert [path.name for path in (tmp_path / "rollouts").glob("untrainable_*")] == []
    assert len([used for _, used in read_groups(tmp_path / "rollouts/step_000001.parquet") if used == "filtered"]) >= 6


class WrongByDegrees(NeverRight):
    async def score_async(self, pairs):
        verdicts = await super().score_async(pairs)
        return [replace(verdict, reward=-0.1 * i) for i, verdict in enumerate(verdicts)]


@pytest.mark.parametrize(("scorer", "steps"), [(NeverRight(), ["step 3", "step 6"]), (WrongByDegrees(), [])])
def test_a_run_without_a_filter_warns_when_no_answer_is_better_than_others(tmp_path, scorer, steps):
    stack = make_stack(tmp_path, scorer=scorer, filter_groups=False)
    assert run_stack(stack).step == 6
    warnings = [text for text in stack.progress.messages if "all wrong" in text]
    assert [re.search(r"step \d+", text).group() for text in warnings] == steps
