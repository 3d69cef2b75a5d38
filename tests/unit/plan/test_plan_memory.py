"""The planner's memory against real Megatron modules: exact counts, and live bytes of small runs on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from published_configs import DEEPSEEK_V3, GLM_45_AIR, GPT_OSS_120B, OLMO_3_7B, QWEN3_NEXT_80B_A3B

from megatron_daro.config import Config
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.workshop.plan import memory, times
from megatron_daro.workshop.plan.gpus import GPUS
from megatron_daro.workshop.plan.layout import Cut, ModelLayout, counts
from megatron_daro.workshop.plan.workload import workload_of

CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "configs"
HELPER = Path(__file__).with_name("megatron_memory.py")


def small(family: str = "qwen2", **changed: object) -> dict[str, object]:
    """A config.json."""
    return {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 2005,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        **changed,
    }


LARGE = small(hidden_size=8192, num_attention_heads=64, head_dim=128, intermediate_size=28672)


def small_experts() -> dict[str, object]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    return small("qwen3_moe", **experts)


def small_latent() -> dict[str, object]:
    latents = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_group": 4}
    sizes = {"num_key_value_heads": 8, "head_dim": 16, "topk_group": 2, "num_nextn_predict_layers": 0}
    return small("deepseek_v3", **latents, **experts, **sizes, first_k_dense_replace=1)


def small_linear() -> dict[str, object]:
    linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}
    return small("qwen3_5_text", **linear, linear_value_head_dim=32, layer_types=LAYER_TYPES)


LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What real modules take: one process for all tests, since importing Megatron takes seconds."""
    log = tmp_path_factory.mktemp("modules") / "log"
    command = [sys.executable, "-W", "ignore", HELPER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as errors, subprocess.Popen(command, **pipes, stderr=errors) as process:

        def found(question: tuple[str, dict[str, object]]) -> object:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = next((line for line in process.stdout if line.startswith('{"found"')), None)
            assert answer is not None, log.read_text()[-3000:]
            return json.loads(answer)["found"]

        yield lambda questions: [found(question) for question in questions]


def workload(
    config: dict[str, object],
    *,
    dtype: str = "bf16",
    distributed: bool = True,
    chunk: int = 1024,
    adapters: dict[str, object] | None = None,
):
    made = Config.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train": ("x",)},
            "lora": adapters or {},
            "actor": {"precision": dtype, "logprob_chunk_tokens": chunk, "optimizer": {"distributed": distributed}},
        }
    )
    return workload_of(made, read_model_shape(config))


# (model, TP, PP, EP, VPP): layouts of the recipes, and ones that pad the vocabulary or copy tied embeddings.
LAYOUTS = [
    ("Qwen2.5-Math-1.5B", 2, 1),
    ("Qwen2.5-Math-1.5B", 2, 2),
    ("Qwen2.5-Math-7B", 4, 1),
    ("Qwen2.5-Math-7B", 2, 2),
    ("Llama-3.1-8B", 4, 2),
    ("Qwen2.5-32B", 8, 4),
    ("Qwen2.5-32B", 4, 2),
    ("Qwen3-8B", 8, 2),
    ("Llama-3.3-70B", 8, 8),
    ("Qwen3-30B-A3B", 1, 4, 8),
    ("Qwen3-30B-A3B", 4, 2, 8),
    ("Qwen2.5-32B", 4, 4, 1, 4),
    ("Qwen3-30B-A3B", 1, 4, 8, 3),
]


def cut_of(tensor: int, pipeline: int, expert: int = 1, virtual: int = 1) -> Cut:
    return Cut(tensor, pipeline, expert, tensor if expert == 1 else 1, virtual)


def test_experts_that_a_recipe_cuts_are_counted_as_cut():
    sizes = {"tensor_parallel": 2, "expert_parallel": 2}
    whole, cut = (ModelLayout.of(ActorSection(**sizes, **more)).cut for more in ({}, {"expert_tensor_parallel": 2}))
    assert (whole.expert_tensor, cut.expert_tensor) == (1, 2)
    shape = read_model_shape(small_experts())
    (rest, experts), (same, half) = counts(shape, whole, 0), counts(shape, cut, 0)
    assert rest == same and experts == 2 * half > 0


