"""A batch in the making: which groups are kept, filtered, dropped, and how many of them the filter keeps.

Groups whose generation ended -> BatchSoFar -> SampledBatch. It enters the outcome of groups that are not kept into the
books at once. It generates nothing and decides nothing about order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_daro.rollout.ledger import Ledger
from megatron_daro.types import Group

LOWEST_KEEP_RATE = 0.25
"""However few groups the filter keeps, no more than four prompts, times `oversampling`, are requested for each missing
group."""


class BatchSoFar:
    """The groups of one batch so far, by outcome.

    incomplete: how many were dropped because rollouts were missing. rounds: of prompts, in all flights. ended: groups
    whose generation ended for this batch, without the surplus that it began with; ended_kept: those that are kept.
    """

    def __init__(self, ledger: Ledger, *, rollouts_per_prompt: int, kept_bins: Collection[int]) -> None:
        """Begin empty.

        Args:
            ledger: the books. rollouts_per_prompt: K. kept_bins: the bins 0..K whose groups are trained.
        """
        self._ledger = ledger
        self._size = rollouts_per_prompt
        self._kept_bins = kept_bins
        self.kept: list[Group] = []
        self.filtered: list[Group] = []
        self.dropped: list[Group] = []
        self.incomplete = 0
        self.rounds = 0
        self.ended_kept = 0
        self.ended = 0

    def classify(self, group: Group, complete: bool) -> None:
        """Keep, filter or drop a group whose generation has ended."""
        self.ended += 1
        if not complete:
            self.incomplete += 1
            self.drop([group])
        elif group.bin not in self._kept_bins:
            self._ledger.finish([group.group_id], "filtered")
            self.filtered.append(group)
        else:
            self.kept.append(group)
            self.ended_kept += 1

    def drop(self, groups: Iterable[Group]) -> None:
        """Drop outstanding groups."""
        groups = list(groups)
        self._ledger.finish([group.group_id for group in groups], "dropped")
        self.dropped.extend(groups)

    def keep_rate(self, prior: float = 1.0, prior_groups: float = 0.0) -> float:
        """Return the share of this batch's own groups (not surplus) that were kept, at least LOWEST_KEEP_RATE.

        Args:
            prior: the share to begin from. prior_groups: how many groups it counts for; 0: it holds only until one has
                ended.
        """
        if not self.ended + prior_groups:
            return max(LOWEST_KEEP_RATE, prior)
        kept = self.ended_kept + prior * prior_groups
        return max(LOWEST_KEEP_RATE, kept / (self.ended + prior_groups))

    def why_short(self) -> str:
        """Say how many groups were filtered and dropped, for a message."""
        bins = [group.bin for group in self.filtered]
        right, wrong = bins.count(self._size), bins.count(0)
        others = len(bins) - right - wrong
        partly = f" and {others} partly right" if others else ""
        return f"filtered {right} all right and {wrong} all wrong{partly}, {len(self.dropped)} dropped"
