"""What a critic adds to the train part of a step: PPO beside GRPO on the same batches, taking turns in one process.

A step of GRPO is forward, backward and update; PPO's has a pass for the values first, and forward, backward and update
of the critic. The model has the sizes of the lab's language model (examples/lab/chains.py), batches those of its
configuration: 16 groups of 8 answers. Reported: the ratio of the median times, the quartiles of the ratios of
neighbouring steps (a slow moment of the machine hits both of a pair), and the median of each part of PPO's step.

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
    """Seconds of the whole train part, of the pass for values (0 without a critic), and of the critic's training."""
    started, values_s = time.perf_counter(), 0.0
    if policy.critic is not None:
        batch = dataclasses.replace(batch, values_R=policy.values(batch, micro_batches))
        values_s = time.perf_counter() - started
    result = policy.train_step(batch, micro_batches, step=1)
    whole_s = time.perf_counter() - started
    assert not result.skipped, result.reason
    return {"step_s": whole_s, "values_s": values_s, "critic_s": result.metrics.get("timing/critic_s", 0.0)}


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

    medians = {
        name: {part: statistics.median(step[part] for step in steps) for part in steps[0]}
        for name, steps in taken.items()
    }
    pairs = [p["step_s"] / g["step_s"] for p, g in zip(taken["ppo"], taken["grpo"], strict=True)]
    return {
        "groups": GROUPS,
        "rollouts_per_prompt": ROLLOUTS,
        "mean_tokens": MEAN_TOKENS,
        "micro_batches": MICRO_BATCHES,
        "pairs": arguments.pairs,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "medians": medians,
        "ratio_of_medians": medians["ppo"]["step_s"] / medians["grpo"]["step_s"],
        "pair_ratio_quartiles": statistics.quantiles(pairs, n=4),
    }


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
    of_ppo, of_grpo = result["medians"]["ppo"], result["medians"]["grpo"]
    quartiles = ", ".join(f"{q:.3f}" for q in result["pair_ratio_quartiles"])
    print(f"train part of a step, medians: grpo {of_grpo['step_s']:.3f} s, ppo {of_ppo['step_s']:.3f} s")
    print(f"ppo / grpo {result['ratio_of_medians']:.3f}; pairs, quartiles: {quartiles}")
    print(f"of ppo's: values {of_ppo['values_s']:.3f} s, training the critic {of_ppo['critic_s']:.3f} s")
    if arguments.json:
        RESULT_FILE.parent.mkdir(exist_ok=True)
        RESULT_FILE.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
