"""Rules of `algorithm`: the loss, DARO, length penalties, a critic, a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron_daro.config.base import filled
from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_files import token_numbers
from megatron_daro.config.model_shape import CRITIC_HEADS, ModelShape, read_model_shape
from megatron_daro.config.precision import Surroundings, fp8_problems
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.rules.layers import layers
from megatron_daro.config.rules.layout import division
from megatron_daro.config.sections import Config
from megatron_daro.errors import ModelError

STEPS_OF_A_BATCH = "trainer.minibatches_per_batch trainer.epochs_per_batch"


def loss(config: Config) -> Iterator[Problem]:
    """Yield options of the loss that contradict each other."""
    section, region = config.algorithm, config.algorithm.trust_region
    kl, correction = section.kl, section.correction
    if region == "reinforce" and config.trainer.epochs_per_batch > 1:
        allowed = "1 with trust_region reinforce, which has no ratio to the old policy"
        fix = "set algorithm.trust_region=clip"
        yield wrong(config, "trainer.epochs_per_batch", allowed, fix, beside="algorithm.trust_region")
    if section.traits and section.traits.own_surrogate and region != "clip":
        field, allowed = "algorithm.trust_region", f"unset with name {section.name}, which has a surrogate of its own"
        yield wrong(config, field, allowed, f"remove {field}", beside="algorithm.name")
    if section.old_logprobs == "forward" and config.trainer.steps_per_batch > 1:
        allowed = "recompute or rollout with several optimizer steps per batch"
        fix = "set algorithm.old_logprobs=recompute"
        yield wrong(config, "algorithm.old_logprobs", allowed, fix, beside=STEPS_OF_A_BATCH)
    if correction.kind == "mis" and not correction.low <= 1 <= correction.high:
        name, allowed, fix = ("low", "at most", "0.5") if correction.low > 1 else ("high", "at least", "2")
        field, allowed = f"algorithm.correction.{name}", f"{allowed} 1 with kind mis: a ratio of 1 must stay"
        yield wrong(config, field, allowed, f"set {field}={fix}")
    if correction.kind != "none" and section.old_logprobs == "rollout":
        allowed = "none with old_logprobs rollout, whose ratio to the engine is always 1"
        fix = "set algorithm.old_logprobs=recompute"
        yield wrong(config, "algorithm.correction.kind", allowed, fix, beside="algorithm.old_logprobs")
    if correction.kind != "none" and correction.level == "token" and region == "gspo":
        allowed = (
            "sequence with trust_region gspo: a sequence has one ratio there, and would have a weight for each token"
        )
        fix, beside = "set algorithm.correction.level=sequence", "algorithm.trust_region algorithm.correction.kind"
        yield wrong(config, "algorithm.correction.level", allowed, fix, beside=beside)
    if kl.place == "token_reward" and not may_have_critic(config):
        allowed = "loss or reward: without a critic all tokens of a rollout have one advantage"
        yield wrong(config, "algorithm.kl.place", allowed, "set algorithm.kl.place=reward", beside="algorithm.name")


def daro(config: Config) -> Iterator[Problem]:
    """Yield options of DARO's weights that are out of range or contradict each other."""
    section = config.algorithm.daro
    if not may_learn_weights(config):
        return
    low, high = section.clamp
    if not 0 < low <= 1 <= high:
        allowed = "[lower, upper] with 0 < lower <= 1 <= upper: weights start at 1"
        yield wrong(config, "algorithm.daro.clamp", allowed, "set algorithm.daro.clamp=[0.1,10]")
    if section.parameter == "linear" and section.half_life is not None:
        allowed, fix = "log with a half-life: w itself is not learnt there", "set algorithm.daro.parameter=log"
        yield wrong(config, "algorithm.daro.parameter", allowed, fix, beside="algorithm.daro.half_life")
    if section.weights_by == "environment_pass_rate" and len(config.environments) < 2:
        allowed, fix = "environment_pass_rate with at least two environments", "set algorithm.daro.weights_by=pass_rate"
        yield wrong(config, "algorithm.daro.weights_by", allowed, fix, beside="environments")


