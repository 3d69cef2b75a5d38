"""A small model whose gradients are exact on any layout, so that every difference comes from the loss.

It predicts a token only from the token before it (embedding, tanh, vocabulary-parallel output), which is enough to
split over tensor, pipeline and context ranks. With experts, a token adds the row of its own expert; rows are divided
over expert-parallel ranks, and their gradients are reduced as Megatron reduces those of experts.

Shape letters: T tokens, E experts, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.workshop.check_loss.samples import VOCAB

device.prepare()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region  # noqa: E402
from megatron.core.transformer import MegatronModule, TransformerConfig  # noqa: E402

HIDDEN, EXPERTS = 4, 2


class _Group(Protocol):
    group: dist.ProcessGroup


class _AllExperts(torch.autograd.Function):
    """Gathers the rows of all experts on each expert-parallel rank; sums their gradients over the ranks' tokens."""

    @staticmethod
    def forward(ctx: _Group, rows_ED: Tensor) -> Tensor:
        """Gather [experts of this rank, D] -> [EXPERTS, D]."""
        ctx.group = parallel_state.get_expert_model_parallel_group()
        parts = [torch.empty_like(rows_ED) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, rows_ED.contiguous(), group=ctx.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: _Group, *gradients: Tensor) -> Tensor:
        """Sum over the ranks, as a token dispatcher does in its backward pass, and keep this rank's rows."""
        total_ED = gradients[0].clone()
        dist.all_reduce(total_ED, group=ctx.group)
        return total_ED.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]


class TokenModel(MegatronModule):
    """Embedding on the first stage, output rows on the last; both if there is one stage."""

    def __init__(self, config: TransformerConfig, seed: int, experts: int = 0) -> None:
        """Make this rank's parameters. The rows of the output are split over tensor-parallel ranks, experts over EP."""
        super().__init__(config)
        generator = torch.Generator().manual_seed(seed)
        embedding = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        output = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = (
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        )
        if self.pre_process:
            self.embedding = torch.nn.Parameter(embedding)
        if self.pre_process and experts:
            rows_ED = torch.randn(EXPERTS, HIDDEN, generator=generator, dtype=torch.float64)
            rank = parallel_state.get_expert_model_parallel_rank() if experts > 1 else 0
            self.experts = torch.nn.Parameter(rows_ED.chunk(experts)[rank].clone())
            self.alone = experts == 1
            setattr(self.experts, "allreduce", self.alone)  # noqa: B010  (how Megatron knows parameters of experts)
        if self.post_process:
            rank = parallel_state.get_tensor_model_parallel_rank()
            rows = VOCAB // parallel_state.get_tensor_model_parallel_world_size()
            self.output = torch.nn.Parameter(output[rank * rows : (rank + 1) * rows].clone())
        self.received: Tensor | None = None

    def set_input_tensor(self, tensor: list[Tensor] | Tensor | None) -> None:
        """Take what the previous stage sent."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, inputs_T: Tensor) -> Tensor:
        """Map token ids [T] to hidden states [T, 1, D] or, on the last stage, to logits [T, 1, V / TP]."""
        hidden = self._embedded(inputs_T)[:, None] if self.pre_process else self.received
        assert hidden is not None
        if not self.post_process:
            return hidden
        return torch.nn.functional.linear(copy_to_tensor_model_parallel_region(hidden), self.output)

    def _embedded(self, inputs_T: Tensor) -> Tensor:
        if not hasattr(self, "experts"):
            return torch.tanh(self.embedding[inputs_T])
        rows_ED = self.experts if self.alone else _AllExperts.apply(self.experts)
        return torch.tanh(self.embedding[inputs_T] + rows_ED[inputs_T % EXPERTS])
