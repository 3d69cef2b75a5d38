"""The header of a safetensors file: which tensors it holds, their dtypes and shapes, and where their bytes are.

The checks of a run, conversion, and the loaders of Hugging Face checkpoints call `read_header`, which does without
torch. Format: 8 bytes of header length, JSON of {name: dtype, shape, data_offsets}, then the data. Refuses a header
that does not describe exactly the bytes of its file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.errors import ModelError

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per number of the dtypes that are read, by the format's names."""
GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of a git-lfs pointer, which takes the place of a file that git-lfs has not fetched. Source: the pointer
format of git-lfs."""
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_AGAIN = "Copy or download the checkpoint again"


class HeaderError(ModelError):
    """A file is not a complete safetensors file; `args` are what it is and what to do."""

    def __str__(self) -> str:
        return ". ".join(self.args)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. dtype: the format's name. start: position of its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name.

    Raises:
        HeaderError: it is not a safetensors file, is shorter or longer than its header says, or has a dtype that is not
            in `ITEM_BYTES`.
        OSError: it cannot be opened.
    """
    size = path.stat().st_size
    if not path.is_file() or size < 8:  # a pipe or a device has no size, and may never answer
        raise HeaderError(f"{path} is torn or not a safetensors file ({size} bytes)", _AGAIN)
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0]
        if start == GIT_LFS[:8] and file.read(len(GIT_LFS) - 8) == GIT_LFS[8:]:
            raise HeaderError(f"{path} is a git-lfs pointer, not the file", "Run `git lfs pull` in its folder")
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise HeaderError(f"{path} is torn or not a safetensors file (header of {length} bytes in {size})", _AGAIN)
        text = file.read(length)
    try:
        rows = {name: row for name, row in json.loads(text).items() if name != "__metadata__"}
        for name, row in rows.items():
            if row["dtype"] not in ITEM_BYTES:
                raise HeaderError(
                    f"{path} holds {name} as {row['dtype']}, which is not read; allowed: {', '.join(ITEM_BYTES)}",
                    "Take the checkpoint that is not quantized, or have the program that wrote it save bf16",
                )
        entries = {
            name: Entry(name, row["dtype"], _shape(row["shape"]), 8 + length + row["data_offsets"][0])
            for name, row in rows.items()
        }
        ends = {name: 8 + length + row["data_offsets"][1] for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        what = f"{path} is torn or not a safetensors file ({type(error).__name__}: {error})"
        raise HeaderError(what, _AGAIN) from None
    at = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.num_bytes)):
        if entry.start != at or ends[entry.name] != at + entry.num_bytes:
            raise HeaderError(
                f"{path} is torn or not a safetensors file ({entry.name} is not where it should be)", _AGAIN
            )
        at += entry.num_bytes
    if at != size:
        raise HeaderError(f"{path} is torn: its header describes {at} bytes, it has {size}", _AGAIN)
    return entries


def _shape(sizes: list[int]) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return tuple(sizes)
