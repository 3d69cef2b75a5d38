"""Speed and memory of one GPU: log-probs, train steps of Qwen2.5's sizes and where their time goes, recomputation, and
what healing costs a rank.

Place in the data flow: rows of tools/gpu_proof.py, in the form of gpu_checks.py. On a CPU all sizes are tiny, which
rehearses them and measures nothing. A step of a model that does not fit one GPU is reckoned from two depths: their
difference is what a layer costs, and the rest of the layers is added.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_outcomes import Measured, Outcome


def _qwen(hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size, vocab_size):
    return {"tie_word_embeddings": vocab_size < 152_000, **locals()}


QWEN_15B, TINY = _qwen(1536, 28, 12, 2, 8960, 151_936), _qwen(64, 8, 4, 2, 96, 200)
QWEN_7B, QWEN_32B = _qwen(3584, 28, 28, 4, 18_944, 152_064), _qwen(5120, 64, 40, 8, 27_648, 152_064)
LOGPROB_GOAL = 3.0
"""Log-probs with entropy may take this many times the bare products."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one repetition: median seconds, and peak memory in GiB, alone and with what was there before (0 on a CPU).

    operations: floating-point operations of the model's products, without recomputation.
    """

    seconds: float
    extra_gib: float
    peak_gib: float
    operations: float = 0.0
    forward_backward_s: float = 0.0

    def deeper(self, other: Speed, times: float) -> Speed:
        """This and so many times what the other has more. Memory too: as if all layers were here."""
        values = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Speed(*(low + times * (high - low) for low, high in values))


def measure(run: Callable[[], object], device: torch.device, repeats: int) -> Speed:
    """Two runs to warm up, then the median; the device is waited for on both sides of each."""
    for _ in range(2):
        run()
    before = _waited(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        _waited(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return Speed(statistics.median(times), peak - before, peak)


def _waited(device: torch.device) -> float:
    """Wait for the GPU; GiB that are in use."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**30


def logprobs(device: torch.device, _: Path, dtype: torch.dtype) -> Outcome | Measured:
    """Forward and backward of log-prob and entropy with the output layer, 8,192 tokens: ours, plain torch, the bare
    products, and on a GPU ours with the kernel that is not the default."""
    from megatron_daro.actor.logprobs import vocab_parallel_logprobs

    torch.manual_seed(0)
    tokens, vocab, width = (8192, 151_936, 1024) if device.type == "cuda" else (64, 300, 32)
    hidden_TD, weight_VD = inputs = [
        (torch.randn(n, width, device=device) * 0.05).to(dtype).requires_grad_() for n in (tokens, vocab)
    ]
    labels = torch.randint(0, vocab, (tokens,), device=device)

    def ours(kernel: str = "auto") -> None:
        logprobs, entropy = vocab_parallel_logprobs(hidden_TD, weight_VD, labels, kernel=kernel)
        torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), inputs)

    def plain() -> None:
        distribution = torch.log_softmax((inputs[0] @ inputs[1].t()).float(), -1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        logprobs = distribution.gather(1, labels[:, None])[:, 0]
        torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), inputs)

    def products() -> None:
        logits = inputs[0] @ inputs[1].t()
        torch.autograd.grad(logits, inputs, logits.detach())

    ways: dict[str, Callable[[], None]] = {"ours": ours, "plain": plain, "products": products}
    if device.type == "cuda":
        other = "torch" if dtype.itemsize == 2 else "triton"
        ways[f"ours_{other}"] = partial(ours, other)
    found = {name: measure(way, device, 5) for name, way in ways.items()}
    numbers = {f"{name}_ms": speed.seconds * 1e3 for name, speed in found.items()}
    numbers |= {f"{name}_gib": speed.extra_gib for name, speed in found.items()}
    if device.type != "cuda":
        return Measured(numbers)
    return Outcome(found["ours"].seconds / found["products"].seconds, LOGPROB_GOAL, "bare products", numbers)


