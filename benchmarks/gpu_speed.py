"""Speed on one device: log-probs with entropy beside the plain way and the bare products; train steps, and their MFU.

A train step of a whole model is bracketed: two depths are measured, their difference is what a layer costs, and the
rest of the layers is added. So a model of 7B, whose optimizer needs several GPUs, is timed on one.

Called by tools/gpu_check.py, which sets up the process group and writes the report. Sizes are arguments, so that a CPU
can rehearse it with small ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Qwen2.5-1.5B and -7B.
QWEN_15B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    **QWEN_15B,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Median seconds of one repetition, and peak memory above what was there before, in GiB (None on a CPU).

    operations: floating-point operations of the model's products in one repetition, without recomputation; 0: unknown.
    """

    name: str
    seconds: float
    peak_gib: float | None
    tokens: int
    operations: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def mfu(self, peak_tflops: float) -> float:
        """Part of the GPU's peak arithmetic that the model's products used."""
        return self.operations / self.seconds / (peak_tflops * 1e12)


def measure(name: str, run: Callable[[], object], device: torch.device, tokens: int, repeats: int) -> Speed:
    """Two runs to warm up, then the median; the device is waited for on both sides of each."""
    on_gpu = device.type == "cuda"
    before = 0
    for _ in range(2):
        run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
    return Speed(name, statistics.median(times), peak, tokens)


def logprob_speed(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int = 8192,
    vocab: int = 151_936,
    hidden: int = 1024,
    repeats: int = 5,
) -> list[Speed]:
    """Forward and backward of log-prob + entropy with the output layer: ours, plain, the bare products; on a
    GPU also ours with the kernel that is not the default there."""
    from megatron_daro.actor.logprobs import vocab_parallel_logprobs

    torch.manual_seed(0)
    hidden_TD, weight_VD = inputs = [
        (torch.randn(n, hidden, device=device) * 0.05).to(dtype).requires_grad_() for n in (tokens, vocab)
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

    label = f"log-probs {str(dtype).removeprefix('torch.')}, {tokens} x {vocab}"
    ways = {"ours": ours, "plain": plain, "bare products": products}
    if device.type == "cuda":
        other = "torch" if dtype.itemsize == 2 else "triton"
        ways[f"ours, logprob_kernel={other}"] = partial(ours, other)
    return [measure(f"{label}, {name}", way, device, tokens, repeats) for name, way in ways.items()]


def bracketed(
    device: torch.device,
    directory: Path,
    build_policy: Callable[..., Any],
    *,
    shape: Mapping[str, Any],
    depths: tuple[int, int] = (2, 6),
    rehearsed: bool = False,
    **options: Any,
) -> Speed:
    """A train step of a model, from steps of two smaller depths.

    Args:
        shape: fields of a Qwen2 configuration. depths: layers of the two, each of which fits the device.
        rehearsed: noise is let through, as the deeper one's own step: the machine may be busy.
        options: of `train_step_speed`.

    Returns:
        Seconds and operations of the whole model. Memory: of the deeper of the two.

    Raises:
        RuntimeError: the deeper one was not slower: what was measured is noise.
    """
    few, many = (
        train_step_speed(
            device, directory / str(depth), build_policy, shape={**shape, "num_hidden_layers": depth}, **options
        )
        for depth in depths
    )
    layers, between = shape["num_hidden_layers"], depths[1] - depths[0]
    if many.seconds <= few.seconds and rehearsed:
        return many
    if many.seconds <= few.seconds:
        raise RuntimeError(f"{depths[1]} layers took {many.seconds:.3g} s, {depths[0]} took {few.seconds:.3g} s")
    more = (layers - depths[0]) / between

    def whole(low: float, high: float) -> float:
        return low + more * (high - low)

    return replace(
        many,
        name=f"{layers} layers from {depths[0]} and {depths[1]}",
        seconds=whole(few.seconds, many.seconds),
        operations=whole(few.operations, many.operations),
    )


def train_step_speed(
    device: torch.device,
    directory: Path,
    build_policy: Callable[..., Any],
    *,
    shape: Mapping[str, Any],
    precision: str = "bf16",
    samples: int = 8,
    sample_tokens: int = 2048,
    repeats: int = 5,
) -> Speed:
    """A whole train step (forward, backward, optimizer) with random weights, in packs of half the samples.

    Args:
        build_policy: (directory, precision=...) -> policy of one rank.
        shape: fields of a Qwen2 configuration.
        samples, sample_tokens: the batch, in two micro-batches: packs of 8,192 tokens.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(**shape)
    with device:  # a GPU draws billions of numbers in a second, a CPU in minutes
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    policy = build_policy(directory, precision=precision)
    batch = equal_samples(samples, sample_tokens, config.vocab_size)
    half = samples // 2
    micro_batches = [list(range(half)), list(range(half, samples))]

    def step() -> None:
        result = policy.train_step(batch, micro_batches, step=1)
        if result.skipped:
            raise RuntimeError(result.reason)

    size = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
    name = f"train step {precision}, {size / 1e6:.0f} M parameters"
    speed = measure(name, step, device, samples * sample_tokens, repeats)
    return replace(speed, operations=train_operations(config, batch))


def train_operations(config: Any, batch: Any) -> float:
    """Operations of forward and backward: 6 for each weight of a product and token (of the output layer: for trained
    tokens only, since the others' log-probs are not computed), and causal attention's 6 * T^2 * D a layer (half of the
    scores). Source: arXiv 2204.02311, appendix B, with half the scores; no recomputation."""
    head = config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * head * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    layers = 6.0 * config.num_hidden_layers * layer * float(batch.lengths_N.sum())
    output = 6.0 * config.hidden_size * config.vocab_size * float(batch.trained_tokens_N.sum())
    scores = (
        6.0 * config.num_hidden_layers * config.hidden_size * float((batch.lengths_N.astype(np.float64) ** 2).sum())
    )
    return layers + output + scores


def equal_samples(samples: int, sample_tokens: int, vocab: int) -> Any:
    """Samples of one length, an eighth of it prompt; groups of four with two right answers each."""
    from megatron_daro.types import StepBatch

    rng = np.random.default_rng(0)
    prompt = max(sample_tokens // 8, 1)
    total = samples * (sample_tokens - prompt)
    correct = np.tile([1, 0, 1, 0], samples // 4).astype(np.uint8)
    return StepBatch(
        tokens_T=rng.integers(0, vocab, samples * sample_tokens).astype(np.int32),
        lengths_N=np.full(samples, sample_tokens),
        prompt_lengths_N=np.full(samples, prompt),
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
