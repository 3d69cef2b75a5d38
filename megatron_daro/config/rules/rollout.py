"""Rules of `rollout`: the batch can be divided, its sequences fit, and the answers of a group can differ and end."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.model_files import ModelFiles
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config

_MOST_ROLLOUTS = 2**22
"""Most rollouts of a batch, so that the columns that the driver holds stay within memory."""
_SAMPLES = "rollout.prompts_per_batch rollout.rollouts_per_prompt"
_LENGTHS = "data.max_prompt_tokens rollout.max_response_tokens"


def batch(config: Config) -> Iterator[Problem]:
    """Yield what keeps a batch from being divided into mini-batches and over the replicas."""
    samples, parts = config.rollout.batch_rollouts, config.trainer.minibatches_per_batch
    if samples > _MOST_ROLLOUTS:
        allowed = f"at most {_MOST_ROLLOUTS} rollouts a batch; these are {samples}"
        beside = "rollout.rollouts_per_prompt"
        yield wrong(config, "rollout.prompts_per_batch", allowed, "lower one of the two", beside=beside)
    prompts = config.rollout.prompts_per_batch
    least = prompts // parts * config.rollout.rollouts_per_prompt
    if parts > prompts:
        allowed, fix = f"at most {prompts}, the prompts of a batch", "lower it, or raise rollout.prompts_per_batch"
        yield wrong(config, "trainer.minibatches_per_batch", allowed, fix, beside="rollout.prompts_per_batch")
    elif least < config.actor.data_parallel:
        allowed = f"at most {least}, the samples of a mini-batch"
        fix = "raise rollout.prompts_per_batch or lower actor.data_parallel"
        yield wrong(config, "actor.data_parallel", allowed, fix, beside=f"{_SAMPLES} trainer.minibatches_per_batch")


def lengths(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield what keeps the longest sequence from fitting into a micro-batch, or into the model."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    budget, (_, multiple) = config.actor.micro_batch_tokens, config.actor.pack_multiples
    if longest > budget:
        allowed = f"at least {longest}, the longest prompt with the longest response"
        fix = f"set actor.micro_batch_tokens={-(-longest // multiple) * multiple}, or shorten the sequences"
        yield wrong(config, "actor.micro_batch_tokens", allowed, fix, beside=_LENGTHS)
    if budget % multiple:
        allowed = f"a multiple of {multiple}, which packs are padded to for sequence and context parallelism and fp8"
        fix = f"set actor.micro_batch_tokens={-(-budget // multiple) * multiple}"
        beside = "actor.tensor_parallel actor.context_parallel actor.precision"
        yield wrong(config, "actor.micro_batch_tokens", allowed, fix, beside=beside)
    if shape and longest > shape.max_positions:
        allowed = f"at most {shape.max_positions} tokens with the prompt, the model's max_position_embeddings"
        fix = "lower rollout.max_response_tokens or data.max_prompt_tokens"
        yield wrong(config, "rollout.max_response_tokens", allowed, fix, beside="data.max_prompt_tokens model.path")


def sampling(config: Config, model: ModelFiles) -> Iterator[Problem]:
    """Yield why the rollouts of a group could not differ, not end, or not be kept."""
    rollout, shape = config.rollout, model.shape
    if rollout.temperature == 0:
        allowed = "above 0 for training: the rollouts of a group would all be equal"
        yield wrong(config, "rollout.temperature", allowed, "set rollout.temperature=1.0")
    if rollout.keep_surplus and rollout.max_staleness == 0:
        allowed = "true with rollout.max_staleness 1 or more: kept groups would be too old"
        fix = "set rollout.keep_surplus=false or rollout.max_staleness=1"
        yield wrong(config, "rollout.keep_surplus", allowed, fix, beside="rollout.max_staleness")
    if shape and any(token >= shape.vocab for token in rollout.stop_token_ids):
        allowed, fix = f"ids below {shape.vocab}, the model's vocabulary", "use the ids of this model's tokenizer"
        yield wrong(config, "rollout.stop_token_ids", allowed, fix, beside="model.path")
    if shape and not (model.has_end_token or rollout.stop or rollout.stop_token_ids):
        allowed = "at least one token that ends an answer: the model's files name none"
        fix = "set rollout.stop_token_ids, or eos_token_id in config.json"
        yield wrong(config, "rollout.stop_token_ids", allowed, fix, beside="model.path rollout.stop")


def segments(config: Config) -> Iterator[Problem]:
    """Yield options that cannot be combined with answers in segments, or with the repetition penalty."""
    rollout, needed = config.rollout, config.rollout.batches_kept
    if rollout.segment_tokens is not None:
        several = bool(config.environments)
        begins_anew = {
            "engine.kind": "an engine of your own" if config.engine.is_own else "",
            "environment.kind": "an environment of turns" if config.environment.has_turns and not several else "",
            "environments": "several environments" if several else "",
        }
        for field, what in begins_anew.items():
            if what:
                allowed = f"unset with {what}: an answer there begins anew and does not go on"
                yield wrong(config, "rollout.segment_tokens", allowed, "set rollout.segment_tokens=null", beside=field)
        if rollout.max_staleness < needed:
            allowed = f"at least {needed}, the segments of the longest answer: with fewer it is always dropped"
            beside = "rollout.segment_tokens rollout.max_response_tokens"
            yield wrong(config, "rollout.max_staleness", allowed, f"set rollout.max_staleness={needed}", beside=beside)
    if config.algorithm.repetition_penalty and rollout.repetition.tokens is None:
        allowed = "0, or a stop for repetition: without one no answer would have the penalty"
        fix = "set rollout.repetition.tokens=256, or algorithm.repetition_penalty=0"
        yield wrong(config, "algorithm.repetition_penalty", allowed, fix, beside="rollout.repetition.tokens")
