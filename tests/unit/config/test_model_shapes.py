"""What a config.json with nothing but sizes means in each family, and the edge of what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_daro.config.model_shape import (
    CRITIC_HEADS,
    ExpertShape,
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
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_with_nothing_but_sizes_has_what_transformers_assumes(model, shape):
    assert read_model_shape({**SIZES, **model}) == shape


def test_a_family_has_its_heads_and_refuses_fused_tensors():
    assert sorted(families()) == ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
    assert families()["qwen2"].with_head("ForTokenClassification") == "Qwen2ForTokenClassification"
    with pytest.raises(ModelError, match=r"family x: qkv has the tensors a; allowed: one each for query and key and"):
        Family("x", "XForCausalLM", {**DECODER, "qkv": ("a",)})
    with pytest.raises(ModelError, match=r"family x: down has the tensors a, b; allowed: one each for down\. "):
        Family("x", "XForCausalLM", {**DECODER, "down": ("a", "b")})
    with pytest.raises(ModelError, match=r"allowed: one each for gate and up"):
        Family("x", "XForCausalLM", {**DECODER, "expert_gate_up": ("a", "b", "c")})


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
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "type": "llama3"}}, "rope_type 'yarn' and type 'llama3' contradict"),
        ({"rope_scaling": {**YARN, "twist": 1, "a": 2}}, "rope type 'yarn' with a, twist, which is not known"),
        (
            {"rope_scaling": {"rope_type": "su"}},
            "rope type 'su' is not supported; allowed: 'default', 'llama3', 'yarn'",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"a": {"rope_type": "yarn"}}}, "per layer type are not supported; got ['a']"),
        ({"rope_scaling": LLAMA3, "rope_parameters": ROPE}, "its rope_theta 500000.0 (it would be 10000.0)"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0, got 0"),
        ({"rope_theta": True}, "rope_theta must be a number above 0, got True"),
        ({"rope_theta": math.inf}, "rope_theta must be a number above 0, got inf"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 8}, "original_max_position_embeddings": 9},
            "original_max_position_embeddings is 9 at the top level and 8 for the rotary embedding",
        ),
        (
            {"rope_scaling": {**YARN, "factor": 1, "attention_factor": 2}},
            "yarn with factor 1.0 and attention_factor 2.0",
        ),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate must be true or false, got null"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_scaling": {**YARN, "beta_fast": "a"}}, "beta_fast must be a number above 0, got 'a'"),
        ({"rope_scaling": {**YARN, "beta_slow": -1}}, "beta_slow must be a number above 0, got -1"),
        ({"rope_scaling": {**YARN, "mscale": -1, "mscale_all_dim": 1}}, "mscale must be a number above 0, got -1"),
        ({"rope_scaling": {**YARN, "mscale": 1, "mscale_all_dim": -1}}, "mscale_all_dim must be a number above 0"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}}, "high_freq_factor is missing"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number above 0"),
        ({"head_dim": 0}, "head_dim must be an integer"),
        ({"head_dim": None, "hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 32"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported; allowed: float32, bfloat16, float16"),
        ({"model_type": "qwen22"}, "Did you mean 'qwen2'?"),
        ({"model_type": "glm4"}, "as one fused tensor, which a table of megatron_daro/families cannot describe"),
        ({"model_type": "phi3"}, "mixtral, qwen2, qwen3, qwen3_moe. Its checkpoints hold query"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "allowed for qwen2: Qwen2ForCausalLM."),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures 'Qwen2ForCausalLM'; allowed"),
        ({"attention_dropout": False}, "attention_dropout false (allowed: 0)"),
        ({"activation": "gelu"}, "activation 'gelu' (allowed: 'swiglu' or 'silu')"),
        ({"is_causal": None}, "is_causal null (allowed: true)"),
        (
            {"tomorrow": 1, "a": 2},
            "a 2 (not known; if it changes nothing about the model, remove it from config.json); t",
        ),
        ({"num_experts": 4}, "num_experts 4 (not known"),
        ({"layer_types": ["full_attention", 3]}, "layer_types must be a list of names"),
        (
            {"layer_types": ["x", "full_attention", "a", "x"]},
            "layers of a and x (allowed: layer_types full_attention throughout)",
        ),
        ({"use_sliding_window": True, "max_window_layers": 3}, "of 4096 tokens (allowed: use_sliding_window false)"),
        ({"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        ({"use_sliding_window": True, "max_window_layers": "3"}, "max_window_layers must be an integer, got '3'"),
        ({"use_sliding_window": True, "max_window_layers": True}, "max_window_layers must be an integer, got true"),
    ],
)
def test_what_would_be_another_model_is_refused_in_words(change, words):
    with pytest.raises(ModelError) as refused:
        read_model_shape({**QWEN2, **change})
    assert str(refused.value).startswith("the model configuration: ") and words in str(refused.value)


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
    ("change", "words"),
    [
        ({"sliding_window": 16, "use_sliding_window": True}, "of 16 tokens (allowed: use_sliding_window false)"),
        ({"num_experts": 4}, "num_experts 4 and num_local_experts 8 contradict each other"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts there are"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok 1 with weights scaled to a sum of 1"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers must list layers from 0 to 3, got [4]"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must list layers from 0 to 3, got [-1]"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must list layers from 0 to 3, got 1"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must list layers from 0 to 3, got [True]"),
        ({"decoder_sparse_step": 5}, "mlp_only_layers and decoder_sparse_step 5 leave no layer with experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1"),
        ({"output_router_logits": True, "router_aux_loss_coef": -1}, "router_aux_loss_coef must be a number above 0"),
    ],
)
def test_experts_that_would_be_others_are_refused_in_words(change, words):
    with pytest.raises(ModelError) as refused:
        read_model_shape({**MOE, **change})
    assert words in str(refused.value)


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


@pytest.mark.parametrize("window", [{}, {"sliding_window": 16}])
def test_a_family_without_a_switch_has_a_window_where_it_has_a_width(window):
    with pytest.raises(ModelError, match=r"window attention in use, of \d+ tokens \(allowed: sliding_window null\)"):
        read_model_shape({**SIZES, "model_type": "mistral", **window})


def test_keys_of_dense_layers_are_unknown_where_every_layer_has_experts():
    with pytest.raises(ModelError, match=r"decoder_sparse_step 1 \(not known"):
        read_model_shape({**SIZES, **EXPERTS, "model_type": "mixtral", "decoder_sparse_step": 1})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist. model.path must be a directory with a config.json."),
        (b"\xef\xbb\xbf{}", "Save it as UTF-8 without a byte order mark."),
        (b"{", "cannot be read as JSON: "),
        (b"\xff", "Copy the checkpoint again."),
        (b"[]", "holds a JSON list, not an object"),
    ],
)
@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_file_is_named_by_its_path(tmp_path, content, words, name):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as refused:
        read_model_shape(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path}/config.json ") and words in str(refused.value)
    assert refused.value.__cause__ is None
