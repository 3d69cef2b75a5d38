"""A real server tells of each answer when it has ended, with all its tokens: what it holds is given back one by one."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import VOCAB, collect, engine_of, expected, give, group, section, started, worst_difference
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S, COUNT = 1e-4, 300, 12


def test_answers_end_one_by_one_and_are_whole(pool, tmp_path):
    (server, *_) = pool.up()
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
