"""The experts that a real server says it chose are those of transformers' routers, token by token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_pool import (
    collect,
    engine_of,
    expected,
    give,
    group,
    save_policy,
    serving,
    started,
    worst_difference,
)
from transformers import AutoModelForCausalLM

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import EngineError

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
LIMIT_S = 200


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def server(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("routed_experts")
    save_policy(directory / "model", 0, experts=EXPERTS, glm=request.param == "glm4_moe")
    with serving(directory, enable_return_routed_experts=True) as one:
        yield one


def answers(server, tmp_path, requests):
    """The rollouts of some groups, in order, by a server that was given its own weights again."""
    named = list(load_file(server.model / "model.safetensors").items())

    async def ask():
        model_type = read_model_shape(server.model).family
        engine = engine_of([server.url], tmp_path, expect=expected(server.model, model_type=model_type))
        async with started(engine):
            await give(engine, AutoModelForCausalLM.from_pretrained(server.model), 0, named=named)
            return await collect(engine, requests)

    return sorted(asyncio.run(asyncio.wait_for(ask(), LIMIT_S)), key=lambda r: (r.group_id, r.index))


@torch.no_grad()
def chosen_by_transformers(model, tokens):
    """int16 [tokens, layers with experts, experts of a token], each row ascending."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, given, out: found.append(out[2]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    model(torch.tensor(tokens, dtype=torch.int64)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values.to(torch.int16).numpy()


def test_the_experts_of_every_token(server, tmp_path):
    """Prompts of several lengths, some a prefix of others: what a server has in its cache has its experts there too."""
    model = AutoModelForCausalLM.from_pretrained(server.model).eval()
    wanted = [group(i, length=1 + 3 * i, routed_experts=(LAYERS, CHOSEN)) for i in range(4)]
    rollouts = answers(server, tmp_path, wanted)
    assert len(rollouts) == 16
    assert worst_difference(model, rollouts) < 1e-4
    for rollout in rollouts:
        told = rollout.routed_experts.read()
        assert told.shape == (len(rollout.tokens), LAYERS, CHOSEN) and told.dtype == np.int16
        assert (told[-1] == -1).all()
        want = chosen_by_transformers(model, rollout.tokens)[:-1]
        np.testing.assert_array_equal(np.sort(told[:-1, LAYERS - want.shape[1] :], axis=-1), want)
    assert len({tuple(row.ravel()) for rollout in rollouts for row in rollout.routed_experts.read()[:-1]}) > 2


def test_experts_are_told_only_where_they_are_asked_for(server, tmp_path):
    assert all(rollout.routed_experts is None for rollout in answers(server, tmp_path, [group(0)]))


def test_another_number_of_layers_is_no_answer(server, tmp_path):
    with pytest.raises(EngineError, match="experts"):
        answers(server, tmp_path, [group(0, routed_experts=(LAYERS + 1, CHOSEN))])
