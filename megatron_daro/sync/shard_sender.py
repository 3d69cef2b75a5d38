"""The sending end of a sync from shards to shards: each rank of the trainer serves what the plan has it send.

A rank listens (`ShardSender.offer`); one of them tells each server by HTTP where its ranks find their senders; these
connect, and each connection carries what one sender has for one receiver, or says when Mooncake's transfer engine has
carried it from GPU to GPU (`engine.sglang.shards_over`). The receiving end, which runs inside SGLang, and what travels
on a connection: in_server/megatron_daro_shards.py. A pair that fails fails alone: everyone else's bytes arrive, and the
report names the servers that lack some. A server answers its call when all of its ranks are through; who has not
connected by then never will.

Only who was told the key, which is new for each update, is given anything.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import itertools
import json
import math
import pickle
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.errors import EngineError, RefusedError, SyncError
from megatron_daro.sync.in_server.megatron_daro_shards import (
    SLOTS,
    Engine,
    bundle_bytes,
    checksum_of,
    checksum_of_words,
    engine_of,
    packed,
    read_frame,
    send_at_once,
    send_frame,
    start_of_checksum,
)
from megatron_daro.sync.plan import Connect, Post, SendFailure, SendPlan, SendReport
from megatron_daro.sync.sender import in_thread
from megatron_daro.sync.shard_plan import Box, Write

ServerRank = tuple[int, int]
"""(server, its rank): the server by its place among the targets of the plan. A receiver is here one of these."""

_PIECE_BYTES = 2**24
# Servers were just asked to open the update: those that still answer ask their ranks to connect at once.
_LONGEST_JOIN_S = 60.0
_TELL_S = 5.0
_NOT_CONNECTED = "it did not connect (can its host reach the trainer's, at ports that the system chooses?)"
_BACKLOG = 1024
# Of a connection that has not shown the key yet.
_LONGEST_HELLO = 2**16
_PROTOCOLS = {"rdma": "rdma", "mooncake_tcp": "tcp"}
"""engine.sglang.shards_over -> Mooncake's name of it."""
# Connections that have memory at once for Mooncake to write from: 16 MiB of the device each.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a rank waits, what must be shown there, and how many entries it has for whom. wanted: how many each rank of
    a server has in all, by this rank's plan."""

    host: str
    port: int
    key: str
    entries: Mapping[ServerRank, int]
    wanted: tuple[int, ...]


class ShardSender:
    """One rank's end. `close` it, or it stays listening."""

    def __init__(self, host: str, connect: Connect) -> None:
        """Listen to nothing. Args: host: address of this rank as servers reach it. connect: to servers."""
        self._host, self._connect = host, connect
        self._serving: _Serving | None = None

    def offer(self, writes: Iterable[Write], wanted: tuple[int, ...]) -> Offer:
        """Begin to listen for those that these writes are for; an earlier offer is withdrawn. Args: wanted: see
        `Offer`."""
        self.close()
        self._serving = _Serving(self._host, writes, wanted)
        return self._serving.offer

    def send(self, tensors: Mapping[str, Tensor], plan: SendPlan, offers: Sequence[Offer] = ()) -> SendReport:
        """Serve everyone of the offer; blocks until each has everything or has failed.

        Args:
            tensors: this rank's parameters by the names in the writes; they must not change meanwhile.
            plan: to whom. offers: of all ranks, on the one rank that is to call the servers.

        Returns:
            The report, whose failures concern their servers alone.
        """
        serving = self._serving
        assert serving is not None, "offer comes first"
        calling = in_thread(lambda: asyncio.run(self._call_all(plan, offers))) if offers else None
        try:
            return serving.serve(tensors, plan, calling)
        finally:
            self.close()

    def close(self) -> None:
        """Withdraw the offer; who is being served loses the connection. May be called twice, from any thread."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    async def _call_all(self, plan: SendPlan, offers: Sequence[Offer]) -> None:
        async with self._connect() as post:
            await asyncio.gather(*(self._call(post, plan, offers, server) for server in range(len(plan.targets))))

    async def _call(self, post: Post, plan: SendPlan, offers: Sequence[Offer], server: int) -> None:
        """Have a server's ranks connect; its senders are told how that ended."""
        target = plan.targets[server]
        requests = [request_for((server, rank), offers, plan.timeout_s) for rank in range(target.ranks)]
        loader = TRANSPORTS[plan.transport].loader
        body = {"serialized_named_tensors": requests, "load_format": loader, "flush_cache": False, "selector": "target"}
        told: dict[str, Any] = {"server": server, "lost": _NOT_CONNECTED}
        try:
            await post(target.url, "/update_weights_from_tensor", body, plan.timeout_s)
        except EngineError as error:
            told |= {"lost": str(error), "refused": isinstance(error, RefusedError), "everywhere": True}
        senders = [offer for offer in offers if any(s == server for s, _ in offer.entries)]
        await asyncio.gather(*(asyncio.to_thread(_tell, offer, told) for offer in senders))


