"""One run in the tiny world: the product's training loop in this process, and its metrics as records of the lab.

Place in the data flow: (settings, arm, learning rate, seed) -> base model of the seed (built once, shared by all arms)
-> a run directory -> records like those of `closed_run`. Refuses to read a run that failed as one that diverged: a
failure that is not about numbers is an error.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chains
import one_process
from arms import command_line, section_of
from closed_run import Run

from megatron_daro.config import Config, resolve
from megatron_daro.errors import DaroError, NonFiniteError

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class TinyDials:
    """What a run in the tiny world takes: optimizer steps, steps between evaluations, answers to each held-out problem
    in an evaluation (a power of 2), optimizer steps for each batch, the reward of a wrong answer, and the settings of
    the base model. All runs start from that one model and have its problems: a seed is the order of the problems and
    the noise of the answers."""

    steps: int = 30
    every: int = 5
    evaluated: int = 4
    updates: int = 1
    incorrect_reward: float = 0.0
    base: chains.ChainSettings = field(default_factory=chains.ChainSettings)


def base_of(dials: TinyDials, folder: Path) -> Path:
    """The base model and the problems; built unless they are there with the same settings."""
    target = folder / "base"
    chains.build_base.build(target, dials.base, 1)
    return target


def run_arm(dials: TinyDials, arm: str, learning_rate: float, seed: int, folder: Path) -> Run:
    """One run by the product's loop. Two runs of the same arguments have the same records.

    Args:
        dials, arm, learning_rate, seed: what is run. folder: for base models and run directories.

    Raises:
        DaroError: the run failed for another reason than numbers that are not finite.
    """
    run_dir = folder / f"{arm}-{learning_rate:g}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    ended, config = "", config_of(dials, arm, learning_rate, seed, base_of(dials, folder), run_dir)
    try:
        one_process.train(config)
    except NonFiniteError as error:
        ended = f"diverged: {error}"
    except DaroError as error:
        raise type(error)(f"tiny world: {arm}, seed {seed}: the run failed: {error}") from error
    return Run(read_records(run_dir), ended)


def config_of(dials: TinyDials, arm: str, learning_rate: float, seed: int, base: Path, run_dir: Path) -> Config:
    """The configuration of a run: `megatron-daro train` takes the same file and options."""
    options = _options(dials, base, run_dir, learning_rate, seed) + command_line(arm)
    if section_of(arm).has_critic:
        options.append(f"algorithm.critic.learning_rate={learning_rate}")
    return resolve(_HERE / "chains.yaml", options)


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations of a run directory, as records: accuracy at temperature 1, the trained distribution's."""
    records: list[dict[str, Any]] = []
    answers, weights = 0.0, dict[int, float]()
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prefix = "difficulty/weight/"
        weights |= {int(k.removeprefix(prefix)): v for k, v in row.items() if k.startswith(prefix)}
        answers = max(answers, 8 * (row.get("rollout/groups_admitted") or 0.0))
        if "eval/chains/accuracy" not in row:
            continue
        record = {"step": int(row["step"]), "answers": int(answers), "accuracy": row["eval/chains/accuracy"]}
        record["bands"] = [row.get(f"eval/chains/accuracy/digits_{n}", math.nan) for n in chains.DIGITS]
        passed = {int(k.rsplit("/", 1)[1]): v for k, v in row.items() if k.startswith("eval/chains/pass_at/")}
        record["pass_at"] = [row["eval/chains/accuracy"], *(passed[k] for k in sorted(passed))]
        record["weights"] = [1.0, *(weights[k] for k in sorted(weights)), 1.0] if weights else []
        record["clamped"] = int(row.get("difficulty/clamped", 0))
        records.append(record)
    return records


def _options(dials: TinyDials, base: Path, run_dir: Path, learning_rate: float, seed: int) -> list[str]:
    held_out: dict[str, Any] = {"name": "chains", "path": str(base / "held_out.jsonl"), "temperature": 1.0}
    held_out["rollouts_per_prompt"] = dials.evaluated
    return [
        f"model.path={base / 'model'}",
        f"data.train=[{base / 'train.jsonl'}]",
        f"data.eval=[{json.dumps(held_out)}]",
        f"actor.optimizer.learning_rate={learning_rate}",
        f"trainer.run_dir={run_dir}",
        f"trainer.steps={dials.steps}",
        f"trainer.eval_every_steps={dials.every}",
        f"trainer.updates_per_batch={dials.updates}",
        f"reward.incorrect_reward={dials.incorrect_reward}",
        f"trainer.seed={seed}",
    ]
