"""What is left of a matrix after it was cast to fp8 blocks, as a server computes with it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_daro.config.precision import FP8_BLOCK as BLOCK


def restored(narrow_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a server computes with, [N, K] in `dtype`: the inverse of `cast` but for its rounding."""
    scale_NK = scale_nk.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    rows, columns = narrow_NK.shape
    return (narrow_NK.float() * scale_NK[:rows, :columns]).to(dtype)
