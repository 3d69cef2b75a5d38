"""The parts of a run: made from its checked configuration, then started.

launch.py calls these in order: `placement`, `policy_group`, `generation` (engine, verifiers, sampler), then
`start_all`. Parts that have processes of their own take the `RunContext`; parts that the loop drives get their section
of the configuration, or the few values that they need from other sections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.algo.weighting import Algorithm
from megatron_daro.config import Config
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.base import filled
from megatron_daro.config.lora import LoraSection
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.placement import demand_of
from megatron_daro.config.sections import EngineSection, EnvironmentSection
from megatron_daro.controller import BuildColumns
from megatron_daro.data.batch import build_step_batch
from megatron_daro.data.templates import trained_with
from megatron_daro.data.tokenizer import response_decoder
from megatron_daro.engine.own import OwnEngine, one_batch_at_a_time
from megatron_daro.engine.sglang.teacher import Teacher
from megatron_daro.environments.conversations import Conversations
from megatron_daro.environments.own import make_environment
from megatron_daro.environments.several_environments import Mixed
from megatron_daro.rollout.batch_filler import RolloutParts
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.evaluation import Evaluator
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.protocol import Rollouter
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.rollout.rollouter import SingleTurn
from megatron_daro.rollout.sampler import Sampler
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.embedded_engines import EmbeddedEngines
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.inputs import Inputs, answer_stops, ends_at_texts
from megatron_daro.runtime.node_pools import EnvironmentPools, VerifierPools
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.run_algorithm import algorithm_of
from megatron_daro.runtime.sglang_engine import TokenizerFacts, routed_experts_shape, sglang_engine
from megatron_daro.sync.colocation import Colocation, Gpus, OwnGpus, SharingEngine
from megatron_daro.sync.publish import ReceivingEngine
from megatron_daro.types import Group, SamplingParams, StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BESIDE_OF_SERVER = 32
"""How many answers of an evaluation each server generates at once beside a batch."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The parts that make batches and evaluations.

    teacher: None without distillation. evaluator: None where there is no evaluation set.
    """

    engine: ReceivingEngine
    scorer: VerifierPools
    rollouter: Rollouter
    teacher: Teacher | None
    sampler: Sampler
    evaluator: Evaluator | None

    def closers(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return, by name, the functions that close all parts except the engine."""
        closers = {"verifiers": self.scorer.close, "environment": self.rollouter.close}
        return closers | {"teacher": self.teacher.close} if self.teacher else closers


def batch_builder(config: Config, algorithm: Algorithm) -> BuildColumns:
    """Return (groups, optimizer step) -> StepBatch, with the algorithm's advantages."""
    overlong, length_reward = config.algorithm.overlong, config.algorithm.length_reward
    distill = config.algorithm.distill
    teacher = (distill.coefficient, distill.reward_weight) if distill.urls else None
    names = [one.name for one in config.environments]
    environments = {source: names.index(name) for source, name in config.environment_of_source.items()}

    def build(groups: Sequence[Group], step: int) -> StepBatch:
        return build_step_batch(
            groups,
            algorithm,
            overlong=overlong.kind,
            max_tokens=filled(overlong.max_tokens),
            cache_tokens=filled(overlong.cache_tokens),
            length_weight=length_reward.weight_at(step),
            repetition_penalty=config.algorithm.repetition_penalty,
            teacher=teacher,
            by_turn=config.algorithm.turn_rewards,
            environments=environments,
        )

    return build


def _sampling(config: Config, inputs: Inputs) -> SamplingParams:
    section, routed = config.rollout, routed_experts_shape(config)
    return SamplingParams(
        section.temperature,
        section.top_p,
        section.max_response_tokens,
        inputs.stops.token_ids,
        routed_experts=routed,
        stop=inputs.stops.texts,
        repetition=inputs.stops.repetition,
    )


def generation(run: RunContext, inputs: Inputs, algorithm: Algorithm, placement: Placement) -> Generation:
    """Make engine, scorer, sampler and evaluator."""
    engine = rollout_engine(run, inputs.tokenizer, placement)
    return generation_with(run, inputs, algorithm, engine, VerifierPools(run))


