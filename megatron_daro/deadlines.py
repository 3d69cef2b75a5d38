"""How long the loop waits for a piece of work, in one table that `trainer.deadline_scale` scales, and the one way to
wait.

What comes from outside the loop is awaited through `Deadlines.within`, or with one of these limits, so
a hung engine, verifier, policy or disk ends as a DeadlineError that names what was awaited. Refuses to wait for ever,
also for something that ignores being cancelled. Not here: constants of one message (a block of a snapshot, a bucket of
weights, a call of a server's actor), which no machine is too slow for, and what users set for servers, verifiers and
environments (`engine.sglang`, `reward`, `environment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from megatron_daro.errors import DeadlineError

T = TypeVar("T")
_GRACE_S = 5.0
_MARGIN_S = 600.0
"""Of a wait, beyond the longest limit of what runs inside it."""
STARTS, TRIES = 3, 3
"""Starts in a row that the only server is given (engine/sglang/fleet.py), and times that a group's missing rollouts are
requested before it is dropped, or in an evaluation before the set is left out (rollout/)."""

INSIDE: Mapping[str, tuple[str, ...]] = {
    "collective": ("update_call",),  # the other ranks gather the next bucket of weights while a server takes one
    "heal": ("leave", "placement", "workers_start", "collective"),
    "verifier_start": ("workers_start",),
    "policy_start": ("collective",),
    "engine_start": ("workers_start", "server_start", "update_call"),
    "memory": ("server_start", "update_call"),
    "sync": ("engine_start", "only_server", "memory", "heal"),
    "load": ("collective",),
    "logprob": ("heal",),
    "train": ("heal",),
    "save": ("heal",),
    "export": ("heal",),
    "score": ("workers_start", "verdicts"),
    "next_group": ("engine_start", "only_server", "request", "conversation", "score", "teacher", "abort"),
    "evaluate": ("engine_start", "only_server", "request", "conversation", "verdicts"),
    "batch": ("next_group", "write"),
    "engine_free": ("next_group", "write", "sync", "evaluate"),
    "turn": ("build", "logprob", "train", "sync", "evaluate", "save", "write"),
}
"""Wait -> what runs inside it and may take all of its own time: other waits, in lines above, and what users allow (see
`Deadlines.of`). What is inside those is inside as well. `abort` and `close` have nothing: they cut short what they end.
Verdicts are those of the answers of one round, each in its time: a pool whose workers die again and again takes longer,
and so do problems with several answers. Not counted: further tries of a request that took all of its time, so two or
three in a row end a run that waits for this group alone; after the loss of a rank or the only server, something may
wait for an optimizer step, or repeat one; where a step takes hours that may end the run."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each wait may take. Generous: they tell a hang from slow work, not slow from fast."""

    placement: float = 600.0
    """Until the Ray cluster has room for every rank and server."""
    policy_start: float = 3600.0
    """Until every rank of the policy runs, and then has its weights."""
    verifier_start: float = 900.0
    """Until the verifiers' processes run."""
    engine_start: float = 1800.0
    """Until an engine can generate (a server loads its model)."""
    workers_start: float = 300.0
    """Until processes that ask servers, hold one, verify or run environments are ready, or a replaced rank: each time
    they are started."""
    next_group: float = 7800.0
    """Until the next complete group of a batch arrives, whichever it is."""
    abort: float = 60.0
    """Until an engine acknowledged an abort."""
    score: float = 7200.0
    """Until the verdicts of one group arrive, after those of all groups that came before it."""
    teacher: float = 7200.0
    """A teacher's log-probs of the answers of a group, or of a round, while others wait for it too."""
    engine_free: float = 28800.0
    """Until the engine is free: what has it (a batch, a sync, an evaluation) ends."""
    turn: float = 28800.0
    """Until training has caught up, so that the next batch may be generated; for each optimizer step until then."""
    batch: float = 28800.0
    """Until the next batch is complete."""
    build: float = 600.0
    """Putting the columns of one optimizer step, or a batch's metrics, together."""
    logprob: float = 14400.0
    """Old and reference log-probs and a critic's values of one optimizer step."""
    train: float = 14400.0
    """One optimizer step."""
    collective: float = 1800.0
    """One collective operation of the ranks."""
    sync: float = 4200.0
    """Moving the weights to the engines."""
    memory: float = 1800.0
    """Moving the policy's memory to the host or back, or having servers give theirs back."""
    evaluate: float = 14400.0
    """One evaluation."""
    write: float = 600.0
    """Writing rollouts, metrics or the experts of a step to disk."""
    save: float = 4200.0
    """Saving a checkpoint."""
    load: float = 3600.0
    """Loading a checkpoint, or in a replay the rollouts of a batch."""
    leave: float = 120.0
    """Until a rank has aborted its collective calls, and then until it has left its groups, when another one died."""
    heal: float = 3600.0
    """Replacing ranks that died, and repeating what came after the snapshot."""
    export: float = 7200.0
    """Writing the trained model as a Hugging Face directory."""
    close: float = 60.0
    """Closing one component."""

    @classmethod
    def of(
        cls,
        scale: float,
        *,
        steps_per_turn: int = 1,
        server_start: float = 0.0,
        request: float = 0.0,
        update_call: float = 0.0,
        conversation: float = 0.0,
        verdicts: float = 0.0,
    ) -> Deadlines:
        """Return the table times a factor > 0, where each wait is longer than the longest that runs inside it.

        Args:
            scale: `trainer.deadline_scale`. steps_per_turn: optimizer steps that a batch may have to wait for; before
                the last, all those of the batches ahead. The others are seconds that users allow, which the scale
                leaves alone.
            server_start: for one start of a server. request: for one. update_call: for one call of a weight update.
            conversation: for those of one group, once. verdicts: for those of the answers of one round.
        """
        waits = {name: seconds * scale for name, seconds in asdict(cls()).items()}
        waits["turn"] *= steps_per_turn
        allowed = {"server_start": server_start, "only_server": STARTS * server_start, "request": request}
        allowed |= {"update_call": update_call, "conversation": TRIES * conversation, "verdicts": verdicts}
        for outer, inside in INSIDE.items():
            longest = max((waits | allowed)[name] for name in inside)
            waits[outer] = max(waits[outer], longest + _MARGIN_S * scale)
        return cls(**waits)

    async def within(self, name: str, awaitable: Awaitable[T], *, what: str = "") -> T:
        """Awaits under the deadline of this name.

        Args:
            name: a field of this table.
            awaitable: what to wait for; cancelled when the time is over or the caller is cancelled.
            what: details for the message, such as "step 20".

        Returns:
            The result.

        Raises:
            DeadlineError: the time is over. Whatever the awaitable itself raises passes through.
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

    @asynccontextmanager
    async def holding(self, name: str, lock: asyncio.Lock) -> AsyncIterator[None]:
        """Hold a lock, once it is free. Raises DeadlineError: it is not free under the deadline of this name."""
        acquired = asyncio.ensure_future(lock.acquire())
        try:
            await self.within(name, acquired)
        except asyncio.CancelledError:
            if acquired.done() and not acquired.cancelled():  # as the cancellation came
                lock.release()
            raise
        try:
            yield
        finally:
            lock.release()


async def _cancel(task: asyncio.Future) -> None:
    """Cancel and wait a moment; a task that ignores it is left behind rather than waited for."""
    task.add_done_callback(mark_as_seen)  # also where it ends later, or this wait is cancelled as well
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


def mark_as_seen(task: asyncio.Future) -> None:
    """Keep the event loop from telling the error of what has ended as forgotten: another one is raised."""
    if not task.cancelled():
        task.exception()


async def to_the_end(work: Awaitable[T]) -> T:
    """Return what work with deadlines of its own gives; a cancellation of the caller waits until it is done."""
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
    """Return the first real error inside nested exception groups: what a person must be shown on the last line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
