"""Memory of one GPU by part, in bytes: trainers and servers.

Workload, ModelLayout, Gpu -> Memory -> search.py (fits or not, and why not). Weights, gradients and optimizer are exact
counts. Activations are the elements that each kind of layer keeps for the backward pass: for the local layers fitted to
the live bytes of real runs on a CPU (`tests/unit/plan`), for Transformer Engine's counted by hand and never measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_daro.config.actor import KEPT_LOGITS_BYTES, LOGPROB_TILES
from megatron_daro.config.model_shape import ExpertShape, LinearShape
from megatron_daro.data.schedule import LINEAR_CHUNK
from megatron_daro.families import families
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.layout import (
    Cut,
    ModelLayout,
    adapter_parameters,
    buffer_elements,
    counts,
    own_sides,
)
from megatron_daro.workshop.plan.workload import Workload

RESERVE_BYTES = 2 * 2**30
"""CUDA context and workspaces of cuBLAS and Transformer Engine in a GPU process: an assumption, not a measurement."""
GROUP_BYTES = 0.25 * 2**30
"""NCCL's buffers for each process group with several ranks that a rank is in: an assumption."""
FRAGMENTS = 0.1
"""Share of activations and logits that the allocator cannot use, since lengths differ from batch to batch: assumed."""
UNEVEN_EXPERTS = 0.5
"""Share by which the tokens of the fullest rank's experts exceed the mean in the worst micro-batch: assumed."""
SERVED_ADAPTERS = 8
"""Versions of the adapters that a server has room for (`max_loras_per_batch` of SGLang)."""
SERVER_RESERVE_BYTES = 4 * 2**30
"""CUDA context, process groups, CUDA graphs and prefill activations of a server; a colocated server is assumed to keep
as much while the trainer has the GPU."""
HEADROOM = 0.95
"""Share of a GPU's memory that a layout may take."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU by part."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    critic: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    fp8: float = 0.0
    margin: float = 0.0
    kv_cache: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        parts = self.parts()
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Elements that a layer keeps for each token, as multiples of hidden size h, query width q, key width k (one
    multiple for keys and values together) and MLP width f. `query_norm`, `key_norm` are added with QK norms. copies:
    multiple of h for each expert that a token is sent to; `ffn` then applies to the expert's width."""

    hidden: float
    query: float
    key: float
    ffn: float
    query_norm: float
    key_norm: float
    copies: float


LOCAL_FP32 = LayerActivations(6.2, 2.65, 2.9, 5.0, 2.1, 3.1, 3.0)
LOCAL_BF16 = LayerActivations(8.2, 2.7, 2.8, 5.0, 3.1, 2.9, 3.0)
# Transformer Engine, no dropout, flash attention: inputs and outputs of norms (4 h); queries, keys, values and the
# output of attention (2 q + 2 k); the MLP's first product and the input of its second (3 f); the inputs of QK norms.
ENGINE = LayerActivations(4.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0)


def _less_of_frozen(workload: Workload, kinds: LayerActivations) -> LayerActivations:
    """Return what layers with frozen weights keep: not the inputs of products without an adapter, nor, in the local
    layers' norms, what the weights are multiplied with. An input that is also kept for another purpose still counts:
    that of the router, and the output of Transformer Engine's attention."""
    if workload.adapters is None:
        return kinds
    shape, adapted = workload.shape, {weight.role for weight in workload.adapters.weights}
    attention = any(weight.of_hidden and weight.role != "gate_up" for weight in workload.adapters.weights)
    dense, local = 1 - shape.expert_layers / shape.layers, kinds is not ENGINE
    return LayerActivations(
        hidden=kinds.hidden - (not attention) - dense * ("gate_up" not in adapted) - 2 * local,
        query=kinds.query - local * ("attention_output" not in adapted),
        key=kinds.key,
        ffn=kinds.ffn - ("down" not in adapted),
        query_norm=kinds.query_norm - local,
        key_norm=kinds.key_norm - local,
        copies=kinds.copies - 1,
    )


