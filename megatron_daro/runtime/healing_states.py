"""How healing reacts to a lost rank: its states, and the pure function from a state and an event to the next state.

    training -- work stopped --> leaving -- all left --> replacing -- all restored --> repeating -- done --> training
                                    ^                        |                             |
                                    +--------------- another rank is lost -----------------+

While healing, each phase may also end in `over`: more losses in an hour than allowed, a rank of whose state no copy is
left, no node with room in time, an error that is not due to a lost rank. `Healing` calls `after` with each event, and
carries out the action that it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ray.actor import ActorHandle

from megatron_daro.errors import WorkerError
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_keepers import peers_of, sources_of
from megatron_daro.runtime.snapshot_store import SnapshotSerials, Source
from megatron_daro.types import StepBatch

_HOUR_S = 3600.0
DoneStep = tuple[int, StepBatch, int]
"""A finished optimizer step: number of the first snapshot that includes it, its batch, its step number."""


@dataclass(frozen=True, slots=True)
class State:
    """per_hour: how many ranks may be replaced within an hour. lost: ranks whose process is gone, before they are
    replaced.

    begun: number of the newest snapshot that was begun. committed: number of the newest that every rank and its peer
    have. steps: done since the committed snapshot. replaced_s: times at which ranks were replaced during the last hour.
    replaced: the ranks replaced since work stopped. failure: why it is over.
    """

    per_hour: int
    phase: Literal["training", "leaving", "replacing", "repeating", "over"] = "training"
    lost: frozenset[int] = frozenset()
    begun: int = 0
    committed: int = 0
    steps: tuple[DoneStep, ...] = ()
    replaced_s: tuple[float, ...] = ()
    replaced: tuple[int, ...] = ()
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """An optimizer step was done."""

    batch: StepBatch
    step: int


@dataclass(frozen=True, slots=True)
class SnapshotBegun:
    """The next snapshot is being taken."""


@dataclass(frozen=True, slots=True)
class SnapshotCommitted:
    """Every rank has this snapshot, and its peer a copy."""

    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The processes of these ranks are gone."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Work on the ranks has stopped until healing is done."""


@dataclass(frozen=True, slots=True)
class Left:
    """Living ranks have left their process groups. serials: the snapshots that these keep, by rank. infos, workers: of
    all ranks."""

    serials: Mapping[int, SnapshotSerials]
    infos: Sequence[RankInfo]
    workers: Sequence[ActorHandle]
    now_s: float


@dataclass(frozen=True, slots=True)
class Restored:
    """All ranks have joined new groups and restored this snapshot."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Repeated:
    """The ranks have repeated this many steps, and have a snapshot of the result."""

    num_steps: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An action failed; ranks that were lost meanwhile are in `State.lost` already."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The ranks cannot be replaced, and why."""

    why: str


Event = Trained | SnapshotBegun | SnapshotCommitted | Lost | Stopped | Left | Restored | Repeated | Failed | Hopeless


@dataclass(frozen=True, slots=True)
class Abort:
    """Have living ranks stop waiting for those that are lost."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Have living ranks leave their process groups."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Start processes for these ranks, and bring all ranks to a snapshot; a rank without it gets it from its
    sources."""

    ranks: tuple[int, ...]
    snapshot: int
    sources: Mapping[int, Sequence[Source]]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Do these steps again, then take a snapshot."""

    steps: tuple[DoneStep, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Tell a person which ranks were replaced, and how many steps were repeated."""

    ranks: tuple[int, ...]
    num_steps: int


Action = Abort | Leave | Replace | Repeat | Report


def after(state: State, event: Event) -> tuple[State, Action | None]:
    """Return the state after an event, and what is to be done now."""
    match event:
        case Trained(batch, step):
            return replace(state, steps=(*state.steps, (state.begun + 1, batch, step))), None
        case SnapshotBegun():
            return replace(state, begun=state.begun + 1), None
        case SnapshotCommitted(number):
            return replace(state, committed=number, steps=_since(state, number)), None
        case Lost(ranks):
            is_news = state.phase == "training" and not ranks <= state.lost
            return replace(state, lost=state.lost | ranks), Abort() if is_news else None
        case Stopped():
            return (replace(state, phase="leaving"), Leave()) if state.lost and not state.failure else (state, None)
        case Left():
            return _after_leaving(state, event)
        case Restored(number):
            return replace(state, phase="repeating"), Repeat(_since(state, number))
        case Repeated(num_steps):
            return replace(state, phase="training", replaced=()), Report(state.replaced, num_steps)
        case Failed(error):
            if state.lost and isinstance(error, WorkerError):
                return state, None  # work is still stopped: healing begins again, with all ranks that are lost by now
            return replace(state, phase="over", failure=error), None
        case Hopeless(why):
            error = WorkerError(f"{why}. --resume goes on from the newest checkpoint, if there is one")
            return replace(state, phase="over", failure=error), None


def _since(state: State, snapshot: int) -> tuple[DoneStep, ...]:
    return tuple(step for step in state.steps if step[0] > snapshot)


def _after_leaving(state: State, left: Left) -> tuple[State, Action | None]:
    """Replace the lost ranks, unless too many were replaced. All go back to the newest snapshot that every rank has or
    can get from others, which may be one that was not committed yet."""
    lost = tuple(sorted(state.lost))
    recent = tuple(at_s for at_s in state.replaced_s if left.now_s - at_s <= _HOUR_S)
    if len(recent) + len(lost) > state.per_hour:
        why = (
            f"rank {', '.join(map(str, lost))} died, and {len(recent)} ranks were replaced within the last hour; "
            f"allowed: {state.per_hour} (trainer.max_replacements)"
        )
        return after(state, Hopeless(why))
    missing = 0
    for snapshot in sorted({state.begun, state.committed}, reverse=True):
        sources = sources_of(snapshot, left.serials, left.infos, left.workers)
        if not isinstance(sources, int):
            replaced_s, replaced = recent + (left.now_s,) * len(lost), state.replaced + lost
            state = replace(state, phase="replacing", lost=frozenset(), replaced_s=replaced_s, replaced=replaced)
            return state, Replace(lost, snapshot, sources)
        missing = sources
    peer = peers_of(left.infos)[missing]
    why = (
        f"rank {', '.join(map(str, lost))} died, and rank {peer} keeps the copy of rank {missing}: nobody has the "
        "state of that rank any more"
    )
    return after(state, Hopeless(why))
