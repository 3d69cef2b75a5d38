"""`actor.megatron`: which options of Megatron-core users may set, which this package sets itself, and which it refuses.

The checks before a start look here, without importing Megatron-core; actor/model.py looks again with the option names
of the installed version, and lets Megatron-core check the values. Only options in ALLOWED, which were examined, are
passed on. Options that would be ignored, would change the model, or are new in Megatron-core are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.problems import Problem, did_you_mean, nearest_paths, show

SECTION = "actor.megatron"

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
    "linear_attention_freq": "layer_types",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
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
# Options that define the model: upstream's name -> the key of config.json that determines it.

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
    "moe_router_dtype": "the routers, which compute in fp32 or more, as those of the rollout engine",
    "transformer_impl": "the device: Transformer Engine's layers where it can run, else Megatron's own",
    "use_cpu_initialization": "the device",
}
"""Upstream's options that are set by something else -> what sets them."""

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
    "tp_comm_overlap": "its buffers are made for one number of tokens, and packed micro-batches differ in theirs",
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
"""Upstream's options that would be ignored or give wrong numbers -> why; null and false are accepted."""

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
"""Upstream's options for speed, memory and the optimizer; they change the log-probabilities by rounding at most."""


_TRANSFORMER_ENGINE_ONLY = """
cpu_offloading fine_grained_activation_offloading gradient_accumulation_fusion moe_permute_fusion moe_router_fusion
nccl_ub symmetric_ar_type
"""
TRANSFORMER_ENGINE_ONLY = frozenset(_TRANSFORMER_ENGINE_ONLY.split())
"""Allowed options that have an effect only with Transformer Engine's layers, or with NCCL."""


def gpu_defaults(actor: ActorSection, *, experts: bool, transformer_engine: bool) -> dict[str, bool]:
    """Return the options that ranks on GPUs add to `actor.megatron` if it does not set them. They are for speed: they
    change kernels, and when gradients are sent, but not what is computed. The router is not fused with routing replay,
    which needs the plain one.

    Args:
        experts: whether the model has experts. transformer_engine: whether its layers are used.
    """
    chosen = {}
    if actor.data_parallel * actor.context_parallel > 1:
        chosen["overlap_grad_reduce"] = True
    if experts and transformer_engine:
        chosen["moe_permute_fusion"] = True
        if not actor.routing_replay:
            chosen["moe_router_fusion"] = True
    return {name: value for name, value in chosen.items() if name not in actor.megatron}


def option_problems(options: Mapping[str, Any], installed: Collection[str] = ALLOWED) -> Iterator[Problem]:
    """Yield what is wrong with `actor.megatron`.

    Args:
        options: as the user gave them. installed: the option names of the installed Megatron-core, if they are known.
    """
    names = sorted(ALLOWED & set(installed))
    for name, value in options.items():
        field = f"{SECTION}.{name}"
        if name in OWNED:
            elsewhere = f", or set model.path to a model with such a {_MODEL[name]}" if name in _MODEL else ""
            yield Problem(field, show(value), f"nothing, it is set by {OWNED[name]}", f"remove it here{elsewhere}")
        elif name in REFUSED and value not in (None, False):
            yield Problem(field, show(value), f"nothing: {REFUSED[name]}", "remove it")
        elif name not in names and name not in REFUSED:
            allowed = (
                "options that Megatron-core has, that no other option sets, and of which it is known that they have "
            )
            allowed += (
                "an effect and leave the model and its loss as they are (ALLOWED in "
                "megatron_daro/config/megatron_options.py)"
            )
            fix = did_you_mean(nearest_paths(name, names), "remove it")
            yield Problem(field, show(value), allowed, fix)
