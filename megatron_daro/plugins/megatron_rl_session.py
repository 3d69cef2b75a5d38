"""What one process of Megatron-LM's RL script knows of a collection of rollouts and of the optimizer step that is open.

`megatron_rl` puts its methods around Megatron's functions. `score` makes advantages of whole
groups, `take_rows` keeps those of the batch's rows, `begin` counts tokens, `reweighted` gives what a loss multiplies
with, `end` learns. Knows the layout of Megatron's packed bins, and no module of it.

Shape letters: G groups, K rollouts per prompt, P log-probs of a packed bin, M sequences of a bin, R rows of the batch,
N rollouts of the collection.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.errors import AlgorithmError
from megatron_daro.plugins.core import DifficultyStep, SampleSums
from megatron_daro.plugins.host import Host
from megatron_daro.plugins.megatron_host import over_data, over_data_and_stages
from megatron_daro.plugins.options import PluginSection

logger = logging.getLogger(__name__)

HOST = Host("Megatron-LM", "megatron.core", ("0.19.0", "main at d98e8a64d"))
TESTED = " and ".join(HOST.tested)
"""The versions of Megatron-LM whose functions the tests run."""
_PROBE_TOLERANCE = 1e-3


@dataclass(slots=True, eq=False)
class PackedBin:
    """A packed bin that the script loaded.

    rows_M: int64 [M], rows of the batch. spans: first and last-but-one log-prob of each sequence. mask_P: bool [P].
    """

    index: int
    rows_M: Tensor
    spans: list[tuple[int, int]]
    mask_P: Tensor

    @property
    def lengths_M(self) -> Tensor:
        """Trained tokens of each sequence, int64 [M]."""
        counts = [int(self.mask_P[start:end].sum()) for start, end in self.spans]
        return torch.tensor(counts, dtype=torch.int64)

    def token_losses(self, losses_P: Tensor) -> SampleSums:
        """Return the sums of each sequence's token losses [P]."""
        rows = [losses_P[start:end] for start, end in self.spans]
        return SampleSums.of_list(rows, [self.mask_P[start:end].to(losses_P.device) for start, end in self.spans])


