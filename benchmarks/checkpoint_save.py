"""Benchmark: what saving a checkpoint beside training costs a step, and how much memory it takes.

One rank in bf16 with Adam's state of a random model of Qwen2.5's shape (--layers makes it larger). In turns, each with
a checkpoint in a new directory: a save that is waited for; a step alone; a step with a save started before it. A step
is blocked for as long as `start_save` takes, and for as long as its update waits until all is handed to the system or
copied. `stall` is all that the save costs: that begin, and how much longer the step is than the one alone of the same
turn, so that cores and memory which both use count too. Memory is the resident set, looked at 50 times a second, above
that before the save (of a step with a save: above the most that a step alone takes); files that the system keeps in
memory are no part of it.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_save.py [--layers 4] [--rounds 5] [--directory DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from convert import CONFIG, make_checkpoint, verdict
from rich.console import Console
from rich.table import Table

from megatron_daro.actor import parallel
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.policy import MegatronPolicy
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.types import TrainBatch

RESULTS = Path(__file__).parent / "results" / "checkpoint_save.json"
ROLLOUTS = 4
BUCKETS_BYTES = 2 * 64 * 2**20
GOALS = (
    ("a step waits (begin and before the update), share of a save that is waited for", "blocked_of_save", 0.1),
    ("a step takes longer (waits, and cores and memory that both use), share of such a save", "stall_of_save", 0.1),
    ("bytes a parameter of a save, less two buckets", "bytes_a_parameter_less_buckets", 2.0),
)


class PeakMemory:
    """The largest resident set of this process while it is entered, above that at the beginning, in bytes."""

    def __enter__(self) -> PeakMemory:
        self._process, self._done = psutil.Process(), threading.Event()
        self._first = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.extra = self._peak - self._first


def batch_of(samples: int, tokens: int) -> TrainBatch:
    """Random samples of one length, half of each group right."""
    rng, length = np.random.default_rng(0), tokens // samples
    responses = samples * (length - 8)
    correct_N = (np.arange(samples) % 2).astype(np.uint8)
    return TrainBatch(
        tokens_T=rng.integers(0, 1000, samples * length).astype(np.int32),
        lengths_N=np.full(samples, length, np.int64),
        prompt_lengths_N=np.full(samples, 8, np.int64),
        loss_mask_R=np.ones(responses, np.uint8),
        rollout_logprobs_R=np.full(responses, -2.0, np.float32),
        rewards_N=correct_N.astype(np.float32),
        correct_N=correct_N,
        bins_N=np.full(samples, ROLLOUTS // 2, np.int64),
        group_ids_N=np.arange(samples, dtype=np.int64) // ROLLOUTS,
        advantages_N=np.where(correct_N, 1.0, -1.0).astype(np.float32),
        truncated_N=np.zeros(samples, np.uint8),
        rollouts_per_prompt=ROLLOUTS,
    )


class Saver:
    """A policy, its batch, and where checkpoints go."""

    def __init__(self, root: Path, policy: MegatronPolicy, batch: TrainBatch) -> None:
        self._root, self._policy, self._batch, self._number = root, policy, batch, 0

    def waited_for(self) -> tuple[float, int]:
        """Seconds of a save that nothing runs beside, and bytes of memory."""
        directory = self._directory()
        with PeakMemory() as memory:
            start = time.perf_counter()
            self._policy.save(directory)
            taken = time.perf_counter() - start
        shutil.rmtree(directory)
        return taken, memory.extra

    def step(self) -> tuple[float, int]:
        """Seconds of a step alone, and bytes of memory."""
        with PeakMemory() as memory:
            taken = self._step()[0]
        return taken, memory.extra

    def beside(self) -> tuple[float, float, float, int]:
        """Seconds until a save had begun, of the step beside it, of that step's wait; bytes of memory."""
        directory = self._directory()
        with PeakMemory() as memory:
            start = time.perf_counter()
            self._policy.start_save(directory)
            begun = time.perf_counter() - start
            step, waited = self._step()
        self._policy.finish_save()
        shutil.rmtree(directory)
        return begun, step, waited, memory.extra

    def _step(self) -> tuple[float, float]:
        self._number += 1
        waited, keep = [0.0], self._policy._keep_what_is_saved

        def timed() -> None:
            start = time.perf_counter()
            keep()
            waited[0] += time.perf_counter() - start

        self._policy._keep_what_is_saved = timed  # type: ignore[method-assign]
        start = time.perf_counter()
        rows = [list(range(i, i + ROLLOUTS)) for i in range(0, len(self._batch), ROLLOUTS)]
        self._policy.train_step(self._batch, rows, step=self._number)
        taken = time.perf_counter() - start
        self._policy._keep_what_is_saved = keep  # type: ignore[method-assign]
        return taken, waited[0]

    def _directory(self) -> Path:
        os.sync()
        directory = self._root / "checkpoint"
        directory.mkdir()
        return directory


