"""Faults of real servers: every group is answered once and right, and nobody serves weights that are not whole.

No assertion is on time; limits are for a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal

import pytest
from sglang_pool import (
    VOCAB,
    collect,
    engine_of,
    expected,
    give,
    group,
    save_policy,
    scheduler_of,
    section,
    started,
    worst_difference,
)
from sglang_proxy import ProxiedServer, Proxy
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S = 1e-4, 500
BUCKET_BYTES = 16_000  # the weights need several broadcasts


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def models(pool, tmp_path_factory):
    """(model the servers were started with, another one of the same shapes)."""
    directory = pool.up()[0].model
    return AutoModelForCausalLM.from_pretrained(directory), save_policy(tmp_path_factory.mktemp("other"), 1)


def assert_answered_once(rollouts, wanted):
    """Each sample of each group, under the id and attempt that it was asked for, with all its tokens."""
    asked = [(request.group_id, request.attempt, index) for request in wanted for index in request.indices]
    assert sorted((r.group_id, r.attempt, r.index) for r in rollouts) == sorted(asked)
    assert all(r.response_length == wanted[0].sampling.max_new_tokens for r in rollouts)


async def until(condition):
    """`run` limits the wait."""
    while not condition():
        await asyncio.sleep(0.1)


def test_500s_and_connections_that_break_lose_and_double_no_group(pool, models, tmp_path):
    servers = pool.up()
    faults = itertools.cycle(["500", "reset", "", "reset_answer", "500", ""])

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(Proxy(server.url)) for server in servers]
            engine = engine_of([proxy.url for proxy in proxies], tmp_path, expect=expected(servers[0].model))
            await stack.enter_async_context(started(engine))
            for version, model in enumerate(models):
                for proxy in proxies:
                    proxy.rule = lambda path: ""
                await give(engine, model, version, bucket_bytes=BUCKET_BYTES)
                left = itertools.repeat(None, 20)

                def rule(path, left=left):
                    return next(faults) if path == "/generate" and next(left, 0) is None else ""

                for proxy in proxies:
                    proxy.rule = rule
                wanted = [group(i, length=1 + i % 5) for i in range(12)]
                rollouts = await collect(engine, wanted)
                assert_answered_once(rollouts, wanted)
                assert {r.weight_version for r in rollouts} == {version}
                assert worst_difference(model, rollouts) <= TOLERANCE
            assert engine.metrics()["engine/retries"] >= 10
            done = sum((proxy.done for proxy in proxies), start=type(proxies[0].done)())
            assert min(done[fault] for fault in ("500", "reset", "reset_answer")) >= 5
            # Five failures in a row fence a server; one that answers comes back.
            await until(lambda: engine.metrics()["engine/servers"] == 2)

    run(scenario())


@contextlib.contextmanager
def stopped(process):
    """SIGSTOP, until the end of the block."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_stops_making_tokens_is_given_up_and_its_groups_are_answered(pool, models, tmp_path):
    """Its port stays open and accepts requests: only tokens count as progress."""
    servers = pool.up()
    urls, wanted = [server.url for server in servers], [group(i) for i in range(8)]
    expect, options = expected(servers[0].model), section(stall_timeout_s=12, max_restarts=0)

    async def scenario():
        async with started(engine_of(urls, tmp_path, options=options, expect=expect)) as engine:
            await give(engine, models[1], 1, bucket_bytes=BUCKET_BYTES)
            with stopped(scheduler_of(servers[0])):
                rollouts = await collect(engine, wanted)
            assert_answered_once(rollouts, wanted)
            assert worst_difference(models[1], rollouts) <= TOLERANCE
            first, second = engine.fleet.servers
            assert (first.state, second.state) == ("fenced", "serving")
            assert "engine.sglang.stall_timeout_s" in first.reason
        async with started(engine_of(urls, tmp_path, options=options, expect=expect)) as engine:
            await give(engine, models[0], 2, bucket_bytes=BUCKET_BYTES)
            assert engine.metrics()["engine/servers"] == 2, "it goes on once it may"
            assert worst_difference(models[0], await collect(engine, wanted)) <= TOLERANCE

    run(scenario())


def test_a_kill_in_the_middle_of_a_broadcast_leaves_a_server_with_all_of_the_new_weights(pool, models, tmp_path):
    victim, survivor = pool.up()
    wanted = [group(i, length=1 + i) for i in range(8)]

    async def scenario():
        async with Proxy(victim.url) as proxy:
            handles, expect = [ProxiedServer(victim, proxy), survivor.url], expected(victim.model, vocabulary=VOCAB)
            async with started(engine_of(handles, tmp_path, expect=expect)) as engine:
                await give(engine, models[0], 1, bucket_bytes=BUCKET_BYTES)
                broadcasts = itertools.count(1)

                def rule(path):
                    if path == "/update_weights_from_distributed" and next(broadcasts) == 3:
                        victim.kill()
                    return ""

                proxy.rule = rule
                metrics = await give(engine, models[1], 2, bucket_bytes=BUCKET_BYTES)
                assert next(broadcasts) > 3, "the kill never came"
                assert (metrics["sync/servers"], metrics["engine/fenced"]) == (1, 1)
                killed, serving = engine.fleet.servers
                assert killed.state != "serving" and (serving.state, serving.version) == ("serving", 2)
                rollouts = await collect(engine, wanted)
                assert_answered_once(rollouts, wanted)
                assert {r.weight_version for r in rollouts} == {2}
                assert worst_difference(models[1], rollouts) <= TOLERANCE
                await until(lambda: engine.fleet.servers[0].state == "serving")
                back = engine.fleet.servers[0]
                assert (back.version, back.restarts, handles[0].launches) == (2, 1, 2)
                proxied = proxy.done[""]
                rollouts = await collect(engine, wanted)
                assert proxy.done[""] > proxied, "the server that came back must have answered some"
                assert_answered_once(rollouts, wanted)
                assert worst_difference(models[1], rollouts) <= TOLERANCE

    run(scenario())
