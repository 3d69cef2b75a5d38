"""What `plan --from RUN` predicts for other runs, against those runs: python benchmarks/plan_held_out.py [--json FILE]

    OMP_NUM_THREADS=1 python benchmarks/plan_held_out.py                          # about 6 minutes on two free cores
    OMP_NUM_THREADS=1 python benchmarks/plan_held_out.py --rounds 1 --steps 4     # to try the script out

One run on the CPU is recorded (one rank, one embedded engine, staleness 0), and the planner learns from it. Then runs
that it has not seen: two engines, staleness 1, twice the batch, and two of these together. All are whole runs of
`megatron-daro train` on the quickstart's problems with a random model; no group is filtered, so that every batch is
whole. Rounds of all runs follow each other, so that a machine with other work troubles all alike; a time is the median
of the rounds' median steps, and the planner learns from the run of the median round. The "GPU" is one core of this
machine, its numbers measured at the start. Exit code 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from megatron_daro.config import Config, resolve
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.history import WARM_UP_STEPS, fitted, predicted_step, read_history

GOAL = 0.15
QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
HELD_OUT: dict[str, list[str]] = {
    "two engines": ["engine.replicas=2"],
    "staleness 1": ["rollout.max_staleness=1", "algorithm.correction.kind=tis"],
    "twice the batch": ["rollout.prompts_per_step=32"],
    "half the batch, two engines": ["rollout.prompts_per_step=8", "engine.replicas=2"],
}
TAUGHT = "the run it learns from"


def main() -> int:
    """Run, predict, compare. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the numbers there.")
    options = parser.parse_args()
    core = measured_core()
    with tempfile.TemporaryDirectory(prefix="plan-held-out-") as folder:
        rows = compared(Path(folder), core, options.rounds, options.steps)
    show(rows, core)
    if options.json:
        options.json.write_text(json.dumps({"core": core.model_dump(), "runs": rows}, indent=2) + "\n")
    return int(any(abs(row["error"]) > GOAL for row in rows[1:]))


def compared(folder: Path, core: Gpu, rounds: int, steps: int) -> list[dict[str, float]]:
    """Make all runs; each with its measured and its predicted step in seconds."""
    recipe = write_recipe(folder, steps)
    kinds = {TAUGHT: [], **HELD_OUT}
    medians: dict[str, list[tuple[float, Path]]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name, changes in kinds.items():
            run = folder / f"{name.replace(' ', '-').replace(',', '')}-{number}"
            train(recipe, [*changes, f"trainer.run_dir={run}"])
            medians[name].append((read_history(run).step, run))
            print(f"round {number + 1}, {name}: {medians[name][-1][0]:.2f} s a step", file=sys.stderr, flush=True)
    taught = read_history(sorted(medians[TAUGHT])[rounds // 2][1])
    shape = read_model_shape(folder / "model")
    constants = fitted(taught, shape, core)

    def row(name: str, config: Config, shape: ModelShape) -> dict[str, float]:
        measured = statistics.median(step for step, _ in medians[name])
        predicted = predicted_step(taught, config, shape, core, constants)
        spread = [step for step, _ in medians[name]]
        found = {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        return {"run": name, **found, "least": min(spread), "most": max(spread)}  # type: ignore[dict-item]

    return [row(name, resolve(recipe, changes), shape) for name, changes in kinds.items()]


def write_recipe(folder: Path, steps: int) -> Path:
    """A random model, problems, and the recipe of the run that the planner learns from."""
    sys.path.insert(0, str(QUICKSTART))
    import build_base

    settings = build_base.BaseSettings(hidden=256, layers=4, ffn=768, training_draws=512)
    build_base.write_random_model(folder / "model", settings)
    settings.write_data(folder)
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "train.jsonl")], "prompt_template": "plain", "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 16, "rollouts_per_prompt": 8, "max_response_tokens": 64},
        "algorithm": {"name": "daro", "filter": "none"},
        "actor": {"precision": "fp32", "micro_batch_tokens": 1024},
        "engine": {"replicas": 1, "embedded": {"batch_size": 64, "threads": 1}},
        "reward": {"verifier": "exact", "workers": 1},
        "trainer": {"steps": steps + WARM_UP_STEPS, "save_every_steps": 0, "seed": 0},
        "observe": {"tensorboard": False},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def train(recipe: Path, changes: list[str]) -> None:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "megatron_daro", "train", str(recipe), *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def measured_core() -> Gpu:
    """One core as a GPU: fp32 products per second, and bytes per second of a copy; medians of nine."""
    torch.set_num_threads(1)
    left, right, memory = torch.randn(512, 512), torch.randn(512, 512), torch.randn(2**24)
    target = torch.empty_like(memory)
    products = statistics.median(seconds(lambda: torch.mm(left, right)) for _ in range(9))
    copies = statistics.median(seconds(lambda: target.copy_(memory)) for _ in range(9))
    read = 2 * memory.numel() * 4 / copies / 1e9
    return Gpu(
        name="one core", memory_mib=16384, bf16_tflops=2 * 512**3 / products / 1e12, memory_gb_s=read, link_gb_s=read,
        network_gb_s=read,
    )  # fmt: skip


def seconds(work: object) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def show(rows: list[dict[str, float]], core: Gpu) -> None:
    """Print the table."""
    table = Table(title=f"Step times; one core: {core.bf16_tflops * 1e3:.0f} GFLOP/s, {core.memory_gb_s:.1f} GB/s")
    for column in ("run", "measured", "rounds from", "to", "predicted", "error"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        times = [f"{row[key]:.2f} s" for key in ("measured", "least", "most", "predicted")]
        table.add_row(str(row["run"]), *times, f"{100 * row['error']:+.0f} %")
    Console(width=max(Console().width, 110)).print(table)


if __name__ == "__main__":
    sys.exit(main())
