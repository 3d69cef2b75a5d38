"""Builds and runs what a configuration describes, then shuts it down: the composition root.

The command line calls `train`, which does this in the calling process, in this order:

    check_start -> own RUN -> progress and log -> read the data -> begin: step 0 or the newest checkpoint
      -> Ray -> _train: placement -> ranks -> engine, verifiers, sampler -> Controller
                        start_all -> resume -> Controller.run under supervision

parts.py makes the parts that `_train` puts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_daro.algo.weighting import Algorithm
from megatron_daro.checkpoints import Checkpoints
from megatron_daro.config import Config
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.base import filled
from megatron_daro.config.placement import demand_of
from megatron_daro.controller import Controller, LoopParts, RunOutcome
from megatron_daro.deadlines import mark_as_seen
from megatron_daro.errors import WorkerError, how_to_go_on
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe.drift import DriftWatch
from megatron_daro.observe.logs import driver_log
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.evaluation import Evaluations
from megatron_daro.rollout.protocol import HasEnding
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.rollout.sampled_batch import BatchSource
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.runtime import parts, run_directory
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.inputs import Inputs, read_inputs
from megatron_daro.runtime.interrupts import Interrupts, interruptible, stop_on_signals
from megatron_daro.runtime.preflight import Start, begin, check_start, taken_back_if_it_fails, with_template_date
from megatron_daro.runtime.ray_calls import WorkerDiedError
from megatron_daro.runtime.run_algorithm import algorithm_of, algorithm_remarks
from megatron_daro.runtime.run_directory import owned
from megatron_daro.types import PlainValue

T = TypeVar("T")


def train(config: Config, *, resume: bool = False, replay: Path | None = None) -> RunOutcome:
    """Train as the configuration says.

    Args:
        config: checked.
        resume: continue from the newest whole checkpoint of the run directory.
        replay: a run directory whose recorded rollouts are trained on instead of generating.

    Returns:
        How the run ended.

    Raises:
        DaroError: the cause of a failure; all processes are gone by then.
    """
    config = with_template_date(config, resume=resume)
    algorithm = algorithm_of(config)
    check_start(config, resume=resume, replay=replay)
    run_dir, phases = filled(config.trainer.run_dir), Phases()
    with interruptible() as interrupts, taken_back_if_it_fails(run_dir), ExitStack() as stack:
        stack.enter_context(owned(run_dir, resume=resume))
        progress = stack.enter_context(_progress(config, run_dir, phases))
        run = RunContext.of(config, progress, phases)
        stack.enter_context(driver_log(run.log_dir, terminal=progress.mode != "off"))
        stack.callback(run_directory.remove_unfinished_export, config.trainer)
        for remark in algorithm_remarks(config, algorithm, generates=replay is None):
            progress.warn(remark)
        # Before any process of the run is started, so that wrong data fails at once.
        progress.stage("start", "reading the data")
        inputs: Inputs | ReplaySource
        if replay:
            inputs = ReplaySource(
                replay,
                section=config.trainer,
                rollouts_per_prompt=config.rollout.rollouts_per_prompt,
                deadlines=run.deadlines,
            )
        else:
            inputs = read_inputs(config, progress)
        start = begin(run, resume=resume, replay=replay, width=progress.width)
        progress.resume(start.step)
        progress.stage("start")
        if start.step >= config.trainer.steps:
            return _finished_before(run, start, interrupts)
        metrics = stack.enter_context(_metrics_log(run))
        if metrics.remark:
            progress.warn(metrics.remark)
        return _in_cluster(
            run, interrupts, lambda: _train(run, algorithm, inputs, metrics, start), engines=replay is None
        )


def _in_cluster(
    run: RunContext, interrupts: Interrupts, work: Callable[[], Coroutine[Any, Any, T]], *, engines: bool
) -> T:
    """Run the work with Ray and return its result; the run's processes have ended by then."""
    with cluster(demand_of(run.config, engines=engines).processes, tell=partial(run.progress.stage, "start")):
        try:
            return asyncio.run(work())
        except WorkerError as error:
            run.progress.notice(f"what each process wrote is in {run.log_dir}")
            if isinstance(error, WorkerDiedError):
                look = "If it was not killed on purpose, look for `oom-kill` in the kernel log"
                raise WorkerDiedError(f"{error}. {look}; to go on: {how_to_go_on(run.run_dir)}") from error
            raise
        finally:
            interrupts.ending()


