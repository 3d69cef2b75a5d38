"""Lazy reading of a Hugging Face checkpoint: safetensors in one file, or several with an index.

Checkpoint directory -> `tensor(name)` -> convert.mapping.shard -> actor.
Only the bytes of the rows and columns that are asked for are read. Every file's header is checked against its size when
the checkpoint is opened, so a torn download is refused before anything starts. Refuses pickles
(`pytorch_model.bin`): reading one can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_daro.convert.pieces import Piece, PieceStore
from megatron_daro.convert.safetensors_file import read_header
from megatron_daro.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHARDS = "model-?????-of-?????.safetensors"  # the names that transformers and `shard_name` give
_AGAIN = "Copy or download the checkpoint again."


class HFCheckpoint(Mapping[str, Tensor]):
    """A checkpoint directory as a mapping from tensor name to tensor; a tensor is read when it is asked for.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
        ModelError: no such directory, no safetensors, a missing or torn file, an index that does not fit its files or
            that lies beside a `model.safetensors` of its own, which transformers would read instead.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._pieces = _WholePieces(self._locate())

    def names(self) -> list[str]:
        """Every tensor name, sorted."""
        return self._pieces.keys()

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now, on the CPU, in the dtype of the file. Raises ModelError if it is missing or torn."""
        shape = self.shape(name)
        return self._pieces.read(name, [0] * len(shape), shape)

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop) of a tensor, of these columns (None: all); no other byte of it is read.

        With `out`, that tensor is filled and returned.

        Raises:
            ModelError: the tensor is missing or torn.
        """
        dims = self.shape(name)
        offset, size = [start, *[0] * (len(dims) - 1)], [stop - start, *dims[1:]]
        if columns is not None:
            offset[1], size[1] = columns[0], columns[1] - columns[0]
        return self._pieces.read(name, offset, size, out)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header. Raises ModelError if it is missing."""
        return self._piece(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype, from the header. Raises ModelError if it is missing."""
        return self._piece(name).dtype

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._pieces.bytes_read

    def close(self) -> None:
        """Lets go of the files; reading afterwards is an error."""
        self._pieces.close()
        self._pieces.by_name.clear()

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._pieces.by_name:
            raise KeyError(name)
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._pieces.by_name)

    def _locate(self) -> dict[str, Piece]:
        """Tensor name -> where it is; reads the header of every file and checks it against the file's size."""
        if not self.directory.is_dir():
            what = "a file, not a directory" if self.directory.exists() else "not a directory"
            raise ModelError(f"{self.directory} is {what}. Give the local directory of the checkpoint.")
        index = self.directory / INDEX_FILE
        if index.is_file():
            return self._read_index(index)
        if (self.directory / SINGLE_FILE).is_file():
            return self._open(SINGLE_FILE)
        raise ModelError(self._why_nothing())

    def _why_nothing(self) -> str:
        shards = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if shards:
            return f"{self.directory} holds {shards[0]} but no {INDEX_FILE}. {_AGAIN}"
        if any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt")):
            return (
                f"{self.directory} holds its weights as pickles only (.bin, .pt). They are not read, because loading a "
                "pickle can run code. Save it again with transformers' save_pretrained, which writes safetensors."
            )
        return f"{self.directory} holds no {SINGLE_FILE} and no {INDEX_FILE}. {_AGAIN}"

    def _read_index(self, index: Path) -> dict[str, Piece]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            advice = "Save it as UTF-8 without a byte order mark." if "BOM" in str(error) else _AGAIN
            raise ModelError(
                f"{index} is not a safetensors index ({type(error).__name__}: {error}). {advice}"
            ) from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is not a file name in its own directory. {_AGAIN}")
        self._check_unnamed(files)
        held = {file: self._open(file) for file in files}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise ModelError(f"{self.directory / file} does not hold {name}, though {INDEX_FILE} says so. {_AGAIN}")
        for file, tensors in held.items():
            unnamed = sorted(name for name in tensors if weight_map.get(name) != file)
            if unnamed:
                more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
                raise ModelError(
                    f"{self.directory / file} holds {unnamed[0]}{more}, which {INDEX_FILE} does not name there; "
                    f"transformers would load it. {_AGAIN}"
                )
        return {name: held[file][name] for name, file in weight_map.items()}

    def _check_unnamed(self, named: list[str]) -> None:
        """Refuse weights beside the files that the index names: which of the two are the model?"""
        if SINGLE_FILE not in named and (self.directory / SINGLE_FILE).is_file():
            raise ModelError(
                f"{self.directory} holds {SINGLE_FILE} beside {INDEX_FILE}, which names {named[0]}: transformers reads "
                f"{SINGLE_FILE}, others the files of the index. Remove {SINGLE_FILE}, or the index with its files"
            )
        unnamed = [
            path.name for path in sorted(self.directory.glob(_SHARDS)) if path.is_file() and path.name not in named
        ]
        if unnamed:
            raise ModelError(
                f"{self.directory} holds {unnamed[0]}, which {INDEX_FILE} does not name. Remove it if it is left from "
                "an older checkpoint, else copy the index again"
            )

    def _open(self, file: str) -> dict[str, Piece]:
        path = self.directory / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {INDEX_FILE} names it. {_AGAIN}")
        try:
            entries = read_header(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}). {_AGAIN}") from None
        return {
            name: Piece(name, (0,) * len(entry.shape), entry.shape, entry.shape, entry.dtype, path, entry.start)
            for name, entry in entries.items()
        }

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces.by_name:
            tied = " Set tie_word_embeddings in config.json if the model shares it." if name == "lm_head.weight" else ""
            raise ModelError(f"{self.directory} holds no tensor {name}. Is it the model of its config.json?{tied}")
        return self._pieces.by_name[name]


class _WholePieces(PieceStore):
    """Every tensor is one piece: the whole."""

    error = ModelError

    def __init__(self, by_name: dict[str, Piece]) -> None:
        super().__init__()
        self.by_name = by_name

    def keys(self) -> list[str]:
        return sorted(self.by_name)

    def boxes(self, key: str) -> list[Piece]:
        return [self.by_name[key]]

    def piece(self, key: str, box: Piece) -> Piece:
        return box

    def shape(self, key: str) -> tuple[int, ...]:
        return self.by_name[key].shape
