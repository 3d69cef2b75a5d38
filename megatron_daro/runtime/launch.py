"""Puts a run together from its configuration, runs it, and takes it apart again: the composition root.

Place in the data flow: the command line calls `train` and `evaluate`; everything else is handed its own section here.
Nothing is computed in this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_daro import recovery
from megatron_daro.algo.advantages import leave_one_out_advantages
from megatron_daro.config import AlgorithmSection, Config, to_yaml
from megatron_daro.controller import Controller, Parts, RunOutcome, stop_on_signals
from megatron_daro.data.batch import build_batch
from megatron_daro.data.cursor import PromptSource
from megatron_daro.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_daro.errors import CheckpointError
from megatron_daro.observe.drift import DriftWatch
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.observe.progress import Progress
from megatron_daro.observe.trace import Phases
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.rollout.sampler import Sampler
from megatron_daro.runtime.cluster import Resources, cluster
from megatron_daro.runtime.evaluation import Evaluator, HeldOut
from megatron_daro.runtime.prompts import held_out_sets, training_prompts
from megatron_daro.runtime.supervisor import HasEnding, supervised
from megatron_daro.types import SamplingParams

CONFIG_FILE = "config.yaml"


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
    run_dir = _prepared_run_dir(config, resume=resume)
    with ExitStack() as stack:
        phases = Phases()
        progress = _progress(config, run_dir, phases)
        metrics = stack.enter_context(_metrics_log(config, run_dir))
        stack.enter_context(progress)
        # Before any process is started: data that is wrong costs no time.
        inputs = ReplaySource(replay, rollouts_per_prompt=_group_size(config)) if replay else _inputs(config, progress)
        with cluster(_resources(config, engines=replay is None)):
            outcome = asyncio.run(_train(config, run_dir, resume, inputs, metrics, progress, phases))
    return outcome


def evaluate(config: Config, *, checkpoint: Path) -> dict[str, float]:
    """Accuracy of a checkpoint on the held-out sets; printed, and returned by metric key."""
    recovery.verify(checkpoint)
    progress = Progress(
        total_steps=0, rollouts_per_prompt=config.rollout.rollouts_per_prompt, mode="off", title=str(checkpoint)
    )
    inputs = _inputs(config, progress)
    with cluster(_resources(config, engines=True)):
        metrics = asyncio.run(_evaluate(config, checkpoint, inputs, progress))
    for name, value in metrics.items():
        print(f"{name}\t{value:.4f}")
    return metrics


async def _train(
    config: Config,
    run_dir: Path,
    resume: bool,
    inputs: _Inputs | ReplaySource,
    metrics: MetricsLog,
    progress: Progress,
    phases: Phases,
) -> RunOutcome:
    policy = _policy(config)
    parts: dict[str, Any] = (
        {"source": inputs} if isinstance(inputs, ReplaySource) else _generation(config, inputs, progress, phases)
    )
    scorer = parts.pop("scorer", None)
    controller = Controller(
        config.trainer,
        Parts(
            policy=policy,
            build=partial(build_batch, **_batch_options(config)),
            metrics=metrics,
            progress=progress,
            phases=phases,
            checkpoints=recovery.Checkpoints(run_dir, keep=config.trainer.keep_checkpoints),
            recorder=Recorder(run_dir) if config.observe.save_rollouts else None,
            identity=_identity(config),
            deadlines=_deadlines(config),
            drift=DriftWatch(correction=config.algorithm.correction.kind),
            **parts,
        ),
        max_staleness=0 if isinstance(inputs, ReplaySource) else config.rollout.batches_ahead,
        rollouts_per_prompt=_group_size(config),
    )
    engine = parts.get("engine")
    try:
        await _start_processes(policy, engine, scorer)
        if resume:
            await _resume(controller, run_dir, progress)
    except BaseException:
        await controller.shutdown()
        raise
    crews = [policy.workers] + ([engine.workers] if engine else [])
    endings = [engine.ended()] if isinstance(engine, HasEnding) else []
    with stop_on_signals(controller):
        return await supervised(controller.run(), crews, endings)


async def _start_processes(policy: Any, engine: Any, scorer: RewardPool | None) -> None:
    """All processes at once: each spends its first seconds importing."""
    starts = [policy.start()] + ([engine.start()] if engine else [])
    starts += [asyncio.to_thread(scorer.start)] if scorer else []
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _resume(controller: Controller, run_dir: Path, progress: Progress) -> None:
    found = await asyncio.to_thread(recovery.take_latest_valid, run_dir, progress)
    if found is None:
        progress.notice(f"{run_dir} has no checkpoint yet: starting from step 0")
        controller.truncate_files()
        return
    checkpoint, state = found
    await controller.resume(checkpoint, state)
    progress.notice(f"resumed from {checkpoint}")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a run that generates reads from files."""

    tokenizer: Any
    stop: tuple[int, ...]
    held_out: list[HeldOut]
    prompts: PromptSource


def _inputs(config: Config, progress: Progress) -> _Inputs:
    """Tokenizer and problems. Raises ModelError, DataError."""
    tokenizer = load_tokenizer(
        config.model.path, config.model.trust_remote_code, chat_template=config.data.prompt_template == "chat"
    )
    stop = stop_token_ids(
        tokenizer, stop=config.rollout.stop, extra_ids=config.rollout.stop_token_ids, model_path=config.model.path
    )
    held_out = held_out_sets(config.data, tokenizer, progress)
    prompts = training_prompts(config.data, tokenizer, held_out, seed=config.trainer.seed, notices=progress)
    return _Inputs(tokenizer, stop, held_out, prompts)


