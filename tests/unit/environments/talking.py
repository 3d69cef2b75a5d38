"""One conversation on one event loop, with a model that says what a function returns: no threads, no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from megatron_daro.config import RewardSection
from megatron_daro.environments.environment import Conversation, ConversationSettings
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams, Verdict

PROMPT = Prompt("p", "4", "unit", text="2+2?", tokens=(7, 8))


class Model:
    """What a conversation asks. says: request -> ids of the answer, or a Rollout."""

    def __init__(self, says: Callable, *, decode: Callable = lambda ids: " ".join(map(str, ids))) -> None:
        self.says, self.decode, self.asked, self.verified = says, decode, [], []

    async def ask(self, request: GroupRequest, tokens: np.ndarray) -> Rollout:
        self.asked.append(request)
        await asyncio.sleep(0)
        said = self.says(request)
        return said if isinstance(said, Rollout) else self.answer(request, said)

    def answer(self, request: GroupRequest, ids: list[int], reason: str | None = None, **others) -> Rollout:
        most = request.sampling.max_new_tokens
        reason, ids = reason or ("length" if len(ids) > most else "stop"), list(ids)[:most]
        place = request.prompt.id, request.group_id, request.attempt, request.indices[0]
        tokens = np.array([*request.prompt.tokens, *ids], np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        ones, start = np.ones(len(ids), np.uint8), len(tokens) - len(ids)
        return Rollout(*place, tokens, start, ones, logprobs, reason, 5, self.decode(ids), **others)

    def stand_back(self) -> None:
        """Nobody waits for it."""

    def come_back(self) -> None:
        """Nobody waits for it."""

    async def verify(self, text: str, prompt: Prompt) -> Verdict:
        self.verified.append((text, prompt))
        return Verdict(text == prompt.answer, 1.0, "asked")


def conversation(
    model: Model, *, prompt=PROMPT, room=12, index=0, weights=None, vocabulary=100, attempt=0, partial=None
):
    """One that nothing was said in."""
    request = GroupRequest(3, attempt, prompt, (0, 1), SamplingParams(max_new_tokens=room), partial=partial or {})
    shared = ConversationSettings(
        "environment.kind: m:Own", model.decode, vocabulary, RewardSection(incorrect_reward=-1.0), weights or {}
    )
    return Conversation(request, index, model, shared)


def hold(model: Model, talk: Callable, **options) -> Rollout:
    """Hold one whose environment is `await talk(conversation)`."""

    class Own:
        async def rollout(self, prompt, conversation):
            return await talk(conversation)

    async def held():
        return await conversation(model, **options).hold(Own())

    return asyncio.run(held())
