"""Weights from shards to shards by Mooncake's transfer engine into a real server, all in a network of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from own_network import in_own_network
from sglang_pool import (
    VOCAB,
    ManagedServer,
    collect,
    engine_of,
    expected,
    group,
    required_environment,
    save_policy,
    section,
    serving,
    started,
    worst_difference,
)
from sglang_shards import ShardedWeights

from megatron_daro.sync.publish import WeightSync

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S = 1e-4, 500


def updated_thrice(directory: Path) -> None:
    """Three updates: what the engines made for the first serves the others."""
    first, second = save_policy(directory / "model", 0), save_policy(directory / "other", 1)
    wanted = [group(i, length=1 + i) for i in range(8)]
    options = section(sync="shards", shards_over="mooncake_tcp", arguments={"device": "cpu"})

    async def scenario(server):
        weights = ShardedWeights(first, server.model)
        expect = expected(server.model, vocabulary=VOCAB)
        async with started(engine_of([ManagedServer(server)], directory, expect=expect, options=options)) as engine:
            sync = WeightSync(weights, engine)
            for version, model in enumerate((first, second, first), 1):
                weights.model = model
                metrics = await sync.publish(version)
                assert (metrics["sync/servers"], metrics["engine/fenced"]) == (1, 0)
                rollouts = await collect(engine, wanted)
                assert {r.weight_version for r in rollouts} == {version}
                assert worst_difference(model, rollouts) <= TOLERANCE

    with serving(directory) as server:
        asyncio.run(asyncio.wait_for(scenario(server), LIMIT_S))


def test_a_server_has_every_update_that_mooncake_carries(tmp_path):
    for who, python in (("the servers'", required_environment() / "bin" / "python"), ("this", sys.executable)):
        if subprocess.run([python, "-c", "import mooncake.engine"], capture_output=True).returncode:
            pytest.skip(f"{who} environment has no Mooncake (pip install --no-deps mooncake-transfer-engine-non-cuda)")
    in_own_network(__name__, "updated_thrice", tmp_path, limit_s=LIMIT_S + 300)
