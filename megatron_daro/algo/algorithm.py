"""What an algorithm is: an advantage, a choice of groups, a coefficient per rollout, and what it learns from a step.

The totals of the whole optimizer step (bins, trained tokens, rollouts; summed over all ranks before the forward pass)
-> one coefficient per rollout -> L = sum_i coefficient_i * sum_t l_t, on any split of them -> sums over the step ->
what the algorithm learns, the same on every rank.
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
        """Return the totals of some samples: int64 bins [N] and trained tokens [N]. Add those of all ranks."""
        lengths_N = torch.as_tensor(lengths_N)
        return cls.of_classes(bins_N, lengths_N, torch.zeros_like(lengths_N), rollouts_per_prompt, 1)

    @classmethod
    def of_classes(
        cls, bins_N: Tensor, lengths_N: Tensor, classes_N: Tensor, rollouts_per_prompt: int, num_classes: int
    ) -> StepTotals:
        """Return the same for samples whose classes, int64 [N] below num_classes, are known."""
        bins_N = torch.as_tensor(bins_N)
        tokens = [
            token_counts(bins_N, torch.where(classes_N == c, lengths_N, 0), rollouts_per_prompt)
            for c in range(num_classes)
        ]
        ones_N = torch.ones_like(bins_N, dtype=torch.int64)
        return cls(torch.stack(tokens, dim=1), bin_sums(ones_N, bins_N, rollouts_per_prompt))

    @classmethod
    def from_vector(cls, vector: Tensor, num_classes: int = 1) -> StepTotals:
        """Return the inverse of `vector`, after it was summed over ranks."""
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
        """All trained tokens; the N of formulas."""
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
    """Some samples of a step, as an algorithm sees them; none on a rank that a short batch leaves without work.

    bins_N: int64 [N]. lengths_N: [N], trained response tokens. advantages_N: floating [N]. group_lengths_NK: int64
    [N, K], trained tokens of every rollout of the sample's group, the sample's own among them; None unless the
    algorithm `needs_group_lengths`. environments_N: int64 [N], the number of each sample's environment; None: one.
    """

    bins_N: Tensor
    lengths_N: Tensor
    advantages_N: Tensor
    group_lengths_NK: Tensor | None = None
    environments_N: Tensor | None = None


CELL_SUMS = ("loss_sums", "abs_loss_sums", "advantage_sums")
"""Sums over the tokens of each bin and class of samples, without coefficients: of token losses, their absolute values,
and |A|."""


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """What a whole step says, over all ranks: what an algorithm learns from.

    sums: by name float64 [K+1, L], those of `CELL_SUMS`; a loop of your own may add what its algorithm reads.
    entropy: mean over the trained tokens, nats.
    """

    totals: StepTotals
    sums: Mapping[str, Tensor]
    entropy: float

    @classmethod
    def of_bins(cls, totals: StepTotals, loss_sums: Tensor, abs_loss_sums: Tensor) -> StepStats:
        """Return those of a host that knows sums [K+1] of token losses, and nothing else."""
        sums = {"loss_sums": loss_sums[:, None], "abs_loss_sums": abs_loss_sums[:, None]}
        return cls(totals, sums, entropy=0.0)

    def per_bin(self, name: str) -> Tensor:
        """float64 [K+1], a sum over all classes."""
        return self.sums[name].sum(dim=1)


def number(name: str, value: float, low: float, high: float = float("inf"), *, closed: bool = True) -> float:
    """Return the value of an option. Raises AlgorithmError: it is not in [low, high), or with `closed` False not in
    (low, high)."""
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
    """Base class of all: an advantage, a filter, and a coefficient per rollout.

    A subclass says its name, and overrides what differs: `advantage_std` or `advantages`, `dynamic_filter` or
    `own_filter`, `bin_coefficients` (or `coefficients`, where bin and length are not enough), and `learn` with the
    state where it learns; `token_columns` and `token_advantages`, where tokens of one rollout have different
    advantages. Keyword arguments of its own constructor are its options.
    """

    name: ClassVar[str]
    advantage_std: ClassVar[AdvantageStd] = "population"
    dynamic_filter: ClassVar[bool] = False
    std_allowed: ClassVar[tuple[AdvantageStd, ...]] = get_args(AdvantageStd)
    """Divisors that may take the place of `advantage_std`."""
    std_defines: ClassVar[bool] = False
    """Whether another divisor makes it another algorithm than the published one."""
    needs_group_lengths: bool = False
    """Whether `Samples.group_lengths_NK` must be there."""
    weighs_by_advantage: ClassVar[bool] = False
    """Whether `coefficients` reads `Samples.advantages_N`, which must be what all tokens of a sample are trained by."""
    token_columns: ClassVar[tuple[str, ...] | None] = None
    """Columns that `token_advantages` reads, of `token_columns.COLUMN_NAMES`; the ranks compute those that take a pass
    before the first optimizer step of a batch. None: one advantage for all tokens of a rollout."""
    resets_optimizer: bool = False
    """Whether the optimizer's moments are zero again when a batch of rollouts begins."""

    @property
    def classes(self) -> tuple[str, tuple[str, ...]]:
        """What samples are classed by beside their pass rate, and what the classes are called: totals and step_stats
        are per class then."""
        return "all", ("all",)

    def classes_of(self, samples: Samples) -> Tensor:
        """int64 [N], the number of each sample's class."""
        return torch.zeros_like(samples.bins_N)

    @property
    def own_objective(self) -> Mapping[str, Any]:
        """Fields of `objective.ObjectiveSettings` that belong to the method: they take the place of what a
        configuration says."""
        return {}

    def __init__(
        self,
        *,
        rollouts_per_prompt: int,
        max_response_tokens: int,
        std: AdvantageStd | Literal["auto"] = "auto",
        group_filter: GroupFilter = "auto",
    ) -> None:
        """Take what every algorithm is told.

        Args:
            rollouts_per_prompt: K, 2 or more.
            max_response_tokens: the longest response allowed, in tokens (dr_grpo's constant denominator).
            std: what the advantage is divided by; auto: the algorithm's own choice.
            group_filter: which groups are trained. auto: the algorithm's own choice; none: all; pass_rate: those with
                0 < mu < 1.

        Raises:
            AlgorithmError: an option is out of range, or the algorithm has no such divisor.
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
        """Return the advantages of the whole step. Called in the driver, on the object there, which neither learns nor
        is in checkpoints; with `kl.place: reward` once more on every rank, whose result counts.

        Args:
            rewards_N: [N], finite. group_ids_N: int64 [N], in any order.

        Returns:
            Floating [N].
        """
        return group_advantages(rewards_N, group_ids_N, std=self.std)

    def token_advantages(self, tokens: TokenColumns) -> Tensor:
        """Return an advantage for each response token, where `token_columns` is set. Called on every rank at every
        optimizer step, before its forward pass.

        Args:
            tokens: this data-parallel rank's samples, whole. `tokens.advantages_N` is what `advantages` gave.

        Returns:
            Floating [R], finite where `tokens.mask_R` is set; elsewhere it is not read.
        """
        raise NotImplementedError(f"{type(self).__name__} has one advantage for all tokens of a rollout")

    def value_targets(self, tokens: TokenColumns) -> Tensor:
        """Return what the critic shall say before each response token, where `token_columns` has "values". Called on
        every rank at every optimizer step, after `token_advantages`.

        Args:
            tokens: as there.

        Returns:
            Floating [R], finite where `tokens.mask_R` is set; elsewhere it is not read.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no critic")

    def keep(self, bins_N: Tensor) -> Tensor:
        """bool [N]: whose groups are trained, after `group_filter`. The others are replaced by further prompts."""
        bins_N = torch.as_tensor(bins_N)
        if self.group_filter == "none":
            return torch.ones_like(bins_N, dtype=torch.bool)
        return self._mixed(bins_N) if self.group_filter == "pass_rate" else self.own_filter(bins_N)

    def own_filter(self, bins_N: Tensor) -> Tensor:
        """bool [N]: what `group_filter` auto means for this algorithm."""
        return self._mixed(bins_N) if self.dynamic_filter else torch.ones_like(bins_N, dtype=torch.bool)

    @property
    def kept_bins(self) -> frozenset[int]:
        """The bins 0..K whose groups are trained."""
        return frozenset(self.keep(torch.arange(self.rollouts_per_prompt + 1)).nonzero().flatten().tolist())

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is allowed, but probably not meant."""
        if not self.std_defines or self.std == self.advantage_std:
            return ()
        return (f"algorithm.std: got {self.std!r}; auto is what {self.name} is: leave it unset for the published one",)

    @abstractmethod
    def bin_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: StepTotals) -> Tensor:
        """Return what the sum of a rollout's token losses is multiplied by, where bin and length decide it: as nearly
        every algorithm has it, and all that most other frameworks know of a sample (plugins/ calls it).

        Args:
            bins_N: int64 [N], bins of some samples of the step.
            lengths_N: [N], their trained response tokens.
            totals: of the whole optimizer step, over all ranks and micro-batches.

        Returns:
            float64 [N] on the device of `bins_N`, finite, without gradient; 0 for samples without tokens.
        """

    def coefficients(self, samples: Samples, totals: StepTotals) -> Tensor:
        """Return the same for samples of which all is known: what the trainer's loss calls. To be overridden where a
        coefficient needs an advantage, a group's lengths or an environment (`SampleAlgorithm`: where it always does).

        Args:
            samples: some of the step. totals: of the whole step.

        Returns:
            float64 [N], as `bin_coefficients`.
        """
        return self.bin_coefficients(samples.bins_N, samples.lengths_N, totals)

    def regularizer_coefficient(self, totals: StepTotals) -> float:
        """Return what KL and entropy terms of a token are multiplied by: 1 / trained tokens of the step, for a mean
        over them."""
        return inverse(totals.tokens)

    def extra_loss(self, totals: StepTotals) -> float:
        """Return the part of the loss without a gradient into the policy (daro: -sum ln w), for reporting."""
        return 0.0

    def begin_batch(self) -> None:  # noqa: B027
        """Take note that a batch of rollouts begins, before its first optimizer step; called on every rank."""

    def learn(self, step_stats: StepStats) -> None:  # noqa: B027
        """Learn from a step that is applied; called once, on every rank with the same numbers."""

    @property
    def weights(self) -> Tensor | None:
        """Difficulty weights float64 [K+1], the mean over classes; None for an algorithm without."""
        return None

    @property
    def cell_weights(self) -> Tensor | None:
        """Difficulty weights float64 [K+1, L], or None for an algorithm without."""
        return None if self.weights is None else self.weights[:, None]

    @property
    def clamped(self) -> int:
        """How many difficulty weights sit at an end of their clamp."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
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
    """1/count, and 0 for a step without any: its sums are 0 as well."""
    return 1.0 / count if count > 0 else 0.0


def constant(value: float, lengths_N: Tensor) -> Tensor:
    """float64 [N]: the value where a sample has tokens, else 0."""
    return torch.where(lengths_N > 0, torch.tensor(value, dtype=torch.float64, device=lengths_N.device), 0.0)


def token_mean(lengths_N: Tensor, totals: StepTotals) -> Tensor:
    """float64 [N], for samples with tokens: 1 / trained tokens of the step, whose mean the loss then is."""
    return constant(inverse(totals.tokens), lengths_N)
