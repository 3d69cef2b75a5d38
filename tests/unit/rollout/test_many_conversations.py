"""What conversations ask of the engine together, and what becomes of one that ends in each of its ways."""

from __future__ import annotations

import asyncio
import gc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import toy_environment
from loop_fakes import NEVER, FakeProgress
from talking import PROMPT, Model, conversation
from test_conversations import Engine, collected, requests, talks

from megatron_daro.errors import EngineError, RewardError, RolloutError
from megatron_daro.rollout import conversations
from megatron_daro.rollout.conversations import _Call, _merged
from megatron_daro.rollout.environment import OutOfRoomError, nothing_said
from megatron_daro.rollout.stepping import StepFailedError, StepTimeoutError
from megatron_daro.types import GroupRequest, SamplingParams, TurnReport, Verdict

TOKENS = np.array(PROMPT.tokens, np.int32)


def asked(group_id, index=0, attempt=0, **others) -> GroupRequest:
    return GroupRequest(group_id, attempt, PROMPT, (index,), SamplingParams(max_new_tokens=9), **others)


def keys(call) -> list[tuple]:
    return [(r.group_id, r.attempt, r.indices) for r in call]


class Server:
    """An engine that answers with a token for each rollout; change: what it makes of an answer, None leaves it out."""

    def __init__(self, change=lambda one: one) -> None:
        self.calls, self.change, self.model, self.ended = [], change, Model(None), 0

    async def generate(self, requests):
        self.calls.append(list(requests))
        try:
            for r in requests:
                ones = [self.model.answer(replace(r, indices=(i,)), [20]) for i in r.indices]
                await asyncio.sleep(0)
                yield tuple(filter(None, map(self.change, ones)))
        finally:
            self.ended += 1


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def calling(scenario, *, server=None, scorer=None, together=True, live=((0, (0, 1)), (1, (0,)))):
    """Run `await scenario(call, server)` over a call whose two loops are one."""

    async def go():
        thread = SimpleNamespace(loop=asyncio.get_running_loop())
        one = server or Server()
        wanted = [GroupRequest(g, 0, PROMPT, indices, SamplingParams()) for g, indices in live]
        call = _Call(one, scorer, wanted, thread, together=together)
        try:
            return await scenario(call, one)
        finally:
            call.closing = True
            await call.close()

    return asyncio.run(go())


def test_the_engine_is_asked_once_all_wait_and_for_equal_prompts_together():
    async def scenario(call, server):
        assert call.group_ids == {0, 1}
        answers = [call.ask(asked(1), TOKENS), call.ask(asked(0, 1), TOKENS)]
        await asyncio.sleep(0.02)
        assert server.calls == []
        answers.append(call.ask(asked(0, 0), TOKENS))
        got = await asyncio.gather(*answers)
        assert [keys(one) for one in server.calls] == [[(0, 0, (0, 1)), (1, 0, (0,))]]
        assert [(one.group_id, one.index) for one in got] == [(1, 0), (0, 1), (0, 0)]
        await until(lambda: not call._asking)

    calling(scenario)


def test_when_one_ends_the_others_are_asked_for():
    async def scenario(call, server):
        answers = [call.ask(asked(0, 0), TOKENS), call.ask(asked(0, 1), TOKENS)]
        await asyncio.sleep(0.02)
        assert server.calls == []
        call.one_ended()
        await asyncio.gather(*answers)
        assert len(server.calls) == 1
        gone = call.ask(asked(0, 0), TOKENS)
        await asyncio.sleep(0.02)
        gone.cancel()
        call.one_ended()
        await asyncio.sleep(0.02)
        assert len(server.calls) == 1, "an answer that nobody waits for any more is not asked for"
        last = call.ask(asked(0, 1), TOKENS)
        await last
        assert keys(server.calls[1]) == [(0, 0, (1,))]

    calling(scenario)


def test_an_answer_that_nobody_waits_for_does_not_count_as_one_that_waits():
    async def scenario(call, server):
        gone, kept = call.ask(asked(0, 0), TOKENS), call.ask(asked(0, 1), TOKENS)
        gone.cancel()
        await asyncio.sleep(0.02)
        call.one_ended()
        await asyncio.sleep(0.02)
        assert server.calls == [], "the other conversation has not asked yet"
        call.one_ended()
        await kept
        assert keys(server.calls[0]) == [(0, 0, (1,))]

    calling(scenario)


def test_without_waiting_for_all_those_of_a_moment_are_asked_for():
    async def scenario(call, server):
        first = [call.ask(asked(1), TOKENS), call.ask(asked(0, 1), TOKENS), call.ask(asked(0, 0), TOKENS)]
        await asyncio.gather(*first)
        assert [keys(one) for one in server.calls] == [[(0, 0, (0,)), (0, 0, (1,)), (1, 0, (0,))]]
        call.one_ended()
        await call.ask(asked(1, attempt=2**32), TOKENS)
        assert keys(server.calls[1]) == [(1, 2**32, (0,))]

    calling(scenario, together=False)


