"""No prompt is answered from a prefix that older weights read, though the server's cache still has it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sglang_pool import (
    VOCAB,
    collect,
    engine_of,
    expected,
    give,
    group,
    save_policy,
    section,
    started,
    worst_difference,
)
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Prompts of 60 tokens of which the first 50 are the same.
PREFIX = tuple(i * 7 % VOCAB for i in range(50))
TOLERANCE, LIMIT_S = 1e-4, 300


def sharing(number, **options):
    """A group whose prompt begins with the shared prefix."""
    request = group(number, length=10, **options)
    return replace(request, prompt=replace(request.prompt, tokens=PREFIX + request.prompt.tokens))


def test_a_cache_that_a_running_request_keeps_from_being_emptied_serves_no_later_weights(pool, tmp_path):
    (server, *_) = pool.up()
    model = AutoModelForCausalLM.from_pretrained(server.model)
    models = [model, *(save_policy(tmp_path / f"model{i}", i) for i in (1, 2))]

    async def scenario():
        engine = engine_of([server.url], tmp_path, options=section(pause="in_place"), expect=expected(server.model))
        async with started(engine):
            await give(engine, models[0], 0)
            endless = asyncio.create_task(collect(engine, [group(99, count=1, max_new_tokens=2500)]))
            for version in range(3):
                if version:
                    await give(engine, models[version], version)
                # The second group finds the prefix of the first, and that of earlier weights if nothing forbids it.
                for number in (2 * version, 2 * version + 1):
                    rollouts = await collect(engine, [sharing(number)])
                    assert {r.weight_version for r in rollouts} == {version}
                    assert worst_difference(models[version], rollouts) <= TOLERANCE, (version, number)
                assert not endless.done(), "it kept the cache from being emptied, or the test shows nothing"
            await engine.abort([99])
            (longest,) = await endless
            assert [v for v, _ in longest.spans] == [0, 1, 2] and longest.weight_version == 0

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
