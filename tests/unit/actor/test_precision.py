"""Precision that cannot be had is refused or said aloud, Megatron gets it whole, and fp8 packs are whole blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_daro.actor import device, optimizer, policy
from megatron_daro.actor.compat import gradient_fusion_of_layers
from megatron_daro.actor.model import transformer_config
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import NEEDS, Surroundings
from megatron_daro.errors import ConfigError

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100}
SHAPE |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
HOPPER = Surroundings(9.0, (13, 0), (2, 20, 2), (9, 19, 0))


def test_fp8_that_cannot_run_on_this_rank_is_refused_and_not_silently_off(monkeypatch):
    with pytest.raises(ConfigError, match=r"actor\.precision: got fp8 \(tensorwise\), but there is no GPU"):
        optimizer.uses_transformer_engine(ActorSection(precision="fp8"))
    monkeypatch.setattr(optimizer, "surroundings", lambda: HOPPER)
    with pytest.raises(ConfigError, match="Transformer Engine cannot be imported here"):
        optimizer.uses_transformer_engine(ActorSection(precision="fp8"))
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    assert optimizer.uses_transformer_engine(ActorSection(precision="fp8"))
    assert not optimizer.uses_transformer_engine(ActorSection(precision="fp32"))
    with pytest.raises(ConfigError, match=r"set actor\.fp8_recipe=blockwise"):
        optimizer.uses_transformer_engine(ActorSection(precision="fp8", fp8_recipe="mxfp8"))


def test_a_rank_sees_its_own_gpu_and_libraries(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = optimizer.surroundings()
    assert (found.capability, found.cuda, found.cudnn) == (10.3, (13, 0), (9, 19, 0))
    assert found.transformer_engine == ()  # it is not installed where tests run


def test_a_rank_refuses_experts_in_fp8_that_its_libraries_cannot_save(monkeypatch):
    experts = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 4}
    experts |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    shape = read_model_shape({**SHAPE, **experts})
    monkeypatch.setattr(optimizer, "surroundings", lambda: replace(HOPPER, megatron=(0, 18, 2)))
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match=r"Megatron-core 0\.18\.2 with Transformer Engine 2\.20\.2 cannot save them"):
        policy.check_megatron_options(ActorSection(precision="fp8"), shape)
    optimizer.refuse_unsaveable_experts(ActorSection(precision="bf16"), shape)


def test_a_gpu_without_transformer_engine_is_said_aloud(monkeypatch):
    assert optimizer.remarks(ActorSection(), False) == ()  # a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert optimizer.remarks(ActorSection(), True) == ()
    (remark,) = optimizer.remarks(ActorSection(), False)
    assert "without Transformer Engine (it cannot be imported there)" in remark
    (remark,) = optimizer.remarks(ActorSection(precision="fp32"), False)
    assert "no packed attention in fp32" in remark


def config_of(**options):
    """Megatron's own configuration of a small model."""
    actor = ActorSection(**options)
    return transformer_config(read_model_shape(SHAPE), Layout(), dtype=actor.dtype, fp8=optimizer.fp8_options(actor))


def test_megatron_gets_recipe_format_and_layers_in_bf16():
    plain = config_of(fp8_recipe="mxfp8")
    assert (plain.fp8, plain.bf16, plain.first_last_layers_bf16) == (None, True, False)
    fp8 = config_of(precision="fp8", fp8_recipe="blockwise", fp8_format="e4m3", num_layers_at_end_in_bf16=2)
    assert (fp8.fp8, fp8.fp8_recipe, fp8.bf16, fp8.params_dtype) == ("e4m3", "blockwise", True, torch.bfloat16)
    kept = (fp8.first_last_layers_bf16, fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16)
    assert kept == (True, 0, 2)
    assert not config_of(precision="fp8").first_last_layers_bf16


def test_layers_in_bf16_are_those_that_megatron_takes_out_of_fp8():
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = config_of(precision="fp8", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert [is_first_last_bf16_layer(config, layer) for layer in range(4)] == [True, False, True, True]


def test_weight_gradients_are_fused_in_layers_and_not_in_the_output_layer():
    """The output layer would ask for Apex; layers of Transformer Engine are told after they are built."""
    shape, seen = read_model_shape(SHAPE), []
    rope = {"apply_rope_fusion": False}  # upstream looks for Transformer Engine itself
    config = transformer_config(shape, Layout(), dtype="bf16", transformer_engine=True, options=rope)
    assert config.gradient_accumulation_fusion
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.fuse_wgrad_accumulation = False
    with gradient_fusion_of_layers(config) as fuse:
        seen.append(config.gradient_accumulation_fusion)
        fuse(torch.nn.Sequential(layer, other))
    assert seen == [False] and config.gradient_accumulation_fusion
    assert layer.fuse_wgrad_accumulation and not hasattr(other, "fuse_wgrad_accumulation")
    with gradient_fusion_of_layers(SimpleNamespace(gradient_accumulation_fusion=False)) as fuse:
        layer.fuse_wgrad_accumulation = False
        fuse(layer)
    assert not layer.fuse_wgrad_accumulation
    with pytest.raises(ConfigError, match="gradient_accumulation_fusion: got true; allowed: only with Transformer"):
        transformer_config(shape, Layout(), options={"gradient_accumulation_fusion": True})


def test_yarn_scales_the_scores_so_that_its_rotation_is_fused(monkeypatch):
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config,
    )

    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):  # upstream looks for them
        monkeypatch.setattr(rope_utils, name, lambda: None)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3}
    shape = read_model_shape({**SHAPE, "rope_scaling": yarn})
    config = transformer_config(shape, Layout(), dtype="bf16", transformer_engine=True)
    assert config.apply_rope_fusion and _yarn_get_concentration_factor_from_config(config) == 1.0
    assert config.softmax_scale == pytest.approx(1.3**2 / shape.head_dim**0.5)
    assert transformer_config(read_model_shape(SHAPE), Layout()).softmax_scale is None


@pytest.mark.parametrize(("recipe", "tokens"), [("tensorwise", 32), ("mxfp8", 32), ("blockwise", 128)])
def test_packs_are_padded_to_whole_blocks_of_the_recipe(recipe, tokens):
    assert NEEDS[recipe].tokens == tokens
