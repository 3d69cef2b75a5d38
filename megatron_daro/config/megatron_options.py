"""`actor.megatron`: which options of Megatron-core may be given, which this package sets, which it cannot keep.

The checks before a start ask here, and so does actor/model.py before it hands the options on.
Upstream's names are read from its source files: importing Megatron-core takes seconds, and needs torch.
Refuses: names that upstream does not have, names that the model's config.json or another option sets, options that
would be ignored or would make another model, and names that a newer Megatron-core has and nobody here has looked at.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_daro.config.problems import Problem, check_passthrough, show

SECTION = "actor.megatron"

# Our name for each upstream dataclass -> the classes whose annotated names are its fields, with their files.
_SOURCES = {
    "transformer": (
        ("ModelParallelConfig", "model_parallel_config.py"),
        ("TransformerConfig", "transformer/transformer_config.py"),
    ),
    "optimizer": (("OptimizerConfig", "optimizer/optimizer_config.py"),),
    "ddp": (("DistributedDataParallelConfig", "distributed/distributed_data_parallel_config.py"),),
}

_MODEL = {
    **dict.fromkeys(("add_bias_linear", "apply_residual_connection_post_layernorm", "normalization"), "model_type"),
    **dict.fromkeys(("gated_linear_unit", "multi_latent_attention", "qk_layernorm", "qk_l2_norm"), "model_type"),
    **dict.fromkeys(("attention_output_gate", "softmax_type", "is_hybrid_model", "no_rope_freq"), "model_type"),
    **dict.fromkeys(("layernorm_zero_centered_gamma", "heterogeneous_block_specs"), "model_type"),
    **dict.fromkeys(("glu_linear_offset", "experimental_attention_variant", "moe_latent_size"), "model_type"),
    **dict.fromkeys(("rotary_interleaved", "mrope_section", "softmax_scale"), "model_type"),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"), "model_type"),
    **dict.fromkeys(("moe_router_score_function", "moe_router_topk_scaling_factor"), "model_type"),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), "model_type"),
    **dict.fromkeys(("activation_func", "activation_func_clamp_value"), "hidden_act"),
    **dict.fromkeys(("window_size", "window_attn_skip_freq"), "sliding_window and layer_types"),
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_layer_freq": "decoder_sparse_step and mlp_only_layers",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_pre_softmax": "norm_topk_prob",
}
# What the model is: upstream's name -> the key of config.json that says it.

OWNED = {
    **{name: f"{key} in the config.json of model.path" for name, key in _MODEL.items()},
    "tensor_model_parallel_size": "actor.tensor_parallel",
    "expert_model_parallel_size": "actor.expert_parallel",
    "expert_tensor_parallel_size": "actor.expert_tensor_parallel",
    "pipeline_model_parallel_size": "actor.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "actor.virtual_pipeline_parallel",
    "batch_p2p_comm": "actor.virtual_pipeline_parallel",
    "deallocate_pipeline_outputs": "actor.pipeline_parallel",
    "microbatch_group_size_per_vp_stage": "the schedule of each step, from its number of micro-batches",
    "context_parallel_size": "actor.context_parallel",
    "sequence_parallel": "actor.sequence_parallel",
    "params_dtype": "actor.precision",
    "pipeline_dtype": "actor.precision",
    "autocast_dtype": "actor.precision",
    "bf16": "actor.precision",
    "grad_reduce_in_fp32": "actor.precision, and is true with each: gradients are summed in fp32",
    "fp16": "actor.precision (fp32, bf16 or fp8)",
    "fp8": "actor.precision and actor.fp8_format",
    "fp8_recipe": "actor.fp8_recipe",
    "first_last_layers_bf16": "actor.num_layers_at_start_in_bf16 and actor.num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16": "actor.num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16": "actor.num_layers_at_end_in_bf16",
    "lr": "actor.optimizer.learning_rate",
    "min_lr": "actor.optimizer.min_learning_rate_ratio",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.betas",
    "adam_beta2": "actor.optimizer.betas",
    "adam_eps": "actor.optimizer.eps",
    "clip_grad": "actor.optimizer.grad_clip",
    "optimizer": "actor.optimizer, which is AdamW",
    "use_distributed_optimizer": "actor.optimizer.distributed",
    "check_for_nan_in_grad": "trainer.on_nonfinite",
    "check_for_large_grads": "trainer.on_nonfinite",
    "calculate_per_token_loss": "the distributed loss, which sums gradients",
    "average_in_collective": "the distributed loss, which sums gradients",
    "overlap_param_gather": "the way of weights to engines, which needs all of them at once after an update",
    "variable_seq_lengths": "the packed batches",
    "moe_router_dtype": "the routers, which compute in fp32 as those of the rollout engine",
    "transformer_impl": "the device: Transformer Engine's layers where it can run, else Megatron's own",
    "use_cpu_initialization": "the device",
}
"""Upstream's names that something else sets, and what."""

