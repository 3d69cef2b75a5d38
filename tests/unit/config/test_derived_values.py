"""What sections say that no field holds: sizes, defaults that depend on others, what is handed to components."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_daro.config.actor import ActorSection, OptimizerSection, resolved_expert_tensor
from megatron_daro.config.algorithm import AlgorithmSection, CriticSection, DaroSection, KlSection
from megatron_daro.config.sections import (
    EngineSection,
    EnvironmentSection,
    RewardSection,
    RolloutSection,
    SGLangSection,
    TrainerSection,
)


def test_an_actor_has_the_product_of_its_sizes():
    actor = ActorSection(tensor_parallel=2, pipeline_parallel=3, context_parallel=5, data_parallel=7, expert_parallel=2)
    assert (actor.model_parallel_size, actor.world_size) == (30, 210)
    assert (actor.expert_tensor_size, actor.expert_group_size) == (1, 2)
    assert ActorSection(expert_parallel=2, expert_tensor_parallel=3).expert_group_size == 6
    assert [resolved_expert_tensor(*sizes) for sizes in ((None, 4, 1), (None, 4, 2), (2, 4, 2))] == [4, 1, 2]


@pytest.mark.parametrize(
    ("options", "multiples"),
    [
        ({}, (1, 1)),
        ({"tensor_parallel": 4}, (1, 4)),
        ({"tensor_parallel": 4, "sequence_parallel": False}, (1, 1)),
        ({"tensor_parallel": 2, "sequence_parallel": False, "context_parallel": 3}, (6, 6)),
        ({"tensor_parallel": 4, "context_parallel": 3}, (6, 12)),
        ({"tensor_parallel": 8, "context_parallel": 2}, (4, 16)),
        ({"fp8_recipe": "blockwise"}, (1, 1)),
        ({"precision": "fp8"}, (1, 32)),
        ({"precision": "fp8", "fp8_recipe": "blockwise", "tensor_parallel": 2, "context_parallel": 3}, (6, 768)),
    ],
)
def test_micro_batches_are_padded_for_sequence_and_context_parallelism_and_fp8(options, multiples):
    assert ActorSection(**options).pack_multiples == multiples


@pytest.mark.parametrize(
    ("precision", "dtype", "torch_name"),
    [("fp32", "fp32", "float32"), ("bf16", "bf16", "bfloat16"), ("fp8", "bf16", "bfloat16")],
)
def test_parameters_are_bf16_but_with_fp32(precision, dtype, torch_name):
    actor = ActorSection(precision=precision)
    assert (actor.dtype, actor.torch_dtype) == (dtype, torch_name)


@pytest.mark.parametrize(
    ("options", "columns", "passes"),
    [
        ({}, (), ()),
        ({"old_logprobs": "recompute"}, (), ("old_logprobs",)),
        ({"old_logprobs": "forward"}, ("old_logprobs",), ("old_logprobs",)),
        ({"old_logprobs": "rollout"}, ("old_logprobs",), ()),
        ({"kl": {"coefficient": 0.1}}, (), ("ref_logprobs",)),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, (), ("old_logprobs", "ref_logprobs")),
        ({"kl": {"coefficient": 0.0, "place": "reward"}}, (), ()),
        ({}, ("values", "ref_logprobs"), ("ref_logprobs", "values")),
    ],
)
def test_only_passes_that_something_reads_are_made_over_a_batch(options, columns, passes):
    assert AlgorithmSection(**options).passes(columns) == passes


@pytest.mark.parametrize(
    ("place", "coefficient", "within"), [("loss", 1, False), ("reward", 0, False), ("reward", 1, True)]
)
def test_a_kl_term_is_in_the_reward_with_a_coefficient_only(place, coefficient, within):
    assert KlSection(place=place, coefficient=coefficient).in_reward is within


def test_an_algorithm_gets_its_own_options_and_those_of_the_run():
    run = {"rollouts_per_prompt": 4, "max_response_tokens": 9}
    given = {"std": "none", "filter": "pass_rate"}
    mgpo = AlgorithmSection(name="mgpo", options={"strength": 2.0}, **given).arguments(**run)
    common = {**run, "std": "none", "group_filter": "pass_rate", "daro": {}}
    assert mgpo == {"name": "mgpo", **common, "options": {"strength": 2.0}}
    section = {"daro": {"clamp": (0.5, 2.0), "weights_by": "environment_pass_rate"}}
    own = AlgorithmSection(name="my:Own", **section).arguments(**run, environments=["a", "b"])
    assert own["daro"] == {"clamp": (0.5, 2.0), "environments": ("a", "b")}, "what is set"
    daro = AlgorithmSection(name="daro", **section).arguments(**run, environments=["a", "b"])
    assert daro["daro"] == DaroSection().model_dump(exclude={"weights_by"}) | own["daro"], "all"


@pytest.mark.parametrize(("name", "has"), [("ppo", True), ("daro_ppo", True), ("daro", False), ("my:Own", False)])
def test_two_algorithms_have_a_critic(name, has):
    assert AlgorithmSection(name=name).has_critic is has


def test_a_critic_has_an_optimizer_of_its_own_in_three_numbers():
    policy = OptimizerSection(learning_rate=1.0, weight_decay=0.5, schedule="cosine")
    critic = CriticSection(learning_rate=2.0, warmup_steps=3, grad_clip=4.0).optimizer_of(policy)
    own = {"learning_rate": 2.0, "warmup_steps": 3, "grad_clip": 4.0}
    assert critic.model_dump() == policy.model_dump() | own


@pytest.mark.parametrize(
    ("options", "segments", "kept", "unfinished"),
    [
        ({"max_response_tokens": 100}, 1, 0, False),
        ({"max_response_tokens": 100, "keep_surplus": True}, 1, 1, True),
        ({"max_response_tokens": 100, "segment_tokens": 100}, 1, 1, True),
        ({"max_response_tokens": 101, "segment_tokens": 50}, 3, 3, True),
    ],
)
def test_a_group_may_go_on_over_its_segments_or_one_more_batch(options, segments, kept, unfinished):
    rollout = RolloutSection(**options)
    assert (rollout.segments, rollout.batches_kept, rollout.keeps_waiting) == (segments, kept, unfinished)


def test_batches_count_prompts_times_rollouts_and_optimizer_steps():
    rollout = RolloutSection(prompts_per_batch=5, rollouts_per_prompt=3, oversampling=1.1)
    assert (rollout.batch_rollouts, rollout.prompts_requested) == (15, 6)
    assert TrainerSection(minibatches_per_batch=3, epochs_per_batch=2).steps_per_batch == 6


def test_a_run_has_its_models_below_its_directory():
    trainer = TrainerSection(run_dir=Path("runs/a"))
    assert (trainer.hf_dir, trainer.critic_dir) == (Path("runs/a/hf"), Path("runs/a/hf_critic"))


def test_what_is_of_ones_own_has_a_colon():
    assert [EngineSection(kind=kind).is_own for kind in ("sglang", "my:Own")] == [False, True]
    assert [RewardSection(verifier=name).is_own for name in ("math", "my:Own")] == [False, True]
    kinds = ("single_turn", "my:Own", "verifiers:some-one/reverse-text@0.1.2")
    assert [EnvironmentSection(kind=kind).has_turns for kind in kinds] == [False, True, True]
    assert [EnvironmentSection(kind=kind).of_verifiers for kind in kinds] == [False, False, True]


def test_an_engine_of_ones_own_gets_replicas_seed_and_its_options():
    engine = EngineSection(kind="my:Own", replicas=2, seed=3, options={"x": 1})
    assert engine.own_arguments == {"replicas": 2, "seed": 3, "x": 1}


def test_arguments_of_servers_may_be_spelled_with_hyphens():
    assert SGLangSection(arguments={"a-b-c": 1, "d_e": 2}).named_arguments == {"a_b_c": 1, "d_e": 2}


@pytest.mark.parametrize(
    ("finish_batch", "one", "resolved"),
    [("auto", True, "all"), ("auto", False, "enough"), ("all", False, "all"), ("enough", True, "enough")],
)
def test_whether_a_batch_ends_early_follows_from_the_engine_unless_it_is_said(finish_batch, one, resolved):
    assert RolloutSection(finish_batch=finish_batch).finish_batch_with(one_batch_at_a_time=one) == resolved


@pytest.mark.parametrize(
    ("max_staleness", "keep_surplus", "ahead"), [(0, False, 0), (2, False, 2), (1, True, 0), (3, True, 2)]
)
def test_what_is_kept_costs_a_batch_of_running_ahead(max_staleness, keep_surplus, ahead):
    assert RolloutSection(max_staleness=max_staleness, keep_surplus=keep_surplus).batches_ahead == ahead
    segments = {"segment_tokens": 1000, "max_response_tokens": 2001}  # three batches
    assert RolloutSection(max_staleness=max_staleness + 3, keep_surplus=keep_surplus, **segments).batches_ahead == (
        max_staleness
    )
