"""Ranks as threads: what they hand to a reduce is summed when all of them have come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
