"""The canned servers of a rehearsal: ports chosen as the real servers' are, one process, and one for the lost node.

Place in the data flow: node map -> ports -> processes of canned_server.py -> URLs of engine.sglang.urls.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatron_daro.errors import EngineError
from megatron_daro.ports import reserve_port
from megatron_daro.rehearse.canned_server import CannedAnswers

LOOPBACK = "127.0.0.1"


class CannedFleet:
    """Running servers. urls: in the order of the servers. ports: all that were chosen. clashes: chosen twice."""

    def __init__(self, servers: int, lost: Sequence[int]) -> None:
        self._servers, self._lost = servers, set(lost)
        self._processes: list[subprocess.Popen[str]] = []
        self.urls: list[str] = []
        self.ports: list[int] = []
        self.clashes = 0

    def start(self, canned: CannedAnswers, stack: ExitStack) -> None:
        """Choose two ports for each server, as on a node (its own and that of its ranks), and start. The stack holds
        the reservations. Raises EngineError."""
        pairs = [
            tuple(stack.enter_context(reserve_port(LOOPBACK)).port for _ in range(2)) for _ in range(self._servers)
        ]
        self.ports = [port for pair in pairs for port in pair]
        self.clashes = len(self.ports) - len(set(self.ports))
        self.urls = [f"http://{LOOPBACK}:{port}" for port, _ in pairs]
        for members in (set(range(self._servers)) - self._lost, self._lost):
            if members:
                self._start(dataclasses.replace(canned, ports=[pairs[i][0] for i in sorted(members)]))

    def _start(self, canned: CannedAnswers) -> None:
        command = [sys.executable, "-m", "megatron_daro.rehearse.canned_server", canned.text()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout
        if len(process.stdout.readline().split()) != len(canned.ports):
            raise EngineError("the canned servers did not start; their error is above")

    def lose(self) -> None:
        """End the servers of the lost node."""
        if self._lost and self._processes:
            self._processes[-1].kill()

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def canned_fleet(servers: int, lost: Sequence[int], canned: CannedAnswers) -> Iterator[CannedFleet]:
    """Servers that end with the block.

    Args:
        servers: how many. lost: those on the node that will be lost. canned: what they answer.
    """
    fleet = CannedFleet(servers, lost)
    with ExitStack() as stack:
        stack.callback(fleet.close)
        fleet.start(canned, stack)
        yield fleet
