"""What Transformer Engine's recipes make of a matrix before an 8-bit product, with torch's own float8 types.

Place in the data flow: none; tests only. `cast` is the round trip of one operand; `simulated` puts it around the
products of Megatron's local layers, so that a CPU shows what fp8 does to losses, bins and DARO's weights.
Source: transformer_engine/common/recipe (2.20.2): Float8CurrentScaling ("tensorwise"), Float8BlockScaling
("blockwise"), MXFP8BlockScaling ("mxfp8"); DelayedScaling's first step scales as tensorwise does, by the amax that it
has seen. Hybrid: e4m3 forward, e5m2 for gradients; blockwise and mxfp8 use e4m3 for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Recipe = Literal["tensorwise", "blockwise", "mxfp8"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows and columns that share a scale: of an activation or gradient, and of a weight; None: the whole matrix.
BLOCKS: dict[Recipe, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
    "tensorwise": (None, None),
    "blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
}


def cast(matrix_RC: Tensor, recipe: Recipe, *, weight: bool = False, dtype: torch.dtype = E4M3) -> Tensor:
    """Return what is left of a matrix after quantisation and back, [R, C] in its own dtype."""
    block = BLOCKS[recipe][1 if weight else 0] or tuple(matrix_RC.shape)
    rows, columns = (-(-size // part) * part for size, part in zip(matrix_RC.shape, block, strict=True))
    padded = matrix_RC.new_zeros((rows, columns), dtype=torch.float32)
    padded[: matrix_RC.shape[0], : matrix_RC.shape[1]] = matrix_RC
    blocks = padded.view(rows // block[0], block[0], columns // block[1], block[1])
    scale = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True), torch.finfo(dtype).max, recipe)
    # A GPU's conversion saturates; torch's makes NaN or infinity of what is too large.
    limit = torch.finfo(dtype).max
    narrow = (blocks * scale).clamp(-limit, limit).to(dtype)
    back = (narrow.float() / scale).view(rows, columns)
    return back[: matrix_RC.shape[0], : matrix_RC.shape[1]].to(matrix_RC.dtype)


def _scale(amax: Tensor, largest: float, recipe: Recipe) -> Tensor:
    """Return the factor that brings the largest value of a block to the type's largest; 1 for a block of zeros."""
    scale = torch.where((amax > 0) & torch.isfinite(amax), largest / amax, 1.0)
    if recipe == "tensorwise":
        return scale
    return torch.exp2(torch.floor(torch.log2(scale)))  # both block recipes have scales that are powers of two


class _Quantised(torch.autograd.Function):
    """x @ w.t() of quantised operands; the two products of the backward pass are quantised too."""

    @staticmethod
    def forward(ctx: Any, input_TD: Tensor, weight_ED: Tensor, recipe: Recipe) -> Tensor:
        flat_TD = input_TD.reshape(-1, input_TD.shape[-1])
        ctx.save_for_backward(flat_TD, weight_ED)
        ctx.recipe, ctx.shape = recipe, input_TD.shape
        out_TE = cast(flat_TD, recipe) @ cast(weight_ED, recipe, weight=True).t()
        return out_TE.view(*input_TD.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat_TD, weight_ED = ctx.saved_tensors
        recipe, dtype = ctx.recipe, E5M2 if ctx.recipe == "tensorwise" else E4M3
        grad_TE = gradients[0].reshape(-1, weight_ED.shape[0])
        own = cast(grad_TE, recipe, dtype=dtype) @ cast(weight_ED, recipe, weight=True)
        # Blocks run along the summed dimension: here the tokens.
        weight_grad = cast(grad_TE.t(), recipe, dtype=dtype) @ cast(flat_TD.t(), recipe).t()
        return own.view(ctx.shape), weight_grad, None


@contextmanager
def simulated(recipe: Recipe) -> Iterator[None]:
    """Products of the layers as in fp8, on one rank without tensor parallelism."""
    from megatron.core.tensor_parallel import layers

    def product(input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, **__: Any) -> Tensor:
        out = _Quantised.apply(input, weight, recipe)
        return out if bias is None else out + bias

    names = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
    before = {name: getattr(layers, name) for name in names}
    try:
        for name in names:
            setattr(layers, name, product)
        yield
    finally:
        for name, function in before.items():
            setattr(layers, name, function)
