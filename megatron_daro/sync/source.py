"""What a weight transport has between its two ends: plans, reports, and the Protocol of whoever has the weights.

Place in the data flow: an engine makes a plan and hands it to a WeightSource (the policy's ranks, or a stream of
buckets in this process); the source sends, and reports what it sent and who failed. Holds records only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megatron_daro.types import Rollout

Post = Callable[[str, str, Mapping[str, Any], float], Awaitable[Any]]
"""(url, path, JSON body, deadline in seconds) -> JSON answer. Raises EngineError."""

# Tensors that a server keeps as they are (it fuses q, k, v and gate, up) and that are cheap to hash.
_HASHED = ("norm.weight", "o_proj.weight")


@dataclass(frozen=True, slots=True)
class Target:
    """A server that receives: its name, its address, its first rank in the group, and its number of ranks."""

    name: str
    url: str
    rank_offset: int
    ranks: int


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """One update through process groups. timeout_s: of each call and each broadcast."""

    targets: tuple[Target, ...]
    bucket_bytes: int
    timeout_s: float
    checksums: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of a group: one sender and those of all servers."""
        return 1 + sum(target.ranks for target in self.targets)


@dataclass(frozen=True, slots=True)
class SendReport:
    """What was sent. checksums: of some tensors by (HF name): (dtype, first 16 hex digits of sha256). failures: server
    name -> what went wrong; if there is one, no server may be taken to have the new weights."""

    num_bytes: int = 0
    num_buckets: int = 0
    send_s: float = 0.0
    checksums: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: SendReport) -> SendReport:
        """Both together: those of two pipeline stages."""
        return SendReport(
            self.num_bytes + other.num_bytes,
            self.num_buckets + other.num_buckets,
            self.send_s + other.send_s,
            {**self.checksums, **other.checksums},
            {**self.failures, **other.failures},
        )


class WeightSource(Protocol):
    """Whoever has the policy's weights."""

    @property
    def version(self) -> int:
        """The version of the weights as they are now."""
        ...

    def hold(self) -> AbstractAsyncContextManager[None]:
        """While it is held the weights do not change. The three calls below must stand within."""
        ...

    async def broadcast(self, plan: BroadcastPlan) -> SendReport:
        """Sends everything to every target. Failures are reported, not raised."""
        ...

    async def write(self, directory: Path, shard_bytes: int) -> SendReport:
        """Writes an HF checkpoint into a directory that does not exist yet: whole, or not at all (SyncError)."""
        ...

    async def push(self, plan: BroadcastPlan) -> SendReport:
        """Hands handles of GPU memory to servers of the same host. Failures are reported, not raised."""
        ...

    async def score(self, rollouts: Sequence[Rollout]) -> list[np.ndarray] | None:
        """float32 [R] log-probs of each rollout's response under these weights; None where that cannot be computed."""
        ...


@runtime_checkable
class PullsWeights(Protocol):
    """An engine that takes weights from a source by a transport of its own, instead of as buckets."""

    async def update_from(self, source: WeightSource, version: int) -> Mapping[str, float]:
        """Makes every server generate with the source's weights, under this version. Returns metrics."""
        ...


def is_hashed(name: str) -> bool:
    """Whether the checksum of this tensor is part of a report."""
    return name.endswith(_HASHED)
