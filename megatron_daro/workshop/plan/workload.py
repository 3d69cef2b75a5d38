"""What a step of a recipe asks for: samples, lengths, passes. The planner's only view of a configuration.

Config (and lengths that were assumed, or recorded) -> Workload -> memory.py, times.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from megatron_daro.config import Config
from megatron_daro.config.actor import ActorSection, Fp8Recipe
from megatron_daro.config.lora import LoraSection, layers_of_role, matrix_of, sides_of_roles
from megatron_daro.config.megatron_options import gpu_defaults
from megatron_daro.config.model_files import critic_shape
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.rules.lora import with_adapter_sync
from megatron_daro.config.sections import GPU_BUCKET_MIB, SHARED_FRACTION
from megatron_daro.errors import ConfigError

NUM_QUANTILES = 256
"""Number of quantiles that represent a distribution of lengths."""
DEFAULT_SPREAD = 0.8
"""Standard deviation of the logarithm of an answer's length: between those of short sums and of long proofs."""
DEFAULT_SHARE = 0.3
"""Mean answer as a share of the longest allowed one, unless the user gives a mean."""


@dataclass(frozen=True, slots=True)
class Practice:
    """What a trainer's software does with a layout; the defaults are this package's.

    graphs: what of a layer runs as CUDA graphs: nothing, the router, also attention ("partial"), or all. fused: routing
    and permutation of tokens are fused kernels. once: a token is sent once to each node, not once to each of its
    experts there. overlaps: collectives of tensor, context and data parallelism run beside computation;
    overlaps_reduction: of these at least the reduction of gradients; overlaps_experts: the exchange between experts.
    gathers: weights are gathered for each micro-batch (FSDP). balanced: each expert gets equally many tokens, whatever
    the router says. gradient_bytes: of an element in the reduction. logprobs_at_once: micro-batches that a pass without
    gradients takes as one. batches_at_once: batches whose answers servers generate at the same time, a new one starting
    as soon as the oldest ends; 0: a batch ends before the next begins.
    """

    graphs: Literal["none", "router", "partial", "full"] = "none"
    fused: bool = False
    once: bool = False
    overlaps: bool = False
    overlaps_experts: bool = False
    overlaps_reduction: bool = False
    gathers: bool = False
    balanced: bool = False
    gradient_bytes: int = 4
    logprobs_at_once: int = 1
    batches_at_once: int = 0


