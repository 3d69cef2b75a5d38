"""From a checked configuration to the parts of a run; starts nothing.

Launch.py calls these, then starts what they made. Everything is handed its own section here, or
the few values it needs of others. Computes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.algo.weighting import Algorithm, make_algorithm
from megatron_daro.config import Config
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.base import filled
from megatron_daro.config.hardware import demand_of
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.sections import EngineSection
from megatron_daro.controller import BuildBatch
from megatron_daro.data.batch import build_batch
from megatron_daro.data.templates import trained_with
from megatron_daro.data.tokenizer import response_decoder
from megatron_daro.engine.own import OwnEngine
from megatron_daro.engine.sglang.teacher import Taught, Teacher
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.observe import logs
from megatron_daro.observe.metrics import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.batch_filler import RolloutContext
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.conversations import Conversations
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.evaluation import Evaluator
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.own_environment import make_environment
from megatron_daro.rollout.protocol import Notices, Rollouter
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.rollout.rollouter import SingleTurn
from megatron_daro.rollout.sampler import Sampler
from megatron_daro.runtime.cluster import Placement
from megatron_daro.runtime.embedded_group import EngineGroup
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.inputs import Inputs, answer_stops, ends_at_texts
from megatron_daro.runtime.node_workers import Verdicts
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.sglang_group import SGLangGroup, Text, routed_experts
from megatron_daro.runtime.step_pools import StepPools
from megatron_daro.sync.publish import Colocation, ReceivingEngine, SharingEngine
from megatron_daro.types import Group, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BESIDE_OF_SERVER = 32
"""Answers of an evaluation that each server has at once while a batch is generated."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What makes batches. evaluator: None where there is no evaluation set."""

    engine: ReceivingEngine
    scorer: Verdicts
    rollouter: Rollouter
    sampler: Sampler
    evaluator: Evaluator | None


def algorithm_of(config: Config) -> Algorithm:
    """Return the driver's instance: it makes advantages and filters groups; every rank has one more, for the loss.

    Raises:
        ConfigError: no such algorithm, or options that it does not take.
    """
    sizes = config.rollout.rollouts_per_prompt, config.rollout.max_response_tokens
    try:
        return make_algorithm(**config.algorithm.arguments(rollouts_per_prompt=sizes[0], max_response_tokens=sizes[1]))
    except AlgorithmError as error:
        raise ConfigError(f"algorithm.{error}") from error


def algorithm_remarks(config: Config, algorithm: Algorithm) -> list[str]:
    """Return what is allowed, but probably not meant, where that depends on the algorithm itself."""
    rollout, remarks = config.rollout, list(algorithm.remarks)
    used = rollout.keep_surplus or rollout.finishes_early(config.engine.kind)
    if rollout.oversampling > 1 and len(algorithm.kept_bins) > algorithm.rollouts_per_prompt and not used:
        remarks.append(
            f"rollout.oversampling: got {rollout.oversampling:g}, but no group is filtered; allowed: 1 without a "
            "filter, since the surplus would be thrown away; fix: set rollout.oversampling=1, or "
            "algorithm.filter=pass_rate"
        )
    return remarks


def batch_builder(config: Config, algorithm: Algorithm) -> BuildBatch:
    """Return (groups, optimizer step) -> TrainBatch, with the algorithm's advantages."""
    overlong, length_reward = config.algorithm.overlong, config.algorithm.length_reward
    distill = config.algorithm.distill
    teacher = (distill.coefficient, distill.reward_weight) if distill.urls else None
    by_turn = config.algorithm.turn_rewards
    if (teacher or by_turn) and algorithm.token_columns is not None:
        field = "distill" if teacher else "turn_rewards"
        raise ConfigError(
            f"algorithm.{field}: got it with algorithm.name {config.algorithm.name}, which makes advantages per token "
            "itself; allowed: one with an advantage for each rollout; fix: set algorithm.name=grpo"
        )
    if by_turn and type(algorithm).advantages is not Algorithm.advantages:
        raise ConfigError(
            f"algorithm.turn_rewards: got true with algorithm.name {config.algorithm.name}, another advantage "
            "than GRPO's; allowed: grpo, daro and others with it; fix: set algorithm.name=grpo, or turn_rewards=false"
        )

    def build(groups: Sequence[Group], step: int) -> TrainBatch:
        return build_batch(
            groups,
            algorithm,
            overlong=overlong.kind,
            max_tokens=filled(overlong.max_tokens),
            cache_tokens=filled(overlong.cache_tokens),
            length_weight=length_reward.weight_at(step),
            repetition_penalty=config.algorithm.repetition_penalty,
            teacher=teacher,
            by_turn=by_turn,
        )

    return build


