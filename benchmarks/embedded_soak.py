"""A long run whose ranks and embedded engines die at random: it must end as the run in which nobody dies.

    python benchmarks/embedded_soak.py --json                   # 200 steps, 20 ranks, 20 engines; 15 minutes
    python benchmarks/embedded_soak.py --steps 30 --ranks 3 --engines 3

Trains the tiny task of the tests twice with its real actor (two tensor-parallel ranks) and two embedded engines at
staleness 0: once in peace, once while processes get SIGKILL, SIGSEGV or SIGSTOP at drawn moments (soak_deaths.py).
Afterwards every step's metrics and rollouts, and all files of the last checkpoint that say what was trained, must be
equal bit for bit, and the books whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import harness
import soak_books
import tiny_task
import torch
from sglang_soak import begun, say
from soak_deaths import SIGNALS, Deaths

from megatron_daro.config import resolve
from megatron_daro.observe.metrics import comparable, read_metrics
from megatron_daro.runtime import launch, parts

_UNLIKE = ("made_with.json", "manifest.json")
"""Files of a checkpoint that say where it was written, and their hashes."""


def parse_arguments() -> argparse.Namespace:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=20, help="deaths of ranks")
    parser.add_argument("--engines", type=int, default=20, help="deaths of engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="for model, runs and logs; else a temporary one")
    return parser.parse_args()


class Run:
    """One of the two runs. deaths: empty for the one in peace."""

    def __init__(self, arguments: argparse.Namespace, task: tiny_task.TinyTask, name: str) -> None:
        self._arguments, self.directory = arguments, task.directory / name
        self.deaths: list[Deaths] = []
        self._sampler: Any = None
        changes: dict[str, Any] = {
            "engine": {"replicas": 2, "embedded": {"batch_size": 32, "threads": 1, "max_restarts": 1000}},
            # Slowly, so that the task stays unsolved and every step has something to learn.
            "actor": {"optimizer": {"learning_rate": 3.0e-4}},
            "algorithm": {"filter": "none"},
            "trainer": {
                "steps": arguments.steps,
                "run_dir": str(self.directory),
                "save_every_steps": 50,
                "replace_lost_ranks": True,
                "max_replacements": 1000,
                "hung_rank_s": 20,
            },
            "observe": {"progress": False},
        }
        self._config = task.write_config(task.directory / f"{name}.yaml", changes)

    def train(self, *, dies: bool) -> tuple[str, float]:
        """Returns the status that it ended with, and seconds."""
        make_generation, make_policy, started = parts.generation, parts.policy_group, time.monotonic()
        made: dict[str, Any] = {}

        def policy_group(*arguments: Any, **options: Any) -> Any:
            made["policy"] = make_policy(*arguments, **options)
            return made["policy"]

        def generation(*arguments: Any) -> parts.Generation:
            result = make_generation(*arguments)
            self._sampler = result.sampler
            if dies:
                self._attach(result, made)
            return result

        parts.generation, parts.policy_group = generation, policy_group  # type: ignore[assignment]
        try:
            return launch.train(resolve(self._config)).status, time.monotonic() - started
        finally:
            parts.generation, parts.policy_group = make_generation, make_policy

    def _attach(self, made: parts.Generation, others: dict[str, Any]) -> None:
        steps, seed = self._arguments.steps, self._arguments.seed
        engine: Any = made.engine

        def back() -> int:
            return engine.restarts - sum(replica.state != "serving" for replica in engine._replicas)

        self.deaths = [
            Deaths(
                "ray::TrainWorker", self._arguments.ranks, steps=steps, seed=f"ranks {seed}", signals=SIGNALS,
                replaced=lambda: int(others["policy"]._healing.counts["recovery/ranks_replaced"]), log=say,
            ),
            Deaths(
                "ray::EngineWorker", self._arguments.engines, steps=steps, seed=f"engines {seed}",
                signals=("SIGKILL", "SIGKILL", "SIGSEGV"), replaced=back, log=say,
            ),
        ]  # fmt: skip
        sampler: Any = made.sampler
        sample, step = sampler.sample, 0

        async def gated(version: int) -> Any:
            nonlocal step
            step += 1
            for deaths in self.deaths:
                await deaths.gate(step)
                if step >= steps:
                    await deaths.finish()
            return await sample(version)

        sampler.sample = gated

    def books(self) -> tuple[dict[str, Any], list[str]]:
        """What was counted, and problems."""
        return soak_books.check_books(self.directory, self._arguments.steps, self._sampler.ledger.outstanding)


def differences(one: Path, other: Path, steps: int) -> tuple[dict[str, int], list[str]]:
    """Return how much of two runs was compared, and what differs."""
    mine, theirs = ([comparable(line) for line in read_metrics(run)] for run in (one, other))
    problems = [f"metrics of step {a['step']} differ" for a, b in zip(mine, theirs, strict=False) if a != b]
    if len(mine) != len(theirs):
        problems.append(f"{len(mine)} lines of metrics, and {len(theirs)}")
    rollouts = [f"rollouts/step_{step:06d}.parquet" for step in range(1, steps + 1)]
    problems += [f"{name} differs" for name in rollouts if digest(one / name) != digest(other / name)]
    last = f"checkpoints/step_{steps:06d}"
    files = sorted(path.name for path in (one / last).iterdir() if path.name not in _UNLIKE)
    problems += [f"{last}/{name} differs" for name in files if digest(one / last / name) != digest(other / last / name)]
    return {"metric_lines": len(mine), "rollout_files": len(rollouts), "checkpoint_files": len(files)}, problems


def digest(path: Path) -> str:
    """SHA-256 of what a file says; empty where there is none."""
    if not path.is_file():
        return ""
    # A pickle also says which of its values were one object in memory.
    data = repr(torch.load(path, weights_only=True)).encode() if path.suffix == ".pt" else path.read_bytes()
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    arguments = parse_arguments()
    directory = begun(arguments.directory)
    task = tiny_task.build(directory)
    peace, war = Run(arguments, task, "peace"), Run(arguments, task, "deaths")
    problems: list[str] = []
    seconds = {}
    for run, dies in ((peace, False), (war, True)):
        status, seconds[run.directory.name] = run.train(dies=dies)
        if status != "finished":
            problems.append(f"{run.directory.name} ended as {status!r}")
    for deaths in war.deaths:
        problems += deaths.problems()
    compared, unequal = differences(war.directory, peace.directory, arguments.steps)
    books, wrong = war.books()
    last = read_metrics(war.directory)[-1]
    result = {
        "setup": harness.setup_of(arguments, "directory"),
        "seconds": seconds,
        "deaths": {deaths.title: deaths.row() for deaths in war.deaths},
        "recovery": {key: value for key, value in last.items() if key.startswith("recovery/")},
        "compared": compared,
        "books": books,
        "events": [vars(death) for deaths in war.deaths for death in deaths.deaths],
    }
    (directory / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    say(json.dumps({key: value for key, value in result.items() if key != "events"}, indent=1))
    harness.conclude("embedded_soak", result, problems + unequal + wrong, write=arguments.json)


if __name__ == "__main__":
    main()
