"""The numbers of a case: tokens, log-probs, advantages and masks, the same for every layout that shares its samples.

Case -> columns of each sample -> what one rank holds of a sample (all of it, or two chunks under context parallelism).

Shape letters: N samples of the case, R response tokens of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.workshop.check_loss.cases import Case

VOCAB = 12


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """One sample. labels_R: the response tokens; inputs_R: the token before each of them. old_R, ref_R: log-probs.
    prompt: tokens of the prompt."""

    inputs_R: Tensor
    labels_R: Tensor
    old_R: Tensor
    ref_R: Tensor
    mask_R: Tensor
    prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """All samples of a case. lengths_N: trained tokens."""

    columns: list[SampleColumns]
    rewards_N: Tensor
    advantages_N: Tensor
    bins_N: Tensor
    lengths_N: Tensor


def step_samples(case: Case) -> StepSamples:
    """Make the samples of a case from its seed."""
    columns = []
    for i, (prompt, response) in enumerate(zip(case.prompts, case.responses, strict=True)):
        generator = torch.Generator().manual_seed(1000 * case.seed + i)
        tokens = torch.randint(0, VOCAB, (prompt + response,), generator=generator)
        old = -2.4 + 0.4 * torch.randn(response, generator=generator, dtype=torch.float64)
        ref = -2.3 + 0.4 * torch.randn(response, generator=generator, dtype=torch.float64)
        mask = torch.ones(response, dtype=torch.bool)
        mask[[position for sample, position in case.holes if sample == i and position < response]] = False
        if i in case.masked:
            mask[:] = False
        columns.append(SampleColumns(tokens[prompt - 1 : -1], tokens[prompt:], old, ref, mask, prompt))
    count = len(columns)
    group_N = torch.arange(count) // case.group
    right_N = torch.tensor([(i % case.group) <= (i // case.group) % case.group for i in range(count)])
    right_N[case.group - 1 :: case.group] = False  # no group is all right, so each has a signal
    rewards_N = right_N.to(torch.float64)
    advantages_N = group_advantages(rewards_N, group_N) + 0.1 * torch.arange(count, dtype=torch.float64)
    # The change differs between samples, since a loss may ignore a common factor or shift of an input.
    if case.changed == "rewards":
        rewards_N = rewards_N.roll(1) + 0.5 * (torch.arange(count) % 3)
    if case.changed == "advantages":
        advantages_N = advantages_N * torch.tensor([2.0, -1.0, 0.5]).to(torch.float64)[torch.arange(count) % 3]
    if case.changed == "old_logprobs":
        columns = [replace(c, old_R=c.old_R - 0.05 * (1 + i % 3)) for i, c in enumerate(columns)]
    if case.changed == "ref_logprobs":
        columns = [replace(c, ref_R=c.ref_R - 0.05 * (1 + i % 3)) for i, c in enumerate(columns)]
    grouped = count // case.group * case.group
    bins_N = torch.zeros(count, dtype=torch.int64)
    bins_N[:grouped] = pass_rate_bins(right_N[:grouped], group_N[:grouped], case.group)
    lengths_N = torch.tensor([int(c.mask_R.sum()) for c in columns], dtype=torch.int64)
    return StepSamples(columns, rewards_N, advantages_N, bins_N, lengths_N)


def local_positions(column: SampleColumns, rank: int, size: int) -> Tensor:
    """Return the response positions that a context-parallel rank holds: Megatron's zigzag, chunks r and 2 size - 1 - r.

    The chunks are of the whole sample, prompt included. A position lies in the chunk of the token before it, whose
    output predicts it.
    """
    response = len(column.labels_R)
    if size == 1:
        return torch.arange(response)
    total = column.prompt + response
    chunk = -(-total // (2 * size))
    of_input = torch.arange(column.prompt - 1, total - 1) // chunk
    return ((of_input == rank) | (of_input == 2 * size - 1 - rank)).nonzero().flatten()
