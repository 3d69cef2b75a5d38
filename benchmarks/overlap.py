"""Steps per hour and final accuracy with generation beside training (max_staleness 1, TIS) and without (0).

    OMP_NUM_THREADS=1 python benchmarks/overlap.py --json                                # about 24 minutes on 2 cores
    OMP_NUM_THREADS=1 python benchmarks/overlap.py --seeds 1 --steps 3 --prompts 4       # to try the script out

The task: write one of 62 letters and digits twenty times, then once more after a mark; the base model, made here,
writes it or its successor there with equal chance. One Megatron rank trains, one SGLang server answers, each with one
thread: on two cores each has one to itself. The server stays up; each run is `megatron-daro train` in a process of its
own. Seeds alternate between the two sides. Model and batch are such that generation and training of staleness 0 take
about equally long; the script says how long they took and fails if they differ by more than 20 %. Steps per hour are
over all steps of a run, from the first batch to the last weight update, without evaluation and checkpoint. The
two runs of a seed are compared with each other; exit code 1 if staleness 1 has less than 1.6 times the steps per hour
(median of the seeds), or if the 95 % interval of what it loses in final accuracy (Student's t over the seeds' pairs)
lies above zero.

`cores busy` is the CPU time of the whole machine over the time, between the first and the last but one step; with
staleness 1 a step takes at least its CPU seconds over the number of cores, however well its parts overlap: `limit` is
the ratio that a step of that length would have, and above it no scheduling can come on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import sglang_servers
import tiny_task
import yaml
from rich.console import Console
from rich.table import Table

from megatron_daro.engine.sglang.servers import LocalServer
from megatron_daro.observe.metrics import read_metrics

sys.path.append(str(sglang_servers.ROOT / "examples" / "lab"))
from results import Interval

SPEED_GOAL, BALANCE = 1.6, 1.2
CORES = os.cpu_count() or 1
TIMES, K = 20, 8
HELD_OUT = 16
"""How often each problem is asked in an evaluation."""
_LETTERS = string.digits + string.ascii_letters
_SYMBOLS = ["<pad>", "<bos>", "<eos>", *_LETTERS, "=", "####"]
_END = 2
_SHAPE: dict[str, Any] = {
    "vocab_size": len(_SYMBOLS),
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": _END,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_RUN_LIMIT_S = 900.0
_START_LIMIT_S = 300.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=sglang_servers.PYTHON, help="interpreter of the server")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24, help="of a step, with 8 answers each")
    parser.add_argument("--hidden", type=int, default=304, help="size of the model: wider makes training slower")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/overlap.json")
    return parser.parse_args()


def build_task(directory: Path, hidden: int) -> None:
    """Problems, tokenizer and base model."""
    for name, times in (("held_out", HELD_OUT), ("train", 1)):
        lines = [json.dumps({"problem": f"{letter}=", "answer": letter}) + "\n" for letter in _LETTERS * times]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    tiny_task.save_tokenizer(directory / "base", _SYMBOLS)
    _pretrain(directory / "base", hidden)


def _pretrain(directory: Path, hidden: int, steps: int = 240, rows: int = 48) -> None:
    """Supervised steps on answers that are right or the successor of what is right."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, hidden_size=hidden, intermediate_size=3 * hidden))
    first, equals, mark = (_SYMBOLS.index(symbol) for symbol in (_LETTERS[0], "=", "####"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        asked = torch.randint(0, len(_LETTERS), (rows, 1))
        said = (asked + torch.randint(0, 2, asked.shape)) % len(_LETTERS)
        symbols = [torch.full((rows, 1), symbol) for symbol in (equals, mark, _END)]
        letters = (asked + first).expand(rows, TIMES)
        inputs = torch.cat([asked + first, symbols[0], letters, symbols[1], said + first, symbols[2]], dim=1)
        labels = inputs.clone()
        labels[:, :2] = -100
        loss = model(inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)


async def start_server(arguments: argparse.Namespace, directory: Path) -> tuple[LocalServer, str]:
    """One server that answers, and its URL."""
    rows = max(arguments.prompts * K, 64)
    server = sglang_servers.server(
        sglang_servers.require(arguments.python),
        directory / "base",
        directory / "server.log",
        environment={"OMP_NUM_THREADS": "1"},
        dtype="float32",
        max_total_tokens=rows * 40,
        max_running_requests=rows,
    )
    url = await server.launch()
    end = time.monotonic() + _START_LIMIT_S
    while not await asyncio.to_thread(_answers, url):
        reason = await server.death()
        if reason or time.monotonic() > end:
            raise SystemExit(f"the server did not start: {reason or 'too slow'}")
        await asyncio.sleep(0.5)
    return server, url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def configuration(arguments: argparse.Namespace, directory: Path, url: str, staleness: int, seed: int) -> Path:
    """The file of one run."""
    name = f"staleness{staleness}-seed{seed}"
    content = {
        "model": {"path": str(directory / "base")},
        "data": {
            "train": [str(directory / "train.jsonl")],
            "prompt_template": "plain",
            "max_prompt_tokens": 2,
            "eval": [{"name": "copies", "path": str(directory / "held_out.jsonl"), "temperature": 1.0}],
        },
        "rollout": {
            "prompts_per_step": arguments.prompts,
            "rollouts_per_prompt": K,
            "max_response_tokens": TIMES + 4,
            "max_staleness": staleness,
        },
        "algorithm": {"name": "grpo", "filter": "none", "correction": {"kind": "tis" if staleness else "none"}},
        "actor": {
            "precision": "fp32",
            "micro_batch_tokens": 2048,
            "optimizer": {"learning_rate": arguments.learning_rate},
        },
        "engine": {"kind": "sglang", "sglang": {"urls": [url], "bucket_mib": 16}},
        "reward": {"verifier": "exact", "workers": 1},
        "trainer": {
            "run_dir": str(directory / name),
            "steps": arguments.steps,
            "seed": seed,
            "save_every_steps": 0,
            "eval_every_steps": arguments.steps,
        },
        "observe": {"tensorboard": False, "progress": False},
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def train(config: Path) -> dict[str, Any]:
    """One run, and its numbers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}  # as high as the server's
    command = [sys.executable, "-m", "megatron_daro.cli", "train", str(config)]
    busy = Busy(config.with_suffix("") / "metrics.jsonl")
    with config.with_suffix(".log").open("wb") as log, busy:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=_RUN_LIMIT_S, env=environment)
    if done.returncode:
        raise SystemExit(f"a run failed, its log ends with:\n{config.with_suffix('.log').read_text()[-2000:]}")
    return numbers_of(config.with_suffix("")) | busy.numbers()


class Busy:
    """What the whole machine computes while a run writes its steps."""

    def __init__(self, metrics: Path) -> None:
        self._metrics, self._over = metrics, threading.Event()
        self._at: list[tuple[float, float]] = []  # of each line that appeared: when, and CPU seconds until then
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def numbers(self) -> dict[str, float]:
        """CPU seconds of a step, and cores that were busy."""
        (began, busy_before), (ended, busy_after) = self._at[1], self._at[-2]  # line 0 is the evaluation before
        busy = busy_after - busy_before
        return {"cpu_s_per_step": busy / (len(self._at) - 3), "cores_busy": busy / (ended - began)}

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            lines = self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
            if lines > len(self._at):
                times = psutil.cpu_times()
                self._at += [(time.monotonic(), sum(times) - times.idle - times.iowait - times.guest)] * (
                    lines - len(self._at)
                )


def numbers_of(run_dir: Path) -> dict[str, Any]:
    """Speed, phases and accuracies of a run."""
    lines: list[dict[str, Any]] = [dict(line) for line in read_metrics(run_dir)]
    steps = [line for line in lines if line["step"] > 0]
    seconds = [
        line["timing/step_s"] - (line.get("timing/evaluate_s") or 0) - (line.get("timing/checkpoint_s") or 0)
        for line in steps
    ]
    parts = ("rollout", "train", "forward_backward", "sync", "sync_send", "write", "build", "reward")
    return {
        "run": run_dir.name,
        "steps_per_hour": 3600 * len(steps) / sum(seconds),
        "step_s": statistics.median(seconds),
        "parts_s": {p: statistics.median(line.get(f"timing/{p}_s") or 0.0 for line in steps) for p in parts},
        "staleness_mean": statistics.mean(line["rollout/staleness_mean"] for line in steps),
        "accuracy_before": lines[0]["eval/copies/accuracy"],
        "accuracy": lines[-1]["eval/copies/accuracy"],
    }


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Numbers of all runs by staleness."""
    build_task(directory, arguments.hidden)
    server, url = await start_server(arguments, directory)
    runs: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    try:
        for seed in range(arguments.seeds):
            for staleness in (1, 0) if seed % 2 else (0, 1):
                config = configuration(arguments, directory, url, staleness, seed)
                runs[staleness].append(await asyncio.to_thread(train, config))
                print(runs[staleness][-1], flush=True)
    finally:
        await server.stop()
    return runs


def summarized(arguments: argparse.Namespace, runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios and problems."""
    speed = {side: statistics.median(run["steps_per_hour"] for run in runs[side]) for side in runs}
    accuracy = {side: [run["accuracy"] for run in runs[side]] for side in runs}
    phases = {part: statistics.median(run["parts_s"][part] for run in runs[0]) for part in ("rollout", "train", "sync")}
    balance = max(phases["rollout"], phases["train"]) / min(phases["rollout"], phases["train"])
    lower = Interval.of([before - after for before, after in zip(accuracy[0], accuracy[1], strict=True)])
    pairs = [after["steps_per_hour"] / before["steps_per_hour"] for before, after in zip(runs[0], runs[1], strict=True)]
    ratio = statistics.median(pairs)
    alone = statistics.median(3600 / run["steps_per_hour"] for run in runs[0])
    limit = alone / (statistics.median(run["cpu_s_per_step"] for run in runs[1]) / CORES)
    problems = []
    if ratio < SPEED_GOAL:
        problems.append(f"staleness 1 has {ratio:.2f} times the steps an hour; at least {SPEED_GOAL}")
    if balance > BALANCE:
        problems.append(f"generation and training differ by a factor of {balance:.2f}; at most {BALANCE}")
    if lower.low > 0:
        problems.append(f"accuracy is lower by {lower.low:.3f} to {lower.high:.3f} (95 %)")
    return {
        "setup": {
            **{key: getattr(arguments, key) for key in ("steps", "seeds", "prompts", "hidden", "learning_rate")},
            **sglang_servers.versions(arguments.python),
        },
        "steps_per_hour": {str(side): value for side, value in speed.items()},
        "ratio": ratio,
        "ratios": pairs,
        "limit": limit,
        "phases_of_staleness_0_s": phases,
        "balance": balance,
        "accuracy": {str(side): values for side, values in accuracy.items()},
        "lower_by": [lower.mean, lower.low, lower.high],
        "runs": {str(side): values for side, values in runs.items()},
        "problems": problems,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(
        "staleness", "seed", "steps/h", "step s", "rollout s", "train s", "sync s", "cores busy", "accuracy", "after"
    )
    for side, runs in result["runs"].items():
        for seed, run in enumerate(runs):
            parts = [run["step_s"], *(run["parts_s"][part] for part in ("rollout", "train", "sync"))]
            accuracies = [f"{run[key]:.3f}" for key in ("accuracy_before", "accuracy")]
            table.add_row(
                side,
                str(seed),
                f"{run['steps_per_hour']:.0f}",
                *(f"{part:.2f}" for part in parts),
                f"{run['cores_busy']:.2f}",
                *accuracies,
            )
    Console(width=110).print(table)
    mean, low, high = result["lower_by"]
    print(
        f"steps an hour: {result['ratio']:.2f} times, {result['limit']:.2f} if both cores never waited; phases of "
        f"staleness 0 differ by {result['balance']:.2f}; accuracy lower by {mean:.3f} ({low:.3f} to {high:.3f})"
    )


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="overlap_") as name:
        result = summarized(arguments, asyncio.run(measure(arguments, Path(name))))
    show(result)
    sglang_servers.conclude("overlap", result, write=arguments.json)


if __name__ == "__main__":
    main()
