"""The evaluations of a run: when one is due, whether it runs beside generation, and the metric lines that wait for it.

The controller asks for an evaluation after a weight sync. Beside generation it goes on while
the run does; the next sync and the next checkpoint wait until it ended, so every answer of it is of one version, and a
checkpoint never lacks its line. Lines of metrics keep their order: that of the evaluated step, and those after it, are
written when the evaluation is there. At most one is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from megatron_daro.config.sections import TrainerSection
from megatron_daro.observe.trace import Phases
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.protocol import PhaseTimer

Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]


class Evaluations:
    """All of one run."""

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
            beside: whether generation may use the engine meanwhile.
        """
        self._every, self._steps = (section.eval_every_steps, section.steps) if section else (0, 0)
        self._evaluate = evaluate if self._every else None
        self._beside, self._phases, self._deadlines = beside, phases or Phases(), deadlines or Deadlines()
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._metrics: dict[str, float] = {}
        self._held: list[Callable[[], None]] = []

    def due(self, before: int, step: int) -> bool:
        """Whether one belongs between these steps: every `every` steps, before the first and after the last."""
        if self._evaluate is None:
            return False
        return step == 0 or step // self._every > before // self._every or step >= self._steps

    async def run(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluate into `metrics`, for a line that `write` writes, and return them. Beside generation it only begins
        here."""
        if not self._beside:
            metrics |= await self._measured(step)
            return metrics
        assert self._task is None, "the one before was waited for"
        self._task, self._metrics = asyncio.ensure_future(self._measured(step)), metrics
        return metrics

    def write(self, line: Callable[[], None]) -> None:
        """Write a line of metrics now, or after the evaluation that is under way."""
        if self._task is None:
            line()
        else:
            self._held.append(line)

    def cancel(self) -> None:
        """End the one under way without a result; `ended` still writes the lines."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait for the end of the one under way, and write the lines that waited. Raises what it raised."""
        if self._task is None:
            return
        task = self._task
        await asyncio.wait({task})
        self._task = None
        held, self._held = self._held, []
        if not task.cancelled():
            self._metrics.update(task.result())
        for line in held:
            line()

    async def _measured(self, step: int) -> Mapping[str, float]:
        assert self._evaluate is not None, "it is due"
        what = f"step {step}" if step else "before training"
        with self._phases.measure("evaluate"):
            return await self._deadlines.within("evaluate", self._evaluate(step), what=what)
