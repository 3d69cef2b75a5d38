"""Runs inside SGLang: a rank of a server takes its weights from the trainer's ranks, straight into its parameters.

A server is started with `--custom-weight-loader megatron_daro_shards.receive` and this folder in its PYTHONPATH. Then
/update_weights_from_tensor with that load_format calls `receive` on each of its ranks, between /begin_weight_update
and /end_weight_update. The first tensor's name is the request: JSON with `senders`, each [host, port, key], `server`
and `rank` of this receiver, `entries`, the number of elements that it must get in all, and `timeout_s` without
progress.

On each connection (frames are JSON after four bytes of length, big-endian):

    receiver: {"key", "server", "rank"}
    sender:   {"pieces": [[parameter, its shape, offset, shape, dtype], ...]}      or {"error"}
    receiver: {}                                                        or {"error", "refused"}
    sender:   the bytes of all pieces, one after the other, then {"checksum"} of the list and of them
    receiver: {} once it has everything from everyone                   or {"error", "refused"}

Where the sender's first frame names a `protocol`, Mooncake's transfer engine carries the bytes instead, from memory of
one device to that of another, several pieces at once (`packed`). Both then need mooncake-transfer-engine:

    receiver: {"session", "slots": [address, ...]}                      or {"error", "refused"}
    sender:   writes a bundle into the next slot, then {"written"}
    receiver: {"free"} when it has copied it out                        or {"error", "refused"}
    sender:   {"checksum"} after the last one; the rest is as above

A receiver that fails tells all its senders. It raises nothing: SGLang does not catch what a loader raises (0.5.23,
managers/scheduler_components/weight_updater.py, `update_weights_from_tensor`), and its scheduler would end. So the
server's answer to the request does not tell whether it worked; the senders' reports do. Only the standard library,
numpy and torch are used, since the interpreter is the server's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

LONGEST_FRAME = 2**28
_LENGTH = struct.Struct(">I")
# Most connections that are read at once; each has a buffer for a piece.
_AT_ONCE = 8
_ODD = 0x9E3779B97F4A7C15
_WORD = 8
SLOTS = 2
_SLOT_BYTES = 2**24
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Fill the model's parameters with what the senders of the request have for this rank. Raises nothing."""
    try:
        _Receipt(dict(model.named_parameters()), json.loads(named_tensors[0][0])).take()
    except Exception:
        logger.exception("weights from shards: the request could not be read")


class RefusedPieceError(Exception):
    """An offered piece does not fit this rank's parameters."""


