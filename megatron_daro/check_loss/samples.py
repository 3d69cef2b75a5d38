"""The numbers of a case: tokens, old log-probs, advantages, masks; the same for every layout that shares its samples.

Place in the data flow: Case -> columns of each sample -> what one rank holds of a micro-batch (all of it, or its two
chunks under context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.check_loss.records import Case

VOCAB = 12


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """One sample: inputs_R are the tokens before each response token, labels_R those tokens; old, mask per token."""

    inputs_R: Tensor
    labels_R: Tensor
    old_R: Tensor
    mask_R: Tensor
    prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """All samples of a case. lengths_N: trained tokens. K: rollouts per prompt."""

    columns: list[SampleColumns]
    rewards_N: Tensor
    advantages_N: Tensor
    bins_N: Tensor
    lengths_N: Tensor


def step_samples(case: Case) -> StepSamples:
    """Make the samples of a case, from its seed."""
    columns = []
    for i, (prompt, response) in enumerate(zip(case.prompts, case.responses, strict=True)):
        generator = torch.Generator().manual_seed(1000 * case.seed + i)
        tokens = torch.randint(0, VOCAB, (prompt + response,), generator=generator)
        old = -2.4 + 0.4 * torch.randn(response, generator=generator, dtype=torch.float64)
        mask = torch.ones(response, dtype=torch.bool)
        mask[[position for sample, position in case.holes if sample == i and position < response]] = False
        if i in case.masked:
            mask[:] = False
        columns.append(SampleColumns(tokens[prompt - 1 : -1], tokens[prompt:], old, mask, prompt))
    count = len(columns)
    group_N = torch.arange(count) // case.group
    right_N = torch.tensor([(i % case.group) <= (i // case.group) % case.group for i in range(count)])
    if case.group > 1:
        right_N[case.group - 1 :: case.group] = False  # no group is all right: each has a signal
    rewards_N = right_N.to(torch.float64) * (2.0 if case.changed == "rewards" else 1.0)
    advantages_N = group_advantages(rewards_N, group_N) + 0.1 * torch.arange(count, dtype=torch.float64)
    if case.changed == "advantages":
        advantages_N = 2 * advantages_N
    if case.changed == "old_logprobs":
        columns = [SampleColumns(c.inputs_R, c.labels_R, c.old_R - 0.05, c.mask_R, c.prompt) for c in columns]
    whole = count // case.group * case.group
    bins_N = torch.zeros(count, dtype=torch.int64)
    bins_N[:whole] = pass_rate_bins(right_N[:whole], group_N[:whole], case.group)
    lengths_N = torch.tensor([int(c.mask_R.sum()) for c in columns], dtype=torch.int64)
    return StepSamples(columns, rewards_N, advantages_N, bins_N, lengths_N)


def local_positions(column: SampleColumns, rank: int, size: int) -> Tensor:
    """Return the response positions that a context-parallel rank holds: Megatron's zigzag, chunks r and 2 size - 1 - r.

    The chunks are of the whole sample, prompt included, and a position belongs to the token before it, whose output
    predicts it.
    """
    response = len(column.labels_R)
    if size == 1:
        return torch.arange(response)
    total = column.prompt + response
    chunk = -(-total // (2 * size))
    of_input = torch.arange(column.prompt - 1, total - 1) // chunk
    return ((of_input == rank) | (of_input == 2 * size - 1 - rank)).nonzero().flatten()
