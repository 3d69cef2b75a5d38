"""The training loop: batches of rollouts in, optimizer steps, weight syncs, checkpoints and metrics out.

The composition root (runtime/launch.py) builds the parts and runs one Controller. `run` syncs the first weights,
evaluates them at step 0 where that is due, then has three coroutines under one task group:

    _generate --batches, then None--> _queue --> _train --> _end_batch -----> engine
        ^                                          |
        +------------- Pace.batch_done ------------+          _watch: a stop ends _generate

    coroutine   waits for                                          unblocked by
    _generate   its turn: batch m needs m - 1 - batches_ahead      `_end_batch`, once the engine has the weights
                trained, so 0 is synchronous training, and 1       of a batch
                overlaps the two, by the same code;
                the engine (`_engine_lock`)                        the sync or evaluation that holds it
    _train      a batch, or None: there are no more                `_generate`
                after its last step, an evaluation beside it;      its end, or a stop
                then, and before it where policy and engine        `_generate`, once the batch that it samples is
                take turns on GPUs, the engine (`_engine_lock`):   complete and what is left of it is aborted
                no request runs while weights of all change
    _watch      a stop: the first Ctrl-C                           `request_stop`; `_train` ends after its batch

One batch in `_train_batch`: plan its optimizer steps -> columns of all steps of the first epoch, and log-probs where
the loss needs a pass -> for each step: train, resolve its groups in the ledger; after the last one sync and evaluate;
write rollouts, then metrics. A checkpoint follows a batch, or with shared GPUs comes before the next one, when the
policy has them again; its files are written while the training goes on (`BackgroundSave`). The weight version of the
policy is the number of the last step, also where a step was skipped. `shutdown` closes all parts. Policy, engine and
source of batches are Protocols.

Three locks, taken in this order: `_engine_lock` (the engine generates, or is changed as a whole; a server that joins
gets its weights beside others that generate), `WeightSync`'s own (one sync or comparison at a time), and that of the
policy (`hold`: the ranks work on one thing at a time).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_daro.checkpoints import STATE_FORMAT, BackgroundSave
from megatron_daro.config.sections import TrainerSection
from megatron_daro.data.batch import with_columns_of
from megatron_daro.deadlines import Deadlines, first_cause, to_the_end
from megatron_daro.errors import NonFiniteError
from megatron_daro.observe.drift import DriftWatch
from megatron_daro.observe.step_lines import StepLines
from megatron_daro.rollout.evaluation import Evaluations
from megatron_daro.rollout.ledger import Outcome
from megatron_daro.rollout.minibatches import MiniBatch, passed, plan_minibatches, planned_steps
from megatron_daro.rollout.no_signal import SignalWatch
from megatron_daro.rollout.pace import Pace
from megatron_daro.rollout.protocol import CheckpointStore, MetricsSink, Phases, Progress
from megatron_daro.rollout.recorder import Recorder, read_waiting, write_waiting
from megatron_daro.rollout.sampled_batch import BatchSource, SampledBatch
from megatron_daro.rollout.skipped_steps import SkippedSteps
from megatron_daro.rollout.summary import batch_metrics, step_metrics
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.sync.colocation import Gpus, OwnGpus
from megatron_daro.sync.publish import ExportingPolicy, ReceivingEngine, WeightSync
from megatron_daro.types import Group, PreparedStep, StepBatch, StepResult

_RECORDING_ENDS = (
    "the recording ends here: {step} of {steps} steps (trainer.steps) were trained, and there are no further rollouts"
)
_NOT_EVALUATED = (
    "step {step} is not evaluated, since the run stops; `megatron-daro eval` evaluates checkpoints, and with --hf the "
    "model that the run began with"
)

BuildColumns = Callable[[Sequence[Group], int], StepBatch]
"""Makes the columns of the optimizer step of this number: `data.batch.build_step_batch` with the run's algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a controller drives.

    engine is None for replay. checkpoints, recorder, evaluations and export are left out where the run has none.
    experts: files of the experts that servers chose; None without routing replay.
    export: writes the trained policy out, given the number of steps. closers: further things to close at the end, by
    name, after engine and policy.
    gpus: whose turn it is on those that policy and engine share. drift: warns when engine and trainer drift apart.
    environment_of_source: data source -> name of its environment, of several.
    """

    policy: ExportingPolicy
    source: BatchSource
    build: BuildColumns
    metrics: MetricsSink
    progress: Progress
    phases: Phases
    engine: ReceivingEngine | None = None
    checkpoints: CheckpointStore | None = None
    recorder: Recorder | None = None
    experts: ExpertsFolder | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    export: Callable[[int], Awaitable[None]] | None = None
    gpus: Gpus = field(default_factory=OwnGpus)
    closers: Mapping[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    drift: DriftWatch = field(default_factory=DriftWatch)
    environment_of_source: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    status: finished: at `trainer.steps`, or a replay at the end of its recording, and exported; stopped, with a
    checkpoint of the steps that were done; or interrupted. step: optimizer steps done.
    """

    status: Literal["finished", "stopped", "interrupted"]
    step: int


