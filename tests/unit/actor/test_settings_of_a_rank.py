"""What a rank hands on to Megatron, what it refuses beforehand, and the weights that it starts from and sends."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from single_rank import CONFIG, GRPO, policy_of, ranks, save_random_model

from megatron_daro.actor import compat, model
from megatron_daro.actor import policy as policy_module
from megatron_daro.actor import weights as weights_module
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("world")


def test_the_layout_is_that_of_the_section():
    sizes = {"tensor": 2, "pipeline": 3, "context": 4, "data": 5, "expert": 6, "expert_tensor": 7}
    options = {f"{name}_parallel": size for name, size in (sizes | {"virtual_pipeline": 8}).items()}
    assert policy_module.layout_of(ActorSection.model_construct(**options)) == Layout(**sizes, virtual_pipeline=8)


def test_the_objective_is_that_of_the_section():
    options = {"clip_low": 0.11, "clip_high": 0.12, "dual_clip": 3.5, "entropy_coefficient": 0.13}
    correction = {"kind": "tis", "cap": 1.5, "low": 0.4, "high": 1.7, "level": "sequence"}
    section = AlgorithmSection(
        name="grpo", kl={"coefficient": 0.2, "mean": "rollouts", "estimator": "k2"}, correction=correction, **options
    )
    found = policy_module.objective_settings(section)
    assert {name: getattr(found, name) for name in options} == options
    assert {n: getattr(found, f"correction_{n}") for n in ("cap", "low", "high", "level")} | {
        "kind": found.correction
    } == correction
    assert (found.kl_coefficient, found.kl_mean, found.kl_estimator) == (0.2, "rollouts", "k2")
    assert (found.reward_kl_coefficient, found.reward_kl_per_token, found.trust_region) == (0.0, False, "clip")


@pytest.mark.parametrize(("place", "per_token"), [("reward", False), ("token_reward", True)])
def test_kl_in_the_reward_is_none_in_the_loss(place, per_token):
    section = AlgorithmSection(name="ppo", kl={"coefficient": 0.2, "place": place, "estimator": "k1"})
    found = policy_module.objective_settings(section)
    assert (found.kl_coefficient, found.reward_kl_coefficient, found.reward_kl_per_token) == (0.0, 0.2, per_token)


def test_temperatures_of_a_trust_region_are_handed_on():
    sapo = policy_module.objective_settings(
        AlgorithmSection(name="grpo", trust_region="sapo", sapo={"positive": 1.2, "negative": 1.3})
    )
    assert (sapo.trust_region, sapo.sapo_positive, sapo.sapo_negative) == ("sapo", 1.2, 1.3)
    kimi = policy_module.objective_settings(AlgorithmSection(name="kimi", kimi={"tau": 0.7}))
    assert (kimi.trust_region, kimi.mirror_tau) == ("mirror", 0.7)


def test_options_for_transformer_engine_are_refused_without_it(model):
    shape = read_model_shape(model)
    name = sorted(policy_module.TRANSFORMER_ENGINE_ONLY)[0]
    with pytest.raises(ConfigError, match=rf"^actor\.megatron: got {name}; allowed: only with the layers of Transf"):
        policy_module.check_megatron_options(ActorSection(megatron={name: True}), shape)
    policy_module.check_megatron_options(ActorSection(megatron={name: False}), shape)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_size": "many"}, r"^actor\.megatron\.bucket_size: got 'many'; allowed: .*int.*; fix: correct it"),
        ({"recompute_granularity": "full"}, r"^actor\.megatron: got recompute_granularity; Megatron-core refuses: "),
        ({"decoupled_lr": "x"}, r"^actor\.megatron\.decoupled_lr: got 'x'"),
    ],
)
def test_megatron_looks_at_its_options_before_the_start(model, options, words):
    with pytest.raises(ConfigError, match=words):
        policy_module.check_megatron_options(ActorSection(megatron=options), read_model_shape(model))


@dataclass
class Upstream:
    """A configuration as Megatron's."""

    size: int = 1
    share: float = 0.5
    names: tuple[str, ...] = ()

    def __post_init__(self):
        assert self.size > 0, "too small"
        warnings.warn("something is deprecated", stacklevel=2)


def test_an_upstream_configuration_takes_what_fits_its_types():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compat.upstream_config(Upstream, {"size": 2, "share": 0.1}, {"share": 1, "names": ["a"]})
    assert (found.size, found.share, list(found.names)) == (2, 1, ["a"])
    with pytest.raises(AssertionError, match="too small"):  # ours, not the user's
        compat.upstream_config(Upstream, {"size": 0}, {})
    with pytest.raises(ConfigError, match=r"(?s)got size; Megatron-core refuses: too small.*; allowed: options"):
        compat.upstream_config(Upstream, {}, {"size": 0})
    with pytest.raises(ConfigError, match=r"actor\.megatron\.size: got '2'; allowed: .*; fix: correct it"):
        compat.upstream_config(Upstream, {}, {"size": "2"})


