"""Servers that are sent fp8 blocks: what they are started with, and that both ends mean the same matrices."""

from __future__ import annotations

import pytest
from sglang_stub_fleets import StubHandle, rig, run

from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.sync.plan import SendReport

DENSE = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
BLOCKS = {"version": "0.5.23", "quantization": "fp8"}


def sent_of(model_type, layers=2, experts=3):
    """HF names as an export of the family has them."""
    found = []
    for template in fp8_blocks.fp8_matrices(model_type):
        numbers = range(experts if "{expert}" in template else 1)
        found += [template.format(layer=i, expert=e) for i in range(layers) for e in numbers]
    return found


def told_of(*modules, layers=2):
    return [f"model.layers.{i}.{module}" for i in range(layers) for module in modules]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_matrices_of_dense_families_are_those_that_sglang_fuses(model_type):
    told = told_of(*(f"{module}.weight" for module in DENSE))
    assert fp8_blocks.fp8_disagreement(sent_of(model_type), told) == ""


@pytest.mark.parametrize(("model_type", "mlp"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_experts_are_two_matrices_of_a_layer(model_type, mlp):
    told = told_of(
        *(f"{module}.weight" for module in DENSE[:2]), f"{mlp}.experts.w13_weight", f"{mlp}.experts.w2_weight"
    )
    sent = [name for name in sent_of(model_type) if ".mlp.down_proj" not in name and ".mlp.gate_proj" not in name]
    sent = [name for name in sent if ".mlp.up_proj" not in name]  # those of layers without experts
    assert fp8_blocks.fp8_disagreement(sent, told) == ""
    assert not any("router" in name or ".gate.weight" in name or "norm" in name for name in sent)


@pytest.mark.parametrize(
    "shared", [("mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"), ()]
)
def test_shared_experts_are_matrices_of_their_own_or_one_more_of_the_others(shared):
    told = told_of(
        *(f"{module}.weight" for module in DENSE), "mlp.experts.w13_weight", "mlp.experts.w2_weight", *shared
    )
    assert fp8_blocks.fp8_disagreement(sent_of("glm4_moe"), told) == ""


def test_a_difference_is_named_from_both_sides():
    told = told_of(*(f"{module}.weight" for module in DENSE[1:]), "mlp.shared.weight")
    said = fp8_blocks.fp8_disagreement(sent_of("qwen2"), told)
    assert "model.layers.0.self_attn.qkv_proj.weight" in said and "model.layers.0.mlp.shared.weight" in said


def sending(weights, names):
    """The stub's weights, with a report that names these matrices as blocks."""
    export = weights.export

    async def told(plan):
        assert plan.fp8_blocks == fp8_blocks.fp8_matrices("qwen2")
        report = await export(plan)
        return SendReport(report.num_bytes, 0.5, failures=report.failures, fp8_blocks=tuple(names))

    weights.export = told


@pytest.mark.parametrize("names", [sent_of("qwen2", layers=3), []], ids=["another layer", "none at all"])
def test_a_server_with_other_blocks_than_were_sent_is_fenced(tmp_path, weights, names):
    async def scenario():
        async with rig(tmp_path, {"info": BLOCKS}, {"info": BLOCKS}, fp8_blocks=True) as fleet:
            sending(weights, names)
            for stub in fleet.stubs:
                stub.checksums = dict.fromkeys(told_of(*(f"{module}.weight" for module in DENSE)), "")
            with pytest.raises(SyncError, match="fp8 blocks"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"]
            assert all("/update_weight_version" not in stub.order for stub in fleet.stubs)

    run(scenario())


def test_a_server_is_asked_once_for_each_of_its_starts(tmp_path, weights):
    async def scenario():
        handles = []

        def handle(url):
            handles.append(StubHandle(url))
            return handles[-1]

        asked = lambda stub: stub.said["/weights_checker"].count(fp8_blocks.MANIFEST_CALL)
        options = {"handles": handle, "max_restarts": 1, "fp8_blocks": True, "stall_timeout_s": 0.5}
        async with rig(tmp_path, {"info": BLOCKS}, **options) as fleet:
            sending(weights, sent_of("qwen2"))
            (stub,) = fleet.stubs
            stub.checksums = dict.fromkeys(told_of(*(f"{module}.weight" for module in DENSE)), "")
            for version in (3, 4):
                await fleet.publish(weights, version)
            assert fleet.states == ["serving"] and len(weights.plans) == 2
            assert asked(stub) == 1

    run(scenario())


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"version": "0.5.22", "quantization": "fp8"}, "0.5.22"),
        ({"version": "0.5.23"}, "--quantization 'fp8'"),
        ({"version": "0.5.23", "quantization": "awq"}, "--quantization 'fp8'"),
    ],
)
def test_a_server_that_does_not_wait_for_blocks_is_refused_at_its_start(tmp_path, info, words):
    async def scenario():
        with pytest.raises(EngineError) as failure:
            async with rig(tmp_path, {"info": info}, fp8_blocks=True):
                raise AssertionError("it started")
        assert words in str(failure.value)

    run(scenario())
