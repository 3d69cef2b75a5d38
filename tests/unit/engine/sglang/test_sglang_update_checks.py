"""After an update servers are compared with the policy: checksums of some tensors, log-probs of a fixed prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from aiohttp import web
from sglang_stub_fleets import rig, run
from stub_server import ALL_CALLS, answering

from megatron_daro.errors import SyncError
from megatron_daro.sync.plan import Digest


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
                assert "norm.weight" in fleet.servers[0].reason
                assert "/update_weight_version" not in fleet.stubs[0].order

    run(scenario())


def shifted(stub, by):
    """As the stub answers, with all log-probs changed by the one number in `by`."""

    async def answer(request, body):
        content = stub.generated(body)
        for one in content:
            meta = one["meta_info"]
            for pair in (*meta["output_token_logprobs"], *meta["input_token_logprobs"][1:]):
                pair[0] += by[0]
        return web.json_response(text=json.dumps(content))

    return answer


@pytest.mark.parametrize(("told_later", "state"), [("new", "serving"), ("old", "fenced")])
def test_checksums_that_stay_while_what_is_sent_changes_are_of_kept_weights(tmp_path, weights, told_later, state):
    """As a GPU server's, which cannot be compared with the sender's."""

    async def scenario():
        async with rig(tmp_path, {"info": {"device": "cuda"}}, {}) as fleet:
            changing, steady = "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"
            for version in (3, 4):
                weights.digests = {
                    name: Digest("float32", f"{sent}", f"{sent}") for name, sent in ((changing, version), (steady, 0))
                }
                told = "old" if version == 3 else told_later
                fleet.stubs[0].checksums = {changing: told, steady: "same"}
                fleet.stubs[1].checksums = {changing: f"{version}", steady: "0"}
                await fleet.publish(weights, version)
            assert fleet.states == [state, "serving"]
            if state == "fenced":
                assert changing in fleet.servers[0].reason

    run(scenario())


@pytest.mark.parametrize(("on_device", "state"), [(True, "serving"), (False, "fenced")])
def test_a_digest_of_another_kind_accuses_no_server_on_a_cpu(tmp_path, weights, on_device, state):
    async def scenario():
        async with rig(tmp_path, {}, {}) as fleet:
            weights.digests = {"norm.weight": Digest("float32", "aa", "aa", on_device)}
            fleet.stubs[0].checksums, fleet.stubs[1].checksums = {"norm.weight": "bb"}, {"norm.weight": "aa"}
            await fleet.publish(weights, 3)
            assert fleet.states == [state, "serving"]

    run(scenario())


@pytest.mark.parametrize(("quantization", "state"), [("", "fenced"), ("fp8", "serving")])
def test_a_matrix_whose_change_rounds_away_accuses_no_server_that_quantizes(tmp_path, weights, quantization, state):
    async def scenario():
        async with rig(tmp_path, {"info": {"device": "cuda", "quantization": quantization or None}}, {}) as fleet:
            matrix = "model.layers.0.self_attn.o_proj.weight"
            for version in (3, 4):
                weights.digests = {matrix: Digest("bfloat16", f"{version}", f"{version}")}
                fleet.stubs[0].checksums, fleet.stubs[1].checksums = {matrix: "same"}, {matrix: f"{version}"}
                await fleet.publish(weights, version)
            assert fleet.states[0] == state

    run(scenario())


def test_weights_that_did_not_change_accuse_nobody(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, {"info": {"device": "cuda"}}, {}) as fleet:
            for version in (3, 4):
                metrics = await fleet.publish(weights, version)
            assert fleet.states == ["serving", "serving"] and metrics["sync/verified"] == 0

    run(scenario())


def test_an_answer_that_stays_while_the_policys_changes_fences_the_server(tmp_path, weights):
    """Of the given tokens; the sampled ones are far within what bf16 allows."""

    async def scenario():
        async with rig(tmp_path, {"info": {"dtype": "bfloat16"}}, {"info": {"dtype": "bfloat16"}}) as fleet:
            weights.digests, scored, moved = {}, weights.logprobs_of, [0.0]

            async def logprobs_of(rollouts, *, temperature):
                return [logprobs_R + np.float32(moved[0]) for logprobs_R in await scored(rollouts, temperature=1.0)]

            weights.logprobs_of = logprobs_of
            following = shifted(fleet.stubs[1], moved)
            fleet.stubs[1].answers["/generate"] = following
            await fleet.publish(weights, 3)
            moved[0] = -0.01
            metrics = await fleet.publish(weights, 4)
            assert fleet.states == ["fenced", "serving"] and metrics["sync/verified"] == 1

    run(scenario())


@pytest.mark.parametrize("broken", ["missing", "other", "too few sampled"])
def test_a_probe_that_is_not_answered_in_full_fences_the_server(tmp_path, weights, broken):
    async def scenario():
        async with rig(tmp_path) as fleet:
            stub = fleet.stubs[0]

            async def answer(request, body):
                sampled, given = stub.generated(body)
                if broken == "too few sampled":
                    return web.json_response([stub.one(sampled["output_ids"][:-1]), given])
                logprobs = given["meta_info"].pop("input_token_logprobs")
                if broken == "other":
                    given["meta_info"]["input_token_logprobs"] = logprobs[:-1]
                return web.json_response([sampled, given])

            stub.answers["/generate"] = answer
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]

    run(scenario())


@pytest.mark.parametrize("content", [{}, {"ranks": [{}]}])
def test_checksums_of_another_form_fence_the_server(tmp_path, weights, content):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/weights_checker"] = answering(200, content)
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]

    run(scenario())


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
            fleet.stubs[0].answers["/generate"] = shifted(fleet.stubs[0], [by])
            await fleet.publish(weights, 3)
            assert fleet.states == [state, "serving"]
            if state == "fenced":
                assert f"{-by:.3g}" in fleet.servers[0].reason

    run(scenario())


def test_weights_whose_log_probs_are_no_numbers_are_served_by_nobody(tmp_path, weights):
    async def scores(rollouts, *, temperature):
        return [np.full(r.response_length, np.nan, dtype=np.float32) for r in rollouts]

    async def scenario():
        weights.logprobs_of = scores
        async with rig(tmp_path) as fleet:
            with pytest.raises(SyncError, match="nan"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"]

    run(scenario())


def test_a_server_that_answers_the_probe_with_the_weights_it_started_with_is_fenced(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/update_weight_version"] = answering(200, {})
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]

    run(scenario())


def test_the_unfused_tensors_are_asked_for_and_the_names_of_blocks_are_not(tmp_path, weights):
    """What a server fuses has another name in it than in what was sent."""

    async def scenario():
        async with rig(tmp_path, count=1) as fleet:
            await fleet.publish(weights, 3)
            (asked,) = fleet.stubs[0].said["/weights_checker"]
            fused = ["qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts"]
            assert asked == {"action": "checksum", "skip_tensor_list": fused}

    run(scenario())


@pytest.mark.parametrize("paths", ["no call", "refused", "nothing hashed"])
def test_a_server_that_tells_no_checksums_is_not_verified_by_them(tmp_path, weights, paths):
    async def scenario():
        known = set(ALL_CALLS) - ({"/weights_checker"} if paths == "no call" else set())
        async with rig(tmp_path, {"paths": known}) as fleet:
            (stub,) = fleet.stubs
            if paths == "refused":
                stub.answers["/weights_checker"] = answering(400)
            if paths == "nothing hashed":
                stub.checksums = {"norm.weight.other": "abc"}
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving"]
            assert stub.calls["/weights_checker"] == (paths != "no call")

    run(scenario())


@pytest.mark.parametrize("changed_in", ["second", "none"])
def test_one_tensor_that_changed_is_enough_to_know_that_weights_came(tmp_path, weights, changed_in):
    """Of two that were sent with changes; what did not change, or was not compared before, says nothing."""

    async def scenario():
        async with rig(tmp_path, {"info": {"device": "cuda"}}, {}) as fleet:
            a, b, c, d = names = [f"{letter}.o_proj.weight" for letter in "abcd"]
            for version in (3, 4):
                told = dict.fromkeys(names[:3], "old")
                if version == 4:
                    told[d] = "new in this answer"
                    told[c] = "changed, though what was sent did not"
                    told[b] = "old" if changed_in == "none" else "new"
                fleet.stubs[0].checksums = told
                fleet.stubs[1].checksums = {}
                weights.digests = {name: Digest("bfloat16", f"{version}", f"{version}") for name in names}
                weights.digests[c] = Digest("bfloat16", "same", "same")
                await fleet.publish(weights, version)
            assert fleet.states[0] == ("fenced" if changed_in == "none" else "serving")
            if changed_in == "none":
                assert a in fleet.servers[0].reason

    run(scenario())
