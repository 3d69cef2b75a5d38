"""Predicts weight syncs from shards to shards over TCP from pieces that are measured in the same run.

    OMP_NUM_THREADS=1 python benchmarks/shard_model.py --json          # 1 minute, 2 GB

A `ShardSender` serves one, two or three receivers (bucket_receivers.py), each of which takes everything with the loader
that runs inside SGLang. What happens to a piece is timed alone at three sizes (FITTED), for all receivers at once, and
taken to be linear between them: `sum` is the sender's checksum, `wire` the bytes on a connection from memory to memory,
`place` the receiver's checksum and copy; `open` is a sync of 4 KiB: calls, connections, frames, threads. The syncs that
are predicted have pieces and models of other sizes (WHOLE), and nothing is learned from them. Everything takes turns;
medians are compared.

The model: the wire joins both ends, since a connection holds less than a piece; then the sender sums the next piece
while the receiver places this one. Where both together need more cores than there are, they take longer by that factor,
as in sync_model.py, from which it has how parts share cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import sglang_servers
import torch
from bucket_receivers import MIB, TINY, Receivers, Times, receivers
from rich.console import Console
from sync_model import CORES, LIMITS, Piece, beside, medians_of, missed, piece_of, show_syncs, together_s

from megatron_daro.engine.sglang.client import calls_to_servers
from megatron_daro.sync.in_server.megatron_daro_shards import checksum_of
from megatron_daro.sync.plan import SendPlan, Target
from megatron_daro.sync.shard_plan import Write
from megatron_daro.sync.shard_tcp import ShardSender

FITTED = (1 * MIB, 4 * MIB, 16 * MIB)
"""Bytes of the pieces that are measured alone."""
WHOLE = ((2 * MIB, 192 * MIB), (10 * MIB, 320 * MIB))
"""Bytes of (piece, model) of the syncs that are predicted; no piece is one of FITTED."""
_LIMIT_S, _MEASURED = 60.0, 256 * MIB


class Shards(Receivers):
    """One sender, and receivers that take everything."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        self._sender = ShardSender("127.0.0.1", calls_to_servers)
        self._memory = torch.ones(max(size for _, size in WHOLE) // 2, dtype=torch.bfloat16)
        self._held: tuple[int, int] | None = None

    def sync(self, piece: int, model: int) -> Times:
        """One for real, of so many bytes."""
        parts = self._parts(piece, model)
        self._hold(piece, model)
        box = (0,), (piece // 2,)
        servers = range(len(self._targets))
        writes = [Write(server, 0, name, box, name, box[1], box) for server in servers for name in parts]
        plan = SendPlan(transport="shards", targets=self._targets, bucket_bytes=MIB, timeout_s=_LIMIT_S)
        offer = self._sender.offer(writes, (model // 2,))
        cpu, started = self._cpu_s(), time.perf_counter()
        report = self._sender.send(parts, plan, [offer])
        seconds = time.perf_counter() - started
        if report.failures:
            raise SystemExit(f"a receiver failed: {dict(report.failures)}")
        return seconds, self._cpu_s() - cpu

    def sums(self, piece: int) -> Times:
        """The sender's checksums, of one piece for each receiver."""
        views = [memoryview(v.view(torch.uint8).numpy().data) for v in self._parts(piece, _MEASURED).values()]

        def summed(_: Target) -> None:
            checksum = 0
            for view in views:
                checksum = checksum_of(view, checksum)

        with ThreadPoolExecutor(len(self._targets)) as pool:
            started, cpu = time.perf_counter(), time.process_time()
            list(pool.map(summed, self._targets))
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return seconds / len(views), cpu / len(views)

    def wire(self, piece: int) -> Times:
        """The bytes of a piece for each receiver."""
        views = [memoryview(v.view(torch.uint8).numpy().data) for v in self._parts(piece, _MEASURED).values()]

        def served(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            with connection:
                for view in views:
                    connection.sendall(view)

        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(len(self._targets)) as pool:
            body = {"port": listener.getsockname()[1], "bytes": piece, "count": len(views)}
            own = time.process_time()
            serving = [pool.submit(served, listener) for _ in self._targets]
            theirs = asyncio.run(self._asked("/read", body))
            for each in serving:
                each.result()
            cpu = time.process_time() - own + sum(times["cpu_s"] for times in theirs)
        return max(times["wall_s"] for times in theirs) / len(views), cpu / len(views)

    def places(self, piece: int) -> Times:
        """What each receiver does with a piece that it has."""
        self._hold(piece, _MEASURED)
        count = _MEASURED // piece
        theirs = asyncio.run(self._asked("/place", {"bytes": piece, "count": count}))
        return max(each["wall_s"] for each in theirs) / count, sum(each["cpu_s"] for each in theirs) / count

    def close(self) -> None:
        """End what listens."""
        self._sender.close()

    def _parts(self, piece: int, model: int) -> dict[str, torch.Tensor]:
        parts = self._memory[: model // 2].split(piece // 2)
        return {f"layers.{i}.weight": part for i, part in enumerate(parts)}

    def _hold(self, piece: int, model: int) -> None:
        if self._held != (piece, model):
            asyncio.run(self._asked("/hold", {"names": list(self._parts(piece, model)), "bytes": piece}))
            self._held = piece, model


def measured(count: int, rounds: int) -> dict[Any, Times]:
    """Seconds of all pieces and whole syncs with so many receivers, in turns; the first turn is not counted."""
    found: dict[Any, list[Times]] = defaultdict(list)
    with receivers(count) as urls:
        shards = Shards(urls)
        try:
            for number in range(rounds + 1):
                taken: dict[Any, Times] = {("open", TINY): shards.sync(TINY, TINY)}
                for size in FITTED:
                    taken["sum", size] = shards.sums(size)
                    taken["wire", size] = shards.wire(size)
                    taken["place", size] = shards.places(size)
                for piece, model in WHOLE:
                    taken["sync", piece, model] = shards.sync(piece, model)
                for key, times in taken.items():
                    found[key] += [times] if number else []
        finally:
            shards.close()
    return medians_of(found)


def pieces(medians: Mapping[Any, Times]) -> dict[str, Piece]:
    """The model's constants."""

    fitted = {name: piece_of(medians, name, *FITTED) for name in ("sum", "wire", "place")}
    return {"open": piece_of(medians, "open", TINY)} | fitted


def predicted_s(piece: int, model: int, parts: Mapping[str, Piece], cores: float) -> float:
    """Seconds of a sync of so many bytes in pieces of this size."""
    count = model // piece
    at = {name: part.at(piece) for name, part in parts.items()}
    both = together_s([[at["sum"]], [at["place"]]], cores)
    ends = at["open"][0] + at["sum"][0] + at["place"][0]
    return ends + count * at["wire"][0] + (count - 1) * both


def compared(count: int, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Pieces, and predicted and measured syncs, with so many receivers."""
    medians = measured(count, rounds)
    parts, rows = pieces(medians), []
    for piece, model in WHOLE:
        predicted, times = predicted_s(piece, model, parts, CORES), medians["sync", piece, model]
        rows.append(
            {"receivers": count, "piece_mib": piece // MIB, "model_mib": model // MIB} | beside(predicted, times)
        )
    return {name: asdict(part) for name, part in parts.items()}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every piece and sync")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/shard_model.json")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found = {count: compared(count, arguments.rounds) for count in (1, 2, 3)}
    syncs = [row for _, rows in found.values() for row in rows]
    result = {
        "cores": CORES,
        "rounds": arguments.rounds,
        "pieces": {count: parts for count, (parts, _) in found.items()},
        "syncs": syncs,
        "limits": LIMITS,
        "problems": missed(syncs, "piece"),
    }
    show_syncs(Console(width=150), result, FITTED, "piece")
    sglang_servers.conclude("shard_model", result, write=arguments.json)


if __name__ == "__main__":
    main()
