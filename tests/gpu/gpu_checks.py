"""What must hold on a GPU, as functions that measure: run by tools/gpu_proof.py.

Place in the data flow: process groups of one rank exist already; each check builds what it needs, compares it with
transformers or with float64, and returns the largest difference beside its tolerance. The same functions run on a CPU,
which rehearses them (tests/parallel/test_gpu_proof_rehearsal.py) and proves nothing about a GPU.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gpu_processes
import gpu_runs
import numpy as np
import torch
from gpu_outcomes import NO_TRANSFORMER_ENGINE, NotHereError, Outcome, angle, need_gpu, need_transformer_engine
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
sys.path += map(str, (TESTS, TESTS / "parallel", TESTS / "unit" / "sync", TESTS.parent / "benchmarks"))

Check = Callable[[torch.device, Path], Outcome]


# --- parts ---


def packed_attention(device: torch.device, _: Path, dtype: torch.dtype = torch.float32) -> Outcome:
    """Values and gradients of the local core attention against float64, sequences of very different length."""
    from megatron_daro.actor.layers import packed_causal_attention

    torch.manual_seed(0)
    lengths = [700, 3, 0, 65, 64, 1, 130, 128]
    sizes = ((sum(lengths), 8, 64), (sum(lengths), 2, 64), (sum(lengths), 2, 64))
    exact = [torch.randn(size, dtype=torch.float64).to(dtype).double().requires_grad_() for size in sizes]
    narrow = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    want, got = packed_causal_attention(*exact, lengths), packed_causal_attention(*narrow, lengths)
    ramp = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    gradients = torch.autograd.grad((want * ramp).sum(), exact)
    own = torch.autograd.grad((got * ramp.to(device, dtype)).sum(), narrow)
    worst = max(_relative(a, b) for a, b in zip((got, *own), (want, *gradients), strict=True))
    # bf16 keeps 8 bits (2**-9 = 0.002 per rounding); inputs, probabilities and outputs are rounded.
    return Outcome(worst, 1e-5 if dtype == torch.float32 else 0.02, "relative, values and gradients")


def chunked_logprobs(
    device: torch.device, _: Path, dtype: torch.dtype = torch.float32, kernel: str = "torch"
) -> Outcome:
    """Log-prob, entropy and gradients against float64, several tiles; bf16 factors are multiplied into fp32 sums."""
    from megatron_daro.actor.logprobs import vocab_parallel_logprobs

    if kernel == "triton" and device.type != "cuda":
        raise NotHereError("Triton's kernels need a GPU; bash tests/triton_kernels.sh interprets them")
    torch.manual_seed(0)
    tokens, vocab, hidden_size = 300, 1000, 256
    exact = [torch.randn(n, hidden_size, dtype=torch.float64) * 0.2 for n in (tokens, vocab + 24)]
    exact = [x.to(dtype).double().requires_grad_() for x in exact]
    narrow = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    labels = torch.randint(0, vocab, (tokens,))
    logits = (exact[0] @ exact[1].t())[:, :vocab] / 0.7
    distribution = torch.log_softmax(logits, -1)
    want = distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)
    got = vocab_parallel_logprobs(
        *narrow, labels.to(device), vocab_size=vocab, temperature=0.7, chunk_tokens=128, chunk_vocab=256, kernel=kernel
    )
    ramp = torch.linspace(-1, 1, tokens, dtype=torch.float64)

    def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        weight = ramp.to(outputs[0].device, outputs[0].dtype)
        return torch.autograd.grad((outputs[0] * weight).sum() + (outputs[1] * weight.flip(0)).sum(), inputs)

    pairs = zip((*got, *gradients(got, narrow)), (*want, *gradients(want, exact)), strict=True)
    worst = max(_relative(a, b) for a, b in pairs)
    # bf16: the outputs are fp32 from fp32 sums; only factors of the gradients and the gradients themselves are rounded.
    return Outcome(worst, 1e-5 if dtype == torch.float32 else 0.01, "relative, values and gradients")


def fp8_blocks(device: torch.device, _: Path) -> Outcome:
    """Matrices as servers get them in fp8 blocks, cast on the device and on the CPU: numbers that differ."""
    from megatron_daro.sync.fp8_cast import cast

    torch.manual_seed(0)
    matrix_NK = (torch.randn(1000, 700) * torch.logspace(-6, 6, 700)).to(torch.bfloat16)
    pairs = zip(cast(matrix_NK.to(device)), cast(matrix_NK), strict=True)
    wrong = sum(int((got.cpu().float() != want.float()).sum()) for got, want in pairs)
    return Outcome(float(wrong), 0.0, "numbers, of numbers and scales")


def shards_over_tcp(device: torch.device, _: Path, case: str = "wider_server") -> Outcome:
    """Three updates by `sync: shards`, out of this device's memory and into it: servers of the fleet
    that lack anything, or got another number. Both ends are real, the receiving one without SGLang around it."""
    from shard_cases import checkpoint
    from shard_fleets import Fleet, case_of, failures, has_everything, synced

    from megatron_daro.sync.shard_sender import ShardSender

    given, wrong = case_of(case), 0
    fleet = Fleet(given, dtype=torch.bfloat16, device=device)
    senders = [ShardSender("127.0.0.1", fleet.calls) for _ in range(given.trainer_layout.world_size)]
    weights_HF = {name: values.to(device, torch.bfloat16) for name, values in checkpoint(given).items()}
    for _update in range(3):
        reports = synced(given, fleet, weights=weights_HF, senders=senders)
        on_host = {name: values.cpu() for name, values in weights_HF.items()}
        wrong += len(failures(reports))
        wrong += sum(not has_everything(given, fleet, server, on_host) for server in range(given.servers))
        for values in weights_HF.values():
            values *= 2
    for sender in senders:
        sender.close()
    return Outcome(float(wrong), 0.0, "servers")


# --- the policy ---


def layers_are_transformer_engines(device: torch.device, directory: Path) -> Outcome:
    """Layers of a bf16 policy that are not Transformer Engine's, and whether its attention ran unfused: sequences are
    packed, query heads share keys. Without it a machine with a GPU fails: every other row would pass, and be slow."""
    from small_models import random_batch, save_model

    from megatron_daro.actor.device import has_transformer_engine

    if device.type != "cuda":
        raise NotHereError(NO_TRANSFORMER_ENGINE)
    if not has_transformer_engine():
        raise RuntimeError("Transformer Engine cannot be imported here, and there is a GPU; docs/gpu.md installs it")
    save_model("qwen2", directory)
    policy, batch = build_policy(directory, precision="bf16"), random_batch()
    policy.logprobs(batch, _thirds(len(batch)))
    from transformer_engine.pytorch.attention import dot_product_attention

    return Outcome(float(own_layers(policy.chunks) + unfused(dot_product_attention._attention_backends)), 0.0, "layers")


def own_layers(chunks: Iterable[torch.nn.Module]) -> int:
    """How many of the layers with attention or matrices are not Transformer Engine's, by the names of their classes."""
    names = ("core_attention", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    found = [m for chunk in chunks for name, m in chunk.named_modules() if name.rpartition(".")[2] in names]
    return sum(not type(module).__name__.startswith("TE") for module in found) if found else 1


def unfused(backends: Mapping[str, Any]) -> bool:
    """Whether the last attention took neither cuDNN's fused kernel nor FlashAttention. Source: what
    transformer_engine 2.20.2 keeps in pytorch/attention/dot_product_attention/dot_product_attention.py."""
    return not (backends["use_fused_attention"] or backends["use_flash_attention"])


def policy_logprobs(device: torch.device, directory: Path, precision: str = "fp32", family: str = "qwen2") -> Outcome:
    """Log-probs against transformers in fp32 on the CPU: in fp32 of local layers, in bf16 of Transformer Engine's where
    they are installed."""
    from small_models import random_batch, save_model
    from test_logprobs_models import BF16_TOLERANCE, plain_logprobs

    hf, batch = save_model(family, directory), random_batch()
    got = build_policy(directory, precision=precision).logprobs(batch, _thirds(len(batch)))
    apart = np.abs(got - plain_logprobs(hf, batch))
    if precision == "fp32":
        return Outcome(float(apart.max()), 1e-4, "nats")
    if family == "qwen3_moe":  # a router that rounds otherwise sends a token to other experts now and then
        return Outcome(float(np.median(apart)), BF16_TOLERANCE, "nats, median")
    # YaRN makes the scores larger by its factor's square, 1.7 here: the same rounding is worth more.
    return Outcome(float(apart.max()), BF16_TOLERANCE * (1.7 if family == "qwen3_yarn" else 1.0), "nats")


def long_logprobs(device: torch.device, directory: Path) -> Outcome:
    """Sequences of 8,192 tokens (on a CPU 96), heads of 128, two query heads to a key, against transformers in fp32."""
    from test_logprobs_models import BF16_TOLERANCE, plain_logprobs

    hf, batch = _long(device, directory)
    got = build_policy(directory, precision="bf16").logprobs(batch, [[0], [1]])
    # Logits grow with the width: 256 here and 64 where the tolerance was measured.
    return Outcome(float(np.abs(got - plain_logprobs(hf, batch)).max()), 2 * BF16_TOLERANCE, "nats")


def long_gradients(device: torch.device, directory: Path) -> Outcome:
    """Gradients of the same sequences: the directions of the attention's matrices against transformers in fp32."""
    from loss_reference import reference
    from policy_tasks import collect_gradients, summed_gradients

    hf, batch = _long(device, directory)
    policy = build_policy(directory, precision="bf16", distributed=False)
    summed_gradients(policy, {"name": "grpo"}, batch, [[0, 1]])
    want = reference(hf, batch, {"name": "grpo"}).gradients
    got = {name: value for name, value in collect_gradients(policy).items() if "self_attn" in name and value.ndim > 1}
    if len(got) != 4 * hf.config.num_hidden_layers:
        raise RuntimeError(f"gradients of the attention: {sorted(got)}")
    return Outcome(max(angle(value, want[name]) for name, value in got.items()), 0.02, "1 - cosine, worst matrix")


def recomputed(device: torch.device, directory: Path) -> Outcome:
    """Gradients with full and with selective recomputation against those with every activation kept."""
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    ways = _gradients(directory, "qwen2", {}, {"recompute": "full"}, {"megatron": selective})
    # The backward pass of an attention may add up in any order.
    return Outcome(_worst(_relative, ways), 0.01, "relative, worst parameter")


def reference_pass(device: torch.device, directory: Path) -> Outcome:
    """Log-probs of the reference after a step against those before it, and those of the policy after it before and
    after that pass: the weights of the start come back, and go again."""
    from policy_tasks import reference_after_training
    from small_models import random_batch, save_model

    from megatron_daro.actor.parallel import Layout

    save_model("qwen2", directory)
    found = reference_after_training(directory, Layout(), random_batch(), precision="bf16")
    if np.abs(found["moved"] - found["before"]).max() < 1e-2:
        raise RuntimeError("the step moved nothing, so the row would show nothing")
    pairs = ((found["reference"], found["before"]), (found["moved_again"], found["moved"]))
    return Outcome(max(float(np.abs(a - b).max()) for a, b in pairs), 1e-5, "nats")


def policy_gradients_fp32(device: torch.device, directory: Path) -> Outcome:
    """Every term of the loss switched on, three micro-batches, against the reference on the CPU."""
    from loss_reference import reference
    from policy_tasks import collect_gradients, summed_gradients
    from small_models import save_model
    from test_gradients_exact import relative_difference
    from test_loss_terms import algorithm_of, batch_with_reference

    hf, batch = save_model("qwen2", directory), batch_with_reference()
    policy = build_policy(directory, precision="fp32", algorithm=algorithm_of("all"), distributed=False)
    summed_gradients(policy, algorithm_of("all"), batch, _thirds(len(batch)))
    want = reference(hf, batch, algorithm_of("all")).gradients
    # Ten times the bound of one kind of processor: two kinds sum in different orders.
    return Outcome(relative_difference(collect_gradients(policy), want), 1e-4, "relative, worst parameter")


def gradients_fused(device: torch.device, directory: Path) -> Outcome:
    """Weight gradients that the layers add to the fp32 ones themselves, against those that autograd hands over in bf16:
    three micro-batches, each layer's own, and the output layer's, which is never fused."""
    need_transformer_engine()
    ways = ({"megatron": {"gradient_accumulation_fusion": fused}, "distributed": True} for fused in (False, True))
    # A micro-batch's gradient is rounded to bf16 (2**-9) on one side only; twice would be a difference of 1.
    return Outcome(_worst(_relative, _gradients(directory, "qwen2", *ways)), 0.02, "relative, worst parameter")


def experts_fused(device: torch.device, directory: Path) -> Outcome:
    """Gradients of a mixture of experts with Transformer Engine's fused routing and permutation against those without:
    the options change the kernels, and neither the experts nor their weights."""
    need_transformer_engine()
    kernels = ("moe_permute_fusion", "moe_router_fusion")
    ways = ({"megatron": dict.fromkeys(kernels, fused)} for fused in (False, True))
    # A token whose two best experts are alike may go to another one: the direction of a matrix, not its largest number.
    return Outcome(_worst(angle, _gradients(directory, "qwen3_moe", *ways), 2), 0.01, "1 - cosine, worst matrix")


def _gradients(directory: Path, family: str, *ways: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Of one batch, with each of these options of the actor."""
    from policy_tasks import collect_gradients, summed_gradients

    batch, found = _learnable(directory, family), []
    for options in ways:
        policy = build_policy(directory, **{"precision": "bf16", "distributed": False, **options})
        summed_gradients(policy, {"name": "grpo"}, batch, _thirds(len(batch)))
        found.append(collect_gradients(policy))
    return found


def _worst(difference: Callable[..., float], ways: list[dict[str, np.ndarray]], axes: int = 0) -> float:
    """The largest difference to the first way, of parameters with so many axes or more."""
    first, *others = ways
    return max(difference(way[name], first[name]) for way in others for name in first if first[name].ndim >= axes)


def policy_steps(device: torch.device, directory: Path, **options: str) -> Outcome:
    """Six steps on one batch: the loss must fall. The difference reported is the last loss minus the first."""
    losses = _losses(directory, steps=6, **options)
    return Outcome(losses[-1] - losses[0], -1e-3, "change of the loss in six steps")


def policy_fp8(device: torch.device, directory: Path, recipe: str = "tensorwise", family: str = "qwen2") -> Outcome:
    """fp8 matrix products learn as well: needs Transformer Engine, and a GPU that has the recipe."""
    check_fp8(device, recipe)
    return policy_steps(device, directory, family=family, precision="fp8", fp8_recipe=recipe)


def policy_fp8_against_bf16(device: torch.device, directory: Path) -> Outcome:
    """Fifty steps in fp8 beside fifty in bf16, the same batch: how far the losses part, of how far bf16's fell."""
    check_fp8(device)
    plain, narrow = (_losses(directory, steps=50, precision=name) for name in ("bf16", "fp8"))
    apart = max(abs(a - b) for a, b in zip(plain, narrow, strict=True))
    return Outcome(apart / (plain[0] - plain[-1]), 0.25, "largest difference of losses, relative to their fall")


def policy_checkpoint(
    device: torch.device, directory: Path, *, precision: str = "bf16", family: str = "qwen2", trained: bool = True
) -> Outcome:
    """A policy that was saved, after its first step or before it, and one that loads it, with two steps after: layers'
    extra state and the optimizer's come back too."""
    if precision == "fp8":
        check_fp8(device)
    batch = _learnable(directory, family)
    saved, loaded = (build_policy(directory, precision=precision, learning_rate=3e-3) for _ in range(2))
    rows = _thirds(len(batch))
    if trained:
        saved.train_step(batch, rows, step=1)
    place = directory / "checkpoint"
    place.mkdir()
    saved.start_save(place)
    saved.finish_save()
    loaded.load(place)
    worst = 0.0
    for step in (2, 3):
        metrics = [policy.train_step(batch, rows, step=step).metrics for policy in (saved, loaded)]
        worst = max(worst, abs(metrics[0]["loss/policy"] - metrics[1]["loss/policy"]))
    # The kernels of a backward pass may add up in any order; what is lost in a checkpoint shows in the first digits.
    return Outcome(worst, 1e-4, "loss of two further steps")


def memory_released(device: torch.device, directory: Path) -> Outcome:
    """What a policy leaves behind on the GPU after a step, once nobody holds it."""
    need_gpu(device)

    def left() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device)

    _losses(directory, steps=1)  # libraries keep workspaces from their first call on
    before = left()
    _losses(directory, steps=1)
    return Outcome((left() - before) / 2**20, 1.0, "MiB more than before")


def memory_in_turns(device: torch.device, directory: Path) -> Outcome:
    """A policy whose memory goes to the host after a step and comes back, with a step after: bytes that stayed on the
    device, and values that came back as others."""
    from policy_tasks import everything

    from megatron_daro.types import KINDS_OF_MEMORY

    batch = _learnable(directory)
    policy = build_policy(directory, precision="bf16")
    policy.train_step(batch, _thirds(len(batch)), step=1)
    policy.train_state.optimizer.zero_grad()
    want, before = everything(policy), policy.offload(()).left
    move = policy.offload(KINDS_OF_MEMORY)
    stayed = max(move.left - (before - move.moved), 0)
    policy.onload(KINDS_OF_MEMORY)
    changed = sum(int((value != want[name]).sum()) for name, value in everything(policy).items())
    if policy.train_step(batch, _thirds(len(batch)), step=2).skipped:
        raise RuntimeError("the step after the return was refused")
    return Outcome(float(stayed + changed), 0.0, "bytes that stayed, values that changed")


def _losses(directory: Path, *, steps: int, family: str = "qwen2", **options: str) -> list[float]:
    """Losses of steps on one batch whose good answers have advantage 1, the others -1."""
    from dataclasses import replace

    batch = _learnable(directory, family)
    policy = build_policy(directory, **{"precision": "bf16", **options}, learning_rate=3e-3)
    batch = replace(batch, old_logprobs_R=policy.logprobs(batch, _thirds(len(batch))))
    losses = []
    for step in range(steps):
        result = policy.train_step(batch, _thirds(len(batch)), step=step)
        if result.skipped:
            raise RuntimeError(result.reason)
        losses.append(result.metrics["loss/policy"])
    return losses


def _learnable(directory: Path, family: str = "qwen2") -> Any:
    """Save a small model; return a batch for it."""
    from dataclasses import replace

    from small_models import random_batch, save_model

    save_model(family, directory)
    batch = random_batch(with_old=False)
    signs = np.where(batch.correct_N > 0, 1.0, -1.0).astype(np.float32)
    return replace(batch, advantages_N=signs, rollout_logprobs_R=np.full_like(batch.rollout_logprobs_R, -3.9))


def check_fp8(device: torch.device, recipe: Any = "tensorwise") -> None:
    """Raise NotHereError where matrix products in fp8 cannot run."""
    from megatron_daro.actor import precision
    from megatron_daro.config.precision import why_not

    need_transformer_engine()
    if why := why_not(recipe, precision.surroundings()):
        raise NotHereError(f"fp8 ({recipe}): {why}")


TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP 2 with sequence parallel": {"tensor": 2},
    "CP 2": {"context": 2},
    "PP 2": {"pipeline": 2},
    "EP 2 of experts": {"family": "qwen3_moe", "data": 2, "expert": 2},
}
FURTHER_RANKS: dict[str, dict[str, Any]] = {
    "DP 2, gradients overlapped": {"data": 2, "options": {"megatron": {"overlap_grad_reduce": True}}},
    "PP 2 with 2 virtual stages": {"pipeline": 2, "virtual_pipeline": 2},
    "TP 2 PP 2 DP 2": {"tensor": 2, "pipeline": 2, "data": 2},
}
FOUR_SERVERS: dict[str, Any] = {"servers": 4, "tensor": 2, "pipeline": 2}
WITH_SERVERS: dict[str, dict[str, Any]] = {
    "GPUs shared with a server": {"servers": 1, "colocate": True},
    "a server beside": {"servers": 1},
    "a server beside, weights from shards to shards": {"servers": 1, "shards_over": "tcp"},
    "a server beside, weights from shards to shards by RDMA": {"servers": 1, "shards_over": "rdma"},
    "TP 2 PP 2 with four servers beside, weights from shards to shards": FOUR_SERVERS | {"shards_over": "tcp"},
    "a server with fp8 blocks beside": {"servers": 1, "fp8_blocks": True},
    "one of two servers killed": {"servers": 2, "harm": "SIGKILL"},
    "one of two servers killed while it takes weights": {"servers": 2, "harm": "SIGKILL", "in_broadcast": True},
    "one of two servers frozen while it takes weights": {"servers": 2, "harm": "SIGSTOP", "in_broadcast": True},
    "TP 2 PP 2 with four servers beside": FOUR_SERVERS,
}
CHECKS: dict[str, Check] = {
    "fp8 blocks": fp8_blocks,
    "weights from shards to shards over TCP, memory of a GPU": shards_over_tcp,
    "weights from shards of experts to shards over TCP, memory of a GPU": partial(shards_over_tcp, case="etp"),
    "packed attention, fp32": packed_attention,
    "packed attention, bf16": partial(packed_attention, dtype=torch.bfloat16),
    "chunked log-probs, fp32": chunked_logprobs,
    "chunked log-probs, bf16": partial(chunked_logprobs, dtype=torch.bfloat16),
    "chunked log-probs in Triton, fp32": partial(chunked_logprobs, kernel="triton"),
    "chunked log-probs in Triton, bf16": partial(chunked_logprobs, dtype=torch.bfloat16, kernel="triton"),
    "layers and attention are Transformer Engine's": layers_are_transformer_engines,
    **{
        f"policy log-probs, {family} {precision}": partial(policy_logprobs, precision=precision, family=family)
        for precision, families in {
            "fp32": ("qwen2", "qwen3", "llama", "qwen3_yarn", "qwen3_moe"),
            "bf16": ("qwen2", "qwen3_yarn", "qwen3_moe"),
        }.items()
        for family in families
    },
    "policy log-probs, heads of 128, 8,192 tokens": long_logprobs,
    "policy gradients, heads of 128, 8,192 tokens": long_gradients,
    "policy gradients, recomputed": recomputed,
    "reference pass, bf16": reference_pass,
    "policy gradients, fp32": policy_gradients_fp32,
    "weight gradients fused, bf16": gradients_fused,
    "routing and permutation of experts fused, bf16": experts_fused,
    "policy steps, bf16": policy_steps,
    "policy steps, fp8": policy_fp8,
    "policy steps, qwen3_moe bf16": partial(policy_steps, family="qwen3_moe"),
    "policy steps, fp8 blockwise": partial(policy_fp8, recipe="blockwise", family="qwen3_wide"),
    "policy steps, fp8 mxfp8": partial(policy_fp8, recipe="mxfp8"),
    "fp8 against bf16, 50 steps": policy_fp8_against_bf16,
    "checkpoint, bf16": policy_checkpoint,
    "checkpoint, fp8": partial(policy_checkpoint, precision="fp8"),
    "checkpoint before the first step, bf16": partial(policy_checkpoint, trained=False),
    "checkpoint before the first step, fp8": partial(policy_checkpoint, trained=False, precision="fp8"),
    "checkpoint, qwen3_moe bf16": partial(policy_checkpoint, family="qwen3_moe"),
    "checkpoint, qwen3_moe fp8": partial(policy_checkpoint, family="qwen3_moe", precision="fp8"),
    "memory released": memory_released,
    "memory to the host and back": memory_in_turns,
    "weights by handles to a second process": gpu_processes.handles_to_a_second_process,
    "memory paused under handles": gpu_processes.memory_paused,
    "ten steps, the embedded engine, resumed": gpu_runs.resumed,
    **{
        f"training, {name}": partial(gpu_processes.training, **sizes)
        for name, sizes in (TWO_RANKS | FURTHER_RANKS).items()
    },
    **{
        f"training, bf16, {name}": partial(gpu_processes.training_bf16, **sizes)
        for name, sizes in (TWO_RANKS | {"TP 2 CP 2 PP 2": {"tensor": 2, "context": 2, "pipeline": 2}}).items()
    },
    **{
        f"ranks on one GPU, {name}": partial(gpu_processes.training_bf16, one_gpu=True, **sizes)
        for name, sizes in (TWO_RANKS | {"TP 2 PP 2": {"tensor": 2, "pipeline": 2}}).items()
    },
    "ranks on one GPU, DP 2, fp32 steps": partial(gpu_processes.training, one_gpu=True, data=2),
    "a rank killed in a step is replaced, DP 2": partial(gpu_runs.lost_rank, data=2),
    **{f"ten steps, {name}": partial(gpu_runs.ten_steps, **given) for name, given in WITH_SERVERS.items()},
}


