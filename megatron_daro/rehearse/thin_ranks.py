"""The run's policy group over thin ranks: every call to every rank is made, but a few processes answer them.

Place in the data flow: in the place of runtime/policy_group.py's start and end; all else of it is inherited. Knows at
the end which ranks died and which never answered.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from megatron_daro.rehearse.nodes import NodeMap
from megatron_daro.rehearse.thin_actor import Script, ThinRanksActor
from megatron_daro.runtime.calls import gather
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.worker_group import WorkerGroup
from megatron_daro.runtime.workers import Place
from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.types import StepResult, TrainBatch

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
    except RayActorError:
        return True
    except RayError:
        return False
    return False


class RankHandle:
    """What a Ray handle is to a rank: `handle.method.remote(...)`."""

    def __init__(self, host: ActorHandle, rank: int, asked: _Asked) -> None:
        self._host, self._rank, self._asked = host, rank, asked

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(getattr(self._host, name), name, self._rank, self._asked)


class _Remote(Protocol):
    def remote(self, *arguments: object, **named: object) -> ray.ObjectRef: ...


class _Method:
    def __init__(self, method: _Remote, name: str, rank: int, asked: _Asked) -> None:
        self._method, self._name, self._rank, self._asked = method, name, rank, asked

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
        make: Any = ThinRanksActor
        hosts = [make.remote(script) for _ in range(HOSTS)]
        own: Any = None
        if self._loss and lost:
            own = make.remote(dataclasses.replace(script, own_loss=self._loss.how))
        everyone = [*hosts, *([own] if own else [])]
        self.workers = ThinWorkers(everyone)
        self.workers.update(
            {
                f"actor rank {rank}": RankHandle(own if rank in lost else hosts[node % HOSTS], rank, self.asked)
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
