"""What sections say that no field holds: sizes, defaults that depend on others, what is handed to components."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_daro.config.actor import LOGPROB_TILES, ActorSection, OptimizerSection, resolved_expert_tensor
from megatron_daro.config.algorithm import AlgorithmSection, CriticSection, KlSection, LengthRewardSection
from megatron_daro.config.base import OneOf, filled
from megatron_daro.config.sections import (
    EngineSection,
    EnvironmentSection,
    RepetitionSection,
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
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 4, "sequence_parallel": False}, 1),
        ({"context_parallel": 3}, 6),
        ({"tensor_parallel": 4, "context_parallel": 3}, 24),
    ],
)
def test_micro_batches_are_padded_for_sequence_and_context_parallelism(sizes, multiple):
    assert ActorSection(**sizes).sequence_multiple == multiple


@pytest.mark.parametrize(
    ("precision", "dtype", "torch_name"),
    [("fp32", "fp32", "float32"), ("bf16", "bf16", "bfloat16"), ("fp8", "bf16", "bfloat16")],
)
def test_parameters_are_bf16_but_with_fp32(precision, dtype, torch_name):
    actor = ActorSection(precision=precision)
    assert (actor.dtype, actor.torch_dtype) == (dtype, torch_name)


def test_tiles_of_logits_are_those_that_were_timed():
    assert LOGPROB_TILES == {"cpu": (1024, 2048), "gpu": (4096, 8192)}


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
    common = {**run, "std": "none", "group_filter": "pass_rate"}
    given = {"std": "none", "filter": "pass_rate"}
    assert AlgorithmSection(name="grpo", **given).arguments(**run) == {"name": "grpo", **common}
    mgpo = AlgorithmSection(name="mgpo", mgpo={"strength": 2.0}, **given).arguments(**run)
    assert mgpo == {"name": "mgpo", **common, "strength": 2.0, "target": 0.5}
    own = AlgorithmSection(name="my:Own", options={"std": "x", "y": 1}, **given).arguments(**run)
    assert own == {"name": "my:Own", **common, "std": "x", "y": 1}
    both = AlgorithmSection(name="daro_ppo").arguments(**run)
    assert both["gae"] == AlgorithmSection().ppo.model_dump() and both["clamp"] == (0.1, 10.0)


@pytest.mark.parametrize(("name", "has"), [("ppo", True), ("daro_ppo", True), ("daro", False), ("my:Own", False)])
def test_two_algorithms_have_a_critic(name, has):
    assert AlgorithmSection(name=name).has_critic is has


def test_a_critic_has_an_optimizer_of_its_own_in_three_numbers():
    policy = OptimizerSection(learning_rate=1.0, weight_decay=0.5, schedule="cosine")
    critic = CriticSection(learning_rate=2.0, warmup_steps=3, grad_clip=4.0).optimizer_of(policy)
    own = {"learning_rate": 2.0, "warmup_steps": 3, "grad_clip": 4.0}
    assert critic.model_dump() == policy.model_dump() | own


@pytest.mark.parametrize(("step", "weight"), [(1, 0.0), (10, 0.0), (11, 0.5), (12, 1.0), (14, 2.0), (99, 2.0)])
def test_the_reward_for_length_is_faded_in(step, weight):
    assert LengthRewardSection(weight=2.0, start_step=10, fade_steps=4).weight_at(step) == weight


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
    assert (rollout.segments, rollout.batches_kept, rollout.keeps_unfinished) == (segments, kept, unfinished)


def test_batches_count_prompts_times_rollouts_and_optimizer_steps():
    rollout = RolloutSection(prompts_per_step=5, rollouts_per_prompt=3, oversampling=1.1)
    assert (rollout.batch_rollouts, rollout.prompts_requested) == (15, 6)
    assert TrainerSection(updates_per_batch=3, epochs_per_batch=2).steps_per_batch == 6


def test_a_stop_for_repetition_is_off_without_a_number_of_tokens():
    assert RepetitionSection().looked_for is None
    assert RepetitionSection(tokens=8, period=3).looked_for == (8, 3)


def test_a_run_has_its_models_below_its_directory():
    trainer = TrainerSection(run_dir=Path("runs/a"))
    assert (trainer.hf_dir, trainer.critic_dir) == (Path("runs/a/hf"), Path("runs/a/hf_critic"))
    with pytest.raises(AssertionError, match="make a Config with `resolve`"):
        filled(TrainerSection().run_dir)


def test_what_is_of_ones_own_has_a_colon():
    assert [EngineSection(kind=kind).is_own for kind in ("sglang", "my:Own")] == [False, True]
    assert [RewardSection(verifier=name).is_own for name in ("math", "my:Own")] == [False, True]
    kinds = ("single_turn", "my:Own", "verifiers:word")
    assert [EnvironmentSection(kind=kind).is_own for kind in kinds] == [False, True, True]
    assert [EnvironmentSection(kind=kind).of_verifiers for kind in kinds] == [False, False, True]


def test_an_engine_of_ones_own_gets_replicas_seed_and_its_options():
    engine = EngineSection(kind="my:Own", replicas=2, seed=3, options={"x": 1})
    assert engine.own_arguments == {"replicas": 2, "seed": 3, "x": 1}


def test_arguments_of_servers_may_be_spelled_with_hyphens():
    assert SGLangSection(arguments={"a-b-c": 1, "d_e": 2}).named_arguments == {"a_b_c": 1, "d_e": 2}


@pytest.mark.parametrize("name", ["a", "my.own:Class", "_m:_C2"])
def test_a_name_that_is_known_or_a_class_of_ones_own_is_taken(name):
    assert OneOf(("a", "b"))._checked(name) == name


@pytest.mark.parametrize("name", ["c", "2m:C", "m:", ":C", "m:C.d", "m:C d"])
def test_another_name_is_told_what_is_allowed(name):
    with pytest.raises(ValueError, match=r"^one of a, b, or module:Class of your own$"):
        OneOf(("a", "b"))._checked(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"warmup_steps": 2**31}, "integers below 2"),
        ({"weight_decay": 9e-31}, "0, or numbers of a size from 1e-30 to 1e30"),
        ({"betas": (0.9, 9e-31)}, "0, or numbers of a size"),
    ],
)
def test_numbers_that_fp32_or_c_cannot_hold_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        OptimizerSection(**options)


def test_the_largest_numbers_that_they_can_hold_are_taken():
    assert OptimizerSection(warmup_steps=2**31 - 1, weight_decay=1e-30).warmup_steps == 2**31 - 1
    assert TrainerSection(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize(("name", "fine"), [("é" * 127, True), ("é" * 128, False), ("a\nb", False), ("a b", True)])
def test_a_path_is_one_that_a_file_system_can_hold(name, fine):
    if fine:
        assert TrainerSection(run_dir=f"x/{name}").run_dir == Path("x", name)
    else:
        with pytest.raises(ValidationError, match="without control characters, each part of at most 255 bytes"):
            TrainerSection(run_dir=f"x/{name}")
