"""Megatron's `torch_dist` checkpoints, as Megatron-LM, Megatron-Bridge and slime read and write them.

A directory holds `.metadata` (a pickle: which tensors, in which chunks, at which bytes), `*.distcp` (chunk after
chunk, each written by torch.save), `common.pt` and `metadata.json`; the directory above holds Megatron-LM's
`latest_checkpointed_iteration.txt`. Tensors are read as bytes: neither torch.load nor pickle.load is called.
`.metadata` is decoded with a list of the classes that torch and Megatron put into it; each is replaced by a plain
record, no constructor runs, and any other name is an error that names it.

Source: torch/distributed/checkpoint/filesystem.py, megatron/core/dist_checkpointing/strategies/torch.py.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_daro.convert.inert_pickle import Inert, RestrictedUnpickler
from megatron_daro.convert.pieces import Piece, PieceStore
from megatron_daro.convert.safetensors_file import DirectFile
from megatron_daro.errors import CheckpointError

_DCP = "torch.distributed.checkpoint."


_RECORDS = {
    _DCP + "metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    _DCP + "filesystem": "_StorageInfo",
    _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "torch.serialization": "_get_layout",
    "builtins": "getattr",  # Python 3.11.2 (of Debian 12) pickles members of an Enum with it; here it is only a record
    "pathlib": "Path PosixPath PurePosixPath WindowsPath",
}
_ALLOWED: dict[tuple[str, str], Callable[..., object]] = {
    **{(module, name): Inert for module, names in _RECORDS.items() for name in names.split()},
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
}


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored chunk of a tensor: elements [offset, offset + shape), in `length` bytes of a file that torch.save wrote,
    from byte `start`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a torch.distributed checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blobs: tuple[Blob, ...]


def read_metadata(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by key; objects that are not tensors are left out.

    Args:
        path: the `.metadata` file.

    Raises:
        CheckpointError: it is missing or torn, or names a class that is not on the list or a file outside the
            directory.
    """
    try:
        metadata = RestrictedUnpickler(path.read_bytes(), _ALLOWED, path).load()
        places = {_place(index): _info(info) for index, info in metadata.fields["storage_data"].items()}
        rows = metadata.fields["state_dict_metadata"].items()
        return {key: _tensor(key, row, places) for key, row in rows if "size" in row.fields}
    except CheckpointError:
        raise
    except Exception as error:  # arbitrary bytes can fail in any way as a pickle; no code of theirs was run
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}; the checkpoint is torn"
        ) from None


def _place(index: Inert) -> tuple[str, tuple[int, ...] | None]:
    offset = index.fields.get("offset")  # absent if it is None
    return index.fields["fqn"], None if offset is None else tuple(offset)


def _info(info: Inert) -> tuple[str, int, int]:
    file = info.fields["relative_path"]
    if not isinstance(file, str) or PurePosixPath(file).name != file:
        raise ValueError(f"{file!r} is not a file name in the checkpoint's own directory")
    return file, int(info.fields["offset"]), int(info.fields["length"])


def _tensor(
    key: str, row: Inert, places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
) -> StoredTensor:
    properties = row.fields["properties"]
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    blobs = []
    for chunk in row.fields["chunks"]:
        offset = tuple(chunk.fields["offsets"])
        blobs.append(Blob(offset, tuple(chunk.fields["sizes"]), *places[key, offset]))
    return StoredTensor(dtype, tuple(row.fields["size"]), tuple(blobs))


