"""Predicts weight syncs from pieces that are measured in the same run, and says what a sync of every recipe is made of.

    OMP_NUM_THREADS=1 python benchmarks/sync_model.py --json          # 2 minutes, 3 GB
    python benchmarks/sync_model.py --rounds 1 --configs DIRECTORY    # with those of the recipes' models, for GPUs

**On this machine** a `BroadcastSender` sends buckets over gloo and TCP to one, two or three receivers
(bucket_receivers.py). Each piece of a bucket is timed alone at four sizes (FITTED) and taken to be linear between
them: packing, the broadcast, the loading of all receivers at once; `new pages` is what packing takes more for the first
two buckets, whose memory the system clears; `calls` is what a bucket of 4 KiB takes, sent for real, beside its
broadcast: calls, answers, threads. The syncs that are predicted have other buckets (WHOLE), and nothing is learned from
them. Everything takes turns; medians are compared.

The model: as in sync/broadcast.py a bucket's calls, broadcast and loading follow each other while the next bucket is
packed. A piece needs so many seconds alone and keeps so many cores busy (CPU seconds of all processes over seconds), so
what sender and receivers take from each other within a piece is in it. Where packing and sending together need more
cores than there are, both become slower by that factor, and by `crowded`, which is learned from a broadcast and a
packing that begin at once: they also share caches and memory. Not modelled: receivers that load while others still
receive.

**For GPUs** bytes are those of the recipe's model and layout; links and memory those of the data sheets
(workshop/plan/gpus.py), reached in full; the latency of a collective is the planner's, learned from published runs
(plan/times.py). Measured on a CPU: own CPU of a call, in this run, at canned servers; the answer of a real server, by
benchmarks/sglang_sync.py. `planner` is its formula, learned from published syncs; `shards` the floor of a sync from
shards to shards. Nothing of it was run on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bucket_calls
import numpy as np
import sglang_servers
import torch
from bucket_receivers import MIB, TINY, Times, Wire, made_model, receivers
from rich.console import Console
from rich.table import Table

from megatron_daro.config import Config, resolve
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.engine.sglang.client import calls_to_servers
from megatron_daro.workshop.plan.gpus import Gpu, find_gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.shard_sync import sync_rows
from megatron_daro.workshop.plan.times import Constants, sync_s, weight_bytes
from megatron_daro.workshop.plan.workload import workload_of
from megatron_daro.workshop.rehearse.canned_server import CannedAnswers, canned_fleet

FITTED = (8 * MIB, 24 * MIB, 34 * MIB, 64 * MIB)
"""Bytes of the buckets that pieces are measured with; 34 MiB, since the C library gives every buffer of more than 32
MiB new pages, and smaller ones those of the last sync (mallopt(3), M_MMAP_THRESHOLD)."""
WHOLE = ((16 * MIB, 192 * MIB), (40 * MIB, 320 * MIB))
"""Bytes of (bucket, model) of the syncs that are predicted; the buckets are none of FITTED."""
BUCKETS_MIB = (256, 1024)
"""Buckets of the recipes: the default on a GPU, and the largest that is worth its memory."""
LIMITS = (0.8, 1.25)
CORES = os.cpu_count() or 1
Part = tuple[float, float]
"""Seconds alone, cores."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one bucket. seconds: alone, at some sizes in bytes, in order; on the lines between them elsewhere. cores: that
    it keeps busy."""

    seconds: tuple[tuple[int, float], ...]
    cores: float

    def at(self, num_bytes: int) -> Part:
        """Return (seconds alone, cores). Where one size is known, each takes as long."""
        sizes, seconds = zip(*self.seconds, strict=True)
        return max(float(np.interp(num_bytes, sizes, seconds)), 0.0), self.cores


def measured(count: int, rounds: int) -> dict[Any, Times]:
    """Seconds of all pieces and whole syncs with so many receivers, in turns."""
    tensors = made_model(max(size for _, size in WHOLE))
    found: dict[Any, list[Times]] = defaultdict(list)
    with receivers(count) as urls:
        wire = Wire(urls, tensors, max(FITTED))
        try:
            for bucket in FITTED:
                wire.send(tensors, bucket)  # the group is made, and all pages of the weights
            for _ in range(rounds):
                found["tiny"].append(wire.tiny())
                found["broadcast", TINY].append(wire.broadcasts(TINY))
                for size in FITTED:
                    found["broadcast", size].append(wire.broadcasts(size))
                    found["load", size].append(wire.loading(size))
                    found["beside", size].append(wire.beside(size))
                    packing, new_pages = wire.packing(size)
                    found["pack", size].append(packing)
                    found["new pages", size].append((new_pages, new_pages))
                for bucket, model in WHOLE:
                    found["sync", bucket, model].append(wire.send(wire.model(model), bucket))
        finally:
            wire.close()
    return medians_of(found)


def medians_of(found: Mapping[Any, Sequence[Times]]) -> dict[Any, Times]:
    """Of the turns of each piece and sync."""
    return {key: tuple(map(statistics.median, zip(*times, strict=True))) for key, times in found.items()}


def piece_of(medians: Mapping[Any, Times], name: str, *sizes: int) -> Piece:
    """What was measured at these sizes."""
    times = {size: medians[name, size] for size in sizes}
    cores = statistics.median(cpu / wall for wall, cpu in times.values() if wall)
    return Piece(tuple((size, wall) for size, (wall, _) in times.items()), cores)


def pieces(medians: Mapping[Any, Times]) -> dict[str, Piece]:
    """The model's constants."""
    result = {name: piece_of(medians, name, *FITTED) for name in ("load", "pack", "new pages")}
    result["broadcast"] = piece_of(medians, "broadcast", TINY, *FITTED)
    wall, cpu = medians["tiny"]
    rest = max(wall - medians["broadcast", TINY][0], 0.0)
    result["calls"] = Piece(((TINY, rest),), cpu / wall)
    return result


