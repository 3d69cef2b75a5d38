"""Checks of on-policy distillation: `algorithm.distill`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.algorithm import DistillSection
from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config

_FIELD = "algorithm.distill"


def distill(config: Config) -> Iterator[Problem]:
    """Yield options that nothing would read, and what a teacher does not go with."""
    section, rollout = config.algorithm.distill, config.rollout
    if (section.urls or config.algorithm.turn_rewards) and config.algorithm.kl.in_reward:
        field = _FIELD if section.urls else "algorithm.turn_rewards"
        got = "advantages of tokens, which a KL term in the reward would not reach"
        fix = "set algorithm.kl.place=loss"
        yield Problem(field, got, "a KL term in the loss, or none", fix, also=("algorithm.kl.place",))
    if not section.urls:
        unread = [n for n in DistillSection.model_fields if getattr(section, n) != getattr(DistillSection(), n)]
        if unread:
            got = f"{', '.join(unread)} without urls"
            yield Problem(_FIELD, got, "options with a teacher only", f"set {_FIELD}.urls, or remove them")
        return
    if len(set(section.urls)) < len(section.urls):
        yield Problem(f"{_FIELD}.urls", "a URL twice", "each server once", "remove the repetition")
    both = set(section.urls) & set(config.engine.sglang.urls)
    if both:
        got = f"{', '.join(sorted(both))}, which is a server of the policy"
        yield Problem(f"{_FIELD}.urls", got, "servers of the teacher", "start one", also=("engine.sglang.urls",))
    if rollout.temperature != 1:
        got = f"a teacher with rollout.temperature {rollout.temperature:g}"
        allowed = "1: its log-probs are of temperature 1"
        yield Problem(_FIELD, got, allowed, "set rollout.temperature=1", also=("rollout.temperature",))
    if config.algorithm.has_critic:
        got = f"a teacher with algorithm.name {config.algorithm.name}, which makes advantages per token itself"
        fix = "set algorithm.name=grpo"
        yield Problem(_FIELD, got, "an algorithm with one advantage for a rollout", fix, also=("algorithm.name",))
    if not section.coefficient and not section.reward_weight:
        got = "coefficient and reward_weight 0"
        yield Problem(_FIELD, got, "one of them above 0", f"set {_FIELD}.coefficient=1")
