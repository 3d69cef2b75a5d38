"""Benchmark: what saving a checkpoint beside training costs a step, and how much memory it takes.

One rank in bf16 with Adam's state of a random model of Qwen2.5's shape (--layers makes it larger). In turns, each with
a checkpoint in a new directory: a save that is waited for; a step alone; a step with a save started before it. A step
is blocked for as long as `start_save` takes, and for as long as its update waits until all is handed to the system or
copied. `stall` is all that the save costs: that begin, and how much longer the step is than the one alone of the same
turn, so that cores and memory which both use count too. Memory is the resident set at its highest, above that before
the save (of a step with a save: above the most that a step alone takes); files that the system keeps in memory are no
part of it.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_save.py --layers 1 --tokens 1024 --rounds 3 --json
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness
from convert import CONFIG, make_checkpoint
from gpu_measures import samples_of

from megatron_daro.actor import parallel
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.policy import MegatronPolicy
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.types import StepBatch

ROLLOUTS = 4
BUCKETS_BYTES = 2 * 64 * 2**20
GOALS = (
    ("a step waits (begin and before the update), share of a save that is waited for", "blocked_of_save", 0.1),
    ("a step takes longer (waits, and cores and memory that both use), share of such a save", "stall_of_save", 0.1),
    ("bytes a parameter of a save, less two buckets", "bytes_a_parameter_less_buckets", 2.0),
)


class Saver:
    """A policy, its batch, and where checkpoints go."""

    def __init__(self, root: Path, policy: MegatronPolicy, batch: StepBatch) -> None:
        self._root, self._policy, self._batch, self._number = root, policy, batch, 0

    def waited_for(self) -> dict[str, float]:
        """A save that nothing runs beside."""
        directory, memory = self._directory(), harness.PeakMemory()

        def save() -> None:
            self._policy.start_save(directory)
            self._policy.finish_save()

        _, seconds = harness.timed(save)
        shutil.rmtree(directory)
        return {"s": seconds.wall, "bytes": memory.extra_bytes()}

    def alone(self) -> dict[str, float]:
        """A step alone."""
        memory = harness.PeakMemory()
        return {"s": self._step()[0], "bytes": memory.extra_bytes()}

    def beside(self) -> dict[str, float]:
        """Seconds until a save had begun, of the step beside it, of that step's wait."""
        directory, memory = self._directory(), harness.PeakMemory()
        _, begun = harness.timed(lambda: self._policy.start_save(directory))
        step, waited = self._step()
        row = {"begin_s": begun.wall, "s": step, "wait_s": waited, "bytes": memory.extra_bytes()}
        self._policy.finish_save()
        shutil.rmtree(directory)
        return row

    def _step(self) -> tuple[float, float]:
        self._number += 1
        waited, keep = [0.0], self._policy._wait_for_pending_saves

        def timed() -> None:
            start = time.perf_counter()
            keep()
            waited[0] += time.perf_counter() - start

        self._policy._wait_for_pending_saves = timed  # type: ignore[method-assign]
        start = time.perf_counter()
        rows = [list(range(i, i + ROLLOUTS)) for i in range(0, len(self._batch), ROLLOUTS)]
        self._policy.train_step(self._batch, rows, step=self._number)
        taken = time.perf_counter() - start
        self._policy._wait_for_pending_saves = keep  # type: ignore[method-assign]
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


def measure(root: Path, *, layers: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Everything in turns; medians."""
    policy = policy_of(root, layers)
    saver = Saver(root, policy, samples_of([tokens // 8] * 8, vocab=1000))
    sides = {"waited for": saver.waited_for, "alone": saver.alone, "beside": saver.beside}
    rows = harness.in_turns(sides, rounds)
    parallel.shutdown()
    medians = {name: harness.medians(of_side) for name, of_side in rows.items()}
    save, step, beside = medians["waited for"]["s"], medians["alone"]["s"], medians["beside"]
    stall = median(with_save["begin_s"] + with_save["s"] - without["s"]
                   for with_save, without in zip(rows["beside"], rows["alone"], strict=True))  # fmt: skip
    of_save, of_step, of_both = (max(row["bytes"] for row in of_side) for of_side in rows.values())
    parameters, most = policy.shape.num_parameters, max(of_save, of_both - of_step)
    return {
        "parameters": parameters,
        "rounds": rounds,
        "save_s": save,
        "step_s": step,
        "begin_s": beside["begin_s"],
        "step_with_save_s": beside["s"],
        "wait_s": beside["wait_s"],
        "stall_s": stall,
        "blocked_of_save": (beside["begin_s"] + beside["wait_s"]) / save,
        "stall_of_save": stall / save,
        "bytes_a_parameter": of_save / parameters,
        "bytes_a_parameter_beside_a_step": (of_both - of_step) / parameters,
        "bytes_a_parameter_less_buckets": max(0, most - BUCKETS_BYTES) / parameters,
        "all": rows,
    }


def main() -> None:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model, 4: 0.44 billion parameters")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5, help="turns")
    parser.add_argument("--directory", type=Path, help="where the files go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        result = measure(Path(root), layers=given.layers, rounds=given.rounds, tokens=given.tokens)
    shown = {name: [value] for name, value in result.items() if name != "all"}
    harness.table("saving while training", ("measured",), shown)
    problems = [problem for what, key, goal in GOALS for problem in harness.at_most(what, result[key], goal)]
    harness.conclude("checkpoint_save", result, problems, write=given.json)


if __name__ == "__main__":
    main()
