"""Wall time by phase of a step.

Phases may overlap (generation beside training), and a phase may run in several coroutines or threads at once; its time
is the time during which at least one of them ran, so it never exceeds its step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

ATTEMPT_VARIABLE = "MEGATRON_DARO_ATTEMPT"
"""Environment variable with the number of this start, from 1, for the metrics; set by programs that start a run again
after each end."""

_NO_PHASES = frozenset(
    f"timing/{name}_s" for name in ["step", "forward_backward", "critic", "critic_turns", "sync_send", "to_engine"]
)
"""Times that are no phases: that of the whole step, and those that are part of train, logprob or sync."""


def phase_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys of metrics that are times of phases. None is part of another, except `reward` of `rollout`, and
    `sync_wait`, in which training waits for `rollout` or `evaluate` to end."""
    return [key for key in keys if key.startswith("timing/") and key.endswith("_s") and key not in _NO_PHASES]


class _Stopwatch:
    """Adds up the time during which at least one user holds it open."""

    def __init__(self) -> None:
        self.open_count = 0
        self.opened_at = 0.0
        self.total_s = 0.0

    def enter(self, now: float) -> None:
        if self.open_count == 0:
            self.opened_at = now
        self.open_count += 1

    def leave(self, now: float) -> None:
        self.open_count -= 1
        if self.open_count == 0:
            self.total_s += now - self.opened_at

    def take(self, now: float) -> float:
        """Return the total so far and begin again at 0; an open measurement is split here and goes on."""
        total = self.total_s
        if self.open_count:
            total += now - self.opened_at
            self.opened_at = now
        self.total_s = 0.0
        return total


class Phases:
    """Wall time by phase since the last `collect`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first step. Args: clock: returns seconds and never goes back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[str, _Stopwatch] = {}
        self._any = _Stopwatch()
        self._since = clock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of the `with` body under `timing/{name}_s`, even if the body raises or is cancelled."""
        with self._lock:
            now = self._clock()
            watch = self._watches.setdefault(name, _Stopwatch())
            watch.enter(now)
            self._any.enter(now)
        try:
            yield
        finally:
            with self._lock:
                now = self._clock()
                watch.leave(now)
                self._any.leave(now)

    def active(self) -> tuple[str, ...]:
        """Return the names of the phases that run now, in order of first use."""
        with self._lock:
            return tuple(name for name, watch in self._watches.items() if watch.open_count)

    def collect(self) -> dict[str, float]:
        """Close the step and start the next one.

        Returns:
            Seconds: `timing/{name}_s` for every phase ever measured (0.0 if it did not run), `timing/step_s` since the
            last call, and `timing/other_s`, the part of the step in which no phase ran. A phase that is still running
            is split: its time so far counts here, the rest in the next step. If ATTEMPT_VARIABLE is set, also
            `timing/attempt`, the number of the start.
        """
        with self._lock:
            now = self._clock()
            times = {f"timing/{name}_s": watch.take(now) for name, watch in self._watches.items()}
            step_s = now - self._since
            times["timing/other_s"] = max(0.0, step_s - self._any.take(now))
            times["timing/step_s"] = step_s
            if attempt := os.environ.get(ATTEMPT_VARIABLE):
                times["timing/attempt"] = float(attempt)
            self._since = now
            return times