_PRECISION = "gradients then stand where neither clipping nor the check for numbers that are not finite looks"
_FP8_PARAMETERS = (
    "the fp32 weights of the optimizer would begin from what the layers held before the model's files were loaded, and "
    "checkpoints, reference and engines read weights in bf16"
)
_STAGES = "stages have as many layers as one another, but for those of the first and the last stage"
_GROUPS = "the process groups of the actor are made without it"
_BALANCING = "it is a product of means over a micro-batch: what is trained would depend on how a batch is cut"
_SUMS = "its gradient would be as many times too large as there are tokens: the gradients are plain sums"
_ROUTING = "tokens would meet other experts than the rollout engine chose for them"
_DROPOUT = "the log-probabilities would be those of another model than the one that the rollout engine samples from"
_COMPUTED_IN = "actor.precision says in what is computed"
_FP4 = "actor.precision has fp32, bf16 and fp8"
_ADAM = "checkpoints and the move of memory to the host read Adam's state where the device keeps it"
_OWN_LAYOUT = "weights would have a layout of their own, which is neither loaded nor sent to the rollout engine"
_SCHEDULE = "its schedule computes upstream's own loss within the forward pass"
_SHAPES = "a graph is recorded for one shape, and packed micro-batches differ in theirs"
_LAYERS = "Transformer Engine's layers have it where it works; false turns it off"

