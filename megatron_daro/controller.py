"""The training loop: batches of rollouts in, optimizer steps, weight syncs, checkpoints and metrics out.

runtime/launch.py builds the parts and runs one Controller. `run` gives the engine its first weights and, where that is
due, evaluates them as step 0. Then three coroutines run together; the first failure ends all:

    _generate --batches, then None--> _queue --> _train --> _end_batch -----> engine
        ^                                          |
        +------------- Pace.batch_done ------------+          _watch: a stop ends _generate

    coroutine   waits for                                  until
    _generate   its turn: batch m needs batch              `_end_batch` has given the engine that batch's weights
                m - 1 - batches_ahead (`Pace`)
                the engine (`_engine_lock`)                the sync or evaluation that holds it has ended
    _train      the next batch (None: no more come)        `_generate` has put it into the queue
                a running evaluation, before a sync or a   it ends, or a stop cancels it
                checkpoint, or to take shared GPUs back
                the engine (`_engine_lock`), to sync, or   `_generate` has completed its batch and aborted the requests
                to take shared GPUs back                   left over: none runs while all weights change
    _watch      a stop: the first Ctrl-C                   `request_stop`; then `_train` ends after its batch

With batches_ahead 0 generation and training alternate; with 1 or more they overlap. The code is the same.

`_train_batch` is one batch: plan its optimizer steps; build the columns of every step of the first epoch and compute
the log-probs that the loss needs; then for each step train, mark its groups in the ledger, and write the rollouts, then
the metrics; those of the last step after syncing the weights and beginning an evaluation. A checkpoint that is due
follows the batch. With shared GPUs it waits until the policy has them back, before the next batch trains. Its files are
written while training goes on (`BackgroundSave`). The policy's weight version is the number of the last step, skipped
steps included. `shutdown` closes engine, policy and what else is in `closers`. Policy, engine and source of batches are
Protocols.

Three locks, always taken in this order: `_engine_lock` (the engine either generates or is changed as a whole; only a
receiver that rejoins gets its weights while others generate), `WeightSync`'s (one sync or comparison at a time), and
the policy's `hold` (the ranks work on one thing at a time).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_daro.checkpoints import STATE_FORMAT, BackgroundSave
from megatron_daro.config.sections import TrainerSection
from megatron_daro.data.batch import with_columns_of
from megatron_daro.deadlines import Deadlines, first_cause, mark_as_seen, to_the_end
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
class LoopParts:
    """What a controller drives.

    batches: sampled, or replayed. engine: None in a replay. checkpoints, recorder, evaluations, export: left out where
    the run has none. experts: files of the experts that servers chose; None without routing replay. export: writes the
    trained policy out, given the number of steps. closers: what else to close at the end, by name, after engine and
    policy. gpus: decides whether policy or engine has the GPUs that they share. drift: warns when the log-probs of
    engine and trainer drift apart. environment_of_source: data source -> name of its environment, where there are
    several.
    """

    policy: ExportingPolicy
    batches: BatchSource
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

    status: "finished": `trainer.steps` were done, or a replay reached the end of its recording, and what is to be
    exported was; "stopped": ended early, with a checkpoint if a step was done; "interrupted": ended at once, without
    one. step: optimizer steps done.
    """

    status: Literal["finished", "stopped", "interrupted"]
    step: int


