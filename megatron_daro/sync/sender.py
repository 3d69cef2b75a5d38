"""The sending end of a transport on one rank, and what several share. It reads its stream to the end also where sending
failed, since other ranks gather along."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.plan import Post, SendFailure, SendPlan, SendReport, Target

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    Stream = Iterable[tuple[str, Tensor]]

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class TransportSender(ABC):
    """The sending end of one transport on one rank."""

    def send(self, stream: Stream, plan: SendPlan, *, group: ProcessGroup | None = None) -> SendReport:
        """Send the whole stream.

        Args:
            stream: (HF name, tensor); each item may be a collective of other ranks.
            plan: what is to be sent to whom.
            group: of this rank and those of other hosts that hand out the same buckets there.

        Returns:
            The report; failures by receiver.
        """
        with read_to_its_end(stream) as tensors:
            return self._send(tensors, plan, group)

    @abstractmethod
    def _send(self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: ProcessGroup | None) -> SendReport:
        """Send what comes. May return early where receivers failed: `send` reads the rest."""

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of threads and sockets. May be called twice."""


async def posted_to_all(
    plan: SendPlan, post: Post, path: str, body: Callable[[int], Mapping[str, Any]]
) -> dict[str, SendFailure]:
    """Make one call to each server of a plan, all at once. Args: body: for so many ranks. Returns failures by name."""

    async def one(target: Target) -> SendFailure | None:
        try:
            await post(target.url, path, body(target.ranks), plan.timeout_s)
        except EngineError as error:
            return SendFailure("refused" if isinstance(error, RefusedError) else "unanswered", str(error))
        return None

    failures = await asyncio.gather(*map(one, plan.targets))
    return {target.name: failure for target, failure in zip(plan.targets, failures, strict=True) if failure}


@contextlib.contextmanager
def read_to_its_end(stream: Iterable[_Item]) -> Iterator[Iterator[_Item]]:
    """Give a stream, and read in the end what is left of it, whatever happens: other ranks gather along, and would wait
    forever."""
    items = iter(stream)
    try:
        yield items
    finally:
        for _ in items:
            pass


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Return the outcome of a call in a thread of its own, which nobody has to wait for: not even the process's end."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="weight sync", daemon=True).start()
    return future
