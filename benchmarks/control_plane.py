"""What a batch costs the driver: from requests to StepBatch, shards and the record, everything real but two things.

    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --json                       # about 15 minutes on 2 cores
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 1
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 10 --servers 1024 --json
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 10 --ranks 512 --servers 64 --json
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 100 --tokens 12000 --json    # 7 minutes

Servers answer at once from memory (canned_servers.py, over HTTP on loopback, in a process of its own), and the policy
has no model: two Ray actors stand for its ranks; each call to each rank is made, reads the rank's shard and gives
log-probs back. Cluster, answer workers, verifiers, sampler, books, columns, schedule, shards, log-probs, rollouts on
disk and metrics are the run's own, driven by its Controller. Counted is from the first request until the step is
written.

Each size is run twice, by a fresh process each time. The first gives CPU seconds of the driver's process (all threads,
in user and system mode). The second is watched: how late its event loop woke from pauses of 5 ms and where it was then,
and its memory: own pages, and pages of the object store that it has mapped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import numpy as np
import ray
import yaml
from canned_servers import CannedAnswers, canned_servers
from harness import cpu_s
from tiny_task import save_tokenizer

from megatron_daro.config import resolve
from megatron_daro.config.base import filled
from megatron_daro.config.placement import demand_of
from megatron_daro.controller import Controller, LoopParts
from megatron_daro.engine.sglang.fleet import Fleet
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.runtime import parts
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.inputs import read_inputs
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.ray_calls import gather
from megatron_daro.runtime.train_worker import RankInfo
from megatron_daro.types import StepBatch, StepResult

SAMPLES, TOKENS, SERVERS, RANKS, DISTINCT = 8, 4900, 2, 2, 4
PROCESSES = 2
"""That stand for all ranks."""
PAUSE_S, LOOK_S = 0.005, 0.05
PACKAGE = "megatron_daro"
CPU_GOAL_S, STALL_GOAL_MS, P99_GOAL_MS, MEMORY_GOAL_GIB = {10: 3.0, 100: 25.0}, 100.0, 20.0, 6.0
RIGHT, WRONG = "\\boxed{7}", "\\boxed{8}"
WORDS = [f" w{i:04d}" for i in range(4000)]
SYMBOLS = ["<pad>", "<bos>", "<eos>", RIGHT, WRONG, *"0123456789 pq", *WORDS]


class Watch:
    """How late the event loop wakes from pauses of 5 ms, where it was meanwhile, and the driver's memory.

    Two clocks: the wall's, and that of the loop's thread, which other processes of a busy machine do not move.
    """

    def __init__(self) -> None:
        self._off = threading.Event()
        self._thread = threading.get_ident()
        self._late_ms: list[float] = []
        self._latest_ms = self._busiest_ms = self._own_gib = self._mapped_gib = 0.0
        self._latest_in = self._busiest_in = ""
        self._ticked = time.perf_counter()
        self._places: Counter[str] = Counter()

    async def _tick(self) -> None:
        """Measure until it is cancelled."""
        while True:
            before, cpu_before = self._ticked, time.thread_time()
            self._places.clear()
            await asyncio.sleep(PAUSE_S)
            self._ticked = time.perf_counter()
            self._late_ms.append(1000 * (self._ticked - before - PAUSE_S))
            busy_ms = 1000 * (time.thread_time() - cpu_before)
            place = self._places.most_common(1)[0][0] if self._places else ""
            if self._late_ms[-1] > self._latest_ms:
                self._latest_ms, self._latest_in = self._late_ms[-1], place
            if busy_ms > self._busiest_ms:
                self._busiest_ms, self._busiest_in = busy_ms, place

    def _look(self) -> None:
        """Look many times at the memory, and where a loop is that does not wake; in a thread."""
        while not self._off.wait(LOOK_S):
            if time.perf_counter() - self._ticked > LOOK_S:
                self._places[_place_of(sys._current_frames().get(self._thread))] += 1
            lines = Path("/proc/self/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if line.startswith("Rss")}
            self._own_gib = max(self._own_gib, sizes["RssAnon"])
            self._mapped_gib = max(self._mapped_gib, sizes["RssShmem"])

    def __enter__(self) -> Watch:
        self._ticked = time.perf_counter()
        self._looks, self._ticks = threading.Thread(target=self._look), asyncio.create_task(self._tick())
        self._looks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticks.cancel()
        self._off.set()
        self._looks.join()

    def row(self) -> dict[str, float | str]:
        """What was seen."""
        return {
            "latest_ms": self._latest_ms,
            "latest_in": self._latest_in,
            "busiest_ms": self._busiest_ms,
            "busiest_in": self._busiest_in,
            "p99_ms": float(np.quantile(self._late_ms or [0.0], 0.99)),
            "own_gib": self._own_gib,
            "mapped_gib": self._mapped_gib,
        }


def _place_of(frame: FrameType | None) -> str:
    """Where a thread is: the innermost line of the package, and the function that it waits for."""
    inner = frame
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or inner is None:
        return "elsewhere"
    file = frame.f_code.co_filename.rpartition(f"{PACKAGE}/")[2]
    within = "" if inner is frame else f", in {inner.f_code.co_name} of {Path(inner.f_code.co_filename).name}"
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}{within}"


@ray.remote(num_cpus=0)
class Ranks:
    """Ranks without a model: they read their shards as ranks do, and give log-probs of the right shape."""

    def run_pass(self, name: str, batch: StepBatch, micro_batches: Any) -> np.ndarray:
        return batch.rollout_logprobs_R * np.float32(0.5)

    def train(self, batch: StepBatch, micro_batches: Any, step: int, **columns: np.ndarray) -> StepResult:
        return StepResult({"loss/policy": float(batch.tokens_T.mean())})


class NoModel(PolicyGroup):
    """The run's policy group on ranks without a model."""

    num_ranks: int

    async def start(self) -> None:
        ranks = range(self.num_ranks)
        processes = [Ranks.remote() for _ in range(min(PROCESSES, len(ranks)))]  # type: ignore[attr-defined]
        self.ranks.workers.update({f"actor rank {i}": processes[i % len(processes)] for i in ranks})
        self.ranks.infos = [RankInfo(data_parallel=i, stage=0, exports=False, sends=False, reports=True) for i in ranks]
        await gather({f"process {i}": process.__ray_ready__.remote() for i, process in enumerate(processes)})


