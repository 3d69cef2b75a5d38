"""Warnings about settings that work but are probably not intended. They do not stop a run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.placement import demand_of
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.rules.algorithm import STEPS_OF_A_BATCH
from megatron_daro.config.rules.layout import PARALLEL, layout_text
from megatron_daro.config.sections import Config
from megatron_daro.families import families

_GSPO_WIDEST = 0.01
"""Source: GSPO arXiv 2507.18071, section 5: 3e-4 below and 4e-4 above; this is far beyond any published setting."""


def model(shape: ModelShape | None) -> Iterator[Problem]:
    """Yield parts of config.json that training leaves out."""
    if shape and shape.experts and shape.experts.balancing:
        got = f"a config.json with a loss that balances experts (router_aux_loss_coef {shape.experts.balancing:g})"
        fix = "none needed; watch the experts' use, and set output_router_logits to false to silence this"
        yield Problem("model.path", got, "training without it: as rollouts chose the experts", fix)
    if shape and shape.further_layers:
        key = families()[shape.family].further_tokens
        got = f"a config.json with layers that predict tokens after the next ({key} {shape.further_layers})"
        allowed = "training without them: no checkpoint of the run has them, and no server gets them"
        yield Problem("model.path", got, allowed, "none needed; start servers without speculative decoding by them")

    if shape and (starts := families()[shape.family].untrained):
        start = " or ".join(starts)
        got = f"a model of type {shape.family}, which may hold tensors that begin with {start}"
        allowed = "training without them: no server gets them, and no checkpoint of the run has them"
        yield Problem("model.path", got, allowed, "none needed; start servers without speculative decoding by them")


def world(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Yield GPUs that would be idle, and CPU cores that several ranks would share."""
    actor, got = config.actor, layout_text(config.actor)
    of_engines = demand_of(config).gpus - actor.world_size
    replicas = (hardware.count - of_engines) // actor.world_size
    if hardware.kind == "gpu" and replicas > 1:
        allowed = f"up to {actor.world_size * replicas} ranks beside the engines"
        fix = f"set actor.data_parallel={actor.data_parallel * replicas}, or more engine.replicas, to use more GPUs"
        yield wrong(config, "actor", allowed, fix, beside=PARALLEL, got=got)
    if hardware.kind == "cpu" and actor.world_size > hardware.count:
        allowed = f"{hardware.count} CPU cores are on {hardware.place}"
        yield wrong(
            config, "actor", allowed, "use fewer ranks, or expect them to share cores", beside=PARALLEL, got=got
        )


def sampling(config: Config) -> Iterator[Problem]:
    """Yield training on samples of older weights without a correction."""
    section = config.algorithm
    corrected = section.correction.kind != "none" or section.trust_region == "gspo" or section.old_logprobs == "rollout"
    if config.rollout.max_staleness > 0 and not corrected:
        allowed = "tis or mis, or algorithm.trust_region=gspo, are advised off-policy"
        fix = "set algorithm.correction.kind=tis"
        yield wrong(config, "algorithm.correction.kind", allowed, fix, beside="rollout.max_staleness")


def algorithm(config: Config) -> Iterator[Problem]:
    """Yield options with which, given the others, the algorithm is not the published one."""
    section, reward, steps = config.algorithm, config.reward, config.trainer.steps_per_batch
    plain_rewards = (reward.correct_reward, reward.incorrect_reward) == (1, 0)
    penalized = section.overlong.penalizes
    shaped = not plain_rewards or section.shapes_rewards
    deviation, every = section.options.get("deviation", "verdicts"), section.options.get("every", "step")
    if section.name == "dgpo" and deviation == "verdicts" and shaped:
        field = "algorithm.options.deviation"
        allowed = "rewards is the published DGPO: they are others than 0 and 1 here"
        yield wrong(config, field, allowed, f"set {field}=rewards", got=deviation)
    if section.name == "ha_dw" and every == "step" and steps > 1:
        field = "algorithm.options.every"
        allowed = "batch is the published HA-DW, with several optimizer steps per batch"
        yield wrong(config, field, allowed, f"set {field}=batch", beside=STEPS_OF_A_BATCH, got=every)
    if penalized and plain_rewards:
        allowed = "-1, DAPO's: beside 0 and 1 the penalty weighs twice as much, and a right answer of full length "
        allowed += "is worth no more than a wrong one"
        fix = "set reward.incorrect_reward=-1"
        yield wrong(config, "reward.incorrect_reward", allowed, fix, beside="algorithm.overlong.kind")
    if section.name == "kimi" and steps == 1 and section.old_logprobs != "rollout":
        allowed = "2 or more, as published: its tau weighs what moved since the batch began, with 1 nothing"
        yield wrong(
            config,
            "trainer.minibatches_per_batch",
            allowed,
            "set trainer.minibatches_per_batch=4",
            beside="algorithm.name",
        )
    kl_in_loss = section.kl.coefficient > 0 and section.kl.place == "loss"
    if section.name == "grpo_sequence" and kl_in_loss and section.kl.mean == "tokens":
        allowed = "rollouts is the published GRPO (eq. 3): the KL stands inside the mean over an answer's tokens"
        yield wrong(config, "algorithm.kl.mean", allowed, "set algorithm.kl.mean=rollouts", beside="algorithm.name")
    if section.trust_region == "gspo" and section.clip_high > _GSPO_WIDEST:
        allowed = (
            "gspo's own range is about 3e-4 and 4e-4: a ratio per sequence, its tokens' geometric mean, moves little"
        )
        fix = "set algorithm.clip_low=3e-4 and algorithm.clip_high=4e-4"
        yield wrong(config, "algorithm.trust_region", allowed, fix, beside="algorithm.clip_low algorithm.clip_high")
