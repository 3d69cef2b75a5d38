"""What a bucket of a weight broadcast costs the sending rank beside the bytes: own CPU of the calls to all servers.

    OMP_NUM_THREADS=1 python benchmarks/bucket_calls.py --json    # 20 seconds

The rank posts one body a bucket to each server; here to canned servers in another process, which answer at once.
Kept: one connection a server for all buckets of an export (`calls_to_servers`, what the senders use). New: a connection
for every call. The two take turns; CPU seconds are of the posting process alone, medians are told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import sglang_servers

from megatron_daro.engine.sglang.client import SGLangClient, calls_to_servers
from megatron_daro.sync.plan import Post
from megatron_daro.workshop.rehearse.canned_server import CannedAnswers, canned_fleet

PATH = "/update_weights_from_distributed"
NAMES = 60
"""Tensors of a bucket: 256 MiB of a 32B model have about as many."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--buckets", type=int, default=40, help="of an export")
    parser.add_argument("--pairs", type=int, default=9, help="turns of each side")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/bucket_calls.json")
    return parser.parse_args()


@contextlib.asynccontextmanager
async def new_connections() -> AsyncIterator[Post]:
    async def post(url: str, path: str, body: Any, timeout_s: float) -> object:
        async with SGLangClient(url) as client:
            return await client.post(path, body, timeout_s=timeout_s)

    yield post


async def cpu_s(calls: Any, urls: list[str], buckets: int) -> float:
    """Own CPU seconds of a bucket."""
    body = {
        "names": [f"model.layers.{i}.mlp.experts.{i}.down_proj.weight" for i in range(NAMES)],
        "shapes": [[5120, 27648]] * NAMES,
        "dtypes": ["bfloat16"] * NAMES,
        "group_name": "megatron_daro-0123456789ab",
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    started = time.process_time()
    async with calls() as post:
        for _ in range(buckets):
            await asyncio.gather(*(post(url, PATH, body, 60) for url in urls))
    return (time.process_time() - started) / buckets


def main() -> None:
    options = parse_arguments()
    sides = {"kept": calls_to_servers, "new": new_connections}
    found: dict[str, list[float]] = {name: [] for name in sides}
    with canned_fleet(options.servers, (), CannedAnswers([[1]], (0, 1), [[0]], 1)) as fleet:
        for pair in range(options.pairs):
            for name in sorted(sides, reverse=bool(pair % 2)):
                found[name].append(1000 * asyncio.run(cpu_s(sides[name], fleet.urls, options.buckets)))
    medians = {f"{name}_cpu_ms": statistics.median(times) for name, times in found.items()}
    result = {"servers": options.servers, "buckets": options.buckets, "pairs": options.pairs, **medians}
    result["ratio"] = medians["new_cpu_ms"] / medians["kept_cpu_ms"]
    print(
        f"a bucket to {options.servers} servers, own CPU: {medians['kept_cpu_ms']:.1f} ms on kept connections, ", end=""
    )
    print(f"{medians['new_cpu_ms']:.1f} ms on new ones ({result['ratio']:.2f} times)")
    if options.json:
        sglang_servers.write_results("bucket_calls", result)


if __name__ == "__main__":
    main()
