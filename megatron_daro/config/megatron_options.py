"""`actor.megatron`: which options of Megatron-core may be given, which this package sets, which it cannot keep.

Place in the data flow: the checks before a start ask here, and so does actor/model.py before it hands the options on.
Upstream's names are read from its source files: importing Megatron-core takes seconds, and needs torch.
Refuses: names that upstream does not have, names that another option sets, and options that would be ignored or would
change what is trained without a word.
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

OWNED = {
    "num_layers": "the model's config.json",
    "hidden_size": "the model's config.json",
    "num_attention_heads": "the model's config.json",
    "num_moe_experts": "the model's config.json",
    "moe_ffn_hidden_size": "the model's config.json",
    "moe_layer_freq": "the model's config.json",
    "moe_router_topk": "the model's config.json",
    "moe_router_pre_softmax": "the model's config.json",
    "moe_router_score_function": "the model's config.json",
    "moe_shared_expert_intermediate_size": "the model's config.json",
    "tensor_model_parallel_size": "actor.tensor_parallel",
    "expert_model_parallel_size": "actor.expert_parallel",
    "expert_tensor_parallel_size": "actor.expert_tensor_parallel",
    "pipeline_model_parallel_size": "actor.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "actor.virtual_pipeline_parallel",
    "microbatch_group_size_per_vp_stage": "the schedule of each step, from its number of micro-batches",
    "context_parallel_size": "actor.context_parallel",
    "sequence_parallel": "actor.sequence_parallel",
    "params_dtype": "actor.precision",
    "pipeline_dtype": "actor.precision",
    "bf16": "actor.precision",
    "fp16": "actor.precision (fp32, bf16 or fp8)",
    "fp8": "actor.precision and actor.fp8_format",
    "fp8_recipe": "actor.fp8_recipe",
    "first_last_layers_bf16": "actor.num_layers_at_start_in_bf16 and actor.num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16": "actor.num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16": "actor.num_layers_at_end_in_bf16",
    "lr": "actor.optimizer.learning_rate",
    "clip_grad": "actor.optimizer.grad_clip",
    "use_distributed_optimizer": "actor.optimizer.distributed",
    "calculate_per_token_loss": "the distributed loss, which sums gradients",
    "average_in_collective": "the distributed loss, which sums gradients",
    "overlap_param_gather": "the way of weights to engines, which needs all of them at once after an update",
    "variable_seq_lengths": "the packed batches",
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

REFUSED = {
    "use_precision_aware_optimizer": _PRECISION,
    "main_grads_dtype": _PRECISION,
    "main_params_dtype": _PRECISION,
    "exp_avg_dtype": _PRECISION,
    "exp_avg_sq_dtype": _PRECISION,
    "fp8_param": _FP8_PARAMETERS,
    "fp8_param_gather": _FP8_PARAMETERS,
    "reuse_grad_buf_for_mxfp8_param_ag": _FP8_PARAMETERS,
    "fp8_quantizer_factory": "actor.fp8_recipe names the recipes that can be checked before a start",
    "fp4": "actor.precision has fp32, bf16 and fp8",
    "pipeline_model_parallel_layout": _STAGES,
    "overlap_p2p_comm": "actor.virtual_pipeline_parallel turns it on, and without that it has no effect",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered before the forward pass, not within it",
    "defer_embedding_wgrad_compute": "the chunked output layer computes the gradient of its own weight",
    "num_distributed_optimizer_instances": _GROUPS,
    "tensor_parallel_num_weight_shards": _GROUPS,
    "gtp_weight_remat_size": _GROUPS,
    "use_megatron_fsdp": "the gradients are reduced by Megatron's DistributedDataParallel",
    "grad_norm_skip_threshold": "only trainer.on_nonfinite decides which steps are skipped",
    "moe_aux_loss_coeff": _BALANCING,
    "moe_z_loss_coeff": _SUMS,
    "moe_enable_routing_replay": "actor.routing_replay puts its own into the routers",
    "moe_router_load_balancing_type": _ROUTING,
    "moe_router_enable_expert_bias": _ROUTING,
    "moe_router_force_load_balancing": _ROUTING,
    "moe_input_jitter_eps": _ROUTING,
    "moe_expert_capacity_factor": _ROUTING,
    "moe_use_legacy_grouped_gemm": "its weights have a layout of their own; grouped experts need Transformer Engine",
    "mtp_num_layers": "layers that predict several tokens are not built",
    "use_mup": "the log-probabilities are taken without its scale of the logits",
}
"""Upstream's options that would be ignored, or make wrong numbers, and why."""


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
    free = {}
    for name, value in options.items():
        field = f"{SECTION}.{name}"
        if name in OWNED:
            yield Problem(field, show(value), f"nothing, it is set by {OWNED[name]}", "remove it here")
        elif name in REFUSED and value not in (None, False):
            yield Problem(field, show(value), f"nothing: {REFUSED[name]}", "remove it")
        else:
            free[name] = value
    if known:
        yield from check_passthrough(SECTION, free, frozenset().union(*known.values()) - OWNED.keys())


def _installed() -> Path | None:
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it runs no code of Megatron-core
    places = spec.submodule_search_locations if spec else None
    return next((Path(place) / "core" for place in places or () if (Path(place) / "core").is_dir()), None)


def _annotated(root: Path, sources: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Names with an annotation in the bodies of the classes: the fields of dataclasses."""
    found: set[str] = set()
    for class_name, file in sources:
        try:
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            return frozenset()
        bodies = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
        statements = (statement for body in bodies for statement in body)
        found |= {s.target.id for s in statements if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return frozenset(found)
