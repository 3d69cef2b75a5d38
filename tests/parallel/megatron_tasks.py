"""What the ranks of a RankPool are asked to do: functions of plain arguments that return plain results."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from policy_tasks import build_policy, collect_gradients, everything, save_policy, summed_gradients

from megatron_daro.observe.metrics import comparable
from megatron_daro.types import StepBatch


def _shard(batch: StepBatch, layout: Any, num_micro_batches: int) -> tuple[StepBatch, list[list[int]]]:
    """This data-parallel rank's samples, and an uneven split of them into micro-batches."""
    from megatron.core import parallel_state

    mine = batch.select(range(parallel_state.get_data_parallel_rank(), len(batch), layout.data))
    cuts = np.unique(np.linspace(0, len(mine) ** 0.5, num_micro_batches + 1) ** 2 + 0.5).astype(int)
    bounds = sorted({0, len(mine), *(int(c) for c in cuts[1:-1])})
    return mine, [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def _scheduled(batch: StepBatch, layout: Any, token_budget: int) -> tuple[StepBatch, list[list[int]]]:
    """This data-parallel rank's samples as a run splits them."""
    from megatron.core import parallel_state

    from megatron_daro.data.schedule import schedule

    multiple = 2 * layout.context if layout.context > 1 else 1
    options = {"sequence_multiple": multiple, "total_multiple": multiple}
    parts = schedule(batch.lengths_N, layout.data, token_budget, **options)
    mine = parts[parallel_state.get_data_parallel_rank()]
    ends = list(itertools.accumulate(map(len, mine), initial=0))
    return batch.select([i for part in mine for i in part]), [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def freed_on_the_way(layout: Any) -> list[float] | None:
    """What rank 1 gets of a tensor that loses its storage, which is used again, before rank 1 listens."""
    import torch
    from torch import distributed

    numbers = torch.arange(1000.0)
    if distributed.get_rank():
        distributed.barrier()
        received = torch.empty_like(numbers)
        distributed.irecv(tensor=received, src=0).wait()
        return received.tolist()
    sending = distributed.isend(tensor=numbers, dst=1)
    numbers.data = torch.empty(1)
    others = [torch.full((1000,), -1.0) for _ in range(50)]
    distributed.barrier()
    sending.wait()
    assert len(others) == 50
    return None


def shapes_between_stages(path: Path, layout: Any, batch: StepBatch) -> int:
    """How often this rank and its neighbours told each other shapes while it computed log-probs and gradients."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    policy, told, exchange = build_policy(path, layout, {"name": "grpo"}), 0, P2PCommunicator._communicate_shapes

    def counted(*args: Any) -> Any:
        nonlocal told
        told += 1
        return exchange(*args)

    P2PCommunicator._communicate_shapes = counted
    try:
        _, micro_batches = _shard(batch, layout, 3)
        policy.logprobs(batch, micro_batches)
        policy.train_step(batch, micro_batches, step=1)
    finally:
        P2PCommunicator._communicate_shapes = exchange
    return told


def short_step(
    path: Path, layout: Any, batch: StepBatch, token_budget: int, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """A step with its passes, split as in a run: summed gradients, metrics, and the samples of each micro-batch."""
    mine, micro_batches = _scheduled(batch, layout, token_budget)
    policy = build_policy(path, layout, algorithm, optimizer={"distributed": False})
    for name in [*(["values"] if policy.critic else []), *(["ref_logprobs"] if policy.reference else [])]:
        column_R = policy.run_pass(name, mine, micro_batches)  # None before the last stage
        mine = replace(mine, **{f"{name}_R": np.zeros_like(mine.rollout_logprobs_R) if column_R is None else column_R})
    sums = summed_gradients(policy, algorithm, mine, micro_batches)
    gradients = collect_gradients(policy)
    return {
        "gradients": gradients,
        "policy_loss": sums.policy_loss,
        "samples": [len(part) for part in micro_batches],
        "metrics": comparable(policy.train_step(mine, micro_batches, step=1).metrics),
    }


def response_logprobs(path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, **options: Any) -> Any:
    """float32 [R] of this rank's samples and their row numbers; None before the last stage."""
    policy = build_policy(path, layout, {"name": "grpo"}, **options)
    mine, micro_batches = _shard(batch, layout, num_micro_batches)
    return policy.logprobs(mine, micro_batches)


def gradients(
    path: Path,
    layout: Any,
    batch: StepBatch,
    num_micro_batches: int,
    algorithm: dict[str, Any],
    state: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Summed gradients under Hugging Face names (this stage's), loss sums per bin, and the loss.

    state: of the algorithm, in the place of the one it starts in.
    """
    options = {"optimizer": {"distributed": False}, **options}
    policy = build_policy(path, layout, algorithm, **options)
    if state is not None:
        policy.train_state.algorithm.load_state_dict({"algorithm": policy.train_state.algorithm.name, **state})
    mine, micro_batches = _shard(batch, layout, num_micro_batches)
    sums = summed_gradients(policy, algorithm, mine, micro_batches)
    return {
        "gradients": collect_gradients(policy),
        "loss_sums": sums.loss_sums.numpy(),
        "policy_loss": sums.policy_loss,
        "regularizer": sums.regularizer,
    }


@contextmanager
def _without(method: str | None) -> Iterator[None]:
    """Megatron's distributed optimizer without this method."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if method is None:
        yield
        return
    kept = getattr(DistributedOptimizer, method)
    delattr(DistributedOptimizer, method)
    try:
        yield
    finally:
        setattr(DistributedOptimizer, method, kept)


def train(
    path: Path,
    layout: Any,
    batches: list[StepBatch],
    num_micro_batches: int | list[int],
    algorithm: dict[str, Any],
    save_to: Path | None = None,
    load_from: Path | None = None,
    without: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Some optimizer steps; the model weights (this stage's), DARO's weights, the metrics of each step, and the options
    of each of the optimizer's parameter groups.

    num_micro_batches: of all steps, or of each.
    """
    policy = build_policy(path, layout, algorithm, **options)
    if load_from:
        policy.load(load_from)
    metrics = []
    numbers = [num_micro_batches] * len(batches) if isinstance(num_micro_batches, int) else num_micro_batches
    for step, (batch, number) in enumerate(zip(batches, numbers, strict=True)):
        mine, micro_batches = _shard(batch, layout, number)
        metrics.append(comparable(policy.train_step(mine, micro_batches, step=step + 1).metrics))
    if save_to:
        with _without(without):
            save_policy(policy, save_to)
    weights = policy.train_state.algorithm.weights
    return {
        "parameters": {n: t.clone().float().numpy() for n, t in policy.export()},
        "weights": None if weights is None else weights.numpy(),
        "metrics": metrics,
        "state": policy.train_state.algorithm.state_dict(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in policy.train_state.optimizer.param_groups],
    }


def train_and_move(
    path: Path, layout: Any, batches: list[StepBatch], num_micro_batches: int, moves: bool, **options: Any
) -> dict[str, Any]:
    """Optimizer steps, after each of which the policy's memory goes to the host, a part and then all, and comes back.

    moves: for each step what was reported of (gradients and optimizer, these back, weights, all of them back). refused:
    what was refused while it was away, before the last return.
    """
    policy = build_policy(path, layout, {"name": "daro"}, **options)
    metrics, done, refused = [], [], []
    for step, batch in enumerate(batches):
        mine, micro_batches = _shard(batch, layout, num_micro_batches)
        metrics.append(comparable(policy.train_step(mine, micro_batches, step=step + 1).metrics))
        if moves:
            before = policy.offload(()).left
            first, part_back = policy.offload(("gradients", "optimizer")), policy.onload(_ALL)
            policy.offload(("gradients", "optimizer"))
            second = policy.offload(("weights", "optimizer"))
            refused = _refused(policy, mine, micro_batches)
            back = policy.onload(_ALL)
            done.append((_told(first, before=before), _told(part_back), _told(second), _told(back)))
    return {
        "parameters": {n: t.clone().float().numpy() for n, t in policy.export()},
        "state": everything(policy),
        "metrics": metrics,
        "moves": done,
        "refused": refused,
    }


_ALL = ("weights", "gradients", "optimizer")


def _told(move: Any, **more: int) -> dict[str, int]:
    return {"moved": move.moved, "left": move.left, **more}


def _refused(policy: Any, batch: StepBatch, micro_batches: list[list[int]]) -> list[str]:
    """Which of these the policy refuses to do."""
    calls = {
        "train": lambda: policy.train_step(batch, micro_batches, step=1),
        "logprobs": lambda: policy.logprobs(batch, micro_batches),
        "export": lambda: list(policy.export()),
        "save": lambda: policy.start_save(Path("/nowhere")),
    }
    found = []
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "on the host" in str(error)
            found.append(name)
    return found


def save_and_leave(path: Path, layout: Any, batch: StepBatch, directory: Path, **options: Any) -> dict[str, Any]:
    """A checkpoint whose files are written when the policy is told to leave its memory; then it is loaded.

    writes: whether this rank has anything to write: without a distributed optimizer one rank writes what all have.
    waited: whether leaving took as long as reading what was not copied. before, loaded: weights.
    """
    import torch.distributed as dist

    from megatron_daro.actor import shard_file

    policy = build_policy(path, layout, {"name": "daro"}, precision="bf16", **options)
    mine, micro_batches = _shard(batch, layout, 2)
    policy.train_step(mine, micro_batches, step=1)
    before = {n: t.clone().float().numpy() for n, t in policy.export()}
    written, told, write = [], threading.Event(), shard_file.FileWriter.write

    def slowly(self: Any, values: Any) -> None:
        told.wait(timeout=60)
        time.sleep(0.02)
        written.append(len(values))
        write(self, values)

    shard_file.FileWriter.write = slowly
    try:
        policy.start_save(directory)
        told.set()
        policy.offload(_ALL)
        at_end = len(written)
        policy.finish_save()
    finally:
        shard_file.FileWriter.write = write
    dist.barrier()  # a rank with nothing to write would read what another one still writes
    policy.onload(_ALL)
    policy.load(directory)
    left = policy.offload(_ALL).left  # of what was loaded, too, nothing may stay
    policy.onload(_ALL)
    loaded = {n: t.clone().float().numpy() for n, t in policy.export()}
    return {"writes": len(written) > 0, "waited": at_end > 0, "before": before, "loaded": loaded, "left": left}


def go_back(
    path: Path, layout: Any, batches: list[StepBatch], algorithm: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """A step, a snapshot, and a second step, which overtakes the snapshot but for its update; then back and the second
    step again, in the same policy and in another one that was built to be restored.

    Returns what there is after the second step, each of the three times; the snapshot's number before and after it.
    """
    from megatron_daro.actor.double_buffer import DoubleBuffer

    policy, buffer = build_policy(path, layout, algorithm, **options), DoubleBuffer()
    first, second = (_shard(batch, layout, 2) for batch in batches)
    _whole_step(policy, *first, step=1)
    policy.train_state.begun = True  # as after a first update that was not applied
    with _snapshots_wait():
        policy.start_snapshot(buffer.open(None), 1)
        numbers = [buffer.serials]
        results = [_after(policy, second)]
        numbers.append(buffer.serials)
    for _ in range(2):
        policy.restore(buffer.whole(1))
        assert policy.train_state.begun
        results.append(_after(policy, second))
        policy.start_snapshot(buffer.open(1), 2).wait()  # another one beside it
        reference = policy.reference
        policy = build_policy(path, layout, algorithm, to_be_restored=True, reference=reference, **options)
    return {"results": results, "numbers": numbers}


def _whole_step(policy: Any, batch: StepBatch, micro_batches: list[list[int]], *, step: int) -> dict[str, float]:
    """A step with the passes before it, on one pipeline stage."""
    if policy.reference:
        batch = replace(batch, ref_logprobs_R=policy.run_pass("ref_logprobs", batch, micro_batches))
    if policy.critic:
        batch = replace(batch, values_R=policy.run_pass("values", batch, micro_batches))
    return comparable(policy.train_step(batch, micro_batches, step=step).metrics)


def _after(policy: Any, shard: Any) -> dict[str, Any]:
    """What a step leaves behind, bit for bit."""
    import torch

    metrics = _whole_step(policy, *shard, step=2)
    models = [policy.train_state, *([policy.critic.state] if policy.critic else [])]
    return {
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("timing/")},
        "numbers": everything(policy),
        "options": [{k: v for k, v in g.items() if k != "params"} for m in models for g in m.optimizer.param_groups],
        "scheduler": [model.scheduler.state_dict() for model in models],
        "algorithm": policy.train_state.algorithm.state_dict(),
        "random": torch.rand(4).tolist(),
    }


@contextmanager
def _snapshots_wait() -> Iterator[None]:
    """A snapshot is copied when somebody waits for it, and not before."""
    from megatron_daro.actor import snapshot

    asked, extended, wait = threading.Event(), snapshot.extended, snapshot.PendingSnapshot.wait

    def waiting(*args: Any, **kwargs: Any) -> Any:
        assert asked.wait(100)
        return extended(*args, **kwargs)

    snapshot.extended, snapshot.PendingSnapshot.wait = waiting, lambda self: (asked.set(), wait(self))[1]
    try:
        yield
    finally:
        snapshot.extended, snapshot.PendingSnapshot.wait = extended, wait