def _sampling(config: Config, inputs: Inputs) -> SamplingParams:
    section, routed = config.rollout, routed_experts(config)
    return SamplingParams(
        section.temperature,
        section.top_p,
        section.max_response_tokens,
        inputs.stops.token_ids,
        routed_experts=routed,
        stop=inputs.stops.texts,
        repetition=section.repetition.looked_for,
    )


def generation(
    config: Config, inputs: Inputs, algorithm: Algorithm, placement: Placement, progress: Progress, phases: Phases
) -> Generation:
    """Engine, scorer, sampler and evaluator."""
    engine = rollout_engine(config, inputs.tokenizer, placement, progress, loads=partial(progress.stage, "engine"))
    scorer = Verdicts(
        config.reward,
        beside_driver=config.engine.kind == "embedded",
        logs=log_folder(config),
        warn=progress.warn,
        deadlines=placement.deadlines,
    )
    return generation_with(config, inputs, algorithm, engine, scorer, progress, phases, placement.deadlines)


def generation_with(
    config: Config,
    inputs: Inputs,
    algorithm: Algorithm,
    engine: ReceivingEngine,
    scorer: Verdicts,
    progress: Progress,
    phases: Phases,
    limits: Deadlines,
) -> Generation:
    """Return the same, with an engine and a scorer that are there. limits: of every wait."""
    rollout, ledger = config.rollout, Ledger()
    untaught = rollouter_of(config, inputs.tokenizer, engine, scorer, progress, limits)
    distill = config.algorithm.distill
    rollouter = Taught(untaught, Teacher(distill)) if distill.urls else untaught
    collector = RolloutCollector(
        ledger,
        rollouter=rollouter,
        sampling=_sampling(config, inputs),
        rollouts_per_prompt=rollout.rollouts_per_prompt,
        deadlines=limits,
        phases=phases,
        notices=progress,
        segment_tokens=rollout.segment_tokens,
        template=trained_with(config.data),
        opens_thinking=inputs.opens_thinking,
    )
    context = RolloutContext(
        section=rollout,
        rollouter=rollouter,
        source=inputs.prompts,
        ledger=ledger,
        collector=collector,
        notices=progress,
        deadlines=limits,
    )
    sampler = Sampler(
        context,
        scorer,
        wait_for="enough" if rollout.finishes_early(config.engine.kind) else "all",
        kept_bins=algorithm.kept_bins,
        steps_per_batch=config.trainer.steps_per_batch,
        recorder=recorder(config),
    )
    evaluator = Evaluator(
        inputs.held_out,
        untaught,
        max_response_tokens=rollout.max_response_tokens,
        stops=inputs.stops,
        beside=_BESIDE_OF_SERVER * _servers(config.engine) if evaluates_beside(config) else 0,
        warn=progress.warn,
    )
    return Generation(engine, scorer, rollouter, sampler, evaluator if inputs.held_out else None)


def rollouter_of(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    engine: ReceivingEngine,
    scorer: Verdicts,
    notices: Notices,
    limits: Deadlines,
) -> Rollouter:
    """Return what takes groups from prompts to scored rollouts. Raises ConfigError: the environment cannot be made."""
    if not config.environment.is_own:
        return SingleTurn(engine, scorer)
    section, chat = config.environment, config.data.prompt_template == "chat"

    def pools() -> StepPools:
        return StepPools(section, log_folder=log_folder(config), warn=notices.warn, deadlines=limits)

    return Conversations(
        section,
        make_environment(section, tokenizer, chat=chat, warn=notices.warn, pools=pools),
        engine,
        scorer,
        reward=config.reward,
        decode=response_decoder(tokenizer),
        vocabulary=read_model_shape(config.model.path).vocab,
        together=config.engine.kind == "embedded",
        notices=notices,
    )


