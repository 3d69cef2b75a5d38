"""One weight update of some servers as a transaction: all of it happened on a server, or the server is fenced.

Place in the data flow: the engine runs one at a time; a WeightSource sends. Phases: pause, begin, send, end, flush the
cache, compare checksums, set the version, continue, compare log-probs. A server that fails a phase leaves the update
and is fenced; if sending fails, which breaks the group for all, the guilty ones are fenced and the others get
everything again from the beginning. It never lets a server serve with weights that are mixed or unknown.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.client import DisconnectedError, RefusedError, SGLangClient, UnreachableError
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.sync.source import BroadcastPlan, SendReport, Target, WeightSource, is_hashed
from megatron_daro.types import Rollout

_TRIES = 3
_ALIVE_S = 5.0
# Unless set. On a CPU small ones are fast, whose memory is used again at once; elsewhere each costs a round trip.
CPU_BUCKET_MIB, GPU_BUCKET_MIB = 64, 256
_FLUSHES, _FLUSH_PAUSE_S = 20, 0.25
# Answers of one server to the probe; enough tokens that weights of another step show, few enough to cost nothing.
PROBE_TOKENS = 16
# Largest difference that two right implementations have: fp32 differs by order of summation (1e-5 measured), bf16
# by rounding of every layer (0.06 measured on tiny models).
_PROBE_TOLERANCE = {"float32": 1e-3}
_PROBE_TOLERANCE_ELSE = 1.0
_FUSED = ("qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts")


class Probe(Protocol):
    """Asks a server for an answer to a fixed prompt."""

    async def __call__(self, server: Server) -> Rollout: ...


class WeightUpdate:
    """Updates servers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        options: SGLangSection,
        *,
        sync_dir: Path,
        probe: Probe,
        warn: Callable[[str], None],
    ) -> None:
        """Args: sync_dir: where sync disk writes. probe: asks a server. warn: tells a person."""
        self._fleet, self._options, self._sync_dir = fleet, options, sync_dir
        self._probe, self._warn = probe, warn
        self._files = itertools.count()
        self._written: list[Path] = []

    async def run(self, servers: Sequence[Server], source: WeightSource, version: int) -> Mapping[str, float]:
        """Gives the source's weights to these servers; those that fail are fenced.

        Args:
            servers: in state serving or joining. source: held by the caller. version: what they are stamped with.

        Returns:
            Metrics: `sync/*` and `timing/sync_send_s`.

        Raises:
            SyncError: no server took the weights; the message has what each said. Or the source has none to give: all
                servers are fenced then, since they are paused and nobody would wake them.
        """
        for server in servers:
            server.reason = ""
            self._fleet.set_state(server, "updating")
        try:
            return await self._run(servers, source, version)
        except SyncError as error:
            for server in _taking_part(servers):
                self._fleet.fence(server, server.reason or f"weight update: {error}")
            raise

    async def _run(self, servers: Sequence[Server], source: WeightSource, version: int) -> Mapping[str, float]:
        report = SendReport()
        for _ in range(_TRIES):
            await self._phase("pause", servers, self._pause)
            await self._phase("begin", servers, self._begin)
            report = await self._send(_taking_part(servers), source, version)
            if not report.failures:
                await self._finish(servers, report, source, version)
                break
            await self._fence_guilty(_taking_part(servers), report)
        done = [server for server in servers if server.state == "serving"]
        if not done:
            reasons = "; ".join(f"{server.name}: {server.reason}" for server in servers)
            raise SyncError(f"no SGLang server took the weights of version {version} ({reasons})")
        return _metrics(report, len(done))

    async def _finish(self, servers: Sequence[Server], report: SendReport, source: WeightSource, version: int) -> None:
        """Everything after the weights arrived."""
        await self._phase("end", servers, self._end)
        await self._phase("flush the cache", servers, self._flush)
        if self._options.verify:
            await self._compare_checksums(_taking_part(servers), report)
        await self._phase("set the version", servers, lambda server: self._stamp(server, version))
        await self._phase("continue", servers, self._continue)
        if self._options.verify:
            await self._compare_logprobs(_taking_part(servers), source)
        for server in _taking_part(servers):
            server.version = version
            self._fleet.set_state(server, "serving")

    async def _phase(self, name: str, servers: Sequence[Server], work: Callable[[Server], Any]) -> None:
        """The same on every server at once; those that fail are fenced."""

        async def one(server: Server) -> None:
            try:
                await work(server)
            except EngineError as error:
                self._fleet.fence(server, f"weight update, {name}: {error}")

        await asyncio.gather(*(one(server) for server in _taking_part(servers)))

    async def _post(self, server: Server, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return await server.client.post(path, body, timeout_s=self._options.sync_timeout_s)
        except DisconnectedError:  # a kept connection that the server had closed; all of these may be said twice
            return await server.client.post(path, body, timeout_s=self._options.sync_timeout_s)

    async def _pause(self, server: Server) -> None:
        # Where nothing runs the modes differ in one thing: only in "abort" does the paused scheduler wait for work; in
        # the others it asks for work without a rest, on a core that the sender of the weights may need (0.5.23).
        running = any(other.tokens_in_flight for other in self._fleet.servers)
        await self._post(server, "/pause_generation", {"mode": self._options.pause if running else "abort"})

    async def _begin(self, server: Server) -> None:
        if self._options.sync == "disk" or not _facts(server).has_sessions:
            return
        try:
            await self._post(server, "/begin_weight_update")
        except RefusedError:  # one is open already: that of an update whose sending failed
            await self._post(server, "/end_weight_update")
            await self._post(server, "/begin_weight_update")

    async def _end(self, server: Server) -> None:
        if self._options.sync != "disk" and _facts(server).has_sessions:
            await self._post(server, "/end_weight_update")

    async def _flush(self, server: Server) -> None:
        """Empties the cache that the old weights made. 0.5.20 refuses while retracted requests wait: these are ended
        then, and come back to the engine, which goes on with them from where they were. Paused in place, a server
        refuses while anything runs, and keeps what the old weights read: later requests do not find it, since each
        looks under the key of its weight version."""
        for _ in range(_FLUSHES):
            try:
                await self._post(server, "/flush_cache")
                return
            except RefusedError:
                if self._options.pause == "in_place":
                    return
            await self._post(server, "/abort_request", {"abort_all": True})
            await asyncio.sleep(_FLUSH_PAUSE_S)
        raise RefusedError(f"{server.url}/flush_cache: refused {_FLUSHES} times, also after its requests were ended")

    async def _stamp(self, server: Server, version: int) -> None:
        server.versions.add(version)  # before answers can carry it
        await self._post(server, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def _continue(self, server: Server) -> None:
        await self._post(server, "/continue_generation")

    async def _send(self, servers: Sequence[Server], source: WeightSource, version: int) -> SendReport:
        if not servers:
            return SendReport()
        if self._options.sync == "disk":
            return await self._send_files(servers, source, version)
        plan = self._plan(servers)
        return await (source.broadcast(plan) if self._options.sync == "distributed" else source.push(plan))

    def _plan(self, servers: Sequence[Server]) -> BroadcastPlan:
        targets, offset = [], 1
        for server in servers:
            ranks = _facts(server).tensor_parallel
            targets.append(Target(server.name, server.url, offset, ranks))
            offset += ranks
        hashed = self._options.verify and any(_hashes_alike(server) for server in servers)
        bucket_bytes = self._bucket_bytes(servers)
        return BroadcastPlan(tuple(targets), bucket_bytes, self._options.sync_timeout_s, checksums=hashed)

    def _bucket_bytes(self, servers: Sequence[Server]) -> int:
        on_cpu = all(_facts(server).device == "cpu" for server in servers)
        return (self._options.bucket_mib or (CPU_BUCKET_MIB if on_cpu else GPU_BUCKET_MIB)) * 2**20

    async def _send_files(self, servers: Sequence[Server], source: WeightSource, version: int) -> SendReport:
        """Sync by disk: written once, read by all. Files before the last are removed."""
        directory = self._sync_dir / f"version_{version:06d}-{next(self._files)}"
        report = await source.write(directory, self._bucket_bytes(servers))
        self._written.append(directory)
        body = {"model_path": str(directory.absolute()), "flush_cache": False}
        await self._phase(
            "read the files", servers, lambda server: self._post(server, "/update_weights_from_disk", body)
        )
        while len(self._written) > 1:
            await asyncio.to_thread(_remove, self._written.pop(0))
        return report

    async def _fence_guilty(self, servers: Sequence[Server], report: SendReport) -> None:
        """Fences those whose fault a failed sending is. All others only saw the group end."""

        async def alive(server: Server) -> bool:
            try:
                await server.client.model_info(timeout_s=_ALIVE_S)
            except UnreachableError:
                return False
            except RefusedError:  # an answer, too
                return True
            return True

        answering = await asyncio.gather(*(alive(server) for server in servers))
        guilty = [server for server, answers in zip(servers, answering, strict=True) if not answers]
        for server in guilty:
            self._fleet.fence(server, f"weight update, send: {report.failures.get(server.name, 'it does not answer')}")
        for server in _taking_part(servers):
            said = report.failures.get(server.name, "")
            if _own_fault(said):
                self._fleet.fence(server, f"weight update, send: {said} Does it serve the model of model.path?")
        others = ", ".join(server.name for server in _taking_part(servers)) or "none"
        all_said = "; ".join(f"{name}: {text}" for name, text in report.failures.items())
        self._warn(f"a weight update failed while sending ({all_said}); sent again from the beginning to: {others}")
        for server in _taking_part(servers):
            server.reason = f"weight update, send: {report.failures.get(server.name, 'the group ended')}"

    async def _compare_checksums(self, servers: Sequence[Server], report: SendReport) -> None:
        """Servers that hash like the sender must have the sender's checksums; all must agree among themselves."""

        async def compare(server: Server) -> None:
            told = await self._checksums(server)
            if told is None or not _hashes_alike(server):
                return
            wrong = [
                name
                for name, (dtype, digest) in report.checksums.items()
                if dtype == _facts(server).dtype and told.get(name, digest) != digest
            ]
            if wrong:
                raise EngineError(f"{len(wrong)} tensors are not those that were sent, the first: {wrong[0]}")

        if report.checksums:
            await self._phase("compare checksums", servers, compare)

    async def _checksums(self, server: Server) -> Mapping[str, str] | None:
        """The server's checksums of unfused tensors; None where it cannot tell (0.5.21 refuses)."""
        if not _facts(server).has_checksums:
            return None
        try:
            answer = await self._post(
                server, "/weights_checker", {"action": "checksum", "skip_tensor_list": list(_FUSED)}
            )
        except RefusedError:
            return None
        try:
            told = answer["ranks"][0]["checksums"]
            return {name: digest for name, digest in told.items() if is_hashed(name)}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"{server.url}/weights_checker: the answer has another form: {error!r}") from error

    async def _compare_logprobs(self, servers: Sequence[Server], source: WeightSource) -> None:
        """Each server answers a fixed prompt; its log-probs must be the source's."""
        answers: dict[str, Rollout] = {}

        async def ask(server: Server) -> None:
            answers[server.name] = await self._probe(server)

        await self._phase("probe", servers, ask)
        asked = [server for server in _taking_part(servers) if server.name in answers]
        expected = await source.score([answers[server.name] for server in asked]) if asked else None
        for server, logprobs_R in zip(asked, expected or [], strict=False):
            worst = float(np.max(np.abs(logprobs_R - answers[server.name].logprobs)))
            allowed = _PROBE_TOLERANCE.get(_facts(server).dtype, _PROBE_TOLERANCE_ELSE)
            if not worst <= allowed:
                self._fleet.fence(
                    server,
                    f"weight update, probe: log-probs of {PROBE_TOKENS} sampled tokens differ from the policy's by up "
                    f"to {worst:.3g}; allowed: {allowed:g} ({_facts(server).dtype or 'unknown dtype'}). "
                    "Does it serve the model of model.path, at the temperature of the request?",
                )


def _own_fault(text: str) -> bool:
    """Whether a refusal is about the weights themselves, not about the group that broke."""
    return "status 4" in text and "receive" not in text.lower() and "process group" not in text.lower()


def _taking_part(servers: Sequence[Server]) -> list[Server]:
    """Those that were not fenced since the update began (one that was may be starting again by now)."""
    return [server for server in servers if server.state == "updating"]


def _facts(server: Server) -> Any:
    assert server.facts is not None, f"{server.name} takes part in an update before it said what it is"
    return server.facts


def _hashes_alike(server: Server) -> bool:
    """Whether the server's checksums are of the bytes as they were sent: on a CPU, unsharded."""
    return _facts(server).device == "cpu" and _facts(server).tensor_parallel == 1


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _metrics(report: SendReport, servers: int) -> dict[str, float]:
    return {
        "sync/bytes": float(report.num_bytes),
        "sync/servers": float(servers),
        "timing/sync_send_s": report.send_s,
    }


async def post_to(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    """One call on a connection of its own: what the exporting ranks hand to their senders."""
    async with SGLangClient(url) as client:
        return await client.post(path, body, timeout_s=timeout_s)
