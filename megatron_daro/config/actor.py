"""The `actor` section: layout, precision, memory and optimizer of the Megatron policy.

Read by megatron_daro.actor. `actor.megatron` holds options under upstream's own names, which
config/megatron_options.py checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from megatron_daro.config.base import Decay, Section

Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8"]


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, ge=1e-12, le=10)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam decay rates."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Adam's epsilon."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global gradient norm; 0: no clipping."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up; cosine and linear end at the last step of the run."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where cosine and linear end, as a fraction of learning_rate."""
    distributed: bool = True
    """Shard the optimizer state over the data-parallel ranks."""


def resolved_expert_tensor(given: int | None, tensor: int, expert: int) -> int:
    """Return ETP: as given; else 1, whole experts, if they are shared out (EP > 1); else TP, as for all layers."""
    return given or (1 if expert > 1 else tensor)


_FP8_TOKENS: Mapping[Fp8Recipe, int] = {"tensorwise": 32, "blockwise": 128, "mxfp8": 32}
"""The multiple to which the tokens of a matrix product in fp8 are padded. For tensorwise 16 would be enough; blockwise
with sequence parallelism needs whole blocks."""


def pack_multiples(tensor: int, context: int, sequence_parallel: bool, fp8: Fp8Recipe | None = None) -> tuple[int, int]:
    """Return the (sequence_multiple, total_multiple) in tokens that a layout needs from `data.packing.pack`.

    CP > 1 cuts every sequence into 2 CP chunks. The total multiple is that of the whole pack, which is divided over the
    context-parallel ranks, and with sequence parallelism over the tensor-parallel ranks too; with fp8 each rank's part
    must itself be a multiple of `_FP8_TOKENS`.

    Args:
        tensor, context: ranks. sequence_parallel: whether it is on. fp8: the recipe; None: no fp8.
    """
    sequence_multiple = 2 * context if context > 1 else 1
    parts = context * (tensor if sequence_parallel else 1)
    return sequence_multiple, math.lcm(sequence_multiple, parts * (_FP8_TOKENS[fp8] if fp8 else 1))


LOGPROB_TILES: Mapping[str, tuple[int, int]] = {"cpu": (1024, 2048), "gpu": (4096, 8192)}
"""Default tokens and columns of a tile of fp32 logits. CPU: 8 MiB, which fit into a last-level cache. GPU: 128 MiB,
shaped to move few of the fp32 gradient sums, which are read and written once per tile:
(V / columns) * T * D + (T / tokens) * V * D numbers for T tokens, V columns and D hidden numbers."""
KEPT_LOGITS_BYTES = 2**26
"""Most bytes of logits that a CPU keeps per call from forward to backward; a GPU keeps none."""


class ActorSection(Section):
    """The policy under training."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer (TP). Divides the number of attention heads; divides the number of key-value heads or
    is a multiple of it."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages (PP). Divides the number of layers, unless `megatron` sets the layers of the first or last
    stage."""
    virtual_pipeline_parallel: int = Field(default=1, ge=1)
    """Virtual stages per pipeline stage (VPP). Divides the number of layers of every stage."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each sequence (CP)."""
    data_parallel: int = Field(default=1, ge=1)
    """Replicas of the model (DP). World size = TP * PP * CP * DP."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share out the experts of a layer (EP), taken from TP, CP and DP. Divides the number of experts."""
    expert_tensor_parallel: int | None = Field(default=None, ge=1)
    """Ranks that share each expert (ETP). Unset: 1 with EP > 1, else TP."""
    sequence_parallel: bool | None = None
    """Shard activations over the tensor-parallel ranks. Unset: on with TP > 1."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """fp8: only the layers' matrix products are in fp8, the rest is in bf16. Optimizer state and gradients are in fp32
    with each."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """What shares an fp8 scale. tensorwise: a matrix; blockwise: 128 x 128 weights; mxfp8: 32 numbers (Blackwell)."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 for gradients; e4m3: both in e4m3."""
    num_layers_at_start_in_bf16: int = Field(default=0, ge=0)
    """With fp8: number of first layers that stay in bf16."""
    num_layers_at_end_in_bf16: int = Field(default=0, ge=0)
    """With fp8: number of last layers that stay in bf16."""
    recompute: Literal["none", "full"] = "none"
    """full: recompute each layer in the backward pass."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens of a replica's packed micro-batch; at least the longest prompt plus response."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens per tile of logits, of which one exists at a time (with 2,048 columns on a CPU, 8,192 on a GPU). Unset:
    1,024 on a CPU, which also keeps up to 64 MiB of logits for the backward pass; 4,096 on a GPU."""
    logprob_kernel: Literal["auto", "torch", "triton"] = "auto"
    """torch: logits are written to memory, tile by tile; triton: they never leave the kernel that computes them; auto:
    triton in bf16 on a GPU if it is installed, else torch (on an H200 triton is faster in bf16 and slower in fp32)."""
    routing_replay: bool = False
    """Train with the experts that the SGLang server chose for each token (R3)."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer and schedule."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, by name. Fields
    that are unknown, contradict other options or would be ignored are refused."""

    @property
    def expert_group_size(self) -> int:
        """Ranks that together hold all experts of a layer: ETP * EP."""
        return self.expert_parallel * self.expert_tensor_size

    @property
    def expert_tensor_size(self) -> int:
        """expert_tensor_parallel with its default resolved."""
        return resolved_expert_tensor(self.expert_tensor_parallel, self.tensor_parallel, self.expert_parallel)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica: TP * PP * CP."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Type of parameters and activations. With fp8 it is bf16: only the layers' products are computed in fp8."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def torch_dtype(self) -> str:
        """`dtype` by torch's name, as config.json and SGLang say it."""
        return {"fp32": "float32", "bf16": "bfloat16"}[self.dtype]

    @property
    def world_size(self) -> int:
        """All ranks of the actor: TP * PP * CP * DP."""
        return self.model_parallel_size * self.data_parallel

    @property
    def use_sequence_parallel(self) -> bool:
        """sequence_parallel with its default resolved."""
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def fp8(self) -> Fp8Recipe | None:
        """fp8_recipe where the precision is fp8."""
        return self.fp8_recipe if self.precision == "fp8" else None

    @property
    def pack_multiples(self) -> tuple[int, int]:
        """What each sequence of a packed micro-batch, and the whole of it, are padded to a multiple of."""
        return pack_multiples(self.tensor_parallel, self.context_parallel, self.use_sequence_parallel, self.fp8)
