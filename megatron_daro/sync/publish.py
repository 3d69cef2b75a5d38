"""Weight sync, step by step: the policy exports, an engine receives, and both are compared.

A receiver is whatever holds a copy of the weights: a server, a replica of the embedded engine, or an engine of your
own. The controller publishes before the first batch and after every batch; the engine asks for another sync when a
receiver comes back, unless policy and engine share GPUs. The policy exports what a plan says and scores probes; the
engine prepares receivers, installs what arrives, compares checksums where it has them, and answers probes; this file
has check.py judge whether a receiver's log-probs are those of the new weights. A receiver that is not known to have the
weights of its version does not generate.

GPUs that the policy and the engine share: colocation.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import numpy as np

from megatron_daro.errors import LostReceiversError, LostSenderError, SyncError
from megatron_daro.rollout.protocol import Engine, Policy
from megatron_daro.sync.check import ProbeAnswer, UpdateCheck
from megatron_daro.sync.plan import SendPlan, SendReport, WeightFiles
from megatron_daro.types import Rollout

_TRIES = 3


class WeightExporter(Protocol):
    """What a weight sync needs of the policy. All methods raise WorkerError if a rank died and is not replaced."""

    version: int
    """Of the weights: the number of the last optimizer step. Set by `WeightSync.publish`, and by each step."""

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Keep the weights unchanged within the block; the calls below are allowed only there."""
        ...

    async def export(self, plan: SendPlan) -> SendReport:
        """Send everything as the plan says. What receivers did not get is reported, not raised. SyncError: the ranks
        cannot send what the plan asks for; LostSenderError: a rank died meanwhile, and was replaced."""
        ...

    async def write(self, files: WeightFiles) -> SendReport:
        """Write a checkpoint, whole or not at all. SyncError: the disk refused."""
        ...

    async def logprobs_of(
        self, rollouts: Sequence[Rollout], *, temperature: float, base: bool = False
    ) -> list[np.ndarray]:
        """Return float32 [R] log-probs of each rollout's response under these weights; base: without adapters."""
        ...


class ReceiverUpdate(Protocol):
    """One update of some receivers. WeightSync calls the steps in this order. A step gives up the receivers that fail
    it, or raises SyncError; after a SyncError `abandon` is the last call."""

    async def prepare(self) -> SendPlan | WeightFiles | None:
        """Stop generation and open the update. Returns what to send to whom, or what to write; None if no receiver is
        left. Called up to three times: again after `blame`, and after the sender lost a rank."""
        ...

    async def blame(self, report: SendReport) -> None:
        """Give up the receivers that caused a failed send. The others are prepared again and sent everything again,
        unless `report.apart`: then they have everything already."""
        ...

    async def install(self, report: SendReport) -> None:
        """Put what arrived into place, under the new version. A receiver may generate for the probe, but serves no
        other requests before `accept`."""
        ...

    async def accept(self) -> Mapping[str, float]:
        """Let the remaining receivers serve. Returns metrics. If nothing was installed, because no receiver was left or
        every send failed, it is called too, and must raise the reason. SyncError: no receiver is left;
        LostReceiversError: none is left, but one may come back."""
        ...

    def abandon(self, error: SyncError) -> None:
        """Make sure that no receiver generates with unknown weights."""
        ...


@runtime_checkable
class ProbedUpdate(Protocol):
    """A ReceiverUpdate whose receivers are probed before they serve: asked for log-probs of a fixed text."""

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Return each receiver's answer, by name; empty if probing is off."""
        ...

    def reject(self, name: str, reason: str) -> None:
        """Give up this receiver: its weights are not the policy's."""
        ...


