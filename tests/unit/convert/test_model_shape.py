"""read_model_shape: what a config.json means, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from published_configs import (
    DEEPSEEK_V3,
    GLM_45,
    GLM_45_AIR,
    GPT_OSS_20B,
    GPT_OSS_120B,
    OLMO_3_7B,
    QWEN3_5_27B,
    QWEN3_5_35B_A3B,
    QWEN3_NEXT_80B_A3B,
)
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_daro.config.model_shape import ExpertShape, Llama3Scaling, YarnScaling, read_model_shape
from megatron_daro.errors import ModelError

SHARED_CONFIGS = Path(__file__).parents[4] / "shared" / "data" / "configs"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {"model_type": "qwen2", **SIZES}


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tie", [False, True])
def test_counts_the_parameters_of_the_model_that_transformers_builds(config_class, tie, tmp_path):
    config = config_class(**SIZES, tie_word_embeddings=tie)
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert (shape.tie, shape.family) == (tie, config.model_type)
    assert shape.head_dim == model.model.layers[0].self_attn.head_dim
    assert shape.max_positions == config.max_position_embeddings


def test_qwen3_without_head_dim_has_the_families_own_default_of_128():
    assert read_model_shape({**QWEN2, "model_type": "qwen3"}).head_dim == 128
    assert read_model_shape(QWEN2).head_dim == 8


def test_rope_of_transformers_4_and_5_read_alike():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama = {**SIZES, "model_type": "llama"}
    four = read_model_shape({**llama, "rope_theta": 5e5, "rope_scaling": llama3, "torch_dtype": "bfloat16"})
    five = read_model_shape({**llama, "rope_parameters": {**llama3, "rope_theta": 5e5}, "dtype": "bfloat16"})
    assert four == five
    assert (four.rope_theta, four.dtype) == (5e5, "bfloat16")
    assert four.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert read_model_shape(llama).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": 33}, "head_dim"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "int8"}, "int8"),
    ],
)
def test_refuses_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        read_model_shape({**QWEN2, **change})


def test_a_window_that_no_layer_uses_is_accepted():
    unused = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    assert read_model_shape({**QWEN2, **unused}).layers == 2
    assert read_model_shape({**QWEN2, "use_sliding_window": False, "sliding_window": 16}).layers == 2


def test_all_unsupported_fields_are_named_at_once():
    with pytest.raises(ModelError, match=r"hidden_act.*attention_dropout"):
        read_model_shape({**QWEN2, "hidden_act": "gelu", "attention_dropout": 0.1})


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_torn_config_is_refused_with_its_path(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_shape(tmp_path)


def test_a_missing_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_shape(tmp_path)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 30.532),
        ("Qwen2.5-Math-1.5B", 1.544),
        ("Qwen2.5-7B", 7.616),
        ("Qwen3-4B", 4.022),
        ("Llama-3.1-8B", 8.030),
    ],
)
def test_published_configs_have_their_published_size(name, billions):
    file = SHARED_CONFIGS / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there: shared data of the project is needed")
    assert read_model_shape(json.loads(file.read_text())).num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)


MOE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def test_a_mixture_of_experts_has_the_parameters_of_the_model_that_transformers_builds(tmp_path):
    sizes = {**SIZES, "num_hidden_layers": 5}
    config = Qwen3MoeConfig(
        **sizes, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[3],
        decoder_sparse_step=2, norm_topk_prob=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape.num_parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert shape.experts == ExpertShape(number=6, chosen=2, ffn=24, normalize=True, dense_layers=(0, 2, 3, 4))
    assert shape.num_parameters - shape.num_active_parameters == 4 * 3 * 32 * 24
    assert [shape.has_experts(layer) for layer in range(5)] == [False, True, False, False, False]


GLM = {
    **SIZES,
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}


@pytest.mark.parametrize("switches", [{}, {"attention_bias": True}, {"use_qk_norm": True, "first_k_dense_replace": 0}])
def test_shared_experts_switches_and_the_bias_of_a_router_are_counted(switches):
    shape = read_model_shape({**GLM, **switches})
    keys = {key: value for key, value in {**GLM, **switches}.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**keys))
    counted = sum(p.numel() for p in model.parameters()) + 8 * shape.expert_layers
    assert shape.num_parameters == counted
    assert shape.num_parameters - shape.num_active_parameters == shape.expert_layers * 6 * 3 * 32 * 24


DEEPSEEK = {
    **SIZES,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}


@pytest.mark.parametrize("rank", [28, None])
def test_latents_are_counted(rank, tmp_path):
    config = DeepseekV3Config(**{key: value for key, value in DEEPSEEK.items() if key != "model_type"})
    config.q_lora_rank = rank
    config.save_pretrained(tmp_path)
    shape, model = read_model_shape(tmp_path), AutoModelForCausalLM.from_config(config)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters()) + 16 * shape.expert_layers
    assert (shape.head_dim, shape.value_dim) == (20, 6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"qk_head_dim": 16}, "qk_head_dim 16"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"index_topk": 2048}, "index_topk"),  # DeepSeek-V3.2's sparse attention
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ({"rope_scaling": {**YARN, "rope_type": "llama3"}}, "llama3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_refuses_latent_attention_of_another_kind(change, named):
    with pytest.raises(ModelError, match=named):
        read_model_shape({**DEEPSEEK, **change})


def test_a_published_yarn_scales_the_scores_of_latents_and_leaves_the_rest_as_it_is():
    scaling = read_model_shape(DEEPSEEK_V3).rope_scaling
    assert scaling.attention_factor == 1 and scaling.score_factor == pytest.approx(0.1 * math.log(40) + 1)
    assert read_model_shape({**QWEN2, "rope_scaling": {**YARN, "mscale_all_dim": 1.0}}).rope_scaling.score_factor == 1


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GLM_45_AIR, 106_852_251_264), (GLM_45, 352_797_829_024), (DEEPSEEK_V3, 671_026_419_200)]
    + [(GPT_OSS_20B, 20_914_757_184), (GPT_OSS_120B, 116_829_156_672), (OLMO_3_7B, 7_298_011_136)]
    + [(QWEN3_NEXT_80B_A3B, 79_674_391_296), (QWEN3_5_27B, 26_895_998_464), (QWEN3_5_35B_A3B, 34_660_610_688)],
)
def test_a_model_has_its_published_size(config, parameters, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_shape(tmp_path).num_parameters == parameters


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_group": 3}, "n_group 3"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3"),
        ({"n_group": 4, "topk_group": 2}, "num_experts_per_tok // topk_group"),  # the sum of one score of a group
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "partial_rotary_factor"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_refuses_what_megatron_would_compute_otherwise(change, named):
    with pytest.raises(ModelError, match=named):
        read_model_shape({**GLM, **change})


def test_all_groups_are_no_limit():
    assert read_model_shape({**GLM, "n_group": 4, "topk_group": 4}).experts.groups == 1
    assert read_model_shape({**GLM, "n_group": 2}).experts.groups == 2


def test_a_balancing_loss_is_known_where_transformers_would_train_it():
    known = [{}, {"router_aux_loss_coef": 0.02}, {"output_router_logits": True}]
    known += [{"output_router_logits": True, "router_aux_loss_coef": value} for value in (0, 0.02)]
    found = [read_model_shape({**MOE, **change}).experts.balancing for change in known]
    assert found == [0.0, 0.0, 0.001, 0.0, 0.02]


def test_the_weights_of_the_chosen_are_scaled_only_where_the_config_says_so():
    assert read_model_shape(MOE).experts.normalize
    assert not read_model_shape({**MOE, "norm_topk_prob": None}).experts.normalize


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 1}, "num_experts_per_tok 2"),
        ({"num_local_experts": 4}, "num_experts 8 and num_local_experts 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": [0, 1]}, "mlp_only_layers"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers"),
        ({"output_router_logits": True, "router_aux_loss_coef": "much"}, "router_aux_loss_coef"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"model_type": "qwen3-moe"}, "qwen3_moe"),
    ],
)
def test_refuses_experts_that_do_not_fit(change, named):
    with pytest.raises(ModelError, match=named):
        read_model_shape({**MOE, **change})


def test_yarn_has_the_paper_s_factor_unless_the_config_gives_another():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    plain = read_model_shape({**QWEN2, "rope_scaling": yarn}).rope_scaling
    assert plain == YarnScaling(4.0, 32768, 32.0, 1.0, 0.1 * math.log(4) + 1, True)
    assert (
        read_model_shape({**QWEN2, "rope_scaling": {**yarn, "attention_factor": 1.5}}).rope_scaling.attention_factor
        == 1.5
    )
    both = {**yarn, "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False}
    scaling = read_model_shape({**QWEN2, "rope_scaling": both}).rope_scaling
    assert scaling.attention_factor == pytest.approx((0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert not scaling.truncate
