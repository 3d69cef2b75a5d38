"""Stands in for the part of Triton's language that the kernels use: programs one after the other, tiles as tensors.

Triton itself comes with CUDA builds of torch; `bash tests/triton_kernels.sh` runs the kernels in its own interpreter.
Of Triton 3.9.0, python/triton/language/core.py, `load`: "if `mask[idx]` is false, do not load the data at address
`pointer[idx]`" and "if `mask[idx]` is false, return `other[idx]`". Here an address outside of a tensor is an
IndexError.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

LAUNCH_OPTIONS = ("num_warps", "num_stages")
_program = [0, 0]


class Tile(torch.Tensor):
    """`tile += other` makes another tile, which may be larger."""

    def __iadd__(self, other):
        return self + other


class Pointer:
    """Addresses within the memory of a tensor."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at, self.dtype = tensor, at, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)

    def flat(self):
        first = self.tensor.storage_offset()
        return self.tensor.as_strided(
            (self.tensor.untyped_storage().size() // self.tensor.itemsize - first,), (1,), first
        )


def full(shape, value, dtype):
    return torch.full(shape, value, dtype=dtype).as_subclass(Tile)


def load(pointer, mask, other):
    at, mask = torch.broadcast_tensors(pointer.at, mask)
    found = full(at.shape, other, dtype=pointer.tensor.dtype)
    found[mask] = pointer.flat()[at[mask]]
    return found


def store(pointer, value, mask):
    at, value, mask = torch.broadcast_tensors(pointer.at, value, mask)
    assert value.dtype == pointer.tensor.dtype
    pointer.flat()[at[mask]] = value[mask]


def maximum(one, other, propagate_nan=None):
    """Of a number and NaN the number, unless NaN shall win."""
    other = torch.as_tensor(other, dtype=one.dtype)
    return torch.maximum(one, other) if propagate_nan else torch.fmax(one, other)


class Kernel:
    """A function that others call, or that is run for each place of a grid."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments, **options):
        return self.function(*arguments, **options)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            assert all(grid), "a GPU starts no grid of 0 programs"
            for name in LAUNCH_OPTIONS:
                del options[name]
            arguments = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            for place in [(x, y) for x in range(grid[0]) for y in range(grid[1])]:
                _program[:] = place
                self.function(*arguments, **options)

        return launch


class constexpr(float):  # noqa: N801
    """A number that is known when a kernel is compiled."""

    @property
    def value(self):
        return float(self)


def modules():
    """`triton` and `triton.language`."""
    language, triton = ModuleType("triton.language"), ModuleType("triton")
    names = {
        "constexpr": constexpr,
        "program_id": lambda axis: _program[axis],
        "arange": torch.arange,
        "zeros": lambda shape, dtype: full(shape, 0, dtype),
        "full": full,
        "float32": torch.float32,
        "int64": torch.int64,
        "load": load,
        "store": store,
        "where": torch.where,
        "exp": torch.exp,
        "maximum": maximum,
        "minimum": min,
        "max": lambda tile, axis: tile.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(axis),
        "sum": lambda tile, axis: tile.sum(axis),
        "trans": lambda tile: tile.t(),
        "dot": lambda left, right, total, input_precision: total + left @ right,
        "PropagateNan": SimpleNamespace(ALL=True),
    }
    vars(language).update(names)
    triton.language, triton.jit = language, Kernel
    triton.cdiv = lambda number, size: -(-number // size)
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    triton.__spec__ = ModuleSpec("triton", None)
    return {"triton": triton, "triton.language": language}