def layer_elements(workload: Workload, kinds: LayerActivations) -> float:
    """Return the elements that one layer keeps for one token, over all tensor-parallel ranks together."""
    shape, kinds = workload.shape, _less_of_frozen(workload, kinds)
    query, key = (heads * (shape.head_dim + shape.value_dim) / 2 for heads in (shape.heads, shape.kv_heads))
    dense, mixed = shape.layers - shape.expert_layers, shape.expert_layers
    mlp = dense * kinds.ffn * shape.ffn
    if shape.experts:
        mlp += mixed * _expert_elements(shape.experts, shape.hidden, kinds)
    elements = kinds.hidden * shape.hidden + mlp / shape.layers
    own = (kinds.query + shape.gated) * query + kinds.key * key
    own += (kinds.query_norm * query + kinds.key_norm * key) * shape.qk_norm
    if linear := shape.linear:
        share = len(linear.layers) / shape.layers
        own = own * (1 - share) + share * _linear_elements(linear, workload.dtype_bytes)
    if shape.latent:  # input and output of each latent's norm
        elements += 2 * ((shape.latent.query_rank or 0) + shape.latent.kv_rank)
    return elements + own


def _linear_elements(linear: LinearShape, dtype_bytes: int) -> float:
    """Return the elements that linear attention, computed by torch operators, keeps for a token: three forms each of
    what the convolution takes and of the values; and in fp32, for each value head, queries and keys in four forms,
    values in five, two rows of a chunk's scores in two forms each, and the token's share of the chunk's first state."""
    convolved = 2 * linear.keys + linear.values
    scores = 4 * LINEAR_CHUNK + linear.key * linear.value / LINEAR_CHUNK
    own = linear.value_heads * (8 * linear.key + 5 * linear.value + scores)
    return 3 * convolved + 3 * linear.values + own * 4 / dtype_bytes


def _expert_elements(experts: ExpertShape, hidden: int, kinds: LayerActivations) -> float:
    """Return the elements that the experts of a layer keep for a token, which is copied to each chosen expert and whose
    outputs are gathered again, and the few that the router keeps."""
    chosen = experts.chosen * (kinds.copies * hidden + kinds.ffn * experts.ffn)
    return chosen + kinds.ffn * experts.shared_ffn + 3 * experts.number


def adapter_elements(workload: Workload, layout: ModelLayout) -> float:
    """Return the elements that a layer's adapters keep on one rank for each token, as a mean over the layers: A x, and
    a share of the matrices joined for one product (actor/lora.py), whose size does not depend on the tokens."""
    if workload.adapters is None:
        return 0.0
    kept = 0.0
    for weight in workload.adapters.weights:
        inputs, outputs = own_sides(weight, layout.tensor)
        each = 1.0 if weight.by_rows else 1 / layout.tensor
        own = weight.matrices * (each + (inputs + outputs) / layout.tokens_per_rank)
        kept += workload.adapters.rank * own * len(weight.layers) / workload.shape.layers
    return kept


def recomputed_elements(workload: Workload, kinds: LayerActivations) -> float:
    """Return how many of `layer_elements` selective recomputation does not keep: all of a dense MLP ("mlp") or of the
    experts ("moe") except the input, or the products of the experts' activation function ("moe_act"). "core_attn" and
    "layernorm" save nothing, since fused attention and fused norms do not keep what they would recompute.
    """
    shape, recomputed, kinds = workload.shape, workload.recomputed, _less_of_frozen(workload, kinds)
    mlp = (shape.layers - shape.expert_layers) * kinds.ffn * shape.ffn * ("mlp" in recomputed)
    if shape.experts and "moe" in recomputed:
        mlp += shape.expert_layers * _expert_elements(shape.experts, shape.hidden, kinds)
    elif shape.experts and "moe_act" in recomputed and workload.adapters is None:
        mlp += shape.expert_layers * shape.experts.chosen * shape.experts.ffn
    return mlp / shape.layers


def widest_elements(workload: Workload) -> int:
    """Return the elements that the widest product of a layer has for one token: gate and up of its MLP or experts."""
    shape = workload.shape
    return 2 * max(shape.ffn, shape.experts.chosen * shape.experts.ffn if shape.experts else 0)


