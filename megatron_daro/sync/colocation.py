"""Who has the GPUs: policy and engine in turns if they share them (`Colocation`), else each its own (`OwnGpus`).

The controller calls `to_policy` before it trains a batch, and before the last checkpoint; the engine takes its memory
back during a weight update. Both are in GPU memory together only while weights are sent and checked, and then the
policy has only its weights there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

from megatron_daro.deadlines import Deadlines
from megatron_daro.sync.publish import WeightSync
from megatron_daro.types import KINDS_OF_MEMORY, MemoryKind, MemoryMove

_MIB = 2**20
_WEIGHTS: tuple[MemoryKind, ...] = ("weights",)
# How much may stay on a device for good (tables of angles, work space of libraries), and by how much this may grow.
_MOST_LEFT_PART, _MOST_GROWTH = 0.1, 64 * _MIB
# What servers keep includes the CUDA contexts of their processes, which grow as kernels are loaded.
_MOST_GROWTH_OF_SERVERS = 512 * _MIB


class MovablePolicy(Protocol):
    """A policy whose memory can be moved to the host."""

    async def offload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move these kinds to the host. Returns the largest numbers of all ranks."""
        ...

    async def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Move them back, bit for bit. Returns the largest numbers of all ranks."""
        ...


@runtime_checkable
class SharingEngine(Protocol):
    """An engine that can release its GPU memory; a weight update takes it again."""

    async def release_memory(self) -> None:
        """Give the GPUs to the policy. Raises EngineError: no server is left."""
        ...

    def allow_starts(self) -> None:
        """Begin the engine's turn: servers that died in the policy's turn may be started again."""
        ...


class Gpus(Protocol):
    """The GPUs of one run, as the controller sees them."""

    @property
    def policy_is_ready(self) -> bool:
        """Whether the policy can train and save."""
        ...

    async def to_policy(self) -> None:
        """Make the policy ready; afterwards the engine may not be."""
        ...

    async def publish(self, sync: WeightSync, version: int) -> Mapping[str, float]:
        """Publish the weights; the engine is ready then, and the policy may no longer be. Returns metrics. Raises as
        `WeightSync.publish`."""
        ...


class OwnGpus:
    """Policy and engine have GPUs of their own, or the run has no engine: the policy is always ready."""

    policy_is_ready = True

    async def to_policy(self) -> None:
        """Do nothing."""

    async def publish(self, sync: WeightSync, version: int) -> Mapping[str, float]:
        """See `Gpus.publish`."""
        return await sync.publish(version)


class Colocation:
    """Policy and engine take turns; the policy has the first."""

    def __init__(
        self, policy: MovablePolicy, engine: SharingEngine, deadlines: Deadlines, warn: Callable[[str], None]
    ) -> None:
        """Move nothing. Args: deadlines: `memory` bounds each move. warn: tells the user of memory left behind."""
        self._policy, self._engine, self._within, self._warn = policy, engine, deadlines.within, warn
        self.policy_is_ready = True
        self._metrics = dict.fromkeys(("timing/to_engine_s", "memory/moved_bytes"), 0.0)
        self._has_worked = False  # whether a batch may have been trained: libraries take their work space then
        self._left = LeftBehind("a rank's device after its memory went to the host", _MOST_GROWTH)
        where = "a device, contexts included, after the servers gave their memory back"
        self._servers_left = LeftBehind(where, _MOST_GROWTH_OF_SERVERS)

    async def to_policy(self) -> None:
        """Release the engine's memory, then onload the policy."""
        await self._within("memory", self._engine.release_memory(), what="of the engine")
        move = await self._within("memory", self._policy.onload(KINDS_OF_MEMORY), what="of the policy")
        self.policy_is_ready = self._has_worked = True
        self._metrics["memory/servers_left_bytes"] = float(move.others)
        self._tell(self._servers_left.observe(move.others))

    async def publish(self, sync: WeightSync, version: int) -> Mapping[str, float]:
        """See `Gpus.publish`; the metrics include those of the moves."""
        await self._make_room()
        metrics = await sync.publish(version)
        await self._to_engine()
        return {**metrics, **self._metrics}

    async def _make_room(self) -> None:
        """Offload everything of the policy except its weights, which are to be sent."""
        started = time.perf_counter()
        move = await self._within("memory", self._policy.offload(("gradients", "optimizer")), what="of the policy")
        self._metrics["memory/moved_bytes"] = float(move.moved)
        self._metrics["timing/to_engine_s"] = time.perf_counter() - started

    async def _to_engine(self) -> None:
        """Offload the policy's weights too; from then on the GPUs are the engine's alone."""
        started = time.perf_counter()
        move = await self._within("memory", self._policy.offload(_WEIGHTS), what="of the policy")
        self.policy_is_ready = False
        self._engine.allow_starts()
        self._metrics["memory/moved_bytes"] += float(move.moved)
        self._metrics["memory/left_bytes"] = float(move.left)
        self._metrics["timing/to_engine_s"] += time.perf_counter() - started
        if self._has_worked:
            self._tell(self._left.observe(move.left, of=move.left + int(self._metrics["memory/moved_bytes"])))

    def _tell(self, warning: str) -> None:
        if warning:
            self._warn(warning)


class LeftBehind:
    """Distinguishes memory that should have been released from what may stay for good."""

    def __init__(self, where: str, growth: int) -> None:
        """Know nothing yet: the first observation shows what stays for good.

        Args:
            where: the memory stays, for messages. growth: bytes by which it may grow.
        """
        self._where, self._growth = where, growth
        self._before: int | None = None

    def observe(self, left: int, *, of: int | None = None) -> str:
        """Return a warning, or an empty text. The first time, warn if more stayed than both `growth` and a tenth of
        what was there; later, if what stayed has grown by more than `growth` since the first time or the last warning.

        Args:
            left: bytes that stayed. of: bytes that were there; None: not known, so the first time gives no warning.
        """
        before, text = self._before, f"engine.colocate: {left / _MIB:,.0f} MiB stayed on {self._where}"
        if before is None:
            self._before = left
            much = of is not None and left > max(self._growth, _MOST_LEFT_PART * of)
            return f"{text}, of {of / _MIB:,.0f} MiB; the other side lacks it" if of and much else ""
        if left - before <= self._growth:  # compared with the first time or the last warning, so small growth adds up
            return ""
        self._before = left
        return f"{text}, {before / _MIB:,.0f} MiB earlier; it grows, and the other side lacks it: please report it"