def overlong(config: Config) -> Iterator[Problem]:
    """Yield a penalty zone for long answers that no answer reaches, or that is wider than max_tokens."""
    section, longest = config.algorithm.overlong, config.rollout.max_response_tokens
    if not section.penalizes:
        return
    max_tokens, cache_tokens = filled(section.max_tokens), filled(section.cache_tokens)
    if max_tokens - cache_tokens >= longest:
        allowed = f"a penalty that begins below the longest answer, not at {max_tokens - cache_tokens} tokens"
        fix = f"set algorithm.overlong.max_tokens={longest}"
        beside = "rollout.max_response_tokens algorithm.overlong.cache_tokens"
        yield wrong(config, "algorithm.overlong.max_tokens", allowed, fix, beside=beside)
    if cache_tokens > max_tokens:
        allowed = "at most algorithm.overlong.max_tokens"
        fix = f"set algorithm.overlong.cache_tokens={max(1, max_tokens // 5)}"
        beside = "algorithm.overlong.max_tokens rollout.max_response_tokens"
        yield wrong(config, "algorithm.overlong.cache_tokens", allowed, fix, beside=beside)


def critic(
    config: Config, policy: ModelShape | None, hardware: Hardware, surroundings: Surroundings
) -> Iterator[Problem]:
    """Yield options of a critic that contradict each other, or that name an unfit model."""
    section, options, trainer = config.algorithm, config.algorithm.critic, config.trainer
    if not may_have_critic(config):
        return
    if options.value_clip is not None and trainer.steps_per_batch == 1:
        allowed = "unset with one optimizer step per batch, before which no value has moved"
        fix = "set algorithm.critic.value_clip=null, or trainer.minibatches_per_batch=4"
        yield wrong(config, "algorithm.critic.value_clip", allowed, fix, beside="trainer.minibatches_per_batch")
    if options.offload and trainer.replace_lost_ranks:
        allowed = "false with replace_lost_ranks, whose snapshots need both models on the GPUs"
        fix = "set trainer.replace_lost_ranks=false"
        yield wrong(config, "algorithm.critic.offload", allowed, fix, beside="trainer.replace_lost_ranks")
    if options.pretrain_steps >= trainer.steps:
        allowed = f"below {trainer.steps}: the policy would never move"
        fix = "lower it or raise trainer.steps"
        yield wrong(config, "algorithm.critic.pretrain_steps", allowed, fix, beside="trainer.steps")
    if options.warmup_steps > trainer.steps:
        allowed, fix = f"at most {trainer.steps}", "lower it or raise trainer.steps"
        yield wrong(config, "algorithm.critic.warmup_steps", allowed, fix, beside="trainer.steps")
    bootstrap = "algorithm.options.bootstrap_truncated"
    if section.options.get("bootstrap_truncated") is True and config.rollout.max_response_tokens == 1:
        allowed = "false with answers of one token: the last token has advantage 0 then, so nothing would be trained"
        yield wrong(config, bootstrap, allowed, f"set {bootstrap}=false", beside="rollout.max_response_tokens")
    if options.path is not None and policy is not None:
        yield from _critic_model(options.path, config, policy, hardware, surroundings)


def may_have_critic(config: Config) -> bool:
    """Return whether the algorithm trains a critic; True for an algorithm of the user's, which may train one."""
    traits = config.algorithm.traits
    return traits is None or traits.critic


def may_learn_weights(config: Config) -> bool:
    """Return whether the algorithm learns DARO's weights; True for an algorithm of the user's, which may learn them."""
    traits = config.algorithm.traits
    return traits is None or traits.difficulty_weights


