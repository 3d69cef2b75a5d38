"""Lazy reading of a Hugging Face checkpoint: safetensors in one file, or several with an index.

Place in the data flow: checkpoint directory -> `tensor(name)` -> convert.mapping.shard -> actor.
Every file's header is checked against its size when the checkpoint is opened, so a torn download is refused before
anything starts. Refuses pickles (`pytorch_model.bin`): reading one can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_daro.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_AGAIN = "Copy or download the checkpoint again."


class HFCheckpoint(Mapping[str, Tensor]):
    """A checkpoint directory as a mapping from tensor name to tensor; a tensor is read when it is asked for.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
        ModelError: no such directory, no safetensors, a missing or torn file, an index that does not fit its files.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()

    def names(self) -> list[str]:
        """Every tensor name, sorted."""
        return sorted(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now, on the CPU, in the dtype of the file. Raises ModelError if it is missing or torn."""
        try:
            return self._handle(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{name} cannot be read from {self._path(name)}: {error}. {_AGAIN}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header. Raises ModelError if it is missing."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def close(self) -> None:
        """Lets go of the files; reading afterwards is an error."""
        self._files.clear()
        self._file_of = {}

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise KeyError(name)
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._file_of)

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name; opens every file, which checks its header against its size."""
        if not self.directory.is_dir():
            raise ModelError(f"{self.directory} is not a directory. model.path must be a local checkpoint directory.")
        index = self.directory / INDEX_FILE
        if index.is_file():
            return self._read_index(index)
        if (self.directory / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)
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

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index} is not a safetensors index ({type(error).__name__}: {error}). {_AGAIN}"
            ) from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is not a file name in its own directory. {_AGAIN}")
        held = {file: set(self._open(file)) for file in files}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise ModelError(f"{self.directory / file} does not hold {name}, though {INDEX_FILE} says so. {_AGAIN}")
        return dict(weight_map)

    def _open(self, file: str) -> list[str]:
        path = self.directory / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {INDEX_FILE} names it. {_AGAIN}")
        try:
            self._files[file] = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is torn or not a safetensors file ({error}). {_AGAIN}") from None
        return list(self._files[file].keys())

    def _path(self, name: str) -> Path:
        return self.directory / self._file_of[name]

    def _handle(self, name: str) -> safe_open:
        if name not in self._file_of:
            tied = " Set tie_word_embeddings in config.json if the model shares it." if name == "lm_head.weight" else ""
            raise ModelError(f"{self.directory} holds no tensor {name}. Is it the model of its config.json?{tied}")
        return self._files[self._file_of[name]]
