"""Weights to Ray actors: the embedded engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from megatron_daro.sync.plan import SendPlan, SendReport

Stream = Iterable[tuple[str, Tensor]]


class ActorSender:
    """Buckets to Ray actors, through the process that knows them."""

    def __init__(self, hand_over: Callable[[Stream, SendPlan], SendReport]) -> None:
        """Args: hand_over: gives the buckets of a stream to the actors of a plan."""
        self._hand_over = hand_over

    def send(
        self, stream: Stream, plan: SendPlan, *, label: str = "", group: dist.ProcessGroup | None = None
    ) -> SendReport:
        """Hand the stream over; see `TransportSender`."""
        return self._hand_over(stream, plan)

    def close(self) -> None:
        """Nothing is kept."""
