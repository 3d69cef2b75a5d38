"""Differences in place of weights into real servers: bit for bit what a full update gives, also after one of them was
changed by something else."""

from __future__ import annotations

import asyncio
import contextlib
import copy

import pytest
import torch
from sglang_pool import (
    VOCAB,
    ManagedServer,
    collect,
    engine_of,
    expected,
    group,
    section,
    started,
    worst_difference,
)
from sglang_shards import ShardedWeights
from transformers import AutoModelForCausalLM

from megatron_daro.sync.publish import WeightSync

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S = 1e-4, 500


def changed(model, seed):
    """Another model, of whose weights 3 % have the other sign."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter[torch.rand(parameter.shape, generator=generator) < 0.03] *= -1
    return other


def test_servers_have_every_update_that_comes_as_differences(pool, tmp_path):
    servers, wanted = pool.up(), [group(i, length=1 + i) for i in range(8)]
    options = section(sync="shards", shard_differences=True, arguments={"device": "cpu"})
    directory = servers[0].model

    async def published(sync, weights, model, version):
        weights.model = model
        metrics = await sync.publish(version)
        return metrics["sync/servers"], metrics["engine/fenced"], metrics["sync/bytes"] / metrics["sync/whole_bytes"]

    async def generates_with(engine, model, version, before=None):
        rollouts = await collect(engine, wanted)
        assert {r.weight_version for r in rollouts} == {version}
        assert worst_difference(model, rollouts) <= TOLERANCE
        assert before is None or worst_difference(before, rollouts) > 100 * TOLERANCE

    async def scenario(stack):
        expect = expected(directory, vocabulary=VOCAB)
        handles = [ManagedServer(server) for server in servers]
        engine = await stack.enter_async_context(started(engine_of(handles, tmp_path, expect=expect, options=options)))
        before = AutoModelForCausalLM.from_pretrained(directory)
        weights = ShardedWeights(before, directory)
        sync = WeightSync(weights, engine)
        taken, fenced, share = await published(sync, weights, before, 1)
        assert (taken, fenced) == (2, 0) and 1 < share < 1.05, "headers are all that it costs more"
        for version in (2, 3):
            model = changed(before, version)
            taken, fenced, share = await published(sync, weights, model, version)
            assert (taken, fenced) == (2, 0) and 0 < share < 0.15
            await generates_with(engine, model, version, before)
            before = model
        # Its own calls may do this: the loader does not know.
        await engine.fleet.servers[0].client.post(
            "/update_weights_from_disk", {"model_path": str(directory), "flush_cache": True}, timeout_s=60
        )
        model = changed(before, 4)
        taken, fenced, _ = await published(sync, weights, model, 4)
        assert (taken, fenced) == (1, 1)
        harmed, serving = engine.fleet.servers
        assert "put beside changed in this server since its last update" in harmed.reason
        assert (serving.state, serving.version) == ("serving", 4)
        while harmed.state != "serving":
            await asyncio.sleep(0.1)
        await generates_with(engine, model, 4, before)
        last = changed(model, 5)
        taken, fenced, share = await published(sync, weights, last, 5)
        assert (taken, fenced) == (2, 1) and 0 < share < 0.15, "the one that came back has what it needs"
        await generates_with(engine, last, 5, model)

    async def limited():
        async with contextlib.AsyncExitStack() as stack:
            await scenario(stack)

    asyncio.run(asyncio.wait_for(limited(), LIMIT_S))