def check_offers(offers: Sequence[Offer], servers: int) -> None:
    """Look whether every rank of every server is offered exactly what it has. Raises SyncError: plans differ."""
    for receiver in itertools.product(range(servers), range(len(offers[0].wanted))):
        offered = sum(offer.entries.get(receiver, 0) for offer in offers)
        wanted = {offer.wanted[receiver[1]] for offer in offers}
        if wanted != {offered}:
            raise SyncError(
                f"weights from shards to shards: rank {receiver[1]} of server {receiver[0]} has {sorted(wanted)} "
                f"entries, the trainer's ranks offer {offered}: they took different layouts. Please report it, and set "
                "engine.sglang.sync=distributed"
            )


def request_for(receiver: ServerRank, offers: Sequence[Offer], timeout_s: float) -> str:
    """Return a receiver's part of the call: the base64 of what SGLang unpickles as its named tensors."""
    senders = [offer for offer in offers if receiver in offer.entries]
    turn = sum(receiver) % max(1, len(senders))
    request = {
        "senders": [[offer.host, offer.port, offer.key] for offer in senders[turn:] + senders[:turn]],
        "server": receiver[0],
        "rank": receiver[1],
        "entries": sum(offer.entries[receiver] for offer in senders),
        "timeout_s": timeout_s,
    }
    # Its unpickler takes tensors that were pickled plainly (utils/common.py, SafeUnpickler).
    return base64.b64encode(pickle.dumps([(json.dumps(request), torch.zeros(1))])).decode()


