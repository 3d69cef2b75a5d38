"""What a dump's sums per pass rate say: losses, DARO's weights, shares of the gradient, tokens that taught nothing.

Rollouts are streamed; a group is forgotten once its K rollouts have been seen, and groups that stay incomplete are
counted and left out, as in training. On-policy (ratio 1) a bin's loss follows from its lengths alone, so the numbers
are those of a first update on these rollouts; nothing is estimated.

The mass of a bin is the sum over its tokens of coefficient * |advantage|: the size of its gradient if all tokens'
log-probability gradients were of one size. Advantage and coefficient are those of each algorithm with its default
options at its start; DARO's weights are at rest on the dump.

Shape letters: K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import predicted_bin_loss
from megatron_daro.algo.weighting import ALGORITHMS, Algorithm, BatchTotals, Daro, Samples, make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection, DaroSection
from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.behaviour import Reflection
from megatron_daro.workshop.analyze.rows import Row
from megatron_daro.workshop.report.conversations import TurnSums, add_turns

_PROBE = 20_000
_MOST_RUNS = 0.9
"""The part of all runs of one prompt's rollouts that have one length, where the file was written prompt by prompt."""


@dataclass(slots=True, eq=False)
class BinSums:
    """groups, right_tokens, wrong_tokens: float64 [K+1]: groups per bin, and lengths of right and wrong answers."""

    rollouts_per_prompt: int
    groups: Tensor = field(init=False)
    right_tokens: Tensor = field(init=False)
    wrong_tokens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.rollouts_per_prompt + 1
        self.groups, self.right_tokens, self.wrong_tokens = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    @property
    def tokens(self) -> Tensor:
        """float64 [K+1], all tokens of each bin."""
        return self.right_tokens + self.wrong_tokens

    def add(self, bin_: int, right: float, wrong: float) -> None:
        """Count one whole group."""
        self.groups[bin_] += 1
        self.right_tokens[bin_] += right
        self.wrong_tokens[bin_] += wrong

    def __iadd__(self, other: BinSums) -> BinSums:
        self.groups += other.groups
        self.right_tokens += other.right_tokens
        self.wrong_tokens += other.wrong_tokens
        return self


@dataclass(slots=True, eq=False)
class Dump:
    """Everything that the views read. steps: sums of each file. unverified: rollouts without a verdict; unreadable:
    records without a group or a length. turns: sums by turn of conversations. reflection: of each file, where texts are
    read. incomplete: groups that never had K rollouts; most_open: the largest number of groups that memory held at
    once."""

    total: BinSums
    steps: list[BinSums] = field(default_factory=list)
    rollouts: int = 0
    unverified: int = 0
    unreadable: int = 0
    incomplete: int = 0
    most_open: int = 0
    turns: list[TurnSums] = field(default_factory=list)
    reflection: list[Reflection] = field(default_factory=list)


def infer_rollouts_per_prompt(rows: Iterable[Row | None]) -> int:
    """Return the usual size of a group among the first rollouts.

    Raises:
        DataError: groups have one rollout, or none repeats; or prompts come up again, so that there are two sizes.
    """
    groups = [row.group for row in islice(rows, _PROBE) if row]
    sizes = Counter(Counter(groups).values())
    if not sizes or max(sizes) < 2:
        raise DataError(
            "dump: no prompt has more than one rollout, allowed are groups of 2 or more; is the group column the right "
            "one? name it with --columns group=..."
        )
    sizes.pop(1, None)
    size = max(sizes, key=lambda size: (sizes[size], size))
    runs = Counter(len(list(run)) for _, run in groupby(groups))
    run, number = runs.most_common(1)[0]
    if 1 < run < size and size % run == 0 and number >= _MOST_RUNS * runs.total():
        raise DataError(
            f"dump: got prompts with {size} rollouts each, which stand {run} and {run} together: the file has {size} "
            f"per prompt in parts, or the same prompts {size // run} times with {run} each; say which with "
            f"--rollouts-per-prompt {size} or {run}"
        )
    return size


def read_dump(files: Iterable[Iterator[Row | None]], rollouts_per_prompt: int) -> Dump:
    """Sum up a dump, file by file; a group lies within one file."""
    dump = Dump(BinSums(rollouts_per_prompt))
    for rows in files:
        step = _read_step(rows, dump, rollouts_per_prompt)
        dump.steps.append(step)
        dump.total += step
    return dump


