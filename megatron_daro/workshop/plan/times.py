"""Seconds of a step by part: generation, log-probs, training with its communication and pipeline bubble, weight sync.

Workload, layout, Gpu, Constants -> TrainTimes and seconds -> search.py. First principles with a few efficiencies:
arithmetic against peak, bytes against bandwidth, kernels against the host that launches them. Most efficiencies were
learned from published numbers (benchmarks/plan_published.py); `--from RUN` multiplies the times by factors of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.data.schedule import CostModel, interleaved_group, local_operations
from megatron_daro.families import families
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.layout import Cut, ModelLayout, active_parameters, adapter_parameters, counts
from megatron_daro.workshop.plan.memory import (
    ENGINE,
    Memory,
    expert_shards_of,
    kv_bytes_per_token,
    layer_elements,
    server_memory,
    server_weight_bytes,
    state_bytes,
    static_bytes,
)
from megatron_daro.workshop.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Constants:
    """What the data sheets do not say. Shares are of the peak; times in seconds.

    matrices, matrices_fp8: of the arithmetic in matrix products, in bf16 and fp8. attention: of bf16 arithmetic in
    attention scores. prefill: of a server's arithmetic. decoding, expert_decoding: of memory bandwidth while a server
    decodes, for all reads but those of experts, and for experts. links, expert_links: of every link, in collectives and
    in the exchange of tokens between experts.
    passes, passes_fp8: how often each element that a layer keeps goes through the memory in a forward and a backward
    pass, and how many more times with fp8, which scales and transposes. hidden: share of the collectives' time that a
    trainer hides by overlapping them.
    layer_s, expert_layer_s: the host's time to launch a layer's kernels, forward and backward, for a dense layer and
    for one with experts, where it waits for token counts. expert_call_s: in addition for each expert on the rank, whose
    products are launched one by one. fused: share of expert_layer_s that remains if routing and permutation are fused
    kernels. schedule: share by which the host's time grows if exchanges overlap with computation.
    decode_step_s, decode_layer_s: time of a decoding step beyond its reads, and what each layer adds to it.
    link_latency_s, network_latency_s: an all-reduce of few bytes between a server's GPUs, within and beyond the links.
    imbalance: share by which the slowest data-parallel rank exceeds the mean. routing: the same for the rank whose
    experts get the most tokens. max_running: answers of a server at once. fixed_s: a step's verification, recording and
    waits that nothing hides.
    sync_links: share of a link that a weight sync reaches. sync_start_s: pausing and continuing the servers. tensor_s:
    gathering one whole tensor and putting it into a bucket. walk_s: a server's search for the place of a tensor that is
    sent by itself, for each layer.
    host_gb_s: between a GPU and its host, in 10^9 bytes a second. http_gb_s: of adapters, written by one rank as JSON
    for all ranks of all servers.
    training_factor, generation_factor, sync_factor: multiply the times of these phases; fitted from a recorded run.
    step_error, expert_step_error: factors within which nine tenths of the published steps that were learned from are
    predicted, of dense models and of mixtures of experts. run_error: the factor within which predictions from a
    recorded run were (docs/plan.md).
    """

    matrices: float = 0.472
    matrices_fp8: float = 0.492
    attention: float = 0.728
    passes: float = 8.61
    passes_fp8: float = 5.76
    prefill: float = 0.5
    decoding: float = 0.938
    expert_decoding: float = 0.543
    links: float = 0.7
    expert_links: float = 0.632
    hidden: float = 0.95
    layer_s: float = 5e-4
    expert_layer_s: float = 0.016
    expert_call_s: float = 0.000158
    fused: float = 0.337
    schedule: float = 0.693
    decode_step_s: float = 3e-3
    decode_layer_s: float = 0.00014
    link_latency_s: float = 1e-5
    network_latency_s: float = 1.72e-05
    imbalance: float = 0.05
    routing: float = 0.291
    max_running: int = 1024
    host_gb_s: float = 25.0
    http_gb_s: float = 0.5
    sync_links: float = 0.678
    sync_start_s: float = 0.3
    tensor_s: float = 2.07e-05
    walk_s: float = 1.26e-05
    fixed_s: float = 5.34
    training_factor: float = 1.0
    generation_factor: float = 1.0
    sync_factor: float = 1.0
    step_error: float = 1.24
    expert_step_error: float = 1.44
    run_error: float = 1.2


@dataclass(frozen=True, slots=True)
class TrainTimes:
    """Seconds of the trainers on one batch: `compute` and `communication` of training, `bubble` of the pipeline,
    `logprobs`: forward passes without training, `turns`: moving a policy and a critic that take turns on the GPUs."""

    compute: float
    communication: float
    bubble: float
    logprobs: float
    turns: float = 0.0

    @property
    def train(self) -> float:
        """Seconds of the optimizer steps."""
        return self.compute + self.communication + self.bubble + self.turns

    @property
    def total(self) -> float:
        """Seconds of the optimizer steps and the passes beside them."""
        return self.train + self.logprobs


def micro_batches_of(workload: Workload, layout: ModelLayout, data: int) -> int:
    """Return the number of micro-batches of an update on one data-parallel rank. If lengths differ, packing is assumed
    to leave a tenth of the budget empty."""
    tokens = workload.tokens / workload.minibatches / data
    samples = workload.samples / workload.minibatches / data
    even = workload.response_Q[0] == workload.response_Q[-1]
    fill = (
        (layout.micro_batch_tokens // workload.longest) * workload.longest if even else 0.9 * layout.micro_batch_tokens
    )
    return max(1, min(int(np.ceil(tokens / fill - 1e-9)), int(np.ceil(samples))))


def train_times(workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants) -> TrainTimes:
    """Return the times of one batch on `data` replicas of this layout."""
    num = micro_batches_of(workload, layout, data)
    taken = num if layout.virtual == 1 else interleaved_group(num, layout.pipeline)[0]
    tokens = workload.tokens / workload.minibatches / data / num / layout.context  # of a micro-batch on one rank
    whole, on_host = _stage_s(workload, layout, tokens, gpu, constants)
    on_gpu = whole  # frozen weights have no gradients of their own
    if workload.adapters:
        on_gpu, _ = _stage_s(workload, layout, tokens, gpu, constants, operations=4)
    again = (1.0 if layout.recompute == "full" else _recomputed_share(workload)) / 3
    traffic = _layer_traffic(workload, layout, tokens, gpu, constants)
    uneven = 1 + constants.imbalance * (not workload.practice.balanced)
    one = max((on_gpu + again * whole) * uneven, on_host * (1 + again))
    compute = workload.minibatches * (taken * one + _optimizer_s(workload, layout, data, gpu, constants))
    inner = workload.minibatches * taken * traffic
    outer = workload.minibatches * _data_parallel_s(workload, layout, data, num, gpu, constants)
    idle = (layout.pipeline - 1) / (taken * layout.virtual)
    bubble = workload.minibatches * taken * (one + traffic) * idle
    alone = max(whole * uneven, on_host / workload.practice.logprobs_at_once)  # a micro-batch without gradients
    forward = num * workload.minibatches * (alone + 0.4 * traffic) / 3
    # The critic sees the same tokens, for its values and in training, and all its weights are trained.
    critic = active_parameters(workload.critic) / active_parameters(workload.shape) if workload.critic else 0.0
    passes = (workload.extra_passes - (workload.critic is not None) + critic) * forward * (1 + idle)
    factor = constants.training_factor
    models = factor * (1 + critic * whole / on_gpu) * workload.epochs
    turns = _turns_s(workload, layout, data, constants) if workload.critic_offload else 0.0
    return TrainTimes(models * compute, models * (inner + outer), models * bubble, factor * passes, turns)


def _turns_s(workload: Workload, layout: ModelLayout, data: int, constants: Constants) -> float:
    """Return the seconds in which policy and critic swap places on the GPU: before the values, after the last update
    for the sync, and twice per update, when the critic's gradients move too."""
    shards = data * layout.context
    experts = expert_shards_of(layout, shards)
    own, its = (static_bytes(workload, layout.cut, 0, shards, experts, critic=c) for c in (False, True))
    steps = workload.minibatches * workload.epochs
    moved = (2 + 2 * steps) * (own[0] + own[2] + its[0] + its[2]) + 2 * steps * its[1]
    return moved / (constants.host_gb_s * 1e9)