# The model -------------------------------------------------------------------------------------------------------


def together_s(chains: Sequence[Sequence[Part]], cores: float, crowded: float = 1.0) -> float:
    """Seconds until all chains are done that start at once. Parts of a chain follow each other; where those that run
    need more cores than there are, all take longer by the same factor; crowded: and by this one, where several run."""
    waiting, total = [[list(part) for part in chain if part[0] > 0] for chain in chains], 0.0
    while running := [chain[0] for chain in waiting if chain]:
        slower = max(1.0, sum(need for _, need in running) / cores) * (crowded if len(running) > 1 else 1.0)
        step = min(left for left, _ in running)
        total += step * slower
        for part in running:
            part[0] -= step
        waiting = [[part for part in chain if part[0] > 1e-12] for chain in waiting]
    return total


def crowding(beside_s: float, both: tuple[Part, Part], cores: float) -> float:
    """By which factor two parts that run together are slower than the cores explain: caches, memory, scheduling."""
    (short, _), (long, _) = sorted(both)
    slower = 1 + max(beside_s - long, 0.0) / short  # the rest of the longer part runs alone
    return max(slower / max(1.0, sum(need for _, need in both) / cores), 1.0)


def predicted_s(sizes: Sequence[int], parts: Mapping[str, Piece], cores: float, crowded: float) -> float:
    """Seconds of a sync of buckets of these sizes."""

    def packed(number: int) -> list[Part]:
        if number >= len(sizes):
            return []
        return [parts["pack"].at(sizes[number])] + [parts["new pages"].at(sizes[number])] * (number < 2)

    def sent(size: int) -> list[Part]:
        return [parts[name].at(size) for name in ("calls", "broadcast", "load")]

    stages = [together_s([sent(size), packed(i + 1)], cores, crowded) for i, size in enumerate(sizes)]
    return together_s([packed(0)], cores) + sum(stages)


# Recipes on GPUs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calls:
    """What the calls of a bucket take. own_s: CPU of the sending rank for each server; answer_s: of a server."""

    own_s: float
    answer_s: float