_BY_COLUMNS = ("attention_output", "down", "linear_output")


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A weight with adapters beside it, as Megatron holds it. role: see families/table.py. inputs, outputs: over all
    ranks. matrices: how many of its matrices have an adapter. layers: that have this weight."""

    role: str
    inputs: int
    outputs: int
    matrices: int
    layers: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every tensor-parallel rank holds all of it."""
        return self.role in ("q_down", "kv_down")

    @property
    def by_rows(self) -> bool:
        """Whether tensor parallelism splits its outputs. If neither this nor `whole` holds, it splits the inputs."""
        return not self.whole and self.role not in _BY_COLUMNS

    @property
    def of_hidden(self) -> bool:
        """Whether its input is the hidden state that enters attention or an MLP."""
        return self.role not in (*_BY_COLUMNS, "q_up", "kv_up")


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters; all other weights are frozen. rank: of the adapters. alone: servers get only the adapters."""

    rank: int
    weights: tuple[AdaptedWeight, ...]
    alone: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """One training batch. Lengths in tokens; response_Q are equally likely answer lengths, ascending.

    fp8: recipe of the trainers; None: no fp8. samples: of a batch. generated: answers requested, with oversampling.
    minibatches: of a batch. batches_ahead: how far generation is ahead of training; 0: the two alternate. extra_passes:
    forward passes beside training (old and reference log-probs, values). longest: prompt and answer. prompts_shared:
    answers of a group. servers_fp8, cache_fp8: whether servers hold weights, and keys and values, in fp8.
    server_fraction: share of a server's GPU for its weights and cache; None: all that is left. server_nodes: how many
    each server spans; None: any number. colocated: servers and ranks take turns on the GPUs. critic: shape of a second
    model that is trained on the same ranks. critic_offload: policy and critic take turns on the GPUs. recomputed:
    modules of a layer that the backward pass computes again (selective recomputation). epochs: how often each batch is
    trained on. practice: of the trainer. adapters: beside the policy's frozen weights.
    """

    shape: ModelShape
    dtype_bytes: int
    fp8: Fp8Recipe | None
    samples: int
    generated: int
    minibatches: int
    batches_ahead: int
    extra_passes: int
    mean_prompt: float
    longest: int
    response_Q: np.ndarray
    distributed_optimizer: bool
    chunk_tokens: int | None
    bucket_bytes: float
    prompts_shared: int
    servers_fp8: bool
    cache_fp8: bool
    server_fraction: float | None
    server_nodes: int | None
    colocated: bool
    critic: ModelShape | None = None
    critic_offload: bool = False
    recomputed: frozenset[str] = frozenset()
    epochs: int = 1
    practice: Practice = Practice()
    adapters: Adapters | None = None

    @property
    def smallest_minibatch(self) -> int:
        """Samples of the smallest mini-batch; mini-batches have whole groups and are as even as possible."""
        return self.samples // self.prompts_shared // self.minibatches * self.prompts_shared

    @property
    def mean_response(self) -> float:
        """Tokens of the mean answer."""
        return float(self.response_Q.mean())

    @property
    def lengths_Q(self) -> np.ndarray:
        """Lengths of prompt and answer together, float64 [Q]."""
        return self.mean_prompt + self.response_Q

    @property
    def tokens(self) -> float:
        """Tokens of a batch, prompts and answers."""
        return float(self.samples * self.lengths_Q.mean())


def quantiles(mean: float, spread: float, longest: int) -> np.ndarray:
    """Return NUM_QUANTILES equally likely lengths of a log-normal distribution cut at `longest`.

    Args:
        mean: of the lengths after the cut, tokens; below `longest`.
        spread: standard deviation of the logarithm; 0: all lengths are equal.
        longest: tokens.
    """
    points = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    shape_Q = np.exp(spread * np.array([NormalDist().inv_cdf(p) for p in points]))
    low, high = 0.0, float(longest)
    for _ in range(60):  # the scale that gives this mean after the cut
        scale = (low + high) / 2
        too_small = np.minimum(scale * shape_Q, longest).mean() < mean
        low, high = (scale, high) if too_small else (low, scale)
    return np.clip(high * shape_Q, 1, longest)


def recorded_quantiles(lengths: np.ndarray) -> np.ndarray:
    """Return NUM_QUANTILES equally likely lengths that represent those of a recorded run."""
    points = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.quantile(lengths.astype(np.float64), points)


def workload_of(
    config: Config,
    shape: ModelShape,
    *,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    spread: float = DEFAULT_SPREAD,
    response_Q: np.ndarray | None = None,
) -> Workload:
    """Return what a step of this configuration asks for.

    Args:
        config: resolved. shape: of its model.
        mean_response, mean_prompt: tokens; None: derived from the configured limits. spread: see `quantiles`.
        response_Q: recorded lengths instead of assumed ones.

    Raises:
        ConfigError: a mean is beyond its limit in the recipe.
    """
    rollout, actor, algorithm = config.rollout, config.actor, config.algorithm
    longest = rollout.max_response_tokens
    mean = DEFAULT_SHARE * longest if mean_response is None else mean_response
    if not 0 < mean < longest and response_Q is None:
        raise ConfigError(
            f"--mean-response: got {mean:g} tokens; allowed: above 0 and below rollout.max_response_tokens {longest}; "
            "fix: give the mean that you expect"
        )
    most = config.data.max_prompt_tokens
    if mean_prompt is not None and not 0 < mean_prompt <= most:
        raise ConfigError(
            f"--mean-prompt: got {mean_prompt:g} tokens; allowed: above 0 and at most data.max_prompt_tokens {most}; "
            "fix: give the mean that you expect"
        )
    prompt = min(most, 256) if mean_prompt is None else mean_prompt
    sglang, arguments = config.engine.sglang, config.engine.sglang.named_arguments
    fraction = arguments.get("mem_fraction_static", SHARED_FRACTION if config.engine.colocate else None)
    critic = critic_shape(config, shape)
    return Workload(
        shape=shape,
        dtype_bytes=4 if actor.dtype == "fp32" else 2,
        fp8=actor.fp8,
        samples=rollout.batch_rollouts,
        generated=rollout.prompts_requested * rollout.rollouts_per_prompt,
        minibatches=config.trainer.minibatches_per_batch,
        batches_ahead=rollout.batches_ahead,
        extra_passes=len(algorithm.passes(("values",) if critic else ())),
        critic=critic,
        critic_offload=critic is not None and algorithm.critic.offload,
        mean_prompt=float(prompt),
        longest=config.data.max_prompt_tokens + longest,
        response_Q=quantiles(mean, spread, longest) if response_Q is None else response_Q,
        distributed_optimizer=actor.optimizer.distributed,
        chunk_tokens=actor.logprob_chunk_tokens,
        bucket_bytes=(sglang.bucket_mib or GPU_BUCKET_MIB) * 2**20,
        prompts_shared=rollout.rollouts_per_prompt,
        servers_fp8=sglang.fp8_blocks or arguments.get("quantization") == "fp8",
        cache_fp8=str(arguments.get("kv_cache_dtype", "")).startswith("fp8"),
        server_fraction=None if fraction is None else float(fraction),
        server_nodes=sglang.nodes if sglang.nodes > 1 else None,
        colocated=config.engine.colocate,
        recomputed=_recomputed(actor.megatron),
        epochs=config.trainer.epochs_per_batch,
        practice=_practice(actor, shape),
        adapters=adapters_of(config, shape),
    )


def adapters_of(config: Config, shape: ModelShape) -> Adapters | None:
    """Return the adapters that are trained (section lora), with SGLang servers; None: all weights are trained."""
    if not config.lora.rank:
        return None
    served = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "sglang"})})
    alone = with_adapter_sync(served, shape).engine.sglang.transport.adapters
    return Adapters(config.lora.rank, adapted_weights(config.lora, shape), alone)


def adapted_weights(section: LoraSection, shape: ModelShape) -> tuple[AdaptedWeight, ...]:
    """Return the weights that get adapters; experts get none."""
    targets, weights = section.target_names(shape), list[AdaptedWeight]()
    for role, matrices in sides_of_roles(shape).items():
        outputs, inputs = zip(*matrices.values(), strict=True)
        if chosen := len(targets.intersection(map(matrix_of, matrices))):
            weights.append(AdaptedWeight(role, inputs[0], sum(outputs), chosen, layers_of_role(role, shape)))
    return tuple(weights)


def _recomputed(options: Mapping[str, object]) -> frozenset[str]:
    """Return the modules that Megatron recomputes with these options; its default is the core of the attention."""
    modules = options.get("recompute_modules")
    if options.get("recompute_granularity") != "selective":
        return frozenset()
    return frozenset(map(str, modules)) if isinstance(modules, (list, tuple)) else frozenset({"core_attn"})


def _practice(actor: ActorSection, shape: ModelShape) -> Practice:
    """Return the practice of a trainer with these Megatron options. Flex dispatchers send a token once to each node."""
    on_transformer_engine = actor.precision != "fp32" and not shape.local_layers
    chosen = gpu_defaults(actor, experts=shape.experts is not None, transformer_engine=on_transformer_engine)
    options: Mapping[str, object] = {"overlap_grad_reduce": True, **actor.megatron, **chosen}
    return Practice(
        fused=bool(options.get("moe_permute_fusion") and options.get("moe_router_fusion")),
        once=options.get("moe_token_dispatcher_type") == "flex",
        overlaps_reduction=bool(options.get("overlap_grad_reduce")),
    )


def least_budget(workload: Workload, multiple: int) -> int:
    """Return the smallest token budget of a micro-batch that holds the longest sample."""
    return math.ceil(workload.longest / multiple) * multiple
