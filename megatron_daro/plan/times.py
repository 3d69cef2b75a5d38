"""Seconds of a step by part: generation, log-probs, training with its communication and pipeline bubble, weight sync.

Place in the data flow: Workload, layout, Gpu, Constants -> StepTimes -> search.py. First principles with a few
efficiencies: arithmetic against peak, bytes against bandwidth. The efficiencies are assumptions until `--from RUN` or a
user's own numbers replace them (docs/plan.md says how far off the published ones are).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_daro.data.schedule import CostModel, interleaved_group
from megatron_daro.plan.gpus import Gpu
from megatron_daro.plan.layout import ModelLayout
from megatron_daro.plan.memory import kv_bytes_per_token, server_memory
from megatron_daro.plan.parameters import active_parameters, counts
from megatron_daro.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Constants:
    """What the data sheets do not say. Shares are of the peak; times in seconds.

    training, prefill: of the GPU's arithmetic; decoding: of its memory's bandwidth; links: of every link.
    layer_s: launching one layer's kernels, forward and backward; decode_step_s: one step of a server beside its reads.
    imbalance: how much the slowest data-parallel rank exceeds the mean. max_running: answers of a server at once.
    fixed_s: a step's verification, recording and waits that nothing hides.
    training_factor, generation_factor: of all that the model finds for these phases; a recorded run sets them.
    """

    training: float = 0.5
    prefill: float = 0.5
    decoding: float = 0.6
    links: float = 0.7
    layer_s: float = 5e-4
    decode_step_s: float = 5e-3
    imbalance: float = 0.05
    max_running: int = 1024
    sync_start_s: float = 1.0
    fixed_s: float = 2.0
    training_factor: float = 1.0
    generation_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainTimes:
    """Seconds of the trainers on one batch: `compute` and `communication` of training, `bubble` of the pipeline,
    `logprobs` of the passes beside it."""

    compute: float
    communication: float
    bubble: float
    logprobs: float

    @property
    def train(self) -> float:
        """The optimizer steps."""
        return self.compute + self.communication + self.bubble

    @property
    def total(self) -> float:
        """All of it."""
        return self.train + self.logprobs


def micro_batches_of(workload: Workload, layout: ModelLayout, data: int) -> int:
    """Return the micro-batches of an update on one data-parallel rank; packing leaves a tenth of the budget empty."""
    tokens = workload.tokens / workload.updates / data
    samples = workload.samples / workload.updates / data
    longest_fill = 0.9 * layout.micro_batch_tokens
    return max(1, min(int(np.ceil(tokens / longest_fill)), int(np.ceil(samples))))


def train_times(workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants) -> TrainTimes:
    """Return what one batch costs on `data` replicas of this layout."""
    shape = workload.shape
    cost = CostModel.of_model(shape)
    operations = workload.samples * float(cost.of(workload.lengths_Q).mean())
    rate = (gpu.fp8_tflops if workload.fp8 else gpu.bf16_tflops) * 1e12 * constants.training
    if workload.fp8:
        rate = gpu.bf16_tflops * 1e12 * constants.training * 1.3  # attention, norms and the output layer stay in bf16
    again = 4 / 3 if layout.recompute == "full" else 1.0
    num = micro_batches_of(workload, layout, data)
    taken = num if layout.virtual == 1 else interleaved_group(num, layout.pipeline)[0]
    again *= taken / num  # micro-batches that train nothing fill the interleaved schedule up
    even = operations / (layout.ranks * data) / rate * (1 + constants.imbalance) * _last_stage_excess(workload, layout)
    launches = workload.updates * taken * shape.layers / layout.pipeline * constants.layer_s
    compute = max(even * again, launches)
    inner = workload.updates * taken * _layer_traffic(workload, layout, gpu, constants)
    outer = workload.updates * _data_parallel_s(workload, layout, data, gpu, constants)
    idle = (layout.pipeline - 1) / (taken * layout.virtual)
    bubble = (compute + inner) * idle
    forward = (max(even * taken / num, launches) + 0.4 * inner) / 3
    passes = workload.extra_passes * forward * (1 + idle)
    factor = constants.training_factor
    return TrainTimes(factor * compute, factor * (inner + outer), factor * bubble, factor * passes)


def _last_stage_excess(workload: Workload, layout: ModelLayout) -> float:
    """How much more the last stage computes than the mean one: it has the output layer beside its layers."""
    shape = workload.shape
    output = shape.vocab * shape.hidden
    layers = active_parameters(shape) - output
    return (layers / layout.pipeline + output) / ((layers + output) / layout.pipeline)


def _layer_traffic(workload: Workload, layout: ModelLayout, gpu: Gpu, constants: Constants) -> float:
    """Seconds of one micro-batch in a stage's collectives: TP with sequence parallelism, CP, and between stages."""
    shape, layers = workload.shape, workload.shape.layers / layout.pipeline
    links, network = (1e9 * constants.links * rate for rate in (gpu.link_gb_s, gpu.network_gb_s))
    hidden = layout.tokens_per_rank * shape.hidden * workload.dtype_bytes
    # Forward: two gathers and two scatters; backward: the same and two gathers again; recomputation: the forward's.
    collectives = 10 + 4 * (layout.recompute == "full")
    seconds = layers * collectives * hidden * (layout.tensor - 1) / layout.tensor / links
    if layout.context > 1:
        keys = 2 * layout.tokens_per_rank * shape.kv_heads * shape.head_dim / layout.tensor * workload.dtype_bytes
        path = links if layout.tensor * layout.context <= gpu.gpus_per_node else network
        seconds += layers * 3 * keys * (layout.context - 1) / path
    if layout.expert > 1 and shape.experts:
        # Tokens to their experts and back, forward and backward.
        sent = 4 * hidden / layout.tensor * shape.experts.chosen * (layout.expert - 1) / layout.expert
        path = links if layout.expert <= gpu.gpus_per_node else network
        seconds += layers * shape.expert_layers / shape.layers * sent / path
    if layout.pipeline > 1:
        seconds += 2 * layout.virtual * hidden / layout.tensor / network
    return seconds