def policy_of(root: Path, layers: int) -> MegatronPolicy:
    """One rank with the optimizer of training."""
    make_checkpoint(root / "hf", layers, {**CONFIG, "vocab_size": 32768})
    parallel.initialize(Layout(), seed=1, timeout_s=600)
    settings = PolicySettings(root / "hf", ROLLOUTS, 64, 1.0, total_steps=1000)
    actor = ActorSection(precision="bf16", optimizer={"learning_rate": 1e-6})  # type: ignore[arg-type]
    return MegatronPolicy(settings, actor, AlgorithmSection(name="grpo"))


def measure(root: Path, *, layers: int, rounds: int, tokens: int) -> dict[str, object]:
    """Everything in turns; medians."""
    policy = policy_of(root, layers)
    saver = Saver(root, policy, batch_of(8, tokens))
    saver.step()
    saver.waited_for()
    waited_for, alone, beside = [], [], []
    for _ in range(rounds):
        waited_for.append(saver.waited_for())
        alone.append(saver.step())
        beside.append(saver.beside())
    parallel.shutdown()
    save, step = (statistics.median(s for s, _ in rows) for rows in (waited_for, alone))
    begun, with_save, wait = (statistics.median(row[i] for row in beside) for i in range(3))
    stalls = [row[0] + row[1] - one for row, (one, _) in zip(beside, alone, strict=True)]
    parameters, of_step = policy.shape.num_parameters, max(extra for _, extra in alone)
    most = max(*(extra for _, extra in waited_for), *(row[3] - of_step for row in beside))
    return {
        "parameters": parameters,
        "rounds": rounds,
        "save_s": save,
        "step_s": step,
        "begin_s": begun,
        "step_with_save_s": with_save,
        "wait_s": wait,
        "stall_s": statistics.median(stalls),
        "blocked_of_save": (begun + wait) / save,
        "stall_of_save": statistics.median(stalls) / save,
        "bytes_a_parameter": max(extra for _, extra in waited_for) / parameters,
        "bytes_a_parameter_beside_a_step": max(row[3] - of_step for row in beside) / parameters,
        "bytes_a_parameter_less_buckets": max(0, most - BUCKETS_BYTES) / parameters,
        "all": {"waited_for": waited_for, "alone": alone, "beside": beside},
    }


def table(found: dict[str, object]) -> Table:
    """One line for each number."""
    made = Table("what", "measured")
    for name, value in found.items():
        if not isinstance(value, dict):
            made.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model, 4: 0.44 billion parameters")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5, help="turns")
    parser.add_argument("--directory", type=Path, help="where the files go")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} into benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        found = measure(Path(root), layers=given.layers, rounds=given.rounds, tokens=given.tokens)
    Console().print(table(found))
    for what, key, goal in GOALS:
        print(verdict(what, found[key], goal, most=True))  # type: ignore[arg-type]
    if given.json:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
