"""Lines of metrics in the order of their steps: that of an evaluated step waits for its evaluation, and so do those
after it.

The controller adds the line of every step, and an evaluation that goes on beside training holds it and releases it
(rollout/evaluation.py). What is held is on no disk yet; `close` writes it, however the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Write = Callable[[int, Mapping[str, float]], None]
"""(step, metrics): durable when it returns, such as `MetricsLog.write`."""


class StepLines:
    """Those of one run."""

    def __init__(self, write: Write) -> None:
        """Write nothing. Args: write: takes each line, once all of it is there."""
        self._write = write
        self._held: int | None = None
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._more: dict[int, Mapping[str, float]] = {}

    def hold(self, step: int) -> None:
        """Keep the line of this step, and all after it, until it is released. One step is held at a time."""
        assert self._held is None, f"the line of step {self._held} is still held"
        self._held = step

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, now or when what is held is released. Raises DataError: as the disk does."""
        self._waiting.append((step, metrics))
        if self._held is None:
            self._write_all()

    def release(self, step: int, more: Mapping[str, float]) -> None:
        """Give the line of a held step these metrics too, whether it was added already or comes later, and write what
        waits for it; nothing where it is not held any more. Raises DataError: as the disk does."""
        if self._held == step:
            self._held, self._more[step] = None, more
            self._write_all()

    async def close(self) -> None:
        """Write what is held as it is. May be called twice. Raises DataError: as the disk does."""
        self._held = None
        self._write_all()

    def _write_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step, metrics in waiting:
            self._write(step, {**metrics, **self._more.pop(step, {})})