BACKEND = "torch_dist"
METADATA_FILE, COMMON_FILE, PICKLED_FILE = "metadata.json", "common.pt", ".metadata"
TRACKER_FILE, RELEASE = "latest_checkpointed_iteration.txt", "release"
_ZIP_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of name and extra field; the data follows them
_STORAGES = {
    ("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}


class TorchDistPieces(PieceStore):
    """The tensors of a `torch_dist` directory (the one with `.metadata`)."""

    def __init__(self, directory: Path) -> None:
        """Read `.metadata`.

        Raises:
            CheckpointError: it is missing or torn, or contains a class that is not on the list.
        """
        super().__init__()
        self._directory = directory
        self._tensors = read_metadata(directory / PICKLED_FILE)
        self._pieces: dict[tuple[str, Blob], Piece] = {}

    def keys(self) -> list[str]:
        """Return the key of every tensor, sorted."""
        return sorted(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from `.metadata`."""
        return self._stored(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype, from `.metadata`."""
        return self._stored(key).dtype

    def boxes(self, key: str) -> Sequence[Blob]:
        """Return the stored blobs of a tensor."""
        return self._stored(key).blobs

    def piece(self, key: str, box: Blob) -> Piece:
        """Return where a blob's numbers are; reads its file to find where they begin."""
        if (key, box) not in self._pieces:
            self._pieces[key, box] = self._locate(key, self._stored(key), box)
        return self._pieces[key, box]

    def _stored(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise CheckpointError(f"{key} is not in the checkpoint {self._directory}; it was saved by another model")
        return self._tensors[key]

    def _locate(self, key: str, stored: StoredTensor, blob: Blob) -> Piece:
        path = self._directory / blob.file
        try:
            with path.open("rb") as file:
                start = blob.start + _numbers_start(
                    _Part(file, blob.start, blob.length), stored.dtype, blob.shape, path
                )
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be read for {key}: {error}; the checkpoint is torn") from None
        return Piece(key, blob.offset, blob.shape, stored.shape, stored.dtype, path, start)


class _Part(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file object."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("negative position")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(remaining if size < 0 else min(size, remaining))
        self._at += len(data)
        return data


def _numbers_start(part: _Part, dtype: torch.dtype, shape: tuple[int, ...], path: Path) -> int:
    """Return where the numbers of a tensor begin within the bytes that torch.save wrote. Raises ValueError."""
    with zipfile.ZipFile(part) as archive:
        names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        number, offset, found_shape, stride = _description(archive.read(names["data.pkl"]), path)
        storage = archive.getinfo(names[f"data/{number[1]}"])
    strides = zip(shape, stride, torch.empty(shape, device="meta").stride(), strict=True)
    is_same = number[0] == dtype and found_shape == shape and storage.compress_type == zipfile.ZIP_STORED
    if not is_same or any(size > 1 and got != contiguous for size, got, contiguous in strides):
        raise ValueError(f"a tensor {number[0]} {found_shape} of strides {stride}, where {dtype} {shape} was announced")
    part.seek(storage.header_offset)
    name_length, extra_length = _ZIP_LOCAL_HEADER.unpack(part.read(_ZIP_LOCAL_HEADER.size))
    return storage.header_offset + _ZIP_LOCAL_HEADER.size + name_length + extra_length + offset * dtype.itemsize


_Description = tuple[tuple[torch.dtype, str], int, tuple[int, ...], tuple[int, ...]]


def _description(content: bytes, path: Path) -> _Description:
    """Return ((dtype, number of the storage), offset, shape, strides) from the small pickle that torch.save writes."""

    def rebuilt(
        storage: tuple[Any, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
    ) -> _Description:
        return (storage[1], storage[2]), int(offset), tuple(size), tuple(stride)

    allowed = {
        ("torch._utils", "_rebuild_tensor_v2"): rebuilt,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): tuple,
        **_STORAGES,
    }
    return RestrictedUnpickler(content, allowed, path).load()


@dataclass(frozen=True, slots=True)
class WrittenBlob:
    """A chunk of a tensor, or an object (shape None), that was written into a `*.distcp` file."""

    key: str
    file: str
    start: int
    length: int
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    dtype: str | None = None


def write_blob(file: BinaryIO | DirectFile, value: Tensor | list[None]) -> tuple[int, int]:
    """Append a tensor or object with torch.save. Returns (first byte, number of bytes). Raises OSError."""
    start = file.tell()
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()  # for a view, torch.save would write the whole storage behind it
    torch.save(value, file)  # type: ignore[arg-type]  # it calls only write and flush
    return start, file.tell() - start


_EXTRA_FILE = "__extra_0.distcp"
# Modules for which Megatron saves an `_extra_state` (the scaling state of fp8, empty without fp8) and requires it when
# loading: linear layers of both layer specs, and norms and attention of Transformer Engine. These are the latter:
_EXTRA_OF_LAYER = ("self_attention.core_attention", "input_layernorm", "pre_mlp_layernorm")


def write_extra_states(directory: Path, blobs: Iterable[WrittenBlob]) -> list[WrittenBlob]:
    """Write the empty `_extra_state` objects of all modules with weights. Returns what was written."""
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for blob in blobs:
        module, _, name = blob.key.rpartition(".")
        axes = len(blob.shape or ()) - (2 if name == "weight" and "norm" not in module else 1)
        place = (blob.offset or ())[:axes], (blob.global_shape or ())[:axes]
        if "embedding" not in module:
            boxes.setdefault(module, set()).add(place)
        if module == "decoder.layers.self_attention.linear_proj":
            for other in _EXTRA_OF_LAYER:
                boxes.setdefault(f"decoder.layers.{other}", set()).add(place)
    written = []
    with (directory / _EXTRA_FILE).open("wb") as file:
        for module, places in sorted(boxes.items()):
            for index, sizes in sorted(places):
                at, of = (".".join(map(str, numbers)) for numbers in (index or (0,), sizes or (1,)))
                key = f"{module}._extra_state/shard_{at}_{of}"
                written.append(WrittenBlob(key, _EXTRA_FILE, *write_blob(file, [None])))
    return written


def write_metadata(directory: Path, blobs: Iterable[WrittenBlob]) -> None:
    """Write `.metadata`, `common.pt` and `metadata.json` for a directory whose `*.distcp` files are complete."""
    state: dict[str, TensorStorageMetadata] = {}
    objects: dict[str, BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for blob in blobs:
        info = _StorageInfo(blob.file, blob.start, blob.length)
        if blob.shape is None or blob.offset is None or blob.global_shape is None:
            objects[blob.key] = BytesStorageMetadata()
            storage[MetadataIndex(blob.key)] = info
            continue
        row = state.setdefault(
            blob.key,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, str(blob.dtype))), torch.Size(blob.global_shape), []
            ),
        )
        storage[MetadataIndex(blob.key, torch.Size(blob.offset), len(row.chunks))] = info
        row.chunks.append(ChunkStorageMetadata(torch.Size(blob.offset), torch.Size(blob.shape)))
    with (directory / PICKLED_FILE).open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata={**state, **objects}, storage_data=storage), file)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, directory / COMMON_FILE)
    metadata = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch"}
    (directory / METADATA_FILE).write_text(json.dumps({**metadata, "common_backend_version": 1}))