def _data_parallel_s(workload: Workload, layout: ModelLayout, data: int, gpu: Gpu, constants: Constants) -> float:
    """Seconds of an update in the reduction of fp32 gradients and the gather of the new weights, not overlapped."""
    shards = data * layout.context
    if shards == 1:
        return 0.0
    elements = sum(counts(workload.shape, layout.cut, 0))
    width = layout.ranks // layout.pipeline * data
    path = gpu.link_gb_s if width <= gpu.gpus_per_node else gpu.network_gb_s
    return elements * (4 + workload.dtype_bytes) * (shards - 1) / shards / (1e9 * constants.links * path)


def generation_s(workload: Workload, tensor: int, servers: int, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds until `servers` servers of `tensor` GPUs have generated a batch.

    Answers that run at once on a server end one after another in the order of their lengths; a step of decoding reads
    the weights and the keys and values of those that still run. Where the cache or `max_running` holds fewer than are
    asked for, the rest comes after them: waves of work at full width, and one tail.
    """
    shape = workload.shape
    memory = server_memory(workload, gpu, tensor)
    kv_token = kv_bytes_per_token(workload, tensor)
    each = max(workload.generated / servers, 1.0)
    mean_context = workload.mean_prompt / 2 + workload.mean_response / 2
    at_once = min(each, constants.max_running, memory.kv_cache / kv_token / max(mean_context, 1))
    if at_once < 1:
        return float("inf")
    bandwidth = gpu.memory_gb_s * 1e9 * constants.decoding
    # Starts of the segments between two lengths; in each, a fixed number still runs, with a mean context.
    lengths = workload.response_Q
    starts = np.concatenate(([0.0], lengths[:-1]))
    steps = lengths - starts
    running = at_once * (1 - np.arange(len(lengths)) / len(lengths))
    context = workload.mean_prompt + (starts + lengths) / 2
    weights = _parameters_read(workload, running) * workload.dtype_bytes / tensor / bandwidth
    cache = running * context * kv_token / bandwidth
    arithmetic = running * 2 * active_parameters(shape) / tensor / (gpu.bf16_tflops * 1e12 * constants.prefill)
    talk = _decode_traffic(workload, running, tensor, gpu, constants)
    step = constants.decode_step_s + np.maximum(weights + cache, arithmetic) + talk
    tail = float((steps * step).sum())
    waves = each / at_once - 1
    # Waves before the last: at full width all the time, so the mean answer counts and not the longest.
    full = float(step[0]) * workload.mean_response * max(waves, 0.0)
    prefill = _prefill_s(workload, tensor, servers, gpu, constants)
    return constants.generation_factor * (tail + full + prefill)


def _parameters_read(workload: Workload, running: np.ndarray) -> np.ndarray:
    """Parameters that a decoding step reads: of the experts, those that some running answer has chosen."""
    shape = workload.shape
    if shape.experts is None:
        return np.full_like(running, shape.num_parameters)
    one = shape.experts.chosen / shape.experts.number
    experts = (shape.num_parameters - shape.num_active_parameters) / (1 - one)
    missed = (1 - one) ** np.maximum(running, 1.0)
    return shape.num_parameters - experts * missed


def _decode_traffic(workload: Workload, running: np.ndarray, tensor: int, gpu: Gpu, constants: Constants) -> np.ndarray:
    """Seconds of a decoding step in the reductions between a server's GPUs: two for each layer."""
    if tensor == 1:
        return np.zeros_like(running)
    moved = running * workload.shape.hidden * workload.dtype_bytes * 2 * (tensor - 1) / tensor
    each = moved / (gpu.link_gb_s * 1e9 * constants.links) + 1e-5
    return 2 * workload.shape.layers * each


def _prefill_s(workload: Workload, tensor: int, servers: int, gpu: Gpu, constants: Constants) -> float:
    """Prompts, of which the answers of a group share one in the cache of prefixes."""
    tokens = workload.generated / workload.prompts_shared * workload.mean_prompt
    rate = gpu.bf16_tflops * 1e12 * constants.prefill * tensor * servers
    return tokens * 2 * active_parameters(workload.shape) / rate


def sync_s(workload: Workload, layout: ModelLayout, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds to bring new weights to all servers: each stage's sender broadcasts over its network link."""
    moved = workload.shape.num_parameters * workload.dtype_bytes
    return constants.sync_start_s + moved / layout.pipeline / (gpu.network_gb_s * 1e9 * constants.links)
