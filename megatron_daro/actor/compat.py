"""Gaps between this package and Megatron-core 0.16.1 to 0.19.x, closed in one place.

Each entry names the upstream version, the reason, and when it can go. Upstream's modules are not changed, except for
one flag; entries here subclass or wrap what upstream offers.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from megatron_daro.actor.megatron import (
    ColumnParallelLinear,
    GPTModel,
    MegatronOptimizer,
    P2PCommunicator,
    ProcessGroupCollection,
    RotaryEmbedding,
    RowParallelLinear,
    SelfAttention,
    TopKRouter,
    TransformerConfig,
    YarnRotaryEmbedding,
    finalize_model_grads,
    get_schedule_table,
    multi_latent_attention,
    parallel_state,
    param_group_identifier_keys,
)
from megatron_daro.config.megatron_options import SECTION
from megatron_daro.errors import ConfigError

# What tells the parameter groups of one model apart, whatever the options of a run.
_GROUP_STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence upstream's warnings, and its log lines below ERROR.

    Upstream: 0.16.1 to 0.19.2. Reason: it announces its own deprecations (GPTModel, parameter layouts, checkpoints) on
    every rank, to people who cannot act on them. Can go: when it does not.
    """
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class HiddenStateGPTModel(GPTModel):
    """GPTModel whose last stage returns hidden states [T, 1, D] after the final norm, not logits.

    Upstream: 0.16.1 to 0.19.2. Reason: the log-probabilities are computed in chunks together with the output layer
    (actor/logprobs.py); upstream's forward would hold the logits of the whole micro-batch. Can go: when upstream lets
    the caller skip the output layer.
    """

    def _postprocess(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer, [Vp, D]; the embedding's when they are tied. Last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(HiddenStateGPTModel):
    """The same with one number for each token; its output layer is whole on every tensor-parallel rank.

    Upstream: 0.16.1 to 0.19.2. Reason: GPTModel's output layer is cut over the tensor-parallel ranks, which one row
    cannot be. The head keeps the name `output_layer`, because upstream's `sharded_state_dict` asks for it. Can go: when
    upstream has a model with a scalar head.
    """

    def __init__(self, config: TransformerConfig, *arguments: object, **options: object) -> None:
        super().__init__(config, *arguments, **{**options, "share_embeddings_and_output_weights": False})
        if self.post_process:
            head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            # Every tensor-parallel rank sees all tokens and has the whole gradient. It must not be summed over the
            # ranks, as that of a parameter with `sequence_parallel` is.
            self.output_layer = head


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Multi-head latent attention whose projections to the latents are whole on every tensor-parallel rank.

    Upstream: 0.16.1 to 0.19.2. Reason: Transformer Engine's are whole, but those of local layers are cut and their
    outputs gathered; the rotary key, which the heads of all ranks share, then misses the gradients of other ranks'
    heads (`gather_from_tensor_model_parallel_region` sums none). Can go: when local layers have a whole linear layer.

    Upstream: 0.16.1. Reason: it believes that Transformer Engine is installed where it is not, and takes a mock for one
    of its classes. Can go: with 0.16.

    Upstream: 0.19. Reason: where queries have no latent, it puts a norm before their projection, since there is one
    for keys and values (transformer/mla_qk_norm_config.py, `_resolve_mla_qk_layernorm`). Can go: when it does not.
    """

    def __init__(self, config: TransformerConfig, *arguments: object, **options: object) -> None:
        multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
        super().__init__(config, *arguments, **options)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            cut = getattr(self, name, None)
            if isinstance(cut, ColumnParallelLinear):
                setattr(self, name, _WholeLinear(config, cut.input_size, cut.output_size))
        if "linear_q_up_proj" in self._modules:  # so down-projections are exported in a row (`Family.loaded_together`)
            self._modules["linear_q_up_proj"] = self._modules.pop("linear_q_up_proj")

    def _resolve_qk_norm_config(self, submodules: object) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by a gate, even with more tensor-parallel ranks than key-value heads.

    Upstream: 0.16.1. Reason: a rank then selects its own query heads from their group, but keeps the gates of the whole
    group (transformer/attention.py, `get_query_key_value_tensors`). Can go: with 0.16.
    """

    def get_query_key_value_tensors(self, *arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        query, key, value, gate = super().get_query_key_value_tensors(*arguments, **options)
        heads, sharing = query.shape[2], gate.shape[2] // query.shape[2]
        first = parallel_state.get_tensor_model_parallel_rank() % sharing * heads
        return query, key, value, gate[:, :, first : first + heads]


class _WholeLinear(torch.nn.Linear):
    """A linear layer without bias, whole on each tensor-parallel rank; under sequence parallelism a rank applies it to
    its own tokens."""

    def __init__(self, config: TransformerConfig, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # as upstream's layers
        return super().forward(x), None


@contextmanager
def gradient_fusion_of_layers(config: TransformerConfig) -> Iterator[Callable[[torch.nn.Module], None]]:
    """Build a model in which Transformer Engine's layers add their weight gradients to the fp32 ones in the matrix
    product's own kernel, and the output layer does not.

    Upstream: 0.16.1 to 0.19.2. Reason: `gradient_accumulation_fusion` is one option for all layers, and the output
    layer, which is upstream's own, then demands a kernel of Apex. Its forward never runs here: its gradient comes from
    the chunked log-probabilities. Can go: when the output layer asks for the kernel only where it would use it.

    Yields:
        What to call with the built model.
    """
    wanted, config.gradient_accumulation_fusion = config.gradient_accumulation_fusion, False

    def fuse(model: torch.nn.Module) -> None:
        for module in model.modules() if wanted else ():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]

    try:
        yield fuse
    finally:
        config.gradient_accumulation_fusion = wanted


@contextmanager
def frozen_expert_biases(config: TransformerConfig, *, wanted: bool) -> Iterator[Callable[[torch.nn.Module], None]]:
    """Build a model whose routers choose experts by scores plus a bias, which stays what the checkpoint says.

    Upstream: 0.16.1 to 0.19.2. Reason: `moe_router_enable_expert_bias` has the bias moved after each step by a fixed
    rate towards experts that saw few tokens (distributed/finalize_model_grads.py), and counts tokens for that in each
    forward pass. The bias is a buffer, so code that iterates over parameters (loading, export, host memory, the
    reference) would miss it. Here it is an fp32 parameter without a gradient. Can go: when upstream can leave it as it
    is.

    Yields:
        What to call with the built model, in its final dtype.
    """
    config.moe_router_enable_expert_bias = wanted

    def freeze(model: torch.nn.Module) -> None:
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            if router.enable_expert_bias:
                bias = router.expert_bias.float()
                del router.expert_bias
                router.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
                router.enable_expert_bias = False

    try:
        yield freeze
    finally:
        config.moe_router_enable_expert_bias = False


def allow_biases_of_experts(model: torch.nn.Module) -> None:
    """Let experts that are whole on a rank have biases.

    Upstream: 0.16.1 to 0.19.2. Reason: the bias is added in place to the output of an expert's last layer
    (transformer/mlp.py). Without expert or tensor parallelism that output is a view from a reduction over one rank
    (tensor_parallel/layers.py), and autograd refuses to add to it. With either, the output is used as it is. Can go:
    when it always is.
    """
    for layer in (module for module in model.modules() if isinstance(module, RowParallelLinear)):
        layer.explicit_expert_comm = layer.explicit_expert_comm or layer.is_expert


def bound_rotary_tables(rotary: RotaryEmbedding) -> None:
    """Let packs of all lengths share a few tables of rotary angles, by rounding up the length of a table.

    Upstream: 0.16.1 to 0.19.2. Reason: it keeps the last 32 tables of all models, one for each length of a pack's
    longest sequence (0.3 GB of a GPU at 40k tokens), and computes a new one for most packs. A table as long as its pack
    would be read as one row for each token of the pack, so the lengths are odd. Can go: when upstream keeps a single
    table.
    """
    exact = rotary.get_rotary_seq_len

    def rounded(*args: object, **kwargs: object) -> int:
        longest: int = exact(*args, **kwargs)  # type: ignore[arg-type]
        return (1 << max(longest - 1, 1023).bit_length()) + 1

    rotary.get_rotary_seq_len = rounded  # type: ignore[method-assign]


def share_rotary_tables(model: GPTModel) -> None:
    """Let all layers of latent attention have one rotary embedding, and so one table of angles for a pack.

    Upstream: 0.16.1 to 0.19.2. Reason: each layer has its own, and they share a cache of 32 tables: with more layers
    than that, each layer computes a table for every pack. Tables are as long as the longest sequence of a pack: a
    longer table would be cut to the length of the pack, and then read as one row for each of its tokens. Can go: when
    the model has one embedding.
    """
    attentions = [layer.self_attention for layer in model.decoder.layers]
    for attention in attentions:
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb


def forget_rotary_tables() -> None:
    """Drop the cached tables of rotary angles, and with them the models that they belong to.

    Upstream: 0.16.1 to 0.19.2. Reason: `forward` is an `lru_cache` over the module itself
    (models/common/embeddings/rotary_pos_embedding.py and yarn_rotary_pos_embedding.py), so a model that is gone
    otherwise keeps its tables, and its context-parallel group with that group's sockets and threads. Can go: when
    upstream's cache belongs to the module.
    """
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()  # type: ignore[attr-defined]


def finalize_summed_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: object
) -> None:
    """Reduce gradients over DP and CP, those of norms over TP, and those of tied embeddings, without any division.

    Upstream: 0.16.1 to 0.19.2. Reason: the distributed loss already carries its global denominator in every
    coefficient, so gradients must be plain sums. With `calculate_per_token_loss` the data-parallel reduction multiplies
    by 1 and the schedule divides nothing for a 3-tuple; what is left is the division by `num_tokens` in
    finalize_model_grads, which None switches off. Can go: when upstream has a "sum" normalisation.
    """
    finalize_model_grads(model, None, **kwargs)


class PipelineMessages(P2PCommunicator):
    """Messages between stages whose shapes are known beforehand: every stage has the micro-batches of a step.

    Upstream: 0.16.1 to 0.19.2. Reason: with `variable_seq_lengths` two stages tell each other the shape before each
    message, which costs a round trip, a device-wide synchronization and a copy to the host each time. Can go: when the
    schedules take the lengths of the micro-batches.
    """

    def __init__(self, config: TransformerConfig, lengths: Sequence[int], chunks: int) -> None:
        """Args: lengths: tokens of each micro-batch on this rank. chunks: parts of the model on this rank."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._hidden = config.hidden_size
        table = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage or len(lengths))
        # The first part of the model receives no activations, the last no gradients. Backward runs the parts in
        # reverse, so in both directions it is the table's part 0 that receives none; micro-batches come in the table's
        # order both times.
        rows = [lengths[i] // shards for i, _ in table]
        others = [lengths[i] // shards for i, part in table if part > 0]
        self._activations = iter(others if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else rows)
        self._gradients = iter(others if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else rows)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        before = [next(self._activations), 1, self._hidden] if recv_prev else [0, 0, 0]
        after = [next(self._gradients), 1, self._hidden] if recv_next else [0, 0, 0]
        return before, after

    def check_received(self, *, forward_only: bool) -> None:
        """Raise RuntimeError if fewer messages came than expected: then they were received with wrong shapes."""
        left = len(list(self._activations)) + (0 if forward_only else len(list(self._gradients)))
        if left:
            raise RuntimeError(
                f"{left} messages between pipeline stages were not received; the schedule is another one"
            )


def schedule_groups() -> ProcessGroupCollection:
    """Return the groups that upstream's schedules need beside a communicator: the ones that they choose by default.

    Upstream: 0.16.1 (`forward_backward_pipelining_without_interleaving`) and 0.19.2 (`_build_default_pg_collection`).
    Reason: they take both or neither. Can go: when a communicator alone is enough.
    """
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.dp = parallel_state.get_data_parallel_group(with_context_parallel=False, partial_data_parallel=False)
    return groups


def order_by_dtype(optimizer: MegatronOptimizer) -> None:
    """Let a distributed optimizer find the right state for each parameter when some of a bf16 model's are fp32.

    Upstream: 0.16.1 to 0.19.2. Reason: it notes the place of each parameter within its group, and then moves those in
    fp32 before the others (optimizer/distrib_optimizer.py, `_build_model_and_main_param_groups`): the state of another
    parameter would be saved. Can go: when it notes the places after the move.
    """
    for part in optimizer_parts(optimizer):
        if hasattr(part, "model_param_group_index_map") and getattr(part, "optimizer", None) is not None:
            groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
            for group, (fp32, others) in enumerate(groups):
                for place, parameter in enumerate([*fp32, *others]):
                    part.model_param_group_index_map[parameter] = group, place


def allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam moments (and torch's step counts) of 0 for each optimizer that has no state yet.

    Upstream: 0.16.1 to 0.19.2. Reason: DistributedOptimizer.state_dict reads the step count from the states of torch's
    Adam and fails when there are none, and it is called to load a checkpoint as well; Transformer Engine's FusedAdam is
    saved without moments before its first update, and then asked for them when that checkpoint is loaded.
    Can go: when upstream accepts an optimizer that has not stepped.
    """
    for inner in inner_optimizers(optimizer):
        if inner.state:
            continue
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
            step = {"step": torch.zeros(())} if isinstance(inner, torch.optim.Adam) else {}
            inner.state[parameter] = {**step, **moments}


def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any], fill: Callable[[], None]) -> None:
    """Call `optimizer.load_state_dict(state)` and then `fill()`; works with torch's Adam as the inner optimizer too.

    Upstream: 0.16.1 to 0.19.2. Reason: the fully reshardable format leaves the step counts out, but the loader asks for
    one with every parameter; and it then gives all parameters one shared step tensor, which Adam would increment once
    for each of them. Can go: when a torch optimizer survives upstream's own round trip.
    Upstream: 0.19. Reason: a saved parameter group is matched by its learning rates and weight decays too, so a run
    with other values finds none. Can go: when groups are matched by structure alone.
    """
    for group in _param_groups(state):
        _identify(group, optimizer.param_groups)
    for part in optimizer_parts(optimizer):
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            part._set_main_param_and_optimizer_states = partial(_set_all_but_step, part)
    optimizer.load_state_dict(state)
    fill()
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.Adam):  # or AdamW, which is one
            for values in inner.state.values():
                values["step"] = values["step"].clone()


