"""One answer to a prompt, and its verdict: any of a prompt's gold answers counts as right.

(answer text, prompt) -> pairs of text and gold -> Scorer -> one Verdict each. Training and evaluation both use it.
Refuses a scorer that does not give one verdict per pair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from megatron_daro.errors import RewardError
from megatron_daro.rollout.protocol import Engine, Scorer
from megatron_daro.types import GroupRequest, Prompt, Rollout, Verdict


async def judge(scorer: Scorer, answers: Sequence[tuple[str, Prompt]]) -> list[Verdict]:
    """Return one verdict per (answer text, prompt), in order.

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
    """The Rollouter of single answers, which the verifiers judge."""

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
        """Return no counts: between engine and verifiers nothing can fail."""
        return {}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Do nothing, since nothing is counted."""

    async def close(self) -> None:
        """Do nothing: engine and scorer belong to the run."""
