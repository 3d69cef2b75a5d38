"""A real SGLang server keeps its base and gets the ranks' adapters under a name for each version: equal log-probs after
every sync, no answer of two versions, and none of weights that are not the named ones.

3e-5: both compute in fp32, each up to 1.4e-5 from fp64. alpha / sqrt(rank) is 6 here, alpha / rank 3, and 1 where alpha
is lost.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from run_configuration import configured
from sglang_pool import (
    CONTEXT,
    VOCAB,
    ManagedServer,
    PooledServer,
    collect,
    engine_of,
    expected,
    group,
    section,
    started,
)
from sglang_proxy import Proxy
from test_sglang_sync import batch_of, policy_of, ray_cluster, sampled, worst_difference  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_daro.config.rules.lora import served_config
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.sync.publish import WeightSync
from megatron_daro.types import PreparedStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE, LIMIT_S = 3e-5, 500
RANK, SCALE = 4, 6.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = {"qwen3": {}, "llama": {}, "mistral": {"sliding_window": None}}
_CHOICE = {"moe_intermediate_size": 16, "norm_topk_prob": True, "num_experts_per_tok": 2}
# Experts are 16 wide: transformers' own fp32 is 2.3e-5 from fp64 for a Mixtral with 64, 1.1e-5 with 16, 0.9e-5 to
# 1.4e-5 for the others.
WITH_EXPERTS = {
    "qwen3_moe": {**_CHOICE, "num_experts": 4},
    "glm4_moe": {**_CHOICE, "n_routed_experts": 4, "num_nextn_predict_layers": 0, "attention_bias": True},
    "mixtral": {"intermediate_size": 16, "num_local_experts": 4, "sliding_window": None},
}


def save_family(directory, family):
    """A small random model; of a family with experts, four of them in each layer but the first of GLM's."""
    own = {"intermediate_size": 64, **(DENSE | WITH_EXPERTS).get(family, {})}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **own,
    )
    model, generator = AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(directory)


class Serving:
    """A server that takes adapters, and what a run that uses it says of them."""

    def __init__(self, directory, family, ranks):
        save_family(directory / "model", family)
        targets = list(ATTENTION) if family in WITH_EXPERTS else ["all"]
        lora = {"rank": RANK, "alpha": SCALE * RANK**0.5, "rslora": True, "targets": targets}
        sglang = {"kind": "sglang", "sglang": {"sync": "adapters"}}
        config = configured(model={"path": directory / "model"}, lora=lora, engine=sglang)
        self.lora, adapter = config.lora, served_config(config)
        arguments = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": adapter["target_modules"]}
        arguments |= {"lora_backend": "torch_native", "max_loras_per_batch": 4, "tensor_parallel": ranks}
        self.server = PooledServer(directory / "model", directory / "server.log", seed=0, **arguments)
        self.ranks, self.expect = ranks, expected(directory / "model", model_type=family, adapter=adapter)

    def engine(self, run_dir, handle=None):
        options = section(sync="adapters", arguments={"device": "cpu"}, tensor_parallel=self.ranks)
        handle = handle or self.server.url
        return engine_of([handle], run_dir, options=options, temperature=0.7, expect=self.expect)


@contextlib.contextmanager
def served(directory, family, ranks=1):
    one = Serving(directory, family, ranks)
    try:
        one.server.start()
        one.server.wait()
        yield one
    finally:
        one.server.close()


@pytest.fixture(scope="module")
def serving(request, tmp_path_factory):
    family = getattr(request, "param", "qwen2")
    with served(tmp_path_factory.mktemp(family), family) as one:
        yield one


@contextlib.asynccontextmanager
async def ranks(serving, **layout):
    policy, placement = await policy_of(serving.server.model, lora=serving.lora, **layout)
    try:
        await policy.start()
        yield policy
    finally:
        await policy.close()
        placement.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def trained(policy, rollouts, version):
    assert not (await policy.train(PreparedStep(batch_of(rollouts)), version)).skipped


async def loaded(server):
    """Names of the adapters that the server has."""
    async with SGLangClient(server.url) as client:
        models = (await client.get("/v1/models", timeout_s=60))["data"]
    return {model["id"] for model in models[1:]}


