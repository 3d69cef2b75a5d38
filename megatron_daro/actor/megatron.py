"""What actor/ uses of Megatron-core, imported once: after the device is prepared, without upstream's warnings.

The order matters: on a machine without a GPU, upstream's CUDA calls are redirected (cpu.py) before its modules bind
them. compat.py makes up for what is missing or wrong upstream.
"""

from __future__ import annotations

import warnings

from megatron_daro.actor import device

device.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a dozen modules warn that Apex or Transformer Engine is absent
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factory_merges,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
    from megatron.core.dist_checkpointing.utils import extract_sharded_base, extract_sharded_tensors_and_factories
    from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import param_group_identifier_keys
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        get_cuda_rng_tracker,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.transformer.utils import (
        is_layer_window_attention,
        make_sharded_tensors_for_checkpoint,
        sharded_state_dict_default,
    )

__all__ = [
    "CheckpointingException",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "IdentityOp",
    "MLATransformerConfig",
    "MegatronModule",
    "MegatronOptimizer",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "P2PCommunicator",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SelfAttention",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "YarnRotaryEmbedding",
    "apply_factory_merges",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "determine_global_metadata",
    "dict_list_map_inplace",
    "extract_sharded_base",
    "extract_sharded_tensors_and_factories",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "get_megatron_optimizer",
    "get_schedule_table",
    "get_transformer_layer_offset",
    "is_layer_window_attention",
    "is_main_replica",
    "load_preprocess",
    "make_sharded_tensors_for_checkpoint",
    "merge",
    "multi_latent_attention",
    "nested_values",
    "parallel_state",
    "param_group_identifier_keys",
    "quick_gelu",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "save_preprocess",
    "sharded_state_dict_default",
    "tensor_parallel",
    "validate_sharding_integrity",
]
