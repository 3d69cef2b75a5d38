"""Benchmark: converting a checkpoint, beside copying the same files, in turns on one disk in one run.

A synthetic bf16 model of the shape of Qwen2.5-3B (its embeddings untied, so 3.4 billion parameters; --layers makes it
smaller) is written once. Then in turns: `cp` of its files and `sync`; `megatron-daro convert` to each format; and back
to Hugging Face files; each ends with `sync`, and the system's copy of the source is dropped before each. Bytes per
second are those of the source. Peak memory is the largest resident set of any one process of the conversion, looked at
20 times a second.

    python benchmarks/convert.py --rounds 2 --json      # 21 GB of disk

With --experts the model is narrow and has 256 experts a layer, so that the number of tensors counts: 48,000 with 61
layers, as DeepSeek-V3 has them. The way back is in 256 files.

    python benchmarks/convert.py --experts --layers 61 --rounds 1
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import harness
import psutil
import torch
from harness import GIB

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_files import write_hf_checkpoint
from megatron_daro.convert.mapping import hf_tensor_shapes

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
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "moe_intermediate_size": 64,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 1024,
}
FILES_BACK = 256
LEAST_OF_CP, MOST_GIB = 0.6, 1.5


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


def run(command: Sequence[str], source: Path, out: Path) -> dict[str, float]:
    """Seconds of a command and of the `sync` after it, those of CPU of all its processes, and the largest resident set
    of one of them. What it wrote is removed."""
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start, peak, cpu = time.perf_counter(), 0, dict[int, float]()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    family = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for one in (family, *family.children(recursive=True)):
                peak = max(peak, one.memory_info().rss)
                cpu[one.pid] = sum(one.cpu_times()[:2])
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed: {process.stderr.read() if process.stderr else ''}")
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return {"seconds": seconds, "peak_bytes": peak, "cpu_seconds": sum(cpu.values())}


def measure(root: Path, *, layers: int, rounds: int, processes: int, experts: bool) -> dict[str, Any]:
    """Everything in turns; medians."""
    hf, megatron, out = root / "hf", root / "megatron", root / "out"
    size = make_checkpoint(hf, layers, EXPERTS if experts else CONFIG)
    files = ["--max-shard-size", str(size // FILES_BACK)] if experts else []
    convert = [sys.executable, "-m", "megatron_daro", "convert", "--processes", str(processes), "--out"]
    subprocess.run([*convert, str(megatron), "--hf", str(hf)], stdout=subprocess.DEVNULL, check=True)
    commands: dict[str, tuple[list[str], Path]] = {
        "cp": (["cp", "-r", str(hf), str(out)], hf),
        "to daro": ([*convert, str(out), "--hf", str(hf)], hf),
        "to torch_dist": ([*convert, str(out), "--hf", str(hf), "--format", "torch_dist"], hf),
        "to Hugging Face": ([*convert, str(out), "--megatron", str(megatron), *files], megatron),
    }
    sides = {name: partial(run, command, source, out) for name, (command, source) in commands.items()}
    rows = harness.in_turns(sides, rounds, warm_up=0)
    seconds = {name: harness.medians(of_command)["seconds"] for name, of_command in rows.items()}
    return {
        "bytes": size,
        "layers": layers,
        "experts": experts,
        "rounds": rounds,
        "processes": processes,
        "seconds": {name: [row["seconds"] for row in of_command] for name, of_command in rows.items()},
        "median_gib_per_s": {name: size / GIB / value for name, value in seconds.items()},
        "of_cp": {name: seconds["cp"] / value for name, value in seconds.items()},
        "cpu_seconds": {name: harness.medians(of_command)["cpu_seconds"] for name, of_command in rows.items()},
        "peak_gib": {name: max(row["peak_bytes"] for row in of) / GIB for name, of in rows.items()},
    }


def main() -> None:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--layers", type=int, default=36, help="layers of the model; 36: 3.4 billion parameters")
    parser.add_argument("--experts", action="store_true", help="256 narrow experts a layer")
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    parser.add_argument("--processes", type=int, default=2, help="of each conversion")
    parser.add_argument("--directory", type=Path, help="where the files go; needs three times their size")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        sizes = {"layers": given.layers, "rounds": given.rounds, "processes": given.processes}
        result = measure(Path(root), **sizes, experts=given.experts)
    columns = ("median_gib_per_s", "of_cp", "peak_gib", "cpu_seconds")
    rows = {name: [result[key][name] for key in columns] for name in result["of_cp"]}
    harness.table("conversion", ("GiB/s, median", "of cp + sync", "peak memory of a process, GiB", "CPU, s"), rows)
    problems = []
    for name in [] if given.experts else list(rows)[1:]:
        problems += harness.at_least(f"{name}, bytes per second of cp + sync", result["of_cp"][name], LEAST_OF_CP)
        problems += harness.at_most(f"{name}, GiB of a process", result["peak_gib"][name], MOST_GIB)
    harness.conclude("convert", result, problems, write=given.json)


if __name__ == "__main__":
    main()
