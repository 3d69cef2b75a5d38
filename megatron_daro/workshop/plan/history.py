"""What a recorded run teaches the planner: lengths of its answers, and how far off the assumed constants were.

RUN/config.yaml, RUN/metrics.jsonl, RUN/rollouts -> History -> Workload and Constants of the search. The formulas of
times.py stay as they are. Fitted to the medians over the steps are one factor for each phase (training, generation,
sync), and the seconds of everything else, which nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from megatron_daro.config import Config, resolve
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.errors import ConfigError
from megatron_daro.observe import read_metrics
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.times import Constants, TrainTimes, generation_s, sync_s, train_times
from megatron_daro.workshop.plan.workload import Workload, recorded_quantiles, workload_of

WARM_UP_STEPS = 1
"""Steps at the start that are left out: what happens once at a start makes them untypical."""
MOST_FILES = 50
"""About how many rollout files are read for lengths, spread evenly over the run."""


@dataclass(frozen=True, slots=True)
class History:
    """A run: its configuration, lengths of its answers and prompts in tokens, medians of its phases in seconds."""

    config: Config
    lengths: np.ndarray
    mean_prompt: float
    rollout: float
    train: float
    logprob: float
    sync: float
    step: float
    steps: int

    @property
    def unhidden(self) -> float:
        """Seconds of a step that its phases (rollout, training, log-probs, sync) do not explain."""
        train = self.train + self.logprob
        both = self.rollout + train if self.config.rollout.batches_ahead == 0 else max(self.rollout, train)
        return max(self.step - both - self.sync, 0.0)

    def workload(self, config: Config, shape: ModelShape) -> Workload:
        """Return the workload of a step of `config`, with this run's answer lengths cut at the limit of `config`."""
        lengths = np.minimum(self.lengths, config.rollout.max_response_tokens)
        return workload_of(config, shape, mean_prompt=self.mean_prompt, response_Q=recorded_quantiles(lengths))


def read_history(run: Path) -> History:
    """Read a run directory.

    Raises:
        ConfigError: it has no configuration, fewer than two steps with times, or no recorded rollouts.
    """
    config = resolve(run / "config.yaml")
    rows = [row for row in read_metrics(run) if "timing/step_s" in row and (row["step"] or 0) > 0][WARM_UP_STEPS:]
    files = [file for file in sorted((run / "rollouts").glob("step_*.parquet")) if pq.read_metadata(file).num_rows]
    if not rows or not files:
        raise ConfigError(
            f"--from: got {str(run)!r} with {len(rows)} steps after the first and {len(files)} files of rollouts; "
            "allowed: a run of at least two steps with observe.save_rollouts on; fix: name another run"
        )
    lengths, prompts = _lengths(files[:: max(1, len(files) // MOST_FILES)])

    def median(key: str) -> float:
        return float(np.median([row.get(key) or 0.0 for row in rows]))

    return History(
        config=config,
        lengths=lengths,
        mean_prompt=prompts,
        rollout=median("timing/rollout_s"),
        train=median("timing/train_s"),
        logprob=median("timing/logprob_s"),
        sync=median("timing/sync_s"),
        step=median("timing/step_s"),
        steps=len(rows),
    )


def _lengths(files: Iterable[Path]) -> tuple[np.ndarray, float]:
    """Return the lengths of all answers, trained or not, and the mean length of a prompt."""
    answers, prompts = [], []
    for file in files:
        table = pq.read_table(file, columns=["length", "prompt_tokens"])
        length = table.column("length").to_numpy(zero_copy_only=False).astype(np.float64)
        answers.append(length[np.isfinite(length)])
        prompts += [len(tokens) for tokens in table.column("prompt_tokens").to_pylist() if tokens is not None]
    return np.concatenate(answers), float(np.mean(prompts))


def fitted(history: History, shape: ModelShape, gpu: Gpu, assumed: Constants | None = None) -> Constants:
    """Return constants with which the formulas of times.py reproduce the phases of the run.

    Args:
        history: a run. shape: of its model. gpu: that it ran on; with another one only the factors differ.
        assumed: the constants to start from.
    """
    known = assumed or Constants()
    workload = history.workload(history.config, shape)
    times, generation = _phases(history.config, workload, gpu, known)
    return replace(
        known,
        training_factor=known.training_factor * (history.train + history.logprob) / times.total,
        generation_factor=known.generation_factor * history.rollout / generation,
        sync_factor=known.sync_factor
        * history.sync
        / sync_s(workload, ModelLayout.of(history.config.actor), gpu, known, server_gpus=_server_gpus(history.config)),
        fixed_s=history.unhidden,
    )


def _server_gpus(config: Config) -> int:
    engine = config.engine
    return engine.sglang.tensor_parallel * (len(engine.sglang.urls) or engine.replicas)


def _phases(config: Config, workload: Workload, gpu: Gpu, constants: Constants) -> tuple[TrainTimes, float]:
    """Return the predicted times of training and of generation for a configuration in its own layout."""
    actor, engine = config.actor, config.engine
    tensor = engine.sglang.tensor_parallel if engine.kind == "sglang" else 1
    replicas = len(engine.sglang.urls) or engine.replicas
    times = train_times(workload, ModelLayout.of(actor), actor.data_parallel, gpu, constants)
    return times, generation_s(workload, tensor, replicas, gpu, constants)
