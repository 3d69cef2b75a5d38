"""The objective of a configuration, options that are refused before the start, and the weights of a rank."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from single_rank import GRPO, policy_of, save_random_model

from megatron_daro.actor import translation
from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.actor.policy import MegatronPolicy
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("world")


def objective(section):
    """Of a rank whose algorithm the section names."""
    algorithm = make_algorithm(**section.arguments(rollouts_per_prompt=2, max_response_tokens=8))
    return objective_settings(section, algorithm)


def test_the_objective_is_that_of_the_section():
    options = {"clip_low": 0.11, "clip_high": 0.12, "dual_clip": 3.5, "entropy_coefficient": 0.13}
    correction = {"kind": "tis", "cap": 1.5, "low": 0.4, "high": 0.7, "level": "sequence"}
    section = AlgorithmSection(
        name="grpo", kl={"coefficient": 0.2, "mean": "rollouts", "estimator": "k2"}, correction=correction, **options
    )
    found = objective(section)
    assert {name: getattr(found, name) for name in options} == options
    assert {n: getattr(found, f"correction_{n}") for n in ("cap", "low", "high", "level")} | {
        "kind": found.correction
    } == correction
    assert (found.kl_coefficient, found.kl_mean, found.kl_estimator) == (0.2, "rollouts", "k2")
    assert (found.reward_kl_coefficient, found.reward_kl_per_token, found.trust_region) == (0.0, False, "clip")


@pytest.mark.parametrize(("place", "per_token"), [("reward", False), ("token_reward", True)])
def test_kl_in_the_reward_is_none_in_the_loss(place, per_token):
    section = AlgorithmSection(name="ppo", kl={"coefficient": 0.2, "place": place, "estimator": "k1"})
    found = objective(section)
    assert (found.kl_coefficient, found.reward_kl_coefficient, found.reward_kl_per_token) == (0.0, 0.2, per_token)


def test_temperatures_of_a_trust_region_are_handed_on():
    sapo = objective(AlgorithmSection(name="grpo", trust_region="sapo", sapo={"positive": 1.2, "negative": 1.3}))
    assert (sapo.trust_region, sapo.sapo_positive, sapo.sapo_negative) == ("sapo", 1.2, 1.3)
    kimi = objective(AlgorithmSection(name="kimi", options={"tau": 0.7}))
    assert (kimi.trust_region, kimi.mirror_tau) == ("mirror", 0.7)


def test_options_for_transformer_engine_are_refused_without_it(model):
    shape = read_model_shape(model)
    name = sorted(translation.TRANSFORMER_ENGINE_ONLY)[0]
    with pytest.raises(ConfigError, match=rf"actor\.megatron: got {name}"):
        translation.check_megatron_options(ActorSection(megatron={name: True}), shape)
    translation.check_megatron_options(ActorSection(megatron={name: False}), shape)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_size": "many"}, r"actor\.megatron\.bucket_size: got 'many'"),
        ({"recompute_granularity": "full"}, r"actor\.megatron: got recompute_granularity"),
    ],
)
def test_megatron_looks_at_its_options_before_the_start(model, options, words):
    with pytest.raises(ConfigError, match=words):
        translation.check_megatron_options(ActorSection(megatron=options), read_model_shape(model))


def test_gradients_of_a_model_in_bf16_are_summed_in_fp32(model):
    policy = policy_of(model, GRPO, precision="bf16")
    dtypes = {(p.dtype, p.main_grad.dtype) for chunk in policy.chunks for p in chunk.parameters()}
    assert dtypes == {(torch.bfloat16, torch.float32)}


def test_weights_come_out_as_they_went_in(model):
    policy, stored = policy_of(model, GRPO), load_file(model / "model.safetensors")
    exported = dict(policy.export())
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    for (_, values), parameter in zip(policy.weight_shards(), parameters, strict=True):
        assert values.data_ptr() == parameter.data_ptr() and values.shape == parameter.shape
        assert not values.requires_grad


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
    written = policy_of(critic_model, GRPO)
    written.start_save(tmp_path)
    written.finish_save()
    settings = PolicySettings(model, 4, 32, 1.0, 10, weights=tmp_path)
    arguments = settings, ActorSection(precision="fp32"), AlgorithmSection(name="ppo")
    policy, stored = MegatronPolicy(*arguments), load_file(critic_model / "model.safetensors")
    for exported in (dict(policy.export()), dict(policy.export_critic())):
        assert torch.equal(exported["model.norm.weight"], stored["model.norm.weight"])