REFUSED = {
    "hidden_dropout": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "fp32_residual_connection": _COMPUTED_IN,
    "enable_autocast": _COMPUTED_IN,
    "fp8_dot_product_attention": _COMPUTED_IN,
    "fp8_multi_head_attention": _COMPUTED_IN,
    "fp8_output_proj": _COMPUTED_IN,
    "use_precision_aware_optimizer": _PRECISION,
    "main_grads_dtype": _PRECISION,
    "main_params_dtype": _PRECISION,
    "exp_avg_dtype": _PRECISION,
    "exp_avg_sq_dtype": _PRECISION,
    "param_name_patterns_for_fp32_local_accumulation": _PRECISION,
    "optimizer_cpu_offload": _ADAM,
    "optimizer_cuda_graph": _ADAM,
    "use_layer_wise_distributed_optimizer": _ADAM,
    "loss_scale": "gradients would be divided by it, and the loss is not multiplied by it",
    "fp8_param": _FP8_PARAMETERS,
    "fp8_param_gather": _FP8_PARAMETERS,
    "reuse_grad_buf_for_mxfp8_param_ag": _FP8_PARAMETERS,
    "fp8_quantizer_factory": "actor.fp8_recipe names the recipes that can be checked before a start",
    "quant_recipe": "actor.fp8_recipe names the recipes that can be checked before a start",
    **dict.fromkeys(("fp4", "fp4_recipe", "fp4_param", "fp4_param_gather", "fp4_quantizer_factory"), _FP4),
    "pipeline_model_parallel_layout": _STAGES,
    "overlap_p2p_comm": "actor.virtual_pipeline_parallel turns it on, and without that it has no effect",
    "use_ring_exchange_p2p": "torch.distributed as it is published has no ring exchange",
    "num_microbatches_with_partial_activation_checkpoints": "actor.recompute is the same for all micro-batches",
    "overlap_moe_expert_parallel_comm": _SCHEDULE,
    "delay_wgrad_compute": _SCHEDULE,
    "ep_overlap_early_attn_memory_release": _SCHEDULE,
    "overlap_dispatch_backward_with_experts_wgrad": _SCHEDULE,
    "high_priority_a2a_comm_stream": _SCHEDULE,
    "overlap_param_gather_with_optimizer_step": "parameters are gathered before the forward pass, not within it",
    "defer_embedding_wgrad_compute": "the chunked output layer computes the gradient of its own weight",
    "num_distributed_optimizer_instances": _GROUPS,
    "pipeline_model_parallel_comm_backend": _GROUPS,
    "hierarchical_context_parallel_sizes": _GROUPS,
    "hybrid_context_parallel": _GROUPS,
    "max_seqlen_per_dp_cp_rank": _GROUPS,
    "tensor_parallel_num_weight_shards": _GROUPS,
    "expert_tensor_parallel_num_weight_shards": _GROUPS,
    "gtp_weight_remat_size": _GROUPS,
    "expert_gtp_weight_remat_size": _GROUPS,
    "use_megatron_fsdp": "the gradients are reduced by Megatron's DistributedDataParallel",
    "use_custom_fsdp": "the gradients are reduced by Megatron's DistributedDataParallel",
    "grad_norm_skip_threshold": "only trainer.on_nonfinite decides which steps are skipped",
    "apply_rope_fusion": _LAYERS,
    "moe_grouped_gemm": _LAYERS,
    "use_te_activation_func": "the gated activation of the layers is Megatron-core's own",
    "test_mode": "its checks read biases that the norms do not have",
    "fused_single_qkv_rope": "it takes no packed sequences",
    "enable_cuda_graph": _SHAPES,
    "external_cuda_graph": _SHAPES,
    "delay_offload_until_cuda_graph": _SHAPES,
    "hetereogenous_dist_checkpoint": "checkpoints name the layers of all models alike",
    "moe_aux_loss_coeff": _BALANCING,
    "moe_z_loss_coeff": _SUMS,
    "moe_enable_routing_replay": "actor.routing_replay puts its own into the routers",
    "moe_router_load_balancing_type": _ROUTING,
    "moe_router_enable_expert_bias": _ROUTING,
    "moe_router_force_load_balancing": _ROUTING,
    "moe_router_force_biased": _ROUTING,
    "moe_router_topk_limited_devices": _ROUTING,
    "moe_input_jitter_eps": _ROUTING,
    "moe_expert_capacity_factor": _ROUTING,
    "moe_expert_rank_capacity_factor": _ROUTING,
    "moe_apply_probs_on_input": "experts would be given other inputs than those that they were trained with",
    "moe_use_legacy_grouped_gemm": "its weights have a layout of their own; grouped experts need Transformer Engine",
    **dict.fromkeys(
        ("moe_single_grouped_weight", "moe_single_grouped_bias", "moe_mlp_glu_interleave_size"), _OWN_LAYOUT
    ),
    **dict.fromkeys(("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"), _OWN_LAYOUT),
    **dict.fromkeys(("moe_shared_expert_glu_interleave_size", "use_transformer_engine_op_fuser"), _OWN_LAYOUT),
    "mtp_num_layers": "layers that predict several tokens are not built",
    "use_mup": "the log-probabilities are taken without its scale of the logits",
    "attention_backend": "it is no name but an enum; NVTE_FLASH_ATTN and NVTE_FUSED_ATTN in the environment choose",
}
"""Upstream's options that would be ignored, or make wrong numbers, and why; null and false are no harm."""

_FUNCTION = "it is a Python object, which a file cannot hold"
_ATTENTION = "neither Transformer Engine's attention nor the one for CPUs reads it"
_NORMS = "neither Transformer Engine's norms nor the one for CPUs read it"
_INITIAL = "weights are read from files, not drawn"
_DELAYED = "only the delayed fp8 recipe reads it, which actor.fp8_recipe does not have"
_FSDP = "only Megatron's FSDP reads it"
_NO_SHARED_EXPERTS = "no model family here has shared experts"
_CAPACITY = "it belongs to a capacity of experts, and there is none"
_FP16 = "only fp16 reads it"

