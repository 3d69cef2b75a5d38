"""Builds the Megatron model of a Hugging Face `config.json`, from the configuration to the data-parallel wrapper.

Rejects options that Megatron does not know (and suggests the nearest name) and those that this package sets itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron_daro.actor import device
from megatron_daro.actor.compat import (
    HiddenStateGPTModel,
    ValueModel,
    allow_biases_of_experts,
    bound_rotary_tables,
    finalize_summed_grads,
    frozen_expert_biases,
    gradient_fusion_of_layers,
    quiet,
    share_rotary_tables,
    upstream_config,
)
from megatron_daro.actor.layers import layer_spec, norm_outputs
from megatron_daro.actor.linear_attention import GatedDeltaNet
from megatron_daro.actor.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MLATransformerConfig,
    OptimizerConfig,
    RotaryEmbedding,
    TransformerConfig,
    parallel_state,
    quick_gelu,
)
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.megatron_options import SECTION, option_problems
from megatron_daro.config.model_shape import Llama3Scaling, ModelShape, YarnScaling
from megatron_daro.config.problems import config_error
from megatron_daro.convert.mapping import (
    TensorRule,
    global_name,
    hf_to_megatron,
    naming_of,
    output_rule,
    value_head_rule,
)
from megatron_daro.errors import ConfigError, ModelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UPSTREAM = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


def split_megatron_options(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort `actor.megatron` by the upstream dataclass that owns each name.

    Returns:
        {"transformer": {...}, "optimizer": {...}, "ddp": {...}}; a name that several of them own goes to each.

    Raises:
        ConfigError: lists unknown names, each with the nearest one, and names that another field sets or that are
            refused.
    """
    known = {part: frozenset(f.name for f in dataclasses.fields(cls)) for part, cls in _UPSTREAM.items()}
    problems = list(option_problems(options, frozenset().union(*known.values())))
    if problems:
        raise config_error(SECTION, problems)
    return {part: {n: v for n, v in options.items() if n in names} for part, names in known.items()}


