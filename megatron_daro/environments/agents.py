"""Agents as environments: they speak OpenAI's API with a base URL and a key, and report their outcome at the end.

Prompt -> a session of the endpoint (agent_endpoint.py) -> the agent, a coroutine of the user's in the environments'
thread or a command in a worker process (agent_worker.py) -> its outcome -> Verdict. An agent that fails costs its
rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.environments.agent_endpoint import AgentEndpoint
from megatron_daro.environments.environment import Conversation, ConversationFailedError
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.proxies import past_proxies
from megatron_daro.sandbox import AGENT_PORT
from megatron_daro.types import Prompt, Verdict
from megatron_daro.worker_pool.pool import WorkerPool
from megatron_daro.worker_pool.process import Program

_FOREVER_S = 1e6
"""Limit of a pool, never reached: the conversation counts an agent's own time, and ends it."""
_OUTCOME: Mapping[str, tuple[type, ...]] = {
    "reward": (int, float),
    "correct": (bool,),
    "rewards": (Mapping,),
    "answer": (str,),
}
"""What an agent's outcome may hold; other keys are ignored."""


class Running(Protocol):
    """What runs agents, one for each conversation."""

    async def run(self, prompt: Prompt, conversation: Conversation, base_url: str, key: str) -> object:
        """Return the outcome that the agent reports, None if it reports none. Raises ConversationFailedError,
        RolloutError."""
        ...

    async def close(self) -> None:
        """End what it started. May be called twice."""
        ...


class AgentConversations:
    """The Environment of agents."""

    failure_reasons = ("crash", "memory", "no_call", "outcome")
    pool_restarts = 0

    def __init__(self, endpoint: AgentEndpoint, running: Running, correct_reward: float) -> None:
        """Start nothing. correct_reward: a reward of at least this says by itself that the problem is solved."""
        self._endpoint, self._running, self._correct_reward = endpoint, running, correct_reward

    async def rollout(self, prompt: Prompt, conversation: Conversation) -> Verdict:
        """Run one agent. Raises ConversationFailedError, RolloutError."""
        url = await self._endpoint.url()
        try:
            with self._endpoint.session(conversation) as key:
                outcome = await self._running.run(prompt, conversation, url, key)
            if not conversation.generated:
                raise ConversationFailedError("never asked the model", "no_call")
            return await self._verdict(conversation, outcome)
        except ConversationFailedError:
            if conversation.out_of_room and conversation.generated:  # it was told that there is no room, and failed
                return conversation.verdict(False, "out_of_room")
            raise

    async def close(self) -> None:
        """End all agents."""
        await self._running.close()

    async def _verdict(self, conversation: Conversation, outcome: object) -> Verdict:
        if isinstance(outcome, Verdict):
            return outcome
        if isinstance(outcome, str):
            outcome = {"answer": outcome}
        elif isinstance(outcome, bool):
            outcome = {"correct": outcome}
        elif isinstance(outcome, int | float):
            outcome = {"reward": outcome}
        said = _checked({} if outcome is None else outcome)
        if "reward" in said or "rewards" in said:
            conversation.report(said.get("reward"), said.get("rewards"))
        if "correct" in said or ("reward" in said and "answer" not in said):
            correct = said["correct"] if "correct" in said else said["reward"] >= self._correct_reward
            return conversation.verdict(correct, "match" if correct else "no_match")
        judged = await conversation.verify(said.get("answer", conversation.last_text))
        return conversation.verdict(judged.correct, judged.reason)


def _checked(outcome: object) -> Mapping[str, Any]:
    """Return an outcome that can be trained on. Raises ConversationFailedError."""
    if not isinstance(outcome, Mapping):
        raise ConversationFailedError(
            f"said {outcome!r:.80} at its end; allowed: an object with {', '.join(_OUTCOME)}", "outcome"
        )
    for name in _OUTCOME.keys() & outcome.keys():
        value = outcome[name]
        if not isinstance(value, _OUTCOME[name]) or (isinstance(value, bool) and name != "correct"):
            kinds = " or ".join(kind.__name__ for kind in _OUTCOME[name])
            raise ConversationFailedError(f"said {name} {value!r:.80} at its end; allowed: {kinds}", "outcome")
    numbers = [outcome.get("reward", 0.0), *outcome.get("rewards", {}).values()]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in numbers):
        raise ConversationFailedError(
            f"said the rewards {numbers!r:.80} at its end; allowed: finite numbers", "outcome"
        )
    return outcome


def agent_pool(section: EnvironmentSection, workers: int, correct_reward: float = 1.0) -> WorkerPool:
    """Return the pool of processes that run commands, or tasks of verifiers. Starts nothing."""
    module, settings, needs = "agent_worker", {}, "a worker needs about 30, what the agent needs comes on top"
    if section.of_verifiers:
        module, needs = "verifiers_worker", "verifiers needs about 300, what the taskset needs comes on top"
        settings = {"kind": section.kind, "options": section.options, "weighted": bool(section.reward_weights)}
    settings |= {"correct_reward": correct_reward}
    path = f"megatron_daro.environments.{module}"
    program = Program(path, settings, "agent", "environment", needs, RolloutError, once=True)
    return WorkerPool(program, workers, _FOREVER_S, section.memory_mib)