WITHOUT_EFFECT = {
    **dict.fromkeys(("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func"), _FUNCTION),
    **dict.fromkeys(("grad_sync_func", "param_sync_func", "init_method", "output_layer_init_method"), _FUNCTION),
    **dict.fromkeys(("embedding_init_method", "_cpu_offloading_context", "moe_grad_scale_func"), _FUNCTION),
    **dict.fromkeys(("mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func"), _FUNCTION),
    **dict.fromkeys(("attention_softmax_in_fp32", "apply_query_key_layer_scaling"), _ATTENTION),
    "masked_softmax_fusion": _ATTENTION,
    **dict.fromkeys(("persist_layer_norm", "memory_efficient_layer_norm"), _NORMS),
    **dict.fromkeys(("perform_initialization", "init_method_std", "embedding_init_method_std"), _INITIAL),
    **dict.fromkeys(("fp8_margin", "fp8_interval", "fp8_amax_history_len"), _DELAYED),
    **dict.fromkeys(("fp8_amax_compute_algo", "fp8_wgrad", "tp_only_amax_red"), _DELAYED),
    **dict.fromkeys(("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"), _FSDP),
    **dict.fromkeys(("gradient_reduce_div_fusion", "suggested_communication_unit_size"), _FSDP),
    **dict.fromkeys(("preserve_fp32_weights", "keep_fp8_transpose_cache", "init_model_with_meta_device"), _FSDP),
    **dict.fromkeys(
        ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), "log-probabilities are taken in chunks"
    ),
    **dict.fromkeys(("async_tensor_model_parallel_allreduce", "moe_extended_tp"), "nothing reads it"),
    **dict.fromkeys(("moe_token_dropping", "moe_per_layer_logging"), "nothing reads it"),
    **dict.fromkeys(("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"), _CAPACITY),
    **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _FP16),
    **dict.fromkeys(("optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload"), _ADAM),
    **dict.fromkeys(("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"), _ADAM),
    **dict.fromkeys(("qk_clip", "qk_clip_alpha", "qk_clip_threshold"), "it belongs to Muon; the optimizer is AdamW"),
    "log_max_attention_logit": "nobody asks for what it collects",
    "log_num_zeros_in_grad": "nobody asks for what it counts",
    "barrier_with_L1_time": "nothing is timed in upstream's way",
    "use_te_rng_tracker": "nothing random happens in the layers",
    "use_fused_weighted_squared_relu": "no model family here has squared ReLU",
    "moe_shared_expert_overlap": _NO_SHARED_EXPERTS,
    "moe_router_bias_update_rate": "the routers have no expert bias",
    "moe_router_quantile_balancing_ema": "the routers have no expert bias",
    "wgrad_deferral_limit": "it belongs to defer_embedding_wgrad_compute",
    "align_param_gather": "it belongs to overlap_param_gather",
    "store_param_remainders": "it belongs to use_precision_aware_optimizer",
    "sgd_momentum": "the optimizer is AdamW",
    "flash_decode": "only upstream's own generation reads it",
    "batch_invariant_mode": "only upstream's own generation is made for it",
    "flash_attention_version": "it belongs to batch_invariant_mode",
    "use_inference_optimized_layers": "only upstream's own generation reads it",
    "mlp_chunks_for_prefill": "only upstream's own generation reads it",
    "nccl_all_reduce_for_prefill": "only upstream's own generation reads it",
    "moe_pad_experts_for_cuda_graph_inference": "only upstream's own generation reads it",
    "use_mamba_mem_eff_path": "no model family here has Mamba layers",
    "mtp_standalone": "layers that predict several tokens are not built",
    "megatron_fsdp_cuda_graph_mode": _FSDP,
}
"""Upstream's options that change nothing here, and why."""

_FAMILIES = {
    "mamba_": "no model family here has Mamba layers",
    "dsa_": "no model family here has sparse attention with an indexer",
    "linear_": "no model family here has linear attention",
    "mtp_": "layers that predict several tokens are not built",
    "mup_": "it belongs to use_mup",
    "muon_": "the optimizer is AdamW",
    "adaptive_muon_": "the optimizer is AdamW",
    "soap_": "the optimizer is AdamW",
    "lion_": "the optimizer is AdamW",
    "fsdp_": _FSDP,
    "megatron_fsdp_": _FSDP,
    "inference_": "only upstream's own generation reads it",
    "tp_comm_": "nobody sets up the user buffers of Transformer Engine that it needs",
    "cuda_graph_": _SHAPES,
    "use_kitchen": "layers of the package nvidia_kitchen are not built",
    "kitchen_": "layers of the package nvidia_kitchen are not built",
}
"""Beginnings of upstream's names, all of which are refused, and why."""