@pytest.mark.parametrize("config", [GLM_45_AIR, {**DEEPSEEK_V3, "num_hidden_layers": 8}])
def test_latents_shared_experts_and_the_first_dense_layer_are_those_of_megatron(measured, tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"config": str(tmp_path / "config.json"), "tensor": 4, "pipeline": 2, "expert": 8}
    found = measured([("static", {**sizes, "stage": stage}) for stage in (0, 1)])
    shape = read_model_shape(config)
    assert [sum(counts(shape, cut_of(4, 2, 8), stage)) for stage in (0, 1)] == found


NEXT = {**QWEN3_NEXT_80B_A3B, "num_hidden_layers": 8}


@pytest.mark.parametrize(("config", "expert"), [(GPT_OSS_120B, 8), (OLMO_3_7B, 1), (NEXT, 8)])
def test_biases_sinks_norms_and_linear_attention_are_those_of_megatron(measured, tmp_path, config, expert):
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"config": str(tmp_path / "config.json"), "tensor": 4, "pipeline": 2, "expert": expert}
    found = measured([("static", {**sizes, "stage": stage}) for stage in (0, 1)])
    shape = read_model_shape(config)
    assert [sum(counts(shape, cut_of(4, 2, expert), stage)) for stage in (0, 1)] == found