def _read_step(rows: Iterator[Row | None], dump: Dump, rollouts_per_prompt: int) -> BinSums:
    step, open_groups = BinSums(rollouts_per_prompt), dict[Hashable, list[float]]()
    reflection = Reflection()
    dump.reflection.append(reflection)
    for row in rows:
        if row is None:
            dump.unreadable += 1
            continue
        dump.rollouts += 1
        add_turns(dump.turns, {"turns": row.turns, "reports": row.reports})
        if row.right is None:
            dump.unverified += 1
            continue
        if row.reflects is not None:
            reflection.add(row.reflects, row.right)
        # [rollouts, right ones, tokens of right ones, tokens of wrong ones]
        group = open_groups.setdefault(row.group, [0, 0, 0.0, 0.0])
        group[0] += 1
        group[1] += row.right
        group[2 if row.right else 3] += row.length
        dump.most_open = max(dump.most_open, len(open_groups))
        if group[0] == rollouts_per_prompt:
            del open_groups[row.group]
            step.add(int(group[1]), group[2], group[3])
    dump.incomplete += len(open_groups)
    return step


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Per bin, float64 [K+1]. right_length, wrong_length: means, NaN without answers. loss: L_k on-policy.
    weight_learnt: DARO's after the dump's steps; weight_rest: where they would settle on these rollouts. shares: rule
    -> part of the mass."""

    pass_rate: Tensor
    groups: Tensor
    tokens: Tensor
    right_length: Tensor
    wrong_length: Tensor
    loss: Tensor
    weight_learnt: Tensor
    weight_rest: Tensor
    shares: dict[str, Tensor]
    wasted_tokens: float


def view_of(dump: Dump, options: DaroSection) -> View:
    """Return all views of a dump under DARO with these options."""
    sums, k = dump.total, dump.total.rollouts_per_prompt
    mu = torch.arange(k + 1, dtype=torch.float64) / k
    right_count, wrong_count = sums.groups * k * mu, sums.groups * k * (1 - mu)
    right, wrong = sums.right_tokens / right_count, sums.wrong_tokens / wrong_count
    rest = _at_rest(sums, options)
    return View(
        pass_rate=mu,
        groups=sums.groups,
        tokens=sums.tokens,
        right_length=right,
        wrong_length=wrong,
        loss=predicted_bin_loss(mu, right, wrong),
        weight_learnt=_learnt(dump, options),
        weight_rest=rest.weights,
        shares=_shares(sums, rest),
        wasted_tokens=float(sums.tokens[0] + sums.tokens[-1]),
    )


def token_loss_sums(sums: BinSums) -> tuple[Tensor, Tensor]:
    """Return S_k and the sums of |token loss|, float64 [K+1], of an on-policy step with group-normalised advantages."""
    mu = torch.arange(len(sums.groups), dtype=torch.float64) / sums.rollouts_per_prompt
    std = (mu * (1 - mu)).clamp(min=0).sqrt()
    safe = torch.where(std > 0, std, 1.0)
    right, wrong = (1 - mu) / safe * sums.right_tokens, mu / safe * sums.wrong_tokens
    return torch.where(std > 0, wrong - right, 0.0), torch.where(std > 0, wrong + right, 0.0)


def _learnt(dump: Dump, options: DaroSection) -> Tensor:
    """Return DARO's weights after one update for each step of the dump."""
    algorithm = _daro(dump.total, options)
    for step in dump.steps:
        algorithm.difficulty.update(**_measures(step))
    return algorithm.weights


def _measures(sums: BinSums) -> dict[str, Tensor]:
    """Return what every magnitude reads, float64 [K+1]: at ratio 1 a token's loss is -A."""
    loss_sums, abs_sums = token_loss_sums(sums)
    return {
        "loss_sums": loss_sums,
        "token_counts": sums.tokens,
        "abs_loss_sums": abs_sums,
        "advantage_sums": abs_sums,
    }


def _at_rest(sums: BinSums, options: DaroSection) -> Daro:
    """Return DARO with the weights where updates with these sums would leave them; 1 where a bin has no tokens."""
    algorithm = _daro(sums, options)
    algorithm.difficulty.settle(**_measures(sums))
    return algorithm


def _daro(sums: BinSums, options: DaroSection) -> Daro:
    section = AlgorithmSection(name="daro", daro=options)
    arguments = section.arguments(rollouts_per_prompt=sums.rollouts_per_prompt, max_response_tokens=1)
    return Daro(**{name: value for name, value in arguments.items() if name != "name"})


def _shares(sums: BinSums, daro: Daro) -> dict[str, Tensor]:
    """Return the shares by name; algorithms of equal shares stand in one column."""
    columns: list[tuple[list[str], Tensor]] = []
    for name in ALGORITHMS:
        options = {"rollouts_per_prompt": sums.rollouts_per_prompt, "max_response_tokens": 1}
        mass = _masses(sums, daro if name == "daro" else make_algorithm(name, **options))
        share = mass / mass.sum().clamp(min=1e-300)
        same = next((names for names, found in columns if torch.allclose(found, share, atol=1e-5)), None)
        if same is None:
            columns.append(([name], share))
        else:
            same.append(name)
    return {", ".join(names): share for names, share in columns}


def _masses(sums: BinSums, algorithm: Algorithm) -> Tensor:
    """float64 [K+1], from one right and one wrong answer of each bin, of its mean lengths."""
    k = sums.rollouts_per_prompt
    inner_B = torch.arange(1, k)
    verdicts_BK = (torch.arange(k) < inner_B[:, None]).to(torch.float64)
    ids_BK = inner_B[:, None].expand(k - 1, k)
    advantages_BK = algorithm.advantages(verdicts_BK.reshape(-1), ids_BK.reshape(-1)).reshape(k - 1, k)
    tokens_B2 = torch.stack([sums.right_tokens, sums.wrong_tokens], dim=1)[1:-1]
    counts_B2 = torch.stack([inner_B, k - inner_B], dim=1) * sums.groups[1:-1, None]
    lengths_B2 = tokens_B2 / counts_B2.clamp(min=1)
    samples = Samples(
        bins_N=inner_B.repeat_interleave(2),
        lengths_N=lengths_B2.reshape(-1),
        advantages_N=advantages_BK[:, [0, -1]].reshape(-1),
        group_lengths_NK=torch.where(verdicts_BK > 0, lengths_B2[:, :1], lengths_B2[:, 1:]).repeat_interleave(2, dim=0),
    )
    totals = BatchTotals(sums.tokens.round().to(torch.int64)[:, None], (sums.groups * k).round().to(torch.int64))
    mass_B2 = algorithm.coefficients(samples, totals) * samples.advantages_N.abs() * tokens_B2.reshape(-1)
    return torch.nn.functional.pad(mass_B2.reshape(k - 1, 2).sum(dim=1), (1, 1))
