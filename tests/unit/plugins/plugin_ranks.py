"""Ranks as threads: what they hand to a reduce is summed when all of them have come."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Ranks:
    """`reduce` of rank i is `Ranks(n).reduce`; `run` calls a function on each rank and returns the results in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._vectors: list[Tensor] = []

    def reduce(self, vector: Tensor) -> Tensor:
        self._vectors.append(vector.clone())
        self._barrier.wait()
        total = sum(self._vectors[1:], self._vectors[0].clone())
        if self._barrier.wait() == 0:
            self._vectors.clear()
        self._barrier.wait()
        return total

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(function, range(self.size)))


def run_processes(function: Callable[..., Any], store: Path, *rows: tuple[Any, ...]) -> list[Any]:
    """Call a module's function in a gloo process for each row of arguments, and return the results in rank order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(rows), mp_context=context) as pool:
        ranks = [pool.submit(_one, function, store, rank, len(rows), row) for rank, row in enumerate(rows)]
        return [one.result(timeout=120) for one in ranks]


def _one(function: Callable[..., Any], store: Path, rank: int, size: int, row: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return function(*row)
    finally:
        dist.destroy_process_group()
