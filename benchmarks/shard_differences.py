"""A sync from shards to shards over TCP as differences, against a whole one, in turns.

    OMP_NUM_THREADS=1 python benchmarks/shard_differences.py --json          # 2 minutes, 2 GB

Two `ShardSender`s of the same bf16 weights serve a receiver each (bucket_receivers.py: the loader that runs inside
SGLang, in a process of its own), one always whole, the other with differences. Before each pair of syncs another random
share of the elements changes its last bit, in all pieces alike. Medians are compared; the order in a pair alternates.

Nothing here is a network. `wins_below_gbit_s` is reckoned: the bytes that are saved over the seconds that differences
take on loopback. On a slower link these bytes alone would take longer than all of that; on a faster one it depends on
what a whole sync takes there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import sglang_servers
import torch
from bucket_receivers import MIB, Receivers, receivers
from rich.console import Console
from rich.table import Table
from sync_model import CORES

from megatron_daro.engine.sglang.client import calls_to_servers
from megatron_daro.sync.plan import SendPlan
from megatron_daro.sync.shard_plan import Write
from megatron_daro.sync.shard_tcp import ShardSender

SHARES = (0.003, 0.04, 0.4, 1.0)
"""Of the elements that change from one sync to the next."""
Sync = tuple[float, float, int]
"""Seconds, CPU seconds of both ends, bytes that were sent."""
_PIECE, _MODEL, _LIMIT_S = 16 * MIB, 256 * MIB, 60.0


class Side(Receivers):
    """A sender and its receiver. Syncs have their names from `name`; without one they are whole."""

    def __init__(self, url: str, parts: dict[str, torch.Tensor], name: str) -> None:
        super().__init__([url])
        self._parts, self._name, self._count = parts, name, 0
        self._sender = ShardSender("127.0.0.1", calls_to_servers)

    async def hold(self) -> None:
        """Have the receiver's parameters."""
        await self._asked("/hold", {"names": list(self._parts), "bytes": _PIECE})

    def sync(self) -> Sync:
        """One for real."""
        self._count += 1
        box = (0,), (_PIECE // 2,)
        writes = [Write(0, 0, name, box, name, box[1], box) for name in self._parts]
        plan = SendPlan(
            transport="shards",
            targets=self._targets,
            bucket_bytes=MIB,
            timeout_s=_LIMIT_S,
            update=f"{self._name} {self._count}" if self._name else "",
        )
        offer = self._sender.offer(writes, (_MODEL // 2,))
        cpu, started = self._cpu_s(), time.perf_counter()
        report = self._sender.send(self._parts, plan, [offer])
        seconds = time.perf_counter() - started
        if report.failures:
            raise SystemExit(f"a receiver failed: {dict(report.failures)}")
        return seconds, self._cpu_s() - cpu, report.num_bytes

    def close(self) -> None:
        """End what listens."""
        self._sender.close()


def measured(rounds: int) -> list[dict[str, float]]:
    """A row for each share."""
    generator, rows = torch.Generator().manual_seed(0), []
    bits = torch.randint(-(2**15), 2**15, (_MODEL // 2,), dtype=torch.int16, generator=generator)
    parts = {f"layers.{i}.weight": part for i, part in enumerate(bits.view(torch.bfloat16).split(_PIECE // 2))}
    with receivers(2) as (first, second):
        whole, differences = Side(first, parts, ""), Side(second, parts, "update")
        try:
            for side in (whole, differences):
                asyncio.run(side.hold())
                side.sync()
            for share in SHARES:
                pairs = []
                for number in range(rounds + 1):
                    for part in bits.split(_PIECE // 2):
                        part ^= torch.rand(len(part), generator=generator) < share
                    order = (whole, differences) if number % 2 else (differences, whole)
                    taken = {side: side.sync() for side in order}
                    pairs += [(taken[whole], taken[differences])] if number else []
                rows.append(_row(share, pairs))
        finally:
            whole.close()
            differences.close()
    return rows


def _row(share: float, pairs: list[tuple[Sync, Sync]]) -> dict[str, float]:
    (whole_s, whole_cpu_s, whole_bytes), (seconds, cpu_s, num_bytes) = (
        tuple(map(statistics.median, zip(*side, strict=True))) for side in zip(*pairs, strict=True)
    )
    return {
        "changed": share,
        "whole_s": whole_s,
        "differences_s": seconds,
        "seconds_ratio": seconds / whole_s,
        "whole_cpu_s": whole_cpu_s,
        "differences_cpu_s": cpu_s,
        "bytes_ratio": num_bytes / whole_bytes,
        "wins_below_gbit_s": max(0.0, 8 * (whole_bytes - num_bytes) / seconds / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of syncs at each share")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/shard_differences.json")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = measured(arguments.rounds)
    table = Table(title=f"{_MODEL // MIB} MiB of bf16 to one receiver, {CORES} cores")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console(width=150).print(table)
    result: dict[str, Any] = {"cores": CORES, "rounds": arguments.rounds, "mib": _MODEL // MIB, "syncs": rows}
    sglang_servers.conclude("shard_differences", {**result, "problems": []}, write=arguments.json)


if __name__ == "__main__":
    main()
