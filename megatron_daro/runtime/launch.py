"""Runs what a configuration describes, and takes it apart again: the composition root.

The command line calls `train`; parts.py makes the parts, each of its own
section. Computes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_daro import recovery
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.config import Config
from megatron_daro.config.hardware import demand_of
from megatron_daro.controller import Controller, Parts, RunOutcome
from megatron_daro.errors import WorkerError
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe.drift import DriftWatch
from megatron_daro.observe.logs import driver_log
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.evaluation import Evaluations
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.rollout.sampled_batch import BatchSource
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.runtime import parts, run_directory
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.inputs import Inputs, read_inputs
from megatron_daro.runtime.interrupts import Interrupts, interruptible, stop_on_signals
from megatron_daro.runtime.preflight import Start, begin, check_start, taken_back_if_it_fails, with_template_date
from megatron_daro.runtime.run_directory import owned
from megatron_daro.runtime.supervisor import HasEnding, WorkerDiedError, supervised
from megatron_daro.types import PlainValue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told what happens."""

    metrics: MetricsLog
    progress: Progress
    phases: Phases


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
    algorithm = parts.algorithm_of(config)
    check_start(config, resume=resume, generates=replay is None)
    run_dir = parts.run_directory(config)
    with interruptible() as interrupts, taken_back_if_it_fails(run_dir), ExitStack() as stack:
        stack.enter_context(owned(run_dir, resume=resume))
        phases = Phases()
        progress = _progress(config, run_dir, phases)
        stack.enter_context(progress)
        stack.enter_context(driver_log(parts.log_folder(config), terminal=progress.mode != "off"))
        stack.callback(run_directory.remove_unfinished_export, config.trainer)
        for remark in parts.algorithm_remarks(config, algorithm):
            progress.warn(remark)
        # Before any process is started: data that is wrong costs no time.
        inputs: Inputs | ReplaySource
        progress.stage("start", "reading the data")
        if replay:
            inputs = ReplaySource(
                replay, section=config.trainer, rollouts_per_prompt=config.rollout.rollouts_per_prompt
            )
        else:
            inputs = read_inputs(config, progress)
        start = begin(run_dir, config, resume=resume, progress=progress)
        progress.resume(start.step)
        progress.stage("start")
        run = _Run(config, progress, interrupts)
        if start.step >= config.trainer.steps:
            return _finished_before(run, start)
        metrics = stack.enter_context(_metrics_log(config, run_dir))
        if metrics.remark:
            progress.warn(metrics.remark)
        observers = Observers(metrics, progress, phases)
        return run.in_cluster(lambda: _train(config, algorithm, inputs, observers, start), engines=replay is None)


_AFTER_A_DEATH = (
    "If it was not killed on purpose, look for `oom-kill` in the kernel log; --resume goes on from the newest "
    "checkpoint"
)


@dataclass(frozen=True, slots=True)
class _Run:
    """What every run has around its work."""

    config: Config
    progress: Progress
    interrupts: Interrupts

    def in_cluster(self, work: Callable[[], Coroutine[Any, Any, T]], *, engines: bool) -> T:
        """Return what the work gives. Its processes are gone then."""
        with cluster(demand_of(self.config, engines=engines).processes, tell=partial(self.progress.stage, "start")):
            try:
                return asyncio.run(work())
            except WorkerError as error:
                self.progress.notice(f"what each process wrote is in {parts.log_folder(self.config)}")
                if isinstance(error, WorkerDiedError):
                    raise WorkerDiedError(f"{error}. {_AFTER_A_DEATH}") from error
                raise
            finally:
                self.interrupts.ending()


