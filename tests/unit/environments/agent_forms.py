"""Agents around an engine that says what a function returns, over real HTTP: what was asked, and what is trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import chat_tokenizers
import numpy as np
import pytest
from loop_fakes import FakeProgress, FakeScorer

from megatron_daro.config import EnvironmentSection, RewardSection
from megatron_daro.data.stops import until_repeated
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.environments.agent_endpoint import AgentEndpoint
from megatron_daro.environments.agents import AgentConversations, CommandAgents
from megatron_daro.environments.conversations import Conversations
from megatron_daro.environments.environment import ConversationFailedError
from megatron_daro.environments.rendering import Turns
from megatron_daro.reward import build_verifier
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams


def tokenizer(folder, template=chat_tokenizers.TOOLS):
    """One of bytes, whose template has tools."""
    chat_tokenizers.save(folder)
    made = load_tokenizer(folder)
    made.chat_template = template
    return made


class Engine:
    """says: (text that the model read, request) -> what it says, without the end. answers: all that it gave, each with
    new weights. before: awaited first."""

    def __init__(self, tokens, says: Callable[[str, GroupRequest], str], before=None) -> None:
        self._tokens, self.says, self._before = tokens, says, before
        self.answers: list[Rollout] = []
        self.asked: list[GroupRequest] = []

    async def generate(self, requests):
        if self._before:
            await self._before(self, requests)
        for request in requests:
            self.asked.append(request)
            await asyncio.sleep(0)
            read = self._tokens.decode(list(request.prompt.tokens), skip_special_tokens=False)
            yield tuple([self._answer(request, index, read) for index in request.indices])

    def _answer(self, request: GroupRequest, index: int, read: str) -> Rollout:
        ids = self._tokens.encode(self.says(read, request), add_special_tokens=False) + [self._tokens.eos_token_id]
        most, asked = request.sampling.max_new_tokens, request.prompt.tokens
        reason, ids = ("length" if len(ids) > most else "stop"), ids[:most]
        number = len(self.answers) + 1
        answer = Rollout(
            request.prompt.id,
            request.group_id,
            request.attempt,
            index,
            np.array([*asked, *ids], np.int32),
            len(asked),
            np.ones(len(ids), np.uint8),
            -(np.arange(len(ids), dtype=np.float32) + 1000 * number) / 1000,
            reason,
            number,
            response_decoder(self._tokens)(ids),
        )
        self.answers.append(until_repeated(answer, request.sampling.repetition, response_decoder(self._tokens)))
        return self.answers[-1]

    async def abort(self, group_ids=None) -> None: ...


class Api:
    """What an agent without a client of OpenAI's does. base_url, key: of its session."""

    def __init__(self, base_url: str, key: str, http: aiohttp.ClientSession) -> None:
        self.base_url, self.key, self._http = base_url, key, http

    async def post(self, body: object, key: str | None = None, path: str = "/chat/completions") -> tuple[int, dict]:
        data = body if isinstance(body, bytes | str) else json.dumps(body)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with self._http.post(self.base_url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def say(self, messages: list, **others) -> dict:
        """Return the message of the first choice."""
        status, body = await self.post({"model": "policy", "messages": messages, **others})
        assert status == 200, body
        return body["choices"][0]["message"]


class Exact:
    """A scorer that is the verifier `exact`."""

    async def score_async(self, pairs):
        return [build_verifier("exact").verify(text, gold) for text, gold, _ in pairs]


class Agents:
    """Runs `await agent(problem, api)`. wrong: what it asserts in vain, which costs its rollout alone."""

    def __init__(self, agent) -> None:
        self.agent, self.apis = agent, []
        self.wrong: list[BaseException] = []

    async def run(self, prompt, conversation, base_url, key):
        async with aiohttp.ClientSession() as http:
            self.apis.append(Api(base_url, key, http))
            try:
                return await self.agent(prompt, self.apis[-1])
            except RuntimeError as error:
                raise ConversationFailedError(str(error), "crash") from error
            except (AssertionError, pytest.fail.Exception) as error:
                self.wrong.append(error)
                raise

    async def close(self) -> None: ...


def run(
    tokens,
    agent,
    says,
    *,
    indices=(0, 1),
    answer="easy",
    room=2000,
    repetition=None,
    together=True,
    before=None,
    socket="",
    scorer=None,
    **section,
):
    """Hold the conversations of one group.

    Args:
        agent: a coroutine function of problem and `Api`, or programs. says: as of `Engine`.

    Returns:
        The group's rollouts, the engine, counts, and what a person was told.

    Raises:
        AssertionError: the agent's own.
    """
    engine = Engine(tokens, says, before)
    section = EnvironmentSection(kind="agent", **{"command": ("agent",), **section})
    running = agent if isinstance(agent, CommandAgents) else Agents(agent)
    progress = FakeProgress()
    turns = Turns(tokens, chat=True)
    endpoint = AgentEndpoint(turns, progress.warn, section.max_turn_tokens, section.host, socket)
    environment = AgentConversations(endpoint, running, 1.0)
    conversations = Conversations(
        section,
        environment,
        engine,
        scorer or FakeScorer(),
        reward=RewardSection(incorrect_reward=-1.0),
        decode=response_decoder(tokens),
        vocabulary=len(tokens),
        together=together,
        notices=progress,
    )
    first = tokens.encode("<|im_start|>", add_special_tokens=False)
    prompt = Prompt("p", answer, "unit", text="6*7?", tokens=tuple(first))
    request = GroupRequest(3, 0, prompt, indices, SamplingParams(max_new_tokens=room, repetition=repetition))

    async def held():
        try:
            async with asyncio.timeout(120):
                return [group async for group in conversations.generate([request])]
        finally:
            await conversations.close()

    [rollouts] = asyncio.run(held())
    for error in getattr(running, "wrong", ()):
        raise error
    return rollouts, engine, conversations.counters(), progress


def answers_of(rollout: Rollout) -> list[tuple]:
    """What the model read before each answer of a rollout, and the answer's ids, log-probs and weight version, as it
    would be trained: from the loss mask and the sequences that the columns stand for."""
    lengths = rollout.contexts or (len(rollout.tokens),)
    pad = rollout.prompt_length
    mask = np.concatenate([np.zeros(pad, np.uint8), rollout.loss_mask])
    logprobs = np.concatenate([np.zeros(pad, np.float32), rollout.logprobs])
    versions = [0] * pad + [version for version, count in rollout.version_spans for _ in range(count)]
    found, start = [], 0
    for length in lengths:
        at = slice(start, start + length)
        tokens, trained = rollout.tokens[at].tolist(), mask[at].tolist()
        assert not trained[0], "nothing predicts the first token of a sequence"
        begins = [i for i in range(1, length) if trained[i] and not trained[i - 1]]
        for begin in begins:
            end = next((i for i in range(begin, length) if not trained[i]), length)
            part = slice(begin, end)
            (version,) = {*versions[start + begin : start + end]}
            found.append((tuple(tokens[:begin]), tuple(tokens[part]), logprobs[at][part].tolist(), version))
        start += length
    return found


def sampled(engine: Engine, index: int) -> list[tuple]:
    """The same, as the engine sampled it."""
    return [
        (
            tuple(one.tokens[: one.prompt_length].tolist()),
            tuple(one.tokens[one.prompt_length :].tolist()),
            one.logprobs.tolist(),
            one.weight_version,
        )
        for one in engine.answers
        if one.index == index
    ]


def assert_exact(rollouts, engine) -> None:
    """Each sampled token is trained once, behind what the model had read, with its log-prob and weight version."""
    for rollout in rollouts:
        assert sorted(answers_of(rollout)) == sorted(sampled(engine, rollout.index))
        assert rollout.generated_length == rollout.loss_mask.sum()
