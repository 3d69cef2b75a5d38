"""Weight sync, step by step: the policy exports, an engine receives, and both are compared.

The controller publishes before the first batch and after every batch; an engine asks for it when a receiver comes back,
unless policy and engine share GPUs. The policy exports what a plan says and scores probes, the engine prepares
receivers, installs what arrives, compares checksums where it has them, and answers probes; whether a receiver's
log-probs are those of the new weights is judged here. A receiver whose weights are not known to be those of its version
does not generate. A receiver is what has weights of its own: a server, a replica of the embedded engine, or an engine
of one's own.

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
    """Whoever has the policy's weights: it only exports. WorkerError: a rank died and is not replaced."""

    def hold(self, new_version: int | None = None) -> AbstractAsyncContextManager[int]:
        """While it is held the weights do not change, and the calls below may be made. Yields the weights' version,
        the number of the last optimizer step; `new_version`, where given, is what they are called from now on."""
        ...

    async def export(self, plan: SendPlan) -> SendReport:
        """Send everything as the plan says. Failures of receivers are reported. SyncError: the weights cannot go this
        way; LostSenderError: a rank died meanwhile, and was replaced."""
        ...

    async def write(self, files: WeightFiles) -> SendReport:
        """Write a checkpoint, whole or not at all. SyncError: the disk refused."""
        ...

    async def logprobs_of(
        self, rollouts: Sequence[Rollout], *, temperature: float, base: bool = False
    ) -> list[np.ndarray]:
        """float32 [R] log-probs of each rollout's response under these weights; base: without adapters."""
        ...


class ReceiverUpdate(Protocol):
    """One update of some receivers. WeightSync calls the steps in this order. A receiver that fails one is given up, or
    the step raises SyncError; then `abandon` is the last call."""

    async def prepare(self) -> SendPlan | WeightFiles | None:
        """Stop generation and open the update; what is to be sent to whom, or written. None: no receiver is left.
        Called up to three times: again after `blame`, and where the sender lost a rank."""
        ...

    async def blame(self, report: SendReport) -> None:
        """Give up the receivers whose fault a failed sending is; the others are prepared and sent all again, unless
        failures are apart: then these have everything."""
        ...

    async def install(self, report: SendReport) -> None:
        """Put what arrived into place, under the new version. A receiver may generate for the probe, but serves nobody
        before `accept`."""
        ...

    async def accept(self) -> Mapping[str, float]:
        """Let the receivers that are left serve. Returns metrics. Also called where nothing was installed, to say why:
        nobody was left to be sent to, or each sending failed. SyncError: no receiver is left; LostReceiversError: but
        one may come back."""
        ...

    def abandon(self, error: SyncError) -> None:
        """Leaves no receiver generating with weights that nobody knows."""
        ...


@runtime_checkable
class ProbedUpdate(Protocol):
    """A ReceiverUpdate whose receivers are asked, before they serve, what their new weights make of a fixed prompt."""

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Return what each receiver makes of it; empty where that is not asked for."""
        ...

    def reject(self, name: str, reason: str) -> None:
        """Give this receiver up: its weights are not the policy's."""
        ...


class WeightInstaller(Protocol):
    """An engine, whose receivers get weights."""

    def begin_update(self, version: int, only: str | None = None) -> ReceiverUpdate | None:
        """Begin an update of all receivers, or of the one that came back under this name (None: it does not wait any
        more).

        Raises:
            EngineError: the engine is not running. WorkerError: its processes died too often.
        """
        ...

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Call `call` with the name of each receiver that comes back, unless the next update brings the weights."""
        ...


class ExportingPolicy(Policy, WeightExporter, Protocol):
    """A policy that is trained, and exports its weights."""


class ReceivingEngine(Engine, WeightInstaller, Protocol):
    """An engine that generates, and whose receivers get weights."""


class WeightSync:
    """Brings the weights of one policy to one engine."""

    def __init__(self, policy: WeightExporter, engine: WeightInstaller) -> None:
        """Send nothing."""
        self._policy, self._engine = policy, engine
        self._check = UpdateCheck()
        self._one_at_a_time = asyncio.Lock()
        self._published = False
        engine.when_back(self._catch_up)

    async def publish(self, version: int) -> Mapping[str, float]:
        """Make the engine generate with the policy's weights, under this version. Where all receivers are lost
        meanwhile, those that came back get them in another update, up to the third. Returns metrics.

        Raises:
            SyncError: no receiver took them. EngineError, WorkerError: all are gone.
        """
        async with self._one_at_a_time, self._policy.hold(new_version=version):
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
        """Give a receiver that came back the weights as they are now."""
        if not self._published:
            return
        async with self._one_at_a_time, self._policy.hold() as version:
            update = self._engine.begin_update(version, only=name)
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
        """Return the report of a sending that went well for all who are left, in up to three tries; None where there
        was none."""
        for tried in range(_TRIES):
            plan = await update.prepare()
            if plan is None:
                return None
            if isinstance(plan, WeightFiles):
                return await self._policy.write(plan)
            try:
                report = await self._policy.export(plan)
            except LostSenderError:  # the weights are there again: receivers are prepared and sent all again
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
        """Receivers whose answers are not those of the policy's new weights are rejected. Returns metrics."""
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
        """Name -> the policy's log-probs of (fixed tokens, sampled tokens)."""
        fixed = next(iter(answers.values())).fixed
        sampled, temperature = [a.sampled for a in answers.values()], next(iter(answers.values())).temperature
        if temperature == 1.0:
            of_fixed, *of_sampled = await self._policy.logprobs_of([fixed, *sampled], temperature=1.0)
        else:
            (of_fixed,) = await self._policy.logprobs_of([fixed], temperature=1.0)
            of_sampled = await self._policy.logprobs_of(sampled, temperature=temperature)
        return {name: (of_fixed, scores) for name, scores in zip(answers, of_sampled, strict=True)}
