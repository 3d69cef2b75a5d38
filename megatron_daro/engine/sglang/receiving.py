"""The servers' end of each weight transport: what servers are told before and after the ranks send, and what the ranks
must know to send to them. update.py takes all servers through these phases together, and gives up one that fails a
phase.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.engine.sglang.client import DisconnectedError, ServerFacts, UnreachableError
from megatron_daro.engine.sglang.fleet import Server
from megatron_daro.engine.sglang.memory import MemoryTag, resume
from megatron_daro.engine.sglang.replies import BadAnswerError, read_checksums
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.plan import NORM, NOT_COMPARED, Digest, SendPlan, SendReport, WeightFiles, is_compared

if TYPE_CHECKING:
    from megatron_daro.sync.shard_layouts import ServerLayout

# Longest time for a server to finish the work queued on its GPUs, which is at most the loading of one bucket.
_FREE_S = 30.0
_FLUSHES, _FLUSH_PAUSE_S = 20, 0.25

Phase = tuple[str, Callable[[Server], Awaitable[object]]]
"""(name, for messages; what is done with each server). If that raises EngineError, the server is given up."""


@dataclass(slots=True, kw_only=True)
class ServersEnd:
    """What the updates of one fleet have in common at the servers' end.

    fp8_blocks: names of the matrices that are sent as fp8 blocks, with `{layer}` and `{expert}` for numbers. layout: of
    a server, for `sync: shards`. sync_dir: where weight files are written; it holds nothing else. adapter: PEFT's
    configuration of the adapters, if servers get these. new_name: makes a name that is not taken yet. files: numbers
    the directories of weight files. written: those that exist, oldest first. last_checksums: of each server's process.
    """

    options: SGLangSection
    fp8_blocks: tuple[str, ...]
    layout: ServerLayout | None
    sync_dir: Path
    adapter: Mapping[str, Any]
    new_name: Callable[[], str]
    files: Iterator[int] = field(default_factory=itertools.count)
    written: list[Path] = field(default_factory=list)
    last_checksums: WeakKeyDictionary[Server, LastChecksums] = field(default_factory=WeakKeyDictionary)


class Receiving:
    """The servers' end of one update, for weights that servers load as they arrive; subclasses for other transports
    override what differs."""

    def __init__(self, end: ServersEnd, version: int) -> None:
        """Send nothing. Args: version: of the weights."""
        self._end, self._version = end, version
        self._limit_s, self.fp8_blocks = end.options.sync_timeout_s, end.fp8_blocks
        self.verified: set[str] = set()
        """Names of the servers whose checksums showed that they have the weights."""

    def opening(self) -> tuple[Phase, ...]:
        """Return the phases before the ranks send."""
        return (
            ("take the memory of the weights", lambda server: resume(server, "weights", timeout_s=self._limit_s)),
            ("pause", self._pause),
            ("begin", self._open),
        )

    async def planned(self, plan: SendPlan) -> SendPlan | WeightFiles:
        """Return the plan with what the sender of this transport must know added, or what is to be written instead."""
        return plan

    async def held_up(self, server: Server) -> str:
        """Return why a server that answers cannot take part again after a failed send; empty if it can."""
        return ""

    async def installing(self, report: SendReport) -> AsyncIterator[Phase]:
        """Yield the phases after the ranks sent, up to the first request. Args: report: of all ranks."""
        yield "end", self._close
        yield "flush the cache", self._flush
        if self.fp8_blocks:
            yield "compare fp8 blocks", lambda server: self._compare_blocks(server, report.fp8_blocks)
        if report.digests:
            yield "compare checksums", lambda server: self.compare_checksums(server, report.digests)
        yield "set the version", self._stamp
        cache: tuple[MemoryTag, ...] = "kv_cache", "cuda_graph"
        yield "take the memory of the cache", lambda server: resume(server, *cache, timeout_s=self._limit_s)
        yield "continue", lambda server: self._post(server, "/continue_generation")

    async def compare_checksums(self, server: Server, digests: Mapping[str, Digest]) -> None:
        """Check that a server has what was sent, as far as its checksums of unfused tensors tell; a refusal, such as
        0.5.21's, counts as no answer. Raises EngineError: it has other weights."""
        if not facts_of(server).has_checksums:
            return
        body = {"action": "checksum", "skip_tensor_list": list(NOT_COMPARED)}
        try:
            answer = await self._post(server, "/weights_checker", body)
        except RefusedError:
            return
        last = self._end.last_checksums
        shown, last[server] = judge_checksums(
            _read_checksums(server, answer), digests, facts_of(server), last.get(server, LastChecksums())
        )
        if shown:
            self.verified.add(server.name)

    def _opens_update(self, server: Server) -> bool:
        """Whether the server is told when an update begins and when everything has been sent."""
        return facts_of(server).has_sessions

    async def _post(self, server: Server, path: str, body: Mapping[str, Any] | None = None) -> object:
        try:
            return await server.client.post(path, body, timeout_s=self._limit_s)
        # Maybe a kept connection that the server had closed. All these calls may be repeated, but for the end of an
        # update: a server that had ended its own refuses, and is fenced.
        except DisconnectedError:
            return await server.client.post(path, body, timeout_s=self._limit_s)

    async def _pause(self, server: Server) -> None:
        # With "retract", running requests continue with the new weights, and their cache is recomputed. If nothing
        # runs, use "abort": after "retract" the scheduler polls for work without a rest, on a core that the sender of
        # the weights may need; after "abort" it is idle as usual, and sleeps if started with sleep_on_idle (0.5.23).
        mode = "retract" if server.tokens_in_flight else "abort"
        await self._post(server, "/pause_generation", {"mode": mode})

    async def _open(self, server: Server) -> None:
        if not self._opens_update(server):
            return
        try:
            await self._post(server, "/begin_weight_update")
        except RefusedError:  # an update whose send failed is still open
            await self._post(server, "/end_weight_update")
            await self._post(server, "/begin_weight_update")

    async def _close(self, server: Server) -> None:
        if self._opens_update(server):
            await self._post(server, "/end_weight_update")

    async def _flush(self, server: Server) -> None:
        """Empty the cache, which comes from the old weights. 0.5.20 refuses while retracted requests wait: these are
        then aborted, return to the engine, and continue from the tokens they have."""
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

    async def _compare_blocks(self, server: Server, sent: Sequence[str]) -> None:
        """Check that a server whose process gets its first weights keeps as fp8 blocks exactly what was sent so."""
        if server.versions:
            return
        answer = await self._post(server, "/weights_checker", fp8_blocks.MANIFEST_CALL)
        for matrices in _read_checksums(server, answer):
            problem = fp8_blocks.fp8_disagreement(sent, matrices)
            if problem:
                raise EngineError(problem)


