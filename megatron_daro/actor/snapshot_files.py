"""A snapshot as a rank's part of a checkpoint, so that ranks of another layout can load it.

`catalogue_of` says once, for a model that stands, where in the storages of its snapshots each box of its checkpoint
lies. Every snapshot carries that, and the small parts of a save. `write` makes the rank's file of them, in any process:
for a rank that died, in one that has its copy. The driver adds the index; actor/checkpoint.py loads the directory.

Rejects a model of which a part lies outside those storages: on the host, for instance, with Megatron's
optimizer_cpu_offload.
"""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megatron_daro.actor import critic
from megatron_daro.actor.checkpoint import ALGORITHM_FILE
from megatron_daro.actor.double_buffer import Slot
from megatron_daro.actor.shards import OwnBox
from megatron_daro.convert.daro_format import COMMON_FILE, StoredShard, write_metadata
from megatron_daro.convert.safetensors_file import FileWriter
from megatron_daro.errors import CheckpointError
from megatron_daro.types import MemoryKind

FIELDS_FILE = "fields.json"
"""What a checkpoint need not say, since it is taken between batches: plain values of the trained model."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """Elements [offset, offset + shape) of a global tensor: from byte `start` of a storage of the snapshot on."""

    key: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    kind: MemoryKind
    storage: int
    start: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a rank writes of one model. objects: key of each, by chunk and name. common: what is not sharded, of which a
    snapshot has the newest values."""

    boxes: tuple[PlacedBox, ...]
    objects: Mapping[tuple[str, str], str]
    common: Mapping[str, Any]


def catalogue_of(
    boxes: Sequence[OwnBox],
    objects: Mapping[tuple[str, str], str],
    common: Mapping[str, Any],
    storages: Mapping[MemoryKind, Sequence[UntypedStorage]],
) -> Catalogue:
    """Find the boxes in the storages of which snapshots are taken.

    Args:
        boxes, objects, common: of `checkpoint.parts_of_save`. storages: by kind, in their order.

    Raises:
        CheckpointError: one lies in none of them.
    """
    numbers = {storage._cdata: (kind, number) for kind, own in storages.items() for number, storage in enumerate(own)}
    placed = []
    for box in boxes:
        if box.data.untyped_storage()._cdata not in numbers:
            raise CheckpointError(
                f"{box.key} lies on {box.data.device}, outside of what snapshots have; fix: leave "
                "trainer.fewer_replicas_after_s unset, or train without the option of actor.megatron that puts it there"
            )
        kind, number = numbers[box.data.untyped_storage()._cdata]
        start = int(box.data.storage_offset()) * box.data.dtype.itemsize
        placed.append(PlacedBox(box.key, box.data.dtype, box.offset, box.shape, box.global_shape, kind, number, start))
    return Catalogue(tuple(placed), dict(objects), copy.deepcopy(dict(common)))


def write(slot: Slot, directory: Path, rank: int) -> dict[str, list[StoredShard]]:
    """Write what a snapshot has of a rank.

    Args:
        slot: whole, with catalogues. directory: with a folder for each model but the first. rank: whose it is; the
            first one writes what is the same on all.

    Returns:
        The folder of each model, below the directory -> what its index is to say.

    Raises:
        CheckpointError: the disk refused.
    """
    shards = {}
    try:
        for model, folder in zip(slot.rest["models"], folders(directory, len(slot.rest["models"])), strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            stored = _write_model(slot, model, folder / f"shard_{rank:05d}.safetensors")
            shards[str(folder.relative_to(directory))] = stored
            if rank == 0:
                _write_common(model, folder)
    except OSError as error:
        raise CheckpointError(f"{directory}: the state of rank {rank} could not be written: {error}") from error
    return shards


def folders(directory: Path, models: int) -> list[Path]:
    """Return where each model is: the policy, and a critic."""
    return [directory, directory / critic.FOLDER][:models]


def fields_in(folder: Path) -> dict[str, Any]:
    """Return the plain values of a trained model that `write` put beside its checkpoint."""
    fields: dict[str, Any] = json.loads((folder / FIELDS_FILE).read_text())
    return fields


def _write_model(slot: Slot, model: Mapping[str, Any], path: Path) -> list[StoredShard]:
    catalogue: Catalogue = model["catalogue"]
    objects = {key: model["objects"][name] for name, key in catalogue.objects.items()}
    header = [(str(number), box.dtype, box.shape) for number, box in enumerate(catalogue.boxes)]
    header += [(str(len(header) + number), torch.uint8, tuple(o.shape)) for number, o in enumerate(objects.values())]
    if not header:
        return []
    with FileWriter(path, header) as file:
        for box in catalogue.boxes:
            file.write(_values(slot, box))
        for bytes_B in objects.values():
            file.write(bytes_B)
    places = [(box.key, box.offset, box.shape, box.global_shape) for box in catalogue.boxes]
    places += [(key, (0,), tuple(o.shape), tuple(o.shape)) for key, o in objects.items()]
    return [
        StoredShard(key, path.name, name, offset, shape, whole)
        for (name, *_), (key, offset, shape, whole) in zip(header, places, strict=True)
    ]


def _write_common(model: Mapping[str, Any], folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save({**model["catalogue"].common, **model["common"]}, buffer)
    (folder / COMMON_FILE).write_bytes(buffer.getvalue())
    write_metadata(folder)
    (folder / FIELDS_FILE).write_text(json.dumps(model["fields"]))
    if "algorithm" in model:
        (folder / ALGORITHM_FILE).write_text(json.dumps(model["algorithm"]))


def _values(slot: Slot, box: PlacedBox) -> Tensor:
    """Return a box's elements, flat, of the bytes that the blocks of its kind have one after the other."""
    length = math.prod(box.shape) * box.dtype.itemsize
    begin = sum(slot.layout[box.kind][: box.storage]) + box.start
    pieces, at = [], 0
    for block in slot.blocks[box.kind]:
        first, last = max(begin - at, 0), min(begin + length - at, len(block))
        if first < last:
            pieces.append(block[first:last])
        at += len(block)
    bytes_B = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    if len(bytes_B) != length:
        raise CheckpointError(f"{box.key}: {len(bytes_B)} of {length} bytes are in the snapshot: it is torn")
    return bytes_B.view(box.dtype)
