"""`actor.megatron`: which upstream dataclass gets an option, which are refused; and the padded vocabulary."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.actor import model
from megatron_daro.config.megatron_options import OWNED, REFUSED, upstream_names
from megatron_daro.errors import ConfigError


def test_each_option_goes_to_the_dataclasses_that_know_it():
    got = model.split_megatron_options({"attention_softmax_in_fp32": True, "adam_eps": 1e-7, "bucket_size": 1000})
    assert got == {
        "transformer": {"attention_softmax_in_fp32": True},
        "optimizer": {"adam_eps": 1e-7},
        "ddp": {"bucket_size": 1000},
    }


def test_a_name_of_several_goes_to_all_of_them():
    got = model.split_megatron_options({"barrier_with_L1_time": False})
    assert [part for part, options in got.items() if options] == ["transformer", "optimizer"]


def test_nothing_asked_nothing_given():
    assert model.split_megatron_options({}) == {"transformer": {}, "optimizer": {}, "ddp": {}}


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_another_option_sets_is_refused(name):
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.{name}: got 1; .* set by .*; fix: remove it here"):
        model.split_megatron_options({name: 1})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_be_ignored_or_wrong_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=rf"megatron\.{name}: got 2; .*nothing: {re.escape(REFUSED[name])}"):
        model.split_megatron_options({name: 2})


def test_every_owned_or_refused_name_exists_upstream():
    """Otherwise the table refuses a name that no user could mean."""
    known = {field.name for cls in model._UPSTREAM.values() for field in dataclasses.fields(cls)}
    added_by_0_19 = {
        "gtp_weight_remat_size",
        "tensor_parallel_num_weight_shards",
        "grad_norm_skip_threshold",
        "use_mup",
    }
    gone_in_0_19 = {"moe_use_legacy_grouped_gemm"}
    assert (set(OWNED) | set(REFUSED)) - added_by_0_19 - gone_in_0_19 <= known


def test_the_names_read_from_source_are_the_fields_of_the_dataclasses():
    fields = {part: {field.name for field in dataclasses.fields(cls)} for part, cls in model._UPSTREAM.items()}
    assert upstream_names() == fields


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(
        ConfigError, match=r"attention_sofmax_in_fp32: got the unknown .* did you mean attention_softmax_in"
    ):
        model.split_megatron_options({"attention_sofmax_in_fp32": True})


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        model.split_megatron_options({"lr": 1.0, "adam_epsilon": 1.0, "bucket_size": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "actor.megatron.lr: got 1.0; allowed: nothing, it is set by actor.optimizer.learning_rate" in lines[1]
    assert "actor.megatron.adam_epsilon: got the unknown key" in lines[2]


@given(vocab=st.integers(1, 200_000), tensor=st.sampled_from([1, 2, 4, 8, 16]))
def test_the_padded_vocabulary_is_the_same_for_tp_1_to_16(vocab, tensor):
    padded = model.padded_vocabulary(vocab, tensor)
    assert padded == model.padded_vocabulary(vocab, 1)
    assert 0 <= padded - vocab < model.VOCABULARY_MULTIPLE
    assert padded % tensor == 0


@pytest.mark.parametrize("tensor", [3, 6, 24, 32])
def test_other_tp_sizes_divide_it_too(tensor):
    padded = model.padded_vocabulary(151_936, tensor)
    assert padded >= 151_936
    assert padded % tensor == 0
    assert padded % model.VOCABULARY_MULTIPLE == 0
