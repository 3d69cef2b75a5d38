"""The probe of a weight update: a fixed text whose log-probs a server tells, and a few tokens that it samples after it.

The policy scores both; sync/check.py compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_daro.engine.sglang.replies import BadAnswerError, read_given_logprobs, rollouts_of
from megatron_daro.engine.sglang.request import call_of
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams

# Tokens that a server samples for a probe; few enough to cost nothing.
PROBE_TOKENS = 16
# Tokens that a probe gives; each is one more place where a step of the weights shows.
_GIVEN_TOKENS = 64
# Of these, the prompt of those that are sampled.
_PROMPT_TOKENS = 8


def probe_text(vocabulary: int, *, longest: int) -> tuple[int, ...]:
    """Token ids of the given text of probes: scattered over the vocabulary, the same in every run.

    Args:
        vocabulary: number of token ids. longest: tokens that a prompt may have.
    """
    count = max(2, min(_GIVEN_TOKENS, longest))
    return tuple(int(token) for token in np.random.default_rng(0).integers(0, vocabulary, count))


def probe_call(
    tokens: Sequence[int], name: str, *, temperature: float, adapter: str = ""
) -> tuple[GroupRequest, dict[str, Any]]:
    """Return (what is sampled, the body of /generate) of a probe: log-probs of given tokens, and of some sampled
    after them.

    Args:
        tokens: the given text. name: of the request; also its cache key, so that no prefix is ever found for it.
        temperature: of the sampled tokens. adapter: that is probed; the given tokens are read without it, too.
    """
    prompt = Prompt(id="probe", answer="", source="", tokens=tuple(tokens[:_PROMPT_TOKENS]))
    request = GroupRequest(-1, 0, prompt, (0,), SamplingParams(temperature, 1.0, PROBE_TOKENS))
    body = {**call_of(request, name, name).body, "logprob_start_len": 0}
    inputs = [list(prompt.tokens), list(tokens)]
    if adapter:
        return request, {**body, "input_ids": [*inputs, list(tokens)], "lora_path": [adapter, adapter, None]}
    return request, {**body, "input_ids": inputs}


def probe_rollouts(
    request: GroupRequest, given: Sequence[int], answers: object, vocabulary: int | None
) -> tuple[Rollout, Rollout, np.ndarray | None]:
    """Return (the given text as the response to its first token, the tokens sampled after its beginning), with
    log-probs, and float32 [R] those of the given text without the adapter, where there is one.

    Raises:
        BadAnswerError: the answer has another shape, or lacks tokens.
    """
    both: list[Any] = answers if isinstance(answers, list) else [answers]
    loaded = 0 if len(both) > 2 else None  # with an adapter, the server's own weights are those of its files
    (sampled,) = rollouts_of(request, both[:1], version=0, loaded=loaded, decode=lambda ids: "", vocabulary=vocabulary)
    if sampled.response_length != PROBE_TOKENS:
        raise BadAnswerError(f"asked for {PROBE_TOKENS} tokens, got {sampled.response_length}")
    logprobs = read_given_logprobs(both[:2][-1], given[1:])
    base = read_given_logprobs(both[2], given[1:]) if len(both) > 2 else None
    fixed = replace(
        sampled,
        tokens=np.asarray(given, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.ones(len(logprobs), dtype=np.uint8),
        logprobs=logprobs,
    )
    return fixed, sampled, base
