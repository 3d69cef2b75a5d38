"""How long the loop waits for each kind of work: one table, scaled by `trainer.deadline_scale`, and one way to wait.

The loop awaits everything outside itself through `Deadlines.within`, or with one of these limits, so that a hung
engine, verifier, policy or disk ends as a DeadlineError that names what was awaited, even if it ignores being
cancelled. Where one of its parts waits for another (the next batch, the engine's lock, the end of an evaluation), no
limit is needed: the other's waits have theirs. Not here: limits of single messages (a block of a snapshot, a bucket of
weights, a call of a server's actor), which hold on any machine, and the limits that users set for servers, verifiers
and environments (`engine.sglang`, `reward`, `environment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from megatron_daro.errors import DeadlineError

T = TypeVar("T")
_GRACE_S = 5.0
_MARGIN_S = 600.0
"""How much longer a wait is than the longest one inside it."""
STARTS, TRIES = 3, 3
"""STARTS: how often in a row the only server is started (engine/sglang/fleet.py). TRIES: how often a group's missing
rollouts are requested in one flight (`BatchFiller.fill`) before the group is dropped, or in an evaluation before the
set is left out (rollout/)."""

INSIDE: Mapping[str, tuple[str, ...]] = {
    "collective": ("update_call",),  # the other ranks gather the next bucket of weights while a server takes one
    "heal": ("leave", "placement", "workers_start", "collective"),
    "verifier_start": ("pool_start",),
    "policy_start": ("collective",),
    "engine_start": ("workers_start", "server_start", "update_call"),
    "memory": ("server_start", "update_call"),
    "save": ("heal",),
    "sync": ("engine_start", "only_server", "memory", "save"),  # a save that a loss broke is repeated before it
    "load": ("collective",),
    "logprob": ("heal",),
    "train": ("heal",),
    "export": ("heal",),
    "score": ("pool_start", "verdicts"),
    "next_group": ("pool_start", "engine_start", "only_server", "request", "conversation", "score", "teacher", "abort"),
    "evaluate": ("pool_start", "engine_start", "only_server", "request", "conversation", "verdicts"),
}
"""Wait -> what may run inside it for all of its own time: other waits (in lines above, with what is inside them) and
limits that users set (see `Deadlines.of`). `abort` and `close` contain nothing: they cut short what they end, and a
complete batch waits for the verdicts and teacher of further groups no longer than `score`.

Single limits are compared, not amounts of work: an evaluation of very many answers needs a larger
`trainer.deadline_scale`. `verdicts` allows each answer of one round its full time; a pool whose workers die again and
again takes longer, and so do problems with several answers. Not counted: retries of requests that used all of their
time, so two or three of them in a row end a run that waits for that group alone; and an optimizer step that is waited
for or repeated after the loss of a rank or of the only server, which may end a run whose steps take hours."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each wait may take. Generous: they tell a hang from slow work, not slow work from fast."""

    placement: float = 600.0
    """Until the Ray cluster has room for every rank and server."""
    policy_start: float = 3600.0
    """Until every rank of the policy runs and has its weights; with `engine.colocate` once for each of the two."""
    verifier_start: float = 1500.0
    """Until the verifiers' processes run."""
    engine_start: float = 1800.0
    """Until an engine can generate (a server loads its model)."""
    workers_start: float = 300.0
    """Until answer workers, server processes or a replacement rank are ready, at each start."""
    pool_start: float = 900.0
    """Until the verifiers or the environments' workers of a node are ready, at each start."""
    next_group: float = 7800.0
    """Until a batch gets on: an engine call ends, its answers scored, or the answers of one of its groups come."""
    abort: float = 60.0
    """Until an engine acknowledged an abort."""
    score: float = 7200.0
    """Until the verdicts of one group arrive, from when its answers are handed in: they queue behind other groups'."""
    teacher: float = 7200.0
    """A teacher's log-probs for the answers of a group, while other groups queue for it too."""
    build: float = 600.0
    """Building the columns of one optimizer step, or the metrics of a batch."""
    logprob: float = 14400.0
    """Old and reference log-probs and a critic's values of one optimizer step."""
    train: float = 14400.0
    """One optimizer step."""
    collective: float = 1800.0
    """One collective operation of the ranks."""
    sync: float = 4800.0
    """Sending the weights to the engines."""
    memory: float = 1800.0
    """Offloading or onloading the policy's memory, or having servers release theirs."""
    evaluate: float = 14400.0
    """One evaluation."""
    write: float = 600.0
    """Writing the rollouts, metrics or routed experts of a step to disk."""
    save: float = 4200.0
    """Saving a checkpoint."""
    load: float = 3600.0
    """Loading a checkpoint, or in a replay the rollouts of a batch."""
    leave: float = 120.0
    """After the death of a rank: until another one has aborted its collective calls; then again, until it has left its
    process groups."""
    heal: float = 3600.0
    """Replacing dead ranks and repeating the steps after the snapshot."""
    export: float = 7200.0
    """Writing the trained model as a Hugging Face directory."""
    close: float = 60.0
    """Closing one component."""

    @classmethod
    def of(
        cls,
        scale: float,
        *,
        server_start: float = 0.0,
        request: float = 0.0,
        update_call: float = 0.0,
        conversation: float = 0.0,
        verdicts: float = 0.0,
    ) -> Deadlines:
        """Return the table scaled, with each wait longer than the longest one inside it.

        Args:
            scale: `trainer.deadline_scale`, > 0. The others are seconds that users allow; the scale leaves them alone.
            server_start: for one start of a server. request: for one request. update_call: for one call of a weight
            update. conversation: for all conversations of one group, one try each. verdicts: for the answers of a
            round.
        """
        waits = {name: seconds * scale for name, seconds in asdict(cls()).items()}
        allowed = {"server_start": server_start, "only_server": STARTS * server_start, "request": request}
        allowed |= {"update_call": update_call, "conversation": TRIES * conversation, "verdicts": verdicts}
        for outer, inside in INSIDE.items():
            longest = max((waits | allowed)[name] for name in inside)
            waits[outer] = max(waits[outer], longest + _MARGIN_S * scale)
        return cls(**waits)

    async def within(self, name: str, awaitable: Awaitable[T], *, what: str = "") -> T:
        """Await something under the deadline of this name.

        Args:
            name: a field of this table.
            awaitable: cancelled when the time is over or the caller is cancelled.
            what: details for the message, such as "step 20".

        Returns:
            The result.

        Raises:
            DeadlineError: the time is over. What the awaitable itself raises passes through.
        """
        seconds: float = getattr(self, name)
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            await _cancel(task)
            raise
        if done:
            return task.result()
        await _cancel(task)
        detail = f" ({what})" if what else ""
        raise DeadlineError(
            f"deadline '{name}'{detail}: not done after {seconds:g} s. "
            "If this is slow and not hung, raise trainer.deadline_scale; else look at the log of what was awaited"
        )


async def _cancel(task: asyncio.Future) -> None:
    """Cancel a task and wait a moment; leave behind one that ignores it."""
    task.add_done_callback(mark_as_seen)  # the task may end later, and this wait may be cancelled as well
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


def mark_as_seen(task: asyncio.Future) -> None:
    """Keep the event loop from reporting this task's error as never retrieved: another error is raised."""
    if not task.cancelled():
        task.exception()


async def to_the_end(work: Awaitable[T]) -> T:
    """Return the result of work that has deadlines of its own; a cancellation of the caller waits until it is done."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        mark_as_seen(task)
        raise cancelled
    return task.result()


def first_cause(error: BaseException) -> BaseException:
    """Return the first real error inside nested exception groups: the one to show on the last line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
