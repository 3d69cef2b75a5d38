"""Checks that need a second process: one that reads this one's GPU memory, and ranks with a GPU each.

Place in the data flow: some of the checks of gpu_checks.py. Each process has a limit, and ends with its parent's wait.
On a CPU ranks meet by gloo, which rehearses the checks and proves nothing about NCCL.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import host_group
import numpy as np
import torch
from gpu_outcomes import NotHereError, Outcome, angle, need_gpu, need_gpus, need_transformer_engine

LIMIT_S = 300
HERE = Path(__file__).resolve().parent

# A process that sees the GPUs in another order, and finds the sender's as SGLang does: by its UUID.
RECEIVER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing import reductions
rebuild = reductions.rebuild_cuda_tensor
uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
reductions.rebuild_cuda_tensor = lambda *a: rebuild(*a[:6], uuids.index(a[6]), *a[7:])
received = pickle.loads(base64.b64decode(sys.stdin.read()))
"""
SUMS = "print(json.dumps({name: value.double().sum().item() for name, value in received}))"
# Into memory that was given back and taken again meanwhile, as a server's weights are; `freed` is a sum of its own.
INTO_PAUSED = """
from torch_memory_saver import torch_memory_saver as saver
with saver.region(tag="weights"):
    weights = torch.empty(2**29, dtype=torch.uint8, device="cuda")
held = torch.cuda.mem_get_info()[0]
saver.pause("weights")
freed = torch.cuda.mem_get_info()[0] - held
saver.resume("weights")
own = {name: weights[i * 2**20 :][: x.nbytes].view(x.dtype).view(x.shape) for i, (name, x) in enumerate(received)}
for name, value in received:
    own[name].copy_(value)
print(json.dumps({name: value.double().sum().item() for name, value in own.items()} | {"freed": freed}))
"""


def handles_to_a_second_process(device: torch.device, _: Path) -> Outcome:
    """Sums of bf16 and fp32 tensors as another process reads them in this one's memory."""
    need_gpu(device)
    return _received(RECEIVER + SUMS)[1]


def memory_paused(device: torch.device, _: Path) -> Outcome:
    """The same, copied into memory of torch_memory_saver that was given back and taken again meanwhile. It fails where
    less than all came free."""
    need_gpu(device)
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise NotHereError("torch_memory_saver is not installed")
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        sums, outcome = _received(RECEIVER + INTO_PAUSED)
    if sums["freed"] < 2**29:
        raise RuntimeError(f"{sums['freed']} of {2**29} bytes came free")
    return outcome