def activations(
    workload: Workload, layout: ModelLayout, kinds: LayerActivations, *, stage: int = 0, micro_batches: int = 1
) -> float:
    """Return the most bytes that the layers of a stage keep, over all micro-batches in flight there.

    Args:
        workload, layout: what runs.
        kinds: of the layers.
        stage: 0 .. PP - 1.
        micro_batches: of a step and rank.
    """
    shape = workload.shape
    under_way = layout.under_way(stage, micro_batches)
    layers = shape.layers // (layout.pipeline * layout.virtual)
    layer = layer_elements(workload, kinds) / layout.tensor + adapter_elements(workload, layout)
    hidden = shape.hidden / layout.tensor
    outside = hidden * ((stage == 0) + 2 * (stage == layout.pipeline - 1))  # embedding; final norm and its input
    if layout.recompute == "full":
        # One layer at a time is recomputed, and then has gradients too. The last stage does not add them: its logits
        # are larger, and exist at another time.
        gradient = widest_elements(workload) / layout.tensor if stage < layout.pipeline - 1 else 0
        kept = under_way * (layers * hidden + outside / layout.virtual) + layer + gradient
    else:
        again = recomputed_elements(workload, kinds) / layout.tensor  # exist for one layer at a time
        kept = under_way * (layers * (layer - again) + outside / layout.virtual) + again
    return kept * layout.tokens_per_rank * workload.dtype_bytes


def logits(workload: Workload, layout: ModelLayout, *, on_cpu: LayerActivations | None = None) -> float:
    """Return the bytes of the last stage while log-probs are computed: tiles of logits, gathered hidden states and
    their fp32 gradient, the gradient of the output layer. A CPU also keeps the logits for the backward pass if they are
    few; a recomputed layer, which `activations` has counted, only exists after them, so it is subtracted.

    Args:
        workload, layout: what runs.
        on_cpu: what the layers on a CPU keep; None: on a GPU.
    """
    shape, tokens = workload.shape, layout.tokens_per_rank
    rows = shape.padded_vocab(layout.tensor) // layout.tensor
    tile_tokens, tile_columns = LOGPROB_TILES["cpu" if on_cpu else "gpu"]
    tile_tokens = workload.chunk_tokens or tile_tokens
    tile = min(tile_tokens, tokens) * min(tile_columns, rows) * 4
    hidden = tokens * shape.hidden * (2 * workload.dtype_bytes + 4)
    trained = workload.adapters is None
    weight = rows * shape.hidden * workload.dtype_bytes * trained
    accumulator = min(tile_columns, rows) * shape.hidden * 4 * trained if workload.dtype_bytes == 2 else 0
    kept: float = 4 * tokens * min(rows, shape.vocab)
    if on_cpu is None or kept > KEPT_LOGITS_BYTES:
        kept = 0
    elif layout.recompute == "full":
        kept -= layer_elements(workload, on_cpu) / layout.tensor * tokens * workload.dtype_bytes
    return max(kept, 0) + 2 * tile + hidden + weight + accumulator


def static_bytes(
    workload: Workload, cut: Cut, stage: int, shards: int, expert_shards: int = 1, *, critic: bool = False
) -> tuple[float, float, float, int]:
    """Return a rank's bytes of weights, gradients and optimizer, and its elements. Frozen weights have only weights.

    Args:
        shards: ranks that share the optimizer's state, DP * CP. expert_shards: the same for experts.
        critic: count the critic instead of the policy.
    """
    shape, distributed, adapters = workload.shape, workload.distributed_optimizer, workload.adapters
    if critic:
        assert workload.critic is not None
        shape, adapters = workload.critic, None
    shared = shards if distributed else 0
    buffer = buffer_elements(
        shape, cut, stage, shards=shared, expert_shards=expert_shards, critic=critic, adapters=adapters
    )
    rest, experts = counts(shape, cut, stage, critic, adapters)
    elements = rest + experts
    frozen = sum(counts(shape, cut, stage)) if adapters else 0
    # fp32 moments; with bf16 also an fp32 copy of the weights. The parameters lie in a buffer of their own.
    own = rest / shards + experts / expert_shards if distributed else elements
    state = (8 if workload.dtype_bytes == 4 else 12) * own
    return workload.dtype_bytes * (buffer + frozen), 4 * buffer, state, elements + frozen


