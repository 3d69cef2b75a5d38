"""What an algorithm makes advantages per token of: columns over the response tokens of whole samples.

Passes of the ranks (old log-probs, reference, ...) -> columns by name -> `Algorithm.token_advantages` on every rank ->
one more column, which the loss reads. A context-parallel rank sees its samples whole here: the columns are cut into
slices afterwards.

Shape letters: N samples, R their response tokens end to end, S tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMN_NAMES = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
"""What `Algorithm.token_columns` may ask for: the engine's log-probs, and what a pass of the ranks computes: log-probs,
and what a critic says before each token."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """One rank's samples of a step, whole, on the CPU. Every tensor-, context- and pipeline-parallel rank of a
    data-parallel rank sees the same ones.

    mask_R: bool, the trained tokens: what an environment wrote is not among them, anywhere in a response. columns: by
    the names that the algorithm asked for, float64 [R], 0 where the mask is not set. lengths_N: int64, response tokens
    (trained or not). rewards_N: float64, shaped. advantages_N: float64, what `Algorithm.advantages` gave. bins_N,
    group_ids_N: int64. truncated_N: bool, answers that ended at the limit of tokens. sum_over_step: adds a float64
    tensor up over the data-parallel ranks, so that means and deviations are of the whole optimizer step; every rank
    must call it equally often, with one shape. token_rewards_R: float64 [R], what each trained token is rewarded with
    beside the answer's reward, which is not among rewards_N; None: nothing.
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
        """Return a column as rows [N, S], one response each, 0 after its end: for what runs along the sequence."""
        rows_NS = values_R.new_zeros(self._there().shape)
        rows_NS[self._there()] = values_R
        return rows_NS

    def end_to_end(self, rows_NS: Tensor) -> Tensor:
        """Return the inverse of `by_sample`: [R]."""
        return rows_NS[self._there()]

    def per_token(self, values_N: Tensor) -> Tensor:
        """Return one value per sample, repeated over its response tokens: [R]."""
        return values_N.repeat_interleave(self.lengths_N)

    def _there(self) -> Tensor:
        """bool [N, S], where a response has a token."""
        return torch.arange(max(self.lengths_N.tolist(), default=0)) < self.lengths_N[:, None]
