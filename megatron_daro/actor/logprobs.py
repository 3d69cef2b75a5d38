"""Log-probabilities and entropy of labels, from hidden states, without ever holding all logits at once.

Used between the last transformer layer and the token loss, and in the old/reference log-prob pass.
The output layer is part of this function: logits exist only as one tile of `chunk_tokens` x `chunk_vocab` numbers
that is overwritten again and again, in the forward pass and, recomputed, in the backward pass. So the memory beside
the gradients is one or two tiles, and the time lost to a fourth matrix product is won back from memory traffic: every
pass over a tile stays in cache. On a CPU, where products are slow and few tokens are trained at once, logits that fit
`KEPT_LOGITS_BYTES` are kept for the backward pass instead.

The caller reduces the hidden gradient over the tensor-parallel group (see `vocab_parallel_logprobs`), and masks:
positions that do not count carry any valid label, and the caller multiplies the result by its mask or, which is
cheaper, selects the positions that count beforehand.

Shapes: T tokens; D hidden; V real vocabulary; Vp columns this rank holds (padding included);
C tokens of one chunk; X columns of one tile.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_daro.config.actor import KEPT_LOGITS_BYTES, LOGPROB_TILES
from megatron_daro.errors import ConfigError, DataError

# Stands in for minus infinity where it is multiplied by zero: exp(-1e30) is 0, and -1e30 * 0 is 0 instead of NaN.
_FAR_BELOW = -1e30


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one call is cut and what it computes; the same object serves forward and backward."""

    vocab_start: int
    num_columns: int
    """Columns of this rank that are real vocabulary; the padding lies behind them."""
    temperature: float
    chunk_tokens: int
    chunk_vocab: int
    with_entropy: bool
    kernel: str
    group: dist.ProcessGroup | None
    keeps_logits: bool
    """Whether the tiles of the forward pass are kept for the backward pass, which then recomputes none."""

    def column_tiles(self) -> Iterator[slice]:
        for start in range(0, self.num_columns, self.chunk_vocab):
            yield slice(start, min(start + self.chunk_vocab, self.num_columns))

    def token_chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))

    def tile_elements(self, num_tokens: int) -> int:
        return min(self.chunk_tokens, num_tokens) * min(self.chunk_vocab, self.num_columns)


