"""Runs a script of this folder as gloo ranks, each with an adapter inside its host; and their answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rollout_batches as batches
import torch

from megatron_daro.ports import reserve_port

HERE = Path(__file__).parent


def run_ranks(script: str, size: int, out: Path, *arguments: object, **environment: str) -> list[Any]:
    """What rank_N.pt holds in `out`, in order; the script takes `out`, then the arguments."""
    with reserve_port("127.0.0.1") as reserved:
        logs = _logs(script, size, out, arguments, {"MASTER_PORT": str(reserved.port), **environment})
    assert "DARO is on" in logs[0]
    return [torch.load(out / f"rank_{rank}.pt", weights_only=False) for rank in range(size)]


def _logs(script: str, size: int, out: Path, arguments: tuple[object, ...], environment: dict[str, str]) -> list[str]:
    """What the ranks printed, in order, after all of them ended well."""
    paths = [os.environ.get("PYTHONPATH", ""), str(HERE), str(HERE.parents[1])]
    base = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    base |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", str(HERE / script), str(out), *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            cwd=out,
            env={**base, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        logs = [process.communicate(timeout=480)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(log[-3000:] for log in logs)
    return logs


def unlike(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of what is wanted; as it is where nothing is wanted."""
    return float((got.double() - wanted.double()).abs().max() / (float(wanted.abs().max()) or 1.0))


def check_steps(ranks: list[Any], first: int = 0) -> list[dict[str, float]]:
    """Hold the gradient and the losses of every step against the loss written out, in float64; metrics per step.

    Args:
        ranks: what slime_ranks.py or miles_ranks.py kept. first: step of the whole run that they begin with.
    """
    logged = [metrics for metrics in ranks[0]["logged"] if "difficulty/weight/1" in metrics]
    assert len(logged) == len(ranks[0]["gradients"])
    for step, metrics in enumerate(logged, start=first):
        whole = batches.samples(step // batches.STEPS)
        size = len(whole) // batches.STEPS
        part = whole[step % batches.STEPS * size :][:size]
        weights = [1.0, *(metrics.get(f"difficulty/weight/{k}", 1.0) for k in range(1, batches.K)), 1.0]
        table = ranks[0]["tables"][step - first].double().requires_grad_()
        losses = batches.reference(table, part, whole, weights)
        # Megatron's distributed optimizer has each rank's part of the gradient.
        worst = unlike(sum(found["gradients"][step - first] for found in ranks), table.grad)
        print(f"step {step}: largest error {worst:.1e}")
        assert worst < 1e-5
        for k in range(batches.K + 1):
            if metrics[f"difficulty/tokens/{k}"]:
                assert metrics[f"difficulty/loss/{k}"] == pytest.approx(losses[k], rel=1e-4, abs=1e-6)
    return logged
