"""What a worker process reports about the file that it wrote: its tensors, on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_daro.convert import torch_dist
from megatron_daro.convert.daro_format import StoredShard


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as it was read or written."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that is complete: its size in bytes, the tensors of both sides, and the pieces that the index names."""

    file: str
    num_bytes: int
    megatron: list[TensorRecord] = field(default_factory=list)
    hf: list[TensorRecord] = field(default_factory=list)
    shards: list[StoredShard] = field(default_factory=list)
    blobs: list[torch_dist.WrittenBlob] = field(default_factory=list)


def joined(records: Sequence[FileRecord], num_bytes: int) -> FileRecord:
    """Return the record of a file from the records of its parts. num_bytes: of the file."""
    joined_up = FileRecord(records[0].file, num_bytes)
    for record in records:
        joined_up.megatron.extend(record.megatron)
        joined_up.hf.extend(record.hf)
        joined_up.shards.extend(record.shards)
        joined_up.blobs.extend(record.blobs)
    return joined_up
