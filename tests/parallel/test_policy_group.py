"""The policy as the driver sees it: real ranks under Ray, and what crosses the driver in a step."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import numpy as np
import pytest
from run_configuration import run_context
from small_models import ROLLOUTS, random_batch, save_model

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import SyncError
from megatron_daro.runtime import parts, policy_group, step_shards
from megatron_daro.runtime.cluster import cluster
from megatron_daro.sync.plan import SendPlan, Target
from megatron_daro.types import PreparedStep, Rollout

ALGORITHM = AlgorithmSection(name="grpo", old_logprobs="recompute", kl={"coefficient": 0.1})


@pytest.fixture
def put(monkeypatch):
    """Everything the driver put into the object store by hand."""
    objects, original = [], step_shards.ray.put
    monkeypatch.setattr(step_shards.ray, "put", lambda value: objects.append(value) or original(value))
    return objects


async def two_steps(policy, batch, put):
    await policy.start()
    found = {}
    prepared = await policy.prepare(batch)
    first = await policy.train(prepared, 1)
    found["puts of a step"] = len(put)
    found["first"] = first.metrics
    # The same columns by the other way: a batch that `prepare` did not give travels whole.
    unknown = PreparedStep((await policy.prepare(batch)).batch)
    before = len(put)
    found["last"] = (await policy.train(unknown, 2)).metrics
    found["puts of a batch nobody prepared"] = len(put) - before
    await policy.close()
    return found


def test_a_shard_is_put_once_a_step_and_its_columns_arrive(tmp_path, put):
    save_model("qwen2", tmp_path)
    actor = ActorSection(tensor_parallel=2, precision="fp32", micro_batch_tokens=64, optimizer={"learning_rate": 1e-2})
    settings = PolicySettings(tmp_path, ROLLOUTS, 32, 1.0, total_steps=10)
    context = run_context(run_dir=tmp_path / "run", actor=actor, trainer={"seed": 1})
    placement = parts.placement(context, engines=False)
    environment = dict(os.environ)
    with cluster(2):
        changed = {name: value for name, value in os.environ.items() if environment.get(name) != value}
        assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in changed, "what starts later could join no other cluster"
        asyncio.run(placement.start())
        policy = policy_group.PolicyGroup(context, settings, ALGORITHM, placement)
        found = asyncio.run(two_steps(policy, random_batch(with_old=False), put))
    assert found["puts of a step"] == 1, "log-probs of old and reference weights, and training, of one shard"
    # Before the first step the old and the reference weights are the current ones; the columns did arrive.
    assert found["first"]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["first"]["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert found["first"]["mismatch/logprob_abs_mean"] > 0.1
    assert found["last"]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["last"]["policy/kl_reference"] > 1e-4
    assert found["puts of a batch nobody prepared"] == 1
    assert all(np.isfinite(value) for value in found["last"].values())


def test_an_update_of_servers_on_two_hosts_that_cannot_be_sent_ends_on_both(tmp_path):
    """Of two replicas the second is said to be on another host. Weights that are not on a GPU cannot be handed out, and
    both hosts' ranks end the update all the same; the second time they meet in the group that is there."""
    save_model("qwen2", tmp_path)
    actor = ActorSection(data_parallel=2, precision="fp32", micro_batch_tokens=64)
    settings = PolicySettings(tmp_path, ROLLOUTS, 32, 1.0, total_steps=10)
    context = run_context(run_dir=tmp_path / "run", actor=actor, trainer={"seed": 1})
    placement = parts.placement(context, engines=False)
    targets = (Target("s0", "http://10.0.0.1:1"), Target("s1", "http://10.0.0.2:1"))
    plan = SendPlan(transport="tensor", targets=targets, bucket_bytes=1 << 16, timeout_s=5.0)

    async def export_twice(policy):
        await placement.start()
        await policy.start()
        hosts = ("10.0.0.1", "10.0.0.2")
        policy.ranks.infos[:] = [dataclasses.replace(p, host=h) for p, h in zip(policy.ranks.infos, hosts, strict=True)]
        for _ in range(2):
            with pytest.raises(SyncError, match="needs weights on a GPU"):
                await policy.export(plan)
        await policy.close()

    with cluster(2):
        policy = policy_group.PolicyGroup(context, settings, ALGORITHM, placement)
        asyncio.run(export_twice(policy))


def test_fewer_samples_than_ranks_are_scored_and_trained(tmp_path):
    save_model("qwen2", tmp_path)
    actor = ActorSection(data_parallel=2, precision="fp32", micro_batch_tokens=64)
    settings = PolicySettings(tmp_path, ROLLOUTS, 32, 1.0, total_steps=10)
    context = run_context(run_dir=tmp_path / "run", actor=actor, trainer={"seed": 1})
    placement = parts.placement(context, engines=False)
    batch = random_batch(with_old=False).select([0])
    prompt = int(batch.prompt_lengths_N[0])
    rollout = Rollout(
        prompt_id="p",
        group_id=0,
        attempt=0,
        index=0,
        tokens=batch.tokens_T,
        prompt_length=prompt,
        logprobs=batch.rollout_logprobs_R,
        loss_mask=batch.loss_mask_R,
        text="",
        finish_reason="length",
        weight_version=0,
    )

    async def scored_and_trained(policy):
        await placement.start()
        await policy.start()
        (score,) = await policy.logprobs_of([rollout], temperature=1.0)
        prepared = await policy.prepare(batch)
        result = await policy.train(prepared, 1)
        await policy.close()
        return score, prepared.batch.old_logprobs_R, result

    with cluster(2):
        policy = policy_group.PolicyGroup(context, settings, ALGORITHM, placement)
        score, old, result = asyncio.run(scored_and_trained(policy))
    assert score == pytest.approx(old, abs=1e-6) and len(score) == len(batch.tokens_T) - prompt
    assert result.metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