def _generation(config: Config, inputs: _Inputs, progress: Progress, phases: Phases) -> dict[str, Any]:
    """Engine, scorer, sampler and evaluator of a run that generates; starts nothing."""
    engine = _engine(config, inputs, progress)
    scorer = RewardPool.from_section(config.reward)
    sampler = Sampler(
        config.rollout,
        sampling=SamplingParams(
            config.rollout.temperature, config.rollout.top_p, config.rollout.max_response_tokens, inputs.stop
        ),
        engine=engine,
        scorer=scorer,
        source=inputs.prompts,
        notices=progress,
        phases=phases,
        filter_groups=config.algorithm.filters_groups,
        finish_early=config.rollout.finishes_early(config.engine.kind),
        updates_per_batch=config.trainer.updates_per_batch,
        deadlines=_deadlines(config),
    )
    evaluator = Evaluator(
        inputs.held_out,
        engine,
        scorer,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=inputs.stop,
    )
    return {
        "engine": engine,
        "scorer": scorer,
        "source": sampler,
        "evaluate": evaluator.evaluate if inputs.held_out else None,
        "closers": {"verifiers": partial(asyncio.to_thread, scorer.close)},
    }


async def _evaluate(config: Config, checkpoint: Path, inputs: _Inputs, progress: Progress) -> dict[str, float]:
    policy = _policy(config)
    parts = _generation(config, inputs, progress, Phases())
    engine = parts["engine"]
    try:
        await _start_processes(policy, engine, parts["scorer"])
        await policy.load(checkpoint)
        await policy.sync(engine, 0)
        return dict(await parts["evaluate"](0))
    finally:
        await engine.close()
        await policy.close()
        for close in parts["closers"].values():
            await close()


def _deadlines(config: Config) -> Deadlines:
    return Deadlines().scaled(config.trainer.deadline_scale)


def _policy(config: Config) -> Any:
    # Imported here: the driver of a machine without Megatron can still replay nothing, but report and plan.
    from megatron_daro.actor.settings import PolicySettings
    from megatron_daro.runtime.policy_group import PolicyGroup

    settings = PolicySettings(
        model_path=config.model.path.absolute(),
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        total_steps=config.trainer.steps,
    )
    return PolicyGroup(
        settings,
        config.actor,
        config.algorithm,
        seed=config.trainer.seed,
        updates_per_batch=config.trainer.updates_per_batch,
        gpus_per_rank=_gpus_per_worker(),
    )


def _engine(config: Config, inputs: _Inputs, progress: Progress) -> Any:
    if config.engine.kind == "sglang":
        from megatron_daro.runtime.sglang_group import SGLangGroup, Text

        tokenizer = inputs.tokenizer
        text = Text(
            lambda prompt: list(tokenizer.encode(prompt, add_special_tokens=False)),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            len(tokenizer),
        )
        return SGLangGroup(config, text, run_dir=run_directory(config), gpus=_gpus_per_worker() > 0, warn=progress.warn)
    from megatron_daro.runtime.engine_group import EngineGroup

    return EngineGroup(
        config.engine,
        model_path=config.model.path.absolute(),
        trust_remote_code=config.model.trust_remote_code,
        seed=config.trainer.seed,
        dtype=config.actor.dtype,
    )


def _group_size(config: Config) -> int:
    return config.rollout.rollouts_per_prompt


def _resources(config: Config, *, engines: bool) -> Resources:
    section, ranks = config.engine, config.actor.world_size
    servers = 0 if not engines or (section.kind == "sglang" and section.sglang.urls) else section.replicas
    per_server = section.sglang.tensor_parallel if section.kind == "sglang" else 1
    return Resources(processes=ranks + servers, gpus=(ranks + servers * per_server) * _gpus_per_worker())


def _gpus_per_worker() -> int:
    """1 where this machine has GPUs; asked without loading torch into the driver."""
    from megatron_daro.config import detect

    return 1 if detect().kind == "gpu" else 0


def _batch_options(config: Config) -> dict[str, Any]:
    """How groups become a batch: what the algorithm section says of advantages and long answers."""
    section = config.algorithm
    longest = section.overlong.max_tokens or config.rollout.max_response_tokens
    options: dict[str, Any] = {
        "rollouts_per_prompt": config.rollout.rollouts_per_prompt,
        "advantage_std": section.advantage_std,
        "overlong": section.overlong.kind,
        "max_tokens": longest,
        "cache_tokens": section.overlong.cache_tokens or max(longest // 5, 1),
    }
    if section.name == "rloo":
        options["advantages"] = leave_one_out_advantages
    return options


def _identity(config: Config) -> dict[str, Any]:
    """What must be equal in a run and in a checkpoint that it continues."""
    algorithm: AlgorithmSection = config.algorithm
    return {
        "seed": config.trainer.seed,
        "rollouts_per_prompt": config.rollout.rollouts_per_prompt,
        "prompts_per_step": config.rollout.prompts_per_step,
        "updates_per_batch": config.trainer.updates_per_batch,
        "algorithm": algorithm.name,
    }


def _prepared_run_dir(config: Config, *, resume: bool) -> Path:
    """The run directory with the resolved configuration in it."""
    run_dir = run_directory(config)
    if resume and not run_dir.is_dir():
        raise CheckpointError(f"--resume: {run_dir} does not exist; start without --resume, or check trainer.run_dir")
    if not resume:
        recovery.require_fresh(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(to_yaml(config))
    return run_dir


def run_directory(config: Config) -> Path:
    """Where the run is."""
    assert config.trainer.run_dir is not None, "the loader fills trainer.run_dir in"
    return config.trainer.run_dir


def _metrics_log(config: Config, run_dir: Path) -> MetricsLog:
    wandb = config.observe.wandb
    arguments: Mapping[str, Any] = {
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
