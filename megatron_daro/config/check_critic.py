"""Checks of a critic: whether there is one, and whether it is of the policy's shape and tokenizer.

Called by checks.py with the others, and by the ranks before they build one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_daro.config.model_shape import CRITIC_HEADS, ModelShape, read_model_shape
from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config
from megatron_daro.errors import ModelError

_SIZES = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts")


def different_sizes(critic: ModelShape, policy: ModelShape) -> str:
    """Return what of a critic's shape is not the policy's, for a message; empty where nothing is."""
    return ", ".join(
        f"{name} {getattr(critic, name)} (the policy: {getattr(policy, name)})"
        for name in _SIZES
        if getattr(critic, name) != getattr(policy, name)
    )


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
    if options.value_clip is not None and trainer.updates_per_batch == 1:
        got = f"{options.value_clip:g} with one update per batch, before which no value has moved"
        also, fix = (
            ("trainer.updates_per_batch",),
            "set algorithm.critic.value_clip=null, or trainer.updates_per_batch=4",
        )
        yield Problem(f"{field}.value_clip", got, "unset with one update per batch", fix, also=also)
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
        yield from _model_problems(options.path, config.model.path, policy)


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


def _model_problems(path: Path, policy_path: Path, policy: ModelShape) -> Iterator[Problem]:
    field, allowed, also = "algorithm.critic.path", "a model of the policy's shape and tokenizer", ("model.path",)
    fix = "name such a model, or leave it unset: the critic then begins as the policy"
    try:
        shape = read_model_shape(path, CRITIC_HEADS)
    except ModelError as error:
        yield Problem(field, f"{str(path)!r}, which cannot be used ({error})", allowed, fix, also=also)
        return
    if others := different_sizes(shape, policy):
        yield Problem(field, f"{str(path)!r} with {others}", allowed, fix, also=also)
    elif _vocabulary(path) != _vocabulary(policy_path):
        yield Problem(field, f"{str(path)!r}, whose tokenizer has other tokens", allowed, fix, also=also)


def _vocabulary(path: Path) -> object:
    """Return what the numbers of the tokens mean; nothing where tokenizer.json does not say it."""
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        return content.get("model", {}).get("vocab"), content.get("added_tokens")
    except (OSError, ValueError, AttributeError):
        return None