def transformer_config(
    shape: ModelShape,
    layout: Layout,
    *,
    dtype: str = "fp32",
    sequence_parallel: bool = False,
    recompute: str = "none",
    fp8: Mapping[str, Any] | None = None,
    transformer_engine: bool = False,
    options: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's configuration of this shape on this layout.

    Args:
        fp8, options: TransformerConfig fields by name.

    Raises:
        ConfigError: upstream refuses the options; or they ask for `gradient_accumulation_fusion` without Transformer
            Engine's layers, or for `bias_activation_fusion` with clamped experts.
    """
    on_gpu = torch.cuda.is_available()
    values: dict[str, Any] = {
        **_shape_options(shape),
        "tensor_model_parallel_size": layout.tensor,
        **_pipeline_options(layout),
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        "sequence_parallel": sequence_parallel and layout.tensor > 1,
        "params_dtype": DTYPES[dtype],
        "pipeline_dtype": DTYPES[dtype],
        "bf16": dtype == "bf16",
        "use_cpu_initialization": not on_gpu,
        # Weights are loaded from files right after; drawing them would only cost time.
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "bias_activation_fusion": on_gpu,
        "apply_rope_fusion": transformer_engine,
        "gradient_accumulation_fusion": transformer_engine,
        **_FIXED_TRANSFORMER_OPTIONS,
        **_recompute_options(recompute),
        **(fp8 or {}),
        **_expert_options(shape, grouped=transformer_engine),
        **_attention_options(shape),
        **_latent_options(shape),
        **_linear_options(shape),
    }
    yarn = shape.rope_scaling if isinstance(shape.rope_scaling, YarnScaling) and not shape.latent else None
    if yarn:
        values["softmax_scale"] = yarn.attention_factor**2 / math.sqrt(shape.head_dim)
    config = upstream_config(MLATransformerConfig if shape.latent else TransformerConfig, values, options or {})
    if config.gradient_accumulation_fusion and not transformer_engine:
        raise ConfigError(
            "actor.megatron.gradient_accumulation_fusion: got true; allowed: only with Transformer Engine's layers; "
            "fix: remove it"
        )
    if config.bias_activation_fusion and shape.experts and shape.experts.limit:
        raise ConfigError(
            f"actor.megatron.bias_activation_fusion: got true with a model of type {shape.family}; allowed: false: "
            "Megatron-core clamps before it adds the bias then, and the model afterwards; fix: remove it"
        )
    if yarn:
        _set_yarn(config, yarn)
    config.finalize_model_grads_func = finalize_summed_grads
    return config


def _shape_options(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "layernorm_epsilon": shape.rms_eps,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "layernorm_zero_centered_gamma": shape.centered_norms,
        "attention_output_gate": shape.gated,
    }


def _attention_options(shape: ModelShape) -> dict[str, Any]:
    """Return options for sinks, windows, and biases of all layers; upstream's window counts tokens before the token
    itself."""
    return {
        "softmax_type": "learnable" if shape.sinks else "vanilla",
        "window_size": (shape.window - 1, 0) if shape.windowed else None,
        "window_attn_skip_freq": [int(i in shape.windowed) for i in range(shape.layers)] if shape.windowed else None,
        "add_bias_linear": shape.biases,
    }


def _linear_options(shape: ModelShape) -> dict[str, Any]:
    """Return options for linear attention; `experimental_attention_variant` is left out, which selects upstream's own
    layers."""
    linear = shape.linear
    if linear is None:
        return {}
    return {
        "linear_attention_freq": [int(layer in linear.layers) for layer in range(shape.layers)],
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key,
        "linear_value_head_dim": linear.value,
        "linear_conv_kernel_dim": linear.kernel,
    }


def _latent_options(shape: ModelShape) -> dict[str, Any]:
    """Return options for latent attention; its layers apply YaRN's two factors themselves, each of which upstream takes
    as a weight w: 1 + 0.1 * w * ln(factor). Fused rotary kernels have tables in the model's dtype and were never
    compared."""
    latent, scaling = shape.latent, shape.rope_scaling
    if latent is None:
        return {}
    options = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "qk_layernorm": True,
        "apply_rope_fusion": False,
        "rope_type": "rope",
        "rotary_base": shape.rope_theta,
    }
    if not isinstance(scaling, YarnScaling):
        return options
    weight = 0.1 * math.log(scaling.factor) if scaling.factor > 1 else math.inf
    return options | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": (scaling.attention_factor * scaling.score_factor - 1) / weight,
        "mscale_all_dim": (scaling.score_factor - 1) / weight,
    }


_FIXED_TRANSFORMER_OPTIONS = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "variable_seq_lengths": True,
    # Upstream insists on this name with variable lengths, even for dense models.
    "moe_token_dispatcher_type": "alltoall",
}


def _expert_options(shape: ModelShape, *, grouped: bool) -> dict[str, Any]:
    """Return options for routing as the checkpoint was trained: softmax in fp32 or fp64, over the chosen experts only
    if their weights sum to 1; or sigmoid, with a bias that `frozen_expert_biases` adds.

    No balancing loss and no capacity: either would send tokens to other experts than the rollout engine does.
    """
    if shape.experts is None:
        return {}
    limited = shape.experts.groups > 1
    return {
        "num_moe_experts": shape.experts.number,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)],
        "moe_ffn_hidden_size": shape.experts.ffn,
        "moe_router_topk": shape.experts.chosen,
        "moe_router_pre_softmax": not shape.experts.normalize,
        "moe_router_score_function": shape.experts.scores,
        "moe_router_num_groups": shape.experts.groups if limited else None,
        "moe_router_group_topk": shape.experts.chosen_groups if limited else None,
        "moe_router_topk_scaling_factor": None if shape.experts.scale == 1 else shape.experts.scale,
        "moe_shared_expert_intermediate_size": shape.experts.shared_ffn or None,
        "moe_shared_expert_gate": shape.experts.shared_gate,
        # fp64 keeps the router from Transformer Engine's product, which uses TF32 for fp32 weights. With the layers of
        # Transformer Engine weights are bf16, which TF32 represents exactly.
        "moe_router_dtype": "fp64" if not grouped and device.has_transformer_engine() else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        **(_CLAMPED | {"activation_func_clamp_value": shape.experts.limit} if shape.experts.limit else {}),
    }


_CLAMPED = {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "bias_activation_fusion": False}
"""quick_gelu is x * sigmoid(1.702 * x). Upstream's fused kernel clamps before it adds the bias, the model afterwards
(fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`, 0.16.1 to 0.19.2)."""


def _pipeline_options(layout: Layout) -> dict[str, Any]:
    """Return the pipeline's options; with virtual stages messages overlap computation, as Megatron-LM itself chooses.

    Without overlap, messages in both directions at once would arrive in the wrong order: with two stages, the stage
    before one is also the stage after it. `batch_p2p_sync`, a device-wide synchronization after each message, worked
    around a bug of torch that was fixed in 1.13 (pytorch/pytorch pull request 82450); upstream removed the other such
    workaround (Megatron-LM 6919).
    """
    # An output that was sent on is freed: only its place in the graph is needed until its gradient comes back.
    stages: dict[str, Any] = {
        "pipeline_model_parallel_size": layout.pipeline,
        "deallocate_pipeline_outputs": layout.pipeline > 1,
        "batch_p2p_sync": False,
    }
    if layout.virtual_pipeline == 1:
        return stages
    return stages | {
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _recompute_options(recompute: str) -> dict[str, Any]:
    if recompute == "none":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _set_yarn(config: TransformerConfig, scaling: YarnScaling) -> None:
    """Set YaRN's numbers where upstream reads them: in attributes of the configuration that are not fields of it.

    YaRN's attention factor multiplies queries and keys. Upstream's fused kernel for packed sequences leaves it out
    (models/common/embeddings/rope_utils.py, `apply_rotary_pos_emb`, 0.16.1 to 0.19.2), and its unfused path reads the
    sequences' bounds on the host in every layer. So the factor is 1 here, and `softmax_scale` has its square instead.
    """
    values = {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_positions,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_mscale": 0.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }
    for name, value in values.items():
        setattr(config, name, value)


Kind = type[HiddenStateGPTModel]
Chunks = Sequence[HiddenStateGPTModel]
"""The parts of the model that a rank holds, first to last: one, or as many as there are virtual pipeline stages."""


def build_model(
    shape: ModelShape, config: TransformerConfig, *, transformer_engine: bool = False, kind: Kind = HiddenStateGPTModel
) -> list[HiddenStateGPTModel]:
    """Return this rank's parts of the model, with uninitialised weights, on this process's device."""
    chunks = bare_model(shape, config, transformer_engine=transformer_engine, kind=kind)
    return [chunk.to(device.current()) for chunk in chunks]


def bare_model(
    shape: ModelShape, config: TransformerConfig, *, transformer_engine: bool = False, kind: Kind = HiddenStateGPTModel
) -> list[HiddenStateGPTModel]:
    """Return the parts on the default device, which may be "meta"."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    chunks = [_bare_chunk(shape, config, stage, kind, transformer_engine=transformer_engine) for stage in stages]
    _mark_parallel(chunks, shape)
    return chunks


def _bare_chunk(
    shape: ModelShape, config: TransformerConfig, virtual_stage: int | None, kind: Kind, *, transformer_engine: bool
) -> HiddenStateGPTModel:
    biased = shape.experts is not None and shape.experts.scores == "sigmoid"
    with quiet(), gradient_fusion_of_layers(config) as fuse, frozen_expert_biases(config, wanted=biased) as freeze:
        model = kind(
            config,
            layer_spec(
                config,
                transformer_engine=transformer_engine,
                virtual_stage=virtual_stage,
                post_norm=shape.post_norm,
                whole_qk_norm=shape.whole_qk_norm,
            ),
            vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
            vp_stage=virtual_stage,
            position_embedding_type="yarn"
            if isinstance(shape.rope_scaling, YarnScaling) and not shape.latent
            else "rope",
            rotary_percent=shape.rotary_share,
            rotary_base=shape.rope_theta,
            share_embeddings_and_output_weights=shape.tie,
            parallel_output=True,
        )
        fuse(model)
    if shape.post_norm:
        norm_outputs(model)
    if shape.plain_windows and shape.rope_scaling:
        _rotate_windows_plainly(model, shape)
    if shape.biases:
        allow_biases_of_experts(model)
    if isinstance(shape.rope_scaling, Llama3Scaling):
        _apply_llama3_scaling(model.rotary_pos_emb, shape.rope_scaling)
    if shape.latent:
        share_rotary_tables(model)
    else:
        bound_rotary_tables(model.rotary_pos_emb)
    if config.bf16:
        model = model.bfloat16()  # rotary frequencies are a plain attribute and stay fp32
        for layer in (module for module in model.modules() if isinstance(module, GatedDeltaNet)):
            layer.A_log.data = layer.A_log.data.float()
    freeze(model)
    return model


class Adapter(Protocol):
    """An adapter beside a frozen weight; see `actor.lora.Adapter`."""

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with what the adapter adds to it."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of this rank and its rule. peers: of an expert's parameter, the rules of the parameters in its place
    on all expert-parallel ranks, by rank; of any other, its own rule alone. adapter: the one beside it, if any."""

    parameter: torch.nn.Parameter
    rule: TensorRule
    peers: tuple[TensorRule, ...]
    adapter: Adapter | None = None

    @property
    def values(self) -> torch.Tensor:
        """What the model computes with: the parameter, or a new tensor with the adapter added to it."""
        values = self.parameter.detach()
        return values if self.adapter is None else self.adapter.merged(values)


def local_parameters(chunks: Chunks, shape: ModelShape) -> list[LocalParameter]:
    """Return this rank's parameters with their rules, in forward order, which is the same on all ranks of a stage.
    Parameters of adapters are left out (actor/lora.py).

    Raises:
        ModelError: no rule names a parameter.
    """
    fused_norms, grouped = naming_of([name for _, name, _, _ in _named_parameters(chunks)])
    rules = _rules(shape, fused_norms, grouped, any(isinstance(chunk, ValueModel) for chunk in chunks))
    ranks = parallel_state.get_expert_model_parallel_world_size()
    own = parallel_state.get_expert_model_parallel_rank()
    experts = shape.experts.number // ranks if shape.experts else 0
    parameters = []
    for first_layer, name, parameter, adapter in _named_parameters(chunks):
        of_ranks = [global_name(name, first_layer, rank * experts) for rank in range(ranks)]
        if of_ranks[own] not in rules:
            raise ModelError(f"parameter {of_ranks[own]} of the Megatron model has no Hugging Face counterpart")
        rule = rules[of_ranks[own]]
        peers = (rule,) if rule.expert is None else tuple(rules[other] for other in of_ranks)
        parameters.append(LocalParameter(parameter, rule, peers, adapter))
    return parameters


def _named_parameters(chunks: Chunks) -> Iterator[tuple[int, str, torch.nn.Parameter, Adapter | None]]:
    """Yield for each parameter: the number in the model of its part's first layer, its name within the part, the
    parameter, and the adapter beside it."""
    for chunk in chunks:
        layers = chunk.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in chunk.named_parameters():
            owner, _, last = name.rpartition(".")
            if not owner.endswith(".adapter"):
                adapter = getattr(chunk.get_submodule(owner), "adapter", None) if last == "weight" else None
                yield first_layer, name, parameter, adapter


@lru_cache(maxsize=4)
def _rules(shape: ModelShape, fused_norms: bool, grouped_experts: bool, says_values: bool) -> Mapping[str, TensorRule]:
    """Return the rules of the whole model by Megatron name, with one for the output layer, even if it is tied, or for
    the value head."""
    rules = hf_to_megatron(shape, fused_norms=fused_norms, grouped_experts=grouped_experts)
    return {
        rule.megatron_name: rule for rule in [*rules, value_head_rule(shape) if says_values else output_rule(shape)]
    }


def _mark_parallel(chunks: Chunks, shape: ModelShape) -> None:
    """Tell Megatron which parameters are shards, and which belong to experts.

    The gradient norm counts a parameter that is not a shard on one rank only. Upstream sets these marks while it draws
    initial weights, but `perform_initialization` is off. Experts count as shards even where they are whole, since no
    other rank of their group has the same ones; upstream would sum an expert's bias over tensor-parallel ranks. The
    gradients of experts are summed over the ranks with the same experts, and experts have an optimizer of their own.
    Upstream does both with EP > 1 only, but they are also needed with ETP other than TP, and for a checkpoint of one EP
    to load into another.
    """
    for local in local_parameters(chunks, shape):
        if local.rule.expert is not None:
            local.parameter.allreduce = False  # type: ignore[attr-defined]
            local.parameter.sequence_parallel = False  # type: ignore[attr-defined]
        is_shard = local.rule.is_cut or local.rule.expert is not None
        if is_shard and not hasattr(local.parameter, "tensor_model_parallel"):
            mark_shard(local.parameter, local.rule.dim)


def mark_shard(parameter: torch.nn.Parameter, dim: int) -> None:
    """Tell Megatron that tensor-parallel ranks have different parts of a parameter, along `dim`."""
    marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
    for name, value in marks.items():  # upstream's function refuses a parameter that has one of them already
        setattr(parameter, name, value)


def _rotate_windows_plainly(model: HiddenStateGPTModel, shape: ModelShape) -> None:
    """Give layers with a window unscaled rotary frequencies, and scores without YaRN's factor (`_set_yarn`)."""
    rotary = RotaryEmbedding(
        kv_channels=shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        use_cpu_initialization=model.config.use_cpu_initialization,
    )

    def plain(_: object, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, options | {"rotary_pos_emb": rotary(len(options["rotary_pos_emb"]), packed_seq=True)}

    for layer in model.decoder.layers:
        if layer.layer_number - 1 in shape.windowed:
            layer.self_attention.register_forward_pre_hook(plain, with_kwargs=True)
            layer.self_attention.core_attention.scale = 1 / math.sqrt(shape.head_dim)


def _apply_llama3_scaling(rotary: RotaryEmbedding, scaling: Llama3Scaling) -> None:
    """Apply Llama 3's frequency scaling with the file's own numbers (Megatron's defaults are those of Llama 3.1)."""
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_positions,
    )


def data_parallel_config(*, distributed_optimizer: bool, options: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Return Megatron's configuration of the data-parallel wrapper. Raises ConfigError: upstream refuses an option."""
    values = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": distributed_optimizer,
        "check_for_nan_in_grad": False,  # it would end the run; actor/step.py checks the global norm and skips the step
    }
    return upstream_config(DistributedDataParallelConfig, values, options)


def wrap_data_parallel(
    chunks: Chunks, config: TransformerConfig, *, distributed_optimizer: bool, options: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Wrap each part in Megatron's data-parallel wrapper; gradients are kept and reduced in fp32.

    With `overlap_grad_reduce` the schedule gets `no_sync_func` to hold the reduction back until the last micro-batch.
    Without it a bucket would be reduced once it was added to as often as in the first step: too early, or never, in a
    step with another number of micro-batches.
    """
    ddp_config = data_parallel_config(distributed_optimizer=distributed_optimizer, options=options)
    with quiet():
        # As in Megatron-LM: nothing overlaps the reduction of a later part, so it is one bucket.
        wrapped = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=place > 0)
            for place, chunk in enumerate(chunks)
        ]
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped
