"""`actor.megatron`: which upstream dataclass gets an option, which are refused; and the padded vocabulary."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.actor import model
from megatron_daro.errors import ConfigError


def test_each_option_goes_to_the_dataclasses_that_know_it():
    got = model.split_megatron_options({"attention_softmax_in_fp32": True, "adam_eps": 1e-7, "bucket_size": 1000})
    assert got == {
        "transformer": {"attention_softmax_in_fp32": True},
        "optimizer": {"adam_eps": 1e-7},
        "ddp": {"bucket_size": 1000},
    }


def test_a_name_of_several_goes_to_all_of_them():
    got = model.split_megatron_options({"fp8_recipe": "delayed"})
    assert [part for part, options in got.items() if options] == ["transformer", "optimizer"]


def test_nothing_asked_nothing_given():
    assert model.split_megatron_options({}) == {"transformer": {}, "optimizer": {}, "ddp": {}}


@pytest.mark.parametrize("name", sorted(model._OWNED))
def test_what_another_option_sets_is_refused(name):
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.{name}: set by .*; remove it here"):
        model.split_megatron_options({name: 1})


def test_every_owned_name_exists_upstream():
    """Otherwise the table refuses a name that no user could mean."""
    known = {field.name for cls in model._UPSTREAM.values() for field in dataclasses.fields(cls)}
    assert set(model._OWNED) <= known


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"attention_sofmax_in_fp32: no field .*; did you mean attention_softmax_in"):
        model.split_megatron_options({"attention_sofmax_in_fp32": True})
    with pytest.raises(ConfigError) as caught:
        model.split_megatron_options({"zzzz": True})
    assert "did you mean" not in str(caught.value)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        model.split_megatron_options({"lr": 1.0, "adam_epsilon": 1.0, "bucket_size": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("actor.megatron.lr: set by actor.optimizer.learning_rate")
    assert lines[1].startswith("actor.megatron.adam_epsilon: no field")


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
