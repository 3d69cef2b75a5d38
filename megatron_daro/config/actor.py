"""The `actor` section: layout, precision, memory and optimizer of the Megatron policy.

Read by megatron_daro.actor. `actor.megatron` holds upstream's own names, which
config/megatron_options.py looks at.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_daro.config.base import Decay, Section

Fp8Recipe = Literal["tensorwise", "blockwise", "mxfp8"]


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, ge=1e-12, le=10)
    """Peak learning rate, 1e-12 to 10."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """Decoupled weight decay, 0 to 100."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam decay rates, each in [0, 1)."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Adam's epsilon, 1e-30 to 1."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global gradient norm, at most 1e9; 0: no clipping."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up, >= 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up; cosine and linear end at the last optimizer step of the run."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where cosine and linear end, as a fraction of learning_rate; in [0, 1]."""
    distributed: bool = True
    """Split the optimizer state over the data-parallel ranks."""


def resolved_expert_tensor(given: int | None, tensor: int, expert: int) -> int:
    """Return ETP: as given, else whole experts where they are shared out (EP > 1), else cut as all layers are."""
    return given or (1 if expert > 1 else tensor)


class ActorSection(Section):
    """The policy under training."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer (TP), >= 1; divides the attention heads, and divides the key-value heads or is a
    multiple of them."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages (PP), >= 1; divides the number of layers, unless `megatron` says how many the first or the last
    stage has (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)."""
    virtual_pipeline_parallel: int = Field(default=1, ge=1)
    """Parts of the model on each pipeline stage (VPP, interleaved schedule), >= 1: a smaller bubble for more messages.
    Divides the layers of every stage; > 1 needs pipeline_parallel > 1."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each sequence (CP), >= 1."""
    data_parallel: int = Field(default=1, ge=1)
    """Replicas of the model (DP), >= 1. World size = TP * PP * CP * DP."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer (EP), >= 1; divides the number of experts. Experts are laid out over the
    ranks of TP, CP and DP anew: the world does not grow."""
    expert_tensor_parallel: int | None = Field(default=None, ge=1)
    """Ranks that share each expert (ETP), >= 1. Unset: 1 with expert_parallel > 1, else as tensor_parallel."""
    sequence_parallel: bool | None = None
    """Split the activations between the tensor-parallel parts too. Unset: on when tensor_parallel > 1."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """In what is computed. fp8: the layers' matrix products in 8-bit floats (Transformer Engine, GPUs that have them),
    all else as bf16. Optimizer state and gradients are fp32 with each."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """How fp8 scales numbers: one scale for a matrix, one for each 128 x 128 block of weights and 128 tokens' row of
    activations, or one for each 32 (mxfp8, Blackwell GPUs)."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 for gradients; e4m3: both in e4m3."""
    num_layers_at_start_in_bf16: int = Field(default=0, ge=0)
    """With fp8: so many of the first layers stay in bf16; at most those of a pipeline stage."""
    num_layers_at_end_in_bf16: int = Field(default=0, ge=0)
    """With fp8: so many of the last layers stay in bf16; at most those of a pipeline stage."""
    recompute: Literal["none", "full"] = "none"
    """full: recompute each layer in the backward pass instead of keeping its activations."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one packed micro-batch of one replica, at most; >= the longest prompt plus response."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose fp32 logits exist at once when log-probabilities are computed; > 0."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the rollout engine chose for each token (R3); needs SGLang. A
    token is recorded with 2 bytes for each layer and expert of it."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer and schedule."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig under upstream
    names; unknown ones, those that another option sets, and those that would be ignored (such as the precision-aware
    optimizer) are refused with the reason."""

    @property
    def expert_group_size(self) -> int:
        """Ranks that hold all experts of a layer between them: ETP * EP."""
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
        """Type of parameters and activations; fp8 is what the products of layers are computed in, from these."""
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
    def sequence_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this: TP (sequence parallel on) * 2 CP (if CP > 1)."""
        tensor = self.tensor_parallel if self.use_sequence_parallel else 1
        context = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return tensor * context