@pytest.mark.shared
def test_parameters_are_those_of_megatron_in_real_layouts(measured):
    if not CONFIGS.is_dir():
        pytest.skip(f"needs the model configurations in {CONFIGS}")
    cases = [
        (CONFIGS / f"{name}.json", tensor, pipeline, stage, *rest)
        for name, tensor, pipeline, *rest in LAYOUTS
        for stage in sorted({0, pipeline // 2, pipeline - 1})
    ]
    keys = ("config", "tensor", "pipeline", "stage", "expert", "virtual")
    found = measured([("static", dict(zip(keys, (str(file), *sizes), strict=False))) for file, *sizes in cases])
    planned = [
        sum(counts(read_model_shape(file), cut_of(tensor, pipeline, *rest), stage))
        for file, tensor, pipeline, stage, *rest in cases
    ]
    assert planned == found


def test_a_critic_is_counted_as_it_is_and_comes_on_top(measured):
    """Untied, with one row in the output layer's place; its state is as large as the policy's rest."""
    cases = [
        (config, tensor, pipeline, stage)
        for config, tensor, pipeline in [(small(), 2, 1), (small("qwen3", tie_word_embeddings=True), 1, 2)]
        for stage in range(pipeline)
    ]
    keys = ("config", "tensor", "pipeline", "stage")
    found = measured([("static", {**dict(zip(keys, case, strict=True)), "critic": True}) for case in cases])
    planned = [
        sum(counts(read_model_shape(config), cut_of(tensor, pipeline), stage, critic=True))
        for config, tensor, pipeline, stage in cases
    ]
    assert planned == found
    asked, layout = workload(small()), ModelLayout(1, 1, 1, "none", 4096)
    alone, both = (
        memory.trainer_memory(replace(asked, critic=critic), layout, shards=2, micro_batches=1)
        for critic in (None, asked.shape)
    )
    own = memory.static_bytes(replace(asked, critic=asked.shape), Cut(), 0, 2, critic=True)
    assert alone.critic == 0 and both.total - alone.total == both.critic == sum(own[:3])


def test_of_two_that_take_turns_the_larger_one_is_counted():
    small_one, layout = read_model_shape(small()), ModelLayout(1, 1, 1, "none", 4096)
    large = replace(small_one, layers=3 * small_one.layers)

    def total(policy, critic, offload=True):
        asked = replace(workload(small()), shape=policy, critic=critic, critic_offload=offload)
        return memory.trainer_memory(asked, layout, shards=2, micro_batches=1)

    own, its = total(small_one, small_one), total(small_one, large)
    assert own.critic < 0.01 * own.weights, "at most the row of its head"
    together = total(small_one, large, offload=False)
    static = [part.weights + part.gradients + part.optimizer for part in (its, together)]
    assert its.critic == pytest.approx(together.critic - static[1]) and static[0] == static[1]


def test_a_critic_of_another_shape_is_counted_as_that_shape():
    """Its activations are there when the policy's are not: the larger count."""
    asked, layout = workload(small()), ModelLayout(1, 1, 1, "none", 4096)
    large = replace(asked.shape, layers=2 * asked.shape.layers, hidden=2 * asked.shape.hidden)
    with_it, of_large = (
        memory.trainer_memory(replace(asked, shape=shape, critic=large), layout, shards=2, micro_batches=1)
        for shape in (asked.shape, large)
    )
    assert with_it.critic == of_large.critic == sum(memory.static_bytes(of(large), Cut(), 0, 2, critic=True)[:3])
    assert with_it.activations == of_large.activations and with_it.weights < of_large.weights


def of(critic):
    return replace(workload(small()), critic=critic)


def test_weights_gradients_and_optimizer_are_those_of_megatron(measured):
    cases = [
        (small(), 1, 1, "bf16", True, 1, None),
        (small(), 2, 2, "bf16", True, 1, None),
        (small("qwen3", tie_word_embeddings=True), 2, 4, "bf16", True, 1, None),
        (small("llama", vocab_size=1999), 1, 3, "fp32", True, 1, None),
        (small(), 1, 2, "bf16", False, 1, None),
        (small(), 1, 2, "fp32", False, 1, None),
        (small_experts(), 2, 4, "bf16", True, 4, None),
        (small(), 2, 2, "bf16", True, 1, {"rank": 16}),
        (small(tie_word_embeddings=True), 1, 2, "fp32", True, 1, {"rank": 8, "targets": ("q_proj", "down_proj")}),
        (small_experts(), 2, 4, "bf16", True, 4, {"rank": 16, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        (small_latent(), 2, 2, "bf16", True, 2, {"rank": 8, "targets": ("q_a_proj", "kv_b_proj", "o_proj")}),
        (small_linear(), 2, 2, "bf16", True, 1, {"rank": 8}),
    ]
    keys = ("config", "tensor", "data", "dtype", "distributed", "expert", "adapters")
    found = measured([("optimizer", dict(zip(keys, case, strict=True))) for case in cases])
    for (config, tensor, data, dtype, distributed, expert, adapters), real in zip(cases, found, strict=True):
        asked = workload(config, dtype=dtype, distributed=distributed, adapters=adapters)
        cut = Cut(tensor, 1, expert, expert_tensor=1 if expert > 1 else tensor)
        expert_shards = data * tensor // (cut.expert * cut.expert_tensor)
        weights, gradients, optimizer, _ = memory.static_bytes(asked, cut, 0, data, expert_shards)
        assert weights == pytest.approx(real["weights"], rel=0.02)
        assert gradients == pytest.approx(real["gradients"], rel=0.0 if distributed else 0.02)
        assert optimizer == pytest.approx(real["optimizer"], rel=0.02)


ACTIVATIONS = [
    (small(), 2, "fp32", "none", 1024),
    (small("qwen3"), 1, "bf16", "none", 1024),
    (small(num_hidden_layers=8), 1, "fp32", "full", 2048),
    (small_experts(), 1, "bf16", "none", 1024),
    (small(num_hidden_layers=8), 1, "fp32", "none", 2048, ("mlp",)),
    (small_experts(), 1, "fp32", "none", 1024, ("moe",)),
    (small("qwen3"), 2, "bf16", "none", 1024, (), {"rank": 64}),
    (small_experts(), 1, "fp32", "none", 1024, (), {"rank": 8, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
    (small(num_hidden_layers=8), 1, "fp32", "none", 2048, ("mlp",), {"rank": 8, "targets": ("q_proj",)}),
]
MORE_ACTIVATIONS = [
    (small(), 1, "fp32", "none", 1024),
    (small("qwen3", intermediate_size=1024), 2, "bf16", "none", 512),
    (small(hidden_size=384, num_key_value_heads=8, num_hidden_layers=6), 1, "fp32", "none", 512),
    (small("llama", num_hidden_layers=8), 1, "bf16", "full", 2048),
    (small_experts(), 1, "fp32", "none", 1024),
    (small(num_hidden_layers=8), 1, "fp32", "full", 2048, (), {"rank": 16}),
    (small("qwen3"), 2, "bf16", "none", 1024, (), {"rank": 8, "targets": ("q_proj", "v_proj")}),
    (small(num_hidden_layers=8), 1, "fp32", "none", 1024, (), {"rank": 8, "targets": ("down_proj",)}),
    (small_experts(), 1, "fp32", "none", 1024, ("moe",), {"rank": 8, "targets": ("q_proj", "o_proj")}),
]


@pytest.mark.parametrize(
    "cases", [ACTIVATIONS, pytest.param(MORE_ACTIVATIONS, marks=pytest.mark.heavy)], ids=["few", "more"]
)
def test_activations_and_logits_are_within_15_percent_of_a_run(measured, record_property, cases):
    keys = ("config", "tensor", "dtype", "recompute", "tokens", "modules", "adapters")
    found = measured([("activations", {**dict(zip(keys, c, strict=False)), "chunk": 256}) for c in cases])
    ratios = []
    for (config, tensor, dtype, recompute, tokens, *more), real in zip(cases, found, strict=True):
        modules, *adapters = more or ((),)
        asked = workload(config, dtype=dtype, chunk=256, adapters=dict(*adapters))
        asked = replace(asked, recomputed=frozenset(modules))
        layout = ModelLayout(tensor, 1, 1, recompute, tokens)
        planned = memory.trainer_memory(asked, layout, shards=1, micro_batches=1, on_gpu=False)
        ratios.append((planned.activations + planned.logits) / real)
    record_property("planned over measured", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    assert [round(ratio, 3) for ratio in ratios if not 0.85 <= ratio <= 1.15] == [], ratios


def of_options(**options):
    made = {"model": {"path": "x"}, "data": {"train": ("x",)}, "actor": {"precision": "bf16", "megatron": options}}
    return workload_of(Config.model_validate(made), read_model_shape(small_experts()))


def train_s(layout, data=8, **options):
    return times.train_times(of_options(**options), layout, data, GPUS["h100-80g"], times.Constants())


def test_options_of_megatron_say_what_runs_beside_computation_in_fused_kernels_or_once_for_a_node():
    layout, known = ModelLayout(1, 1, 1, "none", 4096, expert=1), times.Constants()
    # Of four bytes of a gradient and two of a weight, those of the gradient are hidden.
    kept = (4 * (1 - known.hidden) + 2) / 6
    hidden, plain = train_s(layout), train_s(layout, overlap_grad_reduce=False)
    assert hidden.communication == pytest.approx(kept * plain.communication)
    loose = train_s(layout, moe_permute_fusion=False).compute
    assert train_s(layout, moe_router_fusion=False).compute == loose > plain.compute
    two_nodes = replace(layout, expert=16)
    plain, by_all, by_flex = (
        train_s(two_nodes, data=16, **options).communication
        for options in ({}, {"moe_token_dispatcher_type": "alltoall"}, {"moe_token_dispatcher_type": "flex"})
    )
    assert by_all == plain > by_flex


def test_frozen_weights_save_their_gradients_of_weights_and_servers_get_the_adapters():
    layout, known, gpu = ModelLayout(1, 1, 1, "none", 4096), times.Constants(), GPUS["h100-80g"]
    plain, alone = (replace(workload(LARGE, adapters=made), extra_passes=1) for made in (None, {"rank": 16}))
    merged = replace(alone, adapters=replace(alone.adapters, alone=False))
    full, own = (times.train_times(asked, layout, 8, gpu, known) for asked in (plain, alone))
    assert 2 / 3 < own.compute / full.compute < 0.75, "of 6 operations a weight 4 are left, and all of attention"
    assert own.logprobs == pytest.approx(full.logprobs, rel=0.02)
    one, eight = (times.sync_s(alone, layout, gpu, known, server_gpus=number) for number in (1, 8))
    assert eight == pytest.approx(8 * one)
    assert times.sync_s(merged, layout, gpu, known) == times.sync_s(plain, layout, gpu, known)


def test_options_of_megatron_say_what_is_recomputed_and_a_step_gets_longer_by_it():
    assert of_options().recomputed == of_options(recompute_granularity="full").recomputed == frozenset()
    assert of_options(recompute_granularity="selective").recomputed == {"core_attn"}
    layout, gpu = ModelLayout(1, 1, 1, "none", 4096, expert=1), GPUS["h100-80g"]
    plain, moe, full = (
        times.train_times(asked, replace(layout, recompute=recompute), 8, gpu, times.Constants()).compute
        for asked, recompute in (
            (of_options(), "none"),
            (of_options(recompute_granularity="selective", recompute_modules=["moe"]), "none"),
            (of_options(), "full"),
        )
    )
    assert plain < moe < full


def test_stages_hold_as_many_micro_batches_as_the_schedule_lets_in():
    asked = workload(small())
    layout = ModelLayout(1, 4, 1, "none", 4096)
    held = [memory.activations(asked, layout, memory.ENGINE, stage=s, micro_batches=9) for s in range(4)]
    few = memory.activations(asked, layout, memory.ENGINE, stage=0, micro_batches=2)
    assert held[0] > held[1] > held[2] > held[3]
    assert few == pytest.approx(held[0] / 2)


def test_more_parts_of_a_stage_keep_more_than_one_and_fewer_the_more_they_are():
    """Of eight stages the first keeps 8 micro-batches of its layers with one part, and with v parts 8 + 7 / v."""
    asked = workload(small(num_hidden_layers=64))
    held = [
        memory.activations(asked, ModelLayout(1, 8, 1, "none", 4096, virtual=n), memory.ENGINE, micro_batches=16)
        for n in (1, 2, 4, 8)
    ]
    wanted = [8, 8 + 7 / 2, 8 + 7 / 4, 8 + 7 / 8]
    assert [value / held[0] for value in held] == pytest.approx([value / 8 for value in wanted], rel=0.01)
    few = ModelLayout(1, 8, 1, "none", 4096, virtual=2)
    assert few.under_way(0, 3) == 16, "three micro-batches are filled up to eight, of which each part has all"


def test_fp8_and_sequence_options_show_in_their_part():
    asked = workload(small())
    layout = ModelLayout(1, 1, 1, "none", 4096)
    plain = memory.trainer_memory(asked, layout, shards=2, micro_batches=1)
    fp8 = memory.trainer_memory(replace(asked, fp8="tensorwise"), layout, shards=2, micro_batches=1)
    assert fp8.fp8 == 2 * sum(counts(asked.shape, Cut(), 0)) and plain.fp8 == 0
    assert fp8.total - plain.total == fp8.fp8


@pytest.mark.slow
def test_a_sync_counts_buckets_and_the_largest_tensor_as_far_as_it_takes_more_than_a_pass():
    """Of Llama-3.3-70B the embedding is one tensor of 2,004 MiB, which is gathered from its parts and made whole."""
    shape = replace(read_model_shape(small()), vocab=128256, hidden=8192)
    asked = replace(workload(small()), shape=shape)
    assert memory.largest_tensor_bytes(asked) == 2004 * 2**20
    assert memory.sync_bytes(asked, 1) == 2 * 256 * 2**20
    assert memory.sync_bytes(asked, 8) == (2 * 256 + 2 * 2004) * 2**20
    layout = ModelLayout(8, 1, 1, "full", 1024)
    kept = memory.trainer_memory(asked, layout, shards=1, micro_batches=1)
    gathered = 2 * 1024 * 8192 * 2
    assert kept.buffers - gathered == memory.sync_bytes(asked, 8) - kept.activations - kept.logits > 0
    assert memory.server_memory(asked, GPUS["h100-80g"], 8).buffers == 2004 * 2**20
