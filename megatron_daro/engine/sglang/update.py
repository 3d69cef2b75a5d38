"""One weight update of some servers as a transaction: a server completes all of it, or is fenced.

WeightSync runs one update at a time, step by step; the policy's ranks send in between. The phases of each step:

    begin     the servers get no requests from now on
    prepare   take the memory of the weights (if the trainer shares GPUs), pause, begin
    (send)    if it fails: blame
    install   end, flush the cache, compare which matrices are fp8 blocks (of a new server), compare checksums, set the
              version, take the memory of the cache (as above), continue
    probe     reject servers whose answers do not come from the policy's weights
    accept    the remaining servers serve

What prepare and install do with a server, and the transports that differ from this: receiving.py.

A server that fails a phase leaves the update and is fenced. If sending fails, which breaks a broadcast's group for all,
the servers at fault are fenced and the others get everything again from the beginning; from shards to shards, and with
adapters, the others have everything and go on. No server ever serves with weights that are mixed or unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_daro.config.sections import CPU_BUCKET_MIB, GPU_BUCKET_MIB, SGLangSection
from megatron_daro.engine.sglang.adapters import Adapters
from megatron_daro.engine.sglang.client import DisconnectedError
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.receiving import Receiving, answers, facts_of
from megatron_daro.errors import EngineError, LostReceiversError, SyncError
from megatron_daro.sync.check import ProbeAnswer
from megatron_daro.sync.plan import SendPlan, SendReport, Target, WeightFiles

_ALIVE_S = 5.0


class Probe(Protocol):
    """Sends a server the probe and returns its answer. verified: its checksums were right."""

    async def __call__(self, server: Server, verified: bool) -> ProbeAnswer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParts:
    """What the updates of one fleet have in common.

    receiving: weight version -> the servers' end of an update. probe: probes a server. death_of: why the process of a
    server that cannot be reached is gone. adapters: unloads those that servers no longer need. metrics: of the engine.
    warn: shows a warning.
    """

    fleet: Fleet
    options: SGLangSection
    receiving: Callable[[int], Receiving]
    probe: Probe
    death_of: Callable[[Server], Awaitable[str]]
    adapters: Adapters
    metrics: Callable[[], Mapping[str, float]]
    warn: Callable[[str], None]


class ServerUpdate:
    """An update of these servers, begun by `SGLangEngine.begin_update`; the other methods are the steps that WeightSync
    calls."""

    def __init__(
        self, parts: UpdateParts, servers: Sequence[Server], version: int, *, awaits_others: bool = False
    ) -> None:
        """Args: servers: in state serving or joining. version: of the weights. awaits_others: if no server is left,
        `prepare` waits for servers that are being restarted, and takes them in."""
        self._parts, self._servers, self._version = parts, list(servers), version
        self._awaits_others = awaits_others
        self._fleet, self._options = parts.fleet, parts.options
        self.receiving = parts.receiving(version)
        self._report: SendReport | None = None
        self._fresh: frozenset[str] = frozenset()  # servers whose process gets its first weights in this update

    def begin(self) -> None:
        """Take the servers out of service: they get no requests until they are accepted."""
        for server in self._servers:
            self._fleet.begin_update(server)

    async def prepare(self) -> SendPlan | WeightFiles | None:
        """Pause the servers and open the update on them. Returns what to send to whom, or what to write; None if no
        server is left."""
        servers = await self._opened()
        while not servers and self._awaits_others and self._fleet.awaits():
            self._take_in(await self._fleet.returned())
            servers = await self._opened()
        if not servers:
            return None
        plan = SendPlan(
            transport=self._options.sync,
            targets=tuple(Target(one.name, one.url, facts_of(one).tensor_parallel) for one in servers),
            bucket_bytes=self._bucket_bytes(),
            timeout_s=self._options.sync_timeout_s,
            digest_dtype=facts_of(servers[0]).dtype if self._options.verify else "",
            fp8_blocks=self.receiving.fp8_blocks,
        )
        return await self.receiving.planned(plan)

    async def blame(self, report: SendReport) -> None:
        """Fence the servers that caused a failed send, and those that cannot take part in another one. The others lack
        something through no fault of their own, or, if failures are independent (`report.apart`), lack nothing."""
        if report.apart:
            await self._fence_each(report)
            return

        async def judge(server: Server) -> None:
            failure = report.failures.get(server.name)
            if not await answers(server.client.model_info(timeout_s=_ALIVE_S)):
                await self._fence(server, "send", failure or "it does not answer", may_be_dead=True)
            elif failure and failure.kind == "refused":
                self._fleet.fence(server, f"weight update, send: {failure} Does it serve the model of model.path?")
            elif held_up := await self.receiving.held_up(server):
                why = f"{held_up} ({failure or 'another server failed'})"
                await self._fence(server, "send", why, may_be_dead=True)  # one of its other parts may be dead

        await asyncio.gather(*map(judge, self._taking_part()))
        others = ", ".join(server.name for server in self._taking_part()) or "none"
        all_said = "; ".join(f"{name}: {failure}" for name, failure in report.failures.items())
        self._parts.warn(f"a weight update failed while sending ({all_said}); still taking part: {others}")
        for server in self._taking_part():
            server.reason = f"weight update, send: {report.failures.get(server.name, 'another server failed')}"

    async def _fence_each(self, report: SendReport) -> None:
        """Fence the servers that have a failure in the report."""
        failed = [server for server in self._taking_part() if server.name in report.failures]
        failures = [report.failures[server.name] for server in failed]
        await asyncio.gather(
            *(self._fence(s, "send", f, may_be_dead=f.kind != "refused") for s, f in zip(failed, failures, strict=True))
        )

    async def install(self, report: SendReport) -> None:
        """Run the phases between the arrival of the weights and the first request."""
        self._report = report
        self._fresh = frozenset(server.name for server in self._taking_part() if not server.versions)
        async for name, work in self.receiving.installing(report):
            await self._phase(name, work)

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Return each server's answer to the probe; empty unless engine.sglang.verify is set."""
        by_name: dict[str, ProbeAnswer] = {}

        async def ask(server: Server) -> None:
            answer = await self._parts.probe(server, server.name in self.receiving.verified)
            by_name[server.name] = replace(answer, fresh=server.name in self._fresh)

        if self._options.verify:
            await self._phase("probe", ask)
        return by_name

    def reject(self, name: str, reason: str) -> None:
        """Fence a server whose answer to the probe does not come from the policy's weights."""
        for server in self._taking_part():
            if server.name == name:
                self._fleet.fence(server, f"weight update, probe: {reason}")

    async def accept(self) -> Mapping[str, float]:
        """Let the remaining servers serve. Returns `sync/*`, `timing/sync_send_s` and `engine/*`. Raises SyncError: no
        server is left; LostReceiversError: none is left, but one may come back."""
        report = self._report
        done = self._taking_part() if report else []
        for server in done:
            self._parts.adapters.unload_unused(server)
            self._fleet.serve(server, self._version)
        if report is None or not done:
            reasons = "; ".join(f"{server.name}: {server.reason}" for server in self._servers)
            kind = LostReceiversError if self._fleet.awaits() else SyncError
            raise kind(f"no SGLang server took the weights of version {self._version} ({reasons})")
        return {
            "sync/bytes": float(report.num_bytes),
            "sync/servers": float(len(done)),
            "timing/sync_send_s": report.send_s,
            **self._parts.metrics(),
        }

    def abandon(self, error: SyncError) -> None:
        """Fence all that take part: they may be paused, and nothing would resume them."""
        for server in self._taking_part():
            self._fleet.fence(server, server.reason or f"weight update: {error}")

    async def _opened(self) -> list[Server]:
        """Open the update on all that take part; return those that did not fail."""
        for name, work in self.receiving.opening():
            await self._phase(name, work)
        return self._taking_part()

    def _take_in(self, servers: Sequence[Server]) -> None:
        for server in servers:
            self._servers.append(server)
            self._fleet.begin_update(server)

    def _taking_part(self) -> list[Server]:
        """Return the servers that were not fenced since the update began."""
        return [server for server in self._servers if server.state == "updating"]

    async def _phase(self, name: str, work: Callable[[Server], Awaitable[object]]) -> None:
        """Do this work on every server at once; fence those that fail."""

        async def one(server: Server) -> None:
            try:
                await work(server)
            except EngineError as error:
                await self._fence(server, name, error, may_be_dead=isinstance(error, DisconnectedError))

        await asyncio.gather(*(one(server) for server in self._taking_part()))

    async def _fence(self, server: Server, phase: str, failure: object, *, may_be_dead: bool) -> None:
        """Fence a server. If its process is gone, that is the reason: its log says more than a broken connection."""
        death = await self._parts.death_of(server) if may_be_dead else ""
        if server.state == "updating":
            self._fleet.fence(server, f"weight update, {phase}: {death or failure}")

    def _bucket_bytes(self) -> int:
        on_cpu = all(facts_of(server).device == "cpu" for server in self._taking_part())
        return (self._options.bucket_mib or (CPU_BUCKET_MIB if on_cpu else GPU_BUCKET_MIB)) * 2**20
