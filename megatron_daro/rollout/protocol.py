"""The interfaces that the rollout code expects of everything it drives, and the controller of the policy.

The seam between the loop and everything that can be swapped: embedded engine or SGLang servers, the policy behind Ray
or in process, fakes in tests. It holds Protocols only, no behaviour. The controller needs some more: `BatchSource`
(sampled_batch.py), `Gpus` (sync/colocation.py), and for weights `ExportingPolicy` and `ReceivingEngine`
(sync/publish.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron_daro.types import Group, GroupRequest, PreparedStep, Prompt, Rollout, StepBatch, StepResult, Verdict


class Engine(Protocol):
    """A rollout engine: token ids in; tokens, log-probs, finish reason and weight version out.

    None of the methods may block the event loop; each may be cancelled.
    """

    async def start(self) -> None:
        """Become ready to generate. Raises DaroError when that is not possible."""
        ...

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of a request as one tuple as soon as all of them have ended; requests come in any order.

        Every rollout carries the group id, attempt and index of its request, its decoded `text`, and `loss_mask` and
        `logprobs` of its response. A rollout that could not be finished has the finish reason "abort" or is left out;
        one that stopped at its limit in `limits` has "segment". Closing the iterator early aborts what is still
        running. Many calls, each with one or more requests, may run at once: the engine itself limits how much it
        generates concurrently. A call may have several requests for one group: in conversations those of its rollouts
        that have other tokens so far. An engine may continue from a request's `partial`, or start over.
        """
        ...

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all), including those that are still queued; their iterators end soon.

        Their rollouts come back with the finish reason "abort" and the tokens they have, or not at all.
        """
        ...

    async def close(self) -> None:
        """Release processes, memory and sockets. May be called twice."""
        ...


@runtime_checkable
class HasEnding(Protocol):
    """An engine with processes of its own; the run ends when they do."""

    async def fatal_error(self) -> Exception:
        """Wait until the engine cannot go on, and return the cause."""
        ...


class Rollouter(Protocol):
    """Takes groups from their prompts to scored rollouts: `SingleTurn`, `Conversations` or `Mixed`."""

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield rollouts like `Engine.generate`; a rollout may be a whole conversation. Raises EngineError,
        WorkerError, RewardError, RolloutError."""
        ...

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop groups like `Engine.abort`."""
        ...

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Return one verdict per finished rollout, in order. Raises RewardError, WorkerError."""
        ...

    def counters(self) -> dict[str, int]:
        """Return metric key -> count since the run began; empty where nothing but the engine can fail."""
        ...

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Continue from the counts of a checkpoint, which also has the keys of other parts."""
        ...

    async def close(self) -> None:
        """Release everything but the engine and the verifiers. May be called twice."""
        ...


class Scorer(Protocol):
    """Verifies answers: `reward.pool.RewardPool`, or a run's `VerifierPools`."""

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Return one verdict per (answer text, gold answer, statement of the problem), in order. Raises RewardError,
        WorkerError."""
        ...

    @property
    def failed_starts(self) -> int:
        """Starts of verifier processes that failed and were retried, since the run began or was resumed."""
        ...


class Teacher(Protocol):
    """Reads what the policy wrote, for distillation."""

    async def read(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return finished rollouts, in order, with `teacher_logprobs`. Raises EngineError."""
        ...


class PromptSource(Protocol):
    """An endless, restartable stream of prompts."""

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts; there always are more, since prompts come again."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn the outcomes of the prompts of a batch. Called once per batch, with the groups that were completed
        while it was filled, ordered by group id."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the cursor as JSON-able plain values; a copy, not a view."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
        ...


class Notices(Protocol):
    """Where a person is told what happened; the progress display is one."""

    def notice(self, message: str) -> None:
        """Report something worth knowing."""
        ...

    def warn(self, message: str) -> None:
        """Report something that a person should look at."""
        ...


class PhaseTimer(Protocol):
    """Measures the time of a named phase; `observe.phases.Phases` is one."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the `with` body under this name."""
        ...


class Policy(Protocol):
    """The policy under training."""

    async def prepare(self, batch: StepBatch) -> PreparedStep:
        """Return the batch with the log-probs and values that its loss needs, by the current weights or a
        reference's."""
        ...

    async def train(self, prepared: PreparedStep, step: int) -> StepResult:
        """Take one optimizer step. If something is not finite it is not taken: StepResult.skipped or NonFiniteError."""
        ...

    async def save(self, directory: Path, captured: Callable[[], None]) -> None:
        """Write everything it needs into an existing, empty directory.

        `captured` is called as soon as the next step may begin; the files hold the state at the time of the call to
        `save`. Raises LostSaveError: that state is gone, since a rank was lost and another step was taken meanwhile;
        the run goes on.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Continue from a directory that `save` has written."""
        ...

    async def close(self) -> None:
        """Release processes and memory. May be called twice."""
        ...


class MetricsSink(Protocol):
    """The run's metrics; `observe.metrics.MetricsLog` is one."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step; durable when it returns."""
        ...

    def truncate_after(self, step: int) -> int:
        """Drop later steps. Returns the number of lines dropped."""
        ...


class Progress(Notices, Protocol):
    """What a person sees; `observe.progress.Progress` is one."""

    def stage(self, name: str, text: str = "") -> None:
        """Show under a name what the start is waiting for; an empty text removes it."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        ...


class Phases(PhaseTimer, Protocol):
    """Time per phase; `observe.phases.Phases` is one."""

    def collect(self) -> Mapping[str, float]:
        """Return `timing/*` since the last call."""
        ...


class CheckpointStore(Protocol):
    """Where checkpoints go; `Checkpoints` of checkpoints.py is one."""

    async def save(
        self, step: int, write: Callable[[Path], Awaitable[None]], state: Mapping[str, Any], notices: Notices
    ) -> Path:
        """Make a durable checkpoint of `state` and of what `write` puts into a directory. After an error there is
        none, or a whole one that may not outlive a crash of the machine."""
        ...