EXPERTS = {**CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}


def test_megatron_computes_what_the_checkpoint_says_and_nothing_of_its_own():
    shape = read_model_shape({**EXPERTS, "norm_topk_prob": False, "head_dim": 8})
    config = model.transformer_config(shape, Layout(), dtype="bf16")
    wanted = {
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": False,
        "batch_p2p_sync": False,
        "sequence_parallel": False,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_ffn_hidden_size": 16,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "recompute_granularity": None,
    }
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.finalize_model_grads_func is compat.finalize_summed_grads
    normalized = read_model_shape({**EXPERTS, "norm_topk_prob": True, "head_dim": 8})
    assert not model.transformer_config(normalized, Layout()).moe_router_pre_softmax


def test_routers_beside_an_engine_that_would_round_them_compute_in_fp64(monkeypatch):
    monkeypatch.setattr(model.device, "has_transformer_engine", lambda: True)
    shape = read_model_shape(EXPERTS)
    kinds = {grouped: model._expert_options(shape, grouped=grouped)["moe_router_dtype"] for grouped in (True, False)}
    assert kinds == {True: "fp32", False: "fp64"}


def test_sizes_of_the_layout_reach_megatron():
    shape = read_model_shape({**CONFIG, "num_hidden_layers": 4})
    layout = Layout(tensor=2, pipeline=2, context=2, virtual_pipeline=2)
    config = model.transformer_config(shape, layout, sequence_parallel=True, recompute="full")
    sizes = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size)
    assert sizes == (2, 2, 2) and config.virtual_pipeline_model_parallel_size == 2
    assert config.sequence_parallel and config.deallocate_pipeline_outputs
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    alone = model.transformer_config(shape, Layout(), sequence_parallel=True)
    assert not alone.sequence_parallel and alone.virtual_pipeline_model_parallel_size is None


def test_gradients_are_reduced_in_fp32_and_nothing_aborts_a_step():
    config = model.data_parallel_config(distributed_optimizer=False, options={})
    assert config.grad_reduce_in_fp32 and not config.overlap_grad_reduce
    assert not config.check_for_nan_in_grad and not config.use_distributed_optimizer
    assert model.data_parallel_config(distributed_optimizer=True, options={}).use_distributed_optimizer


def test_attention_without_bounds_of_sequences_is_refused():
    config = model.transformer_config(read_model_shape(CONFIG), Layout())
    attention = model.PackedAttention(config, 1, softmax_scale=0.5)
    with pytest.raises(ValueError, match=r"^PackedAttention takes packed sequences only: packed_seq_params was"):
        attention(*torch.zeros(3, 4, 2, 8))


def test_a_parameter_that_no_rule_names_is_refused(model):
    policy = policy_of(model, GRPO)
    policy.chunks[0].extra = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(ModelError, match=r"^parameter extra\.weight of the Megatron model has no Hugging Face count"):
        policy.shards()


def test_weights_come_out_as_they_went_in(model):
    policy, stored = policy_of(model, GRPO), load_file(model / "model.safetensors")
    exported = dict(policy.export())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    parameters = policy._parameters()
    assert [local.parameter for local, _ in policy.shards()] == parameters
    for (_, values), parameter in zip(policy.shards(), parameters, strict=True):
        assert torch.equal(values, parameter) and not values.requires_grad
        assert values.untyped_storage()._cdata != parameter.untyped_storage()._cdata, "of a storage that may be resized"
        assert values.data_ptr() == parameter.data_ptr()


def test_an_output_layer_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    save_random_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in dict(policy_of(tmp_path, GRPO).export())
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        policy_of(tmp_path, GRPO)


def test_training_starts_from_a_megatron_checkpoint_where_one_is_named(tmp_path, model, critic_model):
    policy_of(critic_model, GRPO).save(tmp_path)
    settings = PolicySettings(model, 4, 32, 1.0, 10, weights=tmp_path)
    arguments = settings, ActorSection(precision="fp32"), AlgorithmSection(name="ppo")
    policy, stored = policy_module.MegatronPolicy(*arguments), load_file(critic_model / "model.safetensors")
    for exported in (dict(policy.export()), dict(policy.export_critic())):
        assert torch.equal(exported["model.norm.weight"], stored["model.norm.weight"])


@pytest.mark.parametrize(
    ("data", "context", "tensor", "experts", "exports", "sends"),
    [
        (0, 0, 0, 0, True, True),
        (0, 0, 1, 1, True, False),
        (0, 1, 0, 1, False, False),
        (1, 0, 0, 1, False, False),
        (1, 0, 0, 0, True, False),
    ],
)
def test_who_takes_part_in_an_export(monkeypatch, data, context, tensor, experts, exports, sends):
    own = {"data_parallel_rank": data, "context_parallel_rank": context, "tensor_model_parallel_rank": tensor}
    ranks(monkeypatch, weights_module, **own, expert_data_parallel_rank=experts)
    assert (weights_module.exports_weights(), weights_module.sends_for_stage()) == (exports, sends)
