"""DARO's weights over one denominator for all bins: w_k / N in the place of w_k / N_k.

What docs/lab.md found: dividing each bin by its own tokens pays groups of a rare pass rate more than they are worth.
Here a bin's weight is still learnt from its own mean loss, so that it rests at 1 / |L_k|, but every token is paid
w_k / N with N the tokens of the trained groups. An algorithm of one's own, as docs/algorithms.md has it:

    PYTHONPATH=examples/lab megatron-daro train run.yaml algorithm.name=daro_shared:DaroShared

Place in the data flow: as every algorithm. Refuses `normalizer: batch`, which would measure the share again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_daro.algo.algorithm import length_classes
from megatron_daro.algo.weighting import BatchTotals, Daro
from megatron_daro.errors import AlgorithmError


class DaroShared(Daro):
    """w_k / N with learnt difficulty weights; groups with mu of 0 or 1 are filtered."""

    name = "daro_shared"

    def __init__(self, **given: Any) -> None:
        """Take the options of DARO."""
        if given.get("normalizer", "bin") != "bin":
            raise AlgorithmError(f"normalizer: got {given['normalizer']!r}, allowed with {self.name}: bin")
        super().__init__(**given)

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        trained_N = (lengths_N > 0) & self._mixed(bins_N)
        weights_N = self.cell_weights.to(bins_N.device)[bins_N, length_classes(lengths_N, self.length_edges)]
        return torch.where(trained_N, weights_N / max(totals.kept_tokens, 1), 0.0)
