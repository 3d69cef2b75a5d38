"""After every weight update the servers have the policy's weights: real Megatron ranks, real servers, equal log-probs.

1e-4: both compute in fp32; orders of summation differ by 1e-5.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from run_configuration import run_context
from sglang_pool import PooledServer, collect, engine_of, expected, group, save_policy, section, started

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.lora import LoraSection
from megatron_daro.runtime import parts
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.sync.publish import WeightSync
from megatron_daro.types import PreparedStep, StepBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TEMPERATURE, K, TOLERANCE = 0.7, 4, 1e-4
_ONE_WAY = [pytest.param(*layout, marks=pytest.mark.heavy) for layout in ((2, 1), (1, 2))]
LAYOUTS = [(1, 1), *_ONE_WAY, (2, 2)]
MODES = ("distributed", "shards", "disk")


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    with cluster(4):
        yield


async def policy_of(model, *, lora=None, **layout):
    actor = ActorSection(**layout, precision="fp32", micro_batch_tokens=256, optimizer={"learning_rate": 1e-2})
    settings = PolicySettings(model, K, 12, TEMPERATURE, total_steps=10, lora=lora or LoraSection())
    algorithm = AlgorithmSection(name="grpo")
    context = run_context(run_dir=model / "run", actor=actor, trainer={"seed": 1})
    placement = parts.placement(context, engines=False)
    await placement.start()
    return PolicyGroup(context, settings, algorithm, placement), placement


def batch_of(rollouts):
    """The rollouts as a batch; every other one is taken for right."""
    advantages_N = np.array([1.0 if i % 2 else -1.0 for i in range(len(rollouts))], dtype=np.float32)
    return StepBatch.of(
        rollouts,
        rollout_logprobs_R=np.concatenate([r.logprobs for r in rollouts]),
        rewards_N=(advantages_N > 0).astype(np.float32),
        correct_N=(advantages_N > 0).astype(np.uint8),
        bins_N=np.full(len(rollouts), K // 2, dtype=np.int64),
        group_ids_N=np.array([r.group_id for r in rollouts], dtype=np.int64),
        advantages_N=advantages_N,
        truncated_N=np.zeros(len(rollouts), dtype=np.uint8),
        rollouts_per_prompt=K,
    )


async def worst_difference(policy, rollouts):
    """Between the log-probs of the servers and those of the ranks."""
    scored = await policy.logprobs_of(rollouts, temperature=TEMPERATURE)
    return max(float(np.abs(mine - r.logprobs).max()) for mine, r in zip(scored, rollouts, strict=True))


async def sampled(engine):
    """32 answers; eight groups, so that both servers have some at the same time."""
    wanted = [group(i, count=K, length=1 + i, temperature=TEMPERATURE) for i in range(8)]
    rollouts = await collect(engine, wanted)
    assert len(rollouts) == 32 and all(r.response_length == 12 for r in rollouts)
    return sorted(rollouts, key=lambda r: (r.group_id, r.index))


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), LAYOUTS)
def test_servers_have_the_ranks_weights_after_every_sync(pool, tmp_path, tensor_parallel, pipeline_parallel):
    servers = pool.up()
    layout = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    check_every_sync(servers, tmp_path, "qwen2", **layout)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "layout", [{"data_parallel": 2, "expert_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}]
)
def test_servers_have_the_experts_of_the_ranks(expert_servers, tmp_path, layout):
    check_every_sync(expert_servers, tmp_path, "qwen3_moe", **layout)


@pytest.mark.heavy
@pytest.mark.parametrize("expert_servers", ["glm4_moe"], indirect=True)
def test_servers_have_the_shared_experts_and_the_bias_of_the_ranks(expert_servers, tmp_path):
    layout = {"tensor_parallel": 2, "expert_parallel": 2}
    check_every_sync(expert_servers, tmp_path, "glm4_moe", ("distributed", "disk"), **layout)


@pytest.fixture(scope="module")
def expert_servers(request, tmp_path_factory):
    """Two servers of a Qwen3 with four experts, or of a GLM-4.5."""
    directory = tmp_path_factory.mktemp("expert_servers")
    save_policy(directory / "model", 0, experts=4, glm=getattr(request, "param", "") == "glm4_moe")
    servers = [PooledServer(directory / "model", directory / f"server_{i}.log", seed=i) for i in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.mark.heavy
def test_shards_find_their_places_on_both_ranks_of_a_server(tmp_path):
    """Of the MLP's 48 columns, padded to 64, the second rank has 16 and room for 32."""
    directory = tmp_path / "servers"
    save_policy(directory / "model", 0)
    servers = [PooledServer(directory / "model", directory / "server.log", seed=0, tensor_parallel=2)]
    try:
        servers[0].start()
        servers[0].wait()
        layout = {"tensor_parallel": 1, "pipeline_parallel": 2, "data_parallel": 2}
        check_every_sync(servers, tmp_path, "qwen2", ("shards", "disk"), 2, **layout)
    finally:
        servers[0].close()


def check_every_sync(servers, tmp_path, model_type, modes=MODES, tensor_parallel_of_servers=1, **layout):
    """Two updates by each way: servers and ranks agree after each of them, and did not before."""
    model, urls = servers[0].model, [server.url for server in servers]
    expect = expected(model, model_type=model_type)

    async def scenario():
        policy, placement = await policy_of(model, **layout)
        version, earlier = 0, None
        try:
            await policy.start()
            for mode in modes:
                own = section(
                    sync=mode,
                    bucket_mib=1,
                    arguments={"device": "cpu"},
                    tensor_parallel=tensor_parallel_of_servers,
                )
                engine = engine_of(urls, tmp_path, options=own, temperature=TEMPERATURE, expect=expect)
                async with started(engine):
                    sync = WeightSync(policy, engine)
                    for _ in range(2):
                        if earlier is not None:
                            version += 1
                            assert not (await policy.train(PreparedStep(batch_of(earlier)), version)).skipped
                        metrics = await sync.publish(version)
                        assert (metrics["sync/servers"], metrics["engine/fenced"]) == (len(servers), 0)
                        if mode == "disk":
                            assert len([*(tmp_path / "sync").iterdir()]) == 1, "that of the update before goes"
                        rollouts = await sampled(engine)
                        assert {r.weight_version for r in rollouts} == {version}
                        assert await worst_difference(policy, rollouts) <= TOLERANCE, (mode, version)
                        if earlier is not None:  # or the update before would have passed as well
                            assert await worst_difference(policy, earlier) > 100 * TOLERANCE
                        earlier = rollouts
        finally:
            await policy.close()
            placement.close()  # the next test needs the room

    asyncio.run(asyncio.wait_for(scenario(), 500))
    assert not (tmp_path / "sync").exists(), "the engines are closed"
