"""What a case of the oracle is, and what the checked function is handed.

`search` makes Cases, `rank` turns them into LossBatch and StepInfo on each process.
Plain data: a Case is written into a script as JSON.

Shape letters: T tokens that this rank holds, M samples of a micro-batch.

The numbers of a case: tokens, old log-probs, advantages, masks; the same for every layout that shares its samples.

Case -> columns of each sample -> what one rank holds of a micro-batch (all of it, or its two
chunks under context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.difficulty import pass_rate_bins

LossFunction = Callable[["LossBatch", "StepInfo"], tuple[Any, ...]]
"""(loss, report) or (loss, number of tokens, report), as Megatron's schedules want it."""


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One micro-batch on one rank, packed: the samples' trained positions end to end.

    Under context parallelism a rank holds two chunks of each sample, as Megatron's zigzag splits it; some may be empty.
    Where the case says so it holds whole samples, as verl's Megatron engine gathers them: only its own chunks have a
    gradient. logprobs_T: float64, of the sampled tokens, with gradient, the same on every tensor-parallel rank.
    old_logprobs_T, ref_logprobs_T (of the reference policy), advantages_T, rewards_T: float64. mask_T: bool, the
    trained tokens; the other columns hold values there too, and NaN where the case says so. sequence_T: int64, 0..M-1.
    lengths_M: int64, trained tokens of the whole sample, over all context-parallel ranks. bins_M: int64, right answers
    of each sample's group. sample_ids_M: int64, place in the step.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    ref_logprobs_T: Tensor
    advantages_T: Tensor
    rewards_T: Tensor
    mask_T: Tensor
    sequence_T: Tensor
    lengths_M: Tensor
    bins_M: Tensor
    sample_ids_M: Tensor

    def __len__(self) -> int:
        return len(self.lengths_M)