def measured_calls(servers: int = 16) -> Calls:
    """Own CPU at canned servers, now; the answer of a real one as benchmarks/sglang_sync.py found it: /flush_cache is a
    call that goes to the scheduler and back, as a bucket's does, and has almost nothing to do there."""
    with canned_fleet(servers, (), CannedAnswers([[1]], (0, 1), [[0]], 1)) as fleet:
        own = [asyncio.run(bucket_calls.cpu_s(calls_to_servers, fleet.urls, 40)) / servers for _ in range(5)]
    phases = json.loads((sglang_servers.RESULTS / "sglang_sync.json").read_text())["phases_s"]
    return Calls(statistics.median(own), phases["flush the cache"])


def broadcast_parts(recipe: Config, shape: ModelShape, gpu: Gpu, calls: Calls, bucket: int) -> dict[str, float]:
    """Seconds of each part of a sync in whole, and of the sync: `total`, where servers hear of a bucket while the one
    before is sent (those on GPUs answer early, see sync/broadcast.py); `in turn`, if they heard of it afterwards.

    The ranks of a stage gather over the fast links (experts over the network where EP is larger than a node); packing
    reads and writes each byte once; every byte leaves the sender over its share of the network, or over the links where
    all GPUs are of one machine; each GPU of a server copies its part to its place. Stages send one after the other."""
    layout, workload = ModelLayout.of(recipe.actor), workload_of(recipe, shape)
    rest, experts = weight_bytes(shape, workload.dtype_bytes)
    link, memory = gpu.link_gb_s * 1e9, gpu.memory_gb_s * 1e9
    near, far = within_links(recipe, gpu), layout.expert > gpu.linked
    wire = link if near else gpu.network_gb_s * 1e9
    count = math.ceil((rest + experts) / bucket)
    servers, tensor = recipe.engine.replicas, recipe.engine.sglang.tensor_parallel
    parts = {
        "gather": rest * (1 - 1 / layout.tensor) / link
        + experts * (1 - 1 / layout.expert) / (gpu.network_gb_s * 1e9 if far else link),
        "pack": 2 * (rest + experts) / memory,
        "wire": (rest + experts) / wire,
        "latency": count * (Constants().link_latency_s if near else Constants().network_latency_s),
        "own calls": count * calls.own_s * servers,
        "answers": count * calls.answer_s,
        "load": 2 * (rest + experts) / tensor / memory,
    }
    gathered = parts["gather"] + parts["pack"]
    called = parts["own calls"] + parts["answers"]
    sent = parts["wire"] + parts["latency"]
    first = (gathered + called) / count
    return parts | {
        "buckets": count,
        "total": first + max(gathered, called, sent + parts["load"]),
        "in turn": first + max(gathered, called + sent),
    }


def within_links(recipe: Config, gpu: Gpu) -> bool:
    """Whether the fast links join all GPUs of the recipe."""
    return (recipe.cluster.nodes or 1) * gpu.gpus_per_node <= gpu.linked


def recipe_rows(configs: Path, gpu: Gpu, calls: Calls) -> list[dict[str, Any]]:
    """A row for each recipe that has servers of its own."""
    rows = []
    for path in sorted((sglang_servers.ROOT / "examples" / "recipes").glob("*.yaml")):
        recipe = resolve(path)
        shape = read_model_shape(json.loads((configs / f"{model_name(recipe)}.json").read_text()))
        planned = sync_s(workload_of(recipe, shape), ModelLayout.of(recipe.actor), gpu, Constants(), pauses=False)
        shards = next(iter(sync_rows(recipe, shape, (), gpu)))
        rows.append(
            {
                "recipe": path.stem,
                "parts_s": {mib: broadcast_parts(recipe, shape, gpu, calls, mib * MIB) for mib in BUCKETS_MIB},
                "planner_s": planned,
                "shards_s": shards.seconds * (gpu.network_gb_s / gpu.link_gb_s if within_links(recipe, gpu) else 1.0),
                "shards": shards.sizes,
            }
        )
    return rows


def model_name(recipe: Config) -> str:
    """What the configuration of its model is called: an instruct model has the sizes of its base."""
    return Path(recipe.model.path).name.removesuffix("-Instruct")


# The whole -------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every piece and sync")
    parser.add_argument("--configs", type=Path, help="directory with config.json of the recipes' models as NAME.json")
    parser.add_argument("--gpu", default="h100-80g", help="of the recipes, as `megatron-daro plan` names it")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/sync_model.json")
    return parser.parse_args()


