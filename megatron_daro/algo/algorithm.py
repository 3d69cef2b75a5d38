"""What an algorithm is: an advantage, a choice of groups, a coefficient per rollout, and what it learns from a step.

The totals of the whole optimizer step (trained tokens and rollouts per bin; summed over all ranks before the forward
pass) -> one coefficient per rollout -> L = sum_i coefficient_i * sum_t l_t, however the rollouts are split over ranks
and micro-batches -> sums over the step -> what the algorithm learns, the same on every rank.
A denominator taken from part of a step would make the loss depend on how the step was split.

Shape letters: N samples (of any part of the step), K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Required, TypedDict  # noqa: UP035 - Python 3.10, in other frameworks' environments

from megatron_daro.algo.advantages import AdvantageStd, group_advantages
from megatron_daro.algo.difficulty import bin_sums, token_counts
from megatron_daro.algo.token_columns import TokenColumns
from megatron_daro.errors import AlgorithmError, CheckpointError

GroupFilter = Literal["auto", "none", "pass_rate"]


@dataclass(frozen=True, slots=True, eq=False)
class StepTotals:
    """What every rank must know about the whole optimizer step before its first forward pass.

    tokens_per_cell: int64 [K+1, L], trained tokens per bin and class of samples; L is 1 unless the algorithm has
    classes. rollouts_per_bin: int64 [K+1], those without tokens included.
    """

    tokens_per_cell: Tensor
    rollouts_per_bin: Tensor

    @classmethod
    def of(cls, bins_N: Tensor, lengths_N: Tensor, rollouts_per_prompt: int) -> StepTotals:
        """Return the totals of some samples from their bins, int64 [N], and trained tokens, [N]. The caller adds up the
        totals of all ranks."""
        lengths_N = torch.as_tensor(lengths_N)
        return cls.of_classes(bins_N, lengths_N, torch.zeros_like(lengths_N), rollouts_per_prompt, 1)

    @classmethod
    def of_classes(
        cls, bins_N: Tensor, lengths_N: Tensor, classes_N: Tensor, rollouts_per_prompt: int, num_classes: int
    ) -> StepTotals:
        """Return the same as `of` for samples that have classes, int64 [N] below num_classes."""
        bins_N = torch.as_tensor(bins_N)
        tokens = [
            token_counts(bins_N, torch.where(classes_N == c, lengths_N, 0), rollouts_per_prompt)
            for c in range(num_classes)
        ]
        ones_N = torch.ones_like(bins_N, dtype=torch.int64)
        return cls(torch.stack(tokens, dim=1), bin_sums(ones_N, bins_N, rollouts_per_prompt))

    @classmethod
    def from_vector(cls, vector: Tensor, num_classes: int = 1) -> StepTotals:
        """Return the totals that a `vector` stands for, after it was summed over ranks."""
        tokens, rollouts = vector.to(torch.int64).tensor_split([len(vector) * num_classes // (num_classes + 1)])
        return cls(tokens.reshape(-1, num_classes), rollouts)

    def vector(self) -> Tensor:
        """int64 [(L+1)(K+1)]: tokens per cell, then rollouts per bin; a plain sum over ranks adds totals."""
        return torch.cat([self.tokens_per_cell.reshape(-1), self.rollouts_per_bin])

    @property
    def tokens_per_bin(self) -> Tensor:
        """int64 [K+1], N_k."""
        return self.tokens_per_cell.sum(dim=1)

    @property
    def tokens(self) -> int:
        """All trained tokens; N in formulas."""
        return int(self.tokens_per_bin.sum())

    @property
    def mixed_rollouts(self) -> int:
        """Rollouts of groups with 0 < mu < 1, those without tokens included."""
        return int(self.rollouts_per_bin[1:-1].sum())

    @property
    def mixed_tokens(self) -> int:
        """Trained tokens of groups with 0 < mu < 1."""
        return int(self.tokens_per_bin[1:-1].sum())

    @property
    def num_rollouts(self) -> int:
        """All rollouts of the step, those without tokens included."""
        return int(self.rollouts_per_bin.sum())

    @property
    def pass_rate(self) -> float:
        """Share of right answers among the step's rollouts; 0 for a step without any."""
        right = float((self.rollouts_per_bin * torch.arange(len(self.rollouts_per_bin))).sum())
        return right / (len(self.rollouts_per_bin) - 1) / self.num_rollouts if self.num_rollouts else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Some samples of a step, as an algorithm sees them; empty on a rank for which a short batch has no work.

    bins_N: int64 [N]. lengths_N: [N], trained response tokens. advantages_N: floating [N]. group_lengths_NK: int64
    [N, K], trained tokens of every rollout of the sample's group, the sample itself included; None unless the
    algorithm `needs_group_lengths`. environments_N: int64 [N], the index of each sample's environment; None: the run
    has only one.
    """

    bins_N: Tensor
    lengths_N: Tensor
    advantages_N: Tensor
    group_lengths_NK: Tensor | None = None
    environments_N: Tensor | None = None


CELL_SUMS = ("loss_sums", "abs_loss_sums", "advantage_sums")
"""Sums over the tokens of each bin and class of samples, not multiplied by coefficients: of token losses, of their
absolute values, and of |A|."""


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """Results of a whole step over all ranks, from which an algorithm learns.

    sums: float64 [K+1, L] each, by the names in `CELL_SUMS`; a loop of your own may add sums that its algorithm reads.
    entropy: mean over the trained tokens, nats.
    """

    totals: StepTotals
    sums: Mapping[str, Tensor]
    entropy: float

    @classmethod
    def of_bins(cls, totals: StepTotals, loss_sums: Tensor, abs_loss_sums: Tensor) -> StepStats:
        """Return the results of a loop that knows only the sums [K+1] of token losses and of their absolute values."""
        sums = {"loss_sums": loss_sums[:, None], "abs_loss_sums": abs_loss_sums[:, None]}
        return cls(totals, sums, entropy=0.0)

    def per_bin(self, name: str) -> Tensor:
        """Return the named sums added up over all classes, float64 [K+1]."""
        return self.sums[name].sum(dim=1)


def number(name: str, value: float, low: float, high: float = float("inf"), *, closed: bool = True) -> float:
    """Return the value of an option as float. Raises AlgorithmError if it is not in [low, high), or with closed=False
    not in (low, high)."""
    if not (low <= value < high if closed else low < value < high):
        least = f"{low:g} or more" if closed else f"above {low:g}"
        most = "" if high == float("inf") else f" and below {high:g}"
        raise AlgorithmError(f"{name}: got {value}, allowed is a number {least}{most}")
    return float(value)


class Common(TypedDict, total=False):
    """Keyword arguments that every algorithm takes; see `Algorithm`."""

    rollouts_per_prompt: Required[int]
    max_response_tokens: Required[int]
    std: AdvantageStd | Literal["auto"]
    group_filter: GroupFilter


class Algorithm(ABC):
    """Base class of all algorithms: an advantage, a filter, and a coefficient per rollout.

    A subclass sets its `name` and overrides what differs: `advantage_std` or `advantages`; `dynamic_filter` or
    `own_filter`; `bin_coefficients` (or `coefficients`, if bin and length are not enough); `learn`, `state_dict` and
    `load_state_dict`, if it learns; `token_columns` and `token_advantages`, if tokens of one rollout have different
    advantages. The keyword arguments of its constructor are its options.
    """

    name: ClassVar[str]
    advantage_std: ClassVar[AdvantageStd] = "population"
    dynamic_filter: ClassVar[bool] = False
    std_allowed: ClassVar[tuple[AdvantageStd, ...]] = get_args(AdvantageStd)
    """Values of option `std` that may replace `advantage_std`."""
    std_defines: ClassVar[bool] = False
    """Whether the algorithm is no longer the published one with another divisor."""
    needs_group_lengths: bool = False
    """Whether the algorithm needs `Samples.group_lengths_NK`."""
    weighs_by_advantage: ClassVar[bool] = False
    """Whether `coefficients` reads `Samples.advantages_N`; then all tokens of a sample must be trained with that
    advantage."""
    token_columns: ClassVar[tuple[str, ...] | None] = None
    """Columns that `token_advantages` reads, of `token_columns.COLUMN_NAMES`; the ranks compute those that need a pass
    before the first optimizer step of a batch. None: one advantage for all tokens of a rollout."""
    resets_optimizer: bool = False
    """Whether the optimizer's moments are set to zero when a batch of rollouts begins."""

    @property
    def classes(self) -> tuple[str, tuple[str, ...]]:
        """(what samples are classed by beside their pass rate, names of the classes). Totals and step statistics are
        kept per class."""
        return "all", ("all",)

    def classes_of(self, samples: Samples) -> Tensor:
        """Return the index of each sample's class, int64 [N]."""
        return torch.zeros_like(samples.bins_N)

    @property
    def own_objective(self) -> Mapping[str, Any]:
        """Fields of `objective.ObjectiveSettings` that belong to the method; they override the configuration."""
        return {}

    def __init__(
        self,
        *,
        rollouts_per_prompt: int,
        max_response_tokens: int,
        std: AdvantageStd | Literal["auto"] = "auto",
        group_filter: GroupFilter = "auto",
    ) -> None:
        """Take the options of every algorithm.

        Args:
            rollouts_per_prompt: K, 2 or more.
            max_response_tokens: the longest response allowed, in tokens (dr_grpo's constant denominator).
            std: what the advantage is divided by; auto: the algorithm's own choice.
            group_filter: which groups are trained. auto: the algorithm's own choice; none: all; pass_rate: those with
                0 < mu < 1.

        Raises:
            AlgorithmError: an option is out of range, or `std` is not in `std_allowed`.
        """
        if rollouts_per_prompt < 2:
            raise AlgorithmError(f"rollouts_per_prompt: got {rollouts_per_prompt}, allowed is 2 or more")
        if max_response_tokens < 1:
            raise AlgorithmError(f"max_response_tokens: got {max_response_tokens}, allowed is 1 or more")
        if std != "auto" and std not in self.std_allowed:
            raise AlgorithmError(
                f"std: got {std!r}, allowed with {self.name}: auto or {', '.join(self.std_allowed)}; set it to auto, "
                "or choose another algorithm"
            )
        if group_filter not in get_args(GroupFilter):
            allowed = ", ".join(get_args(GroupFilter))
            raise AlgorithmError(f"group_filter: got {group_filter!r}, allowed: {allowed}; set it to auto")
        self.rollouts_per_prompt = rollouts_per_prompt
        self.max_response_tokens = max_response_tokens
        self.std: AdvantageStd = self.advantage_std if std == "auto" else std
        self.group_filter: GroupFilter = group_filter

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """Return the advantages of the whole step. Called in the driver, on the driver's object, which never learns and
        is not in checkpoints; with `kl.place: reward` also on every rank, whose result is then the one that counts.

        Args:
            rewards_N: [N], finite. group_ids_N: int64 [N], in any order.

        Returns:
            Floating [N].
        """
        return group_advantages(rewards_N, group_ids_N, std=self.std)

    def token_advantages(self, tokens: TokenColumns) -> Tensor:
        """Return an advantage for each response token; only for algorithms that set `token_columns`. Called on every
        rank at every optimizer step, before its forward pass.

        Args:
            tokens: the complete samples of this data-parallel rank. `tokens.advantages_N` is the result of
                `advantages`.

        Returns:
            Floating [R], finite where `tokens.mask_R` is set; elsewhere it is not read.
        """
        raise NotImplementedError(f"{type(self).__name__} has one advantage for all tokens of a rollout")

    def value_targets(self, tokens: TokenColumns) -> Tensor:
        """Return the targets of the critic's values before each response token; only for algorithms whose
        `token_columns` have "values". Called on every rank at every optimizer step, after `token_advantages`.

        Args:
            tokens: as in `token_advantages`.

        Returns:
            Floating [R], finite where `tokens.mask_R` is set; elsewhere it is not read.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no critic")

    def keep(self, bins_N: Tensor) -> Tensor:
        """Return which samples' groups are trained by `group_filter`, bool [N]. The others are replaced by further
        prompts."""
        bins_N = torch.as_tensor(bins_N)
        if self.group_filter == "none":
            return torch.ones_like(bins_N, dtype=torch.bool)
        return self._mixed(bins_N) if self.group_filter == "pass_rate" else self.own_filter(bins_N)

    def own_filter(self, bins_N: Tensor) -> Tensor:
        """Return which samples' groups are trained with `group_filter` auto, bool [N]."""
        return self._mixed(bins_N) if self.dynamic_filter else torch.ones_like(bins_N, dtype=torch.bool)

    @property
    def kept_bins(self) -> frozenset[int]:
        """The bins 0..K whose groups are trained."""
        return frozenset(self.keep(torch.arange(self.rollouts_per_prompt + 1)).nonzero().flatten().tolist())

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about options that are allowed, but probably not intended."""
        if not self.std_defines or self.std == self.advantage_std:
            return ()
        return (f"algorithm.std: got {self.std!r}; auto is what {self.name} is: leave it unset for the published one",)

    @abstractmethod
    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """Return the factor of the sum of a rollout's token losses, if bin and length determine it. In nearly every
        algorithm they do, and most other frameworks know nothing else about a sample (plugins/ calls this method).

        Args:
            bins_N: int64 [N], bins of some samples of the step.
            lengths_N: [N], their trained response tokens.
            totals: of the whole optimizer step, over all ranks and micro-batches.

        Returns:
            float64 [N] on the device of `bins_N`, finite, without gradient; 0 for samples without tokens.
        """

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """Return the same factors for samples about which everything is known; the trainer's loss calls this method. An
        algorithm overrides it if a coefficient needs an advantage, the group's lengths or an environment (if it always
        does, it derives from `SampleAlgorithm`).

        Args:
            samples: some samples of the step. totals: of the whole step.

        Returns:
            float64 [N], as `bin_coefficients`.
        """
        return self.bin_coefficients(samples.bins_N, samples.lengths_N, totals)

    def regularizer_coefficient(self, totals: StepTotals) -> float:
        """Return the factor of each token's KL and entropy terms: 1 / trained tokens of the step, so their sum is a
        mean."""
        return inverse(totals.tokens)

    def extra_loss(self, totals: StepTotals) -> float:
        """Return the part of the loss that has no gradient with respect to the policy (daro: -sum ln w), for
        reporting."""
        return 0.0

    def begin_batch(self) -> None:  # noqa: B027
        """Note that a batch of rollouts begins. Called on every rank before the batch's first optimizer step, and not
        undone if that step is skipped; a replay does not call it for a batch all of whose steps were skipped. So do
        here only what may as well be done at the next batch's beginning, such as to average what `learn` collected."""

    def learn(self, step_stats: StepStats) -> None:  # noqa: B027
        """Learn from a step that is applied; called once per step, on every rank with the same numbers."""

    @property
    def weights(self) -> Tensor | None:
        """Difficulty weights, float64 [K+1], each the mean over classes; None for an algorithm that has none."""
        return None

    @property
    def cell_weights(self) -> Tensor | None:
        """Difficulty weights, float64 [K+1, L]; None for an algorithm that has none."""
        return None if self.weights is None else self.weights[:, None]

    @property
    def clamped(self) -> int:
        """How many difficulty weights are at a bound of their clamp."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, fit for JSON."""
        return {"algorithm": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. Raises CheckpointError if another algorithm saved it."""
        if state.get("algorithm") != self.name:
            raise CheckpointError(
                f"algorithm: the saved state is of {state.get('algorithm')!r}, this run uses {self.name!r}; "
                "set algorithm.name to the saved one, or start from the weights alone"
            )

    def _mixed(self, bins_N: Tensor) -> Tensor:
        return (bins_N > 0) & (bins_N < self.rollouts_per_prompt)


class SampleAlgorithm(Algorithm):
    """An algorithm whose coefficient needs more than bin and length: a subclass overrides `coefficients`."""

    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """Raise AlgorithmError."""
        raise AlgorithmError(
            f"algorithm {self.name}: its coefficients depend on more than pass rate and length; call `coefficients` "
            "with Samples, or choose another algorithm where only these are known"
        )

    @abstractmethod
    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """See `Algorithm.coefficients`."""


def inverse(count: int) -> float:
    """Return 1/count; 0 if the count is 0, since what it divides is then 0 as well."""
    return 1.0 / count if count > 0 else 0.0


def constant(value: float, lengths_N: Tensor) -> Tensor:
    """Return the value for samples that have tokens, 0 for the others, float64 [N]."""
    return torch.where(lengths_N > 0, torch.tensor(value, dtype=torch.float64, device=lengths_N.device), 0.0)


def token_mean(lengths_N: Tensor, totals: StepTotals) -> Tensor:
    """Return 1 / trained tokens of the step for samples that have tokens, 0 for the others, float64 [N]: the loss is
    then the mean over these tokens."""
    return constant(inverse(totals.tokens), lengths_N)