def _received(script: str) -> tuple[dict[str, float], Outcome]:
    """What a process says of two tensors whose handles it gets, and how far it is from their sums."""
    from megatron_daro.sync.handles import handles_of

    tensors = [(str(dtype), torch.randn(300, 70, device="cuda").to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    torch.cuda.synchronize()
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=base64.b64encode(handles_of(tensors)).decode(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    sums = json.loads(done.stdout)
    return sums, Outcome(max(abs(sums[n] - t.double().sum().item()) for n, t in tensors), 1e-9, "sum of a tensor")


def training(
    device: torch.device,
    directory: Path,
    *,
    family: str = "qwen2",
    options: Mapping[str, Any] | None = None,
    one_gpu: bool = False,
    **layout: int,
) -> Outcome:
    """fp32 ranks that share a model against this process alone: gradients of every parameter, then losses and gradient
    norms of DARO's steps with the distributed optimizer; the third step also from the checkpoint that the ranks saved,
    which this process loads."""
    from policy_tasks import uneven_split
    from small_models import random_batch, save_model

    save_model(family, directory)
    (directory / "checkpoint").mkdir()
    got = _ranks(device, directory, layout, "training", options or {}, one_gpu=one_gpu)
    alone, batch = _training(directory, {}, save_to=directory / "alone"), random_batch()
    resumed = _policy(directory, {}, {"name": "daro"}, **_STEPS)
    resumed.load(directory / "checkpoint")
    third = resumed.train_step(batch, uneven_split(len(batch), 3), step=3).metrics
    _same_parameters(got, alone)
    pairs = [(got[name], alone[name]) for name in alone]
    pairs += [(np.array([third[key] for key in _COMPARED]), alone["step 3"])]
    worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return Outcome(worst, 1e-4, "relative, worst of gradients and steps")


def training_bf16(
    device: torch.device, directory: Path, *, family: str = "qwen2", one_gpu: bool = False, **layout: int
) -> Outcome:
    """bf16 gradients of ranks that share a model, with Transformer Engine's layers on GPUs, against this process alone:
    the direction of each parameter's. It fails where a log-prob is further apart than 0.1 nat (of experts, half of
    them: a router that rounds otherwise sends a token elsewhere)."""
    from small_models import save_model

    if device.type == "cuda":
        need_transformer_engine()
    save_model(family, directory)
    got, alone = _ranks(device, directory, layout, "gradients", one_gpu=one_gpu), _gradients(directory, {})
    _same_parameters(got, alone)
    apart = np.abs(got.pop("logprobs") - alone.pop("logprobs"))
    if not (worst := float(np.max(apart) if family == "qwen2" else np.median(apart))) <= 0.1:
        raise RuntimeError(f"log-probs of the ranks and of one process differ by {worst} nats")
    return Outcome(max(angle(got[name], alone[name]) for name in alone), 0.01, "1 - cosine, worst of gradients")


def _same_parameters(got: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    if set(got) != set(alone):
        raise RuntimeError(f"parameters of the ranks and of one process differ: {sorted(set(got) ^ set(alone))[:4]}")


def gpu_of(rank: int, environment: Mapping[str, str]) -> str:
    """Return the GPU of a rank as CUDA_VISIBLE_DEVICES names it: of those that this process was given."""
    given = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[rank].strip() if given else str(rank)


def _ranks(
    device: torch.device,
    directory: Path,
    layout: Mapping[str, int],
    task: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    one_gpu: bool = False,
) -> dict[str, np.ndarray]:
    """Run this file once for each rank, on a GPU each where there are any; return what they found.

    Args:
        one_gpu: all ranks on the first GPU; what they exchange goes through the host.

    Raises:
        NotHereError: there are fewer GPUs than ranks. RuntimeError: a rank failed; the message ends with its words.
    """
    from megatron_daro.actor import parallel

    world = parallel.Layout(**layout).world_size
    need_gpus(device, 1 if one_gpu else world, "ranks")
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world):
            words = [directory, rank, task, json.dumps(dict(layout)), json.dumps(dict(options)), int(one_gpu)]
            command = [sys.executable, __file__, *map(str, words)]
            gpu = gpu_of(0 if one_gpu else rank, os.environ) if device.type == "cuda" else ""
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(" | ".join(text[-300:] for text in said))
    return {name: value for rank in range(world) for name, value in np.load(directory / f"rank{rank}.npz").items()}


_STEPS: Mapping[str, Any] = {"optimizer": {"distributed": True, "learning_rate": 1e-3}}
_COMPARED = ("loss/policy", "loss/grad_norm")


def _policy(
    directory: Path, layout: Mapping[str, int], algorithm: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    from policy_tasks import build_policy

    from megatron_daro.actor import parallel

    return build_policy(directory, parallel.Layout(**layout), dict(algorithm or {"name": "grpo"}), **options)


def _training(directory: Path, layout: Mapping[str, int], *, save_to: Path, **options: Any) -> dict[str, np.ndarray]:
    """What `training` compares, of this rank: gradients under Hugging Face names, and "step N"."""
    from policy_tasks import loss_terms, my_rows, save_policy, uneven_split
    from small_models import random_batch

    from megatron_daro.actor import parallel

    batch = random_batch()
    mine = batch.select(my_rows(len(batch), parallel.Layout(**layout)))
    split = uneven_split(len(mine), 3)
    daro = {"name": "daro"}
    found = dict(loss_terms(directory, parallel.Layout(**layout), batch, 3, daro, **options)["gradients"])
    policy = _policy(directory, layout, daro, **_STEPS, **options)
    for step in (1, 2, 3):
        metrics = policy.train_step(mine, split, step=step).metrics
        found[f"step {step}"] = np.array([metrics[key] for key in _COMPARED])
        if step == 2 and save_to.is_dir():
            save_policy(policy, save_to)
    return found


def _gradients(directory: Path, layout: Mapping[str, int]) -> dict[str, np.ndarray]:
    """What `training_bf16` compares, of this rank: gradients under Hugging Face names; of the last stage log-probs."""
    from policy_tasks import loss_terms
    from small_models import random_batch

    from megatron_daro.actor import parallel

    batch, sizes = random_batch(), parallel.Layout(**layout)
    logprobs = _policy(directory, layout, precision="bf16").logprobs(batch, [list(range(len(batch)))])
    gradients = loss_terms(directory, sizes, batch, 3, {"name": "daro"}, precision="bf16")["gradients"]
    return dict(gradients) | ({} if logprobs is None else {"logprobs": logprobs})


def _rank_main(directory: str, rank: str, task: str, layout: str, options: str, one_gpu: str) -> None:
    sys.path += [str(HERE), str(HERE.parent / "parallel"), str(HERE.parents[1])]
    from megatron_daro.actor import parallel

    place, sizes, given = Path(directory), json.loads(layout), json.loads(options)
    meeting = f"file://{place / 'meeting'}"
    join = host_group.join if int(one_gpu) else parallel.initialize
    join(parallel.Layout(**sizes), rank=int(rank), init_method=meeting, seed=1, timeout_s=LIMIT_S)
    work = partial(_training, save_to=place / "checkpoint") if task == "training" else _gradients
    found = work(place, sizes, **given)
    np.savez(place / f"rank{rank}.npz", **found)
    parallel.shutdown()


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
