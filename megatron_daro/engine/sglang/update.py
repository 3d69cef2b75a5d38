"""One weight update of some servers as a transaction: all of it happened on a server, or the server is fenced.

WeightSync runs one at a time, step by step; the policy's ranks send in between. The phases of each step:

    begin     nobody asks the servers for anything
    prepare   take the memory of the weights (where the trainer shares GPUs), pause, begin
    (send)    where it fails: blame
    install   read the files (of sync disk), end, flush the cache, compare which matrices are fp8 blocks (of a new
              server), compare checksums, set the version, take the memory of the cache (as above), continue
    probe     reject those whose answer is not the policy's
    accept    those that are left serve

Of adapters nothing is prepared, and installed is their name: requests that name an older one go on.

A server that fails a phase leaves the update and is fenced; if sending fails, which breaks a broadcast's group for all,
the guilty ones are fenced and the others get everything again from the beginning; from shards to shards, and with
adapters, the others have everything and go on. It never lets a server serve with weights that are mixed or unknown.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_daro.config.sections import CPU_BUCKET_MIB, GPU_BUCKET_MIB, SGLangSection
from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.engine.sglang.adapters import Adapters
from megatron_daro.engine.sglang.client import DisconnectedError, ServerFacts, UnreachableError
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.memory import MemoryTag, resume
from megatron_daro.engine.sglang.replies import BadAnswerError, read_checksums
from megatron_daro.errors import EngineError, LostReceiversError, RefusedError, SyncError
from megatron_daro.sync.check import ProbeAnswer
from megatron_daro.sync.plan import Digest, SendPlan, SendReport, Target, is_hashed

if TYPE_CHECKING:
    from megatron_daro.sync.shard_layouts import ServerLayout

_ALIVE_S = 5.0
# Longest time in which a server does what is still queued on its GPUs, which is at most the loading of one bucket.
_FREE_S = 30.0
_FLUSHES, _FLUSH_PAUSE_S = 20, 0.25


class Probe(Protocol):
    """Asks a server what it makes of the fixed text. verified: its checksums were right."""

    async def __call__(self, server: Server, verified: bool) -> ProbeAnswer: ...


@dataclass(slots=True, kw_only=True)
class UpdateContext:
    """What the updates of one fleet have in common.

    fp8_blocks: names of the matrices that are sent so, with `{layer}` and `{expert}` for numbers. layout: of a server,
    for `sync: shards`. sync_dir: where files are written. probe: asks a server. death_of: why the process of one that
    cannot be reached is gone. metrics: of the engine. warn: shows a warning. written: directories of files, oldest
    first. last_checksums: of each server. adapter: PEFT's configuration of what servers get, where that are adapters;
    adapters: that they have; new_name: that none has yet.
    """

    fleet: Fleet
    options: SGLangSection
    fp8_blocks: tuple[str, ...]
    layout: ServerLayout | None
    sync_dir: Path
    probe: Probe
    death_of: Callable[[Server], Awaitable[str]]
    metrics: Callable[[], Mapping[str, float]]
    warn: Callable[[str], None]
    adapter: Mapping[str, Any]
    adapters: Adapters
    new_name: Callable[[], str]
    files: Iterator[int] = field(default_factory=itertools.count)
    written: list[Path] = field(default_factory=list)
    last_checksums: dict[str, LastChecksums] = field(default_factory=dict)


class ServerUpdate:
    """An update of these servers; its methods are the steps that WeightSync calls."""

    def __init__(
        self, context: UpdateContext, servers: Sequence[Server], version: int, *, awaits_others: bool = False
    ) -> None:
        """Args: servers: in state serving or joining. version: what the weights are stamped with. awaits_others: where
        no server is left, those take part that are started again."""
        self._context, self._servers, self._version = context, list(servers), version
        self._awaits_others = awaits_others
        self._fleet, self._options = context.fleet, context.options
        self._transport = self._options.transport
        self._report: SendReport | None = None
        self._directory: Path | None = None
        self._adapter = ""
        self._verified: set[str] = set()
        self._joining = {server.name for server in servers if server.state == "joining"}

    def begin(self) -> None:
        """Take the servers out of service: they are asked for nothing until they are accepted."""
        for server in self._servers:
            server.reason = ""
            self._fleet.set_state(server, "updating")

    async def prepare(self) -> SendPlan | None:
        """Pause the servers and open the update on them; what is to be sent to whom."""
        servers = await self._opened()
        while not servers and self._awaits_others and (self._fleet.awaits() or self._fleet.of("joining")):
            self._take_in(await self._fleet.returned())
            servers = await self._opened()
        if not servers:
            return None
        if self._transport.checkpoint:
            self._directory = self._context.sync_dir / f"version_{self._version:06d}-{next(self._context.files)}"
        if self._transport.adapters:
            self._adapter = f"{self._context.new_name()}-version-{self._version}"
        targets, offset = [], 1
        for server in servers:
            ranks = _facts(server).tensor_parallel
            targets.append(Target(server.name, server.url, offset, ranks))
            offset += ranks
        return SendPlan(
            transport=self._options.sync,
            targets=tuple(targets),
            bucket_bytes=self._bucket_bytes(),
            timeout_s=self._options.sync_timeout_s,
            digest_dtype=_facts(servers[0]).dtype if self._options.verify and not self._adapter else "",
            directory=self._directory,
            remedy="free space, or set engine.sglang.sync_dir",
            fp8_blocks=self._context.fp8_blocks,
            layout=self._context.layout,
            shards_over=self._options.shards_over,
            what="adapter" if self._adapter else "policy",
            adapter={"lora_name": self._adapter, "config_dict": self._context.adapter},
        )

    async def blame(self, report: SendReport) -> None:
        """Fence those whose fault a failed sending is, and those that cannot take part in another. All others only
        saw the group end; from shards to shards they have everything."""
        if report.apart:
            await self._fence_each(report)
            return

        async def judge(server: Server) -> None:
            failure = report.failures.get(server.name)
            if not await _is_alive(server):
                await self._fence(server, "send", failure or "it does not answer", may_be_dead=True)
            elif failure and failure.kind == "refused":
                self._fleet.fence(server, f"weight update, send: {failure} Does it serve the model of model.path?")
            elif self._transport.collective and not await _is_free(server):
                waits = f"it still waits for the broadcast that broke, after {_FREE_S:g} s"
                why = f"{waits} ({failure or 'another server failed'})"
                await self._fence(server, "send", why, may_be_dead=True)  # of several parts, another one

        await asyncio.gather(*map(judge, self._taking_part()))
        others = ", ".join(server.name for server in self._taking_part()) or "none"
        all_said = "; ".join(f"{name}: {failure}" for name, failure in report.failures.items())
        again = f"sent again from the beginning to: {others}"
        self._context.warn(f"a weight update failed while sending ({all_said}); {again}")
        for server in self._taking_part():
            server.reason = f"weight update, send: {report.failures.get(server.name, 'the group ended')}"

    async def _fence_each(self, report: SendReport) -> None:
        """Fence those that lack something."""
        failed = [server for server in self._taking_part() if server.name in report.failures]
        failures = [report.failures[server.name] for server in failed]
        await asyncio.gather(
            *(self._fence(s, "send", f, may_be_dead=f.kind != "refused") for s, f in zip(failed, failures, strict=True))
        )

    async def install(self, report: SendReport) -> None:
        """Everything after the weights arrived, up to the first request."""
        self._report = report
        if self._adapter:
            for server in self._taking_part():
                server.versions.add(self._version)
                server.adapter = self._adapter
                server.adapters[self._adapter] += 0  # it has it, and no request names it yet
            return
        if self._directory is not None:
            body = {"model_path": str(self._directory.absolute()), "flush_cache": False}
            await self._phase("read the files", lambda server: self._post(server, "/update_weights_from_disk", body))
            await self._remove_older(self._directory)
        await self._phase("end", self._end)
        await self._phase("flush the cache", self._flush)
        if self._context.fp8_blocks:
            await self._phase("compare fp8 blocks", lambda server: self._compare_blocks(server, report.fp8_blocks))
        if report.digests:
            await self._phase("compare checksums", lambda server: self._compare_checksums(server, report.digests))
        await self._phase("set the version", self._stamp)
        await self._phase("take the memory of the cache", lambda server: self._resume(server, "kv_cache", "cuda_graph"))
        await self._phase("continue", self._continue)

    async def probe(self) -> Mapping[str, ProbeAnswer]:
        """Return what each server makes of the fixed text; nothing unless engine.sglang.verify."""
        answers: dict[str, ProbeAnswer] = {}

        async def ask(server: Server) -> None:
            answers[server.name] = await self._context.probe(server, server.name in self._verified)

        if self._options.verify:
            await self._phase("probe", ask)
        return answers

    def reject(self, name: str, reason: str) -> None:
        """Fence a server whose answer to the probe is not the policy's."""
        for server in self._taking_part():
            if server.name == name:
                self._fleet.fence(server, f"weight update, probe: {reason}")

    async def accept(self) -> Mapping[str, float]:
        """Those that are left serve. Returns `sync/*`, `timing/sync_send_s` and `engine/*`. Raises SyncError: none is,
        LostReceiversError: but one may come back."""
        report = self._report
        done = self._taking_part() if report else []
        for server in done:
            server.version = self._version
            self._context.adapters.unload_unused(server)
            self._fleet.set_state(server, "serving")
        if report is None or not done:
            reasons = "; ".join(f"{server.name}: {server.reason}" for server in self._servers)
            may_return = self._awaits_others and not self._taking_part() and self._fleet.awaits()
            kind = LostReceiversError if may_return else SyncError
            raise kind(f"no SGLang server took the weights of version {self._version} ({reasons})")
        return {
            "sync/bytes": float(report.num_bytes),
            "sync/servers": float(len(done)),
            "timing/sync_send_s": report.send_s,
            **self._context.metrics(),
        }

    def abandon(self, error: SyncError) -> None:
        """Fence all: they are paused, and nobody would wake them."""
        for server in self._taking_part():
            self._fleet.fence(server, server.reason or f"weight update: {error}")

    async def _opened(self) -> list[Server]:
        """Open the update on all that take part; returns those that are left. Adapters need none: what a server does
        goes on."""
        if self._transport.adapters:
            return self._taking_part()
        await self._phase("take the memory of the weights", lambda server: self._resume(server, "weights"))
        await self._phase("pause", self._pause)
        await self._phase("begin", self._begin)
        return self._taking_part()

    def _take_in(self, servers: Sequence[Server]) -> None:
        for server in servers:
            if server not in self._servers:
                self._servers.append(server)
            self._joining.add(server.name)
            self._fleet.set_state(server, "updating")

    def _taking_part(self) -> list[Server]:
        """Those that were not fenced since the update began (one that was may be starting again by now)."""
        return [server for server in self._servers if server.state == "updating"]

    async def _phase(self, name: str, work: Callable[[Server], Awaitable[object]]) -> None:
        """Do the same on every server at once; fence those that fail."""

        async def one(server: Server) -> None:
            try:
                await work(server)
            except EngineError as error:
                await self._fence(server, name, error, may_be_dead=isinstance(error, DisconnectedError))

        await asyncio.gather(*(one(server) for server in self._taking_part()))

    async def _fence(self, server: Server, phase: str, failure: object, *, may_be_dead: bool) -> None:
        """Give a server up. If its process is gone that is the reason: its log says more than a broken connection."""
        death = await self._context.death_of(server) if may_be_dead else ""
        if server.state == "updating":
            self._fleet.fence(server, f"weight update, {phase}: {death or failure}")

    async def _post(self, server: Server, path: str, body: Mapping[str, Any] | None = None) -> object:
        try:
            return await server.client.post(path, body, timeout_s=self._options.sync_timeout_s)
        except DisconnectedError:  # a kept connection that the server had closed; all of these may be said twice
            return await server.client.post(path, body, timeout_s=self._options.sync_timeout_s)

    async def _resume(self, server: Server, *tags: MemoryTag) -> None:
        await resume(server, *tags, timeout_s=self._options.sync_timeout_s)

    async def _pause(self, server: Server) -> None:
        # A request that still runs goes on with the new weights, its cache computed anew. Where nothing runs the modes
        # differ in one thing: in "abort" the paused scheduler waits for work; in "retract" it asks for work without a
        # rest, on a core that the sender of the weights may need (0.5.23).
        mode = "retract" if server.tokens_in_flight else "abort"
        await self._post(server, "/pause_generation", {"mode": mode})

    async def _begin(self, server: Server) -> None:
        if self._transport.checkpoint or not _facts(server).has_sessions:
            return
        try:
            await self._post(server, "/begin_weight_update")
        except RefusedError:  # one is open already: that of an update whose sending failed
            await self._post(server, "/end_weight_update")
            await self._post(server, "/begin_weight_update")

    async def _end(self, server: Server) -> None:
        if not self._transport.checkpoint and _facts(server).has_sessions:
            await self._post(server, "/end_weight_update")

    async def _flush(self, server: Server) -> None:
        """Empty the cache that the old weights made. 0.5.20 refuses while retracted requests wait: these are ended
        then, and come back to the engine, which goes on with them from where they were."""
        for _ in range(_FLUSHES):
            try:
                await self._post(server, "/flush_cache")
                return
            except RefusedError:
                pass
            await self._post(server, "/abort_request", {"abort_all": True})
            await asyncio.sleep(_FLUSH_PAUSE_S)
        raise RefusedError(f"{server.url}/flush_cache: refused {_FLUSHES} times, also after its requests were ended")

    async def _stamp(self, server: Server) -> None:
        server.versions.add(self._version)  # before answers can carry it
        body = {"new_version": str(self._version), "abort_all_requests": False}
        await self._post(server, "/update_weight_version", body)

    async def _continue(self, server: Server) -> None:
        await self._post(server, "/continue_generation")

    def _bucket_bytes(self) -> int:
        on_cpu = all(_facts(server).device == "cpu" for server in self._taking_part())
        return (self._options.bucket_mib or (CPU_BUCKET_MIB if on_cpu else GPU_BUCKET_MIB)) * 2**20

    async def _remove_older(self, directory: Path) -> None:
        written = self._context.written
        written.append(directory)
        while len(written) > 1:
            await asyncio.to_thread(shutil.rmtree, written.pop(0), ignore_errors=True)

    async def _compare_checksums(self, server: Server, digests: Mapping[str, Digest]) -> None:
        """Check that a server has what was sent, as far as its checksums tell."""
        ranks, last = await self._checksums(server), self._context.last_checksums
        if not ranks:
            return
        shown, last[server.name] = compare_checksums(
            ranks, digests, _facts(server), last.get(server.name, LastChecksums())
        )
        if shown:
            self._verified.add(server.name)

    async def _compare_blocks(self, server: Server, sent: Sequence[str]) -> None:
        """Check, of a server that was started since its last update, that it has as blocks what was sent as blocks."""
        if server.name not in self._joining:
            return
        answer = await self._post(server, "/weights_checker", fp8_blocks.MANIFEST_CALL)
        for matrices in _read_checksums(server, answer):
            problem = fp8_blocks.fp8_disagreement(sent, matrices)
            if problem:
                raise EngineError(problem)

    async def _checksums(self, server: Server) -> list[Mapping[str, str]]:
        """Checksums of unfused tensors, of each rank of the server; empty where it cannot tell (0.5.21 refuses)."""
        if not _facts(server).has_checksums:
            return []
        body = {"action": "checksum", "skip_tensor_list": list(_FUSED)}
        try:
            answer = await self._post(server, "/weights_checker", body)
        except RefusedError:
            return []
        return _unfused(_read_checksums(server, answer))


