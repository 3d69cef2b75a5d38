"""Checks of a critic: whether there is one, and whether its model has the policy's tokenizer and fits the layout.

Called by checks.py with the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_daro.config.check_training import division_problems
from megatron_daro.config.model_shape import CRITIC_HEADS, ModelShape, read_model_shape
from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config
from megatron_daro.errors import ModelError


def critic_shape(config: Config, policy: ModelShape) -> ModelShape | None:
    """Return the shape of the critic; None for an algorithm of the package without one. Raises ModelError."""
    path = config.algorithm.critic.path
    if not config.algorithm.has_critic:
        return None
    return policy if path is None else read_model_shape(path, CRITIC_HEADS)


def critic(config: Config, policy: ModelShape | None) -> Iterator[Problem]:
    """Yield options of a critic that nothing would read, that contradict each other, or that name an unfit model."""
    section, trainer, field = config.algorithm, config.trainer, "algorithm.critic"
    if not (section.has_critic or ":" in section.name):
        if trainer.export_critic:
            got, fix = f"true with name {section.name}, which has no critic", "set trainer.export_critic=false"
            yield Problem("trainer.export_critic", got, "false without a critic", fix, also=("algorithm.name",))
        yield from _unread(config)
        return
    options = section.critic
    if options.value_clip is not None and trainer.steps_per_batch == 1:
        got = f"{options.value_clip:g} with one update per batch, before which no value has moved"
        also, fix = (
            ("trainer.updates_per_batch",),
            "set algorithm.critic.value_clip=null, or trainer.updates_per_batch=4",
        )
        yield Problem(f"{field}.value_clip", got, "unset with one update per batch", fix, also=also)
    if options.offload and trainer.replace_lost_ranks:
        got = "true with trainer.replace_lost_ranks, whose snapshots need both models on the GPUs"
        also, fix = ("trainer.replace_lost_ranks",), "set trainer.replace_lost_ranks=false"
        yield Problem(f"{field}.offload", got, "false with trainer.replace_lost_ranks", fix, also=also)
    if options.pretrain_steps >= trainer.steps:
        got = f"{options.pretrain_steps}, but the run has {trainer.steps} optimizer steps: the policy would never move"
        fix = "lower it or raise trainer.steps"
        yield Problem(f"{field}.pretrain_steps", got, f"below {trainer.steps}", fix, also=("trainer.steps",))
    if options.warmup_steps > trainer.steps:
        got = f"{options.warmup_steps}, but the run has {trainer.steps} optimizer steps"
        fix = "lower it or raise trainer.steps"
        yield Problem(f"{field}.warmup_steps", got, f"at most {trainer.steps}", fix, also=("trainer.steps",))
    if section.has_critic and section.ppo.bootstrap_truncated and config.rollout.max_response_tokens == 1:
        got = "true with answers of one token, whose last token is not trained then: nothing would be"
        also, fix = ("rollout.max_response_tokens",), "set algorithm.ppo.bootstrap_truncated=false"
        yield Problem("algorithm.ppo.bootstrap_truncated", got, "false with answers of one token", fix, also=also)
    if options.path is not None and policy is not None:
        yield from _model_problems(options.path, config, policy)


def _unread(config: Config) -> Iterator[Problem]:
    name = config.algorithm.name
    for part in ("ppo", "critic"):
        section = getattr(config.algorithm, part)
        given = [option for option, value in section if value != getattr(type(section)(), option)]
        if given:
            got, fix = (
                f"{', '.join(given)} with name {name}, which has no critic",
                "set algorithm.name=ppo or remove them",
            )
            yield Problem(
                f"algorithm.{part}", got, "only with an algorithm that has one", fix, also=("algorithm.name",)
            )


def _model_problems(path: Path, config: Config, policy: ModelShape) -> Iterator[Problem]:
    field, allowed, also = "algorithm.critic.path", "a model of the policy's tokenizer", ("model.path",)
    fix = "name such a model, or leave it unset: the critic then begins as the policy"
    try:
        shape = read_model_shape(path, CRITIC_HEADS)
    except ModelError as error:
        yield Problem(field, f"{str(path)!r}, which cannot be used ({error})", allowed, fix)
        return
    numbers, own = _numbers(path), _numbers(config.model.path)
    if numbers != own:
        yield Problem(field, f"{str(path)!r}, whose tokenizer has other tokens", allowed, fix, also=also)
    elif shape.vocab <= max(numbers.values()) if numbers else shape.vocab != policy.vocab:
        got = f"{str(path)!r} with an embedding of {shape.vocab} tokens (the policy: {policy.vocab})"
        yield Problem(field, got, allowed, fix, also=also)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_positions:
        got = f"{str(path)!r} with max_position_embeddings {shape.max_positions}"
        yield Problem(field, got, f"at least the {longest} tokens of a prompt and its response", fix, also=also)
    for problem in division_problems(config.actor, shape):
        got = f"{str(path)!r}, with which {problem.field} is {problem.got}"
        yield Problem(field, got, f"{problem.allowed} there", fix, also=(problem.field,))


def _numbers(path: Path) -> dict[str, int]:
    """Return the number of each token, as tokenizer.json has it; empty where it does not say it."""
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content.get("model", {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in order
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}
