"""What a run costs its driver: CPU of each step, how late its event loop wakes, memory, bytes of the object store.

Place in the data flow: beside a running controller; the rehearsal and benchmarks/control_plane.py read it.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
from ray._private import internal_api

from megatron_daro.observe.metrics import MetricsLog

PAUSE_S, LOOK_S = 0.005, 0.05


def cpu_s() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Watch:
    """How late the event loop wakes from pauses of 5 ms, and the driver's memory, while it is on."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.own_gib = self.mapped_gib = 0.0
        self._off = threading.Event()

    async def loop(self) -> None:
        """Measure until it is cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(PAUSE_S)
            self.late_ms.append(1000 * (time.perf_counter() - before - PAUSE_S))

    def memory(self) -> None:
        """Look many times and keep the highest; in a thread."""
        while not self._off.wait(LOOK_S):
            lines = Path("/proc/self/status").read_text().splitlines()
            found = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if line.startswith("Rss")}
            self.own_gib = max(self.own_gib, found["RssAnon"])
            self.mapped_gib = max(self.mapped_gib, found["RssShmem"])

    def __enter__(self) -> Watch:
        self._looks, self._ticks = threading.Thread(target=self.memory), asyncio.create_task(self.loop())
        self._looks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticks.cancel()
        self._off.set()
        self._looks.join()

    def found(self) -> dict[str, float]:
        """Numbers for a table."""
        late = np.array(self.late_ms or [0.0])
        return {
            "latest_ms": float(late.max()),
            "p99_ms": float(np.quantile(late, 0.99)),
            "own_gib": self.own_gib,
            "mapped_gib": self.mapped_gib,
        }


@dataclass(frozen=True, slots=True)
class Spent:
    """Of the driver, until a step was written: since the start, or the step before."""

    step: int
    cpu_s: float
    seconds: float
    rank_calls: int


class StepMeter(MetricsLog):
    """Metrics that know what each step cost. calls: counts calls to ranks, set by whoever counts."""

    def begin(self) -> None:
        """Count from now on: the run is about to start."""
        self.spent: list[Spent] = []
        self.lines: list[dict[str, float]] = []
        self._calls_before = 0
        self._before = cpu_s(), time.perf_counter()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        super().write(step, metrics)
        self.lines.append(dict(metrics))
        now = cpu_s(), time.perf_counter()
        calls = self.calls()
        cpu, seconds = (after - before for before, after in zip(self._before, now, strict=True))
        self.spent.append(Spent(step, cpu, seconds, calls - self._calls_before))
        self._before, self._calls_before = now, calls

    def calls(self) -> int:
        """Return how many calls to ranks were made so far."""
        return 0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Objects and bytes that were put into the object store since the cluster began."""

    objects: int
    num_bytes: int

    @classmethod
    def now(cls) -> StoreUse:
        """Ask this machine's raylet."""
        (node,) = [node for node in ray.nodes() if node["Alive"]]
        stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
        return cls(int(stats.cumulative_created_objects), int(stats.cumulative_created_bytes))
