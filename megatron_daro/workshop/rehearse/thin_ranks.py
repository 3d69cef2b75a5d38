"""The run's policy group over thin ranks: every call to every rank is made, but a few processes answer them.

In the place of runtime/policy_group.py's start and end; all else of it is inherited. Knows at
the end which ranks died and which never answered.

A Ray actor that stands for many ranks: it answers their calls after a planned time, and has no model.

Thin_ranks.py makes one for each few nodes, and one for the node that will be lost. Imports no
torch, so that it starts in a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.supervisor import DEATHS, WorkerGroup, actor_class, gather, remote_class
from megatron_daro.runtime.workers import Place
from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.types import StepResult, TrainBatch
from megatron_daro.workshop.rehearse.setting import NodeMap

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

    async def run_pass(
        self, rank: int, name: str, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """float32 [R] of the shard; None where another rank answers."""
        if rank not in self._script.answering:
            return None
        await asyncio.sleep(self._script.logprobs_s)
        return batch.rollout_logprobs_R * np.float32(0.999)

    async def score(
        self, rank: int, batch: TrainBatch, micro_batches: Sequence[Sequence[int]], temperature: float
    ) -> np.ndarray | None:
        """Return the constant of canned servers for a probe; None where another rank answers."""
        return np.full_like(batch.rollout_logprobs_R, PROBED) if rank in self._script.answering else None

    async def export(
        self, rank: int, plan: SendPlan | None, members: tuple[int, ...] = (), *, critic: bool = False
    ) -> SendReport | None:
        """Report what the stage would have sent. All ranks are on one host, so that none hands on for another."""
        if plan is None or rank not in self._script.stage_of:
            return None
        await asyncio.sleep(self._script.send_s)
        num_bytes, buckets = self._script.stages[self._script.stage_of[rank]]
        return SendReport(num_bytes, buckets, self._script.send_s)

    async def start_save(self, rank: int, directory: Path) -> None:
        """Write a file of no size where the rank's shard would be."""
        (directory / f"shard_{rank:05d}.safetensors").write_bytes(b"")

    async def finish_save(self, rank: int) -> None:
        """Wait for nothing: the file is written already."""
        await asyncio.sleep(0)


ThinRanksActor = remote_class(max_restarts=0, max_task_retries=0, num_cpus=0, max_concurrency=MANY_CALLS)(ThinRanks)


HOSTS = 3
"""Processes that stand for all ranks but those of the lost node."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The node that is lost while this step is trained. how: its processes end, or only fall silent."""

    node: int
    step: int
    how: Literal["killed", "silent"] = "killed"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """What ranks were asked last and did not answer. died: those whose process is gone; waited_s: of the others."""

    call: str
    died: tuple[int, ...]
    waiting: tuple[int, ...]
    waited_s: float


class _Asked:
    """The last call to each rank: its name, the reference and the time."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, ray.ObjectRef, float]] = {}
        self.count = 0

    def unanswered(self) -> Unanswered | None:
        """Return what has no answer; None where everything has."""
        if not self.calls:
            return None
        rank_of = {reference: rank for rank, (_, reference, _) in self.calls.items()}
        ready, open_ = ray.wait(list(rank_of), num_returns=len(rank_of), timeout=0)
        died = tuple(sorted(rank_of[reference] for reference in ready if _is_dead(reference)))
        waiting = tuple(sorted(rank_of[reference] for reference in open_))
        if not died and not waiting:
            return None
        name, _, since = self.calls[(died or waiting)[0]]
        return Unanswered(name, died, waiting, time.perf_counter() - since)


def _is_dead(reference: ray.ObjectRef) -> bool:
    try:
        ray.get(reference, timeout=0)
    except DEATHS:
        return True
    except RayError:
        return False
    return False


class RankHandle:
    """What a Ray handle is to a rank: `handle.method.remote(...)`."""

    def __init__(self, host: ActorHandle, rank: int, calls: _Asked) -> None:
        self._host, self._rank, self._asked = host, rank, calls

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(getattr(self._host, name), name, self._rank, self._asked)


class _Remote(Protocol):
    def remote(self, *arguments: object, **named: object) -> ray.ObjectRef: ...


class _Method:
    def __init__(self, method: _Remote, name: str, rank: int, calls: _Asked) -> None:
        self._method, self._name, self._rank, self._asked = method, name, rank, calls

    def remote(self, *arguments: object, **named: object) -> ray.ObjectRef:
        """Make the call; its reference."""
        reference = self._method.remote(self._rank, *arguments, **named)
        self._asked.count += 1
        if self._name != "sentinel":
            self._asked.calls[self._rank] = self._name, reference, time.perf_counter()
        return reference


class ThinWorkers(WorkerGroup):
    """Handles of ranks; the processes behind them end together."""

    def __init__(self, hosts: list[Any]) -> None:
        super().__init__()
        self._hosts = hosts

    def dismiss(self) -> None:
        """End every process. May be called twice."""
        self.dismissed = True
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            ray.kill(host, no_restart=True)
        self.data.clear()


class ThinPolicyGroup(PolicyGroup):
    """All ranks of the policy, none of them with a model."""

    def rehearse(
        self,
        places: list[Place],
        nodes: NodeMap,
        script: Script,
        loss: Loss | None,
        *,
        on_begin: Callable[[], None],
        on_loss: Callable[[], None],
    ) -> None:
        """Say what is rehearsed, before `start`.

        Args:
            places: of each rank. nodes: where they are. script: of every process. loss: of a node, None for none.
            on_begin: called when everything has started. on_loss: called when the step of the loss begins.
        """
        self._plan, self._nodes, self._script, self._loss = places, nodes, script, loss
        self._on_begin, self._on_loss = on_begin, on_loss
        self._begun = False
        self.asked = _Asked()
        self.unanswered: Unanswered | None = None
        self.lost_at = 0.0

    async def start(self) -> None:
        """Start the few processes that stand for all ranks."""
        lost = set(self._nodes.ranks_of(self._loss.node)) if self._loss else set()
        script = self._script
        if self._loss and lost:
            script = dataclasses.replace(script, loses_at=self._loss.step)
        make = actor_class(ThinRanksActor)
        hosts = [make.remote(script) for _ in range(HOSTS)]
        everyone = list(hosts)

        if self._loss and lost:
            everyone.append(make.remote(dataclasses.replace(script, own_loss=self._loss.how)))
        self.workers = ThinWorkers(everyone)
        self.workers.update(
            {
                f"actor rank {rank}": RankHandle(
                    everyone[-1] if rank in lost else hosts[node % HOSTS], rank, self.asked
                )
                for rank, node in enumerate(self._nodes.ranks)
            }
        )
        self._places = self._plan
        await gather({f"thin ranks {i}": host.ready.remote() for i, host in enumerate(everyone)})

    async def export(self, plan: SendPlan) -> SendReport:
        """Every pipeline stage reports its weights; the first time is the beginning of the loop."""
        if not self._begun:
            self._begun = True
            self._on_begin()
        return await super().export(plan)

    async def train(self, batch: TrainBatch, step: int) -> StepResult:
        """One optimizer step; the node is lost in the one that was asked for."""
        if self._loss and step == self._loss.step:
            self.lost_at = time.perf_counter()
            self._on_loss()
        return await super().train(batch, step)

    async def close(self) -> None:
        """Look who never answered, and end the processes."""
        if self.workers and self.unanswered is None:
            self.unanswered = self.asked.unanswered()
        await super().close()
