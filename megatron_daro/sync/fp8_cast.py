"""Matrices as fp8 blocks, as in DeepSeek-V3: NAME.weight in e4m3, and NAME.weight_scale_inv with one fp32 scale for
each block of 128 x 128.

Source: sglang/srt/layers/quantization/fp8.py and fp8_utils.py (0.5.23), block_quant_dequant.
Legend: N rows, K columns of a matrix; n, k rows and columns of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_daro.config.precision import FP8_BLOCK as BLOCK

_SCALE_SUFFIX = "_scale_inv"
_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max


def pattern_of(templates: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern for names of these templates, such as `model.layers.{layer}.mlp.down_proj.weight`."""
    numbered = (re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(template)) for template in templates)
    return re.compile("|".join(numbered))


def cast(matrix_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [N, K], fp32 scales [n, k]) with matrix ~ e4m3 * scale; blocks at the edges may be smaller.

    Args:
        matrix_NK: of any float dtype. A value that is not finite stays visible: its block becomes NaN. A block of zeros
            has the scale 1.
    """
    rows, columns = matrix_NK.shape
    n, k = -(-rows // BLOCK), -(-columns // BLOCK)
    padded_NK = matrix_NK.new_zeros((n * BLOCK, k * BLOCK), dtype=torch.float32)
    padded_NK[:rows, :columns] = matrix_NK
    blocks = padded_NK.view(n, BLOCK, k, BLOCK)
    largest_nk = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    # Divided by a tensor: on a GPU torch replaces a division by a number with a product by its rounded reciprocal.
    scale_nk = torch.where(largest_nk == 0, 1.0, largest_nk / torch.full_like(largest_nk, _LARGEST))
    # Clamped, since a quotient may be rounded up, and torch casts values that are too large to NaN.
    blocks.div_(scale_nk[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    return padded_NK[:rows, :columns].to(_E4M3), scale_nk


def as_blocks(
    stream: Iterable[tuple[str, Tensor]], templates: Iterable[str], bucket_bytes: int, sent: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on with the matrices of these templates as blocks; their scales follow later in the stream.

    Tensors that are not fp8 (scales, and others of the stream) are small except for a few. Copies of the small ones are
    held back, so that buckets, which have one dtype, stay full.

    Args:
        stream: (HF name, tensor). templates: names of the matrices, with `{layer}` and `{expert}` for numbers.
        bucket_bytes: at most a quarter of it is held back in each dtype. sent: takes the names of the matrices.
    """
    pattern, held = pattern_of(templates), _Held(bucket_bytes // 4)
    for name, tensor in stream:
        if not pattern.fullmatch(name):
            yield from held.pass_on(name, tensor)
            continue
        narrow_NK, scale_nk = cast(tensor)
        sent.append(name)
        yield name, narrow_NK
        yield from held.pass_on(name + _SCALE_SUFFIX, scale_nk)
    yield from held.rest()


class _Held:
    """Tensors that are held back, by dtype, up to `most_bytes` each."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        self._bytes: dict[torch.dtype, int] = {}

    def pass_on(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Hold a tensor back; first yield those held in its dtype if it no longer fits. Yield a large one at once."""
        if tensor.nbytes > self._most:
            yield name, tensor
            return
        dtype = tensor.dtype
        if self._bytes.get(dtype, 0) + tensor.nbytes > self._most:
            yield from self._take(dtype)
        self._held.setdefault(dtype, []).append((name, tensor.detach().clone()))
        self._bytes[dtype] = self._bytes.get(dtype, 0) + tensor.nbytes

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is left."""
        for dtype in list(self._held):
            yield from self._take(dtype)

    def _take(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self._bytes[dtype] = 0
        yield from self._held.pop(dtype, [])
