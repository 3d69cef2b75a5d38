"""config.json as transformers understands it: equal logits, or a refusal by name; never another model in silence."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_daro import cli
from megatron_daro.actor.weights import load_hf_weights
from megatron_daro.config import model_shape
from megatron_daro.config.model_shape import YarnScaling, read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.transformers_shape import read_compared_shape
from megatron_daro.errors import ModelError
from megatron_daro.families import families

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
CLASSES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "num_nextn_predict_layers": 0}
        | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 20}
        | {"q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 6, "head_dim": 8},
    ),
}
CLASSES["gpt_oss"] = (
    "GptOssConfig",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 0.3},
)
CLASSES["qwen3_next"] = (
    "Qwen3NextConfig",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
    | {"layer_types": ["linear_attention", "full_attention"]},
)
CLASSES["qwen3_5_text"] = "Qwen3_5TextConfig", {k: v for k, v in CLASSES["qwen3_next"][1].items() if k[0] == "l"}
CLASSES["qwen3_5_moe_text"] = ("Qwen3_5MoeTextConfig", CLASSES["qwen3_next"][1])
MROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
CLASSES["olmo3"] = "Olmo3Config", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LAYER_TYPES = ("sliding_attention", "full_attention")
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config_of(family: str, **keys: Any) -> dict[str, Any]:
    """What transformers writes for a small model of the family, with keys changed by hand; `...` removes one."""
    name, own = CLASSES[family]
    written = json.loads(getattr(transformers, name)(**{**SIZES, **own}).to_json_string())
    written |= {"architectures": [families()[family].architecture], **keys}
    return {key: value for key, value in written.items() if value is not ...}


def write(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_model(directory: Path, config: Mapping[str, Any]) -> None:
    """The model that transformers makes of exactly this config.json, with random weights."""
    write(directory, config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    with torch.no_grad():
        for parameter in model.parameters():  # larger than drawn: attention and its positions must matter
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.float().save_pretrained(directory)
    write(directory, config)


EQUAL = {
    **{
        f"{family}, yarn beside rope_parameters": (family, {"rope_scaling": YARN})
        for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    },
    "llama3 beside rope_parameters": ("llama", {"rope_scaling": LLAMA3}),
    "another factor in rope_scaling": (
        "qwen3",
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e4}},
    ),
    "an empty rope_scaling": ("qwen2", {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "keys of transformers 4": ("llama", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "the older name of the kind": ("qwen2", {"rope_parameters": None, "rope_scaling": {**YARN, "type": "yarn"}}),
    "no length before scaling": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "the same length at the top level": ("qwen3", {"rope_scaling": YARN, "original_max_position_embeddings": 16}),
    "all numbers of yarn": (
        "qwen3_moe",
        {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2, "attention_factor": 0.7, "truncate": False}},
    ),
    "both weights of yarn's factor": ("qwen2", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    "a factor below 1": ("llama", {"rope_scaling": {**YARN, "factor": 0.5}}),
    "mixtral's own base": ("mixtral", {"rope_parameters": None}),
    "the other name of the number of experts": ("qwen3_moe", {"num_experts": ..., "num_local_experts": 4}),
    "a window without its switch": ("qwen3_moe", {"sliding_window": 4, "use_sliding_window": False}),
    "a window above all layers": (
        "qwen2",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2, "layer_types": ...},
    ),
    "layers that are named full": ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
    "an eighth of a head": ("glm4_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.125}}),
    "keys of published glm": (
        "glm4_moe",
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.25},
    ),
    "no share of a head": ("glm4_moe", {"rope_parameters": ..., "rope_theta": 1e6}),
    "llama3 of half a head": ("glm4_moe", {"rope_scaling": LLAMA3}),
    "experts in groups": ("glm4_moe", {"n_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}),
    "switches": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 0}),
    "queries without a latent": ("deepseek_v3", {"q_lora_rank": None}),
    "yarn of latents": ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "keys of published deepseek": (
        "deepseek_v3",
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn", "mscale_all_dim": 1.0}}
        | {"rope_interleave": ..., "head_dim": ..., "qk_head_dim": ..., "scoring_func": "sigmoid", "moe_layer_freq": 1}
        | {"topk_method": "noaux_tc", "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001},
    ),
    "keys of published gpt-oss": (
        "gpt_oss",
        {"rope_parameters": ..., "rope_theta": 1.5e5, "rope_scaling": {**YARN, "truncate": False}}
        | {"experts_per_token": 2, "initial_context_length": 16},
    ),
    "nothing said of windows and frequencies": (
        "gpt_oss",
        {"rope_parameters": ..., "layer_types": ..., "num_hidden_layers": 3, "max_position_embeddings": 131072},
    ),
    "keys of published olmo": (
        "olmo3",
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    ),
    "llama3 outside of windows": ("olmo3", {"rope_scaling": {**LLAMA3, "factor": 16.0}}),
    "nothing said of layers": (
        "olmo3",
        {"rope_parameters": ..., "layer_types": ..., "num_hidden_layers": 4, "rope_scaling": YARN},
    ),
    "yarn by type of layer": (
        "olmo3",
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in LAYER_TYPES}}
        | {"rope_scaling": {**YARN, "rope_theta": 1e4}},
    ),
    "windows in other layers": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    "no windows": ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
    "keys of published Qwen3-Next": (
        "qwen3_next",
        {"layer_types": ..., "full_attention_interval": 2, "rope_parameters": ..., "rope_scaling": None}
        | {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "use_sliding_window": False},
    ),
    "no word of layers, nor of the rotated share": (
        "qwen3_next",
        {"layer_types": ..., "num_hidden_layers": 5, "rope_parameters": ..., "decoder_sparse_step": 2},
    ),
    "keys of the text part of published Qwen3.5": (
        "qwen3_5_text",
        {"attn_output_gate": True, "full_attention_interval": 2, "mamba_ssm_dtype": "float32"}
        | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rope_parameters": MROPE},
    ),
    "the same with experts": ("qwen3_5_moe_text", {"rope_parameters": MROPE, "intermediate_size": ...}),
    "keys that change nothing": ("llama", {"pretraining_tp": 2, "temperature": 0.5, "is_llama_config": True}),
}


@pytest.mark.parametrize("case", EQUAL)
def test_logits_equal_those_of_transformers(case, tmp_path, capsys):
    family, keys = EQUAL[case]
    save_model(tmp_path / "hf", config_of(family, **keys))
    command = ["convert", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "megatron"), "--processes", "1"]
    assert cli.main([*command, "--verify"]) == 0
    assert "differ by at most" in capsys.readouterr().out


REFUSED = {
    "yarn in windows": (
        "olmo3",
        {"rope_parameters": {kind: {**YARN, "rope_theta": 1e4} for kind in LAYER_TYPES}},
        "sliding_attention.*'yarn'.*allowed.*'default'",
    ),
    "two bases": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}}},
        "sliding_attention.*10000.*500000",
    ),
    "biases of attention": ("olmo3", {"attention_bias": True}, "attention_bias true"),
    "linear beside rope_parameters": ("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "'linear'"),
    "a base that is dropped": (
        "qwen2",
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        r"rope_theta 1000000\.0",
    ),
    "two kinds": ("llama", {"rope_scaling": {**YARN, "type": "linear"}}, "linear"),
    "another length at the top level": (
        "qwen3",
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        "original_max_position_embeddings.* 32 .* 16",
    ),
    "a null at the top level, with which transformers raises": (
        "llama",
        {"rope_scaling": YARN, "original_max_position_embeddings": None},
        "original_max_position_embeddings.* None .* 16",
    ),
    "a length at the top level alone": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
        "original_max_position_embeddings.* 32 .* 128",
    ),
    "a factor of the attention that Megatron drops": (
        "qwen3",
        {"rope_scaling": {**YARN, "factor": 0.5, "attention_factor": 1.3}},
        "attention_factor 1.3",
    ),
    "the same at 1": ("qwen3", {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.3}}, "attention_factor"),
    "no biases": ("gpt_oss", {"attention_bias": False}, "attention_bias false"),
    "another curve of the gate": ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
    "chunks": ("gpt_oss", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    "too few kinds of layers": ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
    "no width of windows": ("gpt_oss", {"sliding_window": None}, "sliding_window"),
    "no limit": ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
    "linear attention elsewhere": ("qwen3", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
    "two words of layers": ("qwen3_next", {"full_attention_interval": 3}, "full_attention_interval 3"),
    "uneven heads": ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
    "yarn of a part of a head": ("qwen3_next", {"rope_scaling": YARN}, "partial_rotary_factor"),
    "another quantization": ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "a new key": ("gpt_oss", {"sink_scale": 2.0}, "sink_scale"),
    "truncate null": ("qwen3", {"rope_scaling": {**YARN, "truncate": None}}, "truncate"),
    "SGLang's own factor": ("qwen3", {"rope_scaling": {**YARN, "attn_factor": 1.3}}, "attn_factor"),
    "a kind for each type of layer": (
        "qwen2",
        {"rope_scaling": {**YARN, "full_attention": {"rope_type": "default"}}},
        "rope_scaling|full_attention|rope_parameters",
    ),
    "a section that is no object": ("qwen2", {"rope_parameters": "yarn"}, "rope_parameters"),
    "both directions": ("llama", {"is_causal": False}, "is_causal false"),
    "both directions by null": ("llama", {"is_causal": None}, "is_causal null"),
    "a window in all layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28},
        "4 tokens",
    ),
    "a window in all layers, named full": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 2},
        "4 tokens",
    ),
    "a window of the family's own width": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ..., "sliding_window": ...},
        "of 4096 tokens",
    ),
    "mistral's own width": ("mistral", {"sliding_window": ...}, "of 4096 tokens"),
    "a window that only the cache has": ("llama", {"sliding_window": 4}, "of 4 tokens"),
    "layer_types that is no list": ("qwen2", {"layer_types": 5}, "layer_types"),
    "numbers for single layers": ("qwen3", {"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config"),
    "code of its own": ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
    "a key that nothing reads": ("qwen2", {"logits_scaling": 8.0}, r"logits_scaling 8\.0"),
    "experts of another family": ("qwen2", {"num_experts": 8}, "num_experts 8"),
    "one expert with a weight of 1": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
    "fused tensors": ("llama", {"model_type": "phi3"}, "phi3"),
    "fused gate and up": ("llama", {"model_type": "glm4"}, "glm4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_would_load_as_another_model_is_refused_by_name(case):
    family, keys, named = REFUSED[case]
    with pytest.raises(ModelError, match=named):
        read_model_shape(config_of(family, **keys))


def test_missing_key_value_heads_are_the_family_s_own_number_and_null_is_one_for_each_head():
    config = config_of("qwen2", num_attention_heads=64, head_dim=8, num_key_value_heads=...)
    assert read_model_shape(config).kv_heads == 32
    assert read_model_shape({**config, "num_key_value_heads": None}).kv_heads == 64


def test_a_table_that_forgot_a_default_is_noticed(tmp_path, monkeypatch):
    """A Mistral table without its window reads a config.json without that key as one of a model without windows."""
    table = families()["mistral"]
    forgetful = dataclasses.replace(table, defaults={**table.defaults, "sliding_window": None})
    monkeypatch.setattr(model_shape, "families", lambda: {**families(), "mistral": forgetful})
    config = config_of("mistral", sliding_window=...)
    assert read_model_shape(config)
    with pytest.raises(ModelError, match=r"\[\].*\[0, 1\]"):
        read_compared_shape(write(tmp_path / "hf", config))


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("mistral", {"layer_types": ["full_attention"] * 2}, "'mistral'.*'ministral'"),
        ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads"),
        ("olmo3", {"rope_parameters": ..., "rope_theta": 1e6}, "sliding_attention.*500000"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "rope_theta",
        ),
    ],
)
def test_what_only_transformers_knows_is_refused_before_a_conversion(family, keys, named, tmp_path, capsys):
    directory = write(tmp_path / "hf", config_of(family, **keys))
    with pytest.raises(ModelError, match=named):
        read_compared_shape(directory)
    assert cli.main(["convert", "--hf", str(directory), "--out", str(tmp_path / "out"), "--dry-run"]) == 1
    assert "transformers" in capsys.readouterr().err


def test_a_null_that_the_family_does_not_read_changes_nothing(tmp_path):
    directory = write(tmp_path / "hf", config_of("mixtral", decoder_sparse_step=None))
    assert read_compared_shape(directory).experts.dense_layers == ()


def test_a_fused_tensor_does_not_fit_a_table():
    llama = families()["llama"]
    fused = {**llama.tensors, "qkv": ("model.layers.{layer}.self_attn.qkv_proj.weight",)}
    with pytest.raises(ModelError, match=r"qkv_proj\.weight"):
        dataclasses.replace(llama, tensors=fused)


def test_a_tied_output_layer_of_its_own_is_not_left_out_in_silence(tmp_path):
    """transformers does not tie what differs, so its model has another output layer than the actor would have."""
    save_model(tmp_path, config_of("qwen2", tie_word_embeddings=False))
    untied = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    write(tmp_path, config_of("qwen2", tie_word_embeddings=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, untied.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    with HFCheckpoint(tmp_path) as tensors, pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_hf_weights([], read_compared_shape(tmp_path), tensors)


numbers = st.sampled_from([0.5, 1, 1.5, 4.0])
sections = st.fixed_dictionaries(
    {"factor": numbers},
    optional={
        "rope_type": st.sampled_from(["default", "yarn", "yarn", "llama3", "linear", "dynamic"]),
        "type": st.sampled_from(["yarn", "linear"]),
        "rope_theta": st.sampled_from([500.0, 1e4, 1e6]),
        "original_max_position_embeddings": st.sampled_from([16, 128]),
        "low_freq_factor": numbers,
        "high_freq_factor": st.just(8.0),
        "attention_factor": st.none() | numbers,
        "beta_fast": st.none() | st.sampled_from([0, 8, 32.0]),
        "beta_slow": st.none() | numbers,
        "mscale": st.none() | st.sampled_from([0, 0.7]),
        "mscale_all_dim": st.none() | st.sampled_from([0, 0.5]),
        "truncate": st.none() | st.booleans(),
    },
)
edits = st.fixed_dictionaries(
    {},
    optional={
        "rope_scaling": st.none() | st.just({}) | sections,
        "rope_parameters": st.none() | st.just({}) | sections,
        "rope_theta": st.sampled_from([1e4, 1e6]),
        "original_max_position_embeddings": st.none() | st.sampled_from([16, 128]),
        "sliding_window": st.none() | st.just(4),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.integers(0, 3),
        "layer_types": st.none() | st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=2),
        "is_causal": st.none() | st.booleans(),
        "num_key_value_heads": st.none() | st.just(4),
        "head_dim": st.none() | st.just(8),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(sorted(CLASSES)),
    edit=edits,
    missing=st.sets(st.sampled_from(["num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window"])),
)
def test_what_is_accepted_is_what_transformers_computes(family, edit, missing, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drawn")
    config = {key: value for key, value in config_of(family, **edit).items() if key not in missing}
    write(directory, config)
    try:
        shape = read_compared_shape(directory)
    except ModelError:
        return
    finally:
        shutil.rmtree(directory)
    resolved = transformers.AutoConfig.for_model(**config)
    assert getattr(resolved, "is_causal", True) is True
    assert shape.kv_heads == resolved.num_key_value_heads and shape.rms_eps == resolved.rms_norm_eps
    kinds = {"layer_type": "full_attention"} if family == "olmo3" else {}
    rope = resolved.rope_parameters["full_attention"] if kinds else resolved.rope_parameters
    assert shape.rope_theta == rope["rope_theta"]
    kind = rope["rope_type"]
    assert (shape.rope_scaling is None) == (kind == "default")
    if isinstance(shape.rope_scaling, YarnScaling) and getattr(resolved, "head_dim", None):
        assert shape.rope_scaling.attention_factor == pytest.approx(ROPE_INIT_FUNCTIONS[kind](resolved, **kinds)[1])
        assert shape.rope_scaling.original_max_positions == resolved.rope_parameters["original_max_position_embeddings"]
