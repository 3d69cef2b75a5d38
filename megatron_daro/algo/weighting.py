"""One small class per algorithm: how the token losses of a rollout enter the policy loss.

Place in the data flow: the totals of the whole optimizer step (bins, trained tokens, rollouts; summed over all ranks
before the forward pass) -> one coefficient per rollout -> L = sum_i coefficient_i * sum_t l_t, on any split of them.
Refuses to know a micro-batch: a denominator taken from part of a step makes the loss depend on how the step was split.

Shape letters: N samples (of any part of the step), K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from megatron_daro.algo.advantages import AdvantageStd, group_advantages, leave_one_out_advantages
from megatron_daro.algo.difficulty import DifficultyWeights, token_counts
from megatron_daro.errors import AlgorithmError, CheckpointError

GroupFilter = Literal["auto", "none", "pass_rate"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchTotals:
    """What every rank must know about the whole optimizer step before its first forward pass.

    tokens_per_bin: int64 [K+1], trained tokens. num_rollouts: all rollouts of the step, those without tokens included.
    """

    tokens_per_bin: Tensor
    num_rollouts: int

    @classmethod
    def of(cls, bins_N: Tensor, lengths_N: Tensor, rollouts_per_prompt: int) -> BatchTotals:
        """Return the totals of some samples: int64 bins [N] and trained tokens [N]. Add those of all ranks."""
        return cls(token_counts(bins_N, lengths_N, rollouts_per_prompt), len(torch.as_tensor(bins_N)))

    @classmethod
    def from_vector(cls, vector: Tensor) -> BatchTotals:
        """Return the inverse of `vector`, after it was summed over ranks."""
        return cls(vector[:-1].to(torch.int64), int(vector[-1]))

    def vector(self) -> Tensor:
        """int64 [K+2]: tokens per bin, then the rollouts; a plain sum over ranks adds totals."""
        return torch.cat([self.tokens_per_bin, self.tokens_per_bin.new_tensor([self.num_rollouts])])

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(self.tokens_per_bin + other.tokens_per_bin, self.num_rollouts + other.num_rollouts)

    @property
    def tokens(self) -> int:
        """N, all trained tokens."""
        return int(self.tokens_per_bin.sum())

    @property
    def kept_tokens(self) -> int:
        """Trained tokens of groups with 0 < mu < 1."""
        return int(self.tokens_per_bin[1:-1].sum())


class Algorithm(ABC):
    """One row of the family table: an advantage, a filter, and a coefficient per rollout.

    A subclass says its name, and overrides what differs: `advantage_std` or `advantages`, `dynamic_filter` or
    `own_filter`, `sample_coefficients`, and `update` with the state where it learns. Keyword arguments of its own
    constructor are its options.
    """

    name: ClassVar[str]
    advantage_std: ClassVar[AdvantageStd] = "population"
    dynamic_filter: ClassVar[bool] = False
    std_allowed: ClassVar[tuple[AdvantageStd, ...]] = get_args(AdvantageStd)
    """Divisors that may take the place of `advantage_std`."""
    std_defines: ClassVar[bool] = False
    """Whether another divisor makes it another algorithm than the published one."""

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
        self.rollouts_per_prompt = rollouts_per_prompt
        self.max_response_tokens = max_response_tokens
        self.std: AdvantageStd = self.advantage_std if std == "auto" else std
        self.group_filter: GroupFilter = group_filter

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """Return the advantages of the whole step.

        Args:
            rewards_N: [N], finite. group_ids_N: int64 [N].

        Returns:
            Floating [N].
        """
        return group_advantages(rewards_N, group_ids_N, std=self.std)

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
    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """Return what the sum of a rollout's token losses is multiplied by.

        Args:
            bins_N: int64 [N], bins of some samples of the step.
            lengths_N: [N], their trained response tokens.
            totals: of the whole optimizer step, over all ranks and micro-batches.

        Returns:
            float64 [N] on the device of `bins_N`, finite, without gradient; 0 for samples without tokens.
        """

    def regularizer_coefficient(self, totals: BatchTotals) -> float:
        """Return what KL and entropy terms of a token are multiplied by: 1/N, a mean over all trained tokens of the
        step."""
        return _inverse(totals.tokens)

    def extra_loss(self, totals: BatchTotals) -> float:
        """Return the part of the loss without a gradient into the policy (daro: -sum ln w), for reporting."""
        return 0.0

    def update(self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None) -> None:  # noqa: B027
        """Learn from the step's loss sums per bin [K+1]; only daro does."""

    @property
    def weights(self) -> Tensor | None:
        """Difficulty weights float64 [K+1], or None for an algorithm without."""
        return None

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


class Grpo(Algorithm):
    """Token mean over all trained tokens: 1/N."""

    name = "grpo"

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        return _constant(_inverse(totals.tokens), lengths_N)


class GrpoSequence(Algorithm):
    """The original GRPO: the mean over rollouts of the mean over their tokens, 1/(|o_i| * rollouts)."""

    name = "grpo_sequence"

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        return _constant(_inverse(totals.num_rollouts), lengths_N) / lengths_N.to(torch.float64).clamp(min=1)