class Broadcasts(Receiving):
    """Buckets, broadcast in a process group that the servers' ranks have joined."""

    async def held_up(self, server: Server) -> str:
        """Ask a server whether its GPUs have finished their work. A server stuck in a broken broadcast still answers
        every call that does not touch the GPUs, even those that make a new group, but never gets further (SGLang
        0.5.23, model_runner_components/weight_updater.py: it waits on the stream only).

        The call hashes nothing, since every name contains the empty pattern; but each rank synchronizes its device
        (srt/utils/weight_checker.py, _compute_checksum), and the answer is gathered from all ranks. A server too old to
        compute checksums counts as free."""
        body = {"action": "checksum", "skip_tensor_list": [""]}
        if facts_of(server).has_checksums and not await answers(
            server.client.post("/weights_checker", body, timeout_s=_FREE_S)
        ):
            return f"it still waits for the broadcast that broke, after {_FREE_S:g} s"
        return ""


class Shards(Receiving):
    """Shards of parameters, sent from trainer ranks to server ranks."""

    async def planned(self, plan: SendPlan) -> SendPlan:
        return replace(plan, details={"layout": self._end.layout, "shards_over": self._end.options.shards_over})


class Files(Receiving):
    """A checkpoint, which servers read once it is complete. The previous update's is deleted after that; before the
    first, what an earlier process of the run left is deleted."""

    async def planned(self, plan: SendPlan) -> WeightFiles:
        if not self._end.written:
            await asyncio.to_thread(shutil.rmtree, self._end.sync_dir, ignore_errors=True)
        self._directory = self._end.sync_dir / f"version_{self._version:06d}-{next(self._end.files)}"
        return WeightFiles(
            directory=self._directory,
            file_bytes=plan.bucket_bytes,
            remedy="free space, or set engine.sglang.sync_dir",
            digest_dtype=plan.digest_dtype,
        )

    async def installing(self, report: SendReport) -> AsyncIterator[Phase]:
        body = {"model_path": str(self._directory.absolute()), "flush_cache": False}
        yield "read the files", lambda server: self._post(server, "/update_weights_from_disk", body)
        written = self._end.written
        written.append(self._directory)
        while len(written) > 1:
            await asyncio.to_thread(shutil.rmtree, written.pop(0), ignore_errors=True)
        async for phase in super().installing(report):
            yield phase

    def _opens_update(self, server: Server) -> bool:
        return False


