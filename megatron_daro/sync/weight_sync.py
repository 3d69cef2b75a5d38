"""The one way for weights: WeightSync.publish has the policy export and an engine receive, step by step.

Place in the data flow: the controller publishes after every batch; an engine asks for a server that came back. The
policy exports what a plan says and scores probes; the engine prepares its receivers, installs what arrived and answers
probes; what only both together show, whether a receiver really has the new weights, is judged here.
It refuses to let a receiver generate whose weights are not known to be those of its version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np

from megatron_daro.errors import SyncError
from megatron_daro.rollout.protocol import Engine, Policy
from megatron_daro.sync.check import ProbeAnswer, UpdateCheck
from megatron_daro.sync.plan import SendPlan, SendReport
from megatron_daro.types import Rollout

_TRIES = 3


class WeightExporter(Protocol):
    """Whoever has the policy's weights: it only exports."""

    def hold(self, version: int | None = None) -> AbstractAsyncContextManager[int]:
        """While it is held the weights do not change, and the calls below may be made. Yields the weights' version,
        the number of the last optimizer step; `version`, where given, is what they are called from now on."""
        ...

    async def export(self, plan: SendPlan) -> SendReport:
        """Send everything as the plan says. Failures of receivers are reported; SyncError: nothing to give."""
        ...

    async def score(self, rollouts: Sequence[Rollout], *, temperature: float) -> list[np.ndarray]:
        """float32 [R] log-probs of each rollout's response under these weights."""
        ...


class ReceiverUpdate(Protocol):
    """One update of some receivers. WeightSync calls the steps in this order; a receiver that fails one is given up."""

    async def prepare(self) -> SendPlan | None:
        """Stop generation and open the update; what is to be sent to whom. None: no receiver is left."""
        ...

    async def blame(self, report: SendReport) -> None:
        """Give up the receivers whose fault a failed sending is; the others are prepared and sent all again."""
        ...

    async def install(self, report: SendReport) -> None:
        """Put what arrived into place, under the new version, and let receivers generate."""
        ...

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Return what each receiver makes of a fixed prompt; empty where that is not asked for."""
        ...

    def reject(self, name: str, reason: str) -> None:
        """Give this receiver up: its weights are not the policy's."""
        ...

    async def accept(self) -> Mapping[str, float]:
        """Let the receivers that are left serve. Returns metrics. SyncError: none is."""
        ...

    def abandon(self, error: SyncError) -> None:
        """Leaves no receiver generating with weights that nobody knows."""
        ...


class WeightReceiver(Protocol):
    """An engine: it only receives."""

    def update(self, version: int, only: str | None = None) -> ReceiverUpdate | None:
        """Return an update of all receivers, or of the one that came back under this name (None: it does not wait
        any more).

        Raises:
            SyncError: no receiver can take weights. EngineError: the engine is not running.
        """
        ...

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Has `call` called with the name of each receiver that came back and needs weights."""
        ...


class ExportingPolicy(Policy, WeightExporter, Protocol):
    """A policy that is trained, and exports its weights."""


class ReceivingEngine(Engine, WeightReceiver, Protocol):
    """An engine that generates, and receives weights."""


class WeightSync:
    """Brings the weights of one policy to one engine."""

    def __init__(self, policy: WeightExporter, engine: WeightReceiver) -> None:
        """Send nothing."""
        self._policy, self._engine = policy, engine
        self._check = UpdateCheck()
        self._one_at_a_time = asyncio.Lock()
        self._published = False
        engine.when_back(self._catch_up)

    async def publish(self, version: int) -> Mapping[str, float]:
        """Make the engine generate with the policy's weights, under this version. Returns metrics.

        Raises:
            SyncError: no receiver took them. EngineError: all are gone.
        """
        async with self._one_at_a_time, self._policy.hold(version):
            self._published = True
            update = self._engine.update(version)
            assert update is not None, "an update of all receivers is one"
            return await self._run(update)

    async def _catch_up(self, name: str) -> None:
        """Give a receiver that came back the weights as they are now."""
        if not self._published:
            return
        async with self._one_at_a_time, self._policy.hold() as version:
            update = self._engine.update(version, only=name)
            if update is not None:
                self._check.restarted(name)
                with contextlib.suppress(SyncError):  # it was given up again, and the engine knows why
                    await self._run(update)

    async def _run(self, update: ReceiverUpdate) -> Mapping[str, float]:
        try:
            report = await self._sent(update)
            told: Mapping[str, float] = {}
            if report is not None:
                await update.install(report)
                told = await self._compared(update, report)
            return {**await update.accept(), **told}
        except SyncError as error:
            update.abandon(error)
            raise

    async def _sent(self, update: ReceiverUpdate) -> SendReport | None:
        """Return the report of a sending that went well for all who are left; None where there was none."""
        for _ in range(_TRIES):
            plan = await update.prepare()
            if plan is None:
                return None
            report = await self._policy.export(plan)
            if not report.failures:
                return report
            await update.blame(report)
        return None

    async def _compared(self, update: ReceiverUpdate, report: SendReport) -> Mapping[str, float]:
        """Receivers whose answers are not those of the policy's new weights are rejected. Returns metrics."""
        answers = await update.probe()
        if not answers:
            return {}
        outcome = self._check.judge(answers, await self._scores(answers), report.digests)
        for name, reason in outcome.rejected.items():
            update.reject(name, reason)
        return {"sync/verified": float(len(outcome.verified))}

    async def _scores(self, answers: Mapping[str, ProbeAnswer]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> the policy's log-probs of (fixed tokens, sampled tokens)."""
        fixed = next(iter(answers.values())).fixed
        sampled, temperature = [a.sampled for a in answers.values()], next(iter(answers.values())).temperature
        if temperature == 1.0:
            of_fixed, *of_sampled = await self._policy.score([fixed, *sampled], temperature=1.0)
        else:
            (of_fixed,) = await self._policy.score([fixed], temperature=1.0)
            of_sampled = await self._policy.score(sampled, temperature=temperature)
        return {name: (of_fixed, scores) for name, scores in zip(answers, of_sampled, strict=True)}
