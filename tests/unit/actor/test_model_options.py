"""`actor.megatron`: which upstream dataclass gets an option, which are refused; and the padded vocabulary."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.actor import model
from megatron_daro.config.megatron_options import (
    ALLOWED,
    OWNED,
    REFUSED,
    WITHOUT_EFFECT,
    option_problems,
    upstream_names,
    why_refused,
)
from megatron_daro.errors import ConfigError


def test_each_option_goes_to_the_dataclasses_that_know_it():
    got = model.split_megatron_options({"bias_dropout_fusion": True, "decoupled_lr": 1e-7, "bucket_size": 1000})
    assert got == {
        "transformer": {"bias_dropout_fusion": True},
        "optimizer": {"decoupled_lr": 1e-7},
        "ddp": {"bucket_size": 1000},
    }


def test_a_name_of_several_goes_to_all_of_them():
    got = model.split_megatron_options({"config_logger_dir": "logs"})
    assert [part for part, options in got.items() if options] == ["transformer", "optimizer"]


def test_nothing_asked_nothing_given():
    assert model.split_megatron_options({}) == {"transformer": {}, "optimizer": {}, "ddp": {}}


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_another_option_or_the_model_sets_is_refused(name):
    with pytest.raises(ConfigError, match=rf"actor\.megatron\.{name}: got 1; .* set by .*; fix: remove it here"):
        model.split_megatron_options({name: 1})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_be_ignored_or_wrong_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=rf"megatron\.{name}: got 2; .*nothing: {re.escape(REFUSED[name])}"):
        model.split_megatron_options({name: 2})


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_changes_nothing_is_refused_whatever_its_value(name):
    for value in (False, 2):
        with pytest.raises(ConfigError, match=rf"megatron\.{name}: got .*nothing: it has no effect here"):
            model.split_megatron_options({name: value})


FIELDS = sorted({field.name for cls in model._UPSTREAM.values() for field in dataclasses.fields(cls)})


def classes_of(name: str) -> list[str]:
    """The tables that say something about an option; the beginnings of names only where no table does."""
    tables = {"owned": OWNED, "refused": REFUSED, "without effect": WITHOUT_EFFECT, "allowed": ALLOWED}
    named = [which for which, table in tables.items() if name in table]
    return named or (["refused"] if why_refused(name, 1) else [])


@pytest.mark.parametrize("name", FIELDS)
def test_each_option_of_the_installed_megatron_has_exactly_one_class(name):
    """One that a newer version has is refused until somebody finds out what it does to the model."""
    assert len(classes_of(name)) == 1, f"{name}: {classes_of(name)}"


def test_an_option_that_nobody_has_looked_at_is_refused():
    known = {"transformer": frozenset({"bias_dropout_fusion", "tomorrows_rotary_twist"})}
    (problem,) = option_problems({"tomorrows_rotary_twist": 2, "bias_dropout_fusion": True}, known)
    assert str(problem).startswith(
        "actor.megatron.tomorrows_rotary_twist: got 2, which the installed Megatron-core has"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_dropout": 0.5}, "hidden_dropout: got 0.5; .* another model than the one that the rollout engine"),
        ({"attention_dropout": 0.1}, "attention_dropout: got 0.1; .* another model"),
        ({"layernorm_epsilon": 0.5}, "set by rms_norm_eps in the config.json of model.path; fix: .* or set model.path"),
        ({"rotary_interleaved": True}, "set by model_type in the config.json"),
        ({"normalization": "RMSNorm"}, "set by model_type in the config.json"),
        ({"layernorm_zero_centered_gamma": True}, "set by model_type in the config.json"),
        ({"adam_eps": 1e-7}, "set by actor.optimizer.eps"),
        ({"loss_scale": 1024.0}, "gradients would be divided by it"),
        ({"tp_comm_overlap": True}, "user buffers"),
        ({"cuda_graph_impl": "local"}, "recorded for one shape"),
    ],
)
def test_what_would_make_another_model_is_refused_before_the_start(options, words):
    with pytest.raises(ConfigError, match=words):
        model.split_megatron_options(options)


def test_values_that_are_no_harm_pass():
    harmless = {"hidden_dropout": 0.0, "attention_dropout": 0, "apply_rope_fusion": False, "mtp_num_layers": None}
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        model.split_megatron_options({"mtp_num_layers": 1})
    assert model.split_megatron_options(harmless)["transformer"] == harmless


_ONLY_IN_0_19 = """
activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph
delta_offload_bytes_across_pp_ranks experimental_attention_variant_loss_scale_func
expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
fine_grained_offloading_max_inflight_offloads flash_attention_version fp4_param_gather fp8_output_proj
fused_residual_rmsnorm grad_norm_skip_threshold gtp_weight_remat_size high_priority_a2a_comm_stream
megatron_fsdp_cuda_graph_mode mlp_chunks_for_training moe_expert_rank_capacity_factor
moe_flex_dispatcher_num_sms moe_grad_scale_func moe_hybridep_num_blocks_permute
moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_permute_fusion_into_hybridep
moe_router_force_biased moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
moe_single_grouped_bias moe_single_grouped_weight mtp_grad_scale_func nccl_all_reduce_for_prefill
num_buckets optimizer_cuda_graph overlap_dispatch_backward_with_experts_wgrad
param_name_patterns_for_fp32_local_accumulation tensor_parallel_num_weight_shards
use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_layer_wise_distributed_optimizer
use_mup use_transformer_engine_op_fuser
"""
ONLY_IN_0_19 = set(_ONLY_IN_0_19.split())
_GONE_IN_0_19 = """
async_tensor_model_parallel_allreduce moe_extended_tp moe_use_legacy_grouped_gemm preserve_fp32_weights
"""
GONE_IN_0_19 = set(_GONE_IN_0_19.split())


def test_every_listed_name_exists_upstream():
    """Otherwise the table refuses a name that no user could mean."""
    listed = set(OWNED) | set(REFUSED) | set(WITHOUT_EFFECT) | ALLOWED
    assert listed - set(FIELDS) <= (ONLY_IN_0_19 if version("megatron-core") < "0.17" else GONE_IN_0_19)


def test_the_names_read_from_source_are_the_fields_of_the_dataclasses():
    fields = {part: {field.name for field in dataclasses.fields(cls)} for part, cls in model._UPSTREAM.items()}
    assert upstream_names() == fields


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"bias_dropout_fusoin: got the unknown .* did you mean bias_dropout_fusion"):
        model.split_megatron_options({"bias_dropout_fusoin": True})


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
