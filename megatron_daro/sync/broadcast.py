"""The sending end of a broadcast of weights to SGLang servers: one exporting rank, one process group, packed buckets.

While one bucket is sent the next is gathered, so at most two exist. On a GPU buckets are sent from a stream of their
own (`SendStream`), since a stream on which a collective is waited for cannot gather meanwhile. Servers are told of the
next bucket as soon as all have answered for this one: servers on GPUs answer while the data is still in flight, so that
calls cost no time; servers on CPUs when they have loaded it. Not earlier: SGLang handles calls in the order in which
they arrive, which for two calls on two connections is undefined, and a bucket read with the names of another would be
silently wrong. The group, of this rank and every rank of every server, is kept for the next update as long as the same
servers take part. The first server that fails breaks the broadcast off, so that a death costs seconds instead of the
limit of a call. Servers are not fenced here; the report says how each of them failed.

A peer that died or hangs must cost this process a group and nothing else. By default torch ends the process when an
NCCL collective fails (ProcessGroupNCCL.hpp, ErrorHandlingMode); this group is made so that it does not.

Source: sglang/srt/utils/common.py, init_custom_process_group: both ends must derive the same store keys.
sglang/srt/managers/tokenizer_control_mixin.py (0.5.23), update_weights_from_distributed: `async with
self.is_pause_cond` around the call of a FanOutCommunicator; both are queues, so the scheduler gets one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import Connect, Post, SendFailure, SendPlan, SendReport, Target
from megatron_daro.sync.transport_sender import TransportSender, in_thread

_Calls = set[asyncio.Future[Any]]
# torch reads it when a group is made. 0: the wait for a failed collective raises, and the process lives.
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# NCCL's own limit is longer than the one given to `broadcast`, so that the caller ends a broadcast first.
_NCCL_MARGIN_S = 60.0


class SendGroup:
    """One process group; rank 0 is this process."""

    def __init__(self, backend: str, group: dist.ProcessGroup, store: dist.Store) -> None:
        """Args: backend: "gloo" or "nccl". group, store: of torch; the store is served by this process."""
        self._backend, self._group, self._store = backend, group, store
        self._left = threading.Lock()

    @classmethod
    def join(
        cls, name: str, world_size: int, store: dist.Store, *, backend: str, join_s: float, broadcast_s: float
    ) -> SendGroup:
        """Make this end. With gloo, block until all have joined; with NCCL, return at once: ranks join at the first
        broadcast.

        Args:
            name: of the group, as the servers were told. store: from `listening_store`.
            join_s: longest wait for the others. broadcast_s: longest wait that `broadcast` will be given.
        """
        limit = broadcast_s + _NCCL_MARGIN_S if backend == "nccl" else join_s
        options: dict[str, Any] = {"group_name": name, "timeout": timedelta(seconds=limit)}
        helper: Callable[..., tuple[dist.ProcessGroup, object]] = c10d._new_process_group_helper
        with _errors_end_no_process(backend):
            group, _ = helper(world_size, 0, [], dist.Backend(backend), c10d.PrefixStore(name, store), **options)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return cls(backend, group, store)

    def broadcast(self, data: Tensor, timeout_s: float) -> None:
        """Send to all ranks; block until that is done. On an error, leave the group: that ends the wait of the servers,
        whose own limit is half an hour. Raises RuntimeError: a peer is lost or the time is over."""
        try:
            self._group.broadcast(data, 0).wait(timedelta(seconds=timeout_s))
        except Exception:
            self.close(broken=True)
            raise

    def break_off(self) -> None:
        """End the broadcast in flight: NCCL's communicator is aborted; gloo cannot, and sends until its limit."""
        if self._backend == "nccl":
            self._group.abort()

    def close(self, *, broken: bool = False) -> None:
        """Leave the group; with NCCL, in a thread, since that can wait for a peer. A second call does nothing.

        Args:
            broken: a broadcast may never be received: abort it, since leaving would wait for it.
        """
        if not self._left.acquire(blocking=False):
            return
        if self._backend == "nccl":
            in_thread(self._abort_and_destroy if broken else lambda: dist.destroy_process_group(self._group))
        else:
            dist.destroy_process_group(self._group)

    def _abort_and_destroy(self) -> None:
        self._group.abort()
        dist.destroy_process_group(self._group)


