"""What a batch costs the driver: from requests to TrainBatch, shards and the record, everything real but two things.

    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --json                       # about 15 minutes on 2 cores
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 1
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 10 --servers 1024 --json
    OMP_NUM_THREADS=1 python benchmarks/control_plane.py --millions 100 --tokens 12000 --json    # 7 minutes

Servers answer at once from memory (workshop/rehearse/canned_server.py, over HTTP on loopback, in a process of its own),
and the policy has no model: its ranks are Ray actors that read their shards and give log-probs back. Cluster,
answer workers, verifiers, sampler, books, columns, schedule, shards, log-probs, rollouts on disk and metrics are the
run's own, driven by its Controller. Counted is from the first request until the step is written.

Each size is run twice, by a fresh process each time. The first gives CPU seconds of the driver's process (all threads,
in user and system mode). The second is watched: how late its event loop woke from pauses of 5 ms, and its memory: own
pages, and pages of the object store that it has mapped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import sglang_servers
import yaml
from rich.console import Console
from rich.table import Table
from tiny_task import save_tokenizer

from megatron_daro.config import resolve
from megatron_daro.config.hardware import demand_of
from megatron_daro.controller import Controller, Parts
from megatron_daro.engine.sglang.fleet import Fleet
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe.metrics import MetricsLog, Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.runtime import parts
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.inputs import read_inputs
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.supervisor import gather
from megatron_daro.runtime.workers import Place
from megatron_daro.types import StepResult, TrainBatch
from megatron_daro.workshop.rehearse.canned_server import CannedAnswers, canned_fleet
from megatron_daro.workshop.rehearse.loop import Watch, cpu_s

SAMPLES, TOKENS, SERVERS, RANKS, DISTINCT = 8, 4900, 2, 2, 4
CPU_GOAL_S, STALL_GOAL_MS, P99_GOAL_MS, MEMORY_GOAL_GIB = {10: 3.0, 100: 25.0}, 100.0, 20.0, 6.0
RIGHT, WRONG = "\\boxed{7}", "\\boxed{8}"
WORDS = [f" w{i:04d}" for i in range(4000)]
SYMBOLS = ["<pad>", "<bos>", "<eos>", RIGHT, WRONG, *"0123456789 pq", *WORDS]


@ray.remote(num_cpus=0)
class Rank:
    """A rank without a model: it reads its shard as a rank does, and gives log-probs of the right shape."""

    def run_pass(self, name: str, batch: TrainBatch, micro_batches: Any) -> np.ndarray:
        return batch.rollout_logprobs_R * np.float32(0.5)

    def train(self, batch: TrainBatch, micro_batches: Any, step: int, **columns: np.ndarray) -> StepResult:
        return StepResult(step, {"loss/policy": float(batch.tokens_T.mean())})


class NoModel(PolicyGroup):
    """The run's policy group on ranks without a model."""

    async def start(self) -> None:
        handles: dict[str, Any] = {f"actor rank {i}": Rank.remote() for i in range(RANKS)}  # type: ignore[attr-defined]
        self.workers.update(handles)
        self._places = [Place(data_parallel=i, stage=0, exports=False, sends=False, answers=True) for i in range(RANKS)]
        await gather([handle.__ray_ready__.remote() for handle in handles.values()])


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
            server.version = 0
            server.versions.add(0)
            self._fleet.set_state(server, "serving")
        return {}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 5, 10, 20, 40], help="tokens of each batch")
    parser.add_argument("--repeats", type=int, default=1, help="runs that CPU is measured in; median")
    parser.add_argument("--servers", type=int, default=SERVERS, help="that answer")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument(
        "--json",
        action="store_true",
        help="also write benchmarks/results/control_plane.json (_N.json with N servers, _Nt.json with N tokens)",
    )
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def canned_answers(tokens: int) -> CannedAnswers:
    """Half of the samples end with the right answer, the others with the wrong one."""
    ids = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    return CannedAnswers(
        lengths=[[tokens] * SAMPLES] * DISTINCT,
        ordinary=(ids[WORDS[0]], len(SYMBOLS)),
        endings=[[ids[text], ids["<eos>"]] for text in (RIGHT, WRONG)],
        vocabulary=len(SYMBOLS),
    )


