"""Checks that need a second process on a GPU, or a second GPU.

Place in the data flow: two of the checks of gpu_checks.py. Each process has a limit, and ends with its parent's wait.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_outcomes import NotHereError, Outcome

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
print(json.dumps({name: value.double().sum().item() for name, value in received}))
"""


def handles_to_a_second_process(device: torch.device, _: Path) -> Outcome:
    """Sums of bf16 and fp32 tensors as another process reads them in this one's memory."""
    from megatron_daro.sync.send import handles_of

    if device.type != "cuda":
        raise NotHereError("handles are of a GPU's memory, and there is none")
    tensors = [(str(dtype), torch.randn(300, 70, device=device).to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    torch.cuda.synchronize()
    done = subprocess.run(
        [sys.executable, "-c", RECEIVER],
        input=base64.b64encode(handles_of(tensors)).decode(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    sums = json.loads(done.stdout)
    return Outcome(max(abs(sums[n] - t.double().sum().item()) for n, t in tensors), 1e-9, "sum of a tensor")


def two_ranks(device: torch.device, directory: Path, **layout: int) -> Outcome:
    """Log-probs of two ranks over NCCL against one rank, bf16."""
    if device.type != "cuda":
        raise NotHereError("NCCL needs GPUs, and there is none")
    if torch.cuda.device_count() < 2:
        raise NotHereError("there is one GPU, and NCCL takes no two ranks on one")
    from small_models import save_model

    save_model("qwen2", directory)
    two, one = _ranks(directory, 2, layout), _ranks(directory, 1, {})
    return Outcome(float(np.nanmax(np.abs(two - one))), 0.1, "nats")


def gpu_of(rank: int, environment: Mapping[str, str]) -> str:
    """Return the GPU of a rank as CUDA_VISIBLE_DEVICES names it: of those that this process was given."""
    given = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[rank].strip() if given else str(rank)


def _ranks(directory: Path, world: int, layout: dict[str, int]) -> np.ndarray:
    """Run this file once for each rank, each with a GPU; return the log-probs of rank 0."""
    meeting = directory / f"ranks{world}{''.join(layout)}"
    processes = []
    for rank in range(world):
        words = [directory, meeting, str(rank), json.dumps(layout)]
        command = [sys.executable, __file__, *map(str, words)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu_of(rank, os.environ)}
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(" | ".join(text[-300:] for text in said))
    return np.load(f"{meeting}.npy")


def _rank_main(directory: str, meeting: str, rank: str, layout: str) -> None:
    sys.path += [str(HERE), str(HERE.parent / "parallel"), str(HERE.parents[1])]
    from policy_tasks import build_policy
    from small_models import random_batch

    from megatron_daro.actor import parallel

    sizes: dict[str, Any] = json.loads(layout)
    ranks = parallel.Layout(**sizes)
    parallel.initialize(ranks, rank=int(rank), init_method=f"file://{meeting}", seed=1, timeout_s=LIMIT_S)
    batch = random_batch()
    policy = build_policy(Path(directory), ranks, {"name": "grpo"}, precision="bf16")
    found = policy.logprobs(batch, [list(range(len(batch)))])
    if rank == "0":
        np.save(f"{meeting}.npy", found)
    parallel.shutdown()


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
