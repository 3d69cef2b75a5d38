"""Whether two folders have the same part of a checkpoint, for tests with one rank and with many."""

from __future__ import annotations

import torch

from megatron_daro.convert.daro_format import COMMON_FILE, DaroPieces


def assert_same_tensors(moved, saved):
    """All tensors are equal, bit for bit, and so is what all ranks have in common."""
    found, expected = DaroPieces(moved), DaroPieces(saved)
    keys = expected.keys()
    assert found.keys() == keys
    for key in keys:
        shape = expected.shape(key)
        assert found.shape(key) == shape
        got, wanted = (pieces.read(key, [0] * len(shape), list(shape)) for pieces in (found, expected))
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), key
    got, wanted = (torch.load(where / COMMON_FILE, weights_only=True) for where in (moved, saved))
    assert str(got) == str(wanted)