class _Receipt:
    """One update of one rank."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> None:
        self._parameters, self._request = parameters, request
        self._turn = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._open: dict[str, socket.socket] = {}
        self._failure: Exception | None = None
        self._entries = 0

    def take(self) -> None:
        """Read all senders, and tell all how it ended."""
        senders = self._request["senders"]
        with ThreadPoolExecutor(max(1, len(senders)), thread_name_prefix="shards") as pool:
            list(pool.map(self._read, senders))
            if self._failure is None and self._entries != self._request["entries"]:
                got, wanted = self._entries, self._request["entries"]
                self._failure = RefusedPieceError(f"got {got} entries in all, {wanted} were offered")
            if self._failure is not None:
                logger.error("weights from shards: %s", self._failure)
            list(pool.map(self._tell, list(self._open.values())))

    def _read(self, sender: Sequence[Any]) -> None:
        host, port, key = sender
        name = f"{host}:{port}"
        try:
            connection = socket.create_connection((host, port), self._request["timeout_s"])
            send_at_once(connection)
            with self._lock:
                self._open[name] = connection
            hello = {"key": key, "server": self._request["server"], "rank": self._request["rank"]}
            send_frame(connection, hello)
            manifest = read_frame(connection)
            if "error" in manifest:
                raise ConnectionError(manifest["error"])
            self._check(manifest["pieces"])
            if "protocol" not in manifest:
                send_frame(connection, {})
            with self._turn:
                if self._failure is None:
                    self._copy(connection, manifest)
        except Exception as error:  # reported to all senders
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """Keep the first failure, and end the waiting of the other threads."""
        with self._lock:
            if self._failure is not None:
                return
            refused = isinstance(error, RefusedPieceError)
            self._failure = error if refused else ConnectionError(f"from {name}: {type(error).__name__}: {error}")
            for connection in self._open.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def _check(self, pieces: Sequence[Any]) -> None:
        for name, whole, offset, shape, dtype in pieces:
            parameter = self._parameters.get(name)
            place = "is none here" if parameter is None else f"is {tuple(parameter.shape)} here"
            if parameter is None or list(parameter.shape) != whole or dtype not in _DTYPES:
                raise RefusedPieceError(f"{name}, planned as {tuple(whole)} and sent in {dtype}, {place}")
            if any(o < 0 or o + n > length for o, n, length in zip(offset, shape, whole, strict=True)):
                raise RefusedPieceError(f"{name}: got {tuple(shape)} at {tuple(offset)}, which {place}")

    def _copy(self, connection: socket.socket, manifest: Mapping[str, Any]) -> None:
        """Copy all pieces into their places, and check their checksum."""
        device = next(iter(self._parameters.values())).device
        # Pinning memory makes a context on the device that is current.
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            copy = self._copy_written if "protocol" in manifest else self._copy_sent
            checksum = copy(device, connection, manifest)
        sent = read_frame(connection)["checksum"]
        if sent != checksum:
            raise ConnectionError(
                f"the bytes that arrived are not those that were sent (checksum {checksum}, not {sent})"
            )
        with self._lock:
            self._entries += sum(math.prod(shape) for *_, shape, _ in manifest["pieces"])

    def _copy_sent(self, device: torch.device, connection: socket.socket, manifest: Mapping[str, Any]) -> int:
        """Read the bytes of all pieces from the connection. Returns their checksum."""
        pieces = manifest["pieces"]
        longest = max(map(_bytes_of, pieces), default=0)
        buffer = torch.empty(longest, dtype=torch.uint8, pin_memory=device.type == "cuda")
        window, checksum = memoryview(buffer.numpy().data), start_of_checksum(pieces)
        for piece in pieces:
            size = _bytes_of(piece)
            read_exactly(connection, window[:size])
            checksum = checksum_of(window[:size], checksum)
            self._place(piece, buffer[:size])
        return checksum

    def _copy_written(self, device: torch.device, connection: socket.socket, manifest: Mapping[str, Any]) -> int:
        """Take all pieces out of the memory that the sender writes them into. Returns their checksum."""
        pieces = manifest["pieces"]
        slot_bytes, bundles = packed(pieces)
        checksum = start_of_checksum(pieces)
        engine = engine_of(connection.getsockname()[0], manifest["protocol"])
        memory = engine.take(SLOTS * slot_bytes, device)
        slots = memory.split(slot_bytes)
        send_frame(connection, {"session": engine.session, "slots": [slot.data_ptr() for slot in slots]})
        for number, bundle in enumerate(bundles):
            read_frame(connection)
            slot = slots[number % SLOTS]
            for index, at in bundle:
                self._place(pieces[index], slot[at : at + _bytes_of(pieces[index])])
            checksum = checksum_of_words(slot[: bundle_bytes(pieces, bundle)], checksum)  # a GPU has copied by then
            send_frame(connection, {"free": number})
        engine.give_back(memory)  # not after a failure: the sender may still write
        return checksum

    def _place(self, piece: Sequence[Any], data: torch.Tensor) -> None:
        name, _, offset, shape, dtype = piece
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        self._parameters[name][box].copy_(data.view(_DTYPES[dtype]).view(shape))

    def _tell(self, connection: socket.socket) -> None:
        """Send the result, and close. Unread data then resets the connection, which the sender sees afterwards."""
        failure = self._failure
        answer = {"error": str(failure), "refused": isinstance(failure, RefusedPieceError)} if failure else {}
        with contextlib.suppress(OSError), connection:
            send_frame(connection, answer)


def start_of_checksum(pieces: Sequence[Any]) -> int:
    """Return the checksum of a list of pieces, with which the checksum of their bytes begins."""
    return checksum_of(memoryview(json.dumps(pieces).encode()), 0)


def checksum_of(data: memoryview, before: int) -> int:
    """Return the sum of all words of 8 bytes and of the bytes after the last word, plus a multiple of the checksum of
    all that came before, modulo 2**64. Any change of one bit changes it. With a crc32 (3.9 GB/s) a sync on two cores
    took 1.66 times as long as a bare broadcast, with this 1.27 times.
    """
    words = len(data) // 8
    total = int(np.frombuffer(data, np.uint64, words).sum(dtype=np.uint64)) + sum(data[8 * words :])
    return (before * _ODD + total) % 2**64


def checksum_of_words(data: torch.Tensor, before: int) -> int:
    """Return `checksum_of` of bytes on any device, uint8 [a multiple of 8]. Sums of int64 wrap like those of words."""
    return (before * _ODD + int(data.view(torch.int64).sum())) % 2**64


# Mooncake's transfer engine --------------------------------------------------------------------------------------


class Engine:
    """The transfer engine of this process, which has threads and ports of its own."""

    def __init__(self, host: str, protocol: str) -> None:
        """Start it. Args: host: an address of this machine that the other machines reach. protocol: "rdma" or "tcp".

        Raises:
            ImportError: mooncake-transfer-engine is not installed here. OSError: it did not start.
        """
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found,unused-ignore]

        self._engine = TransferEngine()
        # The last argument, empty, lets the engine choose the network device for each block of memory.
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise OSError(f"Mooncake's transfer engine does not start on {host} with the protocol {protocol!r}")
        name = f"[{host}]" if ":" in host else host
        self.session = f"{name}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._free: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
        self._kept: list[torch.Tensor] = []

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return registered memory, uint8, to write into and from. Raises OSError: it cannot be registered.

        Memory that was given back is used again, and stays registered: a peer asks for the key of an address only once,
        and after another registration would write with the old key
        (mooncake-transfer-engine/src/transport/rdma_transport/worker_pool.cpp, `submitPostSend`: descriptors are read
        again only where the address is not in them).
        """
        with self._lock:
            if blocks := self._free[num_bytes, str(device)]:
                return blocks.pop()
        with torch.inference_mode(False), _whole_segments():
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if self._engine.register_memory(memory.data_ptr(), num_bytes):
            raise OSError(f"Mooncake's transfer engine cannot register {num_bytes} bytes of {device}")
        self._kept.append(memory)
        return memory

    def give_back(self, memory: torch.Tensor) -> None:
        """Let memory be used again; no sender may still write into it."""
        with self._lock:
            self._free[memory.nbytes, str(memory.device)].append(memory)

    def write(self, session: str, source: torch.Tensor, address: int) -> None:
        """Copy memory of this process to an address of another process; the bytes are there when this returns. Raises
        OSError."""
        if self._engine.transfer_sync_write(session, source.data_ptr(), address, source.nbytes):
            raise OSError(f"Mooncake's transfer engine could not write to {session}; its own log says more")