def _param_groups(state: object) -> Iterator[dict[str, Any]]:
    """Yield the saved parameter groups of an optimizer and of those chained in it."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == "param_groups":
            yield from value
        else:
            yield from _param_groups(value)


def _identify(saved: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Give a saved group the values that upstream matches it by, from this run's group of the same structure."""
    own = next((g for g in groups if all(g.get(key) == saved.get(key) for key in _GROUP_STRUCTURE)), None)
    if own is None:
        return
    for name in set(param_group_identifier_keys) - set(_GROUP_STRUCTURE):
        saved.pop(name, None)
        if name in own:
            saved[name] = own[name]


def _set_all_but_step(part: MegatronOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Do what upstream's method of this name does, leaving the step count as it is."""
    group, order = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][order]
    step = {name: value for name, value in part.optimizer.state[main].items() if name == "step"}
    type(part)._set_main_param_and_optimizer_states(part, parameter, {**step, **tensors})


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that are chained in one: with expert parallelism experts have their own."""
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Return what each part of a Megatron optimizer wraps; a rank without parameters of a part has none there."""
    wrapped = (getattr(part, "optimizer", None) for part in optimizer_parts(optimizer))
    return [inner for inner in wrapped if inner is not None]


UpstreamT = TypeVar("UpstreamT")


def upstream_config(dataclass_: type[UpstreamT], values: Mapping[str, Any], options: Mapping[str, Any]) -> UpstreamT:
    """Build an upstream dataclass. Raises ConfigError: an option has the wrong type, or upstream refuses it."""
    types = get_type_hints(dataclass_)
    for name, value in options.items():
        try:
            # As JSON, a list is valid for a tuple and 1 for a float, but "1" is not a number.
            TypeAdapter(types[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"{SECTION}.{name}: got {value!r}; allowed: {types[name]} ({error.errors()[0]['msg']}); fix: correct it"
            ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dataclass_(**{**values, **options})
    except (AssertionError, ValueError, TypeError, ImportError, RuntimeError, AttributeError, KeyError) as error:
        if not options:
            raise
        raise ConfigError(
            f"{SECTION}: got {', '.join(options)}; Megatron-core refuses: {error or type(error).__name__}; allowed: "
            "options that fit each other and this run; fix: change or remove them"
        ) from error
