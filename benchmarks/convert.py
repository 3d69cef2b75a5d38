"""Benchmark: converting a checkpoint, beside copying the same files, in turns on one disk in one run.

A synthetic bf16 model of the shape of Qwen2.5-3B (its embeddings untied, so 3.4 billion parameters; --layers makes it
smaller) is written once. Then in turns: `cp` of its files and `sync`; `megatron-daro convert` to each format; and back
to Hugging Face files; each ends with `sync`, and the system's copy of the source is dropped before each. Bytes per
second are those of the source. Peak memory is the largest resident set of any one process of the conversion, looked at
20 times a second.

    python benchmarks/convert.py [--layers 36] [--rounds 3] [--processes 2] [--directory DIR] [--json]
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_writer import write_hf_checkpoint
from megatron_daro.convert.mapping import hf_tensor_shapes

RESULTS = Path(__file__).parent / "results" / "convert.json"
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


def table(found: dict[str, dict[str, float]]) -> Table:
    """One line for each command."""
    made = Table("command", "GiB/s (median)", "of cp + sync", "peak memory of a process, GiB")
    for name, speed in found["median_gib_per_s"].items():
        made.add_row(name, f"{speed:.2f}", f"{found['of_cp'][name]:.0%}", f"{found['peak_gib'][name]:.2f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="layers of the model, 36: 3.4 billion parameters")
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    parser.add_argument("--processes", type=int, default=2, help="of each conversion")
    parser.add_argument("--directory", type=Path, help="where the files go; needs three times their size")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} into benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        found = measure(Path(root), layers=given.layers, rounds=given.rounds, processes=given.processes)
    Console().print(table(found))  # type: ignore[arg-type]
    for name, share in found["of_cp"].items():  # type: ignore[attr-defined]
        if name != "cp":
            print(verdict(f"{name}, bytes per second of cp + sync", share, 0.6, most=False))
            print(verdict(f"{name}, GiB of a process", found["peak_gib"][name], 1.5, most=True))  # type: ignore[index]
    if given.json:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
