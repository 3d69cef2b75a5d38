"""Rows of tensors, a piece at a time: bounds of pieces, casts, and memory that is allocated once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_daro.errors import ModelError


def windows(shape: tuple[int, ...], dtype: torch.dtype, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield rows [start, stop) of a tensor, at most `most_bytes` (or one row) at a time."""
    row_bytes = dtype.itemsize
    for size in shape[1:]:
        row_bytes *= size
    most = max(1, most_bytes // max(row_bytes, 1))
    for start in range(0, shape[0], most):
        yield start, min(start + most, shape[0])


def cast(values: Tensor, target: Tensor, name: str) -> Tensor:
    """Fill a tensor of another dtype with values, and return it.

    Raises:
        ModelError: a finite value would become infinite.
    """
    target.copy_(values)
    limit = torch.finfo(target.dtype).max
    if limit >= torch.finfo(values.dtype).max:
        return target
    least, most = map(float, values.aminmax())  # as Python's numbers: bf16 would round the limit up
    if not (-limit <= least and most <= limit) and bool((target.isinf() & values.isfinite()).any()):
        largest = float(values[values.isfinite()].abs().max())
        raise ModelError(
            f"{name} holds {largest:.4g}, and the largest number of {str(target.dtype).removeprefix('torch.')} is "
            f"{limit:.4g}: the cast would make it infinite. Choose another --dtype; bf16 and fp32 reach 3.4e38"
        )
    return target


class Scratch:
    """Memory for a piece of rows, allocated once: fresh memory costs the system more than reading into it.

    Args:
        num_bytes: at the beginning; grows to the largest piece.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)

    def shaped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in this memory; it is valid until the next call."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))
