"""Checks of answers in segments (`rollout.segment_tokens`) and of the stop for repetition."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config


def segments(config: Config) -> Iterator[Problem]:
    """Yield what answers in segments and a stop for repetition do not go with."""
    rollout, field = config.rollout, "rollout.segment_tokens"
    if rollout.segment_tokens is not None:
        if config.engine.is_own or config.environment.is_own:
            kind = "engine.kind" if config.engine.is_own else "environment.kind"
            got = f"{rollout.segment_tokens} with {kind} of your own, whose answers begin anew and do not go on"
            yield Problem(field, got, "unset there", f"set {field}=null", also=(kind,))
        needed = rollout.batches_kept
        if rollout.max_staleness < needed:
            got = f"{rollout.max_staleness}, but an answer of {rollout.max_response_tokens} tokens takes "
            got += f"{rollout.segments} batches of segment_tokens {rollout.segment_tokens}"
            also = (field, "rollout.max_response_tokens")
            fix = f"set rollout.max_staleness={needed}"
            yield Problem("rollout.max_staleness", got, f"at least {needed}: else it is dropped", fix, also=also)
    span, period = rollout.repetition.tokens, rollout.repetition.period
    if span is not None and 2 * period > span:
        got, fix = f"{period} with tokens {span}", f"set rollout.repetition.period={span // 2}"
        yield Problem("rollout.repetition.period", got, "at most half of rollout.repetition.tokens", fix)
    if config.algorithm.repetition_penalty and span is None:
        got = f"{config.algorithm.repetition_penalty:g} without rollout.repetition.tokens: no answer would have it"
        fix = "set rollout.repetition.tokens=256, or algorithm.repetition_penalty=0"
        yield Problem("algorithm.repetition_penalty", got, "0, or a stop for repetition", fix)
