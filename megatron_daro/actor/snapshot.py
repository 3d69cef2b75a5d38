"""Snapshots: a rank's state, copied to host memory after each step, from which all go on after the death of a rank.

`begin` copies small state at once, and the storages of weights and optimizer in a thread (on a GPU, on a stream of its
own) while the run goes on; the next update of the weights waits for it. The driver numbers the snapshots
and knows which of them every rank has (runtime/healing.py).

A snapshot holds what the rank's checkpoint holds, and the states of the random generators: storages bit for bit,
options and step counts of the optimizer's groups, the schedule, the buffers and extra states of modules, and what the
algorithm has learned. It fits only a rank of the same layout, model and options; `restore` checks the sizes of the
storages.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from megatron_daro.actor import device
from megatron_daro.actor.compat import allocate_optimizer_state, inner_optimizers
from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT, Layout, Slot, num_bytes
from megatron_daro.actor.host_memory import HostMemory, extended, pieces_of
from megatron_daro.actor.lora import is_base
from megatron_daro.actor.megatron import get_cuda_rng_tracker
from megatron_daro.actor.step import TrainedModel, TrainState
from megatron_daro.errors import WorkerError
from megatron_daro.types import MemoryKind

Storages = dict[MemoryKind, list[UntypedStorage]]
_PARTS = {"chunks", "optimizer", "scheduler", "algorithm"}
"""Fields of a trained model that are handled one by one; the others are copied as plain values."""


class PendingSnapshot:
    """A snapshot that a thread is taking: weights and optimizer state must not change until `wait` returns."""

    def __init__(self, storages: Storages, slot: Slot, serial: int, rest: dict[str, Any]) -> None:
        """Start the thread. Args: storages: from `storages_of`. slot: from `DoubleBuffer.open`. rest: small state."""
        self._slot, self._serial = slot, serial
        self._error: BaseException | None = None
        self._where = device.current()
        slot.layout, slot.rest = layout_of(storages), rest
        self._ready = torch.cuda.current_stream().record_event()
        self._thread = threading.Thread(target=self._run, args=(storages,), name="snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the slot is whole. Raises WorkerError: it could not be filled."""
        self._thread.join()
        if self._error is not None:
            raise WorkerError(
                f"the snapshot of a rank failed: {type(self._error).__name__}: {self._error}; fix: lower "
                "trainer.snapshot_gib, or set trainer.replace_lost_ranks=false"
            ) from self._error

    def _run(self, storages: Storages) -> None:
        try:
            self._copy(storages)
            self._slot.serial = self._serial
        except BaseException as error:
            self._error = error

    def _copy(self, storages: Storages) -> None:
        if self._where.type == "cuda":
            torch.cuda.set_device(self._where)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            for kind, own in storages.items():
                blocks = self._slot.blocks.setdefault(kind, [])
                extended(blocks, sum(self._slot.layout[kind]), pinned=self._where.type == "cuda")
                for piece, held in pieces_of(own, blocks):
                    held.copy_(piece, non_blocking=True)
        stream.synchronize()


def storages_of(memory: HostMemory, models: Sequence[TrainedModel]) -> Storages:
    """Return the storages that a snapshot copies, without frozen base weights; create optimizer state if there is none
    yet."""
    for model in models:
        allocate_optimizer_state(model.optimizer)
    parameters = (p for model in models for chunk in model.chunks for p in chunk.module.parameters())
    base = {p.untyped_storage()._cdata for p in parameters if is_base(p)}
    return {kind: [own for own in memory.storages(kind) if own._cdata not in base] for kind in KINDS_OF_SNAPSHOT}


def layout_of(storages: Storages) -> Layout:
    """Return the sizes of the storages."""
    return {kind: tuple(storage.nbytes() for storage in own) for kind, own in storages.items()}


def begin(memory: HostMemory, models: Sequence[TrainedModel], slot: Slot, serial: int) -> PendingSnapshot:
    """Begin a snapshot of the models as they are now. Not collective.

    Args:
        memory: of the rank. models: the policy, and a critic if there is one. slot: from `DoubleBuffer.open`.
        serial: number of the snapshot.
    """
    storages = storages_of(memory, models)
    rest = {"models": [_rest_of(model, memory) for model in models], "random": _random_states()}
    return PendingSnapshot(storages, slot, serial, rest)