@dataclass(slots=True, eq=False)
class Session:
    """DARO in this process."""

    step: DifficultyStep
    options: PluginSection
    per_turn: bool = False
    """Whether Megatron wants an advantage for each turn, as its newest release does, and not for each rollout."""
    bins_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    advantages_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    scored: tuple[Tensor, Tensor] | None = None
    """Bins and advantages of the rollouts that were last scored, in order; float64 and int64."""
    current: PackedBin | None = None
    divisor: float = 0.0
    seen: dict[int, tuple[SampleSums, Tensor]] = field(default_factory=dict)
    """What the losses of the open step saw of each bin; a bin that Megatron runs again replaces its first run."""

    def score(self, rewards: Sequence[Sequence[float]], num_turns: Sequence[Sequence[int]]) -> list[float]:
        """In the place of calculate_grpo_advantages: advantages of the rollouts (or turns), group after group.

        Args:
            rewards: [G][K]. num_turns: [G][K], 0 for a rollout that failed: its group carries no signal.

        Raises:
            AlgorithmError: rewards are no verdicts, or groups are not of K.
        """
        size, groups = self.step.rollouts_per_prompt, len(rewards)
        wrong = next((len(group) for group in rewards if len(group) != size), None)
        if wrong is not None:
            raise AlgorithmError(f"groups: got one of {wrong} answers, allowed are --grpo-group-size = {size}")
        rewards_N = torch.tensor([float(r) for group in rewards for r in group], dtype=torch.float64)
        group_N = torch.arange(groups).repeat_interleave(size)
        whole_N = torch.tensor([all(t > 0 for t in turns) for turns in num_turns]).repeat_interleave(size)
        bins_N = torch.zeros(len(rewards_N), dtype=torch.int64)
        advantages_N = torch.zeros_like(rewards_N)
        if bool(whole_N.any()):
            _, numbers_N = torch.unique(group_N[whole_N], return_inverse=True)
            correct_N = self.options.verdicts(rewards_N[whole_N])
            bins_N[whole_N] = pass_rate_bins(correct_N, numbers_N, size)
            advantages_N[whole_N] = self.step.algorithm.advantages(rewards_N[whole_N], numbers_N)
        if not bool(whole_N.all()):
            logger.warning(
                "DARO: %d of %d groups have failed rollouts and carry no signal", int((~whole_N).sum()) // size, groups
            )
        self.scored = bins_N, advantages_N
        if not self.per_turn:
            return advantages_N.tolist()
        turns_N = torch.tensor([int(t) for turns in num_turns for t in turns])
        return advantages_N.repeat_interleave(turns_N).tolist()

    def take_rows(self, rollouts_of_rows: Sequence[int], num_rollouts: int) -> None:
        """Keep bins and advantages of the rows of a batch.

        Args:
            rollouts_of_rows: number of the rollout that each row is of. num_rollouts: of the whole collection.

        Raises:
            AlgorithmError: other rollouts were scored than make the rows.
        """
        if self.scored is None or len(self.scored[0]) != num_rollouts:
            got = "none" if self.scored is None else str(len(self.scored[0]))
            raise AlgorithmError(
                f"pass rates: {got} were scored for {num_rollouts} rollouts, allowed is one for each: "
                f"calculate_grpo_advantages was not called, or rollouts were filtered; tested with Megatron-LM {TESTED}"
            )
        bins_N, advantages_N = self.scored
        rows = torch.tensor(list(rollouts_of_rows), dtype=torch.int64)
        self.bins_R, self.advantages_R, self.scored = bins_N[rows], advantages_N[rows], None

    def begin(self, bins: Sequence[PackedBin]) -> None:
        """Count the tokens of an optimizer step, which will hold these bins on this rank."""
        rows = torch.cat([b.rows_M for b in bins]) if bins else torch.zeros(0, dtype=torch.int64)
        lengths = torch.cat([b.lengths_M for b in bins]) if bins else rows
        real, reduce = rows < len(self.bins_R), over_data(with_context=False)
        self.step.begin(self._bins(rows[real]), lengths[real], reduce)
        own = float(sum(max(int(b.mask_P.sum()), 1) for b in bins))
        self.divisor = float(reduce(torch.tensor([own], dtype=torch.float64)))
        self.seen = {}

    def _bins(self, rows: Tensor) -> Tensor:
        """Bins of rows; rows behind the last are padding, which trains nothing."""
        return torch.cat([self.bins_R, torch.zeros(1, dtype=torch.int64)])[rows.clamp(max=len(self.bins_R))]

    def _advantages(self, rows: Tensor) -> Tensor:
        return torch.cat([self.advantages_R, torch.zeros(1, dtype=torch.float64)])[rows.clamp(max=len(self.bins_R))]

    def reweighted(self, sent_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, factors w_k N / N_k (both float64 [M]) and bins of the current bin's sequences.

        Args:
            sent_M: the advantages that the script loaded, rounded to the model's precision.

        Raises:
            AlgorithmError: no bin was loaded, or its advantages are not those of its rows.
        """
        if self.current is None:
            raise AlgorithmError("packed data: none was loaded, allowed is a run with --rl-use-sequence-packing")
        advantages_M, bins_M = self._advantages(self.current.rows_M), self._bins(self.current.rows_M)
        sent_M = sent_M.detach().to("cpu", torch.float64).flatten()
        if sent_M.shape != advantages_M.shape or not torch.allclose(sent_M, advantages_M, rtol=0.01, atol=0.01):
            raise AlgorithmError(
                f"advantages: rows {self.current.rows_M.tolist()} came with {_rounded(sent_M)}, their pass rates give "
                f"{_rounded(advantages_M)}, allowed are equal ones: rows were reordered, or advantages changed after "
                f"they were scored; tested with Megatron-LM {TESTED}"
            )
        ones_M = torch.ones(len(bins_M), dtype=torch.float64)
        factors_M = self.step.algorithm.sample_coefficients(bins_M, ones_M, self.step.totals).double() * self.divisor
        return advantages_M, factors_M, bins_M

    def end(self, *, applied: bool) -> dict[str, float]:
        """Close the step; metrics under the names of docs/metrics.md."""
        for sums, bins_M in self.seen.values():
            self.step.weigh(sums, bins_M)
        return self.step.end(over_data_and_stages(with_context=False), applied=applied)


def _rounded(values_M: Tensor) -> list[float]:
    return [round(float(value), 3) for value in values_M]


def probe(plain: SampleSums, weighed: SampleSums, factors_M: Tensor) -> None:
    """On the first step: a loss with advantages times a factor must be the loss times that factor."""
    wanted_M, got_M = plain.losses_M.cpu() * factors_M, weighed.losses_M.cpu()
    size_M = plain.abs_losses_M.cpu() * factors_M + 1e-12
    if not bool(((wanted_M - got_M).abs() <= _PROBE_TOLERANCE * size_M).all()):
        raise AlgorithmError(
            f"loss of the first step: with reweighted advantages Megatron's own loss gives {got_M.tolist()}, wanted is "
            f"{wanted_M.tolist()}, allowed is a difference of {_PROBE_TOLERANCE:g}: this version of Megatron-LM scales "
            f"or clips otherwise; use {TESTED}"
        )
