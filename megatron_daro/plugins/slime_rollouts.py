"""slime's rollout batches: whole groups in order -> bins and advantages -> what each optimizer step will hold.

`reward_post_process` runs in the rollout manager, the rest on the train ranks; plugins/slime.py
calls it. Refuses groups that are not whole and in order, and rewards that do not say which answers are right.

Shape letters: N samples of the whole rollout batch, n of this rank.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.errors import AlgorithmError
from megatron_daro.plugins.options import read_options


class Arguments(Protocol):
    """Those options of slime that are read here."""

    n_samples_per_prompt: int
    calculate_per_token_loss: bool
    custom_pg_loss_reducer_function_path: str | None
    qkv_format: str
    """Of miles."""


RolloutData = MutableMapping[str, Any]
"""One rank's part of a rollout batch: lists with one entry per sample, by slime's names."""


@dataclass(slots=True)
class Plan:
    """What one optimizer step of a rollout will hold on this rank.

    bins_N, lengths_N: int64, of its samples. floored_tokens: sum of max(trained tokens, 1). rollouts: of all ranks.
    """

    bins_N: Tensor
    lengths_N: Tensor
    floored_tokens: int
    rollouts: int


class Sample(Protocol):
    """What is read of slime's samples."""

    group_index: int | None

    def get_reward_value(self, args: Arguments) -> float:
        """Return the reward that the arguments choose."""


class Placed(float):
    """An advantage that knows the place of its sample in the rollout batch, also after Ray passed it on.

    slime's newest release does not tell the train ranks which samples of the batch they hold.
    """

    place: int

    def __new__(cls, value: float, place: int) -> Placed:
        """Return the value, with a place."""
        made = super().__new__(cls, value)
        made.place = place
        return made

    def __reduce__(self) -> tuple[type[Placed], tuple[float, int]]:
        """Keep the place when pickled."""
        return Placed, (float(self), self.place)


def places_of(rollout_data: RolloutData) -> Tensor:
    """Return the places of this rank's samples in the whole batch, int64 [n].

    Raises:
        AlgorithmError: the rewards are not those that `reward_post_process` made.
    """
    if "partition" in rollout_data:
        return torch.as_tensor(list(rollout_data["partition"]), dtype=torch.int64)
    rewards = rollout_data.get("rewards", ())
    if not all(isinstance(reward, Placed) for reward in rewards):
        raise AlgorithmError(
            "rollout data: rewards have lost their places in the batch, allowed are those that reward_post_process "
            "made: the host converts them on their way to the train ranks; use a version that this adapter was tested "
            "with"
        )
    return torch.tensor([reward.place for reward in rewards], dtype=torch.int64)


def reward_post_process(args: Arguments, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """slime's hook: (raw rewards, advantages) of a whole rollout batch.

    Raises:
        AlgorithmError: groups are not whole and in order, or rewards are no verdicts.
    """
    rewards_N = torch.tensor([float(sample.get_reward_value(args)) for sample in samples], dtype=torch.float64)
    groups = [sample.group_index for sample in samples]
    expected = [i // args.n_samples_per_prompt for i in range(len(samples))]
    order: dict[int | None, int] = {}
    if None not in groups and [order.setdefault(g, len(order)) for g in groups] != expected:
        raise AlgorithmError(
            "samples: groups are not whole and in order, allowed are n_samples_per_prompt = "
            f"{args.n_samples_per_prompt} samples of each prompt, one after another: a filter removed single samples, "
            "or a rollout was split into several samples"
        )
    _, advantages_N = bins_and_advantages(args, rewards_N)
    return rewards_N.tolist(), [Placed(advantage, place) for place, advantage in enumerate(advantages_N.tolist())]


def bins_and_advantages(args: Arguments, rewards_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return bins int64 [N] and advantages float64 [N] of a batch whose groups are whole and in order."""
    if len(rewards_N) % args.n_samples_per_prompt:
        raise AlgorithmError(
            f"samples: got {len(rewards_N)}, allowed is a multiple of n_samples_per_prompt = "
            f"{args.n_samples_per_prompt}: some group is incomplete, or a rollout was split into several samples"
        )
    options = read_options()
    group_N = torch.arange(len(rewards_N)) // args.n_samples_per_prompt
    bins_N = pass_rate_bins(options.verdicts(rewards_N), group_N, args.n_samples_per_prompt)
    return bins_N, options.algorithm(args.n_samples_per_prompt).advantages(rewards_N, group_N)


def plans_of(rollout_data: RolloutData, bins_n: Tensor, lengths_n: Tensor) -> list[Plan]:
    """Return one plan per optimizer step, from slime's own schedule of micro-batches."""
    plans: list[Plan] = []
    start = 0
    for number, rollouts in zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True):
        rows = [i for indices in rollout_data["micro_batch_indices"][start : start + number] for i in indices]
        start += number
        lengths = lengths_n[rows]
        plans.append(Plan(bins_n[rows], lengths, int(lengths.clamp(min=1).sum()), int(rollouts)))
    return plans
