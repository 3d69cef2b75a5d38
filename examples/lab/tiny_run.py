"""One run with a language model: the product's training loop in this process, and its metrics as records of the lab.

Place in the data flow: (settings, arm, learning rate, seed) -> base model (made once, shared by all runs)
-> a run directory -> records like those of `closed_run`. A run counts as diverged only if numbers were not finite; any
other failure is an error.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import chains
import one_process
from arms import command_line, section_of
from closed_run import Run

from megatron_daro.config import Config, resolve
from megatron_daro.errors import DaroError, NonFiniteError

_HERE = Path(__file__).parent
_ONE_PROCESS = (
    *("actor.data_parallel=1", "engine.replicas=1", "engine.embedded.threads=1", "reward.workers=1"),
    *("trainer.save_every_steps=100000", "trainer.export_hf=false", "observe.tensorboard=false"),
)
"""Options that `one_process` needs, and files left out that nobody reads."""


@dataclass(frozen=True)
class ModelDials:
    """What a run with a language model takes: optimizer steps, steps between evaluations, answers to each held-out
    problem in an evaluation (a power of 2), optimizer steps for each batch, the reward of a wrong answer. All runs
    start from one model and have its problems: a seed decides the order of the problems and the noise of the answers.

    kind: of the jobs. config: the file that a run's options are added to. sets: held-out sets; an evaluation's accuracy
    is the mean over them. bands: parts of each set, name in the metrics -> name in the lab; bands_are: what tells the
    parts apart.
    """

    kind: ClassVar[str]
    config: ClassVar[Path]
    sets: ClassVar[tuple[str, ...]]
    bands: ClassVar[dict[str, str]]
    bands_are: ClassVar[str]

    steps: int = 30
    every: int = 5
    evaluated: int = 4
    updates: int = 1
    incorrect_reward: float = 0.0

    def make_base(self, target: Path) -> None:
        """Make the base model (target/model), target/train.jsonl and each set, unless they are there."""
        raise NotImplementedError

    def held_out(self, base: Path) -> dict[str, Path]:
        """Return the files of the sets."""
        return {name: base / f"{name}.jsonl" for name in self.sets}


@dataclass(frozen=True)
class TinyDials(ModelDials):
    """The dials of the tiny worlds. base: settings of their base model."""

    kind = "tiny"
    config = _HERE / "chains.yaml"
    sets = ("chains",)
    bands: ClassVar = {f"digits_{n}": str(n) for n in chains.DIGITS}
    bands_are = "digits of the problem"

    base: chains.ChainSettings = field(default_factory=chains.ChainSettings)

    def make_base(self, target: Path) -> None:
        """See `ModelDials.make_base`."""
        chains.build_base.build(target, self.base, 1)

    def held_out(self, base: Path) -> dict[str, Path]:
        """See `ModelDials.held_out`."""
        return {"chains": base / "held_out.jsonl"}


def base_of(dials: ModelDials, folder: Path) -> Path:
    """Return the folder of base model and problems, which are made unless they are there with the same settings."""
    target = folder / "base"
    dials.make_base(target)
    return target


def run_arm(dials: ModelDials, arm: str, learning_rate: float, seed: int, folder: Path) -> Run:
    """Do one run by the product's loop. Two runs with the same arguments have the same records.

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
        raise type(error)(f"{dials.kind} world: {arm}, seed {seed}: the run failed: {error}") from error
    return Run(read_records(run_dir, dials), ended)


def config_of(dials: ModelDials, arm: str, learning_rate: float, seed: int, base: Path, run_dir: Path) -> Config:
    """Return the configuration of a run; `megatron-daro train` takes the same file and options."""
    options = _options(dials, base, run_dir, learning_rate, seed) + command_line(arm)
    if section_of(arm).has_critic:
        options.append(f"algorithm.critic.learning_rate={learning_rate}")
    return resolve(dials.config, options)


def read_records(run_dir: Path, dials: ModelDials) -> list[dict[str, Any]]:
    """Return the evaluations of a run directory, as records. Accuracy is at temperature 1, as in training. Tokens are
    those of all answers that were sampled to train on."""
    records: list[dict[str, Any]] = []
    answers, tokens, weights = 0.0, 0.0, dict[int, float]()
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prefix = "difficulty/weight/"
        weights |= {int(k.removeprefix(prefix)): v for k, v in row.items() if k.startswith(prefix)}
        answers = max(answers, 8 * (row.get("rollout/groups_admitted") or 0.0))
        tokens += row.get("rollout/generated_tokens") or 0.0
        parts = [_evaluation(row, name, list(dials.bands)) for name in dials.sets]
        if not all(parts):
            continue
        accuracy, bands, pass_at = (_mean(rows) for rows in zip(*parts, strict=True))
        record: dict[str, Any] = {"step": int(row["step"]), "answers": int(answers), "tokens": int(tokens)}
        record |= {"accuracy": accuracy[0], "bands": bands, "pass_at": pass_at}
        record["weights"] = [1.0, *(weights[k] for k in sorted(weights)), 1.0] if weights else []
        record["clamped"] = int(row.get("difficulty/clamped", 0))
        records.append(record)
    return records


def _evaluation(row: dict[str, Any], name: str, bands: Sequence[str]) -> tuple[list[float], ...]:
    """Return accuracy, accuracy by band and pass@k of one set in a line of metrics; empty if it has none."""
    start = f"eval/{name}"
    if f"{start}/accuracy" not in row:
        return ()
    passed = {int(k.rsplit("/", 1)[1]): v for k, v in row.items() if k.startswith(f"{start}/pass_at/")}
    by_band = [row.get(f"{start}/accuracy/{band}", math.nan) for band in bands]
    accuracy = row[f"{start}/accuracy"]
    return [accuracy], by_band, [accuracy, *(passed[k] for k in sorted(passed))]


def _mean(rows: Sequence[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _options(dials: ModelDials, base: Path, run_dir: Path, learning_rate: float, seed: int) -> list[str]:
    common = {"temperature": 1.0, "rollouts_per_prompt": dials.evaluated}
    held_out = [{"name": name, "path": str(path), **common} for name, path in dials.held_out(base).items()]
    return [
        f"model.path={base / 'model'}",
        f"data.train=[{base / 'train.jsonl'}]",
        f"data.eval={json.dumps(held_out)}",
        f"actor.optimizer.learning_rate={learning_rate}",
        f"trainer.run_dir={run_dir}",
        f"trainer.steps={dials.steps}",
        f"trainer.eval_every_steps={dials.every}",
        f"trainer.minibatches_per_batch={dials.updates}",
        f"reward.incorrect_reward={dials.incorrect_reward}",
        f"trainer.seed={seed}",
        *_ONE_PROCESS,
    ]