def test_requests_are_one_where_group_attempt_tokens_and_sampling_are_the_same():
    other = replace(asked(0, 1), prompt=replace(PROMPT, tokens=(7, 8, 9)))
    short = replace(asked(0, 3), sampling=SamplingParams(max_new_tokens=3))
    merged = _merged([asked(0, 0), other, asked(0, 2), short, asked(0, 4, attempt=1), asked(1, 5)])
    assert [one.indices for one in merged] == [(0, 2), (1,), (3,), (4,), (5,)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: replace(one, index=7), r"engine answered group, attempt and rollout \(0, 0, 7\), which was not"),
        (lambda one: replace(one, logprobs=one.logprobs[:0]), "1 response tokens, but logprobs has 0"),
    ],
)
def test_an_answer_that_does_not_fit_ends_all_and_those_who_wait_get_an_abort(change, words):
    async def scenario(call, server):
        got = await asyncio.gather(*(call.ask(asked(0, i), TOKENS) for i in range(2)), call.ask(asked(1), TOKENS))
        assert [one.finish_reason for one in got] == ["abort"] * 3 and [one.index for one in got] == [0, 1, 0]
        call.fail(RewardError("a later one"))
        with pytest.raises(EngineError, match=words):
            call.failure.result()

    calling(scenario, server=Server(change))


def test_what_an_engine_leaves_out_is_an_abort_and_no_failure():
    async def scenario(call, server):
        wanted = asked(0, 0), asked(0, 1), asked(1)
        got = await asyncio.gather(*(call.ask(one, TOKENS) for one in wanted))
        assert [one.finish_reason for one in got] == ["stop", "abort", "stop"] and not call.failure.done()

    calling(scenario, server=Server(lambda one: one if one.index == 0 else None))


def test_a_call_that_closes_ends_what_it_asked_and_cancels_who_waits():
    class Waits(Server):
        async def generate(self, requests):
            self.calls.append(requests)
            try:
                await asyncio.sleep(NEVER)
                yield ()
            finally:
                self.ended += 1

    async def scenario(call, server):
        under_way = call.ask(asked(0, 0), TOKENS)
        await until(lambda: server.calls)
        call.closing = True
        late = call.ask(asked(0, 1), TOKENS)
        await until(late.cancelled)
        await call.close()
        assert server.ended == 1 and len(server.calls) == 1
        under_way.cancel()

    calling(scenario, server=Waits(), together=False)


def test_who_waits_when_a_call_closes_is_cancelled():
    async def scenario(call, server):
        waiting = call.ask(asked(0, 0), TOKENS)
        await asyncio.sleep(0.02)
        call.closing = True
        call.one_ended()
        call.one_ended()
        await call.close()
        await until(waiting.cancelled)
        assert server.calls == []

    calling(scenario)


def test_a_verdict_is_the_scorers_and_its_failure_ends_all():
    class Scorer:
        async def score_async(self, pairs):
            if pairs[0][0] == "broken":
                raise RewardError("pool is gone")
            return [Verdict(True, 1.0, text) for text, _, _ in pairs]

    async def scenario(call, server):
        assert (await call.verify("x", PROMPT)).reason == "x" and not call.failure.done()
        with pytest.raises(RewardError, match="pool is gone"):
            await call.verify("broken", PROMPT)
        assert isinstance(call.failure.exception(), RewardError)
        return call

    call = calling(scenario, scorer=Scorer())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="closed"):
            call.verify("after the end", PROMPT)
        gc.collect()
    assert [str(one.message) for one in told if "never awaited" in str(one.message)] == []


def outcome_of(rollouter, *, error=None, result=None, cancelled=False, aborted=False, timed_out=False, fault=None):
    """What becomes of a conversation that ended so."""

    async def go():
        one = conversation(Model(None))
        one.aborted, one.timed_out, one.fault = aborted, timed_out, fault
        ended = asyncio.get_running_loop().create_future()
        if cancelled:
            ended.cancel()
        elif error is not None:
            ended.set_exception(error)
            ended.exception()
        else:
            ended.set_result(result)
        return rollouter._outcome(one, SimpleNamespace(ended=ended))

    return asyncio.run(go())


def counts(rollouter) -> dict[str, int]:
    return {name.partition("/")[2]: count for name, count in rollouter.counters().items() if count}


def test_a_conversation_that_ended_well_is_its_rollout_and_its_tools_are_counted():
    rollouter = talks(Engine())
    reports = TurnReport(tool_calls=2, tool_errors=1), TurnReport(tool_calls=3, tool_errors=1)
    rollout = replace(nothing_said(asked(0)), reports=reports)
    rollouter._failures_in_a_row = 60
    assert outcome_of(rollouter, result=rollout) is rollout
    assert counts(rollouter) == {"tool_calls": 5, "tool_errors": 2} and rollouter._failures_in_a_row == 0


