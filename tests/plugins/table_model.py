"""The small model of hosts that train with Megatron-core: a table of logits in its DDP, and plain gradient descent."""

from __future__ import annotations

from typing import Any

import rollout_batches as batches
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MegatronModule, TransformerConfig


class TokenModel(MegatronModule):
    """Logits of a token from that token alone: exact under any context-parallel layout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.table = torch.nn.Parameter(batches.start_table().float())

    def set_input_tensor(self, tensor: Any) -> None:
        """Nothing comes from another stage."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        """[B, S] -> [B, S, V]; a padding token beyond the vocabulary counts as its last one."""
        return self.table[input_ids.clamp(max=batches.VOCAB - 1)]


class PlainStep:
    """An optimizer as Megatron calls it: plain gradient descent; keeps each step's gradient."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.gradients = model, []
        self.param_groups = [{"lr": 1.0, "weight_decay": 0.0, "params": []}]

    def zero_grad(self) -> None:
        """The gradients are in the model's buffer."""

    def step(self) -> tuple[bool, float, None]:
        """Update; (successful, gradient norm, None)."""
        table = self.model.module.table
        self.gradients.append(table.main_grad.clone())
        with torch.no_grad():
            table -= batches.LEARNING_RATE * table.main_grad
        return True, float(table.main_grad.norm()), None


def table_model(*, context: int = 1, per_token: bool = False) -> DistributedDataParallel:
    """The model under Megatron's DDP, fp32 gradients, with Megatron's end of a step."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        context_parallel_size=context,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, ddp, TokenModel(config))


def provider(pre_process: bool = True, post_process: bool = True) -> TokenModel:
    """The model as slime's and miles' --custom-model-provider-path ask for it, by Megatron-LM's options."""
    from megatron.training.global_vars import get_args

    args = get_args()
    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    options = {name: getattr(args, name) for name in ("context_parallel_size", "calculate_per_token_loss")}
    return TokenModel(TransformerConfig(**sizes, **options))


def scheduler_of(optimizer: PlainStep) -> OptimizerParamScheduler:
    """A constant learning rate; its state is what Megatron saves with every checkpoint."""
    return OptimizerParamScheduler(optimizer, 0, 1, 0, 0, 10, "constant", 0, 0, 10, "constant")