class Controller:
    """One training run."""

    def __init__(self, section: TrainerSection, parts: Parts, *, batches_ahead: int) -> None:
        """Start nothing; whoever made policy and engine starts them.

        Args:
            section: the configuration's trainer section. `steps` are optimizer steps.
            parts: what is driven.
            batches_ahead: batches that generation may run ahead of training: `RolloutSection.batches_ahead`.
        """
        self._section = section
        self._parts = parts
        self._within = parts.deadlines.within
        self._pace = Pace(section.steps, batches_ahead)
        self.step = 0
        self._lines = StepLines(self._write_line)
        self._signal = SignalWatch()
        self._skips = SkippedSteps()
        self._saving = BackgroundSave(parts.progress)
        self._last_batch: SampledBatch | None = None
        self._weight_sync = WeightSync(parts.policy, parts.engine) if parts.engine else None
        self._queue: asyncio.Queue[SampledBatch | None] = asyncio.Queue()
        self._engine_lock = asyncio.Lock()
        self._stop = asyncio.Event()
        self._stop_at_once = False
        self._run_task: asyncio.Task | None = None

    async def resume(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: policy, prompts, books and files go back to its step. Call before `run`.

        Args:
            checkpoint: a verified checkpoint directory. state: its state.json.
        """
        await self._within("load", self._parts.policy.load(checkpoint), what=str(checkpoint))
        waiting = await self._within("load", asyncio.to_thread(read_waiting, checkpoint), what=str(checkpoint))
        self._parts.source.load_state_dict(state["sampler"], waiting)
        self.step = state["step"]
        self._saving.go_on_from(self.step)
        self._pace.go_on_from(self.step, state["batches_done"])
        self._skips.total = state["skipped_steps"]
        await self.truncate_files()

    async def truncate_files(self) -> None:
        """Take metrics and rollouts back to the current step, so that a resumed run writes the rest again."""
        await self._within("write", asyncio.to_thread(self._truncate), what="metrics and rollouts to go on from")

    def _truncate(self) -> None:
        self._parts.metrics.truncate_after(self.step or -1)  # step 0, the evaluation before training, is done again
        if self._parts.recorder:
            self._parts.recorder.truncate_after(self.step)

    def request_stop(self, cause: str) -> None:
        """Once: finish the batch, save a checkpoint and end, or end the start. Twice, in `run`: end now. Call from the
        event loop's thread."""
        if not self._stop.is_set():
            running = "stopping with a checkpoint of what was trained (once more to stop at once)"
            self._parts.progress.notice(f"{cause}: {running if self._run_task else 'ending the start'}")
            self._stop.set()
        elif self._run_task and not self._stop_at_once:
            self._parts.progress.notice(f"{cause} again: stopping at once, without a checkpoint")
            self._stop_at_once = True
            self._run_task.cancel()

    async def run(self) -> RunOutcome:
        """Train up to `steps`, then close everything, whatever happened.

        Raises:
            DaroError: the first cause of a failure. Everything is closed by then.
        """
        self._run_task = asyncio.current_task()
        try:
            finished = await self.unless_stopped(self._start()) and await self._loop()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        except asyncio.CancelledError:
            if not self._stop_at_once:
                raise
            return RunOutcome("interrupted", self.step)
        finally:
            self._parts.evaluations.cancel()
            try:
                await to_the_end(self.shutdown())  # a death that is noticed only now must not leave the rest open
            except asyncio.CancelledError:
                if not self._stop_at_once:  # the second Ctrl-C: all is closed now, and how the run ended is known
                    raise
        return RunOutcome("finished" if finished else "stopped", self.step)

    async def shutdown(self) -> None:
        """Write the lines that are held, and close engine, policy and the closers. One that fails is reported and does
        not keep the next from closing."""
        closers: dict[str, Callable[[], Awaitable[None]]] = {"metrics": self._lines.close}
        if self._parts.engine:
            closers["engine"] = self._parts.engine.close
        closers["policy"] = self._parts.policy.close
        for name, close in (closers | dict(self._parts.closers)).items():
            try:
                await self._within("close", close(), what=name)
            except Exception as error:  # The supervisor's border: the cause of the end must stay the one that is seen.
                self._parts.progress.warn(f"closing the {name} failed: {type(error).__name__}: {error}")

    async def unless_stopped(self, work: Awaitable[None]) -> bool:
        """Do the work, and say whether it got to the end: a stop ends it at once, with nothing there to be saved."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.wait({task, stop})

    async def _start(self) -> None:
        stage = self._parts.progress.stage
        if self._parts.engine:
            stage("start", "the engine takes its first weights")
        await self._publish("first sync")
        await self._evaluate_first()
        stage("start", f"step {self.step + 1}: rollout and training")
        self._parts.phases.collect()

    async def _evaluate_first(self) -> None:
        """Evaluate the model that training starts from, as step 0 of the metrics."""
        if self.step == 0 and self._parts.evaluations.due(0, 0):
            self._parts.progress.stage("start", "evaluation before the first step")
            await self._parts.evaluations.run(0, self._lines)
            await self._lines.add(0, {})

    async def _loop(self) -> bool:
        """Train, then export. Returns whether there is nothing left to do."""
        async with asyncio.TaskGroup() as tasks:
            generator = tasks.create_task(self._generate(), name="generate")
            watcher = tasks.create_task(self._watch(generator), name="watch")
            try:
                await self._train()
            finally:
                generator.cancel()
                watcher.cancel()
                await self._saving.end(at_once=self._stop_at_once)
        if self._stop.is_set() and self.step < self._section.steps:
            return False
        export, what = self._parts.export, "training is done and saved"
        # A stop ends the export at once: the run that is resumed from the checkpoint writes it.
        return not export or await self.unless_stopped(self._within("export", export(self.step), what=what))

    async def _watch(self, generator: asyncio.Task) -> None:
        """End generation at once when a stop is asked for; what is being trained is finished by `_train`."""
        await self._stop.wait()  # The one wait without a deadline: for a person.
        generator.cancel()
        step = self._parts.evaluations.cancel()
        if step is not None:
            self._parts.progress.notice(_NOT_EVALUATED.format(step=step))

    async def _generate(self) -> None:
        index = self._pace.batches_done
        try:
            while await self._within("turn", self._pace.may_generate(index), what=f"batch {index}"):
                async with self._engine_use():
                    with self._parts.phases.measure("rollout"):
                        batch = await self._parts.source.sample(self._pace.planned_step)
                if batch is None:
                    break
                self._pace.sampled(planned_steps(batch, self._pace.planned_step, self._section))
                self._queue.put_nowait(batch)
                index += 1
        except asyncio.CancelledError:
            self._queue.put_nowait(None)
            raise
        self._queue.put_nowait(None)

    def _engine_use(self) -> AbstractAsyncContextManager[None]:
        """Hold the engine for one user: a batch, a weight sync, an evaluation, or the policy that takes its memory. One
        beside generation only begins so, and each sync waits for its end by itself."""
        return self._parts.deadlines.holding("engine_free", self._engine_lock)

    async def _train(self) -> None:
        while self.step < self._section.steps and not self._stop.is_set():
            batch = await self._within("batch", self._queue.get(), what=f"for step {self.step + 1}")
            if batch is None:
                if not self._stop.is_set():
                    self._parts.progress.warn(_RECORDING_ENDS.format(step=self.step, steps=self._section.steps))
                break
            await self._give_gpus_to_policy()
            await self._checkpoint_if_due()
            await self._train_batch(batch)
            await self._checkpoint_if_due()
        await self._give_gpus_to_policy()
        await self._checkpoint()
        with self._parts.phases.measure("checkpoint"):
            await self._saving.finished()

    async def _train_batch(self, batch: SampledBatch) -> None:
        """All optimizer steps of one batch, epoch by epoch; then the engines get the new weights."""
        self._last_batch = batch
        # Checkpoints continue from this batch's snapshot or a later one's: all other groups are finished in these.
        self._parts.source.ledger.forget_outcomes(but=batch.snapshot.handed_over)
        minibatches, unused = plan_minibatches(batch, self.step, self._section)
        self._resolve(unused, "dropped")
        # All of them before the first step: old log-probs are those of the weights that the batch began with.
        prepared_of_step = {
            minibatch.step: await self._prepare_step(minibatch) for minibatch in minibatches if minibatch.epoch == 1
        }
        first_epoch = tuple(prepared.batch for prepared, _ in prepared_of_step.values())
        of_batch = await self._measure(batch, first_epoch[0].rollouts_per_prompt)
        for minibatch in minibatches:
            if not minibatch.trains:
                self._resolve_step(minibatch, trained=False)
                continue
            if minibatch.step in prepared_of_step:
                prepared, metrics = prepared_of_step.pop(minibatch.step)
            else:
                columns, metrics = await self._build_columns(minibatch, first_epoch)
                prepared = PreparedStep(columns)
            await self._train_step(minibatch, prepared, {**of_batch, **metrics})

    async def _measure(self, batch: SampledBatch, rollouts_per_prompt: int) -> Mapping[str, float]:
        """Return the metrics that all steps of a batch share."""
        with self._parts.phases.measure("build"):
            work = asyncio.to_thread(batch_metrics, batch, rollouts_per_prompt, self._parts.environment_of_source)
            return await self._within("build", work, what="metrics of a batch")

    async def _prepare_step(self, minibatch: MiniBatch) -> tuple[PreparedStep, Mapping[str, float]]:
        """Return one optimizer step of the first epoch with the log-probs that it needs, and metrics of its columns."""
        step_batch, metrics = await self._build_columns(minibatch)
        with self._parts.phases.measure("logprob"):
            work = self._parts.policy.prepare(step_batch)
            return await self._within("logprob", work, what=f"step {minibatch.step}"), metrics

    async def _build_columns(
        self, minibatch: MiniBatch, first_epoch: Sequence[StepBatch] = ()
    ) -> tuple[StepBatch, Mapping[str, float]]:
        """Return the columns of one optimizer step, in a later epoch with log-probs and values of the first, and their
        metrics."""
        with self._parts.phases.measure("build"):
            # In a thread: gigabytes are copied, while the event loop has other groups' answers to take in.
            work = asyncio.to_thread(self._make_columns, minibatch, first_epoch)
            return await self._within("build", work, what=f"step {minibatch.step}")

    def _make_columns(
        self, minibatch: MiniBatch, first_epoch: Sequence[StepBatch]
    ) -> tuple[StepBatch, dict[str, float]]:
        columns = replace(self._parts.build(minibatch.groups, minibatch.step), opens_batch=minibatch.first)
        if first_epoch:
            columns = with_columns_of(columns, first_epoch)
        return columns, step_metrics(minibatch, columns, self._section.steps_per_batch)

    async def _train_step(self, minibatch: MiniBatch, prepared: PreparedStep, of_batch: Mapping[str, float]) -> None:
        """One optimizer step and everything that belongs to it. Args: of_batch: metrics of its batch and its
        columns."""
        with self._parts.phases.measure("train"):
            result = await self._optimizer_step(prepared, minibatch)
        resolved = self._resolve_step(minibatch, trained=not result.skipped)
        self.step = minibatch.step
        metrics = {**result.metrics, **of_batch, **self._book_metrics()}
        if minibatch.last:
            metrics |= await self._end_batch(minibatch.version)
        with self._parts.phases.measure("write"):
            await self._write_rollouts(minibatch, resolved, applied=not result.skipped)
            await self._write_metrics(minibatch, metrics, prepared.batch)

    async def _optimizer_step(self, prepared: PreparedStep, minibatch: MiniBatch) -> StepResult:
        """Ask the policy for a step. One that is not finite stops the run or is skipped."""
        try:
            work = self._parts.policy.train(prepared, minibatch.step)
            result = await self._within("train", work, what=f"step {minibatch.step}")
        except NonFiniteError as error:
            result = StepResult({}, skipped=True, reason=str(error))
        if not result.skipped:
            self._skips.trained(minibatch)
            return result
        where = "observe.save_rollouts is off, so its groups were not written"
        if self._parts.recorder:
            path = await self._to_disk(self._parts.recorder.write_failed, minibatch.step, minibatch.groups)
            where = f"its groups are in {path}"
        message = (
            f"step {minibatch.step}: {result.reason or 'loss or gradient is not finite'}; no optimizer step; {where}"
        )
        if self._section.on_nonfinite == "stop":
            raise NonFiniteError(f"{message}. To skip such steps, set trainer.on_nonfinite=skip")
        self._parts.progress.warn(message)
        self._skips.skipped(minibatch, message)
        return result

    async def _publish(self, what: str) -> Mapping[str, float]:
        """Give the engine the policy's weights; return the metrics of that."""
        if self._weight_sync is None:
            return {}
        return await self._within("sync", self._parts.gpus.publish(self._weight_sync, self.step), what=what)

    async def _give_gpus_to_policy(self) -> None:
        """Bring the policy back to GPUs that it shares with the engine; without them nothing is trained or saved."""
        if not self._parts.gpus.policy_is_ready:
            await self._parts.evaluations.ended()
            async with self._engine_use():
                with self._parts.phases.measure("to_policy"):
                    await self._parts.gpus.to_policy()

    async def _end_batch(self, old_version: int) -> Mapping[str, float]:
        """Sync, and evaluate (where generation may go on meanwhile the evaluation only begins here); then the next
        batch may be generated, beside the writing of this one. Returns metrics of the sync. Args: old_version: the
        weight version that the batch began with."""
        metrics: Mapping[str, float] = {}
        async with AsyncExitStack() as engine:
            with self._parts.phases.measure("sync_wait"):
                await self._parts.evaluations.ended()  # its answers are all of the version that the engine has
                await engine.enter_async_context(self._engine_use())
            if self._weight_sync:
                with self._parts.phases.measure("sync"):
                    metrics = await self._publish(f"step {self.step}")
            if self._parts.evaluations.due(old_version, self.step):
                if self._stop.is_set():
                    self._parts.progress.notice(_NOT_EVALUATED.format(step=self.step))
                else:
                    await self._parts.evaluations.run(self.step, self._lines)
        await self._pace.batch_done(self.step)
        return metrics

    async def _write_rollouts(self, minibatch: MiniBatch, resolved: Sequence[Group], *, applied: bool) -> None:
        """Record what became of the groups. Before the metrics: a line of these means that its rollouts are on disk."""
        if self._parts.recorder:
            groups = {"trained": resolved if applied else (), "filtered": minibatch.filtered}
            groups["dropped"] = (*(() if applied else resolved), *minibatch.dropped)
            record = minibatch.record(applied=applied)
            await self._to_disk(self._parts.recorder.write_step, minibatch.step, groups, record)
        if self._parts.experts:
            work = asyncio.to_thread(self._settle_experts, self._parts.experts, minibatch)
            await self._within("write", work, what=f"experts of step {minibatch.step}")

    async def _write_metrics(self, minibatch: MiniBatch, metrics: dict[str, float], columns: StepBatch) -> None:
        metrics |= self._parts.phases.collect()
        if train_s := metrics.get("timing/train_s", 0.0):
            metrics["throughput/train_tokens_per_s"] = len(columns.tokens_T) / train_s
        self._show(minibatch, metrics, columns)
        await self._lines.add(minibatch.step, metrics)

    def _settle_experts(self, folder: ExpertsFolder, minibatch: MiniBatch) -> None:
        """Keep the files of the step's own groups where a record names them or a later step of the batch reads them;
        those of filtered and dropped groups go."""
        kept = [group for group in minibatch.groups if self._parts.recorder or group.group_id in minibatch.again]
        nothing = dict.fromkeys(
            (group.group_id for group in (*minibatch.groups, *minibatch.filtered, *minibatch.dropped)), ()
        )
        folder.settle(nothing | {group.group_id: tuple(r.routed_experts for r in group.rollouts) for group in kept})

    def _show(self, minibatch: MiniBatch, metrics: Mapping[str, float], columns: StepBatch) -> None:
        """Show the step, and what a person should look at."""
        self._parts.progress.step(minibatch.step, metrics)
        drift = self._parts.drift.observe(minibatch.step, metrics)
        for warning in filter(None, (drift, self._signal.observe(minibatch.step, minibatch.groups, columns))):
            self._parts.progress.warn(warning)

    async def _write_line(self, step: int, metrics: Mapping[str, float]) -> None:
        work = asyncio.to_thread(self._parts.metrics.write, step, metrics)
        await self._within("write", work, what=f"metrics of step {step}")

    async def _to_disk(self, function: Callable[..., Path], step: int, *what: object) -> Path:
        return await self._within("write", asyncio.to_thread(function, step, *what), what=f"rollouts of step {step}")

    def _resolve_step(self, minibatch: MiniBatch, *, trained: bool) -> tuple[Group, ...]:
        """Book groups with the first step that trains them, or as dropped with the last that does not; return them."""
        outstanding, later = self._parts.source.ledger.is_outstanding, frozenset() if trained else minibatch.again
        groups = [g for g in minibatch.groups if outstanding(g.group_id) and g.group_id not in later]
        self._resolve(groups, "trained" if trained else "dropped")
        return tuple(groups)

    def _resolve(self, groups: Sequence[Group], outcome: Outcome) -> None:
        self._parts.source.ledger.finish([group.group_id for group in groups], outcome)

    def _book_metrics(self) -> dict[str, float]:
        ledger = self._parts.source.ledger
        return {f"rollout/groups_{state}": float(count) for state, count in ledger.counts().items()} | {
            "rollout/retries": float(ledger.retries),
            "rollout/late_refused": float(ledger.late_refused),
            "rollout/steps_skipped": float(self._skips.total),
        }

    async def _checkpoint_if_due(self) -> None:
        """Save at once, or with shared GPUs when the policy has them again."""
        self._saving.check()
        is_due = passed(self._saving.step, self.step, self._section.save_every_steps)
        if is_due and self._parts.gpus.policy_is_ready:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Save the state after the last trained batch, if that is not saved yet."""
        await self._parts.evaluations.ended()
        checkpoints, batch, step = self._parts.checkpoints, self._last_batch, self.step
        if checkpoints is None or batch is None or step == self._saving.step:
            return
        state = {
            "format": STATE_FORMAT,
            "step": step,
            "batches_done": self._pace.batches_done,
            "skipped_steps": self._skips.total,
            "sampler": batch.snapshot.to_json(self._parts.source.ledger.outcomes),
        }
        waiting = batch.snapshot.waiting()

        def save(captured: Callable[[], None]) -> Awaitable[object]:
            async def fill(directory: Path) -> None:
                await self._parts.policy.save(directory, captured)
                await asyncio.to_thread(write_waiting, directory, waiting)

            work = checkpoints.save(step, fill, state, self._parts.progress)
            return self._within("save", work, what=f"checkpoint of step {step}")

        with self._parts.phases.measure("checkpoint"):
            await self._saving.begin(step, save)
