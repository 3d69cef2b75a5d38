"""The sending end of a sync from shards to shards: each rank of the trainer serves what the plan has it send.

Each rank listens (`ShardSender.offer`); one of them tells each server by HTTP where the server's ranks find their
senders. The server's ranks connect, and each connection carries what one sender has for one receiver, or, if Mooncake's
transfer engine carries it from GPU to GPU (`engine.sglang.shards_over`), says when a part has been written. The
receiving end, which runs inside SGLang, and the protocol of a connection: in_server/megatron_daro_shards.py. If one
pair fails, its receiver takes nothing more; all other receivers still get everything, and the report names the servers
that lack some. A server answers its call when all of its ranks have finished; a rank that has not connected by then
never will.

Only a connection that shows the key, which is new for each update, is given anything.
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
from megatron_daro.sync.shard_plan import Box, Write
from megatron_daro.sync.transport_sender import in_thread

ServerRank = tuple[int, int]
"""(server, its rank), the server by its place among the targets of the plan. "Receiver" means one of these here."""

_PIECE_BYTES = 2**24
# Servers have just answered the opening of the update: those that still live have their ranks connect at once.
_LONGEST_JOIN_S = 60.0
_TELL_S = 5.0
_NOT_CONNECTED = "it did not connect (can its host reach the trainer's, at ports that the system chooses?)"
_BACKLOG = 1024
# Limit of the first message, in bytes, since its sender has not shown the key yet.
_LONGEST_HELLO = 2**16
_PROTOCOLS = {"rdma": "rdma", "mooncake_tcp": "tcp"}
"""engine.sglang.shards_over -> Mooncake's name of the protocol."""
# How many connections may have memory for Mooncake to write from at once: 16 MiB of the device each.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank offers. host, port: where it listens. key: to be shown there. entries: how many it has for each
    receiver. wanted: how many each rank of a server has in all, by this rank's plan."""

    host: str
    port: int
    key: str
    entries: Mapping[ServerRank, int]
    wanted: tuple[int, ...]


class ShardSender:
    """The sending end on one rank. `close` it, or it keeps listening."""

    def __init__(self, host: str, connect: Connect) -> None:
        """Do not listen yet. Args: host: address of this rank as servers reach it. connect: to servers."""
        self._host, self._connect = host, connect
        self._serving: _Serving | None = None

    def offer(self, writes: Iterable[Write], wanted: tuple[int, ...]) -> Offer:
        """Begin to listen for the receivers of these writes; withdraw an earlier offer. Args: wanted: see `Offer`."""
        self.close()
        self._serving = _Serving(self._host, writes, wanted)
        return self._serving.offer

    def send(self, tensors: Mapping[str, Tensor], plan: SendPlan, offers: Sequence[Offer] = ()) -> SendReport:
        """Serve all receivers of the offer; block until each has everything or has failed.

        Args:
            tensors: this rank's parameters by the names in the writes; they must not change meanwhile.
            plan: its targets are the servers. offers: of all ranks, on the rank that is to call the servers; else none.

        Returns:
            The report; a failure affects its own server only (`apart`).
        """
        serving = self._serving
        assert serving is not None, "offer comes first"
        calling = in_thread(lambda: asyncio.run(self._call_all(plan, offers))) if offers else None
        try:
            return serving.serve(tensors, plan, calling)
        finally:
            self.close()

    def close(self) -> None:
        """Withdraw the offer and cut the connections that are being served. May be called twice, from any thread."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    async def _call_all(self, plan: SendPlan, offers: Sequence[Offer]) -> None:
        async with self._connect() as post:
            await asyncio.gather(*(self._call(post, plan, offers, server) for server in range(len(plan.targets))))

    async def _call(self, post: Post, plan: SendPlan, offers: Sequence[Offer], server: int) -> None:
        """Have a server's ranks connect; when its call has ended, tell all its senders how."""
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
    """Check that each rank of each server is offered as many entries as it has. Raises SyncError: plans differ."""
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
    """Return a receiver's part of the call to its server: base64 of what SGLang unpickles as named tensors."""
    senders = [offer for offer in offers if receiver in offer.entries]
    turn = sum(receiver) % max(1, len(senders))
    request = {
        "senders": [[offer.host, offer.port, offer.key] for offer in senders[turn:] + senders[:turn]],
        "server": receiver[0],
        "rank": receiver[1],
        "entries": sum(offer.entries[receiver] for offer in senders),
        "timeout_s": timeout_s,
    }
    # SGLang's unpickler accepts a tensor that was pickled by value (utils/common.py, SafeUnpickler).
    return base64.b64encode(pickle.dumps([(json.dumps(request), torch.zeros(1))])).decode()


def _tell(offer: Offer, content: Mapping[str, Any]) -> None:
    """Send a message to a sender, which may have finished already."""
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
        """See `ShardSender.send`. calling: the calls to the servers, if this rank makes them."""
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
        """End everything that is still running or awaited."""
        with self._changed:
            self._closed = True
            for connection in self._connected.values():
                _shut(connection)
            for receiver in self._writes.keys() - self._ended.keys():
                self._ended[receiver] = SendFailure("group", "the sender was stopped")
            self._changed.notify_all()
        _shut(self._listener)  # ends the `accept` that waits
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            in_thread(partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        """Serve a receiver's connection, or take in a message about a server's call."""
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
        """Note how a receiver's part ended, unless its end was noted before."""
        with self._changed:
            self._ended.setdefault(receiver, failure)
            self._connected.pop(receiver, None)
            self._changed.notify_all()

    def _lose(self, told: Mapping[str, Any]) -> None:
        """Note that a server's call has ended: ranks that have not connected never will. If it failed, all its
        ranks fail whose end was not noted before."""
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
        """Send a receiver its writes. Returns the failure that it reports; None if it has everything."""
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
                return _failure(_last_word(connection))  # the reason that it sent before it closed
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
        """Write all pieces into the memory that the receiver granted. Returns and raises as `_send_all` does."""
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
                checksum = checksum_of_words(filled, checksum)  # reads the sum, so the copies have ended
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
    """A receiver reported a failure before it got everything."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer.get("error"))
        self.answer = answer


def _engine(host: str, protocol: str) -> Engine:
    """Return this process's Mooncake engine. Raises SyncError: the trainer's side lacks Mooncake."""
    try:
        return engine_of(host, protocol)
    except (ImportError, OSError) as error:
        raise SyncError(
            f"engine.sglang.shards_over: {error}; fix: `pip install mooncake-transfer-engine` for the trainer too (it "
            "needs libibverbs), or set engine.sglang.shards_over=tcp"
        ) from error


def _last_word(connection: socket.socket) -> dict[str, Any]:
    """Return a receiver's final answer."""
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
    """Host memory for one piece, reused for the next; pinned if pieces come from a GPU."""

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
    """Make this the current device within the block: pinning memory makes a context on the current device, which in a
    new thread is device 0."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _boxed(tensor: Tensor, box: Box) -> Tensor:
    offset, shape = box
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _bytes_of(writes: Sequence[Write], tensors: Mapping[str, Tensor]) -> int:
    return sum(write.entries * tensors[write.source].element_size() for write in writes)


def _pieces(write: Write, itemsize: int) -> Iterator[Write]:
    """Cut a write along its first axis longer than 1, into pieces of at most `_PIECE_BYTES`, or of one index each if
    that is more."""
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