def _recomputed_share(workload: Workload) -> float:
    """Return the share of a forward pass's products that selective recomputation repeats."""
    shape, recomputed = workload.shape, workload.recomputed
    products = 3 * shape.hidden * shape.ffn * (shape.layers - shape.expert_layers) * ("mlp" in recomputed)
    if shape.experts and "moe" in recomputed:
        columns = shape.experts.ffn * shape.experts.chosen + shape.experts.shared_ffn
        products += 3 * shape.hidden * columns * shape.expert_layers
    return products / active_parameters(shape)


_FP8_CALLS = 10 / 6
"""Kernels of an expert in fp8, relative to bf16: the six products of its two layers, plus four conversions of inputs
and gradients (grouped_linear.py of Transformer Engine)."""
_STARTED = {"none": 1.0, "router": 0.75, "partial": 0.5, "full": 0.0}
"""Share of a layer's kernels, without its experts', that the host still launches, by what runs as CUDA graphs: assumed.
"""


def _stage_s(
    workload: Workload, layout: ModelLayout, tokens: float, gpu: Gpu, constants: Constants, operations: int = 6
) -> tuple[float, float]:
    """Return the seconds of the slowest stage for one micro-batch, forward and backward: the GPU's, and the host's to
    launch kernels. operations: per parameter and token; the forward pass and the gradients of inputs and of weights
    take two each."""
    shape = workload.shape
    share = tokens / layout.tensor
    wide = constants.routing * (not workload.practice.balanced) if shape.experts else 0.0
    bf16 = gpu.bf16_tflops * 1e12 * gpu.sustained
    rate = gpu.fp8_tflops * 1e12 * gpu.sustained * constants.matrices_fp8 if workload.fp8 else bf16 * constants.matrices
    output = shape.vocab * shape.hidden
    products = operations * share * (active_parameters(shape) - output) / rate
    if workload.adapters:
        products += 6 * share * sum(adapter_parameters(workload.adapters, Cut(), range(shape.layers))) / rate
    length = float((workload.lengths_Q**2).mean() / workload.lengths_Q.mean())
    pairs = CostModel.of_model(shape).quadratic * length + local_operations(shape)
    scores = pairs * share / (bf16 * constants.attention)
    passes = constants.passes + (constants.passes_fp8 if workload.fp8 else 0)
    moved = passes * layer_elements(workload, ENGINE) * workload.dtype_bytes * shape.layers
    memory = moved * share / (gpu.memory_gb_s * 1e9)
    layers = (products + memory) * (1 + wide) + scores
    last = operations * share * output / (bf16 * constants.matrices)
    stages = layout.pipeline * layout.virtual
    # If the layers do not divide evenly, the stages are cut with the output layer counted as one more.
    slowest = layers / layout.pipeline + last if shape.layers % stages == 0 else (layers + last) / layout.pipeline
    return slowest, _host_s(workload, layout, constants)


