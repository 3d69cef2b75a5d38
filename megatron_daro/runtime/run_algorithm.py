"""The algorithm of a run, and what other options ask of it that it may not have. Imports torch, and no Ray."""

from __future__ import annotations

import re

from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.algo.weighting import Algorithm, make_algorithm
from megatron_daro.config import Config
from megatron_daro.config.base import changed
from megatron_daro.engine.own import one_batch_at_a_time
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.rollout.filling import FILLINGS


def algorithm_of(config: Config) -> Algorithm:
    """Return the driver's instance: it makes advantages and filters groups; every rank has one more, for the loss.

    Raises:
        ConfigError: no such algorithm, options that it does not take, or a run that asks more of it than it has.
    """
    arguments = config.algorithm.arguments(
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        environments=[one.name for one in config.environments],
    )
    try:
        algorithm = make_algorithm(**arguments)
        objective_settings(config.algorithm, algorithm)
    except AlgorithmError as error:
        option, field, fix = str(error).partition(":")[0], "algorithm", ""
        for section, given in (("options", config.algorithm.options), ("daro", changed(config.algorithm.daro))):
            if option in given:
                field, fix = f"algorithm.{section}", "; fix: correct or remove it"
                break
        path = re.sub(r"\b(correction|kl|sapo)_(?=\w+[,:])", r"\1.", str(error))  # what the objective calls its fields
        raise ConfigError(f"{field}.{path}{fix}") from error
    _refuse_what_it_has_not(config, algorithm)
    return algorithm


def _refuse_what_it_has_not(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError where other options do not go with its advantages or surrogate, or with a critic that it has
    not."""
    section, columns = config.algorithm, algorithm.token_columns
    option = "distill" if section.distill.urls else "turn_rewards" if section.turn_rewards else ""
    if option and (columns is not None or algorithm.weighs_by_advantage):
        has = "makes advantages per token itself" if columns is not None else "weighs each rollout by its one advantage"
        raise ConfigError(
            f"algorithm.{option}: got it with algorithm.name {section.name}, which {has}; allowed: one that does "
            "not; fix: set algorithm.name=grpo"
        )
    if section.turn_rewards and type(algorithm).advantages is not Algorithm.advantages:
        raise ConfigError(
            f"algorithm.turn_rewards: got true with algorithm.name {section.name}, another advantage than GRPO's; "
            "allowed: grpo, daro and others with it; fix: set algorithm.name=grpo, or turn_rewards=false"
        )
    own = algorithm.own_objective.get("trust_region", "")
    if own and section.trust_region not in ("clip", own):
        raise ConfigError(
            f"algorithm.trust_region: got {section.trust_region} with algorithm.name {section.name}, which has a "
            f"surrogate of its own ({own}); allowed: unset with it; fix: remove algorithm.trust_region"
        )
    if "values" in (columns or ()):
        return
    no_critic = f"but {section.name} has no critic (token_columns without values)"
    if section.kl.place == "token_reward":
        raise ConfigError(
            f"algorithm.kl.place: got token_reward, {no_critic}; allowed: loss or reward with it; fix: set "
            "algorithm.kl.place=reward"
        )
    if config.trainer.export_critic:
        raise ConfigError(
            f"trainer.export_critic: got true, {no_critic}; allowed: false with it; fix: set "
            "trainer.export_critic=false"
        )
    if given := changed(section.critic):
        raise ConfigError(
            f"algorithm.critic: got {', '.join(given)}, {no_critic}; allowed: only with an algorithm that has one; "
            "fix: remove them"
        )


def algorithm_remarks(config: Config, algorithm: Algorithm, *, generates: bool) -> list[str]:
    """Return what is allowed, but probably not meant, where that depends on the algorithm itself, or on the engine's
    class. Args: generates: false of a replay, for which the engine's class need not be there."""
    rollout, remarks = config.rollout, list(algorithm.remarks)
    if not generates:
        return remarks
    one_at_a_time = one_batch_at_a_time(config)
    finish_batch = rollout.finish_batch_with(one_batch_at_a_time=one_at_a_time)
    group_by_group = FILLINGS[finish_batch](rollout).group_by_group
    if one_at_a_time and group_by_group:
        remarks.append(
            f"rollout.finish_batch: got {finish_batch}; allowed: auto with engine {config.engine.kind}: else it "
            "generates one group after the other, and a run does not repeat; fix: set rollout.finish_batch=auto"
        )
    used = rollout.keeps_waiting or group_by_group
    if rollout.oversampling > 1 and len(algorithm.kept_bins) > algorithm.rollouts_per_prompt and not used:
        remarks.append(
            f"rollout.oversampling: got {rollout.oversampling:g}, but no group is filtered; allowed: 1 without a "
            "filter, since the surplus would be thrown away; fix: set rollout.oversampling=1, or "
            "algorithm.filter=pass_rate"
        )
    return remarks
