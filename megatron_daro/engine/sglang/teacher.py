"""On-policy distillation: the log-probs that a teacher, on SGLang servers of its own, gives the policy's tokens.

Finished rollouts -> (this asks for the log-probs of their tokens) -> the same rollouts with `teacher_logprobs`.
An answer about other tokens, or a refused request, is an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_daro.backoff import backoff_s
from megatron_daro.config.algorithm import DistillSection
from megatron_daro.engine.sglang.client import SGLangClient, UnreachableError
from megatron_daro.engine.sglang.replies import BadAnswerError, read_given_logprobs
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.types import Rollout

_TRIES = 8
_REQUEST_S = 600.0
"""For one pass over one rollout's tokens, beside 31 others: far more than a server needs, and there are 8 tries."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_AT_ONCE = 32
"""Requests in flight at each server."""


class Teacher:
    """The servers of `algorithm.distill.urls`."""

    def __init__(self, section: DistillSection) -> None:
        """Connect to nothing."""
        self._clients = [SGLangClient(url) for url in section.urls]
        self._next = itertools.cycle([(client, asyncio.Semaphore(_AT_ONCE)) for client in self._clients])

    async def read(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with `teacher_logprobs`; those without a response unchanged. Raises as `logprobs`."""
        return await asyncio.gather(*map(self._read, rollouts))

    async def _read(self, rollout: Rollout) -> Rollout:
        if not rollout.response_length:
            return rollout
        return replace(rollout, teacher_logprobs=await self.logprobs(rollout))

    async def logprobs(self, rollout: Rollout) -> np.ndarray:
        """Return float32 [R], the log-probs of the response's tokens at temperature 1; 0 for tokens not trained on.

        Raises:
            EngineError: a server refused, no server answered in 8 tries, or an answer is about other tokens.
        """
        tokens, ends = rollout.tokens.tolist(), np.cumsum(rollout.contexts or [len(rollout.tokens)]).tolist()
        parts = [await self._of_sequence(tokens[: ends[0]], rollout.prompt_length)]
        for start, end in pairwise(ends):  # the first token of a later sequence has no log-prob
            parts += [np.zeros(1, np.float32), await self._of_sequence(tokens[start:end], 1)]
        return np.where(rollout.loss_mask == 1, np.concatenate(parts), np.float32(0))

    async def _of_sequence(self, tokens: list[int], first: int) -> np.ndarray:
        """Return float32, the log-probs of `tokens[first:]`. Raises as `logprobs`."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
        }
        try:
            return read_given_logprobs(await self._asked(body), tokens[first:])
        except BadAnswerError as error:
            raise EngineError(
                f"algorithm.distill.urls: {error}; allowed: SGLang servers, none behind a router that changes requests"
            ) from error

    async def close(self) -> None:
        """Drop all connections."""
        for client in self._clients:
            await client.close()

    async def _asked(self, body: Mapping[str, object]) -> object:
        """Return the answer of a server; each try asks the next server."""
        for attempt in range(_TRIES):
            client, places = next(self._next)
            try:
                async with places:
                    return await client.post("/generate", body, timeout_s=_REQUEST_S)
            except RefusedError as error:
                raise EngineError(
                    f"algorithm.distill.urls: {error}; allowed: a teacher with the policy's tokenizer and room for "
                    "prompt and response; fix: start it with a longer context, or take another"
                ) from error
            except UnreachableError as error:
                if attempt + 1 == _TRIES:
                    raise EngineError(
                        f"algorithm.distill.urls: no answer in {_TRIES} tries; the last: {error}"
                    ) from error
                await asyncio.sleep(backoff_s(attempt, first_s=_PAUSE_S, longest_s=_LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")
