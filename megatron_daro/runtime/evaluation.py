"""Accuracy on held-out problems while a run trains: the engine answers, the verifiers judge, metrics come back.

Place in the data flow: called by the controller; uses the run's own engine and scorer. It trains nothing and writes
nothing. `megatron-daro eval` measures more, and keeps what it measures: runtime/measuring.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megatron_daro.evaluate.questions import HeldOut
from megatron_daro.rollout.judging import judge
from megatron_daro.rollout.protocol import Engine, Scorer
from megatron_daro.types import GroupRequest, Rollout, SamplingParams


class Evaluator:
    """Evaluates whatever weights the engine has."""

    def __init__(
        self,
        sets: Sequence[HeldOut],
        engine: Engine,
        scorer: Scorer,
        *,
        max_response_tokens: int,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._sets, self._engine, self._scorer = sets, engine, scorer
        self._max_tokens, self._stop = max_response_tokens, stop_token_ids

    async def evaluate(self, step: int) -> Mapping[str, float]:
        """eval/{name}/accuracy of every set, and eval/{name}/accuracy/{category} where its problems have categories."""
        metrics: dict[str, float] = {}
        for number, held_out in enumerate(self._sets):
            metrics |= await self._evaluate_set(held_out, first_id=-1 - number)
        return metrics

    async def _evaluate_set(self, held_out: HeldOut, *, first_id: int) -> dict[str, float]:
        """Group ids are negative and depend on the set and the problem only: the same questions get the same noise."""
        section = held_out.section
        sampling = SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            max_new_tokens=self._max_tokens,
            stop_token_ids=self._stop,
        )
        prompts = {first_id - len(self._sets) * i: prompt for i, prompt in enumerate(held_out.prompts)}
        indices = tuple(range(section.rollouts_per_prompt))
        requests = [GroupRequest(i, 0, prompt, indices, sampling) for i, prompt in prompts.items()]
        rollouts: list[Rollout] = []
        async for finished in self._engine.generate(requests):
            rollouts += finished
        rollouts.sort(key=lambda rollout: (-rollout.group_id, rollout.index))
        texts = [(held_out.verified_text(r.text), prompts[r.group_id]) for r in rollouts]
        verdicts = await judge(self._scorer, texts)
        return _accuracies(
            section.name, [(prompts[r.group_id].category, v.correct) for r, v in zip(rollouts, verdicts, strict=True)]
        )


def _accuracies(name: str, outcomes: Sequence[tuple[str, bool]]) -> dict[str, float]:
    by_category: dict[str, list[bool]] = defaultdict(list)
    for category, correct in outcomes:
        by_category[category].append(correct)
    every = [correct for _, correct in outcomes]
    metrics = {f"eval/{name}/accuracy": sum(every) / max(len(every), 1)}
    for category, corrects in sorted(by_category.items()):
        if category:
            metrics[f"eval/{name}/accuracy/{category}"] = sum(corrects) / len(corrects)
    return metrics