def evaluates_beside(config: Config) -> bool:
    """Whether evaluation and generation use the engine together: servers take requests of both; the embedded engine
    works on one batch at a time, and would only do the same work in another order."""
    return config.engine.kind != "embedded"


def colocation(
    policy: PolicyGroup, made: Generation | None, placement: Placement, notices: Notices
) -> Colocation | None:
    """Return whose turn it is on GPUs that policy and engine share; None where each has its own."""
    if made is None or not placement.shares_gpus:
        return None
    assert isinstance(made.engine, SharingEngine), "the checks refuse others"
    return Colocation(policy, made.engine, placement.deadlines, notices.warn)


def _servers(engine: EngineSection) -> int:
    return len(engine.sglang.urls) or engine.replicas


def recorder(config: Config) -> Recorder | None:
    """Return the writer of the run's rollouts; None where none are kept."""
    return Recorder(run_directory(config)) if config.observe.save_rollouts else None


def deadlines(config: Config) -> Deadlines:
    """Return the limit of every wait."""
    return Deadlines().scaled(config.trainer.deadline_scale)


def placement(config: Config, *, engines: bool) -> Placement:
    """Return where the run's processes will be. Args: engines: whether any generate."""
    return Placement(demand_of(config, engines=engines), config.actor, deadlines(config))


def policy_settings(config: Config) -> PolicySettings:
    """Return what each rank needs of the run beside its own sections."""
    engine, megatron = config.engine, config.actor.megatron
    shares_memory = engine.kind == "sglang" and (engine.colocate or engine.sglang.sync == "tensor")
    return PolicySettings(
        model_path=config.model.path.absolute(),
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        total_steps=config.trainer.steps,
        weights=config.model.megatron_weights and config.model.megatron_weights.absolute(),
        expandable_segments=not shares_memory and not megatron.get("nccl_ub"),
    )


def policy_group(config: Config, placement: Placement, warn: Callable[[str], None] | None = None) -> PolicyGroup:
    """Return the Megatron ranks. Args: warn: told of ranks that were replaced or are slow; None: none is ever replaced.

    Raises:
        ConfigError: the critic shall be exported of an algorithm of your own that has none.
    """
    columns = algorithm_of(config).token_columns or ()
    if config.trainer.export_critic and "values" not in columns:
        raise ConfigError(
            f"trainer.export_critic: got true, but {config.algorithm.name} has no critic (token_columns without "
            "values); fix: set trainer.export_critic=false"
        )
    told: dict[str, Any] = {"warn": warn} if warn else {}
    if config.trainer.replace_lost_ranks and warn:
        trainer = config.trainer
        told["healing"] = HealingLimits(trainer.snapshot_gib, trainer.max_replacements, trainer.hung_rank_s)
    return PolicyGroup(
        policy_settings(config),
        config.actor,
        _of_ranks(config.algorithm),
        seed=config.trainer.seed,
        updates_per_batch=config.trainer.updates_per_batch,
        placement=placement,
        token_columns=columns,
        logs=log_folder(config),
        **told,
    )


def _of_ranks(section: AlgorithmSection) -> AlgorithmSection:
    """Return the section with a path that is the same in every process."""
    path = section.critic.path
    if path is None:
        return section
    return section.model_copy(update={"critic": section.critic.model_copy(update={"path": path.absolute()})})


