"""A Ray actor that stands for many ranks: it answers their calls after a planned time, and has no model.

Place in the data flow: thin_ranks.py makes one for each few nodes, and one for the node that will be lost. Imports no
torch, so that it starts in a second.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.types import StepResult, TrainBatch

_actor: Any = ray.remote  # Ray's stubs do not know what a decorated class becomes
MANY_CALLS = 100_000
PROBED = -0.5
"""Log-prob of every token of a probe, here and of a canned server."""


@dataclass(frozen=True, slots=True)
class Script:
    """What ranks do, and when.

    train_s, logprobs_s, send_s: planned seconds that calls take here. stages: pipeline stage -> (bytes, buckets) of its
    export. answering, sending: ranks whose answers count. stage_of: of the sending ranks. loses_at: the step in whose
    training a node is lost; None: never. own_loss: how, where it is this actor's node; the ranks of other nodes then
    wait in their collective.
    """

    train_s: float
    logprobs_s: float
    send_s: float
    stages: Mapping[int, tuple[int, int]]
    answering: frozenset[int]
    stage_of: Mapping[int, int] = field(default_factory=dict)
    loses_at: int | None = None
    own_loss: Literal["", "killed", "silent"] = ""


class ThinRanks:
    """Many ranks of one process. The first argument of each call is the rank."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def sentinel(self, rank: int) -> None:
        """Block for as long as the process lives."""
        await asyncio.Event().wait()

    async def ready(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    async def train(
        self, rank: int, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], step: int, **columns: np.ndarray
    ) -> StepResult:
        """One optimizer step."""
        await asyncio.sleep(self._script.train_s)
        if self._script.loses_at == step:
            await self._lose()
        answers = rank in self._script.answering
        metrics = {"loss/policy": float(batch.advantages_N.mean()), "loss/grad_norm": 1.0} if answers else {}
        return StepResult(step, metrics)

    async def _lose(self) -> None:
        """End this process, or wait for a rank that will never come."""
        if self._script.own_loss == "killed":
            os._exit(1)
        await asyncio.Event().wait()

    async def logprobs(
        self,
        rank: int,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        reference: bool,
        temperature: float | None = None,
    ) -> np.ndarray | None:
        """float32 [R] of the shard; None where another rank answers. Of a probe: the constant of canned servers."""
        if rank not in self._script.answering:
            return None
        if temperature is not None:
            return np.full_like(batch.rollout_logprobs_R, PROBED)
        await asyncio.sleep(self._script.logprobs_s)
        return batch.rollout_logprobs_R * np.float32(0.999)

    async def export(self, rank: int, plan: SendPlan) -> SendReport | None:
        """Report what the stage would have sent."""
        if rank not in self._script.stage_of:
            return None
        await asyncio.sleep(self._script.send_s)
        num_bytes, buckets = self._script.stages[self._script.stage_of[rank]]
        return SendReport(num_bytes, buckets, self._script.send_s)

    async def start_save(self, rank: int, directory: Path) -> None:
        """Write a file of no size where the rank's shard would be."""
        (directory / f"shard_{rank:05d}.safetensors").write_bytes(b"")

    async def finish_save(self, rank: int) -> None:
        """Return when it is on the disk: it is."""
        await asyncio.sleep(0)


ThinRanksActor = _actor(max_restarts=0, max_task_retries=0, num_cpus=0, max_concurrency=MANY_CALLS)(ThinRanks)