def gpus_of(check: Check) -> int:
    """GPUs that a check needs: those of its ranks and of servers beside them."""
    given = check.keywords if isinstance(check, partial) else {}
    if given.get("one_gpu"):
        return 1
    ranks = math.prod(given.get(name, 1) for name in ("tensor", "pipeline", "context", "data"))
    return ranks if given.get("colocate") else ranks + given.get("servers", 0)


def build_policy(
    directory: Path,
    *,
    precision: str,
    algorithm: dict[str, Any] | None = None,
    distributed: bool = True,
    learning_rate: float = 1e-4,
    **options: Any,
) -> Any:
    """A policy of one rank. options: further ones of the actor."""
    from policy_tasks import build_policy as build

    from megatron_daro.actor.parallel import Layout

    optimizer = {"distributed": distributed, "learning_rate": learning_rate}
    return build(
        directory, Layout(), algorithm or {"name": "grpo"}, precision=precision, optimizer=optimizer, **options
    )


def _thirds(num_samples: int) -> list[list[int]]:
    from policy_tasks import uneven_split

    return uneven_split(num_samples, 3)


def _long(device: torch.device, directory: Path) -> tuple[Any, Any]:
    """Save a model with heads of 128; return transformers' and two sequences, a right answer and a wrong one."""
    from gpu_measures import samples_of
    from small_models import VOCAB, save_model

    tokens = 8192 if device.type == "cuda" else 96
    return save_model("qwen3_wide", directory), samples_of([tokens] * 4, VOCAB).select([0, 1])


def _relative(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value."""
    got, want = torch.as_tensor(got).detach().double().cpu(), torch.as_tensor(want).detach().cpu()
    return float((got - want).abs().max() / want.abs().max())