_ALLOWED = """
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage batch_p2p_sync overlap_p2p_comm_warmup_flush
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
fine_grained_activation_offloading offload_modules min_offloaded_tensor_size activation_offload_fraction
delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads
activation_func_fp8_input_store disable_parameter_transpose_cache clone_scatter_output_in_embedding
mlp_chunks_for_training moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
moe_paged_stash_buffer_size_factor_cpu
bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion
fused_residual_rmsnorm
deterministic_mode disable_bf16_reduced_precision_matmul config_logger_dir
cp_comm_type symmetric_ar_type
moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
moe_ncclep_zero_copy moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_fusion moe_layer_recompute
moe_router_padding_for_quantization moe_router_padding_for_fp8
decoupled_lr decoupled_min_lr decoupled_weight_decay apply_wd_to_qk_layernorm
overlap_grad_reduce bucket_size num_buckets pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
nccl_ub disable_symmetric_registration
"""
ALLOWED = frozenset(_ALLOWED.split())
"""Upstream's options of speed, memory and the optimizer: the log-probabilities stay the same but for rounding."""


_TRANSFORMER_ENGINE_ONLY = """
cpu_offloading fine_grained_activation_offloading gradient_accumulation_fusion moe_permute_fusion moe_router_fusion
nccl_ub symmetric_ar_type
"""
TRANSFORMER_ENGINE_ONLY = frozenset(_TRANSFORMER_ENGINE_ONLY.split())
"""Allowed options that only Transformer Engine's layers, or NCCL, can honour."""


def upstream_names() -> dict[str, frozenset[str]]:
    """Field names of the installed Megatron-core by dataclass; empty where it is not installed or laid out otherwise.

    Returns:
        {"transformer": names, "optimizer": names, "ddp": names}.
    """
    root = _installed()
    if root is None:
        return {}
    names = {part: _annotated(root, sources) for part, sources in _SOURCES.items()}
    return names if all(names.values()) else {}


def option_problems(options: Mapping[str, Any], known: Mapping[str, frozenset[str]]) -> Iterator[Problem]:
    """Return what is wrong with `actor.megatron`.

    Args:
        options: as the user gave them.
        known: what `upstream_names` gives; unknown names are not looked for where it is empty.
    """
    installed: frozenset[str] = frozenset().union(*known.values())
    unknown = {}
    for name, value in options.items():
        field = f"{SECTION}.{name}"
        if name in OWNED:
            elsewhere = f", or set model.path to a model with such a {_MODEL[name]}" if name in _MODEL else ""
            yield Problem(field, show(value), f"nothing, it is set by {OWNED[name]}", f"remove it here{elsewhere}")
        elif why := why_refused(name, value):
            yield Problem(field, show(value), f"nothing: {why}", "remove it")
        elif installed and name not in installed:
            unknown[name] = value
        elif installed and name not in ALLOWED | REFUSED.keys():
            allowed = "nothing: this package does not know what it does to the model"
            yield Problem(field, f"{show(value)}, which the installed Megatron-core has", allowed, "remove it")
    yield from check_passthrough(SECTION, unknown, installed & ALLOWED)


def why_refused(name: str, value: object) -> str:
    """Return why an option must not have this value; empty where it may."""
    if name in REFUSED:
        return "" if value in (None, False) else REFUSED[name]
    if name in WITHOUT_EFFECT:
        return f"it has no effect here; {WITHOUT_EFFECT[name]}"
    return next((why for start, why in _FAMILIES.items() if name.startswith(start)), "")


def _installed() -> Path | None:
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it runs no code of Megatron-core
    places = spec.submodule_search_locations if spec else None
    return next((Path(place) / "core" for place in places or () if (Path(place) / "core").is_dir()), None)


def _annotated(root: Path, sources: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Names with an annotation in the bodies of the classes: the fields of dataclasses."""
    names: set[str] = set()
    for class_name, file in sources:
        try:
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            return frozenset()
        bodies = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
        statements = (statement for body in bodies for statement in body)
        names |= {s.target.id for s in statements if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return frozenset(names)
