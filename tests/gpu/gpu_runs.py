"""Checks of whole runs: `megatron-daro train` of ten steps of a tiny model, some with real SGLang servers beside it.

Place in the data flow: some of the checks of gpu_checks.py. A run is a process of its own, with a limit; whatever is
left of it is ended. On a CPU weights travel by gloo or files, which rehearses the checks and proves nothing about
NCCL, CUDA IPC or memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_outcomes import NotHereError, Outcome, need_gpus

sys.path.append(str(Path(__file__).resolve().parents[1]))

STEPS, START_LIMIT_S = 10, 600
HAS_KERNELS = "from importlib.metadata import version; version('sglang-kernel')"
WITHOUT_KERNELS: dict[str, dict[str, Any]] = {
    "env": {
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    },
    "arguments": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
    },
}
"""Of a server on a GPU whose environment has tools/sglang_cpu/stand_ins/sgl_kernel in the place of sglang-kernel, so
any torch that SGLang runs with, whose compiled tree of prefixes takes that of its own pin only. Source: SGLang
0.5.23, kernels/fused_op.py, srt/environ.py, srt/entrypoints/engine.py."""
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
Harm = Literal["", "SIGKILL", "SIGSTOP"]


def ten_steps(
    device: torch.device,
    directory: Path,
    *,
    servers: int,
    tensor: int = 1,
    pipeline: int = 1,
    colocate: bool = False,
    fp8_blocks: bool = False,
    harm: Harm = "",
    in_broadcast: bool = False,
    shards_over: Literal["", "tcp", "rdma"] = "",
) -> Outcome:
    """Ten steps with servers: the largest mean difference of a step between log-probs of server and trainer. It fails
    where a step is missing, a sync sends nothing, no server was seen to have new weights, or a server that was harmed
    on the way, some while they take weights, is not replaced."""
    import cli_runs
    import tiny_task

    on_gpu, run_dir = device.type == "cuda", directory / "run"
    ranks = servers if colocate else tensor * pipeline
    need_gpus(device, ranks if colocate else ranks + servers, "ranks and servers")
    if shards_over == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        raise NotHereError("no RDMA device is here (/sys/class/infiniband)")
    servers = servers if on_gpu else min(servers, 2)  # each takes minutes of a CPU and gigabytes
    if fp8_blocks and not on_gpu:
        raise NotHereError(
            "servers multiply fp8 blocks on a GPU; tests/sglang/test_sglang_fp8_blocks.py sends them to one"
        )
    task = tiny_task.build(directory)
    if fp8_blocks or in_broadcast:  # whole blocks on every side; several buckets of 1 MiB
        tiny_task.pretrain(task.model, family="Qwen3Config", head_dim=128, **WIDE)
    elif on_gpu:  # a width of the heads that fused kernels have
        tiny_task.pretrain(task.model, family="Qwen3Config", head_dim=64)
    sections = _sections(on_gpu, servers, colocate=colocate)
    sections["actor"] |= {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    sections["engine"]["sglang"] |= {"fp8_blocks": fp8_blocks} | ({"bucket_mib": 1} if in_broadcast else {})
    sections["engine"]["sglang"] |= {"sync": "shards", "shards_over": shards_over} if shards_over else {}
    config = task.write_config(directory / "run.yaml", sections)
    with cli_runs.started(["train", config, f"trainer.run_dir={run_dir}"], directory / "log") as run:
        if harm:
            run.wait_until(lambda: cli_runs.last_step(run_dir) >= 2, "second step", START_LIMIT_S)
            server = cli_runs.servers(run)[0]
            left = _wait_for_a_broadcast(run, run_dir) if in_broadcast else 0
            server.send_signal(signal.Signals[harm])
            if in_broadcast and left <= 0:
                raise RuntimeError("the update was over before the server was harmed; nothing is shown")
        finished = run.finish(START_LIMIT_S)
    if finished.code:
        raise RuntimeError(finished.last_line)
    lines = list(_steps_of(run_dir).values())
    if not all(line["sync/bytes"] for line in lines):
        raise RuntimeError(f"bytes sent: {[line['sync/bytes'] for line in lines]}")
    if not any(line["sync/verified"] for line in lines):
        raise RuntimeError("no step showed that the servers had its weights")
    if harm and not lines[-1]["engine/fenced"]:
        raise RuntimeError(f"nobody noticed that a server got {harm}")
    return _mismatch(run_dir, on_gpu)


def resumed(device: torch.device, directory: Path) -> Outcome:
    """Ten steps of one rank with the embedded engine, which computes on the CPU: six, then four more from the
    checkpoint of the sixth: the largest mean difference of a step between log-probs of engine and trainer. It fails
    where a step is missing, or the loss of a step differs from that of an unbroken run by more than bf16's rounding."""
    import cli_runs

    on_gpu = device.type == "cuda"
    command = [*_without_servers(device, directory), "trainer.save_every_steps=6", "trainer.eval_every_steps=0"]
    whole, parts = directory / "whole", directory / "parts"
    for name, run_dir, steps in (("whole", whole, STEPS), ("six", parts, 6), ("rest", parts, STEPS)):
        resume = ["--resume"] if name == "rest" else []
        options = [f"trainer.run_dir={run_dir}", f"trainer.steps={steps}", *resume]
        cli_runs.trained([*command, *options], directory / f"{name}.log")
    apart = _apart(parts, whole)
    if apart > (0.02 if on_gpu else 0.0):
        raise RuntimeError(f"the losses of the resumed run and of an unbroken one differ by {apart}")
    return _mismatch(parts, on_gpu)


