"""slime's rollout batches: whole groups in order -> bins and advantages -> what each optimizer step will hold.

Place in the data flow: `reward_post_process` runs in the rollout manager, the rest on the train ranks; plugins/slime.py
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
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    entropy_coef: float
    calculate_per_token_loss: bool
    use_rollout_logprobs: bool
    use_tis: bool
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str


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
    return rewards_N.tolist(), advantages_N.tolist()


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
