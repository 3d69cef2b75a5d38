"""The sending end of a broadcast of weights to SGLang servers: one exporting rank, one process group, packed buckets.

Place in the data flow: (HF name, tensor) stream of this rank -> buckets -> group of this rank and every rank of every
server. While one bucket is sent the next is gathered, so at most two exist. The group is kept for the next update as
long as the same servers take part.
A failure never leaves the stream half read: other ranks gather along with it and would wait for ever. The first server
that fails breaks the broadcast off, so that a death costs seconds and not the limit of a call.
It does not give servers up: it reports what each of them did, as far as this end can tell.
"""

from __future__ import annotations

import asyncio
import queue
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import Post, SendFailure, SendPlan, SendReport, Target
from megatron_daro.sync.process_group import SendGroup, in_thread, listening_store

# Servers were just asked to open the update, so those that still answer join at once.
_LONGEST_JOIN_S = 60.0
# How long the others have after the first failure: one bucket's worth.
_AFTER_FAILURE_S = 30.0


@dataclass
class _Sent:
    """What was sent so far."""

    num_bytes: int = 0
    num_buckets: int = 0
    started: float = field(default_factory=time.perf_counter)
    failures: dict[str, SendFailure] = field(default_factory=dict)


class BroadcastSender:
    """This rank's end. `close` it, or its threads and sockets stay."""

    def __init__(self, host: str, backend: str, post: Post) -> None:
        """Join nothing.

        Args:
            host: address of this rank as servers reach it; the group's store listens on it alone.
            backend: "gloo" or "nccl".
            post: calls a server.
        """
        self._host, self._backend, self._post = host, backend, post
        self._group: SendGroup | None = None
        self._name = ""
        self._joined: tuple[Target, ...] = ()

    def send(self, stream: Iterable[tuple[str, Tensor]], plan: SendPlan) -> SendReport:
        """Send the whole stream; read it to its end whatever happens.

        Args:
            stream: (HF name, tensor); each item may be a collective of other ranks.
            plan: to whom, in buckets of which size.

        Returns:
            The report; with failures the group is gone and the next call makes another.
        """
        mailbox: queue.Queue[WeightBucket | None] = queue.Queue()
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as thread:
            sending = thread.submit(lambda: asyncio.run(self._send_all(mailbox, plan)))
            try:
                for bucket in bucketize(stream, plan.bucket_bytes, reuse=True):
                    mailbox.join()  # the bucket before is sent, and its buffer is the next one's
                    mailbox.put(bucket)
                    del bucket
            finally:
                mailbox.put(None)
            sent = sending.result()
        seconds = time.perf_counter() - sent.started
        return SendReport(sent.num_bytes, sent.num_buckets, seconds, failures=sent.failures)

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        group, self._group, self._joined = self._group, None, ()
        if group is not None:
            group.close()

    async def _send_all(self, mailbox: queue.Queue[WeightBucket | None], plan: SendPlan) -> _Sent:
        """Take buckets out until None comes; after a failure they are only thrown away."""
        sent = _Sent()
        crash: BaseException | None = None
        try:
            sent.failures |= await self._join(plan)
        except Exception as error:  # raised below: the stream must be read to its end first
            crash = error
        while (bucket := await asyncio.to_thread(mailbox.get)) is not None:
            try:
                if crash is None and not sent.failures:
                    sent.failures |= await self._send_bucket(bucket, plan)
                    sent.num_bytes += bucket.data.nbytes
                    sent.num_buckets += 1
            except Exception as error:  # as above
                crash = error
            del bucket
            mailbox.task_done()
        if crash is not None or sent.failures:
            self.close()
        if crash is not None:
            raise crash
        return sent

    async def _send_bucket(self, bucket: WeightBucket, plan: SendPlan) -> dict[str, SendFailure]:
        """One bucket to everyone at once. Returns failures by server."""
        body = {
            "names": bucket.names,
            "shapes": bucket.shapes,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        bodies = {target.name: body for target in plan.targets}
        group = self._group
        assert group, "joined before"
        own = asyncio.wrap_future(in_thread(lambda: group.broadcast(bucket.data, plan.timeout_s)))
        own.add_done_callback(lambda done: done.exception())  # seen, also where nobody waits any more
        failures = await self._to_all("/update_weights_from_distributed", bodies, plan, broken=group.break_off)
        await asyncio.wait({own}, timeout=_AFTER_FAILURE_S if failures else None)
        error = own.exception() if own.done() else TimeoutError("it went on after a server had failed")
        return _told_apart(failures, error, "broadcast failed", bodies)

    async def _join(self, plan: SendPlan) -> dict[str, SendFailure]:
        """Make the group of this rank and these servers, unless it is there. Returns failures by server."""
        if self._group is not None and self._joined == plan.targets:
            return {}
        self.close()
        self._name = f"megatron_daro-{uuid.uuid4().hex[:12]}"
        seconds = min(plan.timeout_s, _LONGEST_JOIN_S)
        store, port = listening_store(self._host, plan.world_size, seconds)
        common = {
            "master_address": self._host,
            "master_port": port,
            "world_size": plan.world_size,
            "group_name": self._name,
            "backend": self._backend,
        }
        bodies = {t.name: common | {"rank_offset": t.rank_offset} for t in plan.targets}
        limits = {"join_s": seconds, "broadcast_s": plan.timeout_s}
        own = asyncio.wrap_future(
            in_thread(lambda: SendGroup.join(self._name, plan.world_size, store, backend=self._backend, **limits))
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
        broken: Callable[[], None] = lambda: None,
    ) -> dict[str, SendFailure]:
        """One call to every server. Returns what failed, by server. broken: called at the first failure."""
        urls = {target.name: target.url for target in plan.targets}
        calls = {
            asyncio.ensure_future(self._post(urls[name], path, body, plan.timeout_s)): name
            for name, body in bodies.items()
        }
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if any(call.exception() for call in done):
            in_thread(broken)  # which may wait for a peer that hangs
        if pending:
            more, pending = await asyncio.wait(pending, timeout=_AFTER_FAILURE_S)
            done |= more
        failures = {}
        for call in pending:
            call.cancel()
            text = f"no answer within {_AFTER_FAILURE_S:g} s after another server had failed"
            failures[calls[call]] = SendFailure("group", text)
        for call in done:
            error = call.exception()
            if isinstance(error, EngineError):
                refused = isinstance(error, RefusedError)
                failures[calls[call]] = SendFailure("refused" if refused else "unanswered", str(error))
            elif error is not None:
                raise error
        return failures


def _told_apart(
    failures: dict[str, SendFailure], own: BaseException | None, what: str, names: Iterable[str]
) -> dict[str, SendFailure]:
    """Judge a refusal: it is the server's own fault only where nothing else went wrong: if this end failed too, or
    another server did not answer, the group broke, and a server that says so is not to blame."""
    if own is not None and not failures:
        return {name: SendFailure("group", f"{what}: {own}") for name in names}
    if own is None and all(failure.kind == "refused" for failure in failures.values()):
        return failures
    return {
        name: SendFailure("group", failure.text) if failure.kind == "refused" else failure
        for name, failure in failures.items()
    }
