"""Finds the data-parallel replica that the others wait for, step after step: a GPU that is throttled, a node that is
busy.

PolicyGroup passes each rank's own seconds of a step. Ranks of one replica wait for each other within their work, so
only replicas can be told apart, and not those that share experts; replicas have equal work (data/schedule.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_daro.runtime.rank_info import RankInfo

RATIO, LEAST_S, STEPS = 1.25, 1.0, 10
"""A replica is slow if it takes at least RATIO times the others' median and LEAST_S seconds longer, STEPS times in a
row."""
METRIC = "timing/slowest_replica_ratio"


@dataclass(slots=True)
class SlowReplicas:
    """The watch of one run."""

    _slowest: int = -1
    _steps: int = 0

    def observe(self, own_s: Sequence[float], infos: Sequence[RankInfo]) -> tuple[dict[str, float], str | None]:
        """Record one step.

        Args:
            own_s: of each rank, seconds before it waited for other replicas; 0: not measured. infos: of the ranks.

        Returns:
            The metric, if there are several replicas; a warning, once each time that a replica becomes slow.
        """
        seconds: dict[int, float] = {}
        for own, info in zip(own_s, infos, strict=True):
            seconds[info.data_parallel] = max(own, seconds.get(info.data_parallel, 0.0))
        if len(seconds) < 2 or not all(seconds.values()):
            return {}, None
        slowest = max(seconds, key=lambda replica: seconds[replica])
        others = median(value for replica, value in seconds.items() if replica != slowest)
        ratio = seconds[slowest] / others
        slow = ratio >= RATIO and seconds[slowest] - others >= LEAST_S
        self._steps = self._steps + 1 if slow and slowest == self._slowest else int(slow)
        self._slowest = slowest
        warning = _warning(slowest, ratio, seconds[slowest] - others, infos) if self._steps == STEPS else None
        return {METRIC: ratio}, warning


def _warning(replica: int, ratio: float, waited_s: float, infos: Sequence[RankInfo]) -> str:
    ranks = [rank for rank, info in enumerate(infos) if info.data_parallel == replica]
    hosts = sorted({infos[rank].host for rank in ranks})
    return (
        f"data-parallel replica {replica} (ranks {', '.join(map(str, ranks))} on {', '.join(hosts)}) has needed longer "
        f"than the others for {STEPS} steps, now {ratio:.2f} times as long; all wait {waited_s:.1f} s a step for it: "
        "look at the clocks and temperatures of its GPUs (nvidia-smi -q -d PERFORMANCE) and what else runs on its node"
    )