class SendStream:
    """The CUDA stream that buckets are sent from; the stream that gathers and packs the next bucket goes on meanwhile.

    A broadcast waits for the work that this stream has at that moment, which includes the event of its bucket; its
    `wait` makes this stream and the calling thread wait until it ends. So when `SendGroup.broadcast` has returned, the
    bucket was sent, and its memory may be overwritten. Source: torch 2.13, ProcessGroupNCCL.cpp, `syncStream` and
    `WorkNCCL::wait` with a time limit.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def packed(self) -> torch.cuda.Event | None:
        """Return an event that fires when all work given to the calling thread's current stream so far is done."""
        return torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def after(self, packed: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block's work on this stream, after the event."""
        with torch.cuda.stream(self._stream):
            if packed is not None:
                self._stream.wait_event(packed)
            yield


class NoStream(SendStream):
    """Stands in for SendStream on a CPU, where work is done when its call returns."""

    def __init__(self) -> None:
        pass

    def packed(self) -> None:
        """Return None: there is nothing to wait for."""

    @contextlib.contextmanager
    def after(self, packed: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block's work."""
        yield


def listening_store(host: str, world_size: int, timeout_s: float) -> tuple[dist.Store, int]:
    """Return a store that listens on this address only (by default torch listens on every interface), and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


@contextlib.contextmanager
def _errors_end_no_process(backend: str) -> Iterator[None]:
    """Within the block, make NCCL groups whose errors are raised by their waits only; other groups are not changed."""
    if backend != "nccl":
        yield
        return
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


# Servers have just answered the opening of the update, so those that still live join at once.
_LONGEST_JOIN_S = 60.0
# A healthy server leaves a group between two batches; one that hangs is ended elsewhere, and its groups with it.
_LONGEST_LEAVE_S = 30.0
# How long other servers may take to answer after the first failure: the time of one bucket.
_AFTER_FAILURE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A bucket. event: on a GPU, fires when it is filled. sent: set when its memory is no longer read."""

    bucket: WeightBucket
    event: torch.cuda.Event | None
    sent: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Sent:
    """What was sent so far. last: outcome of the last bucket's broadcast, which includes that of all before."""

    num_bytes: int = 0
    started: float = field(default_factory=time.perf_counter)
    failures: dict[str, SendFailure] = field(default_factory=dict)
    last: Future[None] | None = None


class BroadcastSender(TransportSender):
    """The sending end on one rank. `close` it, or its threads and sockets stay."""

    _post: Post

    def __init__(self, host: str, backend: str, connect: Connect) -> None:
        """Join nothing.

        Args:
            host: address of this rank as servers reach it; the group's store listens only there.
            backend: "gloo" or "nccl".
            connect: to servers.
        """
        self._host, self._backend, self._connect = host, backend, connect
        self._group: SendGroup | None = None
        self._name = ""
        self._joined: tuple[Target, ...] = ()
        self._groups: dict[str, str] = {}  # URL of a server -> name of the group that it was told to make
        self._stream = SendStream() if backend == "nccl" else NoStream()

    def _send(
        self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: dist.ProcessGroup | None
    ) -> SendReport:
        """Send everything. After a failure the group is left, and the next call makes a new one."""
        mailbox: queue.Queue[_Packed | None] = queue.Queue()
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as thread:
            sending = thread.submit(lambda: asyncio.run(self._send_all(mailbox, plan)))
            before = threading.Event()
            before.set()
            try:
                for bucket in bucketize(tensors, plan.bucket_bytes, reuse=True):
                    packed = _Packed(bucket, self._stream.packed())
                    mailbox.put(packed)
                    before.wait()  # until the previous bucket is sent: the next one will use its buffer
                    before = packed.sent
                    del bucket, packed
            finally:
                mailbox.put(None)
            sent = sending.result()
        return SendReport(sent.num_bytes, time.perf_counter() - sent.started, failures=sent.failures)

    def close(self) -> None:
        """Leave the group, on this end only. May be called twice."""
        self._leave(broken=False)

    def _leave(self, *, broken: bool) -> None:
        group, self._group, self._joined = self._group, None, ()
        if group is not None:
            group.close(broken=broken)

    async def _end_groups(self, timeout_s: float) -> None:
        """Leave the group on both ends at once, as NCCL requires. A server that keeps a group keeps its communicator
        (SGLang 0.5.23 drops it only at /destroy_weights_update_group). Servers that do not answer are ignored: they are
        being ended, or were restarted without the group."""
        groups, self._groups = self._groups, {}
        self._leave(broken=False)

        async def end(url: str, name: str) -> None:
            with contextlib.suppress(EngineError):
                body = {"group_name": name}
                await self._post(url, "/destroy_weights_update_group", body, min(timeout_s, _LONGEST_LEAVE_S))

        await asyncio.gather(*(end(url, name) for url, name in groups.items()))

    async def _send_all(self, mailbox: queue.Queue[_Packed | None], plan: SendPlan) -> _Sent:
        async with self._connect() as self._post:  # valid in this event loop only
            return await self._send_until_none(mailbox, plan)

    async def _send_until_none(self, mailbox: queue.Queue[_Packed | None], plan: SendPlan) -> _Sent:
        """Send the buckets of the mailbox until None comes. After a failure they are only discarded, so that the thread
        that packs them never waits for a buffer."""
        sent = _Sent()
        crash: BaseException | None = None
        on_the_way: list[threading.Event] = []
        try:
            sent.failures |= await self._join(plan)
        except Exception as error:  # raised below, when the mailbox is empty
            crash = error
        while (packed := await asyncio.to_thread(mailbox.get)) is not None:
            on_the_way = [*on_the_way[-1:], packed.sent]
            try:
                if crash is None and not sent.failures:
                    sent.failures |= await self._send_bucket(packed, plan, sent)
            except Exception as error:  # as above
                crash = error
            if crash is not None or sent.failures:
                for buffer in on_the_way:
                    buffer.set()
            del packed
        if crash is None and not sent.failures:
            sent.failures |= _told_apart({}, await _error_of(sent.last, None), "broadcast failed", _names(plan))
        if crash is not None or sent.failures:
            self._leave(broken=True)
        if crash is not None:
            raise crash
        return sent

    async def _send_bucket(self, packed: _Packed, plan: SendPlan, sent: _Sent) -> dict[str, SendFailure]:
        """Tell all servers of a bucket at once, and broadcast it after the previous one. Returns failures by server as
        soon as all have answered, which may be before the bucket is sent."""
        bucket = packed.bucket
        body = {
            "names": bucket.names,
            "shapes": bucket.shapes,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        bodies = dict.fromkeys(_names(plan), body)
        group, before = self._group, sent.last
        assert group, "joined before"

        def broadcast() -> None:
            try:
                if before is not None:
                    before.result()
                with self._stream.after(packed.event):
                    group.broadcast(bucket.data, plan.timeout_s)
            finally:
                packed.sent.set()

        sent.last = in_thread(broadcast)
        path = "/update_weights_from_distributed"
        failures = await self._to_all(path, bodies, plan, own=sent.last, broken=group.break_off)
        sent.num_bytes += bucket.data.nbytes
        if not failures and not sent.last.done():
            return {}
        error = await _error_of(sent.last, _AFTER_FAILURE_S if failures else None)
        return _told_apart(failures, error, "broadcast failed", bodies)

    async def _join(self, plan: SendPlan) -> dict[str, SendFailure]:
        """Make the group, unless it exists: this rank is its first, the ranks of the servers follow. Returns failures
        by server."""
        if self._group is not None and self._joined == plan.targets:
            return {}
        await self._end_groups(plan.timeout_s)
        self._name = f"megatron_daro-{uuid.uuid4().hex[:12]}"
        seconds = min(plan.timeout_s, _LONGEST_JOIN_S)
        *offsets, world_size = itertools.accumulate((target.ranks for target in plan.targets), initial=1)
        store, port = listening_store(self._host, world_size, seconds)
        common = {
            "master_address": self._host,
            "master_port": port,
            "world_size": world_size,
            "group_name": self._name,
            "backend": self._backend,
        }
        parts = zip(plan.targets, offsets, strict=True)
        bodies = {target.name: common | {"rank_offset": offset} for target, offset in parts}
        self._groups = dict.fromkeys((target.url for target in plan.targets), self._name)
        limits = {"join_s": seconds, "broadcast_s": plan.timeout_s}
        own = asyncio.wrap_future(
            in_thread(lambda: SendGroup.join(self._name, world_size, store, backend=self._backend, **limits))
        )
        failures = await self._to_all("/init_weights_update_group", bodies, plan)
        await asyncio.wait({own})
        if own.exception():
            return _told_apart(failures, own.exception(), "the group was not made", bodies)
        self._group, self._joined = own.result(), plan.targets
        return _told_apart(failures, None, "", bodies)

    async def _to_all(
        self,
        path: str,
        bodies: Mapping[str, Mapping[str, Any]],
        plan: SendPlan,
        own: Future[None] | None = None,
        broken: Callable[[], None] = lambda: None,
    ) -> dict[str, SendFailure]:
        """Make one call to every server. Returns failures by server. own: what runs at this end meanwhile; after it or
        a server has failed, other answers are awaited only for _AFTER_FAILURE_S. broken: called when a server failed.
        """
        urls = {target.name: target.url for target in plan.targets}
        calls: dict[asyncio.Future[Any], str] = {
            asyncio.ensure_future(self._post(urls[name], path, body, plan.timeout_s)): name
            for name, body in bodies.items()
        }
        done, pending = await _until_a_failure(calls, own)
        if any(call.exception() for call in done):
            in_thread(broken)  # it may wait for a peer that hangs
        if pending:
            more, pending = await asyncio.wait(pending, timeout=_AFTER_FAILURE_S)
            done |= more
        failures = {}
        for call in pending:
            call.cancel()
            text = f"no answer within {_AFTER_FAILURE_S:g} s after another server, or the broadcast, had failed"
            failures[calls[call]] = SendFailure("group", text)
        for call in done:
            error = call.exception()
            if isinstance(error, EngineError):
                refused = isinstance(error, RefusedError)
                failures[calls[call]] = SendFailure("refused" if refused else "unanswered", str(error))
            elif error is not None:
                raise error
        return failures


async def _until_a_failure(calls: Iterable[asyncio.Future[Any]], own: Future[None] | None) -> tuple[_Calls, _Calls]:
    """Wait until all calls are answered, or one of them or this rank's end has failed. Returns (done, pending)."""
    answered = asyncio.ensure_future(asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION))
    if own is not None:
        ours = _awaitable(own)
        either: _Calls = {answered, ours}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done() and ours.exception():
            answered.cancel()  # only the wait, not the calls
            return {call for call in calls if call.done()}, {call for call in calls if not call.done()}
    return await answered


async def _error_of(broadcast: Future[None] | None, timeout_s: float | None) -> BaseException | None:
    """Wait for the end of a broadcast, at most `timeout_s`. Returns its error, or a TimeoutError; None for success."""
    if broadcast is None:
        return None
    waiting = _awaitable(broadcast)
    await asyncio.wait({waiting}, timeout=timeout_s)
    return waiting.exception() if waiting.done() else TimeoutError("it went on after a server had failed")


def _awaitable(broadcast: Future[None]) -> asyncio.Future[None]:
    waiting = asyncio.wrap_future(broadcast)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, even if nothing awaits it
    return waiting


def _names(plan: SendPlan) -> list[str]:
    return [target.name for target in plan.targets]


def _told_apart(
    failures: dict[str, SendFailure], own: BaseException | None, what: str, names: Iterable[str]
) -> dict[str, SendFailure]:
    """Return failures by server with refusals judged. A refusal is the server's own fault only if nothing else failed:
    if this end failed too, or another server did not answer, the group broke, and a server that reports that as a
    refusal is not to blame. If only this end failed, all servers have a failure of the group."""
    if own is not None and not failures:
        return {name: SendFailure("group", f"{what}: {own}") for name in names}
    if own is None and all(failure.kind == "refused" for failure in failures.values()):
        return failures
    return {
        name: SendFailure("group", failure.text) if failure.kind == "refused" else failure
        for name, failure in failures.items()
    }
