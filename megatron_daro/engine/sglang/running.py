"""A group while servers generate it: what is there already, what is still to be asked for, and where it is asked.

Place in the data flow: engine.py keeps one for each group under way. It asks nobody itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_daro.engine.sglang.fleet import Server
from megatron_daro.types import GroupRequest, Rollout


@dataclass(eq=False)
class Running:
    """A group that is being generated. failed_on: the last server that failed. done and partial: by index."""

    request: GroupRequest
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ids: tuple[str, ...] = ()
    server: Server | None = None
    failed_on: Server | None = None
    done: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, Rollout] = field(default_factory=dict)

    def remaining(self) -> GroupRequest:
        """Return what is still to be asked for."""
        indices = tuple(i for i in self.request.indices if i not in self.done)
        return replace(self.request, indices=indices, partial={i: r for i, r in self.partial.items() if i in indices})

    def take(self, rollouts: Sequence[Rollout]) -> bool:
        """Keep what came. Returns whether anything is new."""
        before = sum(r.response_length for r in self.partial.values()), len(self.done)
        for rollout in rollouts:
            if rollout.finish_reason != "abort":
                self.done[rollout.index] = rollout
            elif rollout.response_length:
                self.partial[rollout.index] = rollout
        return (sum(r.response_length for r in self.partial.values()), len(self.done)) != before

    def collected(self) -> tuple[Rollout, ...]:
        """Return what there is: finished rollouts, and for the others what they got to."""
        cut = {i: r for i, r in self.partial.items() if r is not self.request.partial.get(i)}
        found = cut | self.done
        return tuple(found[i] for i in self.request.indices if i in found)
