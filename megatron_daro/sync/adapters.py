"""Sends adapters by value, in one HTTP call to each server, which adds them to those that it has.

Source: sglang 0.5.23: srt/managers/tp_worker.py, `load_lora_adapter_from_tensors`; srt/utils/common.py,
`SafeUnpickler`. Data that this cannot read, such as a handle of another process's memory, ends the whole server, so
only one tensor on the host and plain values are pickled.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_daro.sync.buckets import tensor_bytes
from megatron_daro.sync.plan import Connect, SendFailure, SendPlan, SendReport
from megatron_daro.sync.transport_sender import TransportSender, posted_to_all

_CALL = "/load_lora_adapter_from_tensors"


class AdapterSender(TransportSender):
    """The sending end on one rank."""

    def __init__(self, connect: Connect) -> None:
        """Connect to nothing. Args: connect: to servers."""
        self._connect = connect

    def _send(self, tensors: Iterator[tuple[str, Tensor]], plan: SendPlan, group: ProcessGroup | None) -> SendReport:
        started = time.perf_counter()
        pickled, num_bytes = by_value(tensors)
        encoded = base64.b64encode(pickled).decode()
        failures = asyncio.run(self._load({**plan.details, "load_format": "flattened_bucket"}, encoded, plan))
        return SendReport(num_bytes, time.perf_counter() - started, failures=failures, apart=True)

    async def _load(self, body: Mapping[str, Any], encoded: str, plan: SendPlan) -> dict[str, SendFailure]:
        async with self._connect() as post:  # each rank of a server reads its own copy
            return await posted_to_all(
                plan, post, _CALL, lambda ranks: {**body, "serialized_named_tensors": [encoded] * ranks}
            )


def by_value(tensors: Iterable[tuple[str, Tensor]]) -> tuple[bytes, int]:
    """Return (pickle of a flattened bucket of these tensors, all of one dtype; size of the tensors in bytes)."""
    parts, metadata, start = [], [], 0
    for name, tensor in tensors:
        parts.append(tensor_bytes(tensor).cpu())
        end = start + len(parts[-1])
        metadata.append(
            SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end)
        )
        start = end
    return pickle.dumps({"flattened_tensor": torch.cat(parts), "metadata": metadata}), start
