"""A real server tells of each answer when it has ended, with all its tokens: what it holds is given back one by one,
and it is kept when the server dies before the others have ended."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from sglang_pool import VOCAB, collect, engine_of, expected, give, group, section, started, worst_difference
from sglang_proxy import Proxy
from transformers import AutoModelForCausalLM

from megatron_daro.engine.sglang.asking import DirectAsker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S, COUNT = 1e-4, 300, 12
FEW, LONG = 3, 100
# Of a random model's tokens; so that answers are of many lengths.
STOPS = tuple(range(0, VOCAB, 30))


class Killing(Proxy):
    """Kills its server once FEW answers have ended, and passes on nothing after them."""

    def __init__(self, server):
        super().__init__(server.url)
        self.kill = server.kill

    async def answer(self, request):
        body = await request.read()
        if not json.loads(body or b"{}").get("stream"):
            return await super().answer(request)
        passed, ended = web.StreamResponse(headers={"Content-Type": "text/event-stream"}), 0
        async with self.session.post(f"{self.target}{request.path_qs}", data=body, headers=request.headers) as answer:
            await passed.prepare(request)
            async for line in answer.content:
                await passed.write(line)
                ended += b'"finish_reason":{' in line
                if ended == FEW and line == b"\n":
                    break
        self.kill()
        request.transport.close()
        return passed


class Noting(DirectAsker):
    """Tells of each question that is asked, and of answers that have ended after the engine has heard of them."""

    def __init__(self, ended, asked=lambda question: None):
        super().__init__(lambda ids: " ".join(map(str, ids)))
        self.note_ended, self.note_asked = ended, asked

    def when_ended(self, take):
        def both(answers):
            take(answers)
            self.note_ended(answers)

        super().when_ended(both)

    async def ask(self, question):
        self.note_asked(question)
        return await super().ask(question)


def requests_of(question):
    return [call.request for call in question.calls]


def test_answers_end_one_by_one_and_are_whole(pool, tmp_path):
    (_, server) = pool.up()
    model = AutoModelForCausalLM.from_pretrained(server.model)
    # A random model: one in seven tokens ends an answer, so that they are of many lengths.
    request = group(0, count=COUNT, max_new_tokens=60, stop_token_ids=tuple(range(0, VOCAB, 7)))

    async def scenario():
        ended, held = [], []

        def noted(answers):
            ended.extend(answers)
            held.append(engine.fleet.servers[0].tokens_in_flight)

        engine = engine_of(
            [server.url], tmp_path, options=section(), expect=expected(server.model), answers=Noting(noted)
        )
        async with started(engine):
            await give(engine, model, 0)
            rollouts = await collect(engine, [request])
        assert worst_difference(model, rollouts) <= TOLERANCE
        assert sorted(answer.tokens for answer in ended) == sorted(r.response_length for r in rollouts)
        assert len({answer.id for answer in ended}) == COUNT and len(set(held)) > COUNT / 2
        assert held == sorted(held, reverse=True) and held[-1] == 0
        assert {r.finish_reason for r in rollouts} <= {"stop", "length"} and len({len(r.tokens) for r in rollouts}) > 3

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_answers_that_had_ended_when_their_server_was_killed_are_kept(pool, tmp_path):
    """The others are asked for again at the other one, from their beginning."""
    victim, survivor = pool.up()
    model = AutoModelForCausalLM.from_pretrained(victim.model)
    asked, ended = [], []

    async def scenario():
        noting = Noting(ended.extend, lambda question: asked.append((question.url, requests_of(question), len(ended))))
        async with Killing(victim) as proxy:
            servers, expect = [proxy.url, survivor.url], expected(victim.model)
            engine = engine_of(servers, tmp_path, options=section(), expect=expect, answers=noting)
            async with started(engine):
                await give(engine, model, 1)
                wanted = group(0, count=COUNT, max_new_tokens=LONG, stop_token_ids=STOPS)
                return proxy.url, await collect(engine, [wanted])

    address, rollouts = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    (first, _, _), (second, (again,), kept) = asked[:2]
    assert (first, second) == (address, survivor.url)
    assert kept == FEW == COUNT - len(again.indices) and not again.partial
    assert [r.index for r in rollouts] == list(range(COUNT)) and {r.weight_version for r in rollouts} == {1}
    assert worst_difference(model, rollouts) <= TOLERANCE
