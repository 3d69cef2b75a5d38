"""What a config.json with nothing but sizes means in each family, and the edge of what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_daro.config.model_shape import (
    CRITIC_HEADS,
    ExpertShape,
    LatentShape,
    LinearShape,
    Llama3Scaling,
    ModelShape,
    YarnScaling,
    read_model_shape,
)
from megatron_daro.errors import ModelError
from megatron_daro.families import families
from megatron_daro.families.table import DECODER, Family

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
QWEN2 = {"model_type": "qwen2", **SIZES, "num_key_value_heads": 8}
MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "moe_intermediate_size": 24}
LLAMA = ModelShape(
    family="llama", layers=4, hidden=64, heads=32, kv_heads=32, head_dim=2, ffn=48, vocab=61, rope_theta=1e4,
    rope_scaling=None, rms_eps=1e-6, tie=False, qkv_bias=False, qk_norm=False, max_positions=2048, dtype=None,
)  # fmt: skip
MIXED = ExpertShape(number=8, chosen=2, ffn=48, normalize=True, dense_layers=())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ({"model_type": "llama"}, LLAMA),
        (
            {"model_type": "mistral", "sliding_window": None},
            replace(LLAMA, family="mistral", kv_heads=8, max_positions=131072),
        ),
        ({"model_type": "qwen2"}, replace(LLAMA, family="qwen2", qkv_bias=True, max_positions=32768)),
        ({"model_type": "qwen3"}, replace(LLAMA, family="qwen3", qk_norm=True, head_dim=128, max_positions=32768)),
        (
            {"model_type": "mixtral", **EXPERTS},
            replace(
                LLAMA, family="mixtral", kv_heads=8, rope_theta=1e6, rms_eps=1e-5, max_positions=131072, experts=MIXED
            ),
        ),
        (
            {"model_type": "qwen3_moe", **EXPERTS, "moe_intermediate_size": 24},
            replace(
                LLAMA, family="qwen3_moe", kv_heads=4, qk_norm=True, max_positions=32768,
                experts=replace(MIXED, ffn=24, normalize=False),
            ),
        ),
        (
            {"model_type": "glm4_moe", "moe_intermediate_size": 24},
            replace(
                LLAMA, family="glm4_moe", kv_heads=8, rms_eps=1e-5, max_positions=131072, rotary_share=0.5,
                further_layers=1,
                experts=ExpertShape(
                    number=128, chosen=8, ffn=24, normalize=True, dense_layers=(0,), shared_ffn=24, scores="sigmoid"
                ),
            ),
        ),
        (
            {"model_type": "deepseek_v3", "moe_intermediate_size": 24, "num_key_value_heads": 32},
            replace(
                LLAMA, family="deepseek_v3", head_dim=192, max_positions=4096, further_layers=1,
                latent=LatentShape(query_rank=1536, kv_rank=512, plain=128, rotary=64, value=128),
                experts=ExpertShape(
                    number=256, chosen=8, ffn=24, normalize=True, dense_layers=(0, 1, 2), shared_ffn=24,
                    scores="sigmoid", groups=8, chosen_groups=4, scale=2.5,
                ),
            ),
        ),
        (
            {"model_type": "gpt_oss"},
            replace(
                LLAMA, family="gpt_oss", kv_heads=8, head_dim=64, rms_eps=1e-5, max_positions=131072, qkv_bias=True,
                rope_theta=150000.0, rope_scaling=YarnScaling(32.0, 4096, 32.0, 1.0, 0.1 * math.log(32) + 1, False),
                sinks=True, biases=True, window=128, windowed=(0, 2),
                experts=ExpertShape(number=128, chosen=4, ffn=48, normalize=True, dense_layers=(), limit=7.0),
            ),
        ),
        (
            {"model_type": "qwen3_next", "moe_intermediate_size": 24},
            replace(
                LLAMA, family="qwen3_next", kv_heads=2, head_dim=256, qk_norm=True, max_positions=32768,
                rotary_share=0.25, gated=True, centered_norms=True,
                linear=LinearShape(layers=(0, 1, 2), key_heads=16, value_heads=32, key=128, value=128, kernel=4),
                experts=ExpertShape(
                    number=512, chosen=10, ffn=24, normalize=True, dense_layers=(), shared_ffn=512, shared_gate=True
                ),
            ),
        ),
        (
            {"model_type": "olmo3"},
            replace(
                LLAMA, family="olmo3", rope_theta=5e5, rms_eps=1e-5, qk_norm=True, window=4096, windowed=(0, 1, 2),
                plain_windows=True, post_norm=True, whole_qk_norm=True,
            ),
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_with_nothing_but_sizes_has_what_transformers_assumes(model, shape):
    assert read_model_shape({**SIZES, **model}) == shape


def test_a_family_has_its_heads_and_refuses_fused_tensors():
    others = ["llama", "mistral", "mixtral", "olmo3", "qwen2", "qwen3"]
    of_qwen = ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"]
    assert sorted(families()) == ["deepseek_v3", "glm4_moe", "gpt_oss", *others, *of_qwen]
    assert families()["qwen2"].with_head("ForTokenClassification") == "Qwen2ForTokenClassification"
    for tensors in ({"qkv": ("a",)}, {"down": ("a", "b")}, {"expert_gate_up": ("a", "b", "c")}):
        with pytest.raises(ModelError, match=next(iter(tensors)).split("_")[-1]):
            Family("x", "XForCausalLM", {**DECODER, **tensors})


def test_parameters_are_counted_matrix_by_matrix():
    attention = 64 * (2 * 64 + 2 * 16) + (64 + 2 * 16)
    layer = attention + 2 * 64 + 3 * 64 * 48
    assert read_model_shape(QWEN2).num_parameters == 4 * layer + 64 + 2 * 61 * 64
    assert read_model_shape({**QWEN2, "tie_word_embeddings": True}).num_parameters == 4 * layer + 64 + 61 * 64
    experts = read_model_shape({**MOE, "head_dim": 2, "mlp_only_layers": [1]})
    attention = 64 * (2 * 64 + 2 * 8) + 2 * 2
    outside = 4 * (attention + 2 * 64) + 3 * 64 * 48 + 64 + 2 * 61 * 64
    assert experts.num_parameters == outside + 3 * (64 * 8 + 8 * 3 * 64 * 24)
    assert experts.num_active_parameters == outside + 3 * (64 * 8 + 2 * 3 * 64 * 24)
    assert (experts.expert_layers, read_model_shape(QWEN2).expert_layers) == (3, 0)
    assert [experts.has_experts(layer) for layer in (0, 1)] == [True, False] and not read_model_shape(
        QWEN2
    ).has_experts(0)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
ROPE = {"rope_theta": 5e5}


@pytest.mark.parametrize(
    ("change", "theta", "scaling"),
    [
        (ROPE, 5e5, None),
        ({"rope_scaling": {"type": "default"}}, 1e4, None),
        ({"rope_scaling": {"rope_type": "default", "type": "default", "rope_theta": 3.0}, **ROPE}, 3.0, None),
        ({"rope_parameters": {"partial_rotary_factor": 1, **ROPE}}, 5e5, None),
        ({"rope_scaling": LLAMA3}, 1e4, Llama3Scaling(8.0, 1.0, 4.0, 32768)),
        (
            {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
            1e4,
            YarnScaling(4.0, 32768, 16.0, 2.0, 0.1 * math.log(4) + 1, False),
        ),
        (
            {"rope_parameters": {**YARN, "factor": 1, "original_max_position_embeddings": 9}},
            1e4,
            YarnScaling(1.0, 9, 32.0, 1.0, 1.0, True),
        ),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, 1e4, YarnScaling(4.0, 32768, 32, 1, 0.1 * math.log(4) + 1, True)),
        ({"rope_scaling": LLAMA3, "rope_parameters": ROPE, **ROPE}, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 32768)),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32768},
            1e4,
            Llama3Scaling(8.0, 1.0, 4.0, 32768),
        ),
    ],
)
def test_a_rotary_embedding_has_a_base_and_a_scaling(change, theta, scaling):
    shape = read_model_shape({**QWEN2, **change})
    assert (shape.rope_theta, shape.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.0, "hidden_act": "silu", "activation": "swiglu", "pruned_heads": {}, "use_cache": True},
        {"partial_rotary_factor": 1, "attention_bias": False, "mlp_bias": False, "router_jitter_noise": 0.0},
        {"is_causal": True, "use_mrope": False, "rope_interleaved": False, "add_cross_attention": False},
        {"is_encoder_decoder": False, "activation": "silu"},
        {"use_sliding_window": True, "max_window_layers": 4},
        {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 3, "layer_types": ["full_attention"] * 4},
        {"architectures": ["Other", "Qwen2ForCausalLM"]},
        {"head_dim": 4, "hidden_size": 65},
        {"quantization_config": None, "rope_scaling": None, "torch_dtype": None},
    ],
)
def test_what_changes_nothing_is_taken(change):
    assert read_model_shape({**QWEN2, **change}).layers == 4


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForCausalLM"])
def test_a_critic_may_have_another_head(head):
    assert read_model_shape({**QWEN2, "architectures": [f"Qwen2{head}"]}, CRITIC_HEADS).family == "qwen2"


def test_the_type_of_transformers_5_counts_before_that_of_4():
    assert read_model_shape({**QWEN2, "dtype": "float16", "torch_dtype": "float32"}).dtype == "float16"


@pytest.mark.parametrize(
    ("change", "experts"),
    [
        ({"num_experts": 8}, {}),
        ({"num_experts_per_tok": 8}, {"chosen": 8}),
        ({"num_experts_per_tok": 1}, {"chosen": 1}),
        ({"mlp_only_layers": [0, 3]}, {"dense_layers": (0, 3)}),
        ({"decoder_sparse_step": 2}, {"dense_layers": (0, 2)}),
        ({"decoder_sparse_step": 4, "mlp_only_layers": []}, {"dense_layers": (0, 1, 2)}),
        ({"output_router_logits": True}, {"balancing": 0.001}),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.1}, {}),
    ],
)
def test_experts_are_what_the_config_says(change, experts):
    plain = ExpertShape(number=8, chosen=2, ffn=24, normalize=False, dense_layers=())
    assert read_model_shape({**MOE, **change}).experts == replace(plain, **experts)
