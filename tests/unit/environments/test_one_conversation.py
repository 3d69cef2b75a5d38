"""One conversation at a time: what it asks, what stands in its columns, and what it refuses by name."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import talking
from talking import PROMPT, Model, conversation, hold

from megatron_daro.config import RewardSection
from megatron_daro.environments.environment import OutOfRoomError, nothing_said
from megatron_daro.errors import RolloutError
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Verdict


def saying(*answers: list[int]) -> Model:
    """A model with these answers in turn."""
    left = iter(answers)
    return Model(lambda request: next(left))


def test_every_turn_is_asked_with_all_tokens_so_far_and_a_number_of_its_own():
    model = saying([20, 21], [22], [23])

    async def talk(one):
        said = await one.generate(max_tokens=3)
        assert (said.tokens, said.text, said.finish_reason) == ((20, 21), "20 21", "stop")
        one.observe([30])
        await one.generate()
        await one.generate()
        return one.verdict(True, "ok")

    rollout = hold(model, talk, index=1, attempt=2)
    assert [one.prompt.tokens for one in model.asked] == [(7, 8), (7, 8, 20, 21, 30), (7, 8, 20, 21, 30, 22)]
    assert [(one.attempt, one.turn) for one in model.asked] == [(2, 0), (2, 1), (2, 2)]
    assert [one.draw for one in model.asked] == [2, 2 + 2**32, 2 + 2 * 2**32]
    assert [one.sampling.max_new_tokens for one in model.asked] == [3, 9, 8]
    assert {one.indices for one in model.asked} == {(1,)} and {one.group_id for one in model.asked} == {3}
    assert rollout.attempt == 2 and rollout.index == 1 and rollout.group_id == 3
    assert rollout.tokens.tolist() == [7, 8, 20, 21, 30, 22, 23] and rollout.turns == ((0, 2), (1, 1), (0, 1))


def test_room_tokens_and_the_last_token_follow_the_conversation():
    seen = []

    async def talk(one):
        def look():
            seen.append((one.room, one.tokens, one.last_token, one.response, one.generated))

        look()
        one.observe([30, 31])
        look()
        await one.generate()
        look()
        one.observe([32])
        look()
        return one.verdict(True, "ok")

    hold(saying([20]), talk)
    assert seen == [
        (12, (7, 8), 8, (), 0),
        (10, (7, 8, 30, 31), 31, (30, 31), 0),
        (9, (7, 8, 30, 31, 20), 20, (30, 31, 20), 1),
        (8, (7, 8, 30, 31, 20, 32), 32, (30, 31, 20, 32), 1),
    ]


def test_tokens_are_plain_numbers_for_whoever_writes_them_as_json():
    async def talk(one):
        assert one.last_token == 9
        said = await one.generate()
        assert {type(token) for token in (*one.tokens, *said.tokens, one.last_token)} == {int}
        return one.verdict(True, "ok")

    def decode(ids):
        assert {type(token) for token in ids} == {int}
        return "text"

    assert (
        hold(Model(lambda request: [20], decode=decode), talk, prompt=replace(PROMPT, tokens=(7, 8, 9))).text == "text"
    )


def test_what_is_shown_before_and_after_the_answers_is_not_trained():
    async def talk(one):
        one.observe([30])
        await one.generate()
        one.observe([31])
        one.observe([32])
        return one.verdict(True, "ok")

    def says(request):
        tokens = (*request.prompt.tokens, 20, 21)
        experts = StoredExperts((Part("x", 0, len(tokens)),), (len(tokens), 2, 1))
        return replace(model.answer(request, [20, 21], version_spans=((4, 1), (6, 1))), routed_experts=experts)

    model = Model(says)
    rollout = hold(model, talk)
    assert rollout.tokens.tolist() == [7, 8, 30, 20, 21, 31, 32] and rollout.tokens.dtype == np.int32
    assert rollout.loss_mask.tolist() == [0, 1, 1, 0, 0] and rollout.loss_mask.dtype == np.uint8
    assert rollout.logprobs.tolist() == [0, -1, -2, 0, 0] and rollout.logprobs.dtype == np.float32
    assert rollout.turns == ((1, 2), (2, 0)) and rollout.prompt_length == 2
    assert rollout.version_spans == ((4, 2), (6, 3)), "what is shown is of the weights that read it"
    assert rollout.text == "30 20 21 31 32" and rollout.finish_reason == "stop"
    assert rollout.routed_experts.shape == (7, 2, 1)


@pytest.mark.parametrize(("length", "reason"), [(11, "stop"), (12, "stop"), (13, "length")])
def test_an_answer_that_was_cut_at_the_end_of_the_room_ends_the_conversation_as_cut(length, reason):
    async def talk(one):
        await one.generate()
        return one.verdict(True, "ok")

    assert hold(saying([20] * length), talk).finish_reason == reason


@pytest.mark.parametrize(("turns", "reason"), [(1, "repetition"), (2, "stop")])
def test_a_conversation_whose_last_answer_repeats_itself_ends_for_that(turns, reason):
    reasons = iter(("repetition", "stop"))
    model = Model(lambda request: model.answer(request, [20], next(reasons)))

    async def talk(one):
        for _ in range(turns):
            await one.generate()
        return one.verdict(True, "ok")

    assert hold(model, talk).finish_reason == reason


def test_an_environment_may_say_that_it_ends_for_want_of_room():
    async def talk(one):
        await one.generate()
        one.cut()
        return one.verdict(True, "ok")

    assert hold(saying([20]), talk).finish_reason == "length"


def test_no_room_is_said_with_what_is_left():
    async def talk(one):
        one.observe([30] * 11)
        with pytest.raises(OutOfRoomError, match="2 observed tokens"):
            one.observe([30, 30])
        await one.generate()
        with pytest.raises(OutOfRoomError, match=r"rollout\.max_response_tokens=12"):
            await one.generate()
        return one.verdict(True, "ok")

    rollout = hold(saying([20]), talk)
    assert rollout.response_length == 12 and rollout.finish_reason == "length"


def test_no_room_before_an_answer_passes_and_after_one_is_a_wrong_answer():
    async def at_once(one):
        one.observe([30] * 13)

    with pytest.raises(OutOfRoomError):
        hold(saying(), at_once)

    async def later(one):
        await one.generate()
        one.observe([30] * 13)

    rollout = hold(saying([20]), later)
    assert rollout.verdict == Verdict(False, -1.0, "out_of_room") and rollout.finish_reason == "length"


@pytest.mark.parametrize("how", ["engine", "run"])
def test_an_answer_that_the_engine_gave_up_cancels_the_conversation(how):
    model = Model(lambda request: model.answer(request, [20], "abort" if how == "engine" else "stop"))

    async def go():
        one = conversation(model)
        one.aborted = how == "run"
        with pytest.raises(asyncio.CancelledError):
            await one.generate()
        assert one.aborted
        return one.ended("abort")

    assert asyncio.run(go()).tokens.tolist() == [7, 8, 20]


def test_an_answer_without_a_token_leaves_no_turn():
    model = Model(lambda request: nothing_said(request))

    async def go():
        one = conversation(model, index=1)
        one.observe([30])
        with pytest.raises(asyncio.CancelledError):
            await one.generate()
        return one.ended("abort")

    rollout = asyncio.run(go())
    assert rollout.tokens.tolist() == [7, 8] and rollout.turns == () and rollout.index == 1
    assert (rollout.finish_reason, rollout.prompt_length, rollout.weight_version) == ("abort", 2, 0)
    assert [len(x) for x in (rollout.loss_mask, rollout.logprobs)] == [0, 0] and rollout.loss_mask.dtype == np.uint8
    assert rollout.tokens.dtype == np.int32


def test_the_verifier_is_asked_with_the_prompt():
    model = saying([20])

    async def talk(one):
        await one.generate()
        return await one.verify("4")

    assert hold(model, talk).verdict == Verdict(True, 1.0, "asked") and model.verified == [("4", PROMPT)]


@pytest.mark.parametrize(("correct", "reward"), [(True, 1.0), (False, -1.0)])
def test_a_verdict_without_a_reward_has_that_of_the_configuration(correct, reward):
    assert RewardSection().correct_reward == 1.0
    one = conversation(saying())
    assert one.verdict(correct, "word") == Verdict(correct, reward, "word")
    assert one.verdict(correct, "word", 0.25).reward == 0.25
    one.report(tool_calls=1)
    assert one.verdict(correct, "word").reward == reward, "a report without a reward is none"


@pytest.mark.parametrize("report", [{"reward": 0.0}, {"rewards": {"a": 0.0}}])
def test_a_reward_of_nothing_is_a_reward(report):
    one = conversation(saying())
    one.report(**report)
    assert one.verdict(True, "word").reward == 0.0


def test_rewards_of_all_answers_add_up_with_their_weights():
    async def talk(one):
        one.report(0.5, tool_calls=1, tool_errors=2, seconds=3.0)  # before an answer: of the first
        await one.generate()
        one.report(1.0, {"a": 2.0, "b": 1.0}, tool_calls=4, tool_errors=5, seconds=6.0)
        await one.generate()
        one.report(rewards={"a": 1.0}, tool_calls=7)
        return one.verdict(False, "ok")

    rollout = hold(saying([20], [21]), talk, weights={"a": 10.0, "b": -1.0})
    first, second = rollout.reports
    assert (first.reward, first.tool_calls, first.tool_errors) == (0.5 + 1.0 + 20.0 - 1.0, 5, 7)
    assert (second.reward, second.tool_calls, second.tool_errors) == (10.0, 7, 0)
    assert 9.0 <= first.seconds < 9.5 and 0 <= second.seconds < 0.5
    assert rollout.verdict.reward == 30.5 and rollout.verdict.rewards == (("a", 3.0), ("b", 1.0))


def test_an_environments_own_verdict_gets_the_rewards_that_were_reported():
    async def talk(one):
        await one.generate()
        one.report(rewards={"a": 2.0})
        return Verdict(True, 7.0, "own")

    assert hold(saying([20]), talk).verdict == Verdict(True, 7.0, "own", (("a", 2.0),))

    async def named(one):
        await one.generate()
        one.report(rewards={"a": 2.0})
        return Verdict(True, 7.0, "own", (("b", 1.0),))

    assert hold(saying([20]), named).verdict.rewards == (("b", 1.0),)


def test_time_of_the_environment_is_counted_by_answer_and_time_of_the_model_is_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(talking.asyncio, "sleep", lambda seconds, sleep=asyncio.sleep: sleep(0))
    monkeypatch.setattr("megatron_daro.environments.environment.time.monotonic", lambda: now[0])

    def says(request):
        now[0] += 50.0
        return [20]

    async def talk(one):
        assert one.own_s == 0.0
        now[0] += 1.0
        await one.generate()
        assert one.own_s == 1.0
        now[0] += 2.0
        await one.generate()
        now[0] += 4.0
        with one.uncounted():
            now[0] += 100.0
            assert one.own_s == 7.0
        now[0] += 8.0
        return one.verdict(True, "ok")

    rollout = hold(Model(says), talk)
    assert [report.seconds for report in rollout.reports] == [3.0, 12.0]


@pytest.mark.parametrize(
    ("talk", "named"),
    [
        (lambda one: one.observe([3.5]), r"observe.*3\.5"),
        (lambda one: one.observe([0, 100]), r"observe.*100"),
        (lambda one: one.report(math.nan), "nan"),
        (lambda one: one.report("1"), "'1'"),
        (lambda one: one.report(rewards={"a": math.inf}), "inf"),
        (lambda one: one.report(rewards={"1a": 1.0}), "'1a'"),
    ],
)
def test_what_is_no_token_or_reward_ends_the_run_also_where_the_environment_catches_it(talk, named):
    async def careless(one):
        with contextlib.suppress(RolloutError):
            talk(one)
        await one.generate()
        return one.verdict(True, "ok")

    with pytest.raises(RolloutError, match=rf"environment\.kind.*m:Own.*{named}"):
        hold(saying([20]), careless)


def test_a_reward_without_a_weight_is_refused_with_those_that_have_one():
    one = conversation(saying(), weights={"a": 1.0, "b": 2.0})
    one.report(rewards={"a": 1.0})
    with pytest.raises(RolloutError, match=r"reward c .*reward_weights"):
        one.report(rewards={"c": 1.0})


def test_nothing_is_called_while_an_answer_is_under_way_or_after_the_end():
    kept = []

    async def talk(one):
        kept.append(one)
        await one.generate()
        return one.verdict(True, "ok")

    model = saying([20], [21])
    hold(model, talk)
    with pytest.raises(RolloutError, match="generate"):
        asyncio.run(kept[0].generate())
    closed = kept.pop()
    closed.fault = None
    with pytest.raises(RolloutError, match="observe"):
        closed.observe([30])

    async def shows_meanwhile(one):
        waiting = asyncio.ensure_future(one.generate())
        await asyncio.sleep(0)
        try:
            one.observe([30])
        finally:
            await waiting

    with pytest.raises(RolloutError, match="observe"):
        hold(model, shows_meanwhile)


@pytest.mark.parametrize(
    ("verdict", "named"),
    [
        (0.5, "float"),
        (Verdict(1, 1.0, "ok"), "correct"),
        (Verdict(True, math.inf, "ok"), "reward.*inf"),
        (Verdict(True, 1.0, "x" * 41), "reason"),
        (Verdict(True, 1.0, "ok", (("a", 1.0), ("a", 1.0))), "rewards"),
        (Verdict(True, 1.0, "ok", (("a/b", 1.0),)), "'a/b'"),
    ],
)
def test_a_verdict_that_cannot_be_trained_on_is_refused(verdict, named):
    async def talk(one):
        await one.generate()
        return verdict

    with pytest.raises(RolloutError, match=named):
        hold(saying([20]), talk)


def test_a_conversation_in_which_the_model_said_nothing_is_refused():
    async def talk(one):
        one.observe([30])
        return one.verdict(True, "ok")

    with pytest.raises(RolloutError, match="m:Own"):
        hold(saying(), talk)
