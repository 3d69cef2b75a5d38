"""Columns over the response tokens of whole samples, from which an algorithm makes advantages per token.

Passes of the ranks (old log-probs, reference, ...) -> columns by name -> `Algorithm.token_advantages` on every rank ->
one more column, which the loss reads. Here a context-parallel rank sees whole samples: the columns are cut into slices
afterwards.

Shape letters: N samples, R their response tokens end to end, S tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMN_NAMES = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
"""The columns that `Algorithm.token_columns` may name: the engine's log-probs, and results of passes of the ranks: old
and reference log-probs, and a critic's value before each token."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """The whole samples of one data-parallel rank in a step, on the CPU. All tensor-, context- and pipeline-parallel
    ranks of that data-parallel rank see the same samples.

    mask_R: bool, the trained tokens; tokens that an environment wrote are never among them.
    columns: float64 [R], by the names that the algorithm asked for; 0 where the mask is not set.
    lengths_N: int64, response tokens (trained or not).
    rewards_N: float64, shaped. advantages_N: float64, the result of `Algorithm.advantages`.
    bins_N, group_ids_N: int64. truncated_N: bool, answers that ended at the token limit.
    sum_over_step: sums a float64 tensor over the data-parallel ranks, so that means and deviations are those of the
        whole optimizer step; every rank must call it equally often, with the same shapes.
    token_rewards_R: float64 [R], each trained token's own reward, in addition to the answer's reward and not contained
        in rewards_N; None: none.
    """

    mask_R: Tensor
    columns: Mapping[str, Tensor]
    lengths_N: Tensor
    rewards_N: Tensor
    advantages_N: Tensor
    bins_N: Tensor
    group_ids_N: Tensor
    truncated_N: Tensor
    sum_over_step: Callable[[Tensor], Tensor]
    token_rewards_R: Tensor | None = None

    def by_sample(self, values_R: Tensor) -> Tensor:
        """Return a column as rows [N, S], one response each, 0 after its end, for sums along the sequence."""
        rows_NS = values_R.new_zeros(self._there().shape)
        rows_NS[self._there()] = values_R
        return rows_NS

    def end_to_end(self, rows_NS: Tensor) -> Tensor:
        """Return rows as a column [R]; the inverse of `by_sample`."""
        return rows_NS[self._there()]

    def per_token(self, values_N: Tensor) -> Tensor:
        """Return one value per sample, repeated over its response tokens: [R]."""
        return values_N.repeat_interleave(self.lengths_N)

    def _there(self) -> Tensor:
        """Return where a response has a token, bool [N, S]."""
        return torch.arange(max(self.lengths_N.tolist(), default=0)) < self.lengths_N[:, None]
