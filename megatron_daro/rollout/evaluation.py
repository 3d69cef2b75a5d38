"""Accuracy on held-out problems while a run trains.

`Evaluator` asks and scores as in training, through the run's own rollouter, and returns metrics. `megatron-daro eval`
measures more and keeps the answers (workshop/evaluate/measuring.py).

`Evaluations` says when an evaluation is due; the controller begins one after a weight sync. It may run beside
generation. The next sync and the next checkpoint wait for its end: all its answers are then of one weight version, and
a checkpoint never lacks the metrics line of its step, which is held until the numbers are there, or a stop cancels the
evaluation (observe/step_lines.py). At most one is under way.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_daro.config.sections import TrainerSection
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.deadlines import TRIES, Deadlines, mark_as_seen
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.step_lines import StepLines
from megatron_daro.rollout.minibatches import passed
from megatron_daro.rollout.protocol import PhaseTimer, Rollouter
from megatron_daro.rollout.summary import pass_at_k
from megatron_daro.types import GroupRequest, Rollout, SamplingParams


class Evaluator:
    """Evaluates whatever weights the engine has."""

    def __init__(
        self,
        sets: Sequence[HeldOut],
        rollouter: Rollouter,
        *,
        max_response_tokens: int,
        stops: Stops,
        answers_beside: int = 0,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Args: answers_beside: about how many answers are requested at once beside generation; 0: the evaluation has
        the engine for itself. warn: shows the user a warning."""
        self.answers_beside, self._warn = answers_beside, warn
        self._sets, self._rollouter = sets, rollouter
        self._max_tokens, self._stops = max_response_tokens, stops

    async def evaluate(self, step: int) -> Mapping[str, float]:
        """Return eval/{name}/accuracy of every set, and eval/{name}/accuracy/{category} where its problems have
        categories; with several answers to a problem also eval/{name}/pass_at/{k} for k = 2, 4, 8, ... up to their
        number; for conversations also eval/{name}/turns_mean and tool_calls_mean."""
        metrics: dict[str, float] = {}
        for number, held_out in enumerate(self._sets):
            metrics |= await self._evaluate_set(held_out, first_id=-1 - number, step=step)
        return metrics

    async def _evaluate_set(self, held_out: HeldOut, *, first_id: int, step: int) -> dict[str, float]:
        """Evaluate one set. Group ids are negative and depend only on sets and problem, so that an engine with a seed
        draws the same answers each time."""
        section, stops = held_out.section, held_out.stops(self._stops)
        sampling = SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            max_new_tokens=self._max_tokens,
            stop_token_ids=stops.token_ids,
            stop=stops.texts,
            repetition=stops.repetition,
        )
        prompts = {first_id - len(self._sets) * i: prompt for i, prompt in enumerate(held_out.prompts)}
        indices = tuple(range(section.rollouts_per_prompt))
        requests = [GroupRequest(i, 0, prompt, indices, sampling) for i, prompt in prompts.items()]
        rollouts, restarted = (
            await self._of_version(requests, step) if self.answers_beside else (await self._finished(requests), False)
        )
        if not rollouts:
            why = "servers were started again and have newer weights; " if restarted else ""
            self._warn(
                f"evaluation of {section.name} after step {step}: {why}some answers of that version are missing after "
                f"{TRIES} tries, so its metrics are left out"
            )
            return {}
        rollouts.sort(key=lambda rollout: (-rollout.group_id, rollout.index))
        answers = [(replace(r, text=held_out.verified_text(r.text)), prompts[r.group_id]) for r in rollouts]
        verdicts = await self._rollouter.score(answers)
        right: dict[int, int] = defaultdict(int)
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            right[rollout.group_id] += verdict.correct
        return {
            **_accuracies(
                section.name,
                [(prompts[r.group_id].category, v.correct) for r, v in zip(rollouts, verdicts, strict=True)],
            ),
            **_pass_at(section.name, list(right.values()), section.rollouts_per_prompt),
            **_turns(section.name, rollouts),
        }

    async def _all(self, requests: Sequence[GroupRequest]) -> list[Rollout]:
        rollouts: list[Rollout] = []
        async for finished in self._rollouter.generate(requests):
            rollouts += finished
        return rollouts

    async def _finished(self, requests: Sequence[GroupRequest]) -> list[Rollout]:
        """Return every answer; failed conversations are retried. Empty where one fails at every try."""
        rollouts: list[Rollout] = []
        for attempt in range(TRIES):
            missing = _missing(requests, {(one.group_id, one.index) for one in rollouts})
            if not missing:
                break
            again = [replace(request, attempt=attempt) for request in missing]
            rollouts += [one for one in await self._all(again) if one.finish_reason != "abort"]
        return rollouts if len(rollouts) == sum(len(request.indices) for request in requests) else []

    async def _of_version(self, requests: Sequence[GroupRequest], version: int) -> tuple[list[Rollout], bool]:
        """Return all answers, of this weight version alone, and whether some came of another one (a server that was
        restarted has newer weights). They are requested a few at a time, so that generation keeps its share of the
        servers. No answers where some cannot be had."""
        by_place: dict[tuple[int, int], Rollout] = {}
        others, failed = False, set[int]()
        for attempt in range(TRIES):
            # Only groups that failed get a new attempt number, and with it new draws; others repeat theirs.
            missing = _missing(requests, by_place)
            left = iter([replace(one, attempt=attempt) if one.group_id in failed else one for one in missing])

            async def work(left: Iterator[GroupRequest] = left) -> None:
                nonlocal others
                for request in left:
                    for one in await self._all([request]):
                        if one.finish_reason == "abort":
                            failed.add(one.group_id)
                        elif {one.weight_version, *(v for v, _ in one.version_spans)} == {version}:
                            by_place[one.group_id, one.index] = one
                        else:
                            others = True

            async with asyncio.TaskGroup() as workers:
                for _ in range(max(1, self.answers_beside // max(len(r.indices) for r in requests))):
                    workers.create_task(work())
            if len(by_place) == sum(len(request.indices) for request in requests):
                return list(by_place.values()), others
        return [], others


def _missing(requests: Sequence[GroupRequest], there: Collection[tuple[int, int]]) -> list[GroupRequest]:
    """Return the requests without the answers that are there. there: (group id, index) of each."""
    rest = [replace(r, indices=tuple(i for i in r.indices if (r.group_id, i) not in there)) for r in requests]
    return [request for request in rest if request.indices]


def _pass_at(name: str, right: Sequence[int], samples: int) -> dict[str, float]:
    """Return the mean over problems of the unbiased pass@k. right: of each problem, how many of `samples` are right."""
    ks = [2**n for n in range(1, samples.bit_length()) if 2**n <= samples]
    return {f"eval/{name}/pass_at/{k}": sum(pass_at_k(samples, c, k) for c in right) / max(len(right), 1) for k in ks}


def _turns(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over conversations, which have a report for each answer; empty for single answers."""
    reports = [report for rollout in rollouts for report in rollout.reports]
    if not reports:
        return {}
    return {
        f"eval/{name}/turns_mean": len(reports) / len(rollouts),
        f"eval/{name}/tool_calls_mean": sum(report.tool_calls for report in reports) / len(rollouts),
    }


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


Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]


class _UnderWay(NamedTuple):
    step: int
    work: asyncio.Task[None]
    lines: StepLines


class Evaluations:
    """The evaluations of one run: when they are due, and the one under way."""

    def __init__(
        self,
        evaluate: Evaluate | None = None,
        section: TrainerSection | None = None,
        phases: PhaseTimer | None = None,
        deadlines: Deadlines | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Begin nothing.

        Args:
            evaluate: step -> metrics of the weights that the engine has; None: never.
            section: the configuration's trainer section: how often, and up to which step.
            beside: whether generation may use the engine during an evaluation.
        """
        self._every, self._steps = (section.eval_every_steps, section.steps) if section else (0, 0)
        self._evaluate = evaluate if self._every else None
        self.beside = beside
        self._phases, self._deadlines = phases or Phases(), deadlines or Deadlines()
        self._under_way: _UnderWay | None = None

    def due(self, before: int, step: int) -> bool:
        """Whether one is due: at step 0, at the last step, and wherever a multiple of `eval_every_steps` lies in
        (before, step]."""
        if self._evaluate is None:
            return False
        return step == 0 or passed(before, step, self._every) or step >= self._steps

    def begin(self, step: int, lines: StepLines) -> None:
        """Begin to evaluate the weights of this step. Its metrics line is held until it has the numbers."""
        assert self._under_way is None, "the one before was waited for"
        lines.hold(step)
        work = asyncio.ensure_future(self._measure(step, lines))
        work.add_done_callback(mark_as_seen)  # its error, if the run ends for another reason before `ended` raises it
        self._under_way = _UnderWay(step, work, lines)

    def cancel(self) -> int | None:
        """Cancel the evaluation under way and return its step; None where there is none."""
        if self._under_way and self._under_way.work.cancel():
            return self._under_way.step
        return None

    async def ended(self) -> None:
        """Wait for the end of the evaluation under way, if there is one. Raises what it raised."""
        if self._under_way is None:
            return
        step, work, lines = self._under_way
        await asyncio.wait({work})
        self._under_way = None
        await lines.release(step, {})  # an evaluation that was cancelled before it ran has not released it
        if not work.cancelled():
            work.result()

    async def _measure(self, step: int, lines: StepLines) -> None:
        assert self._evaluate is not None, "it is due"
        what = f"step {step}" if step else "before training"
        metrics: Mapping[str, float] = {}
        try:
            with self._phases.measure("evaluate"):
                metrics = await self._deadlines.within("evaluate", self._evaluate(step), what=what)
        finally:
            await lines.release(step, metrics)
