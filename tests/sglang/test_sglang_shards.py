"""Weights from shards to shards into real servers that are harmed on the way: each fails alone, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import threading

import pytest
from sglang_pool import (
    VOCAB,
    collect,
    engine_of,
    expected,
    group,
    save_policy,
    scheduler_of,
    section,
    started,
    worst_difference,
)
from sglang_proxy import ProxiedServer, Proxy
from sglang_shards import ShardedWeights
from transformers import AutoModelForCausalLM

from megatron_daro.sync import shard_sender
from megatron_daro.sync.publish import WeightSync

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S = 1e-4, 500
CALL = "/update_weights_from_tensor"


@pytest.fixture(scope="module")
def models(pool, tmp_path_factory):
    """(model the servers were started with, another one of the same shapes)."""
    directory = pool.up()[0].model
    return AutoModelForCausalLM.from_pretrained(directory), save_policy(tmp_path_factory.mktemp("other"), 1)


@contextlib.contextmanager
def woken(process):
    """A process that may be stopped goes on at the end, if it is there."""
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


def in_the_middle(monkeypatch, harm):
    """Have `harm` called before the fourth piece for the first server, once."""
    of_thread, pieces = threading.local(), itertools.count(1)
    stream, speaks = shard_sender._Serving._stream, shard_sender._speaks

    def streaming(self, connection, writes):
        of_thread.server = writes[0].server
        return stream(self, connection, writes)

    def speaking(connection):
        if of_thread.server == 0 and next(pieces) == 4:
            harm()
        return speaks(connection)

    monkeypatch.setattr(shard_sender._Serving, "_stream", streaming)
    monkeypatch.setattr(shard_sender, "_speaks", speaking)
    return pieces


def one_wrong_checksum(monkeypatch):
    right, calls = shard_sender.checksum_of, itertools.count(1)
    monkeypatch.setattr(shard_sender, "checksum_of", lambda *a: right(*a) ^ (next(calls) == 3))


KINDS = {
    "killed": "",
    "frozen": "",
    "500": "status 500",
    "pretend": "",
    "bit": "checksum",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_harmed_while_shards_arrive_fails_alone(pool, models, tmp_path, monkeypatch, kind):
    victim, survivor = pool.up()
    wanted = [group(i, length=1 + i) for i in range(8)]
    options = section(sync="shards", sync_timeout_s=15, arguments={"device": "cpu"})

    async def scenario(stack):
        proxy, witness = [await stack.enter_async_context(Proxy(server.url)) for server in (victim, survivor)]
        handles = [ProxiedServer(victim, proxy), ProxiedServer(survivor, witness)]
        expect = expected(victim.model, vocabulary=VOCAB)
        engine = await stack.enter_async_context(started(engine_of(handles, tmp_path, expect=expect, options=options)))
        weights = ShardedWeights(models[0], victim.model)
        sync = WeightSync(weights, engine)
        assert (await sync.publish(1))["sync/servers"] == 2
        opened, calls = witness.seen[CALL], itertools.count(1)
        if kind == "killed":
            in_the_middle(monkeypatch, victim.kill)
        elif kind == "frozen":
            frozen = scheduler_of(victim)
            in_the_middle(monkeypatch, lambda: os.kill(frozen.pid, signal.SIGSTOP))
            stack.enter_context(woken(frozen))
        elif kind == "bit":
            one_wrong_checksum(monkeypatch)
        else:
            proxy.rule = lambda path: kind if path == CALL and next(calls) == 1 else ""
        weights.model = models[1]
        metrics = await sync.publish(2)
        assert (metrics["sync/servers"], metrics["engine/fenced"]) == (1, 1)
        harmed, serving = sorted(engine.fleet.servers, key=lambda server: server.state == "serving")
        assert (serving.state, serving.version) == ("serving", 2)
        assert re.search(KINDS[kind], harmed.reason)
        assert witness.seen[CALL] == opened + 1, "what had everything was sent everything again"
        rollouts = await collect(engine, wanted)
        assert {r.weight_version for r in rollouts} == {2}
        assert worst_difference(models[1], rollouts) <= TOLERANCE
        while len(engine.fleet.of("serving")) < 2:
            await asyncio.sleep(0.1)
        assert [server.version for server in engine.fleet.servers] == [2, 2]
        assert sum(server.restarts for server in engine.fleet.servers) == 1
        assert worst_difference(models[1], await collect(engine, wanted)) <= TOLERANCE

    async def limited():
        async with contextlib.AsyncExitStack() as stack:
            await scenario(stack)

    asyncio.run(asyncio.wait_for(limited(), LIMIT_S))