def restore(memory: HostMemory, models: Sequence[TrainedModel], slot: Slot) -> None:
    """Restore the models to what they were when the snapshot was taken, bit for bit. Not collective.

    Raises:
        WorkerError: the snapshot is not whole, or of another layout.
    """
    storages = storages_of(memory, models)
    if slot.serial is None or slot.layout != layout_of(storages):
        raise WorkerError(
            f"snapshot {slot.serial}: {num_bytes(slot.layout)} bytes, but this rank has "
            f"{num_bytes(layout_of(storages))}: it is torn, or of another layout; --resume goes on from the newest "
            "checkpoint, if there is one"
        )
    for kind, own in storages.items():
        for piece, held in pieces_of(own, slot.blocks[kind]):
            piece.copy_(held, non_blocking=True)
    for model, rest in zip(models, slot.rest["models"], strict=True):
        _put_back(model, memory, rest)
    _set_random_states(slot.rest["random"])
    torch.cuda.synchronize()


def _groups(model: TrainedModel) -> list[dict[str, Any]]:
    return [group for inner in inner_optimizers(model.optimizer) for group in inner.param_groups]


def _on_host(model: TrainedModel, memory: HostMemory) -> list[Tensor]:
    """Return the optimizer's tensors that are not on the device: torch's Adam keeps its step counts on the host."""
    return [tensor for tensor in memory.optimizer_tensors_of(model) if tensor.device.type != memory.device.type]


def _modules(model: TrainedModel) -> list[torch.nn.Module]:
    """Return the modules that have state other than parameters and buffers, such as the scales of fp8 layers."""
    own = torch.nn.Module.get_extra_state
    return [m for chunk in model.chunks for m in chunk.module.modules() if type(m).get_extra_state is not own]


def _buffers(model: TrainedModel) -> list[Tensor]:
    return [buffer for chunk in model.chunks for buffer in chunk.module.buffers()]


def _rest_of(model: TrainedModel, memory: HostMemory) -> dict[str, Any]:
    rest = {
        "groups": [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in _groups(model)],
        "on_host": [tensor.detach().clone() for tensor in _on_host(model, memory)],
        "scheduler": copy.deepcopy(model.scheduler.state_dict()),
        "buffers": [buffer.detach().to("cpu", copy=True) for buffer in _buffers(model)],
        "modules": [copy.deepcopy(module.get_extra_state()) for module in _modules(model)],
    }
    if isinstance(model, TrainState):
        rest["algorithm"] = copy.deepcopy(model.algorithm.state_dict())
    rest["fields"] = {f.name: copy.deepcopy(getattr(model, f.name)) for f in fields(model) if f.name not in _PARTS}
    return rest


@torch.no_grad()
def _put_back(model: TrainedModel, memory: HostMemory, rest: dict[str, Any]) -> None:
    model.scheduler.num_steps = 0  # loading adds to it (OptimizerParamScheduler.load_state_dict, 0.16.1)
    model.scheduler.load_state_dict(copy.deepcopy(rest["scheduler"]))
    for group, options in zip(_groups(model), rest["groups"], strict=True):
        group.update(copy.deepcopy(options))
    for tensor, value in zip(_on_host(model, memory), rest["on_host"], strict=True):
        tensor.copy_(value)
    for buffer, value in zip(_buffers(model), rest["buffers"], strict=True):
        buffer.copy_(value)
    for module, state in zip(_modules(model), rest["modules"], strict=True):
        module.set_extra_state(copy.deepcopy(state))
    if isinstance(model, TrainState):
        model.algorithm.load_state_dict(copy.deepcopy(rest["algorithm"]))
    for name, value in rest["fields"].items():
        setattr(model, name, copy.deepcopy(value))


def _random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": copy.deepcopy(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(copy.deepcopy(states["megatron"]))
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