def train_step(
    device: torch.device,
    directory: Path,
    *,
    shape: Mapping[str, Any],
    depths: tuple[int, ...],
    goal: float = 0.0,
    samples: int = 8,
    tokens: int = 2048,
    unequal: bool = False,
    forward: bool = False,
    precision: str = "bf16",
    **options: Any,
) -> Outcome | Measured:
    """A train step of a whole model (forward, backward, optimizer), or its log-prob pass, with random weights, in two
    packs: of all its layers, or reckoned from two depths.

    Args:
        shape: fields of a Qwen2 configuration. depths: layers that are measured, one number or two.
        goal: part of the GPU's bf16 peak that must be reached; fp8 has twice that peak.
        samples, tokens: of the batch; of a sample. unequal: four times as many samples with as many tokens together,
            their lengths spread as those of answers are. forward: the log-prob pass. options: of the actor.
    """
    from gpu_checks import check_fp8

    if precision == "fp8":
        check_fp8(device, options.get("fp8_recipe", "tensorwise"))
    if device.type != "cuda":
        shape, depths, samples, tokens = TINY, (1, 8)[-len(depths) :], 8, 32
    lengths = [tokens] * samples
    if unequal:
        spread = np.random.default_rng(0).lognormal(0.0, 1.0, 4 * samples)
        lengths = np.maximum(spread / spread.sum() * samples * tokens, 2).astype(int).tolist()
    options = {"precision": precision, "forward": forward, **options}
    layers = [{**shape, "num_hidden_layers": depth} for depth in depths]
    found = [_steps((device, directory / str(n)), own, lengths, **options) for n, own in enumerate(layers)]
    first, last = found[0], found[-1]
    numbers = {"peak_gib_measured": last.peak_gib, "extra_gib_measured": last.extra_gib}
    if len(depths) > 1:
        layer = first.deeper(last, 1 / (depths[1] - depths[0]))
        numbers |= {"layer_ms": (layer.seconds - first.seconds) * 1e3, "layer_gib": layer.peak_gib - first.peak_gib}
        if last.seconds <= first.seconds and device.type == "cuda":
            raise RuntimeError(f"{depths[1]} layers took {last.seconds:.3g} s, {depths[0]} took {first.seconds:.3g} s")
        last = first.deeper(last, (shape["num_hidden_layers"] - depths[0]) / (depths[1] - depths[0]))
    numbers |= {"ms": last.seconds * 1e3, "forward_backward_ms": last.forward_backward_s * 1e3}
    numbers["tokens_per_s"] = sum(lengths) / last.seconds
    peak = peak_tflops(device)
    if not peak:
        return Measured(numbers)
    share = last.operations / last.seconds / (peak * 1e12)
    numbers["percent_of_peak"] = share * 100
    if not goal:
        return Measured(numbers)
    return Outcome(goal / share, 1.0, f"of the time at {goal:.0%} of the peak", numbers)


def peak_tflops(device: torch.device) -> float:
    """Peak of this GPU in bf16; 0 where it is none of those that `megatron-daro plan` knows."""
    from megatron_daro.workshop.plan.gpus import GPUS

    name = torch.cuda.get_device_name(device).upper().split() if device.type == "cuda" else []
    return next((gpu.bf16_tflops for gpu in GPUS.values() if gpu.name.partition("-")[0].upper() in name), 0.0)


