"""The base class of a transport's sending end on one rank, and what several transports share. The stream is read to its
end even if sending failed, since other ranks take part in its gathers."""

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
            stream: (HF name, tensor); each item may be a collective with other ranks.
            plan: what is to be sent to whom.
            group: this rank, and the ranks on other hosts that hand out the same buckets there.

        Returns:
            The report, with failures by receiver.
        """
        with read_to_its_end(stream) as tensors:
            return self._send(tensors, plan, group)

    @abstractmethod
    def _send(self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: ProcessGroup | None) -> SendReport:
        """Send the tensors. May return early if receivers failed: `send` reads the rest."""

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Release threads and sockets. May be called twice."""


async def posted_to_all(
    plan: SendPlan, post: Post, path: str, body: Callable[[int], Mapping[str, Any]]
) -> dict[str, SendFailure]:
    """Make one call to each server of a plan, all at once. Returns failures by name. Args: body: number of a server's
    ranks -> body of its call."""

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
    """Give an iterator of the stream; when the block ends, even by an error, read the rest of it: other ranks take part
    in its gathers, and would wait forever."""
    items = iter(stream)
    try:
        yield items
    finally:
        for _ in items:
            pass


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Run a call in a daemon thread of its own, which does not keep the process from ending; return its future."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="weight sync", daemon=True).start()
    return future
