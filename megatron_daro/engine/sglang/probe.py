"""The probe of a weight update: a server's log-probs of a fixed text, and a few tokens that it samples after the
beginning of that text.

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

# Tokens that a server samples for a probe; few, so that they cost next to nothing.
PROBE_TOKENS = 16
# Tokens of the fixed text; each is one more place where a change of the weights shows.
_GIVEN_TOKENS = 64
# The first of these tokens, which are the prompt for the sampled ones.
_PROMPT_TOKENS = 8


def probe_text(vocabulary: int, *, longest: int) -> tuple[int, ...]:
    """Return the token ids of the fixed text: scattered over the vocabulary, the same in every run.

    Args:
        vocabulary: number of token ids. longest: tokens that a prompt may have.
    """
    count = max(2, min(_GIVEN_TOKENS, longest))
    return tuple(int(token) for token in np.random.default_rng(0).integers(0, vocabulary, count))


def probe_call(
    tokens: Sequence[int], name: str, *, temperature: float, adapter: str = ""
) -> tuple[GroupRequest, dict[str, Any]]:
    """Return (the request for the sampled tokens, the body of /generate for all of a probe).

    Args:
        tokens: the fixed text. name: of the request; also its cache key, so that it never uses a cached prefix.
        temperature: of the sampled tokens. adapter: to be probed; the fixed text is then also read without it.
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
    """Return (the fixed text as a response to its first token, the tokens sampled after its beginning, float32 [R]
    log-probs of the fixed text without the adapter; None without adapter). The first two have log-probs.

    Raises:
        BadAnswerError: the answer has another shape, or lacks tokens.
    """
    both: list[Any] = answers if isinstance(answers, list) else [answers]
    loaded = 0 if len(both) > 2 else None  # beside an adapter, a server still has the weights it loaded
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
