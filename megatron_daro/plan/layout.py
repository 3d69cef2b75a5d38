"""The layouts that can be asked for: parallel sizes, recomputation and token budget of the trainers, size of a server.

Place in the data flow: shape and GPU -> candidates -> memory.py, times.py. The rules are those of the configuration's
checks: what the trainer would refuse is not proposed. Refused ones are returned with the rule that they break.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.plan.gpus import Gpu
from megatron_daro.plan.workload import Workload, least_budget

CONTEXT_SIZES = (1, 2, 4, 8)
BUDGETS = (1, 2, 4, 8)
"""Token budgets that are tried, as multiples of the longest sample."""
Recompute = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How one replica of the policy lies on GPUs: TP, PP, CP; recomputation; tokens of a micro-batch."""

    tensor: int
    pipeline: int
    context: int
    recompute: Recompute
    micro_batch_tokens: int

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch that one context-parallel rank holds."""
        return self.micro_batch_tokens // self.context


def sizes(shape: ModelShape, gpu: Gpu, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield each (TP, PP, CP) that the model divides into, within a node's TP and at most `most` GPUs."""
    for tensor in _divisors_of_all(shape.heads, shape.kv_heads, shape.ffn):
        if tensor > gpu.gpus_per_node:
            continue
        for pipeline in _divisors_of_all(shape.layers):
            for context in CONTEXT_SIZES:
                if tensor * pipeline * context <= most:
                    yield tensor, pipeline, context


def model_layouts(workload: Workload, gpu: Gpu, most: int) -> Iterator[ModelLayout]:
    """Yield every layout of one replica, with each recomputation and token budget."""
    for tensor, pipeline, context in sizes(workload.shape, gpu, most):
        multiple = tensor * (2 * context if context > 1 else 1)
        least = least_budget(workload, multiple)
        for factor in BUDGETS:
            for recompute in ("none", "full"):
                yield ModelLayout(tensor, pipeline, context, recompute, least * factor)  # type: ignore[arg-type]


def server_sizes(shape: ModelShape, gpu: Gpu) -> list[int]:
    """Return the tensor-parallel sizes of a server: powers of two within a node that divide the heads."""
    return [size for size in (1, 2, 4, 8, 16) if size <= gpu.gpus_per_node and shape.heads % size == 0]


def _divisors_of_all(*numbers: int) -> list[int]:
    return [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