async def until_only_newest(server):
    """Raises AssertionError, with those that it has, after a minute."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while await loaded(server) != {server.adapter}:
                await asyncio.sleep(0.05)
    assert await loaded(server) == {server.adapter}


@pytest.mark.parametrize(
    ("serving", "layout"),
    [
        pytest.param("qwen2", {}),
        pytest.param("qwen2", {"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.heavy),
        *(pytest.param(family, {}, marks=pytest.mark.heavy) for family in (*DENSE, *WITH_EXPERTS)),
    ],
    indirect=["serving"],
)
def test_the_server_has_the_ranks_adapters_after_every_sync(serving, tmp_path, layout):
    check_every_sync(serving, tmp_path, layout)


@pytest.mark.heavy
def test_both_ranks_of_a_server_have_them(tmp_path):
    with served(tmp_path, "qwen2", 2) as serving:
        check_every_sync(serving, tmp_path, {"tensor_parallel": 2})


def check_every_sync(serving, tmp_path, layout):
    async def scenario():
        async with ranks(serving, **layout) as policy, started(serving.engine(tmp_path)) as engine:
            sync, earlier = WeightSync(policy, engine), None
            for version in range(3):
                if earlier is not None:
                    await trained(policy, earlier, version)
                metrics = await sync.publish(version)
                adapters = tensor_bytes(serving)
                assert adapters <= metrics["sync/bytes"] <= 1.01 * adapters
                assert metrics["sync/verified"] == (version > 0), "B begins at zero"
                rollouts = await sampled(engine)
                assert {r.weight_version for r in rollouts} == {version}
                assert await worst_difference(policy, rollouts) <= TOLERANCE
                if earlier is not None:
                    assert await worst_difference(policy, earlier) > 100 * TOLERANCE
                earlier = rollouts
            await until_only_newest(engine.fleet.servers[0])

    run(scenario())


def tensor_bytes(serving):
    """Of A and B of every target in both layers, fp32."""
    sides = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    sides |= {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    return sum(2 * RANK * sum(sides[name]) * 4 for name in serving.expect.adapter["target_modules"])


async def without_adapter(path, body):
    """What a request would be that does not name one."""
    if path == "/generate":
        return {name: value for name, value in body.items() if name != "lora_path"}
    return body


async def without_alpha(path, body):
    """What a load would be that lost alpha: by rank / rank."""
    return {**body, "config_dict": {**body["config_dict"], "lora_alpha": RANK}} if "config_dict" in body else body


@pytest.mark.parametrize("fault", ["never delivered", without_adapter, without_alpha])
def test_a_server_that_does_not_compute_with_the_adapters_answers_nothing(serving, tmp_path, fault):
    """Seen by a run that was there as the adapters began at zero, and by one that begins with trained ones."""

    async def scenario():
        async with ranks(serving) as policy, Proxy(serving.server.url) as proxy:
            for trained_before in (False, True):
                async with started(serving.engine(tmp_path, proxy.url)) as engine:
                    sync = WeightSync(policy, engine)
                    if not trained_before:
                        await sync.publish(0)
                        await trained(policy, await sampled(engine), 1)
                    if callable(fault):
                        proxy.edit = fault
                    else:
                        proxy.rule = lambda path: "pretend" if path == "/load_lora_adapter_from_tensors" else ""
                    with pytest.raises(SyncError, match="probe"):
                        await sync.publish(1)
                    with pytest.raises(EngineError):
                        await collect(engine, [group(0)])
                assert not await loaded(serving.server)
                proxy.edit, proxy.rule = None, lambda path: ""

    run(scenario())


def test_answers_end_with_the_version_that_they_began_with(serving, tmp_path):
    """Requests that name version 1 get to the server when it has version 2 as well, and run beside those of 2."""

    async def scenario():
        arrived, may_pass = asyncio.Event(), asyncio.Event()
        async with (
            ranks(serving) as policy,
            Proxy(serving.server.url) as proxy,
            started(serving.engine(tmp_path, proxy.url)) as engine,
        ):
            sync, (server,) = WeightSync(policy, engine), engine.fleet.servers
            await sync.publish(0)
            await trained(policy, await sampled(engine), 1)
            await sync.publish(1)
            (tmp_path / "saved").mkdir()
            await policy.save(tmp_path / "saved", lambda: None)
            await until_only_newest(server)
            earlier, adapter = await sampled(engine), server.adapter

            async def hold(path, body):
                if path == "/generate" and body["lora_path"] == adapter:
                    arrived.set()
                    await may_pass.wait()
                return body

            proxy.edit = hold
            old = asyncio.create_task(sampled(engine))
            await arrived.wait()
            await trained(policy, earlier, 2)
            await sync.publish(2)
            assert await loaded(server) == {adapter, server.adapter}
            new = asyncio.create_task(sampled(engine))
            may_pass.set()
            assert await worst_difference(policy, await new) <= TOLERANCE
            assert {r.weight_version for r in await new} == {2}
            assert {r.weight_version for r in await old} == {1}
            await until_only_newest(server)
            assert await worst_difference(policy, await old) > 100 * TOLERANCE
            await policy.load(tmp_path / "saved")
            assert await worst_difference(policy, await old) <= TOLERANCE

    run(scenario())


@pytest.mark.heavy
def test_a_server_that_is_started_again_gets_the_present_adapter(serving, tmp_path):
    async def scenario():
        handle = ManagedServer(serving.server)
        async with ranks(serving) as policy, started(serving.engine(tmp_path, handle)) as engine:
            sync = WeightSync(policy, engine)
            for version in range(3):
                if version:
                    await trained(policy, await sampled(engine), version)
                await sync.publish(version)
            serving.server.kill()
            rollouts = await sampled(engine)
            (server,) = engine.fleet.servers
            assert (handle.launches, server.restarts) == (2, 1)
            assert {r.weight_version for r in rollouts} == {2}
            assert await worst_difference(policy, rollouts) <= TOLERANCE
            await until_only_newest(server)

    run(scenario())