def lost_rank(device: torch.device, directory: Path, *, data: int) -> Outcome:
    """Steps in one of which a rank of two kills itself before it reduces gradients, while the other waits for it in a
    collective call: the largest difference of a loss to a run in which nobody dies."""
    import cli_runs

    need_gpus(device, data, "ranks")
    command = [*_without_servers(device, directory), f"actor.data_parallel={data}", f"trainer.steps={STEPS}"]
    command += ["trainer.eval_every_steps=0", "trainer.save_every_steps=0"]
    run_dir, alone = directory / "run", directory / "alone"
    options = ["trainer.replace_lost_ranks=true", f"trainer.run_dir={run_dir}"]
    with cli_runs.with_dying_ranks([*command, *options], directory / "log", "backward:1:3") as run:
        finished = run.finish(START_LIMIT_S)
    if finished.code != 0:
        raise RuntimeError(finished.last_line)
    cli_runs.trained([*command, f"trainer.run_dir={alone}"], directory / "alone.log")
    return Outcome(_apart(run_dir, alone), 0.02 if device.type == "cuda" else 1e-6, "loss of a step")


def _steps_of(run_dir: Path) -> dict[int, Any]:
    """The metrics of each step. Raises RuntimeError: one is missing."""
    from megatron_daro.observe.metrics import read_metrics

    lines = {row["step"]: row for row in read_metrics(run_dir) if row["step"]}
    if sorted(lines) != list(range(1, STEPS + 1)):
        raise RuntimeError(f"steps {sorted(lines)} of 1 to {STEPS} in {run_dir.name}")
    return lines


def _mismatch(run_dir: Path, on_gpu: bool) -> Outcome:
    worst = max(float(line["mismatch/logprob_abs_mean"]) for line in _steps_of(run_dir).values())
    return Outcome(worst, 0.05 if on_gpu else 1e-4, "nats, mean of a step")


def _apart(run_dir: Path, unbroken: Path) -> float:
    """The largest difference of a loss."""
    pairs = zip(_steps_of(run_dir).values(), _steps_of(unbroken).values(), strict=True)
    return max(abs(a["loss/policy"] - b["loss/policy"]) for a, b in pairs)


def _without_servers(device: torch.device, directory: Path) -> list[str]:
    """Make the tiny task; the command that trains it with one tensor-parallel rank and the embedded engine."""
    import tiny_task

    task, on_gpu = tiny_task.build(directory), device.type == "cuda"
    if on_gpu:  # a width of the heads that fused kernels have
        tiny_task.pretrain(task.model, family="Qwen3Config", head_dim=64)
    return ["train", str(task.config), "actor.tensor_parallel=1", f"actor.precision={'bf16' if on_gpu else 'fp32'}"]


def _wait_for_a_broadcast(run: Any, run_dir: Path) -> int:
    """Wait until servers take the first bucket of the next update; return how many more it had at the last one.

    A server's log has a line for each bucket: uvicorn's, of SGLang 0.5.23's route of this name, which answers before
    the data arrive.
    """
    import cli_runs

    logs = sorted((run_dir / "logs").glob("server_*.log"))

    def taken() -> int:
        return max(log.read_text(errors="replace").count("POST /update_weights_from_distributed") for log in logs)

    before, updates = taken(), 1 + cli_runs.last_step(run_dir)
    if not before:
        raise RuntimeError(f"no line of {logs[0]} says that the server took weights")
    run.wait_until(lambda: taken() > before, "next update", START_LIMIT_S, pause_s=0.002)
    return before // updates - (taken() - before)


def _sections(on_gpu: bool, servers: int, *, colocate: bool) -> dict[str, Any]:
    """What differs from the tiny task's own configuration."""
    import sglang_pool

    environment = sglang_pool.environment()
    if environment is None:
        raise NotHereError(f"no environment of SGLang: {sglang_pool.VARIABLE} names its folder (docs/gpu.md)")
    sync = ("tensor" if on_gpu else "disk") if colocate else "distributed"
    arguments = {} if on_gpu else {**sglang_pool.CPU_ARGUMENTS, "max_total_tokens": 4096}
    limits = {"stall_timeout_s": 60, "sync_timeout_s": 120, "request_timeout_s": 120}
    python, own = environment / "bin" / "python", {"arguments": arguments}
    if on_gpu and subprocess.run([python, "-c", HAS_KERNELS], capture_output=True, check=False).returncode:
        own = WITHOUT_KERNELS
    sglang = {"python": str(python), **own, "sync": sync, **limits}
    return {
        "actor": {"data_parallel": servers if colocate else 1, "precision": "bf16" if on_gpu else "fp32"},
        "engine": {"kind": "sglang", "replicas": servers, "colocate": colocate, "sglang": sglang},
        "rollout": {"prompts_per_batch": 4, "rollouts_per_prompt": 4, "max_response_tokens": 4}
        | {"max_refill_rounds": 20},
        "trainer": {"steps": STEPS, "save_every_steps": 0, "eval_every_steps": 0},
    }
