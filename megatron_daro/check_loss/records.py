"""What a case of the oracle is, and what the checked function is handed.

Place in the data flow: `search` makes Cases, `rank` turns them into LossBatch and StepInfo on each process.
Plain data: a Case is written into a script as JSON.

Shape letters: T tokens that this rank holds, M samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

LossFunction = Callable[["LossBatch", "StepInfo"], tuple[Any, ...]]
"""(loss, report) or (loss, number of tokens, report), as Megatron's schedules want it."""


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """One micro-batch on one rank, packed: the samples' trained positions end to end.

    Under context parallelism a rank holds two chunks of each sample, as Megatron's zigzag splits it; some may be empty.
    logprobs_T: float64, of the sampled tokens, with gradient, the same on every tensor-parallel rank. old_logprobs_T,
    advantages_T, rewards_T: float64. mask_T: bool, the trained tokens; the other columns hold values there too, and NaN
    where the case says so. sequence_T: int64, 0..M-1. lengths_M: int64, trained tokens of the whole sample, over all
    context-parallel ranks. bins_M: int64, right answers of each sample's group. sample_ids_M: int64, place in the step.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
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

    num_micro_batches: on this rank. tokens, samples: trained tokens and samples of all data-parallel ranks.
    tokens_per_bin, rollouts_per_bin: int64 [K+1], the same per number of right answers. data_parallel,
    context_parallel: sizes. data_group, data_and_context_group, context_group, tensor_group: process groups.
    """

    num_micro_batches: int
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


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a case gave: the gradient of each parameter (float64, whole), or the error of the first rank that failed."""

    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    error: str = ""