class CommandAgents:
    """Agents that are commands, or tasks of the package verifiers, `environment.workers` at once."""

    def __init__(self, section: EnvironmentSection, correct_reward: float = 1.0, socket: str = "") -> None:
        """Start nothing. socket: of the endpoint, for agents in a sandbox."""
        self._section, self._socket = section, socket
        self._pool = agent_pool(section, section.workers, correct_reward)
        self._places = asyncio.Semaphore(section.workers)
        self._started: asyncio.Future[None] | None = None

    async def run(self, prompt: Prompt, conversation: Conversation, base_url: str, key: str) -> object:
        """Run the command. Its outcome is the file REWARD_JSON, else its last line, if that is a JSON object with a key
        of `_OUTCOME`."""
        with conversation.standing_back():
            await self._start()
            await self._places.acquire()
        try:
            reply = await self._pool.ask(
                {
                    "command": list(self._section.command),
                    "endpoint": self._socket,
                    "environment": {
                        **os.environ,
                        "OPENAI_BASE_URL": f"http://127.0.0.1:{AGENT_PORT}/v1" if self._socket else base_url,
                        "OPENAI_API_KEY": key,
                        **past_proxies(os.environ, self._section.host),
                    },
                    "problem": json.dumps({**_fields(prompt), "options": self._section.options}),
                }
            )
        finally:
            self._places.release()
        if reply["reason"] != "ok":
            limit = f"more than memory_mib={self._section.memory_mib} MiB"
            why = {"memory": limit, "failed": str(reply.get("error"))}.get(reply["reason"], reply["reason"])
            raise ConversationFailedError(f"an agent: {why}", "memory" if reply["reason"] == "memory" else "crash")
        if reply["status"]:
            raise ConversationFailedError(
                f"an agent with exit status {reply['status']}; it said: {reply['said']}", "crash"
            )
        if (written := reply.get("file")) is not None:
            try:
                return json.loads(written)
            except ValueError:
                raise ConversationFailedError(
                    f"wrote {written!r:.80} into REWARD_JSON; allowed: JSON", "outcome"
                ) from None
        try:
            outcome = json.loads(reply["line"])
        except ValueError:
            return None
        return outcome if isinstance(outcome, dict) and {*outcome} & {*_OUTCOME} else None

    async def close(self) -> None:
        """End the workers."""
        await asyncio.to_thread(self._pool.close)

    async def _start(self) -> None:
        """Start the workers once, for all callers."""
        if self._started is None:
            self._started = asyncio.ensure_future(asyncio.to_thread(self._pool.start))
        await asyncio.shield(self._started)


def _fields(prompt: Prompt) -> dict[str, Any]:
    fields = asdict(replace(prompt, tokens=()))
    del fields["tokens"]
    return {**fields, "statement": prompt.statement}


class FunctionAgents:
    """Agents that are coroutines of the user's, all at once."""

    def __init__(self, section: EnvironmentSection, function: Callable[..., Any]) -> None:
        """Start nothing. Raises ConfigError: the package openai is not installed."""
        self._section, self._function = section, function
        self._openai = import_openai(section)
        self._client: Any = None

    async def run(self, prompt: Prompt, conversation: Conversation, base_url: str, key: str) -> object:
        """Await the coroutine."""
        if self._client is None:
            openai = self._openai
            transport = getattr(openai, "DefaultAsyncHttpx2Client", None) or openai.DefaultAsyncHttpxClient
            limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None)
            http = transport(trust_env=False, limits=limits, timeout=None)
            self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, http_client=http, max_retries=0)
        try:
            return await self._function(prompt, self._client.with_options(api_key=key), **self._section.options)
        except Exception as error:  # the border of the user's code: it costs one conversation, which is counted
            raise ConversationFailedError(f"an agent: {type(error).__name__}: {error}", "crash") from error

    async def close(self) -> None:
        """Do nothing: what is left ends with the environments' thread."""


def import_openai(section: EnvironmentSection) -> Any:
    """Return the package openai. Raises ConfigError: it is not installed."""
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            f"environment.kind: {section.kind} is a coroutine that gets a client of the package openai, which is not "
            'installed; fix: pip install "megatron_daro[agents]"'
        ) from error
    return openai


def check_function(section: EnvironmentSection, function: Callable[..., Any]) -> None:
    """Check a coroutine function. Raises ConfigError: it does not take a problem, a client and the options; or openai
    is not installed."""
    try:
        inspect.signature(function).bind(None, None, **section.options)
    except TypeError as error:
        raise ConfigError(
            f"environment.kind: {section.kind}: {error}; allowed: async def agent(problem, client, **options); fix: "
            "correct the function or environment.options"
        ) from None
    import_openai(section)
