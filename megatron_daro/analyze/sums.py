"""Sums per pass rate, from a stream of rollouts: exact for every view, and a few numbers per bin.

Place in the data flow: Rows -> groups of K -> [K+1] sums, per step and over all. A group is forgotten as soon as it has
K rollouts; those that never do are counted and left out, as in training.

Shape letters: K rollouts per prompt, [K+1] one entry per bin 0..K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from megatron_daro.analyze.rows import Row
from megatron_daro.errors import DataError

_PROBE = 20_000


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
    """Everything that the views read. steps: sums of each file. unverified: rollouts without a verdict. incomplete:
    groups that never had K rollouts; most_open: the largest number of groups that memory held at once."""

    total: BinSums
    steps: list[BinSums] = field(default_factory=list)
    rollouts: int = 0
    unverified: int = 0
    incomplete: int = 0
    most_open: int = 0


def infer_rollouts_per_prompt(rows: Iterable[Row]) -> int:
    """Return the usual size of a group among the first rollouts.

    Raises:
        DataError: groups have one rollout, or none repeats.
    """
    sizes = Counter(Counter(row.group for row in islice(rows, _PROBE)).values())
    if not sizes or max(sizes) < 2:
        raise DataError(
            "dump: no prompt has more than one rollout, allowed are groups of 2 or more; is the group column the right "
            "one? name it with --columns group=..."
        )
    sizes.pop(1, None)
    return max(sizes, key=lambda size: (sizes[size], size))


def read_dump(files: Iterable[Iterator[Row]], rollouts_per_prompt: int) -> Dump:
    """Sum up a dump, file by file; a group lies within one file."""
    dump = Dump(BinSums(rollouts_per_prompt))
    for rows in files:
        step = _read_step(rows, dump, rollouts_per_prompt)
        dump.steps.append(step)
        dump.total += step
    return dump


def _read_step(rows: Iterator[Row], dump: Dump, rollouts_per_prompt: int) -> BinSums:
    step, open_groups = BinSums(rollouts_per_prompt), dict[Hashable, list[float]]()
    for row in rows:
        dump.rollouts += 1
        if row.right is None:
            dump.unverified += 1
            continue
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