async def _is_alive(server: Server) -> bool:
    try:
        await server.client.model_info(timeout_s=_ALIVE_S)
    except UnreachableError:
        return False
    except RefusedError:  # an answer, too
        return True
    return True


async def _is_free(server: Server) -> bool:
    """Whether what a server's GPUs were given is done. One that waits in a broadcast that nobody ends answers every
    call that leaves the GPUs alone, also those of a new group, and never gets further (SGLang 0.5.23,
    model_runner_components/weight_updater.py: it waits on the stream only).

    Hashes nothing: each name contains the empty pattern. But each rank synchronizes its device
    (srt/utils/weight_checker.py, _compute_checksum), and the answer is gathered from all. One that is too old to tell
    checksums counts as free."""
    if not _facts(server).has_checksums:
        return True
    body = {"action": "checksum", "skip_tensor_list": [""]}
    try:
        await server.client.post("/weights_checker", body, timeout_s=_FREE_S)
    except UnreachableError:
        return False
    except RefusedError:  # an answer, too
        return True
    return True


def _read_checksums(server: Server, answer: object) -> list[dict[str, str]]:
    """Read the answer of /weights_checker: of each rank, name -> checksum."""
    try:
        return read_checksums(answer)
    except BadAnswerError as error:
        raise EngineError(f"{server.url}/weights_checker: {error}") from None


