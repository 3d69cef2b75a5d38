"""How the nodes of a job find each other and stay in touch: a file in the shared directory, then one TCP line each.

    first node (Greeter)                                   another one (reach_head, Line)
    listens, writes head.json: address, port, secret   ->  reads it, connects
                                                       <-  name, secret, time, what its health check found
    all there and well: "join", where Ray is           ->  joins Ray
                                                       <-  "joined"; then "alive" every BEAT_S
    after a failed training: "check"                   ->  looks at its GPUs
                                                       <-  "checked", with what it found
    "end", or the line is closed                       ->  ends

So a shared directory that is not shared, a closed network, and a node that is lost or frozen are each seen and named.
Messages are JSON, one a line; head.json is readable by the user only.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import psutil

from megatron_daro.errors import DeadlineError, WorkerError
from megatron_daro.workshop.slurm.health import clock_problems

HEAD_FILE = "head.json"
_POLL_S = 0.2
BEAT_S = 10.0
"""Seconds between two signs of life of a node."""
FROZEN_S = 90.0
"""Seconds without a sign of life after which a node counts as lost."""
_LONGEST_LINE = 2**16


class Head(TypedDict):
    """What head.json says."""

    host: str
    port: int
    secret: str


class Message(TypedDict, total=False):
    """A line. From a node: first its name, secret, time and problems, then event (alive, joined, checked with problems,
    unstarted or failed with why). To a node: order (join, check, end), and with join the address of Ray and the
    directory of its session."""

    node: str
    secret: str
    time: float
    problems: list[str]
    event: str
    why: str
    order: str
    address: str
    temporary: str


@dataclass(slots=True)
class Member:
    """A node that has reported."""

    name: str
    problems: list[str]
    writer: asyncio.StreamWriter
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    checked: asyncio.Event = field(default_factory=asyncio.Event)


def own_address(node: str, addresses: Mapping[str, str], interface: str | None) -> str:
    """Return the address of this node: as given by name, else of the network card, else what the system would use.

    Raises:
        WorkerError: no such card, or it has no IPv4 address.
    """
    if node in addresses:
        return addresses[node]
    if interface:
        cards = psutil.net_if_addrs()
        of_card = [a.address for a in cards.get(interface, ()) if a.family == socket.AF_INET]
        if not of_card:
            raise WorkerError(
                f"{node}: network_interface {interface!r} has no IPv4 address here; cards: {', '.join(sorted(cards))}"
            )
        return of_card[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which of its addresses the system would use
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


class Greeter:
    """The first node's side: collects the reports of the others, gives orders, notices lost nodes."""

    def __init__(self, directory: Path, host: str, expected: int) -> None:
        self._directory, self._host, self._expected = directory, host, expected
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Condition()
        self.members: dict[str, Member] = {}
        self.trouble: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with a sentence when a node that has reported is lost or fails, and this ends the attempt."""
        self.first_loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done in the same way at the first such node, even if the attempt goes on."""
        self.may_lose = 0
        """How many nodes may be lost from now on."""
        self._closing = False
        self._lines: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, and write the address into head.json."""
        self._server = await asyncio.start_server(self._accept, self._host, 0, limit=_LONGEST_LINE)
        port = self._server.sockets[0].getsockname()[1]
        write_private(self._directory / HEAD_FILE, json.dumps(Head(host=self._host, port=port, secret=self._secret)))

    async def gather(self, limit_s: float) -> list[str]:
        """Wait until all nodes have reported, or the limit; return the names of those that have."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: len(self.members) == self._expected)
        except TimeoutError:
            pass
        return sorted(self.members)

    async def order(self, message: Message) -> None:
        """Tell every node what to do."""
        for member in list(self.members.values()):
            await _send(member.writer, message)

    async def all_joined(self, limit_s: float) -> None:
        """Wait until each node has joined Ray.

        Raises:
            DeadlineError: some did not. WorkerError: one was lost, or could not.
        """
        everyone = asyncio.gather(*(member.joined.wait() for member in self.members.values()))
        either: set[asyncio.Future[Any]] = {everyone, self.trouble}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if everyone.done():
            return
        everyone.cancel()
        if self.trouble.done():
            raise WorkerError(self.trouble.result())
        late = [member.name for member in self.members.values() if not member.joined.is_set()]
        raise DeadlineError(f"{', '.join(sorted(late))} did not join Ray within {limit_s:g} s")

    async def check(self, limit_s: float) -> dict[str, list[str] | None]:
        """Let every node check its GPUs; return what each found, None for those that do not answer in time."""
        for member in self.members.values():
            member.checked.clear()
        await self.order(Message(order="check"))
        answers = [asyncio.ensure_future(member.checked.wait()) for member in self.members.values()]
        if answers:
            await asyncio.wait(answers, timeout=limit_s)
        for answer in answers:
            answer.cancel()
        return {name: m.problems if m.checked.is_set() else None for name, m in self.members.items()}

    async def close(self) -> None:
        """Tell all nodes to end, and close the lines."""
        self._closing = True
        await self.order(Message(order="end"))
        for member in self.members.values():
            member.writer.close()
        if self._server:
            self._server.close()
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.create_task(self._serve(reader, writer))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _receive(reader)
        if hello is None or not secrets.compare_digest(hello.get("secret", ""), self._secret):
            writer.close()
            return
        name = hello["node"]
        problems = [*hello["problems"], *clock_problems(hello["time"] - time.time())]
        member = self.members[name] = Member(name, problems, writer)
        async with self._changed:
            self._changed.notify_all()
        try:
            while (message := await _receive(reader, FROZEN_S)) is not None:
                self._hear(member, message)
            self._lose(member, f"{name} was lost: its connection to the first node ended")
        except TimeoutError:
            self._lose(member, f"{name} was lost: no sign of life for {FROZEN_S:g} s")

    def _hear(self, member: Member, message: Message) -> None:
        match message.get("event"):
            case "alive":
                pass
            case "joined":
                member.joined.set()
            case "checked":
                member.problems = message.get("problems", [])
                member.checked.set()
            case _:
                self._lose(member, f"{member.name}: {message.get('why', 'ended')}")

    def _lose(self, member: Member, sentence: str) -> None:
        if self._closing or self.members.get(member.name) is not member:
            return  # it was reported already
        if not self.first_loss.done():
            self.first_loss.set_result(sentence)
        if self.may_lose:
            self.may_lose -= 1
            del self.members[member.name]
            member.writer.close()  # a frozen node ends when it wakes up
            print(f"{sentence}; the run goes on; nodes that may be lost yet: {self.may_lose}", flush=True)
        elif not self.trouble.done():
            self.trouble.set_result(sentence)