def _random_policy(
    device: torch.device, directory: Path, shape: Mapping[str, Any], lengths: Sequence[int], **options: Any
) -> tuple[Any, Any, list[list[int]]]:
    """A policy of one rank with random weights, a batch, and its two packs; on a CPU tiny ones."""
    from gpu_checks import build_policy
    from transformers import AutoModelForCausalLM, Qwen2Config

    from megatron_daro.data.schedule import schedule

    gc.collect()  # a policy before
    torch.manual_seed(0)
    config = Qwen2Config(**shape)
    with device:  # a GPU draws billions of numbers in a second, a CPU in minutes
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    packs = [list(pack) for pack in schedule(lengths, 1, sum(lengths) // 2 + max(lengths) // 16)[0]]
    return build_policy(directory, **options), samples_of(lengths, config.vocab_size), packs


def _steps(
    place: tuple[torch.device, Path], shape: Mapping[str, Any], lengths: list[int], *, forward: bool, **options: Any
) -> Speed:
    from megatron_daro.data.schedule import CostModel

    policy, batch, packs = _random_policy(*place, shape, lengths, **options)
    own: list[float] = []

    def step() -> None:
        if forward:
            policy.logprobs(batch, packs)
            return
        result = policy.train_step(batch, packs, step=1)
        if result.skipped:
            raise RuntimeError(result.reason)
        own.append(result.metrics["timing/forward_backward_s"])

    speed = measure(step, place[0], 5 if place[0].type == "cuda" else 2)
    # The output layer is computed for trained tokens only.
    untrained = float(batch.lengths_N.sum() - batch.trained_tokens_N.sum())
    operations = CostModel.of_model(policy.shape).of(batch.lengths_N).sum()
    operations -= 6.0 * policy.shape.hidden * policy.shape.vocab * untrained
    operations /= 3 if forward else 1
    return replace(speed, operations=float(operations), forward_backward_s=statistics.median(own[2:] or [0.0]))


KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "wgmma", "::mm", "addmm"),
    "attention": ("fmha", "flash", "sdpa", "cudnn_generated", "attn"),
    "logprobs": ("_statistics_kernel", "_gradient_kernel"),
    "norms": ("norm",),
    "rotary": ("rope", "rotary"),
    "swiglu": ("swiglu", "silu", "triton_poi"),
    "optimizer": ("adam", "multi_tensor", "l2norm"),
    "copies": ("memcpy", "memset", "copy"),
    "elementwise": ("elementwise", "vectorized", "reduce"),
}
"""Kernels by parts of their names; the first kind that fits."""