def _host_s(workload: Workload, layout: ModelLayout, constants: Constants) -> float:
    """Return the seconds in which the host launches a stage's kernels for one micro-batch; experts' one by one."""
    shape = workload.shape
    each = constants.expert_layer_s * (constants.fused if workload.practice.fused else 1.0)
    started = (shape.layers - shape.expert_layers) * constants.layer_s + shape.expert_layers * each
    host = _STARTED[workload.practice.graphs] * started
    if shape.experts and workload.practice.graphs != "full":
        calls = shape.experts.number / layout.expert * (_FP8_CALLS if workload.fp8 else 1.0)
        host += shape.expert_layers * calls * constants.expert_call_s
    return host / layout.pipeline * (1 + constants.schedule * workload.practice.overlaps_experts)


def _optimizer_s(workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of the update itself: gradients, moments and weights go through the memory once each way."""
    rest, experts = counts(workload.shape, layout.cut, 0, adapters=workload.adapters)
    own = rest / (data * layout.context) + experts / expert_shards_of(layout, data * layout.context)
    return 28 * own / (gpu.memory_gb_s * 1e9 * constants.decoding)


def _layer_traffic(workload: Workload, layout: ModelLayout, tokens: float, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of one micro-batch in a stage's communication: TP with sequence parallelism, CP, experts, and
    to the next stage."""
    shape, layers = workload.shape, workload.shape.layers / layout.pipeline
    links, network = (1e9 * constants.links * rate for rate in (gpu.link_gb_s, gpu.network_gb_s))
    hidden = tokens * shape.hidden * workload.dtype_bytes
    seen = 1 - constants.hidden * workload.practice.overlaps
    # Forward: two gathers and two scatters; backward: the same and two more gathers; recomputation: the forward ones.
    collectives = 10 + 4 * (layout.recompute == "full")
    seconds = seen * layers * collectives * hidden * (layout.tensor - 1) / layout.tensor / links
    if layout.context > 1:
        keys = tokens * shape.kv_heads * (shape.head_dim + shape.value_dim) / layout.tensor * workload.dtype_bytes
        path = links if layout.tensor * layout.context <= gpu.linked else network
        seconds += seen * layers * 3 * keys * (layout.context - 1) / path
    if layout.expert > 1 and shape.experts:
        seen_experts = 1 - constants.hidden * workload.practice.overlaps_experts
        each = _exchange_s(workload, layout, hidden / layout.tensor, gpu, constants)
        seconds += seen_experts * layers * shape.expert_layers / shape.layers * each
    if layout.pipeline > 1:
        path = links if layout.ranks <= gpu.linked else network
        seconds += 2 * layout.virtual * hidden / layout.tensor / path
    return seconds


def _exchange_s(workload: Workload, layout: ModelLayout, hidden: float, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds in which a layer exchanges `hidden` bytes of tokens with their experts, there and back, in the
    forward and the backward pass."""
    experts = workload.shape.experts
    assert experts, "only asked of layers with experts"
    uneven = 1 + constants.routing * (not workload.practice.balanced)
    times = 4 + 2 * (layout.recompute == "full" or "moe" in workload.recomputed)
    domains = max(layout.expert / gpu.linked, 1.0)
    outside = 1 - 1 / domains
    inside = (layout.expert - 1) / layout.expert - outside
    copies = experts.chosen
    far = copies * outside
    if workload.practice.once and domains > 1:
        far = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
    rate = 1e9 * constants.expert_links
    return uneven * times * hidden * (far / (rate * gpu.network_gb_s) + copies * inside / (rate * gpu.link_gb_s))


def _data_parallel_s(
    workload: Workload, layout: ModelLayout, data: int, num: int, gpu: Gpu, constants: Constants
) -> float:
    """Return the seconds of an update in the reduction of gradients and the gather of the new weights."""
    rest, experts = counts(workload.shape, layout.cut, 0, adapters=workload.adapters)
    shards, expert_shards = data * layout.context, expert_shards_of(layout, data * layout.context)
    width = layout.ranks // layout.pipeline * data
    path = gpu.link_gb_s if width <= gpu.linked else gpu.network_gb_s
    moved = rest * (shards - 1) / shards + experts * (expert_shards - 1) / expert_shards
    practice = workload.practice
    seen = 1 - constants.hidden * practice.overlaps
    seen_reduction = 1 - constants.hidden * (practice.overlaps or practice.overlaps_reduction)
    each = seen_reduction * practice.gradient_bytes + seen * workload.dtype_bytes
    if practice.gathers:
        each = num * (seen_reduction * practice.gradient_bytes + seen * 2 * workload.dtype_bytes)
    return moved * each / (1e9 * constants.links * path)


def generation_s(
    workload: Workload, tensor: int, servers: int, gpu: Gpu, constants: Constants, *, batches_at_once: int = 0
) -> float:
    """Return the seconds until `servers` servers of `tensor` GPUs have generated a batch.

    Answers that run at once on a server end one after another in the order of their lengths. A decoding step reads the
    weights, and the keys and values of the answers that still run. If the cache or `max_running` allows fewer answers
    than are requested, the rest follow: waves of work at full width, and one tail. With `batches_at_once` there is no
    tail, since answers of the next batches take the places of those that ended.
    """
    shape = workload.shape
    memory = server_memory(workload, gpu, tensor)
    kv_token = kv_bytes_per_token(workload, tensor)
    each = max(workload.generated / servers, 1.0)
    mean_context = workload.mean_prompt / 2 + workload.mean_response / 2
    state = state_bytes(workload, tensor)
    held = memory.kv_cache / (kv_token * max(mean_context, 1) + state)
    at_once = min(each * max(batches_at_once, 1), constants.max_running, held)
    if at_once < 1:
        return float("inf")
    bandwidth = gpu.memory_gb_s * 1e9 * constants.decoding
    # Segments between two lengths: in each, a fixed number of answers still run, with a mean context.
    lengths = workload.response_Q
    starts = np.concatenate(([0.0], lengths[:-1]))
    steps = lengths - starts
    running = at_once * (1 - np.arange(len(lengths)) / len(lengths))
    context = workload.mean_prompt + (starts + lengths) / 2
    rest, experts = _parameters_read(workload, running)
    width = server_weight_bytes(workload) / shape.num_parameters
    weights = (rest + experts * constants.decoding / constants.expert_decoding) * width / tensor / bandwidth
    windowed = len(shape.windowed) / shape.layers
    seen = context * (1 - windowed) + np.minimum(context, shape.window) * windowed
    cache = running * (seen * kv_token + 2 * state) / bandwidth  # a state is read and written
    arithmetic = running * 2 * active_parameters(shape) / tensor / _server_rate(workload, gpu, constants)
    talk = _decode_traffic(workload, running, tensor, gpu, constants)
    own = constants.decode_step_s + shape.layers * constants.decode_layer_s
    step = own + np.maximum(weights + cache, arithmetic) + talk
    tail = 0.0 if batches_at_once else float((steps * step).sum())
    waves = each / at_once - (not batches_at_once)
    # Waves before the last run at full width all the time, so the mean answer counts and not the longest.
    full = float(step[0]) * workload.mean_response * max(waves, 0.0)
    prefill = _prefill_s(workload, tensor, servers, gpu, constants)
    return constants.generation_factor * (tail + full + prefill)


def _parameters_read(workload: Workload, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many parameters a decoding step reads: outside the experts, and of the experts that some running
    answer has chosen."""
    shape = workload.shape
    if shape.experts is None:
        return np.full_like(running, shape.num_parameters), np.zeros_like(running)
    one = shape.experts.chosen / shape.experts.number
    experts = (shape.num_parameters - shape.num_active_parameters) / (1 - one)
    missed = (1 - one) ** np.maximum(running, 1.0)
    return np.full_like(running, shape.num_parameters - experts), experts * (1 - missed)


def _decode_traffic(workload: Workload, running: np.ndarray, tensor: int, gpu: Gpu, constants: Constants) -> np.ndarray:
    """Return the seconds of a decoding step in the all-reduces between a server's GPUs, two for each layer."""
    if tensor == 1:
        return np.zeros_like(running)
    moved = running * workload.shape.hidden * workload.dtype_bytes * 2 * (tensor - 1) / tensor
    far = tensor > gpu.linked
    path = gpu.network_gb_s if far else gpu.link_gb_s
    each = moved / (path * 1e9 * constants.links) + (constants.network_latency_s if far else constants.link_latency_s)
    return 2 * workload.shape.layers * each


def _prefill_s(workload: Workload, tensor: int, servers: int, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds to prefill the prompts; the answers of a group share one in the prefix cache."""
    tokens = workload.generated / workload.prompts_shared * workload.mean_prompt
    rate = _server_rate(workload, gpu, constants) * tensor * servers
    return tokens * 2 * active_parameters(workload.shape) / rate


def _server_rate(workload: Workload, gpu: Gpu, constants: Constants) -> float:
    return 1e12 * constants.prefill * (gpu.fp8_tflops if workload.servers_fp8 else gpu.bf16_tflops)


def offload_s(memory: Memory, constants: Constants) -> float:
    """Return the seconds to offload a rank's weights and optimizer state to the host and onload them again."""
    return 2 * (memory.weights + memory.optimizer) / (constants.host_gb_s * 1e9)


def step_error(workload: Workload, constants: Constants) -> float:
    """Return the factor within which nine tenths of the published steps that were learned from are predicted, or the
    smaller `run_error` if a recorded run has set the factors."""
    if constants.generation_factor != 1.0 or constants.training_factor != 1.0:
        return constants.run_error
    return constants.expert_step_error if workload.shape.experts else constants.step_error


def sync_s(
    workload: Workload,
    layout: ModelLayout,
    gpu: Gpu,
    constants: Constants,
    *,
    near: bool = False,
    buckets: bool = True,
    pauses: bool = True,
    server_gpus: int = 1,
) -> float:
    """Return the seconds to send new weights to all servers.

    The ranks of a stage gather its tensors whole, over TP and EP, and one of them sends. Every GPU of a server receives
    all tensors and keeps its own part, so that the stages together are no faster than its link. If only adapters are
    sent they go by HTTP, in base64, with a copy for each GPU of a server, and nothing pauses.

    Args:
        workload, layout, gpu, constants: what runs.
        near: the fast links connect servers and trainers, or they share GPUs.
        buckets: each stage sends its tensors in buckets; else tensors are sent one by one, and for each a server walks
            through all of its layers (verl; load_weights of vLLM's models).
        pauses: count the time in which servers pause and continue.
        server_gpus: GPUs of all servers.
    """
    if workload.adapters and workload.adapters.alone:
        elements = sum(adapter_parameters(workload.adapters, Cut(), range(workload.shape.layers)))
        written = elements * workload.dtype_bytes * 4 / 3 * server_gpus
        return constants.sync_factor * written / (constants.http_gb_s * 1e9)
    shape, link, network = workload.shape, gpu.link_gb_s * 1e9, gpu.network_gb_s * 1e9
    rest, experts = weight_bytes(shape, workload.dtype_bytes)
    far = layout.expert > gpu.linked
    gathered = rest * (layout.tensor - 1) / layout.tensor / link
    gathered += experts * (layout.expert - 1) / layout.expert / (network if far else link)
    sent = (rest + experts) / (link if near else network)
    tensors = _num_tensors(shape)
    own = tensors * constants.tensor_s / layout.pipeline
    if not buckets:
        own = tensors * (constants.tensor_s + shape.layers * constants.walk_s)
    seconds = (gathered / layout.pipeline + sent) / constants.sync_links + own
    return constants.sync_factor * (pauses * constants.sync_start_s + seconds)


def _num_tensors(shape: ModelShape) -> int:
    """Return the number of Hugging Face tensors in a model's layers."""
    each = 6 + 3 * shape.qkv_bias + 2 * shape.qk_norm + shape.sinks + shape.biases
    if shape.latent:
        each = 9 if shape.latent.query_rank else 7
    mixed = 0
    if shape.experts:
        others = (
            1 + 3 * (shape.experts.shared_ffn > 0) + (shape.experts.scores == "sigmoid") + shape.experts.shared_gate
        )
        mixed = shape.expert_layers * (others + 3 * shape.experts.number)
        if families()[shape.family].stacked:
            mixed = shape.expert_layers * (2 + len(families()[shape.family].stacked))
    linear = len(shape.linear_layers) * (_linear_tensors(shape) - each)
    return shape.layers * each + linear + 3 * (shape.layers - shape.expert_layers) + mixed


def _linear_tensors(shape: ModelShape) -> int:
    tensors = families()[shape.family].tensors
    return 2 + sum(len(names) for role, names in tensors.items() if role.startswith("linear_"))


def weight_bytes(shape: ModelShape, dtype_bytes: int) -> tuple[float, float]:
    """Return the bytes of a model's weights: without experts, and of the experts."""
    experts = 0
    if shape.experts:
        one = 3 * shape.hidden * shape.experts.ffn + (2 * shape.experts.ffn + shape.hidden) * shape.biases
        experts = one * shape.experts.number * shape.expert_layers
    return dtype_bytes * (shape.num_parameters - experts), dtype_bytes * experts
