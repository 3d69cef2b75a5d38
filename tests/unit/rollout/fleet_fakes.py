"""A stand-in for a fleet of servers: every group is its own call and gets one token per turn of its own clock.

How long each rollout is depends on (group, index) only, so at any moment it is known what a group must have. An abort
gives back what is there; a request with partial rollouts goes on from them (or starts over, with `resumes` off).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from group_forms import plain_group, through_parquet
from loop_fakes import NEVER, FakeEngine, FakePhases, FakeProgress, FakeSource, K, digest, make_sampler

from megatron_daro.errors import EngineError
from megatron_daro.types import GroupRequest, Rollout

LONGEST = 8
KEEP = {"keep_surplus": True, "max_staleness": 1}
SLOW = 1000


class FleetEngine(FakeEngine):
    """`pace(group_id)`: turns of the event loop for one token. All that happens is written down."""

    def __init__(self, order_seed: int = 0, events: list | None = None) -> None:
        super().__init__(order_seed, events)
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
        needed = max(most_of(request, index) - done.get(index, 0) for index in request.indices)
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
        fresh = min(turns, most_of(request, index) - done)
        self.generated += fresh
        if (request.group_id, request.attempt, index) in self.lost:
            self.lost_tokens += fresh
            return None
        if done + fresh == 0:
            return None
        at_limit = "segment" if done + fresh == request.limits.get(index) else "abort"
        finish = "stop" if done + fresh == total else at_limit
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


def most_of(request: GroupRequest, index: int) -> int:
    """Response tokens of a rollout when this request ends."""
    return min(length_of(request.group_id, index), request.limits.get(index, LONGEST))


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


def setup(filter_groups=False, rollout=None, engine=None, **options):
    """A sampler over a fleet, in the mode that ends early; two groups are a batch."""
    engine, source, progress = engine or FleetEngine(), FakeSource(), FakeProgress()
    options = {"finish_batch": "enough"} | options
    rollout = {"prompts_per_batch": 2, "oversampling": 2.0} | (rollout or {})
    sampler = make_sampler(
        engine, source, progress, FakePhases(), filter_groups=filter_groups, rollout=rollout, **options
    )
    return SimpleNamespace(engine=engine, source=source, progress=progress, sampler=sampler)


def run(coroutine):
    """Runs it and sees that no task is left behind."""

    async def go():
        try:
            return await coroutine
        finally:
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, left

    return asyncio.run(go())


def sample(parts, use_version=0):
    """The next batch."""
    return run(parts.sampler.sample(use_version))


def train(parts, batch, outcome="trained"):
    """What the controller does with a batch, as far as the books go."""
    parts.sampler.ledger.finish(ids(batch.groups), outcome)


def saved(batch):
    """(state, groups that wait) of a checkpoint written after this batch, as they come back from disk."""
    state = json.loads(json.dumps(batch.snapshot.to_json(dict.fromkeys(ids(batch.groups), "trained"))))
    return state, through_parquet(batch.snapshot.waiting())


def plain(groups):
    """Groups as they can be compared."""
    return [plain_group(group) for group in groups]


def kept_in_part(parts):
    """A batch that leaves group 0 in part; returns (batch, this group, tokens of its unfinished rollouts)."""
    parts.engine.pace = lambda group_id: 4 if group_id == 0 else 1
    batch = sample(parts)
    assert ids(batch.groups) == [1, 2]
    (group_0,) = batch.snapshot.unfinished
    assert group_0.group_id == 0
    finished, unfinished = group_0.finished.rollouts, group_0.partial
    turns = unfinished[0].response_length
    assert 2 <= turns < LONGEST
    assert {r.index for r in finished} == {i for i in range(K) if length_of(0, i) <= turns} and finished
    assert {r.index: r.response_length for r in unfinished} == {i: turns for i in range(K) if length_of(0, i) > turns}
    assert all(r.finish_reason == "abort" for r in unfinished)
    return batch, group_0, turns