_changing_settings = threading.Lock()


@contextlib.contextmanager
def _whole_segments() -> Iterator[None]:
    """Allocate outside expandable segments: before Mooncake's #3538, RDMA cannot register more of them than one
    mapping, 20 MiB (rdma_context.cpp, `exportDmabuf`: the driver exports no larger range of them). One thread at a
    time, since the settings are the process's.

    Free blocks of such segments are then passed over. All settings are given again, since torch resets those that the
    text lacks to their defaults.
    Source: torch 2.13, CUDACachingAllocator.cpp, `get_free_block`; c10/core/AllocatorConfig.cpp, `parseArgs`.
    """
    with _changing_settings:
        settings = torch._C._accelerator_getAllocatorSettings()
        if "expandable_segments" not in settings:
            yield
            return
        torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
        try:
            yield
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)


_engines: dict[tuple[str, str], Engine] = {}
_making = threading.Lock()


def engine_of(host: str, protocol: str) -> Engine:
    """Return the engine of this process, made at the first call. Raises as `Engine` does."""
    with _making:
        if (host, protocol) not in _engines:
            _engines[host, protocol] = Engine(host, protocol)
        return _engines[host, protocol]


def packed(pieces: Sequence[Any]) -> tuple[int, list[list[tuple[int, int]]]]:
    """Return (bytes of a slot, the bundles in order, each with (index, first byte in the slot) of its pieces). Both
    ends derive the bundles from the list of pieces."""
    sizes = [_aligned(_bytes_of(piece)) for piece in pieces]
    slot_bytes = max([_SLOT_BYTES, *sizes])
    bundles: list[list[tuple[int, int]]] = []
    at = slot_bytes
    for index, size in enumerate(sizes):
        if at + size > slot_bytes:
            bundles.append([])
            at = 0
        bundles[-1].append((index, at))
        at += size
    return slot_bytes, bundles


def bundle_bytes(pieces: Sequence[Any], bundle: Sequence[tuple[int, int]]) -> int:
    """Return how much of a slot a bundle takes."""
    index, at = bundle[-1]
    return at + _aligned(_bytes_of(pieces[index]))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def _bytes_of(piece: Sequence[Any]) -> int:
    *_, shape, dtype = piece
    return math.prod(shape) * _DTYPES[dtype].itemsize


# Frames ----------------------------------------------------------------------------------------------------------


def send_frame(connection: socket.socket, content: Mapping[str, Any]) -> None:
    """Send an object as JSON."""
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def send_at_once(connection: socket.socket) -> None:
    """Send short frames at once: two in a row would wait 40 ms for the other end's delayed acknowledgement."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def read_frame(connection: socket.socket, longest: int = LONGEST_FRAME) -> dict[str, Any]:
    """Return the next object, at most `longest` bytes. Raises OSError: the connection ended; ValueError: it is none."""
    header = bytearray(_LENGTH.size)
    read_exactly(connection, memoryview(header))
    (length,) = _LENGTH.unpack(header)
    if length > longest:
        raise ValueError(f"a frame of {length} bytes; allowed: {longest}")
    data = bytearray(length)
    read_exactly(connection, memoryview(data))
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"a frame that is nested too deeply: {data!r:.80}") from None
    if not isinstance(content, dict):
        raise ValueError(f"a frame that is no object: {content!r:.80}")
    return content


def read_exactly(connection: socket.socket, into: memoryview) -> None:
    """Fill the buffer. Raises OSError: the connection ended, or nothing came within its time limit."""
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the connection was closed in the middle")
        into = into[count:]
