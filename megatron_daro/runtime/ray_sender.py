"""The sender of the transport `ray`, to the actors of embedded engines. The senders of other transports are in sync/,
which does not import ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from megatron_daro.runtime.ray_calls import translated
from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.plan import ReceivingWorker, SendFailure, SendPlan, SendReport
from megatron_daro.sync.transport_sender import TransportSender

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RaySender(TransportSender):
    """Sends buckets to engine actors, each put once into the object store; one is packed while the previous one is
    taken."""

    def _send(self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: ProcessGroup | None) -> SendReport:
        started, num_bytes = time.perf_counter(), 0
        failures: dict[str, SendFailure] = {}
        before: dict[str, Any] = {}
        for bucket in bucketize(tensors, plan.bucket_bytes, reuse=True):
            failures |= _taken(before, plan.timeout_s)
            before = {}
            if failures:
                break
            reference = ray.put(bucket)
            before = {to.name: cast(ReceivingWorker, to.worker).receive.remote(reference) for to in plan.targets}
            num_bytes += bucket.data.nbytes
        failures |= _taken(before, plan.timeout_s)
        return SendReport(num_bytes, time.perf_counter() - started, failures=failures)


def _taken(calls: Mapping[str, Any], timeout_s: float) -> dict[str, SendFailure]:
    """Wait until each actor has taken its bucket. Returns failures by actor."""
    failures = {}
    for name, call in calls.items():
        try:
            ray.get(call, timeout=timeout_s)
        except RayError as error:
            refused = isinstance(error, RayTaskError)
            failures[name] = SendFailure("refused" if refused else "unanswered", str(translated(name, error)))
    return failures
