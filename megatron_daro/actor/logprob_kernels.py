"""Triton kernels of the fused log-probs: a tile of logits lives and dies inside a program, and never reaches memory.

`logprobs.vocab_parallel_logprobs` calls them with `actor.logprob_kernel: triton` (with auto, for bf16 and fp16 on a
GPU), and does everything else: the reduction over ranks, the chunks, the products of the backward pass. The forward
kernel keeps the statistics of its rows while it walks over the vocabulary; the backward kernel computes its tile once
more and writes the gradient of the logits, in the dtype of the weight, as an operand of the two products that follow.

Imported only when needed: Triton comes with CUDA builds of torch. With TRITON_INTERPRET=1 it runs on a CPU, where the
tests compare it with the path of plain torch; its interpreter multiplies bf16 wrongly (3.9.0, `create_dot` of
triton/runtime/interpreter.py takes the bits for integers), so there the factors are widened first.

Shapes: T tokens; C tokens of one chunk; D hidden; X columns; S parts of the columns; M, N, K rows, columns and depth
of one tile of a program, as matrix products have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret

_FAR_BELOW = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel is cut: rows, columns and depth of a tile (powers of two, at least 16), warps of a program, stages
    of its pipeline of loads, and columns that one program of the forward pass walks over."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    columns_per_part: int = 4096


def tile_shape(dtype: torch.dtype) -> TileShape:
    """Return the shape for operands of this dtype: fp32 numbers take twice the shared memory."""
    return TileShape() if dtype.itemsize == 2 else TileShape(rows=64, columns=64, depth=32, warps=4)


def statistics(
    hidden_TD: Tensor,
    weight_XD: Tensor,
    labels_T: Tensor,
    *,
    first_id: int,
    temperature: float,
    shape: TileShape | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute statistics of each row's logits z over all columns.

    Args:
        hidden_TD, weight_XD: fp32, bf16 or fp16, one dtype; the last dimension contiguous. X may be 0.
        labels_T: vocabulary ids, long.
        first_id: vocabulary id of the first column.
        temperature: divides the logits.
        shape: of the tiles.

    Returns:
        max_T, sum_T of exp(z - max), moment_T of exp(z - max) * (z - max), target_T: logit of the label, 0 if it is not
        among the columns; fp32. Without columns: -1e30, 0, 0, 0.
    """
    shape = shape or tile_shape(hidden_TD.dtype)
    tokens, columns = hidden_TD.shape[0], weight_XD.shape[0]
    parts = max(1, triton.cdiv(columns, shape.columns_per_part))
    parts_4ST = torch.empty((4, parts, tokens), dtype=torch.float32, device=hidden_TD.device)
    if tokens == 0:
        return parts_4ST[0, 0], parts_4ST[1, 0], parts_4ST[2, 0], parts_4ST[3, 0]
    _statistics_kernel[(triton.cdiv(tokens, shape.rows), parts)](
        hidden_TD, weight_XD, labels_T, parts_4ST, tokens, columns, hidden_TD.shape[1],
        hidden_TD.stride(0), weight_XD.stride(0), first_id, temperature, parts * tokens,
        COLUMNS_PER_PART=shape.columns_per_part, **_constants(shape),
    )  # fmt: skip
    max_ST, sum_ST, moment_ST, target_ST = parts_4ST.unbind()
    max_T = max_ST.amax(0)
    fall_ST = (max_ST - max_T).clamp_(min=_FAR_BELOW.value)
    shrink_ST = fall_ST.exp()
    moment_T = ((moment_ST + fall_ST * sum_ST) * shrink_ST).sum(0)
    return max_T, (sum_ST * shrink_ST).sum(0), moment_T, target_ST.sum(0)


def logit_gradients(
    hidden_CD: Tensor,
    weight_XD: Tensor,
    labels_C: Tensor,
    *,
    max_C: Tensor,
    log_sum_C: Tensor,
    label_grad_C: Tensor,
    offset_C: Tensor,
    slope_C: Tensor | None,
    first_id: int,
    temperature: float,
    shape: TileShape | None = None,
) -> Tensor:
    """Compute the gradient of the loss in each logit before its division by the temperature, in the weight's dtype,
    [C, X].

    It is p * (offset + slope * log p), plus label_grad in the label's column, with log p = z - max - log_sum.

    Args:
        hidden_CD, weight_XD, labels_C, first_id, temperature, shape: see `statistics`.
        max_C, log_sum_C: over the whole vocabulary: largest z, and log of the sum of exp(z - max); fp32.
        label_grad_C, offset_C, slope_C: fp32; without slope the entropy has no gradient.
    """
    shape = shape or tile_shape(hidden_CD.dtype)
    tokens, columns = hidden_CD.shape[0], weight_XD.shape[0]
    grad_CX = torch.empty((tokens, columns), dtype=weight_XD.dtype, device=weight_XD.device)
    if grad_CX.numel() == 0:
        return grad_CX
    _gradient_kernel[(triton.cdiv(tokens, shape.rows), triton.cdiv(columns, shape.columns))](
        hidden_CD, weight_XD, labels_C, grad_CX, max_C, log_sum_C,
        label_grad_C, offset_C, offset_C if slope_C is None else slope_C, tokens, columns, hidden_CD.shape[1],
        hidden_CD.stride(0), weight_XD.stride(0), first_id, temperature,
        WITH_SLOPE=slope_C is not None, **_constants(shape),
    )  # fmt: skip
    return grad_CX


