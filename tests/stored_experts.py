"""Routed experts of a batch, written as answer workers write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_daro.routed_experts import ExpertsFolder, StoredExperts


def stored(experts_TLK: np.ndarray, lengths_N: np.ndarray, run_dir: Path) -> tuple[StoredExperts, ...]:
    """Those of each sample, of all its tokens. Args: experts_TLK: [T, layers, experts of a token]."""
    folder, ends_N = ExpertsFolder(run_dir), np.cumsum(lengths_N)
    return tuple(
        folder.store((0, 0, i), experts_TLK[end - length : end], length)
        for i, (end, length) in enumerate(zip(ends_N.tolist(), lengths_N.tolist(), strict=True))
    )