class NamedAdapters(Receiving):
    """Adapters under a new name, which new requests give; requests in flight go on with the adapter they name."""

    def __init__(self, end: ServersEnd, version: int) -> None:
        super().__init__(end, version)
        self._names: list[str] = []  # one for each try of this update

    def opening(self) -> tuple[Phase, ...]:
        return ()

    async def planned(self, plan: SendPlan) -> SendPlan:
        self._names.append(f"{self._end.new_name()}-version-{self._version}")
        details = {"lora_name": self._names[-1], "config_dict": self._end.adapter}
        return replace(plan, what="adapter", digest_dtype="", details=details)

    async def installing(self, report: SendReport) -> AsyncIterator[Phase]:
        yield "name the adapter", self._offer

    async def _offer(self, server: Server) -> None:
        server.versions.add(self._version)
        server.adapter = self._names[-1]
        for name in self._names:  # it has the last one, and may have those of earlier tries, which no request names
            server.adapters[name] += 0


RECEIVING: Mapping[str, type[Receiving]] = {
    "distributed": Broadcasts,
    "shards": Shards,
    "disk": Files,
    "tensor": Receiving,
    "adapters": NamedAdapters,
}
"""Name of the transport -> its class."""


def facts_of(server: Server) -> ServerFacts:
    """Return what a server said of itself."""
    assert server.facts is not None, f"{server.name} takes part in an update before it said what it is"
    return server.facts


async def answers(call: Awaitable[object]) -> bool:
    """Whether a server answers a call; a refusal counts as an answer."""
    try:
        await call
    except UnreachableError:
        return False
    except RefusedError:
        pass
    return True


def _read_checksums(server: Server, answer: object) -> list[dict[str, str]]:
    """Read the answer of /weights_checker: for each rank, name -> checksum."""
    try:
        return read_checksums(answer)
    except BadAnswerError as error:
        raise EngineError(f"{server.url}/weights_checker: {error}") from None


@dataclass(frozen=True, slots=True)
class LastChecksums:
    """What is kept of a server's last update. digests: of what was sent, by name. checksums: of what the server then
    had, by (rank, name)."""

    digests: Mapping[str, Digest] = field(default_factory=dict)
    checksums: Mapping[tuple[int, str], str] = field(default_factory=dict)


def judge_checksums(
    ranks: Sequence[Mapping[str, str]], digests: Mapping[str, Digest], facts: ServerFacts, last: LastChecksums
) -> tuple[bool, LastChecksums]:
    """Compare the checksums of a server's ranks with what was sent.

    Args:
        ranks: for each rank, name -> checksum. digests: of what was sent. facts: of the server. last: of its last
            update.

    Returns:
        Whether anything showed that it has the new weights, and what to pass as `last` in the next update.

    Raises:
        EngineError: it has other weights.
    """
    digests = {name: digest for name, digest in digests.items() if is_compared(name)}
    if facts.quantization:  # only norms: a small change of a matrix may be lost in rounding
        digests = {name: digest for name, digest in digests.items() if name.endswith(NORM)}
    same_bytes: list[str] = []
    if _hashes_as_sender(facts):
        same_bytes = [n for n, d in digests.items() if d.dtype == facts.dtype and n in ranks[0] and not d.on_device]
        wrong = [name for name in same_bytes if ranks[0][name] != digests[name].sent]
        if wrong:
            raise EngineError(f"{len(wrong)} tensors are not those that were sent, the first: {wrong[0]}")
    checksums = {(rank, name): held[name] for rank, held in enumerate(ranks) for name in digests if name in held}
    changed = {n for n, d in digests.items() if n in last.digests and last.digests[n].received != d.received}
    compared = [key for key in checksums if key[1] in changed and key in last.checksums]
    if compared and all(checksums[key] == last.checksums[key] for key in compared):
        raise EngineError(
            f"it kept its weights: of {len(changed)} tensors that changed since the last update, such as "
            f"{min(changed)}, none changed in it"
        )
    told = [name for name in same_bytes if name in changed or name not in last.digests]
    return bool(told or compared), LastChecksums(digests, checksums)


def _hashes_as_sender(facts: ServerFacts) -> bool:
    """Whether the server's checksums are those of the bytes as sent: on a CPU, unsharded."""
    return facts.device == "cpu" and facts.tensor_parallel == 1
