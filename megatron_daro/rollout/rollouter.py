"""One answer to a prompt, and its verdict: any of a prompt's gold answers counts as right. And several environments.

(answer text, prompt) -> pairs of text and gold -> Scorer -> one Verdict each. Training and evaluation both ask here.
Refuses a scorer that does not give one verdict a pair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from megatron_daro.errors import RewardError
from megatron_daro.rollout.protocol import Engine, Rollouter, Scorer
from megatron_daro.types import GroupRequest, Prompt, Rollout, Verdict


async def judge(scorer: Scorer, answers: Sequence[tuple[str, Prompt]]) -> list[Verdict]:
    """One verdict per (answer text, prompt), in order.

    Where a prompt has alternatives, the verdict is that of the first gold that matches, else that of its first gold.

    Raises:
        RewardError: the scorer gave more or fewer verdicts than it was asked for.
    """
    pairs = [(text, gold, prompt.statement) for text, prompt in answers for gold in prompt.answers]
    verdicts = await scorer.score_async(pairs)
    if len(verdicts) != len(pairs):
        raise RewardError(f"the verifier gave {len(verdicts)} verdicts for {len(pairs)} answers; allowed: one each")
    in_order = iter(verdicts)
    each = [[next(in_order) for _ in prompt.answers] for _, prompt in answers]
    return [next((one for one in of_golds if one.correct), of_golds[0]) for of_golds in each]


class SingleTurn:
    """The Rollouter of one answer a rollout, which the verifiers judge."""

    continues_partial = True

    def __init__(self, engine: Engine, scorer: Scorer) -> None:
        """Start nothing."""
        self._engine, self._scorer = engine, scorer

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Return the engine's own iterator."""
        return self._engine.generate(requests)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all)."""
        await self._engine.abort(group_ids)

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Have the texts verified. Raises RewardError: a verdict is missing."""
        return await judge(self._scorer, [(rollout.text, prompt) for rollout, prompt in rollouts])

    def counters(self) -> dict[str, int]:
        """Count nothing: there is nothing between engine and verifiers that fails."""
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take nothing over."""

    async def close(self) -> None:
        """End nothing: engine and scorer belong to the run."""


class Mixed:
    """The Rollouter of several environments: each group is asked of that which its prompt's data source belongs to."""

    continues_partial = False

    def __init__(self, by_name: Mapping[str, Rollouter], environment_of_source: Mapping[str, str]) -> None:
        """Start nothing."""
        self._by_name, self._names = by_name, environment_of_source

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of all of them as they come."""
        queue: asyncio.Queue[tuple[Rollout, ...] | Exception | None] = asyncio.Queue()

        async def pump(own: Rollouter, share: Sequence[GroupRequest]) -> None:
            try:
                async for rollouts in own.generate(share):
                    queue.put_nowait(rollouts)
                queue.put_nowait(None)
            except Exception as error:  # raised below
                queue.put_nowait(error)

        shares: dict[str, list[GroupRequest]] = {}
        for request in requests:
            shares.setdefault(self._names[request.prompt.source], []).append(request)
        pumps = [asyncio.create_task(pump(self._by_name[name], share)) for name, share in shares.items()]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all)."""
        for own in self._by_name.values():
            await own.abort(group_ids)

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Return the verdicts of each one's environment."""
        verdicts: dict[int, Verdict] = {}
        for name, own in self._by_name.items():
            places = [i for i, (_, prompt) in enumerate(rollouts) if self._names[prompt.source] == name]
            verdicts |= zip(places, await own.score([rollouts[i] for i in places]), strict=True)
        return [verdicts[i] for i in range(len(rollouts))]

    def counters(self) -> dict[str, int]:
        """Return the sums of all, and what each has: under environments/ and its name."""
        sums, each = Counter[str](), dict[str, int]()
        for name, own in self._by_name.items():
            counts = own.counters()
            sums.update(counts)
            each |= {key.replace("environment/", f"environments/{name}/", 1): n for key, n in counts.items()}
        return dict(sums) | each

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from each one's."""
        for name, own in self._by_name.items():
            prefix = f"environments/{name}/"
            own.load_counters({
                key.replace(prefix, "environment/", 1): n for key, n in counters.items() if key.startswith(prefix)
            })  # fmt: skip

    async def close(self) -> None:
        """Close all."""
        for own in self._by_name.values():
            await own.close()
