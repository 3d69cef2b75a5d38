"""Offloading what a rank trains with to the host, and onloading it bit for bit, while servers have the GPU.

All models of a rank are offloaded and onloaded by kind of memory (`HostMemory`), or a policy and a critic take turns on
the device (`TakingTurns`). An offloaded tensor still exists, but without memory: its storage is resized to 0 and filled
again later, so every view of it (buckets of gradients, shards of the optimizer) stays valid. On a GPU, host memory is
pinned and kept for the next time; on a CPU the same code runs with ordinary memory. The 8-bit copies of fp8 layers are
dropped, since the next pass makes them again; so are gradients, since a step begins with zeros, unless a model is
offloaded within a step. The policy refuses to compute with what is offloaded.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megatron_daro.actor import device
from megatron_daro.actor.compat import inner_optimizers
from megatron_daro.actor.step import TrainedModel
from megatron_daro.types import KINDS_OF_MEMORY, MemoryKind, MemoryMove, TrainedName

_BLOCK_BYTES = 256 * 2**20
"""Size of a block of host memory: torch rounds pinned memory up to a power of two, so a single large block could take
twice the size that is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """Offloaded storages, with their sizes in bytes, and the host memory with their content; none if it was dropped."""

    storages: Sequence[tuple[UntypedStorage, int]]
    blocks: Sequence[Tensor]