def compared(count: int, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Pieces, and predicted and measured syncs, with so many receivers."""
    medians = measured(count, rounds)
    parts = pieces(medians)
    factors = [
        crowding(medians["beside", size][0], (parts["pack"].at(size), parts["broadcast"].at(size)), CORES)
        for size in FITTED
    ]
    crowded = statistics.median(factors)
    rows = []
    for bucket, model in WHOLE:
        predicted = predicted_s([bucket] * (model // bucket), parts, CORES, crowded)
        row = {"receivers": count, "bucket_mib": bucket // MIB, "model_mib": model // MIB}
        rows.append(row | beside(predicted, medians["sync", bucket, model]))
    return {"crowded": crowded, **{name: asdict(piece) for name, piece in parts.items()}}, rows


def beside(predicted: float, measured: Times) -> dict[str, float]:
    """A prediction and what was measured."""
    seconds, cpu = measured
    return {
        "predicted_s": predicted,
        "measured_s": seconds,
        "measured_cpu_s": cpu,
        "ratio": predicted / seconds,
    }


def show_syncs(console: Console, result: Mapping[str, Any], sizes: Sequence[int], cut: str) -> None:
    """The tables of pieces, which were measured at these sizes, and of syncs, whose model is cut into such parts."""
    table = Table("receivers", f"ms of a {cut} of", *(f"{size / MIB:g} MiB" for size in sizes), "cores")
    for count, parts in result["pieces"].items():
        for name, fields in parts.items():
            if isinstance(fields, dict):
                piece = Piece(**fields)
                cells = [f"{1000 * piece.at(size)[0]:.2f}" for size in sizes]
                table.add_row(str(count), name, *cells, f"{piece.cores:.2f}")
    console.print(table)
    table = Table("receivers", f"{cut}, MiB", "model, MiB", "predicted, s", "measured, s", "predicted / measured")
    for row in result["syncs"]:
        cells = [str(row[name]) for name in ("receivers", f"{cut}_mib", "model_mib")]
        table.add_row(*cells, *(f"{row[name]:.3f}" for name in ("predicted_s", "measured_s")), f"{row['ratio']:.2f}")
    console.print(table)


def missed(syncs: Sequence[Mapping[str, Any]], cut: str) -> list[str]:
    """Return which predictions were outside LIMITS."""
    return [
        f"{row['receivers']} receivers, {row[f'{cut}_mib']} MiB: predicted {row['ratio']:.2f} of what was measured"
        for row in syncs
        if not LIMITS[0] <= row["ratio"] <= LIMITS[1]
    ]


def show(result: Mapping[str, Any]) -> None:
    """The tables."""
    console = Console(width=150)
    show_syncs(console, result, FITTED, "bucket")
    names = ("gather", "pack", "wire", "latency", "own calls", "answers", "load", "total", "in turn")
    table = Table("recipe", "MiB", *names, "planner", "shards", title=f"seconds on {result['gpu']}", title_style="")
    for row in result["recipes"]:
        for mib, parts in row["parts_s"].items():
            cells = [f"{parts[name]:.2f}" for name in names]
            table.add_row(row["recipe"], str(mib), *cells, f"{row['planner_s']:.2f}", f"{row['shards_s']:.2f}")
    console.print(table)


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found = {count: compared(count, arguments.rounds) for count in (1, 2, 3)}
    calls, recipes = measured_calls(), list[dict[str, Any]]()
    if arguments.configs:
        recipes = recipe_rows(arguments.configs, find_gpu(arguments.gpu), calls)
    syncs = [row for _, rows in found.values() for row in rows]
    result = {
        "cores": CORES,
        "rounds": arguments.rounds,
        "pieces": {count: parts for count, (parts, _) in found.items()},
        "syncs": syncs,
        "limits": LIMITS,
        "calls": asdict(calls),
        "gpu": arguments.gpu,
        "recipes": recipes,
        "problems": missed(syncs, "bucket"),
    }
    show(result)
    sglang_servers.conclude("sync_model", result, write=arguments.json)


if __name__ == "__main__":
    main()
