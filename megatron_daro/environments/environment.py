"""One conversation of the model with an environment, which runs in worker processes (stepping.py) or is an agent
(agents.py).

Prompt -> `Conversation`, in which the model is asked and shown tokens -> checked -> Rollout with its verdict. Tokens go
in and out as ids, and a conversation holds all columns itself, so that they cannot be misaligned. conversations.py runs
many at once.
"""

from __future__ import annotations

import asyncio
import math
import operator
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_daro.config.sections import RewardSection
from megatron_daro.data.templates import verified_text
from megatron_daro.environments.context import Context, joined
from megatron_daro.errors import RolloutError
from megatron_daro.reward.base import verdict_fault
from megatron_daro.thinking import opens_thinking
from megatron_daro.types import FinishReason, GroupRequest, Prompt, Rollout, SamplingParams, TurnReport, Verdict

_REWARD_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
_LONGEST_TAG = 32
"""The most tokens of a tag that begins thinking, with the space after it."""
_REWARD_NAMES = "letters, digits, '_', '.' and '-', at most 64, beginning with a letter or '_'"


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model said in one turn.

    tokens: ids, a stop token that was sampled included. text: decoded, for reading only. finish_reason: "length" or
    "repetition" where the turn was cut. logprobs: of each token, natural log.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()


class OutOfRoomError(RolloutError):
    """What was to be added does not fit into rollout.max_response_tokens.

    If an environment does not catch it, the conversation ends as truncated and counts as wrong, "out_of_room"; if the
    model has not answered yet, it is thrown away as failed.
    """


class ConversationFailedError(Exception):
    """A step or an agent failed; the conversation is thrown away. reason: a word, for counts; "timeout": it took longer
    than environment.step_timeout_s."""

    def __init__(self, message: str, reason: str = "step") -> None:
        super().__init__(message)
        self.reason = reason


class Environment(Protocol):
    """Holds conversations: one object holds all of them, many at once on one event loop."""

    @property
    def failure_reasons(self) -> tuple[str, ...]:
        """Reasons of ConversationFailedError that have counters of their own."""
        ...

    @property
    def pool_restarts(self) -> int:
        """Pools of nodes that were lost and started again."""
        ...

    async def close(self) -> None:
        """End what it started. May be called twice."""
        ...

    async def rollout(self, prompt: Prompt, conversation: Conversation, /) -> Verdict:
        """Hold one conversation and judge it.

        For a run that repeats exactly, what it does must depend on its arguments alone. It may be cancelled at any
        `await`. If it raises or takes too long, the conversation is thrown away, counted and begun again; but a
        DaroError other than OutOfRoomError ends the run.

        Args:
            prompt: the problem; its tokens are the first of the conversation. conversation: with nothing said yet.

        Returns: `correct` decides the pass rate; `reward`, any finite number, the advantage; `reason` a short word.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """What every conversation of an environment shares. title: its name in messages. decode: ids -> text. vocabulary:
    token ids are below it. reward_weights: name of a reward -> factor; empty: all factors are 1.
    """

    title: str
    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    reward: RewardSection
    reward_weights: Mapping[str, float]


class Asking(Protocol):
    """What a conversation asks for; called and awaited on the environment's event loop."""

    def ask(self, request: GroupRequest, tokens: np.ndarray) -> Awaitable[Rollout]:
        """Return the engine's answer to a request for one rollout, finish reason "abort" where there is none.

        Args:
            tokens: int32, those of the request's prompt.
        """
        ...

    def verify(self, text: str, prompt: Prompt) -> Awaitable[Verdict]:
        """Return the verifier's verdict."""
        ...

    def stand_back(self) -> None:
        """Keep others from waiting for this conversation, which asks for nothing before `come_back`."""
        ...

    def come_back(self) -> None:
        """Let others wait for this conversation again."""
        ...


