"""Experts that a checkpoint holds in one tensor per layer (`Family.stacked`): split into single tensors, and stacked
again.

`HFCheckpoint` and the checks of headers show each expert's tensors under the names in the family's table, so that
nothing in between knows about stacks; `stack` is the way back, used wherever tensors leave under Hugging Face names. A
stack is [experts, columns, rows] for matrices [rows, columns], or [experts, rows] for biases; the rows of gate and up
alternate. MXFP4 has two tensors in place of a stack of matrices: NAME_blocks, uint8 [experts, rows, columns / 32, 16]
with two values per byte, the low half first, and NAME_scales, uint8 [experts, rows, columns / 32], which are exponents
of 2 plus 127. Source: transformers 5.24, models/gpt_oss and integrations/mxfp4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_daro.config.model_shape import ModelShape
from megatron_daro.families import families
from megatron_daro.families.table import Family

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expert's tensor is: in which stack, of which expert, and which of its `parts`. The rows of the parts
    alternate; if packed (`Family.packed`), one part follows the other."""

    stack: str
    expert: int
    part: int
    parts: int
    packed: bool = False

    def stored_as(self, names: Container[str]) -> tuple[str, ...]:
        """Return the names under which a checkpoint with these tensors holds the stack: its own name, or those of its
        blocks and scales."""
        return (self.stack,) if self.stack in names else (self.stack + BLOCKS, self.stack + SCALES)


def _members(
    family: Family, role: str, layer: int | str, experts: int, *, packed: bool = False
) -> Iterator[tuple[str, Place]]:
    names = family.tensors[role]
    stack = (family.packed if packed else family.stacked)[role].format(layer=layer)
    for expert in range(experts):
        for part, name in enumerate(names):
            yield name.format(layer=layer, expert=expert), Place(stack, expert, part, len(names), packed)


@lru_cache(maxsize=4)
def places(shape: ModelShape) -> Mapping[str, Place]:
    """Return the place of each expert's tensor, by name; empty for a family without stacks."""
    family, experts = families()[shape.family], shape.experts.number if shape.experts else 0
    layers = [layer for layer in range(shape.layers) if shape.has_experts(layer)]
    return {n: p for layer in layers for role in family.stacked for n, p in _members(family, role, layer, experts)}


def names_in_files(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return the names with each member of a stack replaced by the stack; every name once."""
    known = places(shape)
    return list(dict.fromkeys(known[name].stack if name in known else name for name in names))


def taken_apart(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Place, tuple[int, ...]]]:
    """Return name -> (place, shape) of the experts' tensors in the stacks of a checkpoint.

    Args:
        family: of the checkpoint. shapes: of all its tensors, by name.
    """
    apart: dict[str, tuple[Place, tuple[int, ...]]] = {}
    for role, template in family.stacked.items():
        pattern = re.compile(re.escape(template).replace(r"\{layer\}", r"(\d+)") + f"(|{BLOCKS})")
        for name, dims in shapes.items():
            match = pattern.fullmatch(name)
            if match and not match[2] and len(dims) > 1:
                rows, columns = dims[-1], dims[1:-1]
            elif match and match[2] and shapes.get(name.removesuffix(BLOCKS) + SCALES) == dims[:-1]:
                rows, columns = dims[1], (2 * math.prod(dims[2:]),)
            else:
                continue
            for member, place in _members(family, role, match[1], dims[0]):
                apart[member] = place, (rows // place.parts, *columns)
    for role, template in family.packed.items():
        pattern = re.compile(re.escape(template).replace(r"\{layer\}", r"(\d+)"))
        for name, dims in shapes.items():
            if (match := pattern.fullmatch(name)) and len(dims) > 1:
                for member, place in _members(family, role, match[1], dims[0], packed=True):
                    apart[member] = place, (dims[1] // place.parts, *dims[2:])
    return apart


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bf16 [..., columns] of MXFP4 blocks [..., columns / 32, 16] and scales [..., columns / 32]."""
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - 127)
    return scaled.flatten(-2)


def stack(tensors: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model as its checkpoint has them: those of experts in stacks, each as soon as its last
    member came.

    A stack is new memory, on the device and in the dtype of its first member; other tensors are yielded unchanged.
    """
    known = places(shape)
    open_stacks: dict[str, tuple[Tensor, set[tuple[int, int]]]] = {}
    for name, tensor in tensors:
        place = known.get(name)
        if place is None or shape.experts is None:
            yield name, tensor
            continue
        if place.stack not in open_stacks:
            dims = (shape.experts.number, *tensor.shape[1:], tensor.shape[0] * place.parts)
            open_stacks[place.stack] = tensor.new_empty(dims), set()
        whole, came = open_stacks[place.stack]
        whole[place.expert, ..., place.part :: place.parts] = tensor.t() if tensor.dim() > 1 else tensor
        came.add((place.expert, place.part))
        if len(came) == shape.experts.number * place.parts:
            del open_stacks[place.stack]
            yield place.stack, whole