def _critic_model(
    path: Path, config: Config, policy: ModelShape, hardware: Hardware, surroundings: Surroundings
) -> Iterator[Problem]:
    """Yield why a checkpoint cannot be the critic of this policy."""
    field, allowed = "algorithm.critic.path", "a model of the policy's tokenizer"
    fix = "name such a model, or leave it unset: the critic then begins as the policy"
    try:
        shape = read_model_shape(path, CRITIC_HEADS)
    except ModelError as error:
        yield Problem(field, f"{str(path)!r}, which cannot be used ({error})", allowed, fix)
        return
    numbers = token_numbers(path)
    if numbers != token_numbers(config.model.path):
        yield Problem(field, f"{str(path)!r}, whose tokenizer has other tokens", allowed, fix, also=("model.path",))
    elif shape.vocab <= max(numbers.values()) if numbers else shape.vocab != policy.vocab:
        got = f"{str(path)!r} with an embedding of {shape.vocab} tokens (the policy: {policy.vocab})"
        yield Problem(field, got, allowed, fix, also=("model.path",))
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_positions:
        got = f"{str(path)!r} with max_position_embeddings {shape.max_positions}"
        allowed = f"at least the {longest} tokens of a prompt and its response"
        yield Problem(field, got, allowed, fix, also=("model.path",))
    on_ranks = partial(_on_ranks, config, hardware, surroundings)
    told = {problem.field for problem in on_ranks(policy)}
    for problem in on_ranks(shape):
        if problem.field not in told:
            got = f"{str(path)!r}, with which {problem.field} is {problem.got}"
            fix = f"{problem.fix}, or leave {field} unset: the critic then begins as the policy"
            yield Problem(field, got, f"with this critic, {problem.allowed}", fix, also=(problem.field,))


def _on_ranks(config: Config, hardware: Hardware, surroundings: Surroundings, shape: ModelShape) -> Iterator[Problem]:
    """Yield why ranks cannot compute this model, which no server has to load."""
    yield from division(config.actor, shape)
    yield from layers(config, shape, hardware, surroundings.megatron, served=False)
    yield from fp8_problems(config.actor, shape, surroundings)


def distill(config: Config) -> Iterator[Problem]:
    """Yield options that cannot be combined with distillation, or with advantages per turn."""
    section, field = config.algorithm.distill, "algorithm.distill"
    if config.algorithm.kl.in_reward and (section.urls or config.algorithm.turn_rewards):
        allowed = "a KL term in the loss, or none: one in the reward would not reach advantages of tokens"
        fix, got = "set algorithm.kl.place=loss", "a teacher with a KL term in the reward"
        if section.urls:
            yield wrong(config, field, allowed, fix, beside="algorithm.kl.place", got=got)
        else:
            yield wrong(config, "algorithm.turn_rewards", allowed, fix, beside="algorithm.kl.place")
    if not section.urls:
        return
    if both := sorted(set(section.urls) & set(config.engine.sglang.urls)):
        got = f"{', '.join(both)}, which is a server of the policy"
        allowed = "servers of the teacher"
        yield wrong(config, f"{field}.urls", allowed, "start one", beside="engine.sglang.urls", got=got)
    if config.rollout.temperature != 1:
        got = f"a teacher with rollout.temperature {config.rollout.temperature:g}"
        allowed, fix = "1: its log-probs are of temperature 1", "set rollout.temperature=1"
        yield wrong(config, field, allowed, fix, beside="rollout.temperature", got=got)
    if config.algorithm.has_critic:
        got = f"a teacher with algorithm.name {config.algorithm.name}, which makes advantages per token itself"
        allowed, fix = "an algorithm with one advantage for a rollout", "set algorithm.name=grpo"
        yield wrong(config, field, allowed, fix, beside="algorithm.name", got=got)
    if not section.coefficient and not section.reward_weight:
        got, fix = "coefficient and reward_weight 0", f"set {field}.coefficient=1"
        yield Problem(field, got, "one of them above 0", fix)
