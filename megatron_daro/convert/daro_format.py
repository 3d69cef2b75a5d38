"""Our own format of Megatron checkpoints: safetensors files, and a JSON index of where each box of a tensor is.

The actor's checkpoints and `convert --format daro` write it; `DaroPieces` reads it. Nothing is unpickled here:
`common.pt` belongs to the training state, and the actor reads it with torch's weights-only loader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config.safetensors_header import Entry, read_header
from megatron_daro.convert.pieces import Piece, PieceStore
from megatron_daro.convert.safetensors_file import DTYPES
from megatron_daro.errors import CheckpointError, ModelError

BACKEND, VERSION = "daro_safetensors", 1
INDEX_FILE, METADATA_FILE, COMMON_FILE = "index.json", "metadata.json", "common.pt"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One stored piece of a global tensor: elements [offset, offset + shape) in every axis."""

    key: str
    file: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]


def write_index(directory: Path, shards: Iterable[StoredShard]) -> None:
    """Write the index of a checkpoint. Raises OSError."""
    rows = [[s.key, s.file, s.name, s.offset, s.shape, s.global_shape] for s in shards]
    (directory / INDEX_FILE).write_text(json.dumps({"version": VERSION, "shards": rows}))


def read_index(directory: Path) -> Iterator[StoredShard]:
    """Yield the shards of the index. Raises CheckpointError if it cannot be read, or names files in other folders."""
    try:
        rows = json.loads((directory / INDEX_FILE).read_text())["shards"]
        for key, file, name, offset, shape, global_shape in rows:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file name in the checkpoint's own directory")
            sizes = (*offset, *shape, *global_shape)
            if not all(isinstance(text, str) for text in (key, file, name)) or not all(type(n) is int for n in sizes):
                raise ValueError(f"{[key, file, name, offset, shape, global_shape]} is no shard's row")
            if len(global_shape) != len(offset) or len(shape) != len(offset) or min(sizes, default=0) < 0:
                raise ValueError(f"{key}: offset {offset}, shape {shape} and global shape {global_shape} do not fit")
            yield StoredShard(key, file, name, tuple(offset), tuple(shape), tuple(global_shape))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{directory / INDEX_FILE} cannot be read: {error}; the checkpoint is torn") from None


def write_metadata(directory: Path) -> None:
    """Write the file that marks the directory as a checkpoint of this format. Raises OSError."""
    metadata = {"sharded_backend": BACKEND, "sharded_backend_version": VERSION}
    (directory / METADATA_FILE).write_text(json.dumps(metadata))


def read_backend(directory: Path) -> tuple[str, int]:
    """Return (back end, version) of a Megatron checkpoint. Raises CheckpointError if its metadata cannot be read."""
    path = directory / METADATA_FILE
    try:
        metadata = json.loads(path.read_text())
        return str(metadata["sharded_backend"]), int(metadata["sharded_backend_version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is torn") from None


def check_format(directory: Path) -> None:
    """Refuse a checkpoint of another format or version. Raises CheckpointError."""
    backend, version = read_backend(directory)
    if backend != BACKEND:
        raise CheckpointError(f"checkpoint back end: got {backend!r}, allowed is {BACKEND!r}")
    if version != VERSION:
        raise CheckpointError(f"checkpoint version: got {version}, allowed is {VERSION}; use the release that wrote it")


class DaroPieces(PieceStore):
    """The tensors of a checkpoint directory of this format."""

    def __init__(self, directory: Path) -> None:
        """Read the index; files are opened when one of their tensors is asked for.

        Raises:
            CheckpointError: the index is missing or torn.
        """
        super().__init__()
        self._directory = directory
        self._shards: dict[str, list[StoredShard]] = {}
        for shard in read_index(directory):
            self._shards.setdefault(shard.key, []).append(shard)
        self._headers: dict[str, dict[str, Entry]] = {}

    def keys(self) -> list[str]:
        """Return every key, sorted."""
        return sorted(self._shards)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from the index."""
        return self.boxes(key)[0].global_shape

    def boxes(self, key: str) -> Sequence[StoredShard]:
        """Return the stored shards of a tensor."""
        if key not in self._shards:
            raise CheckpointError(
                f"{key} is not in the checkpoint {self._directory}; it was saved by another model or optimizer"
            )
        return self._shards[key]

    def piece(self, key: str, box: StoredShard) -> Piece:
        """Return where a shard's bytes are; reads the header of its file."""
        path = self._directory / box.file
        entry = self._header(path).get(box.name)
        if entry is None or entry.shape != box.shape:
            raise CheckpointError(f"{path} does not hold {key} as the index says; the checkpoint is torn")
        return Piece(key, box.offset, box.shape, box.global_shape, DTYPES[entry.dtype], path, entry.start)

    def _header(self, path: Path) -> dict[str, Entry]:
        if path.name not in self._headers:
            try:
                self._headers[path.name] = read_header(path)
            except ModelError as error:
                raise CheckpointError(str(error)) from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is torn") from None
        return self._headers[path.name]
