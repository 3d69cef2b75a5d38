"""A real server tells of each answer when it has ended, with all its tokens: what it holds is given back one by one;
and one that sends what is new alone, also of those that go on."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import VOCAB, collect, engine_of, expected, give, group, section, started, worst_difference
from transformers import AutoModelForCausalLM

from megatron_daro.engine.sglang import generation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S, COUNT = 1e-4, 300, 12
EVERY, LONG = 4, 100


def test_answers_end_one_by_one_and_are_whole(pool, tmp_path):
    (_, server) = pool.up()
    model = AutoModelForCausalLM.from_pretrained(server.model)
    # A random model: one in seven tokens ends an answer, so that they are of many lengths.
    request = group(0, count=COUNT, max_new_tokens=60, stop_token_ids=tuple(range(0, VOCAB, 7)))

    async def scenario():
        engine = engine_of([server.url], tmp_path, options=section(), expect=expected(server.model))
        ended = []
        async with started(engine):
            await give(engine, model, 0)
            take, held = engine._take_ended, []

            def noted(answers):
                ended.extend(answers)
                take(answers)
                held.append(engine.fleet.servers[0].tokens_in_flight)

            engine._answers.when_ended(noted)
            rollouts = await collect(engine, [request])
        assert worst_difference(model, rollouts) <= TOLERANCE
        assert sorted(answer.tokens for answer in ended) == sorted(r.response_length for r in rollouts)
        assert len({answer.id for answer in ended}) == COUNT and len(set(held)) > COUNT / 2
        assert held == sorted(held, reverse=True) and held[-1] == 0
        assert {r.finish_reason for r in rollouts} <= {"stop", "length"} and len({len(r.tokens) for r in rollouts}) > 3

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_what_a_killed_server_has_told_of_running_answers_is_kept(pool, tmp_path, monkeypatch):
    """They go on at the other one, and every token has the log-prob that the model gives it."""
    victim, survivor = pool.up()
    model = AutoModelForCausalLM.from_pretrained(victim.model)
    told, asked, take = {}, [], generation._Told.take

    def noted(self, event, *, deltas):
        take(self, event, deltas=deltas)
        told[event["index"]] = len(self._pairs)
        if len(asked) == 1 and len(told) == COUNT and min(told.values()) > EVERY:
            victim.kill()

    async def scenario():
        options = section(stream_tokens=EVERY)
        engine = engine_of([victim.url, survivor.url], tmp_path, options=options, expect=expected(victim.model))
        async with started(engine):
            await give(engine, model, 1)
            assert [server.facts.streams_deltas for server in engine.fleet.servers] == [True, False]
            ask = engine._answers.ask

            async def noting(question):
                asked.append((question.url, [dict(call.request.partial) for call in question.calls], dict(told)))
                return await ask(question)

            engine._answers.ask = noting
            monkeypatch.setattr(generation._Told, "take", noted)
            return await collect(engine, [group(0, count=COUNT, max_new_tokens=LONG)])

    rollouts = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    (first, _, _), (second, partials, told_then) = asked[:2]
    assert (first, second) == (victim.url, survivor.url)
    resumed = {index: rollout.response_length for partial in partials for index, rollout in partial.items()}
    assert resumed == told_then and EVERY < min(resumed.values()) <= max(resumed.values()) < LONG
    assert [r.response_length for r in rollouts] == [LONG] * COUNT and {r.weight_version for r in rollouts} == {1}
    assert worst_difference(model, rollouts) <= TOLERANCE
