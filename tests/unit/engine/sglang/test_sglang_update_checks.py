"""After an update servers are compared with the policy: checksums of some tensors, log-probs of a fixed prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from aiohttp import web
from sglang_stub_fleets import rig, run
from stub_server import answering

from megatron_daro.errors import SyncError


@pytest.mark.parametrize(
    ("told", "facts", "state"),
    [
        ({"norm.weight": "abc"}, {}, "serving"),
        ({"norm.weight": "other"}, {}, "fenced"),
        ({}, {}, "serving"),
        ({"norm.weight": "other"}, {"tp_size": 2}, "serving"),
        ({"norm.weight": "other"}, {"device": "cuda"}, "serving"),
        ({"norm.weight": "other"}, {"dtype": "bfloat16"}, "serving"),
    ],
)
def test_checksums_are_compared_where_both_hash_alike(tmp_path, weights, told, facts, state):
    async def scenario():
        async with rig(tmp_path, {"info": facts}, {}) as fleet:
            fleet.stubs[0].checksums = told
            await fleet.publish(weights, 3)
            assert fleet.states == [state, "serving"]
            if state == "fenced":
                assert "1 tensors are not those that were sent, the first: norm.weight" in fleet.servers[0].reason
                assert "/update_weight_version" not in fleet.stubs[0].order

    run(scenario())


@pytest.mark.parametrize("content", [{}, {"ranks": []}, {"ranks": [{}]}, [1]])
def test_checksums_of_another_form_fence_the_server(tmp_path, weights, content):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/weights_checker"] = answering(200, content)
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"] and "another form" in fleet.servers[0].reason

    run(scenario())


def shifted(stub, by):
    """As the stub answers, with other log-probs."""

    async def answer(request, body):
        content = stub.generated(body)
        for one in content:
            for pair in one["meta_info"]["output_token_logprobs"]:
                pair[0] += by
        return web.json_response(text=json.dumps(content))

    return answer


@pytest.mark.parametrize(
    ("dtype", "by", "state"),
    [
        ("float32", -5e-4, "serving"),
        ("float32", -2e-3, "fenced"),
        ("bfloat16", -0.5, "serving"),
        ("bfloat16", -1.5, "fenced"),
    ],
)
def test_log_probs_are_compared_with_the_policys(tmp_path, weights, dtype, by, state):
    async def scenario():
        async with rig(tmp_path, {"info": {"dtype": dtype}}, {}) as fleet:
            fleet.stubs[0].answers["/generate"] = shifted(fleet.stubs[0], by)
            await fleet.publish(weights, 3)
            assert fleet.states == [state, "serving"]
            if state == "fenced":
                assert f"by up to {-by:.3g}; allowed: " in fleet.servers[0].reason

    run(scenario())


def test_weights_whose_log_probs_are_no_numbers_are_served_by_nobody(tmp_path, weights):
    async def scores(rollouts, *, temperature):
        return [np.full(r.response_length, np.nan, dtype=np.float32) for r in rollouts]

    async def scenario():
        weights.score = scores
        async with rig(tmp_path) as fleet:
            with pytest.raises(SyncError, match="differ from the policy's by up to nan"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"]

    run(scenario())


def test_a_server_that_answers_the_probe_with_the_weights_it_started_with_is_fenced(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/update_weight_version"] = answering(200, {})
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert "weights that it was started with" in fleet.servers[0].reason

    run(scenario())
