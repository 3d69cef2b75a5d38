"""Benchmark: converting a checkpoint, beside copying the same files, in turns on one disk in one run.

A synthetic bf16 model of the shape of Qwen2.5-3B (its embeddings untied, so 3.4 billion parameters; --layers makes it
smaller) is written once. Then in turns: `cp` of its files and `sync`; `megatron-daro convert` to each format; and back
to Hugging Face files; each ends with `sync`, and the system's copy of the source is dropped before each. Bytes per
second are those of the source. Peak memory is the largest resident set of any one process of the conversion, looked at
20 times a second.

With --experts another model instead: the tensors of Qwen3-30B-A3B, 48 layers of 128 experts, with tiny widths. What is
measured then is all that is not bytes, in CPU seconds of one process: to each format of Megatron's and back, in turns;
with --parts in as many files and parts as the real one has, each of which opens the source anew.

    python benchmarks/convert.py [--layers 36] [--rounds 3] [--processes 2] [--directory DIR] [--json]
    python benchmarks/convert.py --experts [--parts] [--layers 48] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import plan
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.workshop.convert import conversion

RESULTS = Path(__file__).parent / "results"
GIB = 1024**3
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_REAL_GB = 61.1
_MOST_RATIO = 1.5


def verdict(what: str, got: float, goal: float, *, most: bool) -> str:
    """Return a line that says whether a number reaches its goal. most: the goal is an upper limit."""
    held = got <= goal if most else got >= goal
    return f"{'HOLDS' if held else 'MISSED'}: {what}: {got:.3g}, must be {'at most' if most else 'at least'} {goal:g}"


def make_checkpoint(directory: Path, layers: int, config: Mapping[str, object] = CONFIG) -> int:
    """Write the model; returns its bytes."""
    config = {**config, "num_hidden_layers": layers}
    block = torch.randn(1 << 22).to(torch.bfloat16)
    shapes = hf_tensor_shapes(read_model_shape(config))

    def values(dims: tuple[int, ...]) -> torch.Tensor:
        number = torch.Size(dims).numel()
        if number <= len(block):  # a copy: a view of the block would hold all of it
            return block[:number].clone().view(dims)
        return block.repeat(-(-number // len(block)))[:number].view(dims)

    write_hf_checkpoint(directory, ((name, values(dims)) for name, dims in shapes.items()), config)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def timed(command: Sequence[str], source: Path) -> tuple[float, int]:
    """Seconds of a command and of the `sync` after it, and the largest resident set of one of its processes."""
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    family = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            peak = max([peak, *(p.memory_info().rss for p in (family, *family.children(recursive=True)))])
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed: {process.stderr.read() if process.stderr else ''}")
    os.sync()
    return time.perf_counter() - start, peak


def measure(root: Path, *, layers: int, rounds: int, processes: int) -> dict[str, object]:
    """Everything in turns; medians."""
    hf, out = root / "hf", root / "out"
    size = make_checkpoint(hf, layers)
    convert = [sys.executable, "-m", "megatron_daro", "convert", "--processes", str(processes), "--out"]
    megatron = root / "megatron"
    timed([*convert, str(megatron), "--hf", str(hf)], hf)
    commands: dict[str, tuple[list[str], Path]] = {
        "cp": (["cp", "-r", str(hf), str(out)], hf),
        "to daro": ([*convert, str(out), "--hf", str(hf)], hf),
        "to torch_dist": ([*convert, str(out), "--hf", str(hf), "--format", "torch_dist"], hf),
        "to Hugging Face": ([*convert, str(out), "--megatron", str(megatron)], megatron),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    memory: dict[str, int] = dict.fromkeys(commands, 0)
    for _ in range(rounds):
        for name, (command, source) in commands.items():
            taken, peak = timed(command, source)
            seconds[name].append(taken)
            memory[name] = max(memory[name], peak)
            shutil.rmtree(out, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": size,
        "layers": layers,
        "rounds": rounds,
        "processes": processes,
        "seconds": seconds,
        "median_gib_per_s": {name: size / GIB / value for name, value in median.items()},
        "of_cp": {name: median["cp"] / value for name, value in median.items()},
        "peak_gib": {name: value / GIB for name, value in memory.items()},
    }


def measure_experts(root: Path, *, layers: int, rounds: int, parts: bool) -> dict[str, object]:
    """CPU seconds of one process to each format and back, in turns; medians."""
    hf, megatron, back = root / "hf", root / "megatron", root / "back"
    size = make_checkpoint(hf, layers, EXPERTS)
    share = size / (_REAL_GB * 1e9) if parts else 1.0
    if parts:
        plan._LEAST_FILE_BYTES = 1
        conversion.PART_BYTES = int(conversion.PART_BYTES * share)
    seconds: dict[str, list[float]] = {}

    def carry_out(name: str, make_plan: Callable[[], plan.Plan], out: Path) -> None:
        start = time.process_time()
        conversion.convert(make_plan(), out, processes=1, verify=False, progress=lambda phase, done: None)
        seconds.setdefault(name, []).append(time.process_time() - start)

    for _ in range(rounds):
        for format_ in plan.FORMATS:
            carry_out(f"to {format_}", partial(plan.plan_to_megatron, hf, format_, None), megatron)
            carry_out(f"from {format_}", partial(plan.plan_to_hf, megatron, hf, None, int(5e9 * share)), back)
            shutil.rmtree(megatron)
            shutil.rmtree(back)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "layers": layers,
        "experts": EXPERTS["num_experts"],
        "rounds": rounds,
        "parts": parts,
        "cpu_seconds": seconds,
        "back_over_to": {name: median[f"from {name}"] / median[f"to {name}"] for name in plan.FORMATS},
    }


def table(found: dict[str, dict[str, float]]) -> Table:
    """One line for each command."""
    made = Table("command", "GiB/s (median)", "of cp + sync", "peak memory of a process, GiB")
    for name, speed in found["median_gib_per_s"].items():
        made.add_row(name, f"{speed:.2f}", f"{found['of_cp'][name]:.0%}", f"{found['peak_gib'][name]:.2f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of the model; unset: 36, 3.4 billion parameters, or 48")
    parser.add_argument("--experts", action="store_true", help="many small tensors of experts instead of large ones")
    parser.add_argument("--parts", action="store_true", help="with --experts: as many files as the real model has")
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    parser.add_argument("--processes", type=int, default=2, help="of each conversion")
    parser.add_argument("--directory", type=Path, help="where the files go; needs three times their size")
    parser.add_argument("--json", action="store_true", help="also write the numbers into benchmarks/results")
    given = parser.parse_args()
    if given.experts:
        with tempfile.TemporaryDirectory(dir=given.directory) as root:
            experts = measure_experts(Path(root), layers=given.layers or 48, rounds=given.rounds, parts=given.parts)
        print(json.dumps(experts, indent=1))
        for name, ratio in experts["back_over_to"].items():  # type: ignore[attr-defined]
            print(verdict(f"CPU seconds from {name} over those to it", ratio, _MOST_RATIO, most=True))
        if given.json:
            (RESULTS / "convert_experts.json").write_text(json.dumps(experts, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        found = measure(Path(root), layers=given.layers or 36, rounds=given.rounds, processes=given.processes)
    Console().print(table(found))  # type: ignore[arg-type]
    for name, share in found["of_cp"].items():  # type: ignore[attr-defined]
        if name != "cp":
            print(verdict(f"{name}, bytes per second of cp + sync", share, 0.6, most=False))
            print(verdict(f"{name}, GiB of a process", found["peak_gib"][name], 1.5, most=True))  # type: ignore[index]
    if given.json:
        (RESULTS / "convert.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