class Line:
    """Another node's side of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.send(Message(event="alive"))

    async def send(self, message: Message) -> None:
        """Send a message; nothing happens if the first node is gone."""
        await _send(self._writer, message)

    async def receive(self) -> Message | None:
        """Return the next message; None when the first node has closed or is gone."""
        return await _receive(self._reader)


async def reach_head(directory: Path, node: str, problems: list[str], limit_s: float) -> Line:
    """Find the first node and report to it.

    Args:
        directory: of this attempt, shared by all nodes.
        node: name of this one. problems: what its health check found.
        limit_s: for the whole call.

    Raises:
        DeadlineError: head.json did not appear, or nobody answers at its address.
    """
    file, deadline = directory / HEAD_FILE, time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{node} saw no {file} within {limit_s:g} s: the run directory is not shared by the nodes, or the "
                "first node did not start"
            )
        await asyncio.sleep(_POLL_S)
    head: Head = json.loads(file.read_text(encoding="utf-8"))
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 1.0)):
            reader, writer = await asyncio.open_connection(head["host"], head["port"], limit=_LONGEST_LINE)
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            f"{node} cannot reach the first node at {head['host']}:{head['port']} ({error or 'no answer'}); set "
            "network_interface in the cluster file, and look for a firewall between the nodes"
        ) from None
    _end_with(writer.get_extra_info("socket"))
    line = Line(reader, writer)
    await line.send(Message(node=node, secret=head["secret"], time=time.time(), problems=problems))
    return line


def _end_with(connection: socket.socket) -> None:
    """Let a connection end within FROZEN_S of the other machine's end: a machine that loses power closes nothing."""
    for option, value in (
        (socket.TCP_KEEPIDLE, FROZEN_S / 3),
        (socket.TCP_KEEPINTVL, FROZEN_S / 9),
        (socket.TCP_KEEPCNT, 6),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def write_private(file: Path, text: str) -> None:
    """Write a file that only the user can read, whole or not at all."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    beside.replace(file)


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
    except (ConnectionError, RuntimeError):
        return  # the other side is gone, as its reader will report


async def _receive(reader: asyncio.StreamReader, limit_s: float | None = None) -> Message | None:
    """Return the next message; None at the end. Raises TimeoutError: none came within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (ConnectionError, ValueError):
        return None
    return message if isinstance(message, dict) else None  # type: ignore[return-value]
