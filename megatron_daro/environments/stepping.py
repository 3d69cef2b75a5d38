"""Environments that answer turn by turn, in worker processes: `environment.kind: module:Class` with `reset` and `step`.

Prompt -> reset -> [model -> step -> observation] -> Verdict. Between two steps the environment consists of its state
alone, a JSON value that the conversation holds. So any worker can go on with it, and a worker that hangs, leaks, forks
or raises costs this conversation alone. It refuses states that are no JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.environments.environment import Completion, Conversation, ConversationFailedError, OutOfRoomError
from megatron_daro.environments.rendering import Turns
from megatron_daro.environments.step import Step
from megatron_daro.errors import RolloutError
from megatron_daro.reward.base import MOST_REASON
from megatron_daro.types import Prompt, Verdict
from megatron_daro.worker_pool.pool import WorkerPool
from megatron_daro.worker_pool.process import Program


class EnvironmentPool(Protocol):
    """Worker processes that `reset` and `step`; runtime.node_pools has those of all nodes."""

    @property
    def restarts(self) -> int:
        """Pools of nodes that were lost and started again."""
        ...

    async def start(self) -> None:
        """Start all. Raises DaroError: the environment cannot be made."""
        ...

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a worker's reply. Raises RolloutError; WorkerError: all are lost."""
        ...

    async def close(self) -> None:
        """End all. May be called twice."""
        ...


class _LocalPool:
    """The worker processes of this machine, which is never lost without this process."""

    restarts = 0

    def __init__(self, section: EnvironmentSection) -> None:
        self._pool = pool_of(section, section.workers)
        self.ask = self._pool.ask

    async def start(self) -> None:
        await asyncio.to_thread(self._pool.start)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)


class SteppedConversations:
    """The Environment over worker processes."""

    failure_reasons = ()

    def __init__(
        self,
        section: EnvironmentSection,
        turns: Turns,
        warn: Callable[[str], None],
        pool: EnvironmentPool | None = None,
    ) -> None:
        """Start nothing.

        Args:
            turns: writes observations as tokens. warn: told the `notice` of the environment. pool: of the workers;
                None: on this machine.
        """
        self._section, self._turns, self._warn = section, turns, warn
        self._pool = pool or _LocalPool(section)
        self._started: asyncio.Future[None] | None = None

    async def rollout(self, prompt: Prompt, conversation: Conversation) -> Verdict:
        """Hold one conversation. Raises ConversationFailedError, RolloutError."""
        fields = asdict(replace(prompt, tokens=()))  # asdict would copy each token
        del fields["tokens"]
        step = await self._ask(conversation, {"kind": "reset", "prompt": fields})
        answers, history = 0, list[Mapping[str, str]]()
        reason = step.reason
        while not step.done:
            if step.observation and not self._show(conversation, step, first=not answers, history=history):
                reason = "context_overflow"
                break
            if answers == self._section.max_turns:
                reason = "max_turns"
                break
            answer = await self._answer(conversation)
            if answer is None:
                reason = "max_tokens"
                break
            answers += 1
            if self._section.strict:
                history.append({"role": "assistant", "content": answer.text})
            asked = {"kind": "step", "state": step.state, "answer": conversation.last_text}
            step = await self._ask(conversation, asked)
            reason = step.reason
        if self._section.strict:
            self._turns.check(conversation.response, history)
        correct = step.done and step.correct
        return conversation.verdict(correct, reason or ("match" if correct else "no_match"))

    @property
    def pool_restarts(self) -> int:
        """Pools of nodes that were lost and started again."""
        return self._pool.restarts

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()

    async def _answer(self, conversation: Conversation) -> Completion | None:
        """Return the model's next answer; None where there is no room for a token. Raises OutOfRoomError: for the first
        one there is none."""
        if conversation.room < 1 and conversation.generated:
            conversation.cut()
            return None
        return await conversation.generate(self._section.max_turn_tokens)

    def _show(self, conversation: Conversation, step: Step, *, first: bool, history: list[Mapping[str, str]]) -> bool:
        """Show an observation. Returns False where it does not fit. Raises OutOfRoomError: the first one does not."""
        last = conversation.last_token
        ids = (
            self._turns.first(step.observation) if first else self._turns.observation(step.observation, step.role, last)
        )
        try:
            conversation.observe(ids)
        except OutOfRoomError:
            if not conversation.generated:
                raise
            return False
        if self._section.strict:
            history.append({"role": step.role, "content": step.observation})
        return True

    async def _ask(self, conversation: Conversation, request: Mapping[str, Any]) -> Step:
        """Return the step of a worker, and report it; neither waiting for a worker nor its work counts towards
        timeout_s."""
        with conversation.uncounted():
            await self._start()
            reply = await self._pool.ask(dict(request))
        reason = reply["reason"]
        if reason == "timeout":
            limit = self._section.step_timeout_s
            what = f"took more than step_timeout_s={limit:g} s for one {request['kind']}"
            raise ConversationFailedError(what, "timeout")
        if reason != "ok":
            why = {"memory": f"more than memory_mib={self._section.memory_mib} MiB"}
            raise ConversationFailedError(f"{request['kind']}: {reply.get('error') or why.get(reason, reason)}")
        step = Step(**reply["step"])
        conversation.report(
            step.reward,
            step.rewards,
            tool_calls=step.tool_calls,
            tool_errors=step.tool_errors,
            seconds=float(reply["seconds"]),
        )
        return step

    async def _start(self) -> None:
        """Start the workers once, for all callers."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start_once())
        await asyncio.shield(self._started)

    async def _start_once(self) -> None:
        await self._pool.start()
        if notice := (await self._pool.ask({"kind": "notice"})).get("notice"):
            self._warn(f"{self._section.title}: {notice}")


def pool_of(section: EnvironmentSection, workers: int) -> WorkerPool:
    """Return the pool of an environment's processes. Starts nothing."""
    program = Program(
        "megatron_daro.environments.step_worker",
        {"kind": section.kind, "options": section.options},
        "environment",
        "environment",
        "Python with this package needs about 60, what the class imports comes on top",
        RolloutError,
    )
    return WorkerPool(program, workers, section.step_timeout_s, section.memory_mib)


def checked(section_kind: str, method: str, step: object) -> Step:
    """Return a step that can be trained on. Raises RolloutError: the class returned something else."""
    if not isinstance(step, Step):
        raise _wrong(section_kind, method, f"a {type(step).__name__}", "megatron_daro.environments.Step")
    kinds: Sequence[tuple[str, type | tuple[type, ...]]] = (
        *(("observation", str), ("reason", str), ("role", str), ("done", bool), ("correct", bool)),
        *(("tool_calls", int), ("tool_errors", int), ("reward", (int, float, type(None)))),
    )
    for name, kind in kinds:
        value = getattr(step, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(section_kind, method, f"{name} {value!r:.80}", str(Step.__annotations__[name]))
    numbers = isinstance(step.rewards, Mapping) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in step.rewards.values()
    )
    if not numbers:
        raise _wrong(section_kind, method, f"rewards {step.rewards!r:.80}", "a number for each name")
    if len(step.reason) > MOST_REASON:
        allowed = f"a word of at most {MOST_REASON} characters"
        raise _wrong(section_kind, method, f"reason {step.reason!r:.80}", allowed)
    return step


def _wrong(section_kind: str, method: str, got: str, allowed: str) -> RolloutError:
    return RolloutError(
        f"environment.kind: {section_kind}: {method} returned {got}; allowed: {allowed}; fix: correct the class"
    )