def expert_shards_of(layout: ModelLayout, shards: int) -> int:
    """Return how many ranks share the optimizer state of the experts. Args: shards: DP * CP."""
    return max(shards * layout.tensor // (layout.cut.expert * layout.cut.expert_tensor), 1)


def trainer_memory(
    workload: Workload, layout: ModelLayout, *, shards: int, micro_batches: int, on_gpu: bool = True
) -> Memory:
    """Return the memory of the fullest rank: in the first stage, with the most micro-batches in flight, the second, or
    the last, with the logits.

    Args:
        workload, layout: what runs.
        shards: DP * CP.
        micro_batches: of a step and rank.
        on_gpu: a GPU process (with bf16 Transformer Engine's layers); else the local layers on a CPU.
    """
    stages = {0, min(1, layout.pipeline - 1), layout.pipeline - 1}
    totals = [_stage_memory(workload, layout, stage, shards, micro_batches, on_gpu) for stage in stages]
    return max(totals, key=lambda memory: memory.total)


def _stage_memory(
    workload: Workload, layout: ModelLayout, stage: int, shards: int, micro_batches: int, on_gpu: bool
) -> Memory:
    expert_shards = expert_shards_of(layout, shards)
    weights, gradients, optimizer, elements = static_bytes(workload, layout.cut, stage, shards, expert_shards)
    second = (
        static_bytes(workload, layout.cut, stage, shards, expert_shards, critic=True) if workload.critic else (0.0,) * 4
    )
    # If policy and critic take turns, only one is on the GPU: the larger counts.
    beside = sum(second[:3]) - (weights + gradients + optimizer) * workload.critic_offload
    fp8_elements = max(elements, second[3]) if workload.critic_offload else elements + second[3]
    local = LOCAL_FP32 if workload.dtype_bytes == 4 else LOCAL_BF16
    widest = workload.shape.hidden
    kinds = ENGINE if on_gpu and workload.dtype_bytes == 2 else local
    kept = activations(workload, layout, kinds, stage=stage, micro_batches=micro_batches)
    if workload.critic:  # the models run one after the other: only one has activations at a time
        its_own = replace(workload, shape=workload.critic, adapters=None)
        kept = max(kept, activations(its_own, layout, kinds, stage=stage, micro_batches=micro_batches))
        widest = max(widest, workload.critic.hidden)
    last = stage == layout.pipeline - 1
    tiles = logits(workload, layout, on_cpu=None if on_gpu else kinds) if last else 0.0
    hidden = layout.tokens_per_rank * widest * workload.dtype_bytes
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        critic=max(beside, 0.0),
        activations=kept,
        logits=tiles,
        # Hidden states gathered over TP, what the pipeline sends and receives, and what a weight sync takes beyond the
        # activations and logits, which do not exist then.
        buffers=2 * hidden * (layout.tensor > 1)
        + 2 * hidden * (layout.pipeline > 1)
        + max(sync_bytes(workload, layout.tensor) - kept - tiles, 0.0),
        # Transformer Engine keeps an fp8 copy of each weight, and its transpose.
        fp8=2.0 * fp8_elements if workload.fp8 else 0.0,
        margin=FRAGMENTS * (kept + tiles) + _uneven_share(workload, layout) * kept if on_gpu else 0.0,
        reserve=RESERVE_BYTES + GROUP_BYTES * _groups(layout, shards) if on_gpu else 0.0,
    )


def _uneven_share(workload: Workload, layout: ModelLayout) -> float:
    """Return the share of the activations that the fullest rank's experts add to the mean. It is smaller with full
    recomputation, where only one layer's activations exist at a time."""
    if workload.shape.experts is None or layout.expert == 1:
        return 0.0
    dense = replace(workload, shape=replace(workload.shape, experts=None, ffn=0))
    experts = 1 - layer_elements(dense, ENGINE) / layer_elements(workload, ENGINE)
    return UNEVEN_EXPERTS * experts * (1.0 if layout.recompute == "none" else 0.3)


