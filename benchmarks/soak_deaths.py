"""Deaths of a run's own Ray workers, at drawn moments.

Place in the data flow: embedded_soak.py and sglang_soak.py call `Deaths.gate` before each batch, in the run's event
loop. From a drawn step on it waits for a drawn time and sends a signal to one process of a kind, wherever in its work
that is, and follows it until the run says that it has another one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGSTOP")
_HEALED_S = 300.0
_LONGEST_WAIT_S = 1.5


@dataclass
class Death:
    """One process that was ended. Times: seconds since the start of the soak; None: did not happen."""

    step: int
    signal: str
    process: int = 0
    injected_s: float | None = None
    healed_s: float | None = None


class Deaths:
    """Ends processes of one kind, one at a time."""

    def __init__(
        self,
        title: str,
        count: int,
        *,
        steps: int,
        seed: str,
        signals: tuple[str, ...],
        replaced: Callable[[], int],
        log: Callable[[str], None],
    ) -> None:
        """Draw the schedule.

        Args:
            title: the processes' title begins with it. steps: of the run; the first and last few are left alone.
            seed: of steps, moments, victims and signals. replaced: how many the run has replaced by now.
        """
        self.title, self._replaced, self._log = title, replaced, log
        self._random = random.Random(seed)
        drawn = sorted(self._random.sample(range(3, max(steps - 5, count + 4)), count))
        self.deaths = [Death(step, self._random.choice(signals)) for step in drawn]
        self._waiting = list(self.deaths)
        self._current: asyncio.Task[None] | None = None
        self._started = time.monotonic()

    async def gate(self, step: int) -> None:
        """Before each batch: begin what is due, once the one before is over."""
        if self._current and self._current.done():
            self._current.result()
            self._current = None
        if self._waiting and self._waiting[0].step <= step and self._current is None:
            self._current = asyncio.create_task(self._end_one(self._waiting.pop(0)))

    async def finish(self) -> None:
        """Wait for the last one; what is still due happens now."""
        while self._current or self._waiting:
            if self._current:
                await self._current
            await self.gate(self._waiting[0].step if self._waiting else 0)

    async def _end_one(self, death: Death) -> None:
        before = self._replaced()
        await asyncio.sleep(self._random.uniform(0.0, _LONGEST_WAIT_S))
        while not (found := processes(self.title)):
            await asyncio.sleep(0.1)
        death.process = self._random.choice(found).pid
        death.injected_s = time.monotonic() - self._started
        os.kill(death.process, getattr(signal, death.signal))
        self._log(f"{death.injected_s:7.1f} s  step {death.step}: {death.signal} to {self.title} {death.process}")
        end = time.monotonic() + _HEALED_S
        while self._replaced() == before:
            if time.monotonic() > end:
                self._log(f"{self.title} {death.process} was NOT REPLACED within {_HEALED_S:g} s")
                return
            await asyncio.sleep(0.1)
        death.healed_s = time.monotonic() - self._started

    def problems(self) -> list[str]:
        """Return what did not happen as it should."""
        not_ended = sum(death.injected_s is None for death in self.deaths)
        not_healed = sum(death.injected_s is not None and death.healed_s is None for death in self.deaths)
        found = [f"{self.title}: {not_ended} of {len(self.deaths)} deaths did not happen"] if not_ended else []
        return found + ([f"{self.title}: {not_healed} were not replaced"] if not_healed else [])

    def row(self) -> dict[str, object]:
        """Return how many, by signal, and seconds until the run had another process."""
        seconds = sorted(d.healed_s - d.injected_s for d in self.deaths if d.healed_s and d.injected_s)
        return {
            "ended": sum(death.injected_s is not None for death in self.deaths),
            "replaced": len(seconds),
            "signals": {name: sum(d.signal == name for d in self.deaths) for name in dict.fromkeys(SIGNALS)},
            "replaced_s": {"median": seconds[len(seconds) // 2], "longest": seconds[-1]} if seconds else None,
        }


def processes(title: str) -> list[psutil.Process]:
    """Return the living processes below this one whose title begins so, in the order of their ids."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(title) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)
