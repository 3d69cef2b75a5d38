"""One run in the tiny world: `megatron-daro train` as a user types it, and its metrics as records of the lab.

Place in the data flow: (settings, arm, learning rate, seed) -> base model of the seed (built once, shared by all arms)
-> a run directory -> records like those of `closed_run`. Refuses to read a run that failed as one that diverged: a
failure that is not about numbers is an error with the end of its log.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chains
from arms import command_line
from closed_run import Run

from megatron_daro.errors import DaroError

_HERE = Path(__file__).parent
_LARGE = ("checkpoints", "rollouts", "logs", "failed")


@dataclass(frozen=True, slots=True)
class TinyDials:
    """What a run in the tiny world takes: optimizer steps, steps between evaluations, answers to each held-out problem,
    and the settings of the base model."""

    steps: int = 40
    every: int = 10
    evaluated: int = 2
    base: chains.ChainSettings = field(default_factory=chains.ChainSettings)

    @property
    def updates(self) -> int:
        """Optimizer steps for each batch."""
        return 1


def base_of(dials: TinyDials, seed: int, folder: Path) -> Path:
    """The base model and the problems of a seed; built unless they are there with the same settings."""
    target = folder / f"base-{seed}"
    chains.build_base.build(target, dataclasses.replace(dials.base, seed=seed), 1)
    return target


def run_arm(dials: TinyDials, arm: str, learning_rate: float, seed: int, folder: Path) -> Run:
    """One run by the product's command. Two runs of the same arguments have the same records.

    Args:
        dials, arm, learning_rate, seed: what is run. folder: for base models and run directories.

    Raises:
        DaroError: the command failed for another reason than numbers that are not finite.
    """
    base, run_dir = base_of(dials, seed, folder), folder / f"{arm}-{learning_rate:g}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    options = _options(dials, base, run_dir, learning_rate, seed) + command_line(arm)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_daro", "train", str(_HERE / "chains.yaml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    ended = ""
    if done.returncode:
        said = (done.stderr + done.stdout)[-3000:]
        if not re.search(r"not finite|non-finite|NonFinite", said):
            raise DaroError(f"tiny world: {arm}, seed {seed}: the run failed:\n{said}")
        ended = "diverged: " + said.strip().splitlines()[-1]
    records = read_records(run_dir)
    for name in _LARGE:
        shutil.rmtree(run_dir / name, ignore_errors=True)
    return Run(records, ended)


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations of a run directory, as records: accuracy at temperature 1, the trained distribution's."""
    records, answers, weights = [], 0.0, {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prefix = "difficulty/weight/"
        weights |= {int(k.removeprefix(prefix)): v for k, v in row.items() if k.startswith(prefix)}
        answers = max(answers, 8 * (row.get("rollout/groups_admitted") or 0.0))
        if "eval/chains/accuracy" not in row:
            continue
        record: dict[str, Any] = {
            "step": int(row["step"]),
            "answers": int(answers),
            "accuracy": row["eval/chains/accuracy"],
        }
        record["bands"] = [row.get(f"eval/chains/accuracy/digits_{n}", math.nan) for n in chains.DIGITS]
        record["pass_at"] = []
        record["weights"] = [1.0, *(weights[k] for k in sorted(weights)), 1.0] if weights else []
        record["clamped"] = int(row.get("difficulty/clamped", 0))
        records.append(record)
    return records


def _options(dials: TinyDials, base: Path, run_dir: Path, learning_rate: float, seed: int) -> list[str]:
    held_out = {"name": "chains", "path": str(base / "held_out.jsonl"), "temperature": 1.0}
    held_out["rollouts_per_prompt"] = dials.evaluated
    return [
        f"model.path={base / 'model'}",
        f"data.train=[{base / 'train.jsonl'}]",
        f"data.eval=[{json.dumps(held_out)}]",
        f"actor.optimizer.learning_rate={learning_rate}",
        f"trainer.run_dir={run_dir}",
        f"trainer.steps={dials.steps}",
        f"trainer.eval_every_steps={dials.every}",
        f"trainer.seed={seed}",
    ]