def write_task(directory: Path, urls: list[str], prompts: int, tokens: int) -> Path:
    """Model directory (tokenizer and config.json), problems and configuration."""
    model = directory / "model"
    save_tokenizer(model, SYMBOLS)
    (model / "config.json").write_text(json.dumps(SHAPE))
    problems = [{"problem": f"{i:0100d}pq", "answer": "7"} for i in range(prompts)]
    (directory / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    content = {
        "model": {"path": str(model)},
        "data": {"train": [str(directory / "train.jsonl")], "prompt_template": "plain", "max_prompt_tokens": 128},
        "rollout": {"prompts_per_step": prompts, "rollouts_per_prompt": SAMPLES, "max_response_tokens": tokens + 100},
        "algorithm": {"old_logprobs": "recompute"},
        "actor": {"data_parallel": RANKS, "micro_batch_tokens": 32768},
        "engine": {"kind": "sglang", "replicas": len(urls), "sglang": {"urls": urls}},
        "trainer": {"steps": 1, "run_dir": str(directory / "run"), "save_every_steps": 0},
        "observe": {"progress": False, "tensorboard": False},
    }
    (directory / "task.yaml").write_text(yaml.safe_dump(content))
    return directory / "task.yaml"


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
    algorithm, limits, phases = parts.algorithm_of(config), parts.deadlines(config), Phases()
    placement = parts.placement(config, engines=True)
    group = parts.policy_group(config, placement)
    group.__class__ = NoModel
    made = parts.generation(config, inputs, algorithm, placement, progress, phases)
    with Ending(run_dir, tensorboard=False) as metrics:
        controller = Controller(
            config.trainer,
            Parts(
                policy=group,
                source=made.sampler,
                build=parts.batch_builder(config, algorithm),
                metrics=metrics,
                progress=progress,
                phases=phases,
                engine=made.engine,
                recorder=Recorder(run_dir),
                closers={"verifiers": made.scorer.close},
                deadlines=limits,
            ),
            max_staleness=0,
        )
        controller._weight_sync = NoWeights(made.engine.fleet)  # type: ignore[assignment,attr-defined]
        await parts.start_all(placement, group, made, progress)
        spare_event_loop()  # as runtime/launch.py does
        with watch or nullcontext():
            metrics.begin()
            await controller.run()
    (line,) = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    check(line, tokens)
    if watch:
        return watch.found()
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
    run_dir = parts.run_directory(config)
    run_dir.mkdir(parents=True)
    progress = Progress(total_steps=1, rollouts_per_prompt=SAMPLES, mode="off", title="control plane")
    inputs = read_inputs(config, progress)
    with cluster(demand_of(config).processes):
        return asyncio.run(one_step(config, inputs, run_dir, tokens, Watch() if watched else None))


def measured(millions: int, urls: list[str], repeats: int, tokens: int) -> dict[str, Any]:
    """Batches of about so many tokens, each by a fresh driver; the last one is watched."""
    prompts = -(-millions * 1_000_000 // (SAMPLES * tokens))
    runs = [fresh_run(prompts, urls, tokens) for _ in range(repeats)]
    middle = sorted(runs, key=lambda run: run["driver_cpu_s"])[(repeats - 1) // 2]
    found = {"tokens": prompts * SAMPLES * tokens, "rollouts": prompts * SAMPLES} | middle
    found |= fresh_run(prompts, urls, tokens, "--watched")
    return found | {"driver_cpu_s_of_all": [run["driver_cpu_s"] for run in runs], "load": os.getloadavg()[0]}


def fresh_run(prompts: int, urls: list[str], tokens: int, *options: str) -> dict[str, Any]:
    """Numbers of one batch by a driver in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="control_plane_") as name:
        write_task(Path(name), urls, prompts, tokens)
        command = [sys.executable, __file__, "--one", name, "--tokens", str(tokens), *options]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800).stdout
    return json.loads(output.splitlines()[-1])


def missed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Goals that were not reached."""
    found = []
    for millions, cpu_goal_s in CPU_GOAL_S.items():
        if row := rows.get(str(millions)):
            goals = {"driver_cpu_s": cpu_goal_s, "latest_ms": STALL_GOAL_MS, "p99_ms": P99_GOAL_MS}
            over = {key: goal for key, goal in goals.items() if row[key] > goal}
            found += [f"{millions} M tokens: {k} {row[k]:.2f}, at most {goal:g}" for k, goal in over.items()]
    for millions in (40, 100):
        if (large := rows.get(str(millions))) and (gib := large["own_gib"] + large["mapped_gib"]) > MEMORY_GOAL_GIB:
            found.append(f"{millions} M tokens: {gib:.2f} GiB, at most {MEMORY_GOAL_GIB:g}")
    return found


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        print(json.dumps(run_one(arguments.one, arguments.tokens, watched=arguments.watched)))
        return
    columns = ("driver_cpu_s", "event_loop_cpu_s", "latest_ms", "p99_ms", "own_gib", "mapped_gib", "seconds")
    table = Table("M tokens", *columns, title="the driver")
    rows: dict[str, dict[str, Any]] = {}
    with canned_fleet(arguments.servers, (), canned_answers(arguments.tokens)) as fleet:
        for millions in arguments.millions:
            row = rows[str(millions)] = measured(millions, fleet.urls, arguments.repeats, arguments.tokens)
            table.add_row(str(millions), *(f"{row[key]:.2f}" for key in columns))
    Console().print(table)
    setup = {
        "samples": SAMPLES,
        "tokens": arguments.tokens,
        "servers": arguments.servers,
        "ranks": RANKS,
        "cpu_count": os.cpu_count(),
    }
    name = "control_plane" if arguments.servers == SERVERS else f"control_plane_{arguments.servers}"
    name += "" if arguments.tokens == TOKENS else f"_{arguments.tokens}t"
    sglang_servers.conclude(name, {"setup": setup, "rows": rows, "problems": missed(rows)}, write=arguments.json)


if __name__ == "__main__":
    main()