class Dapo(Algorithm):
    """Token mean over the groups with 0 < mu < 1; the others are filtered and replaced."""

    name = "dapo"
    dynamic_filter = True

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        return torch.where(self._mixed(bins_N), _constant(_inverse(totals.kept_tokens), lengths_N), 0.0)


class LitePpo(Grpo):
    """Token mean with group mean and batch standard deviation: grpo with w_k proportional to sqrt(mu(1-mu))."""

    name = "lite_ppo"
    advantage_std = "batch"
    std_defines = True


class DrGrpo(Algorithm):
    """No standard deviation and a constant denominator: 1/(rollouts * max_response_tokens)."""

    name = "dr_grpo"
    advantage_std = "none"
    std_defines = True

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        return _constant(_inverse(totals.num_rollouts * self.max_response_tokens), lengths_N)


class Rloo(Grpo):
    """Token mean with the leave-one-out advantage."""

    name = "rloo"
    advantage_std = "none"
    std_allowed = ("none",)

    def advantages(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """See `leave_one_out_advantages`."""
        return leave_one_out_advantages(rewards_N, group_ids_N)


class Daro(Algorithm):
    """w_k / N_k with learnt difficulty weights; groups with mu of 0 or 1 are filtered."""

    name = "daro"
    dynamic_filter = True

    def __init__(
        self,
        *,
        rollouts_per_prompt: int,
        max_response_tokens: int,
        std: AdvantageStd | Literal["auto"] = "auto",
        group_filter: GroupFilter = "auto",
        **difficulty: Any,
    ) -> None:
        """Take the options of `Algorithm` and, as keywords, those of `DifficultyWeights`."""
        super().__init__(
            rollouts_per_prompt=rollouts_per_prompt,
            max_response_tokens=max_response_tokens,
            std=std,
            group_filter=group_filter,
        )
        self.difficulty = DifficultyWeights(rollouts_per_prompt, **difficulty)

    def sample_coefficients(self, bins_N: Tensor, lengths_N: Tensor, totals: BatchTotals) -> Tensor:
        """See `Algorithm.sample_coefficients`."""
        coefficients = self.difficulty.coefficients(totals.tokens_per_bin).to(bins_N.device)
        return torch.where(lengths_N > 0, coefficients[bins_N], 0.0)

    def extra_loss(self, totals: BatchTotals) -> float:
        """See `Algorithm.extra_loss`."""
        return self.difficulty.barrier(totals.tokens_per_bin)

    def update(self, loss_sums: Tensor, token_counts: Tensor, abs_loss_sums: Tensor | None = None) -> None:
        """See `DifficultyWeights.update`."""
        self.difficulty.update(loss_sums, token_counts, abs_loss_sums)

    @property
    def weights(self) -> Tensor:
        """float64 [K+1]."""
        return self.difficulty.weights

    @property
    def clamped(self) -> int:
        """See `DifficultyWeights.clamped`."""
        return self.difficulty.clamped

    def state_dict(self) -> dict[str, Any]:
        """Return the weights' state beside the name."""
        return {**super().state_dict(), "difficulty": self.difficulty.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for another algorithm, another K, or a torn state."""
        super().load_state_dict(state)
        self.difficulty.load_state_dict(state.get("difficulty") or {})


ALGORITHMS: Mapping[str, type[Algorithm]] = {
    cls.name: cls for cls in (Grpo, GrpoSequence, Dapo, LitePpo, DrGrpo, Rloo, Daro)
}


def make_algorithm(name: str, **options: Any) -> Algorithm:
    """Return the algorithm of this name: the same call in the driver and on every rank.

    Args:
        name: one of `ALGORITHMS`, or `module:Class`, a subclass of `Algorithm` that Python can import.
        options: arguments of its constructor.

    Raises:
        AlgorithmError: there is no such algorithm, or an option is unknown or out of range.
    """
    cls = ALGORITHMS.get(name) or _imported(name)
    try:
        inspect.signature(cls).bind(**options)
        return cls(**options)
    except TypeError as error:
        raise AlgorithmError(f"options of algorithm {name}: {error}; allowed are those of {cls.__name__}") from None


def _imported(name: str) -> type[Algorithm]:
    allowed = f"allowed are {', '.join(ALGORITHMS)}, or module:Class of a subclass of Algorithm"
    module, _, attribute = name.partition(":")
    if not attribute:
        raise AlgorithmError(f"name: got {name!r}, {allowed}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AlgorithmError(
            f"name: got {name!r}, which cannot be imported ({error}), {allowed}; the folder of the module must be in "
            "PYTHONPATH, on every machine of the run"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Algorithm) and not inspect.isabstract(found)):
        raise AlgorithmError(f"name: got {name!r}, which is no subclass of Algorithm with all its methods, {allowed}")
    if not isinstance(getattr(found, "name", None), str):
        raise AlgorithmError(f"name: {name!r} has no attribute `name`, which stands in its checkpoints; give it one")
    return found


def _inverse(count: int) -> float:
    """1/count, and 0 for a step without any: its sums are 0 as well."""
    return 1.0 / count if count > 0 else 0.0


def _constant(value: float, lengths_N: Tensor) -> Tensor:
    """float64 [N]: the value where a sample has tokens, else 0."""
    return torch.where(lengths_N > 0, torch.tensor(value, dtype=torch.float64, device=lengths_N.device), 0.0)
