"""Process groups whose tensors go through the host: ranks that share a GPU, which NCCL refuses.

Place in the data flow: rows "ranks on one GPU" of gpu_checks.py. All that a rank computes is on the GPU as ever; what
it exchanges is copied to the host, sent by gloo and copied back, since gloo cannot send or receive memory of a GPU. On
a CPU the copies are made all the same.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "through_host"
_FILL_THEIR_FIRST = ("all", "_allgather", "broadcast", "gather", "recv", "reduce", "_reduce_scatter", "scatter")
"""How the names of methods begin whose first argument is what they fill; torch 2.11 and 2.13 have different ones."""


class _Copied(dist.Work):
    """A call that is over once its results are where the caller wants them."""

    def __init__(self, work: Any, back: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._back = work, back

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._work.wait()
        for place, value in self._back:
            place.copy_(value)
        self._back = []
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class HostGroup(dist.ProcessGroup):
    """A group of ranks, made by `dist.init_process_group(NAME)` and by `dist.new_group`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo._get_backend(torch.device("cpu"))

    def barrier(self, *arguments: Any, **options: Any) -> Any:
        return self._gloo.barrier()

    def send(self, tensors: list[Tensor], *arguments: Any) -> Any:
        return _Copied(self._gloo.send([_on_host(tensor) for tensor in tensors], *arguments), [])


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _staged(name: str) -> Callable[..., Any]:
    def call(self: HostGroup, out: Any, *rest: Any) -> Any:
        back: list[tuple[Tensor, Tensor]] = []

        def copied(value: Any, result: bool) -> Any:
            if isinstance(value, list | tuple):
                return [copied(one, result) for one in value]
            if not isinstance(value, Tensor):
                return value
            host = _on_host(value)
            if result:
                back.append((value.detach(), host))
            return host

        arguments = copied(out, True), *(copied(value, False) for value in rest)
        return _Copied(getattr(self._gloo, name)(*arguments), back)

    return call


for _name in dir(dist.ProcessGroup):
    if _name.startswith(_FILL_THEIR_FIRST):
        setattr(HostGroup, _name, _staged(_name))


def join(layout: Any, *, rank: int, init_method: str, seed: int, timeout_s: float) -> None:
    """What actor/parallel.initialize does, with these groups."""
    from megatron_daro.actor import device, parallel

    device.prepare()
    dist.Backend.register_backend(NAME, HostGroup, devices=["cpu", "cuda"])
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(NAME, init_method=init_method, rank=rank, world_size=layout.world_size, timeout=limit)
    parallel.build_groups(layout, seed=seed)