def rollout_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    notices: Notices,
    *,
    loads: Callable[[str], None],
) -> ReceivingEngine:
    """Return the engine of `engine.kind`. Args: loads: told what loads when it starts. Raises ConfigError for servers
    whose environment cannot work."""
    if config.engine.kind == "sglang":
        text = Text(
            lambda prompt: list(tokenizer.encode(prompt, add_special_tokens=False)),
            len(tokenizer),
            ends_at_texts(config, answer_stops(config, tokenizer)),
        )
        return SGLangGroup(
            config,
            text,
            run_dir=run_directory(config),
            placement=placement,
            warn=notices.warn,
            loads=loads,
            deadlines=placement.deadlines,
        )
    if config.engine.is_own:
        return OwnGroup(config, tokenizer)
    return EngineGroup(
        config.engine,
        model_path=config.model.path.absolute(),
        trust_remote_code=config.model.trust_remote_code,
        dtype=config.actor.dtype,
        placement=placement,
        warn=notices.warn,
        loads=loads,
        logs=log_folder(config),
    )


class OwnGroup(OwnEngine):
    """An engine of the user's own."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start nothing. Raises ConfigError: the class does not fit, or its constructor raised."""
        super().__init__(
            config.engine.kind,
            {"model_path": config.model.path.absolute(), **config.engine.own_arguments},
            vocabulary=read_model_shape(config.model.path).vocab,
            sync_dir=run_directory(config).absolute() / "engine_weights",
            decode=response_decoder(tokenizer),
        )


def run_directory(config: Config) -> Path:
    """Where the run is."""
    return filled(config.trainer.run_dir)


def log_folder(config: Config) -> Path:
    """Where every process of the run has its log."""
    return run_directory(config).absolute() / logs.FOLDER


async def start_all(placement: Placement, policy: PolicyGroup, made: Generation | None, progress: Progress) -> None:
    """All processes at once, when each has a place: each spends its first seconds importing. The first failure ends
    the other starts.

    Raises:
        DaroError: a process cannot start. DeadlineError: one did not start in time, and which.
    """
    progress.stage("start", "looking for room in the Ray cluster")
    await placement.start()
    progress.stage("start")
    if placement.shares_gpus and made:
        await _start_in_turns(placement, policy, made, progress)
    else:
        await _start_at_once(placement, policy, made, progress)
    for remark in policy.remarks:
        progress.warn(remark)


async def _start_in_turns(placement: Placement, policy: PolicyGroup, made: Generation, progress: Progress) -> None:
    """Start the servers first, which look at what is free on the GPUs and take their part; they give it back before
    the policy is built."""
    limits, what = placement.deadlines, "the actor's ranks"
    progress.stage("ranks", "ranks start")
    await limits.within("policy_start", policy.start_processes(), what=what)
    progress.stage("ranks")
    await _all(_engine_starts(limits, made.engine, made.scorer))
    assert isinstance(made.engine, SharingEngine), "the checks refuse others"
    progress.stage("engine", "the engine gives its memory back")
    await limits.within("engine_start", made.engine.release_memory(), what="the rollout engine's memory")
    progress.stage("engine")
    progress.stage("ranks", _RANKS_LOAD)
    await limits.within("policy_start", policy.build(), what=what)
    progress.stage("ranks")


_RANKS_LOAD = "ranks load the model"


async def _start_at_once(
    placement: Placement, policy: PolicyGroup, made: Generation | None, progress: Progress
) -> None:
    async def start_ranks() -> None:
        progress.stage("ranks", _RANKS_LOAD)
        await placement.deadlines.within("policy_start", policy.start(), what="the actor's ranks")
        progress.stage("ranks")

    starts = [start_ranks()]
    if made:
        starts += _engine_starts(placement.deadlines, made.engine, made.scorer)
    await _all(starts)
    progress.stage("engine")


async def start_engine(placement: Placement, engine: ReceivingEngine, scorer: Verdicts) -> None:
    """`start_all` of what has no policy. Raises as it does."""
    await placement.start()
    await _all(_engine_starts(placement.deadlines, engine, scorer))


def _engine_starts(limits: Deadlines, engine: ReceivingEngine, scorer: Verdicts) -> list[Coroutine[None, None, None]]:
    return [
        limits.within("engine_start", engine.start(), what="the rollout engine"),
        limits.within("verifier_start", scorer.start(), what="the verifiers"),
    ]


async def _all(starts: Sequence[Coroutine[None, None, None]]) -> None:
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
