"""Servers that take weights from shards to shards: what they are started with, which may, and what a failure costs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang_stub_fleets import rig, run

from megatron_daro.engine.sglang.engine import layout_of_servers
from megatron_daro.errors import EngineError, ModelError, SyncError
from megatron_daro.sync.plan import SendFailure, SendReport

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 31,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_where_weights_lie_follows_from_the_arguments(model):
    options = SimpleNamespace(named_arguments={"device": "cpu"}, tensor_parallel=2)
    layout = layout_of_servers(options, model)
    assert (layout.tensor, layout.on_cpu, layout.columns(48, 2)) == (2, True, 32)
    assert layout_of_servers(SimpleNamespace(named_arguments={}, tensor_parallel=2), model).columns(48, 2) == 24


@pytest.mark.parametrize(
    "arguments", [{"quantization": "fp8"}, {"speculative_algorithm": "EAGLE"}, {"moe_runner_backend": "triton_kernels"}]
)
def test_servers_that_keep_weights_elsewhere_are_refused_by_name(model, arguments):
    with pytest.raises(ModelError, match=next(iter(arguments))):
        layout_of_servers(SimpleNamespace(named_arguments=arguments, tensor_parallel=1), model)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24"])
def test_a_version_whose_places_are_not_known_is_refused_at_the_start(model, version):
    async def scenario():
        with pytest.raises(EngineError, match=version):
            async with rig(model, {"info": {"version": version}}, sync="shards"):
                pass

    run(scenario())


def reporting(weights, failures):
    async def export(plan):
        weights.plans.append(plan)
        return SendReport(100, 0.5, failures=failures, apart=True)

    weights.export = export


def test_those_that_have_everything_go_on_without_a_second_sending(model, weights):
    async def scenario():
        async with rig(model, {}, {}, {}, sync="shards") as fleet:
            reporting(weights, {"server 1": SendFailure("unanswered", "rank 0: the connection was lost: reset")})
            metrics = await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "fenced", "serving"] and metrics["sync/servers"] == 2
            assert "the connection was lost: reset" in fleet.servers[1].reason
            assert len(weights.plans) == 1 and weights.plans[0].details["layout"].tensor == 1
            assert all(stub.order.count("/begin_weight_update") == 1 for stub in fleet.stubs)
            assert "/end_weight_update" not in fleet.stubs[1].order

    run(scenario())


def test_where_all_failed_nobody_has_the_weights(model, weights):
    async def scenario():
        async with rig(model, {}, {}, sync="shards") as fleet:
            failure = SendFailure("refused", "rank 0: model.norm.weight, planned as (3,), is (4,) here")
            reporting(weights, {"server 0": failure, "server 1": failure})
            with pytest.raises(SyncError, match=r"model\.norm\.weight"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"] and len(weights.plans) == 1

    run(scenario())
