"""The pickled `.metadata` of torch.distributed checkpoints, read without running anything that is in the file.

Place in the data flow: `convert.torch_dist` reads which tensors a checkpoint has, and where. The file is a pickle by
definition of the format. Here it is decoded with a list of the classes that torch and Megatron put into one; each
stands for a plain record, no constructor of theirs runs, and every other name ends the reading with an error that says
it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from megatron_daro.errors import CheckpointError

_DCP = "torch.distributed.checkpoint."


class Record:
    """Any allowed class of the format, as the attributes it was given. Compared by identity, also as a key."""

    state: object

    def __new__(cls, *arguments: object) -> Record:
        """Made without its constructor too, as pickles do."""
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *arguments: object) -> None:
        """Take any arguments; none of them is needed."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """Return the attributes that it was given by name; none where it was given something else."""
        return self.state if isinstance(self.state, dict) else {}


_RECORDS = {
    _DCP + "metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    _DCP + "filesystem": "_StorageInfo",
    _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "torch.serialization": "_get_layout",
    "pathlib": "Path PosixPath PurePosixPath WindowsPath",
}
_ALLOWED: dict[tuple[str, str], Callable[..., object]] = {
    **{(module, name): Record for module, names in _RECORDS.items() for name in names.split()},
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
}
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class RestrictedUnpickler(pickle.Unpickler):
    """Takes the names it is given and no other."""

    def __init__(self, content: bytes, allowed: Mapping[tuple[str, str], object], where: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed, self._where = allowed, where

    def find_class(self, module: str, name: str) -> object:
        """Return what stands for a name. Raises CheckpointError for one that is not on the list."""
        if (module, name) in _DTYPES:
            return _DTYPES[module, name]
        if (module, name) not in self._allowed:
            raise CheckpointError(
                f"{self._where} is a pickle that names {module}.{name}, which a checkpoint does not need and which is "
                "not loaded, since it could run code. Get the checkpoint from a source that you trust"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> object:
        """Return the record of a tensor's storage, as torch.save writes it."""
        return pid


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored chunk of a tensor: [offset, offset + shape), and the bytes of a file that hold it as torch.save does."""

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
    """Return the tensors of a checkpoint by key; objects that are no tensors are left out.

    Args:
        path: the `.metadata` file.

    Raises:
        CheckpointError: missing, torn, naming a class that is not on the list, or a file outside the directory.
    """
    try:
        metadata = RestrictedUnpickler(path.read_bytes(), _ALLOWED, path).load()
        places = {_place(index): _info(info) for index, info in metadata.fields["storage_data"].items()}
        rows = metadata.fields["state_dict_metadata"].items()
        return {key: _tensor(key, row, places) for key, row in rows if "size" in row.fields}
    except CheckpointError:
        raise
    except Exception as error:  # a pickle of any bytes can fail in any way; nothing was run
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}; the checkpoint is torn"
        ) from None


def _place(index: Record) -> tuple[str, tuple[int, ...] | None]:
    offset = index.fields.get("offset")  # left out where it is None
    return index.fields["fqn"], None if offset is None else tuple(offset)


def _info(info: Record) -> tuple[str, int, int]:
    file = info.fields["relative_path"]
    if not isinstance(file, str) or PurePosixPath(file).name != file:
        raise ValueError(f"{file!r} is not a file name in the checkpoint's own directory")
    return file, int(info.fields["offset"]), int(info.fields["length"])


def _tensor(
    key: str, row: Record, places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
) -> StoredTensor:
    properties = row.fields["properties"]
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
    blobs = []
    for chunk in row.fields["chunks"]:
        offset = tuple(chunk.fields["offsets"])
        blobs.append(Blob(offset, tuple(chunk.fields["sizes"]), *places[key, offset]))
    return StoredTensor(dtype, tuple(row.fields["size"]), tuple(blobs))