class Conversation:
    """One rollout in the making, from its prompt on. Its methods are called on the environment's event loop, `ended`
    and `own_s` also on the run's."""

    def __init__(self, request: GroupRequest, index: int, call: Asking, shared: ConversationSettings) -> None:
        """Begin with the prompt alone. Made by `Conversations`."""
        self._request, self._index, self._call, self._shared = request, index, call, shared
        self._first = self._last = Context(request.prompt.tokens)
        self._contexts = [self._first]
        self._asked = self._reserved = self._away = 0
        self._settled = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[Any] | None = None
        self._own_s, self._since, self._answered_s = 0.0, 0.0, 0.0
        self.last_text = ""
        """The last answer as a verifier reads it: with the <think> that the model read before it."""
        self._rewards: dict[str, float] = {}
        self._rewarded = False
        self.fault: RolloutError | None = None
        self.aborted = self.timed_out = False
        self._cut = self._repeats = False

    @property
    def group_id(self) -> int:
        """The group that it belongs to."""
        return self._request.group_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the first context: the prompt's and all since."""
        return tuple(self._first.tokens.tolist())

    @property
    def last_token(self) -> int:
        """The last of `tokens`."""
        return int(self._first.tokens[-1])

    @property
    def room(self) -> int:
        """Tokens that still fit: rollout.max_response_tokens less those generated and observed."""
        return self._request.sampling.max_new_tokens - sum(context.length for context in self._contexts)

    @property
    def request(self) -> GroupRequest:
        """What was asked for; its sampling is the run's."""
        return self._request

    @property
    def out_of_room(self) -> bool:
        """Whether something has not fit since the last answer, or the last answer was cut because it took
        all the room."""
        return self._cut

    def first_context(self) -> Context:
        """Return the context that begins with the prompt's tokens."""
        return self._first

    async def generate(self, max_tokens: int | None = None) -> Completion:
        """Let the model go on from all tokens so far.

        Args:
            max_tokens: most tokens of this turn, at least 1; None: what there is room for.

        Raises:
            OutOfRoomError: there is no room for a token.
        """
        if self._first.busy or self._closed:
            raise self.refuse("generate was called", "one call at a time, before rollout returns")
        if max_tokens is not None and max_tokens < 1:
            raise self.refuse(f"generate got max_tokens {max_tokens}", "at least 1")
        if self.room < 1:
            self._cut = True
            raise OutOfRoomError(f"no room for an answer: {self._limit()}")
        most = self.room if max_tokens is None else min(max_tokens, self.room)
        sampling = replace(self._request.sampling, max_new_tokens=most)
        return self._taken(self._first, await self._ask(self._first, self._first.tokens, sampling))

    async def answer(
        self,
        context: Context,
        shown: Sequence[int],
        sampling: SamplingParams,
        *,
        trained: bool = True,
        seed: int | None = None,
    ) -> Completion:
        """Show the model tokens at the end of a context, and let it go on there. Several calls may be under way at
        once.

        Args:
            context: the first one, or a new `Context()`, which joins the rollout once the model has answered in it.
            shown: token ids; they are kept only if an answer comes. sampling: max_new_tokens is the most that the
                answer may have. trained: whether the answer is trained. seed: names its random numbers; None: the
                number of the turn does.

        Raises:
            OutOfRoomError: there is no room for them and a token.
        """
        context.busy = True
        try:
            while (free := self.room - self._reserved - len(shown)) < 1:
                if not self._reserved or self.room - len(shown) < 1:
                    self._cut = True
                    raise OutOfRoomError(f"no room for {len(shown)} tokens and an answer: {self._limit()}")
                self._settled.clear()
                with self.uncounted():  # others have reserved all the room for now
                    await self._settled.wait()
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, free))
            tokens = np.concatenate([context.tokens, np.array(shown, dtype=np.int32)])
            reserved = len(shown) + sampling.max_new_tokens
            self._reserved += reserved
            try:
                answer = await self._ask(context, tokens, sampling, seed)
            finally:
                self._reserved -= reserved
                self._settled.set()
            if self._closed:
                raise asyncio.CancelledError("the conversation has ended")
            context.observed += shown
            if context not in self._contexts:
                self._contexts.append(context)
            if not trained:
                answer = replace(answer, loss_mask=np.zeros_like(answer.loss_mask))
            return self._taken(context, answer)
        finally:
            context.busy = False

    async def _ask(
        self, context: Context, tokens: np.ndarray, sampling: SamplingParams, seed: int | None = None
    ) -> Rollout:
        """Return the engine's answer to these tokens."""
        request = replace(
            self._request,
            turn=self._asked,
            answer_seed=seed,
            prompt=replace(self._request.prompt, tokens=tuple(tokens.tolist())),
            indices=(self._index,),
            sampling=sampling,
            partial={},
        )
        self._count_seconds()
        self._asked += 1
        context.busy = True
        try:
            with self.uncounted():
                return await self._call.ask(request, tokens)
        finally:
            context.busy = False

    def _taken(self, context: Context, answer: Rollout) -> Completion:
        context.take(answer)
        self._last = context
        if answer.finish_reason == "abort" or self.aborted:
            self.aborted = True
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
            raise asyncio.CancelledError("the engine gave this conversation up")
        self._cut = answer.finish_reason == "length" and self.room < 1
        self._repeats = answer.finish_reason == "repetition"
        read = self._shared.decode(answer.tokens[: answer.prompt_length][-_LONGEST_TAG:].tolist())
        self.last_text = verified_text(answer.text, None, opens_thinking=opens_thinking(read))
        logprobs = tuple(answer.logprobs.tolist())
        ids = answer.tokens[answer.prompt_length :].tolist()
        return Completion(tuple(ids), answer.text, answer.finish_reason, logprobs)

    def observe(self, tokens: Sequence[int]) -> None:
        """Show the model tokens of the environment. They are not trained; the next `generate` goes on after them.

        Raises:
            OutOfRoomError: more than `room`; nothing was added.
            RolloutError: they are no token ids of the model, or the model is just answering; this ends the run.
        """
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise self.refuse(f"observe got {tokens!r:.80}", "token ids") from None
        wrong = [token for token in ids if not 0 <= token < self._shared.vocabulary]
        if wrong:
            raise self.refuse(f"observe got the token {wrong[0]}", f"ids from 0 to {self._shared.vocabulary - 1}")
        if self._first.busy or self._closed:
            raise self.refuse("observe was called", "calls between two turns, before rollout returns")
        if len(ids) > self.room:
            self._cut = True
            raise OutOfRoomError(f"no room for {len(ids)} observed tokens: {self._limit()}")
        self._first.observed += ids

    async def verify(self, text: str) -> Verdict:
        """Return what `reward.verifier` says of an answer to the prompt, in its limited worker processes."""
        with self.uncounted():
            return await self._call.verify(text, self._request.prompt)

    @property
    def response(self) -> tuple[int, ...]:
        """All token ids of the first context after the prompt."""
        return self.tokens[len(self._request.prompt.tokens) :]

    def cut(self) -> None:
        """Note that it ends for lack of room: with "length", unless its last answer repeats itself."""
        self._cut = True

    def report(
        self,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        *,
        tool_calls: int = 0,
        tool_errors: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Report what the environment says of the last answer; before there is one, of the first. Several calls add up.

        Args:
            reward: without a name. rewards: by name, each times its factor of `environment.reward_weights`.
            tool_calls, tool_errors: how many tools the answer called, and how many calls failed. seconds: of work in
                another process.

        Raises:
            RolloutError: a reward is no finite number, or its name is not allowed or has no weight; this ends the run.
        """
        named = dict(rewards or {})
        if reward is not None:
            self._check_reward(None, reward)
        for name, value in named.items():
            self._check_reward(name, value)
        weights = self._shared.reward_weights
        total = (reward or 0.0) + math.fsum(weights.get(name, 1.0) * value for name, value in named.items())
        for name, value in named.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        self._rewarded = self._rewarded or bool(named) or reward is not None
        self._last.add(TurnReport(total, tool_calls, tool_errors, seconds))

    def verdict(self, correct: bool, reason: str, reward: float | None = None) -> Verdict:
        """Return a verdict.

        Args:
            reward: None: the sum of what was reported; where nothing was, `reward.correct_reward` or
                `reward.incorrect_reward`.
        """
        section = self._shared.reward
        own = section.correct_reward if correct else section.incorrect_reward
        if reward is None and self._rewarded:
            own = math.fsum(one.reward for context in self._contexts for one in (context.before, *context.reports))
        return Verdict(correct, own if reward is None else reward, reason, tuple(self._rewards.items()))

    @property
    def own_s(self) -> float:
        """Seconds that count towards environment.timeout_s: without those of engine, verifier and workers of `step`."""
        since = self._since
        return self._own_s + (time.monotonic() - since if since else 0.0)

    async def hold(self, environment: Environment) -> Rollout:
        """Hold the whole conversation and return its rollout. Raises what the environment raises; RolloutError."""
        self._since, self._task = time.monotonic(), asyncio.current_task()
        try:
            verdict = await environment.rollout(self._request.prompt, self)
        except OutOfRoomError:
            if not self.generated:
                raise
            verdict = self.verdict(False, "out_of_room")
        finally:
            self._closed = True
        if self.fault is not None:
            raise self.fault
        self._check(verdict)
        if not verdict.rewards:
            verdict = replace(verdict, rewards=tuple(self._rewards.items()))
        self._count_seconds()
        if not self.generated:
            raise self.refuse("it ended before the model answered", "at least one generated token")
        return self.ended("repetition" if self._repeats else "length" if self._cut else "stop", verdict)

    @property
    def generated(self) -> int:
        """Tokens that the model generated so far."""
        return sum(count for context in self._contexts for _, count in context.turns)

    def ended(self, reason: FinishReason, verdict: Verdict | None = None) -> Rollout:
        """Return the whole conversation as one rollout."""
        if not self.generated:
            return replace(nothing_said(self._request), index=self._index)
        said = [context for context in self._contexts[1:] if context.rollout is not None]
        whole = joined([self._first, *said])
        text = self._shared.decode(whole.tokens[whole.prompt_length :].tolist())
        attempt = self._request.attempt
        return replace(whole, attempt=attempt, finish_reason=reason, text=text, verdict=verdict)

    def _count_seconds(self) -> None:
        """Add the environment's time since the last answer to the report of that answer."""
        now = self.own_s
        self._last.add(TurnReport(seconds=now - self._answered_s))
        self._answered_s = now

    @contextmanager
    def standing_back(self) -> Iterator[None]:
        """Keep others from waiting for this conversation within the block, where it waits for a place and asks for
        nothing."""
        self._call.stand_back()
        try:
            with self.uncounted():
                yield
        finally:
            self._call.come_back()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is awaited within the block as time of the environment."""
        self._own_s, self._since = self.own_s, 0.0
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1
            self._since = 0.0 if self._away else time.monotonic()

    def _limit(self) -> str:
        most, room = self._request.sampling.max_new_tokens, self.room
        return f"{room} of rollout.max_response_tokens={most} are left; raise it, or end the conversation before"

    def refuse(self, got: str, allowed: str, fix: str = "correct what it names") -> RolloutError:
        """Return an error that ends the run, even if the environment catches it."""
        self.fault = self.fault or RolloutError(
            f"{self._shared.title}: {got} (group {self._request.group_id} rollout {self._index}); "
            f"allowed: {allowed}; fix: {fix}"
        )
        return self.fault

    def _check(self, verdict: Verdict) -> None:
        if fault := verdict_fault(verdict):
            raise self.refuse(f"it returned {fault[0]}", fault[1])
        if len({name for name, _ in verdict.rewards}) < len(verdict.rewards):
            raise self.refuse(f"rewards are {verdict.rewards!r:.80}", "each name once")
        for name, value in verdict.rewards:
            self._check_reward(name, value)

    def _check_reward(self, name: object, value: object) -> None:
        """Refuse a reward that is no finite number, or whose name is not allowed. name: None for one without a name."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refuse(f"a reward is {value!r:.80}", "a finite number")
        if name is None:
            return
        if not (isinstance(name, str) and _REWARD_NAME.fullmatch(name)):
            raise self.refuse(f"a reward is called {name!r:.80}", _REWARD_NAMES)
        weights = self._shared.reward_weights
        if weights and name not in weights:
            fix = "add it to reward_weights, or remove all of them"
            raise self.refuse(f"the reward {name} has no weight", f"those with one: {', '.join(weights)}", fix)


def nothing_said(request: GroupRequest) -> Rollout:
    """Return the rollout that an engine leaves out: an answer that was aborted before its first token."""
    tokens, none = np.array(request.prompt.tokens, dtype=np.int32), np.zeros(0, dtype=np.float32)
    place = request.prompt.id, request.group_id, request.attempt, request.indices[0]
    return Rollout(*place, tokens, len(tokens), none.astype(np.uint8), none, "abort", 0)