async def _train(
    config: Config, algorithm: Algorithm, inputs: Inputs | ReplaySource, observers: Observers, start: Start
) -> RunOutcome:
    """Start the parts, run the loop over them and close everything.

    Args:
        config: checked. algorithm: the driver's instance. inputs: prompts, or recorded rollouts, which need no engine.
        observers: are told. start: where the run goes on from.

    Returns:
        How the run ended.

    Raises:
        DaroError: the cause of a failure.
    """
    placement = parts.placement(config, engines=isinstance(inputs, Inputs))
    policy = parts.policy_group(config, placement, warn=observers.progress.warn)
    source: BatchSource
    generation = None
    if isinstance(inputs, ReplaySource):
        source = inputs
    else:
        generation = parts.generation(config, inputs, algorithm, placement, observers.progress, observers.phases)
        source = generation.sampler
    controller = Controller(
        config.trainer,
        Parts(
            policy=policy,
            source=source,
            build=parts.batch_builder(config, algorithm),
            metrics=observers.metrics,
            progress=observers.progress,
            phases=observers.phases,
            engine=generation.engine if generation else None,
            checkpoints=_checkpoints(config, start),
            recorder=parts.recorder(config),
            experts=ExpertsFolder(parts.run_directory(config)) if config.actor.routing_replay else None,
            evaluations=_evaluations(config, generation, observers, placement.deadlines),
            export=run_directory.export_writer(config.trainer, policy, observers.progress),
            closers={"verifiers": generation.scorer.close, "environment": generation.rollouter.close}
            if generation
            else {},
            identity=_identity(config),
            deadlines=placement.deadlines,
            colocation=parts.colocation(policy, generation, placement, observers.progress),
            drift=DriftWatch(correction=config.algorithm.correction.kind),
        ),
        max_staleness=config.rollout.batches_ahead if generation else 0,
    )
    with stop_on_signals(controller):
        try:
            if not await controller.unless_stopped(parts.start_all(placement, policy, generation, observers.progress)):
                await controller.shutdown()
                return RunOutcome("stopped", start.step)
            if start.checkpoint:
                observers.progress.stage("start", f"reading {start.checkpoint.name}")
                await controller.resume(start.checkpoint, start.state)
                observers.progress.notice(f"resumed from {start.checkpoint}")
            elif start.begins_again:
                controller.truncate_files()
        except BaseException:
            await controller.shutdown()
            raise
        groups = []
        endings = [generation.engine.ended()] if generation and isinstance(generation.engine, HasEnding) else []
        if policy.heals:
            endings.append(policy.ended())
        else:
            groups.append(policy.workers)
        spare_event_loop()
        return await supervised(controller.run(), groups, endings)


def _evaluations(config: Config, made: parts.Generation | None, observers: Observers, limits: Deadlines) -> Evaluations:
    evaluate = made.evaluator.evaluate if made and made.evaluator else None
    beside = parts.evaluates_beside(config)
    return Evaluations(evaluate, config.trainer, observers.phases, limits, beside=beside)


def _finished_before(run: _Run, start: Start) -> RunOutcome:
    """Do what is left of a run that has all of its steps: at most its export."""
    section, run_dir = run.config.trainer, parts.run_directory(run.config)
    due = run_directory.exports_due(section, start.step)
    rest = "nothing to do; to go on, raise trainer.steps"
    if due:
        rest = f"only {' and '.join(map(str, due))} {'is' if len(due) == 1 else 'are'} left to be written"
    run.progress.notice(f"{run_dir} has all of its {start.step} steps: {rest}")
    if due:
        run.in_cluster(lambda: _export(run.config, start, run.progress), engines=False)
    return RunOutcome("finished", start.step)


async def _export(config: Config, start: Start, progress: Progress) -> None:
    """Write the model of a finished run's last checkpoint."""
    assert start.checkpoint, "a run has its steps from a checkpoint"
    recovery.check_fits(start.checkpoint, start.state, _identity(config))
    placement, limits = parts.placement(config, engines=False), parts.deadlines(config)
    policy = parts.policy_group(config, placement)
    try:
        await parts.start_all(placement, policy, None, progress)
        progress.stage("start", f"reading {start.checkpoint.name}")
        await limits.within("load", policy.load(start.checkpoint), what=str(start.checkpoint))
        progress.stage("start", "writing the model")
        export = run_directory.export_writer(config.trainer, policy, progress)
        assert export, "it is due"
        await limits.within("export", export(start.step), what="the trained model")
        progress.stage("start")
    finally:
        await policy.close()


def _checkpoints(config: Config, start: Start) -> recovery.Checkpoints:
    trainer = config.trainer
    return recovery.Checkpoints(
        parts.run_directory(config),
        keep=trainer.keep_checkpoints,
        keep_every=trainer.keep_every_steps,
        provenance=start.provenance,
    )


def _identity(config: Config) -> dict[str, PlainValue]:
    """Return what must be equal in a run and in a checkpoint that it continues."""
    trainer = config.trainer
    return {
        "seed": trainer.seed,
        "rollouts_per_prompt": config.rollout.rollouts_per_prompt,
        "prompts_per_step": config.rollout.prompts_per_step,
        "updates_per_batch": trainer.updates_per_batch,
        "epochs_per_batch": trainer.epochs_per_batch,
        "algorithm": config.algorithm.name,
    }


def _metrics_log(config: Config, run_dir: Path) -> MetricsLog:
    wandb = config.observe.wandb
    arguments: Mapping[str, PlainValue] = {
        "enabled": wandb.enabled,
        "project": wandb.project,
        "name": wandb.name or run_dir.name,
    }
    return MetricsLog(run_dir, tensorboard=config.observe.tensorboard, wandb=arguments)


def _progress(config: Config, run_dir: Path, phases: Phases) -> Progress:
    return Progress(
        total_steps=config.trainer.steps,
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        mode="auto" if config.observe.progress else "off",
        title=str(run_dir),
        phases=phases,
    )
