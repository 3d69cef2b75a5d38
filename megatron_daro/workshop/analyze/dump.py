"""The sums of a dump per pass rate, which all views read.

Rollouts are streamed; a group is forgotten once its K rollouts have been seen, and groups that stay incomplete are
counted and left out, as in training. A group lies within one file.

Shape letters: K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

import torch
from torch import Tensor

from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.behaviour import Reflection
from megatron_daro.workshop.analyze.rows import Row
from megatron_daro.workshop.report.conversations import TurnSums, add_turns

_PROBE = 20_000
_MOST_RUNS = 0.9
"""A file counts as written prompt by prompt if this share of its runs (consecutive rollouts of one prompt) have the
same length."""


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
    """Everything that the views read. steps: sums of each file. unverified: rollouts without a verdict. unreadable:
    records without a group or a length. incomplete: groups that never had K rollouts. turns: sums by turn of
    conversations. reflection: counts of each file, all 0 if texts are not read."""

    total: BinSums
    steps: list[BinSums] = field(default_factory=list)
    rollouts: int = 0
    unverified: int = 0
    unreadable: int = 0
    incomplete: int = 0
    turns: list[TurnSums] = field(default_factory=list)
    reflection: list[Reflection] = field(default_factory=list)


def infer_rollouts_per_prompt(rows: Iterable[Row | None]) -> int:
    """Return the usual size of a group among the first rollouts.

    Raises:
        DataError: no group has two rollouts; or two sizes are possible, since the rollouts of a group lie in several
            equal parts of the file.
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
        if group[0] == rollouts_per_prompt:
            del open_groups[row.group]
            step.add(int(group[1]), group[2], group[3])
    dump.incomplete += len(open_groups)
    return step