def generation_with(
    run: RunContext, inputs: Inputs, algorithm: Algorithm, engine: ReceivingEngine, scorer: VerifierPools
) -> Generation:
    """Make the other parts around a given engine and scorer."""
    config, rollout, ledger = run.config, run.config.rollout, Ledger()
    rollouter, distill = rollouter_of(run, inputs.tokenizer, engine, scorer), config.algorithm.distill
    teacher = Teacher(distill) if distill.urls else None
    collector = RolloutCollector(
        ledger,
        rollouter=rollouter,
        sampling=_sampling(config, inputs),
        rollouts_per_prompt=rollout.rollouts_per_prompt,
        deadlines=run.deadlines,
        phases=run.phases,
        notices=run.progress,
        segment_tokens=rollout.segment_tokens,
        template=trained_with(config.data),
        opens_thinking=inputs.opens_thinking,
        teacher=teacher,
    )
    rollout_parts = RolloutParts(
        section=rollout,
        rollouter=rollouter,
        prompts=inputs.prompts,
        ledger=ledger,
        collector=collector,
        notices=run.progress,
        deadlines=run.deadlines,
    )
    sampler = Sampler(
        rollout_parts,
        scorer,
        finish_batch=rollout.finish_batch_with(one_batch_at_a_time=one_batch_at_a_time(config)),
        kept_bins=algorithm.kept_bins,
        steps_per_batch=config.trainer.steps_per_batch,
        recorder=recorder(run),
    )
    evaluator = Evaluator(
        inputs.held_out,
        rollouter,
        max_response_tokens=rollout.max_response_tokens,
        stops=inputs.stops,
        answers_beside=0 if one_batch_at_a_time(config) else _BESIDE_OF_SERVER * _servers(config.engine),
        warn=run.progress.warn,
    )
    return Generation(engine, scorer, rollouter, teacher, sampler, evaluator if inputs.held_out else None)


def rollouter_of(
    run: RunContext, tokenizer: PreTrainedTokenizerBase, engine: ReceivingEngine, scorer: VerifierPools
) -> Rollouter:
    """Return what takes groups from prompts to scored rollouts. Raises ConfigError: the environment cannot be made."""
    config = run.config
    if config.environments:
        by_name = {one.name: _rollouter(run, one, tokenizer, engine, scorer) for one in config.environments}
        return Mixed(by_name, config.environment_of_source)
    return _rollouter(run, config.environment, tokenizer, engine, scorer)


def _rollouter(
    run: RunContext,
    section: EnvironmentSection,
    tokenizer: PreTrainedTokenizerBase,
    engine: ReceivingEngine,
    scorer: VerifierPools,
) -> Rollouter:
    config = run.config
    if not section.has_turns:
        return SingleTurn(engine, scorer)
    chat = config.data.prompt_template == "chat"
    environment = make_environment(
        section,
        tokenizer,
        chat=chat,
        warn=run.progress.warn,
        pools=partial(EnvironmentPools, run, section),
        correct_reward=config.reward.correct_reward,
    )
    return Conversations(
        section,
        environment,
        engine,
        scorer,
        reward=config.reward,
        decode=response_decoder(tokenizer),
        vocabulary=read_model_shape(config.model.path).vocab,
        together=one_batch_at_a_time(config),
        notices=run.progress,
    )


def gpus(run: RunContext, policy: PolicyGroup, generation: Generation | None, placement: Placement) -> Gpus:
    """Return the turns in which policy and engine use the GPUs; `OwnGpus` if they share none."""
    if generation is None or not placement.shares_gpus:
        return OwnGpus()
    assert isinstance(generation.engine, SharingEngine), "the checks refuse others"
    return Colocation(policy, generation.engine, run.deadlines, run.progress.warn)


def _servers(engine: EngineSection) -> int:
    return len(engine.sglang.urls) or engine.replicas


def recorder(run: RunContext) -> Recorder | None:
    """Return the writer of the run's rollouts; None where none are kept."""
    return Recorder(run.run_dir) if run.config.observe.save_rollouts else None


def placement(run: RunContext, *, engines: bool) -> Placement:
    """Return where the run's processes will be. Args: engines: whether there are engines."""
    return Placement(demand_of(run.config, engines=engines), run.config.actor, run.deadlines)


def policy_settings(config: Config) -> PolicySettings:
    """Return the settings of the run that each rank needs besides its own sections."""
    engine, megatron = config.engine, config.actor.megatron
    shares_memory = engine.kind == "sglang" and (engine.colocate or engine.sglang.transport.maps_memory)
    return PolicySettings(
        model_path=config.model.path.absolute(),
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        total_steps=config.trainer.steps,
        weights=config.model.megatron_weights and config.model.megatron_weights.absolute(),
        expandable_segments=not shares_memory and not megatron.get("nccl_ub"),
        lora=_with_absolute_path(config.lora),
        seed=config.trainer.seed,
        environments=tuple(one.name for one in config.environments),
    )


def _with_absolute_path(section: LoraSection) -> LoraSection:
    """Return the section with a path that is the same in every process."""
    return section.model_copy(update={"path": section.path and section.path.absolute()})


