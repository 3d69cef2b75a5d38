"""A real server that is sent fp8 blocks: it holds, to the bit, what the blocks stand for, and tells which they are.

On a CPU without AMX the products are a stand-in's (tools/sglang_cpu); what loads, keeps and tells is SGLang's.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib

import numpy as np
import pytest
import torch
from fp8_restored import restored
from sglang_pool import (
    collect,
    engine_of,
    expected,
    give,
    group,
    logprobs_of,
    save_policy,
    section,
    serving,
    started,
)

from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.sync.buckets import tensor_bytes
from megatron_daro.sync.fp8_cast import cast

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]

SIZES = {"hidden": 256, "intermediate": 384}  # on every side a whole number of blocks
LIMIT_S = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fp8_blocks")
    save_policy(directory / "model", 0, **SIZES)
    arguments = {"dtype": "bfloat16", **fp8_blocks.fp8_arguments()}
    with serving(directory, **arguments) as one:
        yield one


def policy(tmp_path, seed):
    """In bf16, with weights of which fp8 keeps less than bf16 does."""
    model = save_policy(tmp_path / f"policy_{seed}", seed, **SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.mul_(0.2)
    return model.to(torch.bfloat16)


def rounded(model):
    """The model with the matrices that a server has after blocks of them were sent."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.endswith("proj.weight"):
                parameter.copy_(restored(*cast(parameter), torch.bfloat16))
    return found


def engine(server, tmp_path):
    return engine_of([server.url], tmp_path, options=section(fp8_blocks=True), expect=expected(server.model))


def checksum(*parts):
    return hashlib.sha256(tensor_bytes(torch.cat(parts)).numpy().data).hexdigest()[:16]


def distance(model, rollouts):
    """Between log-probs of the server and of the model: root of the mean square, of all tokens."""
    return float(np.sqrt(np.mean(np.concatenate([logprobs_of(model, r) - r.logprobs for r in rollouts]) ** 2)))


def test_a_server_has_what_the_blocks_stand_for_after_every_update(server, tmp_path):
    async def scenario():
        async with started(engine(server, tmp_path)) as fleet:
            for version, seed in enumerate((1, 2)):
                model = policy(tmp_path, seed)
                metrics = await give(fleet, model, version)
                assert (metrics["sync/servers"], metrics["engine/fenced"]) == (1, 0)
                named = dict(rounded(model).named_parameters())
                layer = "model.layers.1."
                (client,) = (one.client for one in fleet.fleet.servers)
                answer = await client.post("/weights_checker", {"action": "checksum"}, timeout_s=60)
                told = answer["ranks"][0]["checksums"]
                attention, mlp = layer + "self_attn.", layer + "mlp."
                qkv = checksum(*(named[f"{attention}{part}_proj.weight"] for part in "qkv"))
                gate_up = checksum(*(named[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")))
                assert told[attention + "qkv_proj.weight"] == qkv
                assert told[attention + "o_proj.weight"] == checksum(named[attention + "o_proj.weight"])
                assert told[mlp + "gate_up_proj.weight"] == gate_up
                assert told[mlp + "down_proj.weight"] == checksum(named[mlp + "down_proj.weight"])
                rollouts = await collect(fleet, [group(i, count=4) for i in range(4)])
                near, far = distance(rounded(model), rollouts), distance(model, rollouts)
                print(f"{near:.3g} from what the blocks stand for, {far:.3g} from the policy")
                assert near < 0.05 and near < far / 2

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_matrix_that_only_one_end_means_as_blocks_fences_the_server(server, tmp_path, monkeypatch):
    """SGLang itself takes the bf16 numbers, and would multiply them by scales that nobody sent."""
    without = tuple(name for name in fp8_blocks.fp8_matrices("qwen2") if "down_proj" not in name)
    monkeypatch.setattr(fp8_blocks, "fp8_matrices", lambda model_type: without)

    async def scenario():
        async with started(engine(server, tmp_path)) as fleet:
            with pytest.raises(Exception, match="fp8 blocks") as failure:
                await give(fleet, policy(tmp_path, 3), 0)
            assert "model.layers.0.mlp.down_proj.weight" in str(failure.value)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
