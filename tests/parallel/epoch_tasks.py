"""What ranks do over a batch that is gone over twice, as the controller does it with the driver's columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from policy_tasks import (
    build_policy,
    collect_gradients,
    loss_settings,
    my_rows,
    of_last_stage,
    summed_gradients,
    uneven_split,
)

from megatron_daro.types import StepBatch


def ppo_epochs(path: Path, layout: Any, batch: StepBatch, algorithm: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Both models' summed gradients in the last mini-batch of a second epoch, after steps on those before it, with
    old log-probs and values of before the first. Groups of the batch are neighbours."""
    from megatron_daro.actor.advantages import with_advantages
    from megatron_daro.data.batch import with_columns_of
    from megatron_daro.rollout.minibatches import epoch_order

    policy, size = build_policy(path, layout, algorithm, **options), batch.rollouts_per_prompt
    number = len(batch) // size

    def halves(order: Sequence[int]) -> list[StepBatch]:
        rows = [[size * group + i for group in part for i in range(size)] for part in np.array_split(order, 2)]
        return [batch.select(part) for part in rows]

    prepared = [_with_passes(policy, layout, one) for one in halves(range(number))]
    later = [with_columns_of(one, prepared) for one in halves(epoch_order(number, 0, 1, 2))]
    *earlier, last = [one.select(my_rows(len(one), layout)) for one in [*prepared, *later]]
    results = [policy.train_step(mine, uneven_split(len(mine), 2), step=step) for step, mine in enumerate(earlier, 1)]
    micro_batches = uneven_split(len(last), 3)
    sums = summed_gradients(policy, algorithm, last, micro_batches)
    gradients = collect_gradients(policy)
    objective, _ = loss_settings(policy, algorithm)
    policy.critic.gradients(with_advantages(policy.train_state.algorithm, last, objective), micro_batches)
    its = {f"critic {name}": value for name, value in collect_gradients(policy.critic).items()}
    clipped = results[-1].metrics["ratio/clip_fraction_high"] + results[-1].metrics["critic/clip_fraction"]
    return {"gradients": gradients | its, "policy_loss": sums.policy_loss, "clipped": clipped}


def _with_passes(policy: Any, layout: Any, batch: StepBatch) -> StepBatch:
    """The batch with old log-probs and values, which ranks compute for their own rows, as the driver joins them."""
    from megatron.core import parallel_state

    rows = my_rows(len(batch), layout)
    mine, columns = batch.select(rows), {}
    for name in ("old_logprobs", "values"):
        own = of_last_stage(policy.run_pass(name, mine, uneven_split(len(mine), 2)))
        found: list[Any] = [None] * layout.data
        own_parts = np.split(own, np.cumsum(mine.response_lengths_N)[:-1])
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_gather_object(found, dict(zip(rows, own_parts, strict=True)), group=group)
        parts = {row: part for one in found for row, part in one.items()}
        columns[f"{name}_R"] = np.concatenate([parts[row] for row in range(len(batch))])
    return replace(batch, **columns)
