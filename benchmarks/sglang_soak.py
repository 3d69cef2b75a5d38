"""A long run on real SGLang servers under faults: everything must be noticed, nothing lost, and nothing stale trained.

    python benchmarks/sglang_soak.py --json             # 200 steps, 35 faults; about 25 minutes on 2 cores
    python benchmarks/sglang_soak.py --sync shards --json
    python benchmarks/sglang_soak.py --steps 30 --each 1 --at-least 1
    python benchmarks/sglang_soak.py --ranks 20 --kinds kill_idle,kill_serving,kill_sync --each 7 --json    # and ranks

Trains the tiny task of the tests with its real actor and two servers, weights by broadcast or, with --sync shards,
from each rank to each server. A seeded schedule kills, stops and slows servers and breaks their answers
(soak_faults.py); each fault hits while both servers serve, and the next one waits until they do again. With --ranks,
processes of the trainer die at drawn moments, whatever the servers do (soak_deaths.py), and are replaced. Afterwards
soak_books.py looks at the books and recomputes every log-prob. It fails if a fault went unnoticed or something does not
hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import sglang_servers
import soak_books
import tiny_task
from soak_deaths import SIGNALS, Deaths
from soak_faults import KINDS, Injector, schedule
from soak_proxy import ProxiedServer

from megatron_daro.config import resolve
from megatron_daro.runtime import launch, parts, sglang_engine
from megatron_daro.sync.plan import WeightFiles
from megatron_daro.sync.publish import WeightSync


def parse_arguments() -> argparse.Namespace:
    parser = sglang_servers.arguments_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--each", type=int, default=5, help="faults of each kind; one that goes unnoticed is repeated")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help="of faults, with commas"
    )
    parser.add_argument("--at-least", type=int, default=5, help="of each kind that must have been noticed")
    parser.add_argument("--ranks", type=int, default=0, help="deaths of the trainer's ranks beside these faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--sync", default="distributed", choices=("distributed", "shards"))
    parser.add_argument("--pace-s", type=float, default=5.0, help="longest wait before a step while a server starts")
    parser.add_argument("--directory", type=Path, help="for model, run and logs; else a temporary one")
    return parser.parse_args()


def configuration(arguments: argparse.Namespace, directory: Path) -> Path:
    """The tiny task on two servers with short deadlines."""
    task = tiny_task.build(directory)
    server_options = {
        "python": str(sglang_servers.require(arguments.python)),
        "arguments": {**sglang_servers.CPU_ARGUMENTS, "max_total_tokens": 4096, "max_running_requests": 32},
        "sync": arguments.sync,
        "bucket_mib": 1,
        "start_timeout_s": 300.0,
        "request_timeout_s": 20.0,
        "stall_timeout_s": 30.0,
        "sync_timeout_s": 60.0,  # once 25 s were not enough: other work starved both servers, and none was left
        "max_restarts": 1000,
    }
    changes: dict[str, Any] = {
        "engine": {"kind": "sglang", "replicas": 2, "sglang": server_options},
        "rollout": {"max_staleness": arguments.staleness},
        # Slowly, so that the task stays unsolved; fast enough that weights of two versions can be told apart.
        "actor": {"optimizer": {"learning_rate": 3.0e-4}},
        "algorithm": {"filter": "none", "correction": {"kind": "tis" if arguments.staleness else "none"}},
        "trainer": {
            "steps": arguments.steps,
            "run_dir": str(directory / "run"),
            "save_every_steps": 50,
            "replace_lost_ranks": bool(arguments.ranks),
            "max_replacements": 1000,
            "hung_rank_s": 20,
        },
        "observe": {"progress": False},
    }
    return task.write_config(directory / "soak.yaml", changes)


class Soak:
    """Hooks the faults into a run that launch.py puts together."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments, self._run_dir = arguments, directory / "run"
        self._handles: dict[str, ProxiedServer] = {}
        self.faults = schedule(arguments.steps, arguments.each, arguments.seed, arguments.kinds)
        self.injector: Injector | None = None
        self.ranks: Deaths | None = None
        self._policy: Any = None
        self.own_s: list[float] = []
        self._resumed: float | None = None
        self.sampler: Any = None
        self.engine: Any = None
        self._step = 0

    def hook(self) -> None:
        """Replaces the functions of the composition root that make the servers' handles, the ranks and the
        generation."""
        make_handles, make_generation, make_policy = sglang_engine._handles, parts.generation, parts.policy_group

        def policy_group(*arguments: Any, **options: Any) -> Any:
            self._policy = make_policy(*arguments, **options)
            return self._policy

        def handles(*arguments: Any, reads_text: bool) -> dict[str, ProxiedServer]:
            inner = make_handles(*arguments, reads_text=reads_text)
            self._handles = {name: ProxiedServer(handle) for name, handle in inner.items()}
            return self._handles

        def generation(*arguments: Any) -> parts.Generation:
            made = make_generation(*arguments)
            self._attach(made.engine, made.sampler)
            return made

        sglang_engine._handles = handles  # type: ignore[assignment]
        parts.generation, parts.policy_group = generation, policy_group  # type: ignore[assignment]

    def _attach(self, engine: Any, sampler: Any) -> None:
        self.engine, self.sampler = engine, sampler
        sample, publish, run_dir = sampler.sample, WeightSync.publish, self._run_dir

        async def gated(version: int) -> Any:
            if self.injector is None:
                own = {"seed": self._arguments.seed, "sync": self._arguments.sync}
                self.injector = Injector(engine, self._handles, self.faults, log=say, **own)
            self._step += 1
            if self._arguments.ranks:
                await self._deaths_of_ranks()
            if self._resumed is not None:
                self.own_s.append(time.monotonic() - self._resumed)
            await self.injector.gate(self._step, self._arguments.pace_s)
            if self._step >= self._arguments.steps:
                await self.injector.finish()
            self._resumed = time.monotonic()
            return await sample(version)

        async def kept(self: WeightSync, version: int) -> Any:
            folder = run_dir / "versions" / f"{version:06d}"
            async with self._policy.hold():
                await self._policy.write(WeightFiles(directory=folder, file_bytes=2**30, remedy="free space"))
            return await publish(self, version)

        sampler.sample = gated
        WeightSync.publish = kept  # type: ignore[method-assign]

    async def _deaths_of_ranks(self) -> None:
        """Those that are due."""
        if self.ranks is None:
            options = self._arguments
            self.ranks = Deaths(
                "ray::TrainWorker", options.ranks, steps=options.steps, seed=f"ranks {options.seed}", signals=SIGNALS,
                replaced=lambda: int(self._policy._healing.counts["recovery/ranks_replaced"]), log=say,
            )  # fmt: skip
        await self.ranks.gate(self._step)
        if self._step >= self._arguments.steps:
            await self.ranks.finish()


