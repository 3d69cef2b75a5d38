"""The layouts that can be asked for, and the parameters that each rank of one holds.

Shape and GPU -> candidates (parallel sizes, recomputation and token budget of the trainers, size of a server) ->
memory.py, times.py. The rules are those of the configuration's checks: what the trainer would refuse is not proposed.
Rules that involve the number of replicas (DP) are in search.py.

Parameters are counted from the shape alone, with the vocabulary padded as actor/model.py pads it; `tests/unit/plan`
compares these counts with the real modules on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_daro.config.actor import ActorSection, pack_multiples, resolved_expert_tensor
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.data.schedule import interleaved_group
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.workload import AdaptedWeight, Adapters, Workload, least_budget

# In elements, in the buffers of Megatron's distributed optimizer (distributed/param_and_grad_buffer.py).
_PARAMETER_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut: TP, PP, EP (ranks that divide the experts of a layer among them), ETP (ranks that each expert
    is split over), VPP (parts of a stage)."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1


def layer_parameters(shape: ModelShape, cut: Cut, layer: int = 0) -> tuple[int, ...]:
    """Return the elements of each parameter of one layer on one rank, without parameters of experts and those that
    have no gradient."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = (query * (1 + shape.gated) + 2 * key) // cut.tensor
    sizes = [shape.hidden, shape.hidden * columns, query // cut.tensor * shape.hidden, shape.hidden]
    sizes += [columns] if shape.qkv_bias else []
    sizes += ([query, key] if shape.whole_qk_norm else [shape.head_dim] * 2) if shape.qk_norm else []
    sizes += [shape.heads // cut.tensor] if shape.sinks else []
    sizes += [shape.hidden, shape.experts.number] if shape.biases and shape.experts else []
    if latent := shape.latent:
        rank, heads, down = latent.query_rank, shape.heads // cut.tensor, latent.kv_rank + latent.rotary
        sizes = (
            [rank * shape.hidden, rank, rank * query // cut.tensor] if rank else [shape.hidden * query // cut.tensor]
        )
        sizes += [down * shape.hidden, latent.kv_rank, heads * (latent.plain + latent.value) * latent.kv_rank]
        sizes += [heads * latent.value * shape.hidden, shape.hidden, shape.hidden]
    if (linear := shape.linear) and layer in linear.layers:
        keys, values, heads = (n // cut.tensor for n in (linear.keys, linear.values, linear.value_heads))
        sizes = [shape.hidden, (2 * keys + 2 * values + 2 * heads) * shape.hidden, (2 * keys + values) * linear.kernel]
        sizes += [heads, heads, linear.value, values * shape.hidden, shape.hidden]
    if shape.experts and shape.has_experts(layer):
        shared = shape.experts.shared_ffn // cut.tensor * shape.hidden
        sizes += [shape.hidden] if shape.experts.shared_gate else []
        return (*sizes, shape.experts.number * shape.hidden, *((2 * shared, shared) if shared else ()))
    width = shape.ffn // cut.tensor
    return (*sizes, 2 * width * shape.hidden, width * shape.hidden)


def expert_parameters(shape: ModelShape, cut: Cut, layer: int) -> tuple[int, ...]:
    """Return the elements of each parameter of the experts of one layer that one rank holds."""
    if shape.experts is None or not shape.has_experts(layer):
        return ()
    width = shape.experts.ffn // cut.expert_tensor
    biases = (2 * width, shape.hidden) if shape.biases else ()
    return (2 * width * shape.hidden, width * shape.hidden, *biases) * (shape.experts.number // cut.expert)


def adapter_parameters(adapters: Adapters, cut: Cut, layers: Iterable[int]) -> list[int]:
    """Return the elements of each parameter of these layers' adapters on one rank: for each weight one A per matrix,
    and a single parameter with all B (actor/lora.py)."""
    sizes: list[int] = []
    for weight in (weight for layer in layers for weight in adapters.weights if layer in weight.layers):
        inputs, outputs = own_sides(weight, cut.tensor)
        sizes += [adapters.rank * inputs] * weight.matrices + [adapters.rank * outputs]
    return sizes


def own_sides(weight: AdaptedWeight, tensor: int) -> tuple[int, int]:
    """Return how many inputs and outputs of a weight one rank holds."""
    if weight.whole:
        return weight.inputs, weight.outputs
    if weight.by_rows:
        return weight.inputs, weight.outputs // tensor
    return weight.inputs // tensor, weight.outputs


def part_parameters(
    shape: ModelShape,
    cut: Cut,
    stage: int,
    part: int = 0,
    *,
    critic: bool = False,
    adapters: Adapters | None = None,
) -> tuple[list[int], list[int]]:
    """Return the elements of each parameter of a part (0 .. VPP - 1) of a stage (0 .. PP - 1) on one rank: a list
    without experts, and a list of the experts' parameters.

    With tied embeddings and several stages the last one holds a copy of the embedding; a critic has one row there.
    With `adapters` only their parameters count.
    """
    table = shape.padded_vocab(cut.tensor) // cut.tensor * shape.hidden
    parts, place = cut.pipeline * cut.virtual, part * cut.pipeline + stage
    first, last, own = place == 0, place == parts - 1, shape.layers // parts
    layers = range(place * own, (place + 1) * own)
    if adapters is not None:
        return adapter_parameters(adapters, cut, layers), []
    sizes = [table] if first else []
    sizes += [size for layer in layers for size in layer_parameters(shape, cut, layer)]
    if last:
        sizes.append(shape.hidden)
        sizes += [shape.hidden] if critic else [table] if not (shape.tie and first) else []
    return sizes, [size for layer in layers for size in expert_parameters(shape, cut, layer)]


@lru_cache(maxsize=65536)
def counts(
    shape: ModelShape, cut: Cut, stage: int, critic: bool = False, adapters: Adapters | None = None
) -> tuple[int, int]:
    """Return the elements on a rank of this stage: without experts, and of experts. With `adapters` only theirs."""
    parts = [part_parameters(shape, cut, stage, part, critic=critic, adapters=adapters) for part in range(cut.virtual)]
    return sum(sum(rest) for rest, _ in parts), sum(sum(experts) for _, experts in parts)


@lru_cache(maxsize=65536)
def _aligned(
    shape: ModelShape, cut: Cut, stage: int, part: int, critic: bool, adapters: Adapters | None
) -> tuple[int, int]:
    unit = _PARAMETER_ALIGNMENT
    rest, experts = (
        sum(-(-size // unit) * unit for size in sizes)
        for sizes in part_parameters(shape, cut, stage, part, critic=critic, adapters=adapters)
    )
    return rest, experts


def buffer_elements(
    shape: ModelShape,
    cut: Cut,
    stage: int,
    *,
    shards: int,
    expert_shards: int,
    critic: bool = False,
    adapters: Adapters | None = None,
) -> int:
    """Return the elements of the gradient buffers, with the padding that the distributed optimizer needs. Each virtual
    part has its own buffers.

    Args:
        shape, cut, stage, critic, adapters: as in `counts`.
        shards: ranks that share the optimizer state, DP * CP; 0 without the distributed optimizer.
        expert_shards: the same for experts, TP * CP * DP / (ETP * EP).
    """
    if not shards:
        return sum(counts(shape, cut, stage, critic, adapters))
    total = 0
    for part in range(cut.virtual):
        for elements, ranks in zip(
            _aligned(shape, cut, stage, part, critic, adapters), (shards, expert_shards), strict=True
        ):
            unit = math.lcm(ranks, _BUFFER_ALIGNMENT)
            total += -(-elements // unit) * unit
    return total


def active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that one token is multiplied with: the active ones without an untied input
    embedding."""
    lookup = 0 if shape.tie else shape.vocab * shape.hidden
    return shape.num_active_parameters - lookup


def checkpoint_bytes(shape: ModelShape, weight_bytes: int, adapters: Adapters | None = None) -> int:
    """Return the size of a checkpoint: weights, and two fp32 moments of each, with an fp32 copy of bf16 weights.

    Args:
        shape: the model. weight_bytes: of a weight, 2 or 4. adapters: if given, only their weights are saved.
    """
    return sum(counts(shape, Cut(1, 1, 1, 1, 1), 0, adapters=adapters)) * (weight_bytes + {2: 12, 4: 8}[weight_bytes])


CONTEXT_SIZES = (1, 2, 4, 8)
MOST_PARTS = 8
"""The most virtual parts of a pipeline stage that are tried."""
BUDGETS = (1, 2, 4, 8)
"""Token budgets that are tried, as multiples of the longest sample."""
Recompute = Literal["none", "full"]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How one replica of the policy lies on GPUs: TP, PP, CP, EP, VPP, ETP; recomputation; tokens of a micro-batch.

    expert_tensor: ETP; None: the configuration's default, as in every proposed layout."""

    tensor: int
    pipeline: int
    context: int
    recompute: Recompute
    micro_batch_tokens: int
    expert: int = 1
    virtual: int = 1
    expert_tensor: int | None = None

    @classmethod
    def of(cls, actor: ActorSection) -> ModelLayout:
        """Return the layout of a configuration."""
        return cls(
            tensor=actor.tensor_parallel,
            pipeline=actor.pipeline_parallel,
            context=actor.context_parallel,
            recompute=actor.recompute,
            micro_batch_tokens=actor.micro_batch_tokens,
            expert=actor.expert_parallel,
            virtual=actor.virtual_pipeline_parallel,
            expert_tensor=actor.expert_tensor_parallel,
        )

    @property
    def cut(self) -> Cut:
        """How the parameters are cut."""
        expert_tensor = resolved_expert_tensor(self.expert_tensor, self.tensor, self.expert)
        return Cut(self.tensor, self.pipeline, self.expert, expert_tensor, self.virtual)

    @property
    def ranks(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.context

    def under_way(self, stage: int, micro_batches: int) -> int:
        """Return the most forward passes of parts of a stage (0 .. PP - 1) that wait for their backward pass at once.

        With one forward and one backward in turn, stage s holds PP - s micro-batches. The interleaved schedule runs a
        whole group of micro-batches through each part before the next part, which adds to twice the distance to the
        last stage.
        """
        after = self.pipeline - 1 - stage
        if self.virtual == 1:
            return min(after + 1, micro_batches)
        count, group = interleaved_group(micro_batches, self.pipeline)
        return min(2 * after + (self.virtual - 1) * group + 1, count * self.virtual)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch that one context-parallel rank holds."""
        return self.micro_batch_tokens // self.context


def sizes(shape: ModelShape, gpu: Gpu, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield each (TP, PP, CP) that divides the model, with TP within a node and at most `most` GPUs in all."""
    columns = [shape.ffn] if shape.expert_layers < shape.layers else []
    columns += [shape.experts.shared_ffn] if shape.experts and shape.experts.shared_ffn else []
    columns += [shape.linear.key_heads] if shape.linear else []
    for tensor in _divisors_of_all(shape.heads, shape.kv_heads, *columns):
        if tensor > gpu.gpus_per_node:
            continue
        for pipeline in _divisors_of_all(shape.layers):
            for context in (1,) if shape.linear else CONTEXT_SIZES:
                if tensor * pipeline * context <= most:
                    yield tensor, pipeline, context


def model_layouts(workload: Workload, gpu: Gpu, most: int) -> Iterator[ModelLayout]:
    """Yield every layout of one replica, with each recomputation and token budget, without virtual parts."""
    for tensor, pipeline, context in sizes(workload.shape, gpu, most):
        _, multiple = pack_multiples(tensor, context, tensor > 1, workload.fp8)
        least = least_budget(workload, multiple)
        for factor in BUDGETS:
            for recompute in ("none", "full"):
                for expert in expert_sizes(workload.shape, tensor):
                    yield ModelLayout(tensor, pipeline, context, recompute, least * factor, expert)  # type: ignore[arg-type]


def expert_sizes(shape: ModelShape, tensor: int) -> list[int]:
    """Return the EP sizes that the trainer accepts with this TP: 1 if TP can split each expert, and (with ETP 1)
    divisors and multiples of TP."""
    if shape.experts is None:
        return [1]
    number = shape.experts.number
    spread = [n for n in (2, 4, 8, 16, 32, 64) if number % n == 0 and (n % tensor == 0 or tensor % n == 0)]
    cut = shape.experts.ffn % tensor == 0 and (tensor == 1 or not shape.biases)
    return ([1] if cut else []) + spread


def in_parts(shape: ModelShape, layout: ModelLayout) -> Iterator[ModelLayout]:
    """Yield the layout with 2 to MOST_PARTS virtual parts per stage, which keep more activations than one part."""
    layers = shape.layers // layout.pipeline
    if layout.pipeline > 1:
        yield from (replace(layout, virtual=n) for n in range(2, MOST_PARTS + 1) if layers % n == 0)


def server_sizes(shape: ModelShape, gpu: Gpu, nodes: int | None = None) -> list[tuple[int, int]]:
    """Return the tensor-parallel sizes of a server that divide the heads, each with the number of nodes that the server
    spans: powers of two within a node, and 2 or 4 whole nodes.

    Args:
        nodes: that each server must span; None: any number.
    """
    inside = [(size, 1) for size in (1, 2, 4, 8, 16) if size <= gpu.gpus_per_node]
    every = inside + [(n * gpu.gpus_per_node, n) for n in (2, 4)]
    if nodes is not None:
        every = [(nodes * size, nodes) for size, _ in inside]
    return [(size, n) for size, n in every if shape.heads % size == 0]


def _divisors_of_all(*numbers: int) -> list[int]:
    return [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