def _tell(offer: Offer, content: Mapping[str, Any]) -> None:
    """Say something to a sender that may be through already."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((offer.host, offer.port), _TELL_S) as connection,
    ):
        send_frame(connection, {"key": offer.key, **content})


class _Serving:
    """One offer."""

    def __init__(self, host: str, writes: Iterable[Write], wanted: tuple[int, ...]) -> None:
        self._writes: dict[ServerRank, list[Write]] = {}
        for write in writes:
            self._writes.setdefault((write.server, write.rank), []).append(write)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        entries = {receiver: sum(write.entries for write in own) for receiver, own in self._writes.items()}
        self.offer = Offer(host, self._listener.getsockname()[1], secrets.token_hex(16), entries, wanted)
        self._changed = threading.Condition()
        self._connected: dict[ServerRank, socket.socket] = {}
        self._ended: dict[ServerRank, SendFailure | None] = {}
        self._crash: BaseException | None = None
        self._closed = False
        self._turn = threading.Semaphore(_AT_ONCE)

    def serve(self, tensors: Mapping[str, Tensor], plan: SendPlan, calling: Future[None] | None) -> SendReport:
        """See `ShardSender.send`. calling: the call to the servers, where it comes from this rank."""
        started = time.perf_counter()
        self._tensors, self._plan = tensors, plan
        in_thread(self._accept)
        join_by = time.monotonic() + _LONGEST_JOIN_S
        with self._changed:
            while len(self._ended) < len(self._writes) and self._crash is None:
                if time.monotonic() > join_by:
                    self._give_up(f"it did not connect within {_LONGEST_JOIN_S:g} s")
                self._changed.wait(1.0)
        if calling is not None:
            calling.result()
        if self._crash is not None:
            raise self._crash
        failures: dict[str, SendFailure] = {}
        for (server, rank), failure in sorted(self._ended.items()):
            if failure is not None:
                text = f"rank {rank}: {failure.text}"
                failures.setdefault(plan.targets[server].name, SendFailure(failure.kind, text))
        whole = [receiver for receiver, failure in self._ended.items() if failure is None]
        return SendReport(
            num_bytes=sum(_bytes_of(self._writes[receiver], tensors) for receiver in whole),
            send_s=time.perf_counter() - started,
            failures=failures,
            apart=True,
        )

    def close(self) -> None:
        """End everything that still waits."""
        with self._changed:
            self._closed = True
            for connection in self._connected.values():
                _shut(connection)
            for receiver in self._writes.keys() - self._ended.keys():
                self._ended[receiver] = SendFailure("group", "the sender was stopped")
            self._changed.notify_all()
        _shut(self._listener)  # ends the wait of `accept`
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            in_thread(partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        """Serve a connection, or take in what it says."""
        receiver: ServerRank | None = None
        failure: SendFailure | None = None
        try:
            with connection:
                connection.settimeout(self._plan.timeout_s)
                send_at_once(connection)
                hello = read_frame(connection, _LONGEST_HELLO)
                if not hmac.compare_digest(str(hello.get("key")).encode(), self.offer.key.encode()):
                    send_frame(connection, {"error": "the key is not that of this update"})
                elif "lost" in hello:
                    self._lose(hello)
                else:
                    receiver = self._begin(hello, connection)
                    failure = self._stream(connection, self._writes[receiver])
        except (OSError, ValueError) as error:
            failure = SendFailure("unanswered", f"the connection was lost: {error}")
        except BaseException as error:  # raised by `serve`
            self._crash = error
        if receiver is not None:
            self._end(receiver, failure)

    def _begin(self, hello: Mapping[str, Any], connection: socket.socket) -> ServerRank:
        receiver = hello.get("server", -1), hello.get("rank", -1)
        with self._changed:
            if receiver not in self._writes or receiver in self._connected or receiver in self._ended:
                raise ValueError(f"receiver {receiver} is not expected")
            self._connected[receiver] = connection
        return receiver

    def _end(self, receiver: ServerRank, failure: SendFailure | None) -> None:
        """Note how a receiver's part ended; the first word counts."""
        with self._changed:
            self._ended.setdefault(receiver, failure)
            self._connected.pop(receiver, None)
            self._changed.notify_all()

    def _lose(self, told: Mapping[str, Any]) -> None:
        """Note that a server's call has ended: ranks that have not connected never will; if it failed, all fail."""
        failure = SendFailure("refused" if told.get("refused") else "unanswered", told["lost"])
        with self._changed:
            of_server = [receiver for receiver in self._writes if receiver[0] == told["server"]]
            for receiver in of_server:
                connection = self._connected.get(receiver)
                if connection is None or told.get("everywhere"):
                    self._ended.setdefault(receiver, failure)
                if connection is not None and told.get("everywhere"):
                    _shut(connection)
            self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        for receiver in self._writes.keys() - self._connected.keys():
            self._ended.setdefault(receiver, SendFailure("unanswered", why))

    def _stream(self, connection: socket.socket, writes: Sequence[Write]) -> SendFailure | None:
        """Give a receiver what it is to get. Returns what it found wrong."""
        pieces = [piece for write in writes for piece in _pieces(write, self._tensors[write.source].element_size())]
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        manifest = [[p.target, p.target_shape, *p.target_box, dtypes[p.source]] for p in pieces]
        protocol = _PROTOCOLS.get(self._plan.details["shards_over"])
        send_frame(connection, {"pieces": manifest} | ({"protocol": protocol} if protocol else {}))
        answer = read_frame(connection)
        if "error" in answer:
            return _failure(answer)
        try:
            if protocol:
                checksum = self._write_all(connection, pieces, manifest, _engine(self.offer.host, protocol), answer)
            else:
                checksum = self._send_all(connection, pieces, manifest)
            send_frame(connection, {"checksum": checksum})
            answer = _last_word(connection)
        except _FailedThereError as error:
            return _failure(error.answer)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):
                return _failure(_last_word(connection))  # what it said before it closed
            raise error
        return _failure(answer) if "error" in answer else None

    def _send_all(self, connection: socket.socket, pieces: Sequence[Write], manifest: Sequence[Any]) -> int:
        """Send the bytes of all pieces. Returns their checksum. Raises OSError, _FailedThereError."""
        buffer, checksum = _Buffer(), start_of_checksum(manifest)
        for piece in pieces:
            if _speaks(connection):
                raise _FailedThereError(read_frame(connection))
            data = buffer.filled(_boxed(self._tensors[piece.source], piece.source_box))
            checksum = checksum_of(data, checksum)
            connection.sendall(data)
        return checksum

    def _write_all(
        self,
        connection: socket.socket,
        pieces: Sequence[Write],
        manifest: Sequence[Any],
        engine: Engine,
        granted: Mapping[str, Any],
    ) -> int:
        """Write all pieces into the memory that was granted. Returns and raises as `_send_all` does."""
        slot_bytes, bundles = packed(manifest)
        checksum, device = start_of_checksum(manifest), self._tensors[pieces[0].source].device
        with self._turn, _current(device), _memory(engine, slot_bytes, device) as memory:
            for number, bundle in enumerate(bundles):
                if number >= SLOTS and "free" not in (answer := read_frame(connection)):
                    raise _FailedThereError(answer)
                for index, at in bundle:
                    values = _boxed(self._tensors[pieces[index].source], pieces[index].source_box)
                    memory[at : at + values.nbytes].view(values.dtype).view(values.shape).copy_(values)
                filled = memory[: bundle_bytes(manifest, bundle)]
                checksum = checksum_of_words(filled, checksum)  # a GPU has copied then
                engine.write(granted["session"], filled, granted["slots"][number % SLOTS])
                send_frame(connection, {"written": number})
        return checksum


