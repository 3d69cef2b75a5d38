"""`actor.megatron`: which upstream dataclass gets an option, which are refused; and the padded vocabulary."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_configs import GPT_OSS_20B

from megatron_daro.actor import model, translation
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.megatron_options import (
    OWNED,
    REFUSED,
    option_problems,
)
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import ConfigError


def test_each_option_goes_to_the_dataclasses_that_know_it():
    got = model.split_megatron_options({"bias_dropout_fusion": True, "decoupled_lr": 1e-7, "bucket_size": 1000})
    assert got == {
        "transformer": {"bias_dropout_fusion": True},
        "optimizer": {"decoupled_lr": 1e-7},
        "ddp": {"bucket_size": 1000},
    }


def test_ranks_on_gpus_take_what_the_dry_run_says_that_they_add(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(translation, "data_parallel_config", lambda **given: taken.append(given["options"]))
    translation.check_megatron_options(ActorSection(data_parallel=2, precision="fp32"), read_model_shape(GPT_OSS_20B))
    assert taken == [{"overlap_grad_reduce": True}]


def test_a_name_of_several_goes_to_all_of_them():
    got = model.split_megatron_options({"config_logger_dir": "logs"})
    assert [part for part, options in got.items() if options] == ["transformer", "optimizer"]


def test_nothing_asked_nothing_given():
    assert model.split_megatron_options({}) == {"transformer": {}, "optimizer": {}, "ddp": {}}


@pytest.mark.parametrize("table", [OWNED, REFUSED], ids=["owned", "refused"])
def test_what_would_be_set_twice_ignored_or_wrong_is_refused(table):
    for name in table:
        with pytest.raises(ConfigError, match=rf"actor\.megatron\.{name}: got 2"):
            model.split_megatron_options({name: 2})


def test_an_option_that_nobody_has_looked_at_is_refused():
    known = {"bias_dropout_fusion", "tomorrows_rotary_twist"}
    (problem,) = option_problems({"tomorrows_rotary_twist": 2, "bias_dropout_fusion": True}, known)
    assert problem.field == "actor.megatron.tomorrows_rotary_twist"


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dropout": 0.5},
        {"attention_dropout": 0.1},
        {"layernorm_epsilon": 0.5},
        {"rotary_interleaved": True},
        {"normalization": "RMSNorm"},
        {"layernorm_zero_centered_gamma": True},
        {"adam_eps": 1e-7},
        {"loss_scale": 1024.0},
        {"tp_comm_overlap": True},
        {"cuda_graph_impl": "local"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_would_make_another_model_is_refused_before_the_start(options):
    (name,) = options
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.{name}: got"):
        model.split_megatron_options(options)


def test_values_that_are_no_harm_pass():
    harmless = {"hidden_dropout": 0.0, "attention_dropout": 0, "apply_rope_fusion": False, "mtp_num_layers": None}
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        model.split_megatron_options({"mtp_num_layers": 1})
    assert model.split_megatron_options(harmless)["transformer"] == harmless


def test_all_problems_at_once_and_of_an_unknown_name_the_nearest():
    with pytest.raises(ConfigError) as caught:
        model.split_megatron_options({"lr": 1.0, "bias_dropout_fusoin": True, "bucket_size": 1})
    assert re.search(r"actor\.megatron\.lr: got 1\.0.*actor\.optimizer\.learning_rate", str(caught.value))
    assert re.search(r"actor\.megatron\.bias_dropout_fusoin: .*\bbias_dropout_fusion\b", str(caught.value))
    assert "bucket_size" not in str(caught.value)


@given(vocab=st.integers(1, 200_000), tensor=st.sampled_from([1, 2, 4, 8, 16]))
def test_the_padded_vocabulary_is_the_same_for_tp_1_to_16(vocab, tensor):
    shape = dataclasses.replace(read_model_shape(GPT_OSS_20B), vocab=vocab)
    padded = shape.padded_vocab(tensor)
    assert padded == shape.padded_vocab(1)
    assert 0 <= padded - vocab < 16
    assert padded % tensor == 0


@pytest.mark.parametrize("tensor", [3, 6, 24, 32])
def test_other_tp_sizes_divide_it_too(tensor):
    padded = dataclasses.replace(read_model_shape(GPT_OSS_20B), vocab=151_936).padded_vocab(tensor)
    assert padded >= 151_936
    assert padded % tensor == 0
    assert padded % 16 == 0


def test_clamped_experts_refuse_a_kernel_that_clamps_too_early():
    shape = read_model_shape(GPT_OSS_20B)
    assert not model.transformer_config(shape, Layout()).bias_activation_fusion
    with pytest.raises(ConfigError, match=r"actor\.megatron\.bias_activation_fusion: got true"):
        model.transformer_config(shape, Layout(), options={"bias_activation_fusion": True})
