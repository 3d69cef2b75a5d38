"""A stand-in for a fleet of servers: every group is its own call and gets one token per turn of its own clock.

How long each rollout is depends on (group, index) only, so at any moment it is known what a group must have. An abort
gives back what is there; a request with partial rollouts goes on from them (or starts over, with `resumes` off).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from loop_fakes import NEVER, FakeEngine, digest

from megatron_daro.errors import EngineError
from megatron_daro.types import GroupRequest, Rollout

LONGEST = 8


class FleetEngine(FakeEngine):
    """`pace(group_id)`: turns of the event loop for one token. All that happens is written down."""

    def __init__(self, *_: object, events: list | None = None) -> None:
        super().__init__(0, events)
        self.version = 0
        self.pace: Callable[[int], int] = lambda group_id: 1
        self.resumes = True
        self.asked: list[GroupRequest] = []
        self.running: dict[int, GroupRequest] = {}
        self.aborted: set[int] = set()
        self.aborts: list[list[int] | None] = []
        self.lost: set[tuple[int, int, int]] = set()  # (group, attempt, index): left out, as after a server's death
        self.raises: dict[int, Exception] = {}  # group -> what its call raises after two turns
        self.hangs: set[int] = set()  # these never end by themselves
        self.deaf: set[int] = set()  # these do not hear an abort
        self.most_running = 0
        self.generated = 0
        self.lost_tokens = 0

    async def generate(self, requests):
        (request,) = requests
        group_id = request.group_id
        assert group_id not in self.running, "the same group is generated twice at once"
        self.asked.append(request)
        self.running[group_id] = request
        self.aborted.discard(group_id)
        self.most_running = max(self.most_running, len(self.running))
        try:
            turns = await self._turns(request)
            rollouts = tuple(filter(None, (self._rollout(request, index, turns) for index in request.indices)))
            if rollouts:
                yield rollouts
        finally:
            self.iterators_closed += 1
            del self.running[group_id]

    async def _turns(self, request: GroupRequest) -> int:
        """Lets time pass; how many tokens each rollout got at most."""
        group_id, turns = request.group_id, 0
        done = {i: r.response_length for i, r in request.partial.items() if self.resumes}
        needed = max(length_of(group_id, index) - done.get(index, 0) for index in request.indices)
        while turns < needed or group_id in self.hangs:
            for _ in range(self.pace(group_id)):
                await asyncio.sleep(0)
                if group_id in self.raises and turns >= 2:
                    raise self.raises[group_id]
                while group_id in self.deaf:
                    await asyncio.sleep(NEVER)
                if group_id in self.aborted:
                    return turns
            turns += 1
        return turns

    def _rollout(self, request: GroupRequest, index: int, turns: int) -> Rollout | None:
        earlier = request.partial.get(index) if self.resumes else None
        total = length_of(request.group_id, index)
        done = earlier.response_length if earlier else 0
        fresh = min(turns, total - done)
        self.generated += fresh
        if (request.group_id, request.attempt, index) in self.lost:
            self.lost_tokens += fresh
            return None
        if done + fresh == 0:
            return None
        finish = "stop" if done + fresh == total else "abort"
        prompt = earlier.tokens if earlier else np.asarray(request.prompt.tokens, np.int32)
        seed = digest("fleet", request.group_id, request.attempt, index, self.version, done)
        generator = np.random.default_rng(seed)
        later = Rollout(
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            attempt=request.attempt,
            index=index,
            tokens=np.concatenate([prompt, generator.integers(3, 50, fresh).astype(np.int32)]),
            prompt_length=len(prompt),
            loss_mask=np.ones(fresh, np.uint8),
            logprobs=-generator.random(fresh, dtype=np.float32),
            finish_reason=finish,
            weight_version=self.version,
            version_spans=((self.version, fresh),) if fresh else (),
        )
        whole = earlier.extended(later, "") if earlier else later
        return replace(whole, text=" ".join(map(str, whole.tokens[whole.prompt_length :])))

    async def abort(self, group_ids=None) -> None:
        self.events.append(("abort", self.version))
        self.aborts.append(None if group_ids is None else list(group_ids))
        self.aborted |= set(self.running if group_ids is None else group_ids)


def length_of(group_id: int, index: int) -> int:
    """Response tokens of a rollout when it is finished: 2, 4, 6 and 8 in every group of four."""
    return 2 + (group_id + index) * 2 % LONGEST


def fatal(text: str = "no server is left") -> EngineError:
    """What an engine raises when it cannot go on at all."""
    return EngineError(text)


def tokens_of(groups) -> int:
    """Response tokens of groups."""
    return sum(rollout.response_length for group in groups for rollout in group.rollouts)


def ids(groups) -> list[int]:
    """Group ids, in the given order."""
    return [group.group_id for group in groups]


def count_ids(*many) -> Counter[int]:
    """How often each group id is anywhere."""
    return Counter(group_id for groups in many for group_id in ids(groups))