@dataclass(frozen=True, slots=True, eq=False)
class StepInfo:
    """What a host knows of the whole optimizer step before its first micro-batch.

    num_micro_batches: on this rank. rank_advantages_T, rank_rewards_T, rank_mask_T: columns of all its micro-batches,
    end to end in their order and without padding, as a host has them for statistics before the first one. tokens,
    samples: trained tokens and samples of all data-parallel ranks. tokens_per_bin, rollouts_per_bin: int64 [K+1], the
    same per number of right answers. data_parallel, context_parallel: sizes. data_group, data_and_context_group,
    context_group, tensor_group: process groups.
    """

    num_micro_batches: int
    rank_advantages_T: Tensor
    rank_rewards_T: Tensor
    rank_mask_T: Tensor
    tokens: int
    samples: int
    tokens_per_bin: Tensor
    rollouts_per_bin: Tensor
    rollouts_per_prompt: int
    calculate_per_token_loss: bool
    data_parallel: int
    context_parallel: int
    tensor_parallel: int
    data_group: dist.ProcessGroup
    data_and_context_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Case:
    """One layout and one set of samples.

    schedule: for each data-parallel rank its micro-batches, each a list of sample numbers; every rank has as many.
    prompts, responses: tokens of each sample. holes: (sample, response position) that are not trained. masked: samples
    without a trained token. group: rollouts per prompt; samples are grouped in order. poison: whether masked positions
    hold NaN. expert: ranks that share the model's experts, of those that share nothing else of a layer; 0: it has none.
    whole: whether a context-parallel rank sees whole samples. on_policy: old log-probs are the policy's own. precise:
    what the function computes in a shorter type is computed in float64.
    """

    tensor: int
    pipeline: int
    context: int
    schedule: tuple[tuple[tuple[int, ...], ...], ...]
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    holes: tuple[tuple[int, int], ...] = ()
    masked: tuple[int, ...] = ()
    group: int = 2
    per_token: bool = True
    poison: bool = False
    padding: int = 0
    changed: str = ""
    seed: int = 0
    expert: int = 0
    whole: bool = False
    on_policy: bool = False
    precise: bool = False

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return len(self.schedule)

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def num_micro_batches(self) -> int:
        """On each rank."""
        return len(self.schedule[0])

    def reference(self) -> Case:
        """Return the same samples on one process, in one micro-batch, nothing hidden under the mask."""
        everything = tuple(sorted(i for rank in self.schedule for micro_batch in rank for i in micro_batch))
        alone = replace(self, schedule=((everything,),), tensor=1, pipeline=1, context=1, poison=False, padding=0)
        alone = replace(alone, whole=False)
        return replace(alone, expert=min(self.expert, 1))

    def describe(self) -> str:
        """One line for people."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data, "EP": self.expert}
        layout = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
        micro_batches = " | ".join(
            " ".join("+".join(map(str, mb)) or "nothing" for mb in rank) for rank in self.schedule
        )
        flag = "on" if self.per_token else "off"
        extra = [f"masked samples {list(self.masked)}"] if self.masked else []
        extra += [f"{len(self.holes)} holes in masks"] if self.holes else []
        extra += ["NaN under the mask"] if self.poison else []
        extra += [f"{self.padding} padded positions"] if self.padding else []
        extra += ["whole samples on each rank"] if self.whole and self.context > 1 else []
        parts = [f"{layout}, per-token flag {flag}, samples of each micro-batch: {micro_batches}", *extra]
        used = self.reference().schedule[0][0]
        lengths = ", ".join(f"{i}: {self.responses[i]}" for i in used)
        return f"{', '.join(parts)}, response lengths {lengths}"


def as_json(case: Case) -> dict[str, Any]:
    """Return plain data."""
    return asdict(case)


def from_json(data: Mapping[str, Any]) -> Case:
    """Return the inverse of `as_json`, also of what JSON made of tuples."""

    return Case(**{name: _frozen(value) for name, value in data.items()})  # type: ignore[arg-type]


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(slots=True, eq=False)
class Trace:
    """One micro-batch on one rank of the last stage: what the loss does to each of its positions.

    data, context, tensor, micro_batch: where. samples_T, positions_T: int64, sample and place in its response, -1 for
    padding. mask_T: bool. coefficients_T: float64, the derivative of the scheduled loss by each log-prob. old_T,
    advantages_T: float64, what the function was handed. returned: the number of tokens that it returned, if any.
    types: shorter than float64 in which it computed.
    """

    data: int
    context: int
    tensor: int
    micro_batch: int
    samples_T: Tensor
    positions_T: Tensor
    mask_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    coefficients_T: Tensor
    returned: float | None = None
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a case gave: the gradient of each parameter (float64, whole) and the traces of all ranks, or the error of
    the first rank that failed. lost: it did not say the error itself: it never answered, or its process ended."""

    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    error: str = ""
    lost: bool = False


VOCAB = 12


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """One sample: inputs_R are the tokens before each response token, labels_R those tokens; the others per token."""

    inputs_R: Tensor
    labels_R: Tensor
    old_R: Tensor
    ref_R: Tensor
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
        ref = -2.3 + 0.4 * torch.randn(response, generator=generator, dtype=torch.float64)
        mask = torch.ones(response, dtype=torch.bool)
        mask[[position for sample, position in case.holes if sample == i and position < response]] = False
        if i in case.masked:
            mask[:] = False
        columns.append(SampleColumns(tokens[prompt - 1 : -1], tokens[prompt:], old, ref, mask, prompt))
    count = len(columns)
    group_N = torch.arange(count) // case.group
    right_N = torch.tensor([(i % case.group) <= (i // case.group) % case.group for i in range(count)])
    right_N[case.group - 1 :: case.group] = False  # no group is all right: each has a signal
    rewards_N = right_N.to(torch.float64)
    advantages_N = group_advantages(rewards_N, group_N) + 0.1 * torch.arange(count, dtype=torch.float64)
    # What is changed differs from sample to sample, signs too: losses may read an input up to a factor or a shift.
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