def _constants(shape: TileShape) -> dict[str, Any]:
    sizes = {"M": shape.rows, "N": shape.columns, "K": shape.depth}
    return {**sizes, "WIDEN": INTERPRETED, "num_warps": shape.warps, "num_stages": shape.stages}


@triton.jit
def _logits_tile(
    hidden, weight, rows_M, columns_N, tokens, columns, depth, hidden_stride, weight_stride, temperature,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # 64-bit offsets: 262,144 rows of 8,192 numbers do not fit 31 bits.
    hidden_M1 = hidden + rows_M.to(tl.int64)[:, None] * hidden_stride
    weight_N1 = weight + columns_N.to(tl.int64)[:, None] * weight_stride
    tile_MN = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, depth, K):
        depth_1K = (start + tl.arange(0, K))[None, :]
        hidden_MK = tl.load(hidden_M1 + depth_1K, mask=(rows_M[:, None] < tokens) & (depth_1K < depth), other=0.0)
        weight_NK = tl.load(weight_N1 + depth_1K, mask=(columns_N[:, None] < columns) & (depth_1K < depth), other=0.0)
        if WIDEN:
            hidden_MK, weight_NK = hidden_MK.to(tl.float32), weight_NK.to(tl.float32)
        tile_MN = tl.dot(hidden_MK, tl.trans(weight_NK), tile_MN, input_precision="ieee")
    return tile_MN / temperature


@triton.jit
def _statistics_kernel(
    hidden, weight, labels, statistics, tokens, columns, depth, hidden_stride, weight_stride, first_id, temperature,
    statistic_stride, COLUMNS_PER_PART: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows_M = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    label_M = tl.load(labels + rows_M, mask=rows_M < tokens, other=-1) - first_id
    max_M = tl.full((M,), _FAR_BELOW, dtype=tl.float32)
    sum_M = tl.zeros((M,), dtype=tl.float32)
    moment_M = tl.zeros((M,), dtype=tl.float32)
    target_M = tl.zeros((M,), dtype=tl.float32)
    end = tl.minimum((part + 1) * COLUMNS_PER_PART, columns)
    for start in range(part * COLUMNS_PER_PART, end, N):
        columns_N = start + tl.arange(0, N)
        tile_MN = _logits_tile(
            hidden, weight, rows_M, columns_N, tokens, end, depth, hidden_stride, weight_stride, temperature,
            M, N, K, WIDEN,
        )  # fmt: skip
        target_M += tl.sum(tl.where(columns_N[None, :] == label_M[:, None], tile_MN, 0.0), axis=1)
        tile_MN = tl.where(columns_N[None, :] < end, tile_MN, _FAR_BELOW)
        new_max_M = tl.maximum(max_M, tl.max(tile_MN, axis=1))
        fall_M = tl.maximum(max_M - new_max_M, _FAR_BELOW)
        shrink_M = tl.exp(fall_M)
        below_MN = tl.maximum(tile_MN - new_max_M[:, None], _FAR_BELOW, propagate_nan=tl.PropagateNan.ALL)
        exp_MN = tl.exp(below_MN)
        moment_M = (moment_M + fall_M * sum_M) * shrink_M + tl.sum(exp_MN * below_MN, axis=1)
        sum_M = sum_M * shrink_M + tl.sum(exp_MN, axis=1)
        max_M = new_max_M
    out_M = statistics + part * tokens + rows_M
    tl.store(out_M, max_M, mask=rows_M < tokens)
    tl.store(out_M + statistic_stride, sum_M, mask=rows_M < tokens)
    tl.store(out_M + 2 * statistic_stride, moment_M, mask=rows_M < tokens)
    tl.store(out_M + 3 * statistic_stride, target_M, mask=rows_M < tokens)


@triton.jit
def _gradient_kernel(
    hidden, weight, labels, gradient, maximum, log_sum, label_gradient, offset, slope,
    tokens, columns, depth, hidden_stride, weight_stride, first_id, temperature, WITH_SLOPE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows_M = tl.program_id(0) * M + tl.arange(0, M)
    columns_N = tl.program_id(1) * N + tl.arange(0, N)
    here_M = rows_M < tokens
    tile_MN = _logits_tile(
        hidden, weight, rows_M, columns_N, tokens, columns, depth, hidden_stride, weight_stride, temperature,
        M, N, K, WIDEN,
    )  # fmt: skip
    max_M = tl.load(maximum + rows_M, mask=here_M, other=0.0)
    log_sum_M = tl.load(log_sum + rows_M, mask=here_M, other=0.0)
    offset_M = tl.load(offset + rows_M, mask=here_M, other=0.0)
    log_prob_MN = (tile_MN - max_M[:, None]) - log_sum_M[:, None]
    factor_MN = offset_M[:, None]
    if WITH_SLOPE:
        factor_MN += tl.load(slope + rows_M, mask=here_M, other=0.0)[:, None] * log_prob_MN
    gradient_MN = tl.exp(log_prob_MN) * factor_MN
    label_M = tl.load(labels + rows_M, mask=here_M, other=-1) - first_id
    label_gradient_M = tl.load(label_gradient + rows_M, mask=here_M, other=0.0)
    gradient_MN += tl.where(columns_N[None, :] == label_M[:, None], label_gradient_M[:, None], 0.0)
    out_MN = gradient + rows_M.to(tl.int64)[:, None] * columns + columns_N[None, :]
    tl.store(out_MN, gradient_MN.to(gradient.dtype.element_ty), mask=here_M[:, None] & (columns_N[None, :] < columns))
