"""Precision that cannot be had is refused, and Megatron gets what was asked for."""

from __future__ import annotations

import pytest
import torch
from published_configs import GPT_OSS_20B, OLMO_3_7B

from megatron_daro.actor import device, precision
from megatron_daro.actor.model import transformer_config
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.precision import Surroundings
from megatron_daro.errors import ConfigError

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100}
SHAPE |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
LLAMA = read_model_shape(SHAPE)
HOPPER = Surroundings(9.0, (13, 0), (2, 20, 2), (9, 19, 0))


def test_fp8_that_cannot_run_on_this_rank_is_refused_and_not_silently_off(monkeypatch):
    with pytest.raises(ConfigError, match=r"actor\.precision: got fp8"):
        precision.uses_transformer_engine(ActorSection(precision="fp8"), LLAMA)
    monkeypatch.setattr(precision, "surroundings", lambda: HOPPER)
    with pytest.raises(ConfigError, match="Transformer Engine"):
        precision.uses_transformer_engine(ActorSection(precision="fp8"), LLAMA)
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    assert precision.uses_transformer_engine(ActorSection(precision="fp8"), LLAMA)
    assert not precision.uses_transformer_engine(ActorSection(precision="fp32"), LLAMA)
    with pytest.raises(ConfigError, match=r"actor\.fp8_recipe"):
        precision.uses_transformer_engine(ActorSection(precision="fp8", fp8_recipe="mxfp8"), LLAMA)


@pytest.mark.parametrize("config", [GPT_OSS_20B, OLMO_3_7B])
def test_sinks_and_norms_behind_a_layer_are_those_of_megatrons_own_layers(monkeypatch, config):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    assert precision.uses_transformer_engine(ActorSection(), LLAMA)
    assert not precision.uses_transformer_engine(ActorSection(), read_model_shape(config))


def config_of(**options):
    """Megatron's own configuration of a small model."""
    actor = ActorSection(**options)
    return transformer_config(read_model_shape(SHAPE), Layout(), dtype=actor.dtype, fp8=precision.fp8_options(actor))


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