class HostMemory:
    """The memory of what one rank trains: the policy, the critic, or both."""

    def __init__(self, *models: TrainedModel) -> None:
        """Move nothing."""
        self._models = models
        self._away: dict[MemoryKind, _Away] = {}
        self._blocks: dict[MemoryKind, list[Tensor]] = {}
        self._where = device.current()

    @property
    def device(self) -> torch.device:
        """Where the models are when they are not away."""
        return self._where

    @property
    def away(self) -> frozenset[MemoryKind]:
        """What is on the host now."""
        return frozenset(self._away)

    def offload(self, kinds: Collection[MemoryKind], *, keep_gradients: bool = False) -> MemoryMove:
        """Free the device memory of these kinds, except those already offloaded. No save may be reading them.

        Args:
            keep_gradients: copy gradients to the host too; else they are dropped.
        """
        started, moved, others = time.perf_counter(), 0, self._of_others()
        if "gradients" in kinds and not keep_gradients:
            for model in self._models:
                model.optimizer.zero_grad()  # frees main gradients that are tensors of their own
        drop_fp8_weights(self._chunks())
        for kind in KINDS_OF_MEMORY:
            if kind in kinds and kind not in self._away:
                moved += self._take(kind, keep=kind != "gradients" or keep_gradients)
        if self._where.type == "cuda":
            torch.cuda.ipc_collect()  # frees weight buckets that servers no longer use
            torch.cuda.empty_cache()
        return MemoryMove(moved, self.left_behind(), time.perf_counter() - started, others)

    def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Take device memory for these kinds again and fill it, except for those that have it."""
        started, moved, others = time.perf_counter(), 0, self._of_others()
        for kind in KINDS_OF_MEMORY:
            away = self._away.pop(kind, None) if kind in kinds else None
            if away is None:
                continue
            for storage, size in away.storages:
                storage.resize_(size)
                moved += size
                if not away.blocks:
                    bytes_of(storage).zero_()
            for piece, held in pieces_of([storage for storage, _ in away.storages], away.blocks):
                piece.copy_(held, non_blocking=True)
        self._synchronize()
        return MemoryMove(moved, self.left_behind(), time.perf_counter() - started, others)

    def left_behind(self) -> int:
        """Bytes that this process has allocated on its device; on a CPU, those of the models' tensors."""
        if self._where.type == "cuda":
            return torch.cuda.memory_allocated()
        return sum(storage.nbytes() for kind in KINDS_OF_MEMORY for storage in self.storages(kind))

    def _of_others(self) -> int:
        """Return the bytes of the device that other processes have, with the CUDA contexts of all."""
        if self._where.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def _take(self, kind: MemoryKind, *, keep: bool) -> int:
        storages = [storage for storage in self.storages(kind) if storage.nbytes()]
        sizes = [storage.nbytes() for storage in storages]
        blocks = self._host_blocks(kind, sum(sizes)) if keep else []
        for piece, held in pieces_of(storages, blocks):
            held.copy_(piece, non_blocking=True)
        self._synchronize()
        for storage in storages:
            storage.resize_(0)
        self._away[kind] = _Away(list(zip(storages, sizes, strict=True)), blocks)
        return sum(sizes)

    def _host_blocks(self, kind: MemoryKind, size: int) -> list[Tensor]:
        """Return host memory for this many bytes; pinned memory is that of the last time, since pinning takes long."""
        pinned = self._where.type == "cuda"
        return extended(self._blocks.setdefault(kind, []) if pinned else [], size, pinned=pinned)

    def storages(self, kind: MemoryKind) -> list[UntypedStorage]:
        """Return the storages of a kind, each once. One that two kinds share belongs to the first of them: the fp32
        main parameters of an fp32 model are views of its weights."""
        seen: set[int] = set()
        for other in KINDS_OF_MEMORY:
            tensors = (tensor for tensor in self._tensors(other) if tensor.device.type == self._where.type)
            storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            if other == kind:
                return [storage for key, storage in storages.items() if key not in seen]
            seen.update(storages)
        raise AssertionError(kind)

    def _tensors(self, kind: MemoryKind) -> Iterator[Tensor]:
        if kind == "optimizer":
            for model in self._models:
                yield from self.optimizer_tensors_of(model)
            return
        for chunk in self._chunks():
            if kind == "weights":
                yield from (parameter.data for parameter in chunk.module.parameters())
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                tensor = buffer.param_data if kind == "weights" else buffer.grad_data
                if tensor is not None:
                    yield tensor

    def _chunks(self) -> Iterator[Any]:
        for model in self._models:
            yield from model.chunks

    def optimizer_tensors_of(self, model: TrainedModel) -> Iterator[Tensor]:
        """Yield a model's main parameters and optimizer state, tensors on the host included, in an order that depends
        only on the model and its optimizer."""
        for inner in inner_optimizers(model.optimizer):
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            yield from (parameter.data for parameter in parameters)
            for parameter in parameters:  # not in the order in which state was created, which differs after a load
                state = inner.state.get(parameter, {})
                yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))

    def _synchronize(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize()


class TakingTurns:
    """The memory of a policy and its critic, of which one has the device at a time; used like a `HostMemory`.

    `take` changes turns. Memory that `offload` gave away stays off the device until `onload`, whoever's turn it is.
    """

    def __init__(self, policy: HostMemory, critic: HostMemory) -> None:
        """Begin with the critic's turn. Args: policy: is already offloaded."""
        self._memories: dict[TrainedName, HostMemory] = {"policy": policy, "critic": critic}
        self._whose: TrainedName = "critic"
        self.away: frozenset[MemoryKind] = frozenset()
        self._seconds = 0.0

    @property
    def whose(self) -> TrainedName:
        """Which of the two has the device."""
        return self._whose

    def take(self, model: TrainedName, *, keep_gradients: bool = False) -> None:
        """Give this model the device. No save may be reading the other one.

        Args:
            keep_gradients: keep those of the other model, which is in the middle of a step.
        """
        started, kinds = time.perf_counter(), frozenset(KINDS_OF_MEMORY) - self.away
        if model != self._whose:
            self._memories[self._whose].offload(KINDS_OF_MEMORY, keep_gradients=keep_gradients)
            self._whose = model
        self._memories[model].onload(kinds)
        self._seconds += time.perf_counter() - started

    def pop_seconds(self) -> float:
        """Seconds that turns have taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def offload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Do the same as `HostMemory.offload` for the model that has the device."""
        self.away |= frozenset(kinds)
        return self._memories[self._whose].offload(kinds)  # the other one is on the host already

    def onload(self, kinds: Collection[MemoryKind]) -> MemoryMove:
        """Do the same as `HostMemory.onload` for the model whose turn it is."""
        self.away -= frozenset(kinds)
        return self._memories[self._whose].onload(kinds)


class HostCopy:
    """Copies of tensors on the host, in shared blocks: pinned one by one they would take up to twice their bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Copy. Args: tensors: contiguous, on one device."""
        self._like = [torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in tensors]
        self._device, pinned = tensors[0].device, tensors[0].device.type == "cuda"
        self._blocks = extended([], sum(tensor.nbytes for tensor in tensors), pinned=pinned)
        own = [
            tensor.detach().clone().untyped_storage() if _is_part(tensor) else tensor.untyped_storage()
            for tensor in tensors
        ]
        for piece, held in pieces_of(own, self._blocks):
            held.copy_(piece)

    def on_device(self) -> list[Tensor]:
        """Return new tensors of the same values on their old device; there the copying may still be in progress."""
        tensors = [torch.empty_like(tensor, device=self._device) for tensor in self._like]
        for piece, held in pieces_of([tensor.untyped_storage() for tensor in tensors], self._blocks):
            piece.copy_(held, non_blocking=True)
        return tensors


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def extended(blocks: list[Tensor], size: int, *, pinned: bool) -> list[Tensor]:
    """Add blocks of host memory to the list until it has at least this many bytes. Returns the list."""
    while (lacking := size - sum(len(block) for block in blocks)) > 0:
        length = _BLOCK_BYTES if pinned else min(lacking, _BLOCK_BYTES)
        blocks.append(torch.empty(length, dtype=torch.uint8, pin_memory=pinned))
    return blocks


def drop_fp8_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the 8-bit copies of the weights that Transformer Engine's layers keep from one micro-batch to the next.

    The next pass makes them again. Source: `_fp8_workspaces` and `quantize_weight` of
    transformer_engine/pytorch/module/base.py, 2.20.2, where an absent copy is a cache miss; upstream clears them too.
    """
    for chunk in chunks:
        for module in chunk.modules():
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces:
                workspaces.clear()


def pieces_of(storages: Sequence[UntypedStorage], blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (bytes of a storage, their place in the blocks) piece by piece; the blocks are filled one after the other.
    Yields nothing without blocks."""
    block, start = 0, 0
    for storage in storages if blocks else ():
        values, at = bytes_of(storage), 0
        while at < len(values):
            if start == len(blocks[block]):
                block, start = block + 1, 0
            length = min(len(values) - at, len(blocks[block]) - start)
            yield values[at : at + length], blocks[block][start : start + length]
            at, start = at + length, start + length


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a view of the storage itself, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