def profiled(device: torch.device, directory: Path) -> Measured:
    """Where the time of a step of 7B goes, six layers of it: milliseconds by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    size = ({**QWEN_7B, "num_hidden_layers": 6}, [2048] * 8) if device.type == "cuda" else (TINY, [32] * 8)
    policy, batch, packs = _random_policy(device, directory, *size, precision="bf16")
    for _ in range(3):
        policy.train_step(batch, packs, step=1)
    _waited(device)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as events:
        policy.train_step(batch, packs, step=1)
        _waited(device)
        wall = time.perf_counter() - start
    numbers: dict[str, float] = defaultdict(float)
    for event in events.key_averages():
        us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kind = next((k for k, words in KINDS.items() if any(w in event.key.lower() for w in words)), "other")
        numbers[f"{kind}_ms"] += us / 1e3
    return Measured({"wall_ms": wall * 1e3, **numbers})


def healed(device: torch.device, directory: Path) -> Outcome:
    """What healing does to a rank, half of 1.5B: snapshot, state to the host and back, abort of the groups from another
    thread, new groups, restore; and the step after it against the same step before."""
    from gpu_checks import build_policy

    from megatron_daro.actor import parallel
    from megatron_daro.actor.double_buffer import DoubleBuffer
    from megatron_daro.types import KINDS_OF_MEMORY

    on_gpu, buffer, numbers = device.type == "cuda", DoubleBuffer(1), dict[str, float]()
    size = ({**QWEN_15B, "num_hidden_layers": 14}, [2048] * 8) if on_gpu else (TINY, [32] * 8)
    precision = "bf16" if on_gpu else "fp32"
    policy, batch, packs = _random_policy(device, directory, *size, precision=precision)
    policy.train_step(batch, packs, step=1)
    for serial in (1, 2):  # the first takes pinned memory
        start = time.perf_counter()
        policy.start_snapshot(buffer.open(None), serial).wait()
        size = sum(policy.snapshot_bytes.values()) / 1e9
        numbers[f"snapshot_{serial}_gb_per_s"] = size / (time.perf_counter() - start)
    for turn in (1, 2):
        away, back = policy.offload(KINDS_OF_MEMORY), policy.onload(KINDS_OF_MEMORY)
        numbers[f"offload_{turn}_gb_per_s"] = away.moved / 1e9 / away.seconds
        numbers[f"onload_{turn}_gb_per_s"] = back.moved / 1e9 / back.seconds
    want = policy.train_step(batch, packs, step=2).metrics["loss/policy"]
    start = time.perf_counter()
    aborting = threading.Thread(target=parallel.abort, args=((), ()), daemon=True)
    aborting.start()
    aborting.join(60)
    if aborting.is_alive():
        raise RuntimeError("the abort of the groups took more than 60 s")
    policy.end_background_work()
    del policy
    parallel.shutdown()
    gc.collect()
    parallel.initialize(parallel.Layout(), seed=1, timeout_s=300)
    numbers["regroup_s"] = time.perf_counter() - start
    policy = build_policy(directory, precision=precision, to_be_restored=True)
    policy.restore(buffer.whole(2))
    _waited(device)
    numbers["healed_s"] = time.perf_counter() - start
    got = policy.train_step(batch, packs, step=2).metrics["loss/policy"]
    # The kernels of a backward pass may add up in any order; a lost state shows in the first digits.
    return Outcome(abs(got - want), 1e-3 if on_gpu else 1e-6, "loss of the step after", numbers)


def samples_of(lengths: Sequence[int], vocab: int) -> Any:
    """Samples of these lengths, an eighth of each its prompt; groups of four with two right answers each."""
    from megatron_daro.types import StepBatch

    samples, lengths_N = len(lengths), np.array(lengths)
    prompt_lengths_N = np.maximum(lengths_N // 8, 1)
    total = int((lengths_N - prompt_lengths_N).sum())
    correct = np.tile([1, 0, 1, 0], samples // 4).astype(np.uint8)
    return StepBatch(
        tokens_T=np.random.default_rng(0).integers(0, vocab, sum(lengths)).astype(np.int32),
        lengths_N=lengths_N,
        prompt_lengths_N=prompt_lengths_N,
        loss_mask_R=np.ones(total, np.uint8),
        rollout_logprobs_R=np.full(total, -np.log(vocab), np.float32),
        rewards_N=correct.astype(np.float32),
        correct_N=correct,
        bins_N=np.full(samples, 2),
        group_ids_N=np.repeat(np.arange(samples // 4), 4),
        advantages_N=np.where(correct > 0, 1.0, -1.0).astype(np.float32),
        truncated_N=np.zeros(samples, np.uint8),
        rollouts_per_prompt=4,
    )


_STEP_15B = partial(train_step, shape=QWEN_15B, depths=(28,))
_STEP_7B = partial(train_step, shape=QWEN_7B, depths=(2, 6))
MEASURES: dict[str, dict[str, Callable[[torch.device, Path], Outcome | Measured]]] = {
    "Steps of whole models": {
        "step of 1.5B, bf16": partial(_STEP_15B, goal=0.45),
        "step of 1.5B, fp8": partial(_STEP_15B, precision="fp8", goal=0.30),
        "step of 7B, bf16": partial(_STEP_7B, goal=0.50),
        "step of 7B, profiled": profiled,
        "log-prob pass of 7B, bf16": partial(_STEP_7B, forward=True, unequal=True, goal=0.55),
    },
    "Recomputation": {
        "step of 7B, recompute full": partial(_STEP_7B, recompute="full"),
        "step of 7B, recompute selective, MLPs": partial(
            _STEP_7B, megatron={"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
        ),
    },
    "Healing": {"snapshot, offload, abort, regroup, restore": healed},
    "Long packs": {
        "step of 32B, packs of 22,528 tokens": partial(
            train_step, shape=QWEN_32B, depths=(1, 2), samples=4, tokens=11_264, recompute="full"
        ),
    },
    "fp8": {
        "step of 7B, fp8 blockwise": partial(_STEP_7B, precision="fp8", fp8_recipe="blockwise"),
        "step of 7B, fp8": partial(_STEP_7B, precision="fp8", goal=0.45),
        "step of 7B, fp8, unequal lengths": partial(_STEP_7B, precision="fp8", unequal=True, goal=0.70),
    },
    "The output layer": {
        "speed of log-probs, bf16": partial(logprobs, dtype=torch.bfloat16),
        "speed of log-probs, fp32": partial(logprobs, dtype=torch.float32),
    },
}
"""Title of a part -> its items."""