def begun(directory: Path | None) -> Path:
    """Prepare this process for a soak. Returns the directory for its files: a temporary one where none is given."""
    # Ray gives its workers, and so the servers, low priority: anything else on the machine would starve them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    directory = directory or Path(tempfile.mkdtemp(prefix="soak_"))
    directory.mkdir(parents=True, exist_ok=True)
    say(f"in {directory}")
    return directory


def say(text: str) -> None:
    """A line on standard output, at once."""
    print(text, flush=True)


def summary(arguments: argparse.Namespace, soak: Soak, status: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Numbers and problems."""
    assert soak.injector is not None
    books, problems = soak_books.check_books(soak._run_dir, arguments.steps, soak.sampler.ledger.outstanding)
    weights, more = soak_books.check_weights(soak._run_dir, temperature=1.0)
    problems += more
    if status != "finished":
        problems.append(f"the run ended as {status!r}")
    faults = {kind: of_kind(soak, kind) for kind in arguments.kinds}
    for kind, row in faults.items():
        if row["noticed"] < arguments.at_least:
            problems.append(f"{kind}: {row['noticed']} noticed of {row['injected']}; at least {arguments.at_least}")
        if row["healed"] < row["injected"]:
            problems.append(f"{kind}: servers came back after {row['healed']} of {row['injected']}")
    if soak.ranks:
        problems += soak.ranks.problems()
    metrics = soak.engine.metrics()
    result = {
        "setup": sglang_servers.setup_of(arguments, "directory"),
        "seconds": seconds,
        "faults": faults,
        "fences": len(soak.injector.fences),
        "restarts": int(metrics["engine/restarts"]),
        "retries": int(metrics["engine/retries"]),
        "time": lost_seconds(soak.own_s),
        "books": books,
        "weights": weights,
        **({"ranks": soak.ranks.row()} if soak.ranks else {}),
        "events": [vars(event) for event in (*soak.faults, *(soak.ranks.deaths if soak.ranks else ()))],
    }
    return result, problems


def lost_seconds(own_s: list[float]) -> dict[str, float]:
    """What faults cost the run: time beyond the median from batch to batch, without what the soak itself waited."""
    median = statistics.median(own_s)
    return {"median_step_s": median, "lost_s": sum(max(s - median, 0.0) for s in own_s), "all_steps_s": sum(own_s)}


def of_kind(soak: Soak, kind: str) -> dict[str, Any]:
    """How many, and the longest and middle time until noticed and until all served again."""
    faults = [fault for fault in soak.faults if fault.kind == kind and fault.injected_s is not None]
    noticed = sorted(f.noticed_s - f.injected_s for f in faults if f.noticed_s is not None and f.injected_s is not None)
    healed = sorted(f.healed_s - f.injected_s for f in faults if f.healed_s is not None and f.injected_s is not None)
    row: dict[str, Any] = {"injected": len(faults), "noticed": len(noticed), "healed": len(healed)}
    for name, values in (("noticed_s", noticed), ("healed_s", healed)):
        row[name] = {"median": values[len(values) // 2], "longest": values[-1]} if values else None
    return row


def show(result: dict[str, Any]) -> None:
    """The faults as a table, then all but the events."""
    header = ("injected", "noticed", "recovered", "until noticed, median (longest)", "until all served again")
    rows: dict[str, list[object]] = {}
    for kind, row in result["faults"].items():
        times = [
            f"{row[k]['median']:.1f} ({row[k]['longest']:.1f}) s" if row[k] else "" for k in ("noticed_s", "healed_s")
        ]
        rows[kind] = [row["injected"], row["noticed"], row["healed"], *times]
    harness.table(f"{result['setup']['steps']} steps", header, rows)
    say(json.dumps({key: value for key, value in result.items() if key not in ("events", "faults")}, indent=1))


def main() -> None:
    arguments = parse_arguments()
    directory = begun(arguments.directory)
    config = resolve(configuration(arguments, directory))
    soak = Soak(arguments, directory)
    soak.hook()
    started = time.monotonic()
    outcome = launch.train(config)
    result, problems = summary(arguments, soak, outcome.status, time.monotonic() - started)
    # Reasons name log files.
    result = json.loads(json.dumps(result).replace(str(directory), "DIRECTORY"))
    (directory / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    name = "sglang_soak" + "_shards" * (arguments.sync == "shards") + "_ranks" * bool(arguments.ranks)
    harness.conclude(name, result, problems, write=arguments.json)
    say("the soak passed")


if __name__ == "__main__":
    main()
