"""What a critic adds to the train part of a step: PPO beside GRPO on the same batches, taking turns in one process.

A step of GRPO is forward, backward and update; PPO's has a pass for the values first, and forward, backward and update
of the critic. The model has the sizes of the lab's language model (examples/lab/chains.py), batches those of its
configuration: 16 groups of 8 answers. Reported, on the clock and as seconds on a processor, which a busy machine
disturbs less: the ratio of the median times, and the quartiles of the ratios of neighbouring steps (a slow moment of
the machine hits both of a pair).

    OMP_NUM_THREADS=1 python benchmarks/ppo_overhead.py --pairs 30 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from daro_overhead import ROLLOUTS, build_policies, make_batch, save_model

RESULT_FILE = Path(__file__).parent / "results" / "ppo_overhead.json"
HIDDEN, LAYERS, FFN = 96, 3, 256
GROUPS, MEAN_TOKENS, MICRO_BATCHES = 16, 45, 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="timed steps of each algorithm")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each that are not timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help=f"also write {RESULT_FILE.name} into benchmarks/results")
    return parser.parse_args()


def timed_step(policy: Any, batch: Any, micro_batches: list[list[int]]) -> dict[str, float]:
    """Seconds of the whole train part, on the clock and on a processor."""
    started, cpu_started = time.perf_counter(), time.process_time()
    if policy.critic is not None:
        batch = dataclasses.replace(batch, values_R=policy.values(batch, micro_batches))
    result = policy.train_step(batch, micro_batches, step=1)
    took = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
    assert not result.skipped, result.reason
    return took


def measure(policies: dict[str, Any], arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """See `timed_step`; both get the same batch, one after the other, and swap the lead each time."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for pair in range(arguments.warm_up + arguments.pairs):
        batch = make_batch(GROUPS, MEAN_TOKENS, seed=pair)
        batch = dataclasses.replace(batch, rewards_N=batch.correct_N.astype("float32"))
        micro_batches = [list(range(i, len(batch), MICRO_BATCHES)) for i in range(MICRO_BATCHES)]
        for name in list(policies) if pair % 2 else list(policies)[::-1]:
            took = timed_step(policies[name], batch, micro_batches)
            if pair >= arguments.warm_up:
                taken[name].append(took)
    return taken


def summarize(taken: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    result: dict[str, Any] = {
        "groups": GROUPS,
        "rollouts_per_prompt": ROLLOUTS,
        "mean_tokens": MEAN_TOKENS,
        "micro_batches": MICRO_BATCHES,
        "pairs": arguments.pairs,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }
    for clock in ("wall", "cpu"):
        medians = {name: statistics.median(step[clock] for step in steps) for name, steps in taken.items()}
        pairs = [p[clock] / g[clock] for p, g in zip(taken["ppo"], taken["grpo"], strict=True)]
        result[clock] = {
            "step_s": medians,
            "ratio_of_medians": medians["ppo"] / medians["grpo"],
            "pair_ratio_quartiles": statistics.quantiles(pairs, n=4),
        }
    return result


def main() -> None:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(arguments.threads)
    from megatron_daro.actor import parallel

    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), HIDDEN, LAYERS, FFN)
        result = summarize(measure(build_policies(Path(directory), ("grpo", "ppo")), arguments), arguments)
        parallel.shutdown()
    for clock in ("wall", "cpu"):
        row = result[clock]
        quartiles = ", ".join(f"{q:.3f}" for q in row["pair_ratio_quartiles"])
        medians = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in row["step_s"].items())
        print(
            f"train part of a step, {clock}: medians {medians}, ratio {row['ratio_of_medians']:.3f}; pairs {quartiles}"
        )
    if arguments.json:
        RESULT_FILE.parent.mkdir(exist_ok=True)
        RESULT_FILE.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