@contextlib.contextmanager
def _memory(engine: Engine, num_bytes: int, device: torch.device) -> Iterator[Tensor]:
    memory = engine.take(num_bytes, device)
    try:
        yield memory
    finally:
        engine.give_back(memory)


class _FailedThereError(Exception):
    """A receiver said in the middle that it failed."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer.get("error"))
        self.answer = answer


def _engine(host: str, protocol: str) -> Engine:
    """Return Mooncake's engine of this process. Raises SyncError: it is this side that has none."""
    try:
        return engine_of(host, protocol)
    except (ImportError, OSError) as error:
        raise SyncError(
            f"engine.sglang.shards_over: {error}; fix: `pip install mooncake-transfer-engine` for the trainer too (it "
            "needs libibverbs), or set engine.sglang.shards_over=tcp"
        ) from error


def _last_word(connection: socket.socket) -> dict[str, Any]:
    """Return what a receiver says at its end."""
    while "free" in (answer := read_frame(connection)):
        pass
    return answer


def _failure(answer: Mapping[str, Any]) -> SendFailure:
    return SendFailure("refused" if answer.get("refused") else "group", str(answer["error"]))


def _speaks(connection: socket.socket) -> bool:
    poller = select.poll()  # select.select fails above 1023 open descriptors
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Buffer:
    """Host memory of one piece, which is used again for the next: pinned where pieces come from a GPU."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def filled(self, values: Tensor) -> memoryview:
        """Return the bytes of a tensor, valid until the next call."""
        if values.device.type == "cpu" and values.is_contiguous():
            return memoryview(values.reshape(-1).view(torch.uint8).numpy().data)
        with _current(values.device):
            if self._held.nbytes < values.nbytes:
                self._held = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=values.is_cuda)
            host = self._held[: values.nbytes]
            host.view(values.dtype).view(values.shape).copy_(values)
        return memoryview(host.numpy().data)


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Pinning memory makes a context on the device that is current, in a new thread the first."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _boxed(tensor: Tensor, box: Box) -> Tensor:
    offset, shape = box
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _bytes_of(writes: Sequence[Write], tensors: Mapping[str, Tensor]) -> int:
    return sum(write.entries * tensors[write.source].element_size() for write in writes)


def _pieces(write: Write, itemsize: int) -> Iterator[Write]:
    """Cut a write along its first axis of several entries, so that a piece is at most `_PIECE_BYTES`."""
    shape = write.source_box[1]
    axis = next((i for i, length in enumerate(shape) if length > 1), 0)
    row = math.prod(shape[axis + 1 :]) * itemsize
    step = max(1, _PIECE_BYTES // row)
    shift = len(write.target_box[1]) - len(shape)
    for at in range(0, shape[axis], step):
        count = min(step, shape[axis] - at)
        yield Write(
            write.server,
            write.rank,
            write.source,
            _part(write.source_box, axis, at, count),
            write.target,
            write.target_shape,
            _part(write.target_box, axis + shift, at, count),
        )


def _part(box: Box, axis: int, at: int, count: int) -> Box:
    offset, shape = box
    moved = tuple(o + at * (i == axis) for i, o in enumerate(offset))
    return moved, tuple(count if i == axis else n for i, n in enumerate(shape))