def _groups(layout: ModelLayout, shards: int) -> int:
    """Return how many process groups a rank is in: of all ranks, TP, PP, CP, the optimizer's shares, experts."""
    return 1 + sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context, shards, layout.expert))


def largest_tensor_bytes(workload: Workload) -> float:
    """Return the bytes of the model's largest tensor under its Hugging Face name."""
    shape = workload.shape
    widest = max(
        shape.vocab,
        shape.heads * shape.head_dim * (1 + shape.gated),
        shape.ffn,
        shape.experts.ffn if shape.experts else 0,
    )
    if shape.experts and families()[shape.family].stacked:
        widest = max(widest, 3 * shape.experts.ffn * shape.experts.number)  # gate, up and down at once
    return widest * shape.hidden * workload.dtype_bytes


def sync_bytes(workload: Workload, tensor: int) -> float:
    """Return the bytes that a sending rank holds in a weight sync: two buckets, and with tensor parallelism the largest
    tensor twice, as gathered parts and whole. A tensor larger than a bucket is sent by itself (sync/buckets.py).
    Adapters that are sent alone go through host memory and take nothing."""
    if workload.adapters and workload.adapters.alone:
        return 0.0
    return 2 * workload.bucket_bytes + (2 * largest_tensor_bytes(workload) if tensor > 1 else 0.0)


def kv_bytes_per_token(workload: Workload, tensor: int) -> float:
    """Return the bytes of keys and values of one token on one GPU of a server."""
    shape, num_bytes = workload.shape, 1 if workload.cache_fp8 else workload.dtype_bytes
    if shape.latent:  # the latent and the rotary key, whole on every GPU
        return shape.layers * (shape.latent.kv_rank + shape.latent.rotary) * num_bytes
    heads = max(shape.kv_heads / tensor, 1)
    return 2 * (shape.layers - len(shape.linear_layers)) * heads * shape.head_dim * num_bytes


def state_bytes(workload: Workload, tensor: int) -> float:
    """Return the bytes of linear attention's fp32 state for one answer on one GPU of a server."""
    linear = workload.shape.linear
    return 4 * len(linear.layers) * linear.value_heads * linear.key * linear.value / tensor if linear else 0.0


def server_weight_bytes(workload: Workload) -> float:
    """Return the bytes of a server's weights; with fp8, embedding and output layer keep the trainer's type."""
    shape = workload.shape
    outside = shape.vocab * shape.hidden * (1 if shape.tie else 2)
    inside = (shape.num_parameters - outside) * (1 if workload.servers_fp8 else workload.dtype_bytes)
    return inside + outside * workload.dtype_bytes


def server_memory(workload: Workload, gpu: Gpu, tensor: int) -> Memory:
    """Return the memory of one GPU of a server of `tensor` GPUs; what is left after weights and reserve is KV cache.

    The server also needs room for a bucket, or for the largest tensor if that is larger; or, if only adapters are sent,
    for SERVED_ADAPTERS versions of them. With `server_fraction`, weights and cache take at most that share of the GPU.
    """
    weights = server_weight_bytes(workload) / tensor
    bucket = max(workload.bucket_bytes, largest_tensor_bytes(workload))
    if workload.adapters and workload.adapters.alone:
        each = sum(adapter_parameters(workload.adapters, Cut(tensor), range(workload.shape.layers)))
        bucket = SERVED_ADAPTERS * each * workload.dtype_bytes
    room = gpu.memory_bytes - SERVER_RESERVE_BYTES - bucket
    if workload.server_fraction is not None:
        room = min(room, workload.server_fraction * gpu.memory_bytes)
    return Memory(weights=weights, buffers=bucket, kv_cache=max(room - weights, 0.0), reserve=SERVER_RESERVE_BYTES)


def room_of_trainer(workload: Workload, gpu: Gpu) -> float:
    """Return the bytes that a rank may take: HEADROOM of the GPU, less what a colocated server keeps meanwhile."""
    return HEADROOM * gpu.memory_bytes - SERVER_RESERVE_BYTES * workload.colocated