def _facts(server: Server) -> ServerFacts:
    assert server.facts is not None, f"{server.name} takes part in an update before it said what it is"
    return server.facts


_FUSED = ("qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts")
"""Parts of the names that a server is not asked for: tensors that it fuses, or that are large."""


@dataclass(frozen=True, slots=True)
class LastChecksums:
    """Of a server's last update. digests: of what was sent, by name. checksums: of what it had, by rank and name."""

    digests: Mapping[str, Digest] = field(default_factory=dict)
    checksums: Mapping[tuple[int, str], str] = field(default_factory=dict)


def _unfused(ranks: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Keep the checksums, of each rank, of those tensors that the sender takes digests of."""
    return [{name: checksum for name, checksum in rank.items() if is_hashed(name)} for rank in ranks]


def compare_checksums(
    ranks: Sequence[Mapping[str, str]], digests: Mapping[str, Digest], facts: ServerFacts, last: LastChecksums
) -> tuple[bool, LastChecksums]:
    """Compare the checksums of a server's ranks with what was sent.

    Args:
        ranks: name -> checksum, of each rank. digests: of what was sent. facts: of the server. last: of its last
            update.

    Returns:
        Whether anything showed that it has the new weights, and what the next update compares with.

    Raises:
        EngineError: it has others.
    """
    if facts.quantization:  # a small change of a matrix may round away
        digests = {name: digest for name, digest in digests.items() if name.endswith("norm.weight")}
    same_bytes: list[str] = []
    if _hashes_as_sender(facts):
        same_bytes = [n for n, d in digests.items() if d.dtype == facts.dtype and n in ranks[0] and not d.on_device]
        wrong = [name for name in same_bytes if ranks[0][name] != digests[name].sent]
        if wrong:
            raise EngineError(f"{len(wrong)} tensors are not those that were sent, the first: {wrong[0]}")
    checksums = {(rank, name): checksum for rank, held in enumerate(ranks) for name, checksum in held.items()}
    changed = {n for n, d in digests.items() if n in last.digests and last.digests[n].received != d.received}
    compared = [key for key in checksums if key[1] in changed and key in last.checksums]
    if compared and all(checksums[key] == last.checksums[key] for key in compared):
        raise EngineError(
            f"it kept its weights: of {len(changed)} tensors that changed since the last update, such as "
            f"{min(changed)}, none changed in it"
        )
    return bool(same_bytes or compared), LastChecksums(digests, checksums)


def _hashes_as_sender(facts: ServerFacts) -> bool:
    """Whether checksums are of the bytes as they were sent: on a CPU, unsharded."""
    return facts.device == "cpu" and facts.tensor_parallel == 1