@pytest.mark.parametrize(
    ("how", "counter", "words"),
    [
        ({"error": ValueError("no such move")}, "failed", "raised ValueError: no such move; it is begun again"),
        ({"error": OutOfRoomError("full")}, "failed", "raised OutOfRoomError: full; it is begun again"),
        ({"cancelled": True}, "failed", "raised CancelledError; it is begun again"),
        ({"error": StepFailedError("step: crash")}, "failed", "failed in step: crash; it is begun again"),
        ({"error": StepTimeoutError("took long")}, "timeouts", "took long; it is begun again"),
        (
            {"cancelled": True, "timed_out": True, "aborted": True},
            "timeouts",
            "took more than environment.timeout_s=60 s of its own; it is begun again",
        ),
        ({"cancelled": True, "aborted": True}, None, None),
        ({"result": "thrown away", "aborted": True}, None, None),
    ],
)
def test_a_conversation_that_did_not_is_begun_again_and_counted(how, counter, words):
    progress = FakeProgress()
    rollouter = talks(Engine(), progress=progress)
    assert outcome_of(rollouter, **how).finish_reason == "abort"
    assert counts(rollouter) == {"restarted": 1} | ({counter: 1} if counter else {})
    said = f"warning: environment.kind: toy_environment:SecondTry: a conversation {words}"
    name = f"environment/{counter}"
    assert progress.messages == ([f"{said}. {name} is 1; said again at 2"] if words else [])


@pytest.mark.parametrize("how", [{"error": EngineError("gone")}, {"result": None, "fault": EngineError("gone")}])
def test_what_ends_the_run_is_raised(how):
    rollouter = talks(Engine())
    with pytest.raises(EngineError, match="gone"):
        outcome_of(rollouter, **how)
    assert counts(rollouter) == {}


def test_failures_are_said_ever_more_rarely_and_the_64th_in_a_row_ends_the_run():
    progress = FakeProgress()
    rollouter = talks(Engine(), progress=progress)
    for _ in range(63):
        rollouter._failed("environment/failed", "raised x")
    assert [text.partition("failed is ")[2] for text in progress.messages] == [
        f"{n}; said again at {2 * n}" for n in (1, 2, 4, 8, 16, 32)
    ]
    with pytest.raises(RolloutError, match=r"raised x; 64 failed one after the other, so none will succeed; fix: corr"):
        rollouter._failed("environment/timeouts", "raised x")
    assert conversations._MOST_FAILURES == 64 and conversations._GRACE_S == 5.0


def test_verdicts_are_those_of_the_environment():
    rollouter = talks(Engine(), pool=SimpleNamespace(failed_starts=7))
    told = [replace(nothing_said(asked(0)), verdict=Verdict(True, 1.0, str(i))) for i in range(2)]
    assert [one.reason for one in asyncio.run(rollouter.score([(one, PROMPT) for one in told]))] == ["0", "1"]
    with pytest.raises(AssertionError, match="every finished conversation has a verdict"):
        asyncio.run(rollouter.score([(nothing_said(asked(0)), PROMPT)]))
    assert rollouter.failed_verifier_starts == 7 and rollouter.continues_partial is False


def test_counts_of_a_checkpoint_go_on_and_others_are_left():
    rollouter = talks(Engine())
    rollouter.load_counters({"environment/failed": 3, "rollout/retries": 9})
    assert counts(rollouter) == {"failed": 3}
    rollouter.load_counters({})
    assert counts(rollouter) == {}


class Waits(toy_environment.SecondTry):
    """Waits for ever; `begun` is how many."""

    begun = 0

    async def rollout(self, prompt, conversation):
        type(self).begun += 1
        await asyncio.sleep(NEVER)


@pytest.mark.parametrize("ids", [None, [0, 1, 2]])
def test_conversations_that_wait_end_when_their_groups_are_aborted(ids):
    engine = Engine()

    async def run():
        Waits.begun = 0
        rollouter = talks(engine, environment=Waits)
        task = asyncio.ensure_future(collected(rollouter, requests()))
        await until(lambda: Waits.begun == 12)
        await rollouter.abort(ids)
        async with asyncio.timeout(20):
            return await task, rollouter

    rollouts, rollouter = asyncio.run(run())
    assert {one.finish_reason for one in rollouts} == {"abort"} and len(rollouts) == 12
    assert engine.aborted == [ids] and counts(rollouter) == {"restarted": 12}


def test_groups_that_are_given_up_before_they_begin_come_back_as_aborted():
    async def run():
        rollouter = talks(Engine())
        found = []
        generated = rollouter.generate(requests())
        first = asyncio.ensure_future(anext(generated))
        await asyncio.sleep(0)
        await rollouter.abort([2])
        async with asyncio.timeout(20):
            found += await first
            async for some in generated:
                found += some
        await rollouter.close()
        await rollouter.close()
        return found, rollouter

    rollouts, rollouter = asyncio.run(run())
    assert {one.group_id for one in rollouts if one.finish_reason == "abort"} == {2} and len(rollouts) == 12
    assert {(one.index, one.attempt) for one in rollouts if one.group_id == 2} == {(i, 0) for i in range(4)}
    assert counts(rollouter) == {}, "they had not begun"


def test_conversations_end_with_the_call_that_holds_them():
    async def run():
        Waits.begun = 0
        rollouter = talks(Engine(), environment=Waits)
        task = asyncio.ensure_future(collected(rollouter, requests()))
        await until(lambda: Waits.begun == 12)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])
        assert task.cancelled() and not rollouter._calls
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(run())