class WeightInstaller(Protocol):
    """The side of an engine that puts weights into its receivers."""

    def begin_update(self, version: int, only: str | None = None) -> ReceiverUpdate | None:
        """Begin an update of all receivers, or, with `only`, of the receiver of this name that came back. Returns None
        if that one no longer waits for weights.

        Raises:
            EngineError: the engine is not running. WorkerError: its processes died too often.
        """
        ...

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Call `call` with the name of each receiver that comes back, except where it gets its weights by the next
        update of all."""
        ...


class ExportingPolicy(Policy, WeightExporter, Protocol):
    """A policy that is trained, and exports its weights."""


class ReceivingEngine(Engine, WeightInstaller, Protocol):
    """An engine that generates, and whose receivers get weights."""


class WeightSync:
    """Brings the weights of one policy to one engine."""

    def __init__(self, policy: WeightExporter, engine: WeightInstaller) -> None:
        """Register for receivers that come back; send nothing yet."""
        self._policy, self._engine = policy, engine
        self._check = UpdateCheck()
        self._one_at_a_time = asyncio.Lock()
        self._published = False
        engine.when_back(self._catch_up)

    async def publish(self, version: int) -> Mapping[str, float]:
        """Make the engine generate with the policy's weights, under this version. If all receivers are lost meanwhile
        but some may come back, the update is repeated for these, up to three updates in all. Returns metrics.

        Raises:
            SyncError: they could not be sent or written, or no receiver took them. EngineError, WorkerError: all are
                gone.
        """
        async with self._one_at_a_time, self._policy.hold():
            self._policy.version = version
            self._published = True
            for _ in range(_TRIES - 1):
                with contextlib.suppress(LostReceiversError):
                    return await self._to_all(version)
            return await self._to_all(version)

    async def _to_all(self, version: int) -> Mapping[str, float]:
        update = self._engine.begin_update(version)
        assert update is not None, "an update of all receivers is one"
        return await self._run(update)

    async def _catch_up(self, name: str) -> None:
        """Give a receiver that came back the current weights."""
        if not self._published:
            return
        async with self._one_at_a_time, self._policy.hold():
            update = self._engine.begin_update(self._policy.version, only=name)
            if update is not None:
                with contextlib.suppress(SyncError):  # it was given up again, and the engine knows why
                    await self._run(update)

    async def _run(self, update: ReceiverUpdate) -> Mapping[str, float]:
        try:
            report = await self._sent(update)
            metrics: Mapping[str, float] = {}
            if report is not None:
                await update.install(report)
                metrics = await self._compared(update, report)
            accepted = await update.accept()
            if report is None:
                raise SyncError("no receiver has the weights, and the engine did not say so: its `accept` must raise")
            return {**accepted, **metrics}
        except SyncError as error:
            update.abandon(error)
            raise

    async def _sent(self, update: ReceiverUpdate) -> SendReport | None:
        """Send or write the weights, in up to three tries. Returns the report of a try in which every remaining
        receiver got everything; None if there was none, or no receiver was left."""
        for tried in range(_TRIES):
            plan = await update.prepare()
            if plan is None:
                return None
            if isinstance(plan, WeightFiles):
                return await self._policy.write(plan)
            try:
                report = await self._policy.export(plan)
            except LostSenderError:  # the rank's replacement has the weights: prepare the receivers and send again
                if tried == _TRIES - 1:
                    raise
                continue
            if not report.failures:
                return report
            await update.blame(report)
            if report.apart and len(report.failures) < len(plan.targets):
                return report
        return None

    async def _compared(self, update: ReceiverUpdate, report: SendReport) -> Mapping[str, float]:
        """Reject receivers whose answers do not come from the policy's new weights. Returns metrics."""
        if not isinstance(update, ProbedUpdate) or not (answers := await update.probe()):
            return {}
        scores, base_R = await self._scores(answers), None
        if any(answer.base_R is not None for answer in answers.values()):
            fixed = next(iter(answers.values())).fixed
            (base_R,) = await self._policy.logprobs_of([fixed], temperature=1.0, base=True)
        outcome = self._check.judge(answers, scores, report.digests, base_R)
        for name, reason in outcome.rejected.items():
            update.reject(name, reason)
        return {"sync/verified": float(len(outcome.verified))}

    async def _scores(self, answers: Mapping[str, ProbeAnswer]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return name -> the policy's log-probs of (fixed tokens, sampled tokens)."""
        fixed = next(iter(answers.values())).fixed
        sampled, temperature = [a.sampled for a in answers.values()], next(iter(answers.values())).temperature
        if temperature == 1.0:
            of_fixed, *of_sampled = await self._policy.logprobs_of([fixed, *sampled], temperature=1.0)
        else:
            (of_fixed,) = await self._policy.logprobs_of([fixed], temperature=1.0)
            of_sampled = await self._policy.logprobs_of(sampled, temperature=temperature)
        return {name: (of_fixed, scores) for name, scores in zip(answers, of_sampled, strict=True)}