async def _train(
    run: RunContext, algorithm: Algorithm, inputs: Inputs | ReplaySource, metrics: MetricsLog, start: Start
) -> RunOutcome:
    """Put the run together, start its processes, go back to the checkpoint, train, and close everything.

    Args:
        algorithm: the driver's instance. inputs: prompts, or recorded rollouts, which need no engine.
        start: where the run goes on from.

    Raises:
        DaroError: the cause of a failure.
    """
    placement = parts.placement(run, engines=not isinstance(inputs, ReplaySource))
    policy = parts.policy_group(run, placement, trains=True)
    generation: parts.Generation | None = None
    batches: BatchSource
    if isinstance(inputs, ReplaySource):
        batches = inputs
    else:
        generation = parts.generation(run, inputs, algorithm, placement)
        batches = generation.sampler
    config = run.config
    controller = Controller(
        config.trainer,
        LoopParts(
            policy=policy,
            batches=batches,
            build=parts.batch_builder(config, algorithm),
            metrics=metrics,
            progress=run.progress,
            phases=run.phases,
            engine=generation.engine if generation else None,
            checkpoints=_checkpoints(run, start),
            recorder=parts.recorder(run),
            experts=ExpertsFolder(run.run_dir) if config.actor.routing_replay else None,
            evaluations=_evaluations(run, generation),
            export=run_directory.export_writer(config.trainer, policy, run.progress),
            closers=generation.closers() if generation else {},
            deadlines=run.deadlines,
            gpus=parts.gpus(run, policy, generation, placement),
            drift=DriftWatch(correction=_correction(config.algorithm)),
            environment_of_source=config.environment_of_source,
        ),
        batches_ahead=config.rollout.batches_ahead if generation else 0,
    )
    with stop_on_signals(controller):
        try:
            started = parts.start_all(run, placement, policy, generation)
            if not (
                await controller.unless_stopped(started)
                and await controller.unless_stopped(_go_on(run, controller, start))
            ):
                await controller.shutdown()
                return RunOutcome("stopped", start.step)
        except BaseException:
            await controller.shutdown()
            raise
        endings = [policy.watch_and_heal()]
        if generation and isinstance(generation.engine, HasEnding):
            endings.append(generation.engine.fatal_error())
        spare_event_loop()
        return await supervised(controller.run(), endings)


async def _go_on(run: RunContext, controller: Controller, start: Start) -> None:
    """Bring the controller to the point where the run goes on."""
    if start.checkpoint:
        run.progress.stage("start", f"reading {start.checkpoint.name}")
        await controller.resume(start.checkpoint, start.state)
        run.progress.notice(f"resumed from {start.checkpoint}")
    elif start.begins_again:
        await controller.truncate_files()


async def supervised(work: Awaitable[T], endings: Iterable[Awaitable[Exception]]) -> T:
    """Return the result of `work`. If an ending comes first, cancel `work` and raise the ending's error.

    Args:
        work: the controller's run; it closes what it holds when it is cancelled.
        endings: wait for what ends the run; each returns its error.

    Raises:
        DaroError: the error that an ending returned: a process ended, no server is left. What `work` raises passes
            through.
    """
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(ending) for ending in endings]
    try:
        done, _ = await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task not in done:
            await _cancelled(task)
            raise next(watch for watch in watches if watch in done).result()
        return task.result()
    except asyncio.CancelledError:
        await _cancelled(task)
        raise
    finally:
        for watch in watches:
            watch.cancel()


async def _cancelled(task: asyncio.Future[T]) -> None:
    """Cancel the task and wait for it. Its error, a consequence of the one that is raised, is marked as seen, or
    asyncio would print it."""
    task.add_done_callback(mark_as_seen)
    task.cancel()
    await asyncio.wait({task})


def _evaluations(run: RunContext, generation: parts.Generation | None) -> Evaluations:
    evaluator = generation.evaluator if generation else None
    if evaluator is None:
        return Evaluations()
    return Evaluations(
        evaluator.evaluate, run.config.trainer, run.phases, run.deadlines, beside=evaluator.answers_beside > 0
    )


def _finished_before(run: RunContext, start: Start, interrupts: Interrupts) -> RunOutcome:
    """Finish a run that already has all of its steps: write the exports that are missing, if any."""
    due = run_directory.exports_due(run.config.trainer, start.step)
    rest = "nothing to do; to go on, raise trainer.steps"
    if due:
        rest = f"only {' and '.join(map(str, due))} {'is' if len(due) == 1 else 'are'} left to be written"
    run.progress.notice(f"{run.run_dir} has all of its {start.step} steps: {rest}")
    if due:
        _in_cluster(run, interrupts, lambda: _export(run, start), engines=False)
    return RunOutcome("finished", start.step)


async def _export(run: RunContext, start: Start) -> None:
    """Write the model of a finished run's last checkpoint."""
    assert start.checkpoint, "a run has its steps from a checkpoint"
    placement = parts.placement(run, engines=False)
    policy = parts.policy_group(run, placement, trains=False)
    within, stage = run.deadlines.within, run.progress.stage
    try:
        await parts.start_all(run, placement, policy, None)
        stage("start", f"reading {start.checkpoint.name}")
        await within("load", policy.load(start.checkpoint), what=str(start.checkpoint))
        stage("start", "writing the model")
        export = run_directory.export_writer(run.config.trainer, policy, run.progress)
        assert export, "it is due"
        await within("export", export(start.step), what="the trained model")
        stage("start")
    finally:
        await policy.close()


def _checkpoints(run: RunContext, start: Start) -> Checkpoints:
    trainer = run.config.trainer
    return Checkpoints(
        run.run_dir, keep=trainer.keep_checkpoints, keep_every=trainer.keep_every_steps, provenance=start.provenance
    )


def _metrics_log(run: RunContext) -> MetricsLog:
    observe = run.config.observe
    wandb: Mapping[str, PlainValue] = {
        "enabled": observe.wandb.enabled,
        "project": observe.wandb.project,
        "name": observe.wandb.name or run.run_dir.name,
    }
    return MetricsLog(run.run_dir, tensorboard=observe.tensorboard, wandb=wandb)


def _correction(section: AlgorithmSection) -> str:
    """Return what corrects for stale rollouts; if their own log-probs serve as the old ones, nothing is left to
    correct."""
    return "algorithm.old_logprobs=rollout" if section.old_logprobs == "rollout" else section.correction.kind


def _progress(config: Config, run_dir: Path, phases: Phases) -> Progress:
    return Progress(
        total_steps=config.trainer.steps,
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        mode="auto" if config.observe.progress else "off",
        title=str(run_dir),
        phases=phases,
    )
