"""What the ranks of a RankPool do in the tests of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from policy_tasks import build_policy, my_rows, save_policy, summed_gradients, uneven_split

from megatron_daro.types import StepBatch

DARO = {"name": "daro"}
PLAIN = {"learning_rate": 1e-2, "grad_clip": 0.0}
Arrays = dict[str, np.ndarray]


def adapters(policy: Any) -> Arrays:
    """This stage's adapters under PEFT's names."""
    return {name: tensor.clone().numpy() for name, tensor in policy.export_adapter()}


def gradients(policy: Any, batch: StepBatch, micro_batches: list[list[int]]) -> Arrays:
    """Summed gradients of this stage's adapters under PEFT's names."""
    from megatron_daro.actor.lora import gathered_adapters

    summed_gradients(policy, DARO, batch, micro_batches)
    found = gathered_adapters(policy.chunks, lambda parameter: parameter.main_grad)
    return {name: tensor.clone().numpy() for name, tensor in found}


def two_updates(path: Path, layout: Any, batch: StepBatch, lora: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Adapters, their gradients, log-probs of the batch and merged weights, before and after an update."""
    algorithm, optimizer = {**DARO, "kl": {"coefficient": 1e-9}}, {**PLAIN, "distributed": False}
    policy = build_policy(path, layout, algorithm, lora=lora, optimizer=optimizer, **options)
    mine = batch.select(my_rows(len(batch), layout))
    micro_batches, found = uneven_split(len(mine), 4), []
    state = policy.train_state.algorithm.state_dict()
    for step in (1, 2):
        policy.train_state.algorithm.load_state_dict(state)
        found.append(
            {
                "adapters": adapters(policy),
                "logprobs": policy.logprobs(batch, uneven_split(len(batch), 4)),
                "reference": policy.reference_logprobs(batch, uneven_split(len(batch), 4)),
                "merged": {name: tensor.clone().numpy() for name, tensor in policy.export()},
                "gradients": gradients(policy, mine, micro_batches),
            }
        )
        policy.train_state.algorithm.load_state_dict(state)
        shard = replace(mine, ref_logprobs_R=np.zeros_like(mine.rollout_logprobs_R))
        found[-1]["skipped"] = policy.train_step(shard, micro_batches, step=step).skipped
    trained = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad]
    found[-1]["numbers"] = {
        "gradients": sum(b.grad_data.numel() for c in policy.train_state.chunks for b in c.buffers),
        "trained": sum(p.numel() for p in trained),
        "reference": sum(tensor.nbytes for tensor in policy.reference.on_device()),
    }
    return {"updates": found}


def save_train(path: Path, layout: Any, batch: StepBatch, directory: Path, lora: dict[str, Any]) -> Arrays:
    """Train a step, save, train another one. Returns the adapters at the end."""
    policy = build_policy(path, layout, DARO, lora=lora, optimizer=PLAIN)
    mine = batch.select(my_rows(len(batch), layout))
    policy.train_step(mine, uneven_split(len(mine), 2), step=1)
    save_policy(policy, directory)
    policy.train_step(mine, uneven_split(len(mine), 2), step=2)
    return adapters(policy)


def load_train(path: Path, layout: Any, batch: StepBatch, directory: Path, lora: dict[str, Any]) -> dict[str, Any]:
    """Load what was saved and train the step after it. Returns the adapters before and after."""
    policy = build_policy(path, layout, DARO, lora=lora, to_be_restored=True, optimizer=PLAIN)
    policy.load(directory)
    loaded = adapters(policy)
    mine = batch.select(my_rows(len(batch), layout))
    policy.train_step(mine, uneven_split(len(mine), 2), step=2)
    return {"loaded": loaded, "after": adapters(policy)}


def begun(path: Path, layout: Any, lora: dict[str, Any]) -> Arrays:
    """The adapters of a new policy."""
    return adapters(build_policy(path, layout, DARO, lora=lora))