def vocab_parallel_logprobs(
    hidden_TD: Tensor,
    weight_VpD: Tensor,
    labels_T: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    kernel: str = "auto",
    with_entropy: bool = True,
    labels_checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability and each position's entropy, differentiable in hidden and weight.

    With tensor parallelism the weight gradient is complete (this rank's rows), and the hidden gradient is **this
    rank's partial sum**: pass hidden through Megatron's `copy_to_tensor_model_parallel_region` (or, under sequence
    parallelism, `gather_from_sequence_parallel_region`) first, whose backward adds the parts up. Every rank must
    compute the same loss from the outputs, which are equal on all ranks.

    Args:
        hidden_TD: final hidden states (after the last norm), fp32, bf16, fp16 or fp64, [T, D]; T may be 0.
        weight_VpD: this rank's rows of the output layer, same dtype, [Vp, D].
        labels_T: global vocabulary ids in [0, V), long, [T]; any valid id where the caller masks the result.
        group: tensor-parallel process group, or None for one rank. Its ranks pass the same hidden states and labels.
        vocab_start: global id of this rank's first row.
        vocab_size: V; rows at or beyond it are padding, get probability 0 and gradient 0. None: every row is real.
        temperature: logits are divided by it; > 0.
        chunk_tokens: tokens of one tile; None picks 1,024 on a CPU and 4,096 on a GPU.
        chunk_vocab: columns of one tile; None picks 2,048 on a CPU and 8,192 on a GPU.
        kernel: "torch", "triton" for the kernels of `logprob_kernels`, on a GPU and not for fp64, or "auto", which
            takes these for bf16 and fp16 on a GPU where Triton is installed.
        with_entropy: False skips the entropy and returns zeros for it, with no gradient.
        labels_checked: `check_tokens` has accepted them already, so the host need not wait for a GPU.
    Returns:
        logprobs_T and entropy_T in nats, fp32 (fp64 for fp64 input), [T] each.
    Raises:
        DataError: shapes, dtypes or labels do not fit together.
        ConfigError: temperature or a chunk size is out of range, or the kernel cannot run here.
    Source: the chain rule on log softmax; running maximum and sum as in Milakov and Gimelshein, arXiv 1805.02867.
    """
    _check_options(temperature, chunk_tokens, chunk_vocab)
    _check_tensors(hidden_TD, weight_VpD, labels_T)
    kernel = _kernel_for(kernel, hidden_TD)
    num_rows = weight_VpD.shape[0]
    vocab_size = _real_vocabulary(num_rows, group, vocab_start, vocab_size)
    if not labels_checked:
        check_tokens(labels_T, vocab_size)
    num_columns = max(0, min(num_rows, vocab_size - vocab_start))
    device_tokens, device_columns = LOGPROB_TILES["cpu" if hidden_TD.device.type == "cpu" else "gpu"]
    plan = _Plan(
        vocab_start=vocab_start,
        num_columns=num_columns,
        temperature=temperature,
        chunk_tokens=chunk_tokens or device_tokens,
        chunk_vocab=chunk_vocab or device_columns,
        with_entropy=with_entropy,
        kernel=kernel,
        group=group,
        keeps_logits=_keeps_logits(hidden_TD, num_columns) and kernel == "torch",
    )
    return _ChunkedLogprobs.apply(hidden_TD, weight_VpD, labels_T, plan)


_Kept = deque[Tensor]
"""Tiles of logits, in the order of the forward pass."""


class _Context(FunctionCtx):
    """What torch hands from forward to backward."""

    plan: _Plan
    kept: _Kept
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward: one sweep over the tiles for the statistics of each position. Backward: a second one that uses them."""

    @staticmethod
    def forward(
        ctx: _Context, hidden_TD: Tensor, weight_VpD: Tensor, labels_T: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.kept = deque()
        max_T, sum_T, moment_T, target_T = _local_statistics(hidden_TD, weight_VpD, labels_T, plan, ctx.kept)
        if plan.group is not None and labels_T.numel():
            max_T, sum_T, moment_T, target_T = _reduce_statistics(max_T, sum_T, moment_T, target_T, plan.group)
        log_sum_T = sum_T.log()
        logprobs_T = (target_T - max_T) - log_sum_T
        entropy_T = log_sum_T - moment_T / sum_T if plan.with_entropy else torch.zeros_like(logprobs_T)
        ctx.plan = plan
        ctx.save_for_backward(hidden_TD, weight_VpD, labels_T, max_T, log_sum_T, entropy_T)
        if not plan.with_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, logprob_grad_T: Tensor | None, entropy_grad_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TD, weight_VpD, labels_T, max_T, log_sum_T, entropy_T = ctx.saved_tensors
        if not ctx.plan.with_entropy:
            entropy_grad_T = None
        if logprob_grad_T is None:
            logprob_grad_T = torch.zeros_like(max_T)
        sweep = _BackwardSweep(ctx.plan, max_T, log_sum_T, entropy_T, logprob_grad_T, entropy_grad_T, ctx.kept)
        gradients = sweep.run(hidden_TD, weight_VpD, labels_T, *ctx.needs_input_grad[:2])
        return (*gradients, None, None)


def _local_statistics(
    hidden_TD: Tensor, weight_VpD: Tensor, labels_T: Tensor, plan: _Plan, kept: _Kept
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return over this rank's columns: maximum m, sum of e = exp(logit - m), sum of e * (logit - m), the label's logit.

    The moment is taken about the maximum, so that logits of +-1e4 do not cancel in the entropy. For a label of another
    rank the logit is 0; on a rank with nothing but padding m is `_FAR_BELOW` and the sums are 0. Tiles are put into
    `kept` if the plan says so.
    """
    num_tokens = hidden_TD.shape[0]
    if plan.kernel == "triton":
        kernels = _kernels()
        weight_XD, first_id = weight_VpD[: plan.num_columns], plan.vocab_start
        hidden_TD = _rows_contiguous(hidden_TD)
        return kernels.statistics(hidden_TD, weight_XD, labels_T, first_id=first_id, temperature=plan.temperature)
    dtype = _accumulation_dtype(hidden_TD)
    max_T, sum_T, moment_T, target_T = hidden_TD.new_zeros((4, num_tokens), dtype=dtype).unbind()
    max_T.fill_(_FAR_BELOW)
    if num_tokens == 0:
        return max_T, sum_T, moment_T, target_T
    buffer, scratch = hidden_TD.new_empty((2, plan.tile_elements(num_tokens)), dtype=dtype).unbind()
    spare = torch.empty_like(buffer if plan.keeps_logits else buffer[:0])
    for columns in plan.column_tiles():
        weight_XD = _operand(weight_VpD[columns], dtype)
        for rows in plan.token_chunks(num_tokens):
            tile_CX = _logits_tile(_operand(hidden_TD[rows], dtype), weight_XD, plan.temperature, buffer)
            index_C, here_C = _label_columns(labels_T[rows], plan.vocab_start + columns.start, tile_CX.shape[1])
            found_C = tile_CX.gather(1, index_C.unsqueeze(1)).squeeze(1)
            target_T[rows] += torch.where(here_C, found_C, 0)
            new_max_C = torch.maximum(max_T[rows], tile_CX.amax(dim=1))
            shifted = tile_CX
            if plan.keeps_logits:
                kept.append(tile_CX)
                buffer, shifted = torch.empty_like(buffer), spare[: tile_CX.numel()].view_as(tile_CX)
            tile_CX = torch.sub(tile_CX, new_max_C.unsqueeze(1), out=shifted)
            exp_CX = torch.exp(tile_CX, out=scratch[: tile_CX.numel()].view_as(tile_CX))
            fall_C = (max_T[rows] - new_max_C).clamp_(min=_FAR_BELOW)
            shrink_C = fall_C.exp()
            if plan.with_entropy:
                moment_T[rows] = (moment_T[rows] + fall_C * sum_T[rows]) * shrink_C + _row_dots(exp_CX, tile_CX)
            sum_T[rows] = sum_T[rows] * shrink_C + exp_CX.sum(dim=1)
            max_T[rows] = new_max_C
    return max_T, sum_T, moment_T, target_T


def _reduce_statistics(
    max_T: Tensor, sum_T: Tensor, moment_T: Tensor, target_T: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the statistics of all ranks' columns: one maximum and one sum over the group, 4 T numbers in all."""
    global_max_T = max_T.clone()
    dist.all_reduce(global_max_T, op=dist.ReduceOp.MAX, group=group)
    fall_T = (max_T - global_max_T).clamp_(min=_FAR_BELOW)
    shrink_T = fall_T.exp()
    sums_3T = torch.stack((sum_T * shrink_T, (moment_T + fall_T * sum_T) * shrink_T, target_T))
    dist.all_reduce(sums_3T, op=dist.ReduceOp.SUM, group=group)
    return global_max_T, sums_3T[0], sums_3T[1], sums_3T[2]


class _BackwardSweep:
    """Gradients of hidden and weight: every tile of logits, kept or computed once more, becomes its gradient in place.

    With p = softmax(z), H the entropy, g and e the gradients of log-probability and entropy, and y the label:
    dz_v = g * ([v = y] - p_v) - e * p_v * (log p_v + H). The softmax part of both is one factor on p_v.
    """

    def __init__(
        self,
        plan: _Plan,
        max_T: Tensor,
        log_sum_T: Tensor,
        entropy_T: Tensor,
        logprob_grad_T: Tensor,
        entropy_grad_T: Tensor | None,
        kept: _Kept,
    ) -> None:
        self.plan = plan
        self.kept = kept
        self.max_T = max_T
        self.log_sum_T = log_sum_T
        # Logits were divided by the temperature, so their gradient is too: cheaper on T numbers than on T x Vp.
        self.label_grad_T = logprob_grad_T / plan.temperature
        self.slope_T = None if entropy_grad_T is None else -entropy_grad_T / plan.temperature
        self.offset_T = -self.label_grad_T
        if self.slope_T is not None:
            self.offset_T = self.offset_T + self.slope_T * entropy_T

    def run(
        self, hidden_TD: Tensor, weight_VpD: Tensor, labels_T: Tensor, need_hidden: bool, need_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        plan, num_tokens = self.plan, hidden_TD.shape[0]
        dtype = _accumulation_dtype(hidden_TD)
        hidden_grad_TD = torch.zeros_like(hidden_TD, dtype=dtype) if need_hidden else None
        weight_grad_VpD = torch.empty_like(weight_VpD) if need_weight else None
        if weight_grad_VpD is not None:
            weight_grad_VpD[plan.num_columns :].zero_()
        elements = 0 if plan.kernel == "triton" else plan.tile_elements(num_tokens)
        buffer, scratch = hidden_TD.new_empty((2, elements), dtype=dtype).unbind()
        for columns in plan.column_tiles():
            weight_XD = weight_VpD[columns]
            weight_grad_XD = _accumulator(weight_grad_VpD, columns, dtype)
            for rows in plan.token_chunks(num_tokens):
                hidden_CD = hidden_TD[rows]
                if plan.kernel == "triton":
                    grad_CX = self._kernel_gradient(hidden_CD, weight_XD, labels_T[rows], rows, columns.start)
                else:
                    if self.kept:  # a second backward pass (retain_graph) finds none left
                        tile_CX = self.kept.popleft()
                    else:
                        left_CD, right_XD = _operand(hidden_CD, dtype), _operand(weight_XD, dtype)
                        tile_CX = _logits_tile(left_CD, right_XD, plan.temperature, buffer)
                    grad_CX = self._tile_gradient(tile_CX, labels_T[rows], rows, columns.start, scratch)
                grad_CX = _factor(grad_CX, weight_XD.dtype)
                if hidden_grad_TD is not None:
                    _add_product(hidden_grad_TD[rows], grad_CX, weight_XD)
                if weight_grad_XD is not None:
                    _add_product(weight_grad_XD, grad_CX.t(), hidden_CD)
            if weight_grad_VpD is not None and weight_grad_XD is not None and weight_grad_VpD.dtype != dtype:
                weight_grad_VpD[columns] = weight_grad_XD
        return None if hidden_grad_TD is None else hidden_grad_TD.to(hidden_TD.dtype), weight_grad_VpD

    def _kernel_gradient(
        self, hidden_CD: Tensor, weight_XD: Tensor, labels_C: Tensor, rows: slice, start: int
    ) -> Tensor:
        return _kernels().logit_gradients(
            _rows_contiguous(hidden_CD),
            weight_XD,
            labels_C,
            max_C=self.max_T[rows],
            log_sum_C=self.log_sum_T[rows],
            label_grad_C=self.label_grad_T[rows],
            offset_C=self.offset_T[rows],
            slope_C=None if self.slope_T is None else self.slope_T[rows],
            first_id=self.plan.vocab_start + start,
            temperature=self.plan.temperature,
        )

    def _tile_gradient(self, tile_CX: Tensor, labels_C: Tensor, rows: slice, start: int, scratch: Tensor) -> Tensor:
        """Turn a tile of logits into a tile of their gradients; the tile is used up."""
        tile_CX.sub_(self.max_T[rows].unsqueeze(1)).sub_(self.log_sum_T[rows].unsqueeze(1))
        if self.slope_T is None:
            grad_CX = tile_CX.exp_().mul_(self.offset_T[rows].unsqueeze(1))
        else:
            grad_CX = torch.exp(tile_CX, out=scratch[: tile_CX.numel()].view_as(tile_CX))
            tile_CX.mul_(self.slope_T[rows].unsqueeze(1)).add_(self.offset_T[rows].unsqueeze(1))
            grad_CX.mul_(tile_CX)
        index_C, here_C = _label_columns(labels_C, self.plan.vocab_start + start, tile_CX.shape[1])
        label_grad_C = torch.where(here_C, self.label_grad_T[rows], 0)
        return grad_CX.scatter_add_(1, index_C.unsqueeze(1), label_grad_C.unsqueeze(1))


def _keeps_logits(hidden_TD: Tensor, num_columns: int) -> bool:
    """Whether to keep logits for the backward pass: on a CPU, if they are few enough and there will be one."""
    num_bytes = hidden_TD.shape[0] * num_columns * _accumulation_dtype(hidden_TD).itemsize
    return hidden_TD.device.type == "cpu" and torch.is_grad_enabled() and num_bytes <= KEPT_LOGITS_BYTES


def _kernels() -> ModuleType:
    from megatron_daro.actor import logprob_kernels

    return logprob_kernels


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _operand(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix as a factor of a product whose result is `dtype`.

    A GPU multiplies narrow numbers into fp32 sums by itself. A CPU would round the result to the narrow type, a
    relative error of 2e-3 in a logit, so there the factors are widened: a slice at a time, never the whole weight.
    """
    return matrix if matrix.device.type == "cuda" else matrix.to(dtype)


def _logits_tile(hidden_CD: Tensor, weight_XD: Tensor, temperature: float, buffer: Tensor) -> Tensor:
    num_tokens, num_columns = hidden_CD.shape[0], weight_XD.shape[0]
    tile_CX = buffer[: num_tokens * num_columns].view(num_tokens, num_columns)
    if hidden_CD.dtype == buffer.dtype:
        torch.mm(hidden_CD, weight_XD.t(), out=tile_CX)
    else:
        torch.mm(hidden_CD, weight_XD.t(), out_dtype=buffer.dtype, out=tile_CX)
    return tile_CX if temperature == 1.0 else tile_CX.div_(temperature)


def _accumulator(grad_VpD: Tensor | None, columns: slice, dtype: torch.dtype) -> Tensor | None:
    """Return zeros to sum one tile's rows of the weight gradient in: the rows themselves if their dtype is wide
    enough."""
    if grad_VpD is None:
        return None
    rows_XD = grad_VpD[columns]
    return rows_XD.zero_() if grad_VpD.dtype == dtype else torch.zeros_like(rows_XD, dtype=dtype)


def _factor(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tile of gradients as a factor beside matrices of `dtype`: in that dtype if the hardware multiplies it
    into fp32 sums."""
    multiplies = gradient.device.type == "cuda" or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return gradient.to(dtype) if multiplies else gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, in the dtype of `total`. On a CPU the product of two narrow factors is rounded before
    it is added, as the result would be afterwards."""
    if left.dtype == total.dtype:
        total.addmm_(left, right.to(total.dtype))
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(left, right))


def _row_dots(left_CX: Tensor, right_CX: Tensor) -> Tensor:
    """Return the dot product of each pair of rows, without a tile for the products."""
    return torch.bmm(left_CX.unsqueeze(1), right_CX.unsqueeze(2)).view(-1)


def _label_columns(labels_C: Tensor, first_id: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in a tile that begins at `first_id` (0 if it is not in it), and whether it is."""
    index_C = labels_C - first_id
    here_C = (index_C >= 0) & (index_C < num_columns)
    return torch.where(here_C, index_C, 0), here_C


def _real_vocabulary(num_rows: int, group: dist.ProcessGroup | None, vocab_start: int, vocab_size: int | None) -> int:
    total_rows = num_rows * (1 if group is None else dist.get_world_size(group))
    if vocab_start < 0 or vocab_start + num_rows > total_rows:
        raise DataError(
            f"vocab_start: got {vocab_start} with {num_rows} rows on this rank, allowed 0 to {total_rows - num_rows}; "
            "pass the tensor-parallel group, and the global id of this rank's first row"
        )
    if vocab_size is None:
        return total_rows
    if not 1 <= vocab_size <= total_rows:
        raise DataError(
            f"vocab_size: got {vocab_size}, allowed 1 to {total_rows}, the rows of the output layer over all ranks; "
            "pass the tokenizer's vocabulary, not more than the layer has"
        )
    return vocab_size


def _kernel_for(kernel: str, hidden_TD: Tensor) -> str:
    """Return "torch" or "triton". Raises ConfigError: the kernel is unknown, or cannot run here."""
    if kernel not in ("auto", "torch", "triton"):
        raise ConfigError(f"kernel: got {kernel!r}, allowed auto, torch or triton")
    if kernel == "auto":
        narrow_on_gpu = hidden_TD.device.type == "cuda" and hidden_TD.dtype.itemsize == 2
        return "triton" if narrow_on_gpu and importlib.util.find_spec("triton") is not None else "torch"
    if kernel == "torch":
        return kernel
    fix = "set actor.logprob_kernel=torch"
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"kernel: got triton, which is not installed; install a CUDA build of torch, or {fix}")
    if hidden_TD.dtype == torch.float64:
        raise ConfigError(f"kernel: got triton with {hidden_TD.dtype}, allowed fp32, bf16, fp16; {fix}")
    if hidden_TD.device.type == "cpu" and not _kernels().INTERPRETED:
        raise ConfigError(f"kernel: got triton on a CPU, allowed on a GPU (or with TRITON_INTERPRET=1); {fix}")
    return kernel


def _check_options(temperature: float, chunk_tokens: int | None, chunk_vocab: int | None) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature: got {temperature}, allowed a finite number above 0; greedy is no distribution")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens: got {chunk_tokens}, allowed 1 or more, or None to let the device decide")
    if chunk_vocab is not None and chunk_vocab < 1:
        raise ConfigError(f"chunk_vocab: got {chunk_vocab}, allowed 1 or more, or None to let the device decide")


def _check_tensors(hidden_TD: Tensor, weight_VpD: Tensor, labels_T: Tensor) -> None:
    shapes = f"hidden {tuple(hidden_TD.shape)}, weight {tuple(weight_VpD.shape)}, labels {tuple(labels_T.shape)}"
    if hidden_TD.dim() != 2 or weight_VpD.dim() != 2 or hidden_TD.shape[1] != weight_VpD.shape[1]:
        raise DataError(f"log-probs: got {shapes}; allowed [T, D], [Vp, D], [T]; flatten batch and sequence first")
    if labels_T.dim() != 1 or labels_T.shape[0] != hidden_TD.shape[0]:
        raise DataError(f"log-probs: got {shapes}; one label per hidden state is needed; shift labels before the call")
    if labels_T.dtype != torch.long:
        raise DataError(f"labels: got {labels_T.dtype}, allowed torch.int64; call .long() on them")
    if hidden_TD.dtype != weight_VpD.dtype or not hidden_TD.is_floating_point():
        raise DataError(
            f"log-probs: got hidden {hidden_TD.dtype} and weight {weight_VpD.dtype}; allowed one floating-point dtype "
            "for both; cast one of them"
        )


def check_tokens(tokens_T: Tensor, vocab_size: int) -> None:
    """Refuse a token outside the vocabulary, which would not be noticed otherwise: as a label it would get a
    log-probability that is no token's, as an input an embedding of zeros. Waits for a GPU.

    Raises:
        DataError: with the range of the tokens.
    """
    if tokens_T.numel() == 0:
        return
    low, high = (int(value) for value in torch.stack(tokens_T.aminmax()).tolist())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"tokens: got ids from {low} to {high}, allowed 0 to {vocab_size - 1}; give masked positions any valid id"
        )
