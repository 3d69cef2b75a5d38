"""Benchmark: loading a Hugging Face checkpoint into a Megatron model, this package beside mbridge 0.15.1.

Both fill the same model (Megatron-core's local layers in bf16 on the CPU, gloo between ranks) from the same synthetic
files of Qwen2.5's shape, each time in fresh processes and in turns; the parameters are compared at the end. mbridge
builds its models of Transformer Engine's layers, which need a GPU; here its own loader (`Bridge.load_weights`) fills
ours, and is told what the two norms of a layer are called. Time is from before the files are opened until all ranks
have their weights, importing and building left out. "cold": the system's copy of the files was dropped before. Memory
is the largest resident set of a rank above that before loading.

    pip install --no-deps --target DIRECTORY mbridge==0.15.1 einops
    OMP_NUM_THREADS=1 python benchmarks/hf_load.py --mbridge DIRECTORY [--layers 12] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "hf_load.json"
GIB = 2**30
VARIANTS = ("ours", "mbridge", "mbridge, memory_efficient")
DEADLINE_S = 1200


def load(variant: str, directory: Path, packages: Path, chunks: Any, config: Any) -> None:
    """Fill the model."""
    if variant == "ours":
        from megatron_daro.actor.weights import load_hf_weights
        from megatron_daro.config.model_shape import read_model_shape
        from megatron_daro.convert.hf_files import HFCheckpoint

        with HFCheckpoint(directory) as tensors:
            load_hf_weights(chunks, read_model_shape(directory), tensors)
        return
    bridge_of(directory, config).load_weights(chunks, str(directory), memory_efficient="efficient" in variant)


def bridge_of(directory: Path, config: Any) -> Any:
    """mbridge's bridge of the checkpoint, told the names of the local layers' norms."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(str(directory), make_vocab_size_divisible_by=128)
    bridge.padded_vocab_size = bridge.vocab_size = bridge.hf_config.vocab_size
    layer, kind = "model.layers.{layer_number}.", type(bridge)
    kind._OTHER_MAPPING = {"input_layernorm.weight": [f"{layer}input_layernorm.weight"]}
    post = {"pre_mlp_layernorm.weight": [f"{layer}post_attention_layernorm.weight"]}
    kind._MLP_MAPPING = {**kind._MLP_MAPPING, **post}
    return bridge


def rank_main(given: argparse.Namespace) -> None:
    """One rank: build, load, and print what it took."""
    import torch
    import torch.distributed as dist
    from checkpoint_save import PeakMemory

    from megatron_daro.actor import model, parallel
    from megatron_daro.actor.parallel import Layout
    from megatron_daro.config.model_shape import read_model_shape

    sys.path.append(str(given.mbridge))
    if given.variant != "ours":
        import mbridge  # noqa: F401 - so that importing it is not measured
    layout, shape = Layout(tensor=given.tensor), read_model_shape(given.directory)
    parallel.initialize(layout, rank=given.rank, init_method=f"file://{given.rendezvous}", seed=1, timeout_s=600)
    config = model.transformer_config(shape, layout, dtype="bf16", sequence_parallel=given.tensor > 1)
    chunks = model.build_model(shape, config)
    for parameter in chunks[0].parameters():
        parameter.data.zero_()
    dist.barrier()
    with PeakMemory() as memory, torch.no_grad():
        start = time.perf_counter()
        load(given.variant, given.directory, given.mbridge, chunks, config)
        dist.barrier()
        taken = time.perf_counter() - start
    digest = hashlib.sha256()
    for _, values in sorted(chunks[0].named_parameters()):
        digest.update(values.detach().contiguous().view(torch.uint8).numpy().data)
    print(json.dumps({"seconds": taken, "bytes": memory.extra, "sha256": digest.hexdigest()}), flush=True)
    parallel.shutdown()


def run(
    variant: str, directory: Path, packages: Path, tensor: int, *, cold: bool
) -> tuple[float, int, tuple[str, ...]]:
    """Seconds until all ranks have their weights, extra bytes of the largest rank, and what each rank holds."""
    if cold:
        os.sync()
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--variant", variant, "--directory", str(directory)]
        command += ["--mbridge", str(packages), "--tensor", str(tensor), "--rendezvous", f"{folder}/rendezvous"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(tensor)
        ]
        answers = []
        for rank in ranks:
            out, error = rank.communicate(timeout=DEADLINE_S)
            if rank.returncode:
                sys.exit(f"{variant} failed: {error[-3000:]}")
            answers.append(json.loads(out.splitlines()[-1]))
    return (
        max(a["seconds"] for a in answers),
        max(a["bytes"] for a in answers),
        tuple(a["sha256"] for a in answers),
    )


def measure(root: Path, packages: Path, *, layers: int, rounds: int) -> dict[str, object]:
    """Everything in turns; medians."""
    from convert import make_checkpoint

    directory = root / "hf"
    size = make_checkpoint(directory, layers)
    rows = []
    for tensor in (1, 2):
        for cold in (True, False):
            if not cold:
                run("ours", directory, packages, tensor, cold=False)
            found: dict[str, list[tuple[float, int]]] = {variant: [] for variant in VARIANTS}
            held = set()
            for _ in range(rounds):
                for variant in VARIANTS:
                    seconds, extra, digests = run(variant, directory, packages, tensor, cold=cold)
                    found[variant].append((seconds, extra))
                    held.add(digests)
            if len(held) != 1:
                sys.exit(f"TP {tensor}: the parameters are not the same")
            ours = statistics.median(s for s, _ in found["ours"])
            for variant, values in found.items():
                seconds = statistics.median(s for s, _ in values)
                rows.append(
                    {
                        "tensor_parallel": tensor,
                        "files": "cold" if cold else "warm",
                        "variant": variant,
                        "seconds": seconds,
                        "of_ours": seconds / ours,
                        "gib_per_s": size / GIB / seconds,
                        "extra_gib": max(b for _, b in values) / GIB,
                        "all": values,
                    }
                )
    return {"bytes": size, "layers": layers, "rounds": rounds, "rows": rows}


def table(found: dict[str, Any]) -> Table:
    """One line for each way."""
    made = Table("TP", "files", "loader", "seconds (median)", "times ours", "GiB/s", "extra GiB of a rank")
    for row in found["rows"]:
        numbers = (f"{row[name]:.2f}" for name in ("seconds", "of_ours", "gib_per_s", "extra_gib"))
        made.add_row(str(row["tensor_parallel"]), row["files"], row["variant"], *numbers)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbridge", type=Path, required=True, help="folder that mbridge was installed into")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model, 12: 1.5 billion parameters")
    parser.add_argument("--rounds", type=int, default=3, help="turns")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} into benchmarks/results")
    for name, kind in {"variant": str, "directory": Path, "tensor": int, "rank": int, "rendezvous": Path}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        rank_main(given)
        return
    from convert import verdict

    with tempfile.TemporaryDirectory() as root:
        found = measure(Path(root), given.mbridge, layers=given.layers, rounds=given.rounds)
    Console().print(table(found))
    for row in found["rows"]:  # type: ignore[attr-defined]
        if row["variant"] != "ours":
            what = f"TP {row['tensor_parallel']}, {row['files']}: seconds of {row['variant']} over ours"
            print(verdict(what, row["of_ours"], 1.0, most=False))
    if given.json:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