class Controller:
    """One training run."""

    def __init__(self, section: TrainerSection, parts: LoopParts, *, batches_ahead: int) -> None:
        """Start nothing: the caller starts policy and engine.

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
        self._started = self._saved = False

    async def resume(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: policy, prompts, ledger and files go back to its step. Call before `run`.

        Args:
            checkpoint: a verified checkpoint directory. state: its state.json.
        """
        await self._within("load", self._parts.policy.load(checkpoint), what=str(checkpoint))
        waiting = await self._within("load", asyncio.to_thread(read_waiting, checkpoint), what=str(checkpoint))
        self._parts.batches.load_state_dict(state["sampler"], waiting)
        self.step = state["step"]
        self._saving.go_on_from(self.step)
        self._pace.go_on_from(self.step, state["batches_done"])
        self._skips.total = state["skipped_steps"]
        await self.truncate_files()

    async def truncate_files(self) -> None:
        """Cut metrics and rollouts after the current step; a resumed run writes the rest again."""
        await self._within("write", asyncio.to_thread(self._truncate), what="metrics and rollouts to go on from")

    def _truncate(self) -> None:
        self._parts.metrics.truncate_after(self.step or -1)  # step 0, the evaluation before training, is done again
        if self._parts.recorder:
            self._parts.recorder.truncate_after(self.step)

    def request_stop(self, cause: str) -> None:
        """The first call ends the run after the batch that is being trained, with a checkpoint, or at once while the
        run still starts, or exports what it has saved. A second one before that checkpoint is written ends the run now;
        later, closing goes on. Call from the event loop's thread."""
        if not self._stop.is_set():
            what = "stopping with a checkpoint of what was trained (once more to stop at once)"
            if not self._started:
                what = "ending the start"
            elif self._saved:
                what = "all is trained and saved; closing"
            self._parts.progress.notice(f"{cause}: {what}")
            self._stop.set()
        elif self._saved:
            self._parts.progress.notice(f"{cause} again: all is saved; closing goes on")
        elif self._run_task and not self._stop_at_once:
            self._parts.progress.notice(f"{cause} again: stopping at once, without a checkpoint")
            self._stop_at_once = True
            self._run_task.cancel()

    async def run(self) -> RunOutcome:
        """Train up to `steps`, then close everything, also after a failure.

        Raises:
            DaroError: the first cause of a failure, once everything is closed.
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
                await to_the_end(self.shutdown())  # a death noticed only now must not leave the rest open
            except asyncio.CancelledError:
                if not self._stop_at_once:  # the second Ctrl-C: all is closed now, and how the run ended is known
                    raise
        return RunOutcome("finished" if finished else "stopped", self.step)

    async def shutdown(self) -> None:
        """Write the metrics lines that are still held; close engine, policy and the closers. A failure is reported and
        does not keep the others open."""
        await self._reported("metrics", self._lines.close())  # each line has the limit of a write
        closers: dict[str, Callable[[], Awaitable[None]]] = {}
        if self._parts.engine:
            closers["engine"] = self._parts.engine.close
        closers["policy"] = self._parts.policy.close
        for name, close in (closers | dict(self._parts.closers)).items():
            await self._reported(name, self._within("close", close(), what=name))

    async def _reported(self, name: str, closing: Awaitable[None]) -> None:
        try:
            await closing
        except Exception as error:  # The supervisor's border: the cause of the end must stay the one that is seen.
            self._parts.progress.warn(f"closing the {name} failed: {type(error).__name__}: {error}")

    async def unless_stopped(self, work: Awaitable[None]) -> bool:
        """Return whether the work got to its end. A stop cancels it at once; it has nothing to save."""
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
            mark_as_seen(task)  # the error, if any, of work that a stop cancelled

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
            await self._evaluate()
            await self._lines.add(0, {})

    async def _evaluate(self) -> None:
        """Evaluate the weights that the engine has. Where generation may go on meanwhile, only begin to."""
        self._parts.evaluations.begin(self.step, self._lines)
        if not self._parts.evaluations.beside:
            await self._parts.evaluations.ended()

    async def _loop(self) -> bool:
        """Train, then export. Returns whether the run is finished."""
        self._started = True
        async with asyncio.TaskGroup() as tasks:
            generator = tasks.create_task(self._generate(), name="generate")
            watcher = tasks.create_task(self._watch(generator), name="watch")
            try:
                await self._train()
            finally:
                generator.cancel()
                watcher.cancel()
                await self._saving.end(at_once=self._stop_at_once)
        self._saved = True
        if self._stop.is_set() and self.step < self._section.steps:
            return False
        export, what = self._parts.export, "training is done and saved"
        # A stop ends the export at once: the run that is resumed from the checkpoint writes it.
        return not export or await self.unless_stopped(self._within("export", export(self.step), what=what))

    async def _watch(self, generator: asyncio.Task) -> None:
        """Cancel generation and a running evaluation when a stop is requested; `_train` finishes its batch."""
        await self._stop.wait()  # Without a deadline: it waits for a person.
        generator.cancel()
        step = self._parts.evaluations.cancel()
        if step is not None:
            self._parts.progress.notice(_NOT_EVALUATED.format(step=step))

    async def _generate(self) -> None:
        index = self._pace.batches_done
        try:
            while await self._pace.may_generate(index):
                async with self._engine_lock:
                    with self._parts.phases.measure("rollout"):
                        batch = await self._parts.batches.sample(self._pace.planned_step)
                if batch is None:
                    break
                self._pace.sampled(planned_steps(batch, self._pace.planned_step, self._section))
                self._queue.put_nowait(batch)
                index += 1
        except asyncio.CancelledError:
            self._queue.put_nowait(None)
            raise
        self._queue.put_nowait(None)

    async def _train(self) -> None:
        while self.step < self._section.steps and not self._stop.is_set():
            batch = await self._queue.get()
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
        """Do all optimizer steps of one batch, epoch by epoch, and what belongs to them up to the metrics."""
        self._last_batch = batch
        # Checkpoints from now on hold this batch's snapshot or a later one, in which all other groups are finished.
        self._parts.batches.ledger.forget_outcomes(but=batch.snapshot.handed_over)
        minibatches, unused = plan_minibatches(batch, self.step, self._section)
        self._resolve(unused, "dropped")
        # All before the first step: old log-probs are those of the weights that the batch began with.
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
        """Return one optimizer step of the first epoch, with the log-probs that its loss needs, and metrics of its
        columns."""
        step_batch, metrics = await self._build_columns(minibatch)
        with self._parts.phases.measure("logprob"):
            work = self._parts.policy.prepare(step_batch)
            return await self._within("logprob", work, what=f"step {minibatch.step}"), metrics

    async def _build_columns(
        self, minibatch: MiniBatch, first_epoch: Sequence[StepBatch] = ()
    ) -> tuple[StepBatch, Mapping[str, float]]:
        """Return the columns of one optimizer step and their metrics. A later epoch reuses the log-probs and values of
        `first_epoch`."""
        with self._parts.phases.measure("build"):
            # In a thread: it copies gigabytes, while the event loop has to take in other groups' answers.
            work = asyncio.to_thread(self._make_columns, minibatch, first_epoch)
            return await self._within("build", work, what=f"step {minibatch.step}")

    def _make_columns(
        self, minibatch: MiniBatch, first_epoch: Sequence[StepBatch]
    ) -> tuple[StepBatch, dict[str, float]]:
        columns = replace(self._parts.build(minibatch.groups, minibatch.step), opens_batch=minibatch.first)
        if first_epoch:
            columns = with_columns_of(columns, first_epoch)
        return columns, step_metrics(minibatch, columns, self._section.steps_per_batch)

    async def _train_step(self, minibatch: MiniBatch, prepared: PreparedStep, measured: Mapping[str, float]) -> None:
        """Do one optimizer step and everything that belongs to it. Args: measured: metrics of its batch and columns."""
        with self._parts.phases.measure("train"):
            result = await self._optimizer_step(prepared, minibatch)
        resolved = self._resolve_step(minibatch, trained=not result.skipped)
        self.step = minibatch.step
        metrics = {**result.metrics, **measured, **self._book_metrics()}
        if minibatch.last:
            metrics |= await self._end_batch(minibatch.batch_version)
        with self._parts.phases.measure("write"):
            await self._write_rollouts(minibatch, resolved, applied=not result.skipped)
            await self._write_metrics(minibatch, metrics, prepared.batch)

    async def _optimizer_step(self, prepared: PreparedStep, minibatch: MiniBatch) -> StepResult:
        """Have the policy do a step. Where its loss or gradient is not finite the step is skipped or ends the run."""
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
        """Give the engine the policy's weights; return the metrics of the sync."""
        if self._weight_sync is None:
            return {}
        return await self._within("sync", self._parts.gpus.publish(self._weight_sync, self.step), what=what)

    async def _give_gpus_to_policy(self) -> None:
        """Bring the policy back to the GPUs that it shares with the engine; without them it cannot train or save."""
        if not self._parts.gpus.policy_is_ready:
            await self._parts.evaluations.ended()
            async with self._engine_lock:
                with self._parts.phases.measure("to_policy"):
                    await self._parts.gpus.to_policy()

    async def _end_batch(self, old_version: int) -> Mapping[str, float]:
        """Sync and evaluate; then the next batch may be generated, while this one is written. Also syncs after the last
        batch and after a stop: servers of one's own end with the final weights, and the line of a step has the same
        metrics of the sync whether or not the run stops there. Returns these.

        Args:
            old_version: the weight version that the batch began with.
        """
        metrics: Mapping[str, float] = {}
        async with AsyncExitStack() as engine:
            with self._parts.phases.measure("sync_wait"):
                await self._parts.evaluations.ended()  # its answers are all of the version that the engine has
                await engine.enter_async_context(self._engine_lock)
            if self._weight_sync:
                with self._parts.phases.measure("sync"):
                    metrics = await self._publish(f"step {self.step}")
            if self._parts.evaluations.due(old_version, self.step):
                if self._stop.is_set():
                    self._parts.progress.notice(_NOT_EVALUATED.format(step=self.step))
                else:
                    await self._evaluate()
        await self._pace.batch_done(self.step)
        return metrics

    async def _write_rollouts(self, minibatch: MiniBatch, resolved: Sequence[Group], *, applied: bool) -> None:
        """Record what became of the groups. This comes before the metrics: a metrics line means that the rollouts of
        its step are on disk."""
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
        """Keep the files of this step's groups that a record names or a later step of the batch reads; delete those of
        filtered and dropped groups."""
        kept = [group for group in minibatch.groups if self._parts.recorder or group.group_id in minibatch.again]
        nothing = dict.fromkeys(
            (group.group_id for group in (*minibatch.groups, *minibatch.filtered, *minibatch.dropped)), ()
        )
        folder.settle(nothing | {group.group_id: tuple(r.routed_experts for r in group.rollouts) for group in kept})

    def _show(self, minibatch: MiniBatch, metrics: Mapping[str, float], columns: StepBatch) -> None:
        """Show the step and its warnings."""
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
        """Resolve this step's groups in the ledger and return those: as trained with the first step that trains them,
        as dropped where no step of the batch, this one being the last, trained them."""
        outstanding, later = self._parts.batches.ledger.is_outstanding, frozenset() if trained else minibatch.again
        groups = [g for g in minibatch.groups if outstanding(g.group_id) and g.group_id not in later]
        self._resolve(groups, "trained" if trained else "dropped")
        return tuple(groups)

    def _resolve(self, groups: Sequence[Group], outcome: Outcome) -> None:
        self._parts.batches.ledger.finish([group.group_id for group in groups], outcome)

    def _book_metrics(self) -> dict[str, float]:
        ledger = self._parts.batches.ledger
        return {f"rollout/groups_{state}": float(count) for state, count in ledger.counts().items()} | {
            "rollout/retries": float(ledger.retries),
            "rollout/late_refused": float(ledger.late_refused),
            "rollout/steps_skipped": float(self._skips.total),
        }

    async def _checkpoint_if_due(self) -> None:
        """Save where that is due; with shared GPUs, once the policy has them back."""
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
            "sampler": batch.snapshot.to_json(self._parts.batches.ledger.outcomes),
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