class Ending(MetricsLog):
    """Knows when its last line was written; what comes then is the end of the run, not of the step."""

    spent: dict[str, float]

    def begin(self) -> None:
        """The first request is about to be made."""
        self._begun = cpu_s(), time.thread_time(), time.perf_counter()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        super().write(step, metrics)
        now = cpu_s(), time.thread_time(), time.perf_counter()
        names = ("driver_cpu_s", "event_loop_cpu_s", "seconds")
        self.spent = {name: after - before for name, before, after in zip(names, self._begun, now, strict=True)}


class NoWeights:
    """In the place of `WeightSync`: every server counts as having the weights."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def publish(self, version: int) -> dict[str, float]:
        for server in self._fleet.of("joining", "serving"):
            server.versions.add(0)
            self._fleet.serve(server, 0)
        return {}


def parse_arguments() -> argparse.Namespace:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 5, 10, 20, 40], help="tokens of each batch")
    parser.add_argument("--repeats", type=int, default=1, help="runs that CPU is measured in; median")
    parser.add_argument("--ranks", type=int, default=RANKS, help="of the policy, data-parallel")
    parser.add_argument("--servers", type=int, default=SERVERS, help="that answer")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def canned_answers(servers: int, tokens: int) -> CannedAnswers:
    """Half of the samples end with the right answer, the others with the wrong one."""
    ids = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    return CannedAnswers(
        servers=servers,
        lengths=[[tokens] * SAMPLES] * DISTINCT,
        ordinary=(ids[WORDS[0]], len(SYMBOLS)),
        endings=[[ids[text], ids["<eos>"]] for text in (RIGHT, WRONG)],
        vocabulary=len(SYMBOLS),
    )


def write_task(directory: Path, urls: list[str], prompts: int, tokens: int, ranks: int) -> None:
    """Model directory (tokenizer and config.json), problems and configuration."""
    model = directory / "model"
    save_tokenizer(model, SYMBOLS)
    (model / "config.json").write_text(json.dumps(SHAPE))
    problems = [{"problem": f"{i:0100d}pq", "answer": "7"} for i in range(prompts)]
    (directory / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    content = {
        "model": {"path": str(model)},
        "data": {"train": [str(directory / "train.jsonl")], "prompt_template": "plain", "max_prompt_tokens": 128},
        "rollout": {"prompts_per_batch": prompts, "rollouts_per_prompt": SAMPLES, "max_response_tokens": tokens + 100},
        "algorithm": {"old_logprobs": "recompute"},
        "actor": {"data_parallel": ranks, "micro_batch_tokens": 32768},
        "engine": {"kind": "sglang", "replicas": len(urls), "sglang": {"urls": urls}},
        "trainer": {"steps": 1, "run_dir": str(directory / "run"), "save_every_steps": 0},
        "observe": {"progress": False, "tensorboard": False},
    }
    (directory / "task.yaml").write_text(yaml.safe_dump(content))


SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": len(SYMBOLS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}


async def one_step(config: Any, inputs: Any, run_dir: Path, tokens: int, watch: Watch | None) -> dict[str, Any]:
    """One step of a run, and what it cost this process."""
    progress = Progress(total_steps=1, rollouts_per_prompt=SAMPLES, mode="off", title="control plane")
    algorithm, run = parts.algorithm_of(config), RunContext.of(config, progress, Phases())
    placement = parts.placement(run, engines=True)
    group = parts.policy_group(run, placement, trains=False)
    group.__class__ = NoModel
    assert isinstance(group, NoModel)
    group.num_ranks = config.actor.world_size
    made = parts.generation(run, inputs, algorithm, placement)
    with Ending(run_dir, tensorboard=False) as metrics:
        controller = Controller(
            config.trainer,
            LoopParts(
                policy=group,
                batches=made.sampler,
                build=parts.batch_builder(config, algorithm),
                metrics=metrics,
                progress=progress,
                phases=run.phases,
                engine=made.engine,
                recorder=Recorder(run_dir),
                closers={"verifiers": made.scorer.close},
                deadlines=run.deadlines,
            ),
            batches_ahead=0,
        )
        controller._weight_sync = NoWeights(made.engine.fleet)  # type: ignore[assignment,attr-defined]
        await parts.start_all(run, placement, group, made)
        spare_event_loop()  # as runtime/launch.py does
        with watch or nullcontext():
            metrics.begin()
            await controller.run()
    (line,) = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    check(line, tokens)
    if watch:
        return watch.row()
    timings = {key.split("/")[1]: value for key, value in line.items() if key.startswith("timing/")}
    return metrics.spent | {"phases_s": timings}


def check(line: dict[str, Any], tokens: int) -> None:
    """Raises SystemExit where the batch is not what it must be."""
    mean = line["response/length_mean"]
    if mean != tokens or line["accuracy/mean"] != 0.5:
        raise SystemExit(f"mean length {mean}, not {tokens}, or accuracy {line['accuracy/mean']}, not 0.5")


def run_one(directory: Path, tokens: int, *, watched: bool) -> dict[str, Any]:
    """In a process of its own."""
    config = resolve(directory / "task.yaml")
    run_dir = filled(config.trainer.run_dir)
    run_dir.mkdir(parents=True)
    progress = Progress(total_steps=1, rollouts_per_prompt=SAMPLES, mode="off", title="control plane")
    inputs = read_inputs(config, progress)
    with cluster(demand_of(config).processes):
        return asyncio.run(one_step(config, inputs, run_dir, tokens, Watch() if watched else None))


def measured(millions: int, urls: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Batches of about so many tokens, each by a fresh driver; the last one is watched."""
    prompts = -(-millions * 1_000_000 // (SAMPLES * given.tokens))
    runs = [fresh_run(prompts, urls, given) for _ in range(given.repeats)]
    middle = sorted(runs, key=lambda run: run["driver_cpu_s"])[(given.repeats - 1) // 2]
    row = {"tokens": prompts * SAMPLES * given.tokens, "rollouts": prompts * SAMPLES} | middle
    row |= fresh_run(prompts, urls, given, "--watched")
    return row | {"driver_cpu_s_of_all": [run["driver_cpu_s"] for run in runs]}


def fresh_run(prompts: int, urls: list[str], given: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Numbers of one batch by a driver in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="control_plane_") as name:
        write_task(Path(name), urls, prompts, given.tokens, given.ranks)
        command = [sys.executable, __file__, "--one", name, "--tokens", str(given.tokens), *options]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800).stdout
    return json.loads(output.splitlines()[-1])


def missed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Goals that were not reached."""
    problems = []
    for millions, cpu_goal_s in CPU_GOAL_S.items():
        if row := rows.get(str(millions)):
            problems += harness.at_most(f"{millions} M tokens: CPU seconds", row["driver_cpu_s"], cpu_goal_s)
            problems += harness.at_most(f"{millions} M tokens: latest wake-up, ms", row["latest_ms"], STALL_GOAL_MS)
            problems += harness.at_most(f"{millions} M tokens: 99 % of wake-ups, ms", row["p99_ms"], P99_GOAL_MS)
    for millions in (40, 100):
        if row := rows.get(str(millions)):
            gib = row["own_gib"] + row["mapped_gib"]
            problems += harness.at_most(f"{millions} M tokens: GiB", gib, MEMORY_GOAL_GIB)
    return problems


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        print(json.dumps(run_one(arguments.one, arguments.tokens, watched=arguments.watched)))
        return
    rows: dict[str, dict[str, Any]] = {}
    with canned_servers(canned_answers(arguments.servers, arguments.tokens)) as urls:
        for millions in arguments.millions:
            rows[str(millions)] = measured(millions, urls, arguments)
    columns = ("driver_cpu_s", "event_loop_cpu_s", "latest_ms", "p99_ms", "own_gib", "mapped_gib", "seconds")
    shown = {f"{name} M tokens": [row[key] for key in columns] for name, row in rows.items()}
    harness.table(f"the driver, {arguments.ranks} ranks, {arguments.servers} servers", columns, shown)
    for name, row in rows.items():
        print(f"{name} M tokens: the latest wake-up was in {row['latest_in'] or 'no one place'}; the loop worked for"
              f" at most {row['busiest_ms']:.0f} ms, in {row['busiest_in'] or 'no one place'}")  # fmt: skip
    name = "control_plane"
    for option, usual, letter in (("ranks", RANKS, "r"), ("servers", SERVERS, "s"), ("tokens", TOKENS, "t")):
        value = getattr(arguments, option)
        name += "" if value == usual else f"_{value}{letter}"
    setup = harness.setup_of(arguments, "one", "watched")
    harness.conclude(name, {"setup": setup, "rows": rows}, missed(rows), write=arguments.json)


if __name__ == "__main__":
    main()