def policy_group(run: RunContext, placement: Placement, *, trains: bool) -> PolicyGroup:
    """Return the Megatron ranks. Args: trains: if not, they only export, and lost ranks are not replaced."""
    config, trainer = run.config, run.config.trainer
    columns = algorithm_of(config).token_columns or ()
    healing = None
    if trains and trainer.replace_lost_ranks:
        healing = HealingLimits(trainer.snapshot_gib, trainer.max_replacements, trainer.hung_rank_s)
    algorithm = _with_absolute_paths(config.algorithm)
    return PolicyGroup(run, policy_settings(config), algorithm, placement, token_columns=columns, healing=healing)


def _with_absolute_paths(section: AlgorithmSection) -> AlgorithmSection:
    """Return the section with a path that is the same in every process."""
    path = section.critic.path
    if path is None:
        return section
    return section.model_copy(update={"critic": section.critic.model_copy(update={"path": path.absolute()})})


def rollout_engine(run: RunContext, tokenizer: PreTrainedTokenizerBase, placement: Placement) -> ReceivingEngine:
    """Return the engine of `engine.kind`. Raises ConfigError: the servers' environment cannot work, or a class of your
    own does not fit, or its constructor raised."""
    config = run.config
    if config.engine.kind == "sglang":
        facts = TokenizerFacts(
            lambda prompt: list(tokenizer.encode(prompt, add_special_tokens=False)),
            len(tokenizer),
            ends_at_texts(config, answer_stops(config, tokenizer)),
        )
        return sglang_engine(run, facts, placement)
    if config.engine.is_own:
        return OwnEngine(
            config.engine.kind,
            {"model_path": config.model.path.absolute(), **config.engine.own_arguments},
            vocabulary=read_model_shape(config.model.path).vocab,
            sync_dir=run.run_dir.absolute() / "engine_weights",
            decode=response_decoder(tokenizer),
        )
    return EmbeddedEngines(run, placement)


async def start_all(run: RunContext, placement: Placement, policy: PolicyGroup, generation: Generation | None) -> None:
    """Start all processes but those of environments, once each has a place: all at once, since each spends its first
    seconds importing, unless servers share GPUs with ranks: then one kind after the other. The first failure cancels
    the other starts.

    Raises:
        DaroError: a process cannot start. DeadlineError: names the part that did not start in time.
    """
    stage = run.progress.stage
    stage("start", "looking for room in the Ray cluster")
    await placement.start()
    stage("start")
    if placement.shares_gpus and generation:
        await _start_in_turns(run, policy, generation)
    else:
        await _start_at_once(run, policy, generation)
    for remark in policy.remarks:
        run.progress.warn(remark)


_RANKS, _RANKS_LOAD = "the actor's ranks", "ranks load the model"


async def _start_in_turns(run: RunContext, policy: PolicyGroup, generation: Generation) -> None:
    """Start the ranks' processes, which use no GPU yet, then the servers, which take their share of the free GPU memory
    and release it before the policy is built."""
    within, stage, engine = run.deadlines.within, run.progress.stage, generation.engine
    stage("ranks", "ranks start")
    await within("policy_start", policy.start_processes(), what=_RANKS)
    stage("ranks")
    await _all(_engine_starts(run, engine, generation.scorer))
    assert isinstance(engine, SharingEngine), "the checks refuse others"
    stage("engine", "the engine gives its memory back")
    await within("engine_start", engine.release_memory(), what="the rollout engine's memory")
    stage("engine")
    stage("ranks", _RANKS_LOAD)
    await within("policy_start", policy.build(), what=_RANKS)
    stage("ranks")


async def _start_at_once(run: RunContext, policy: PolicyGroup, generation: Generation | None) -> None:
    async def start_ranks() -> None:
        run.progress.stage("ranks", _RANKS_LOAD)
        await run.deadlines.within("policy_start", policy.start(), what=_RANKS)
        run.progress.stage("ranks")

    starts = [start_ranks()]
    if generation:
        starts += _engine_starts(run, generation.engine, generation.scorer)
    await _all(starts)
    run.progress.stage("engine")


async def start_engine(run: RunContext, placement: Placement, engine: ReceivingEngine, scorer: VerifierPools) -> None:
    """Start engine and scorer where there is no policy. Raises what `start_all` raises."""
    await placement.start()
    await _all(_engine_starts(run, engine, scorer))


def _engine_starts(
    run: RunContext, engine: ReceivingEngine, scorer: VerifierPools
) -> list[Coroutine[None, None, None]]:
    within = run.deadlines.within
    return [
        within("engine_start", engine.start(), what="the rollout engine"),
        within("verifier_start", scorer.start(), what="the verifiers"),
    ]


async def _all(starts: Sequence[Coroutine[None, None, None]]) -> None:
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
