"""Weights as files that servers read: an HF checkpoint that several ranks write together and that appears at once.

Place in the data flow: exporting ranks write their shards into a directory beside the final one; whoever drives them
then writes the index and renames. Refuses to leave anything half written under the final name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import FlatBucket, flatten
from megatron_daro.sync.source import SendReport

_COPIED = ("config.json", "generation_config.json")
_INDEX = "model.safetensors.index.json"


def partial_directory(directory: Path) -> Path:
    """Where the files of `directory` are written before it appears."""
    return directory.with_name(f".{directory.name}.partial")


def write_shards(
    directory: Path, label: str, stream: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> dict[str, tuple[str, int]]:
    """Writes this rank's tensors into the partial directory; reads the stream to its end whatever happens.

    Args:
        directory: the final directory.
        label: distinguishes ranks in file names.
        stream: (HF name, tensor), maybe collective.
        shard_bytes: limit of a file.

    Returns:
        HF name -> (file name, bytes).

    Raises:
        SyncError: the disk refused.
    """
    partial, written, failure = partial_directory(directory), dict[str, tuple[str, int]](), ""
    for number, bucket in enumerate(flatten(stream, shard_bytes)):
        if failure:
            continue  # other ranks gather along
        try:
            written |= _write_shard(partial, f"{label}-{number:05d}.safetensors", bucket)
        except (OSError, SafetensorError) as error:
            failure = f"{partial}: {error}"
    if failure:
        raise SyncError(
            f"weights could not be written for the servers: {failure}; free space, or set engine.sglang.sync_dir"
        )
    return written


def finish(directory: Path, shards: Sequence[Mapping[str, tuple[str, int]]], model_path: Path) -> int:
    """Writes index and configuration and gives the directory its name. Returns the bytes of all tensors."""
    partial = partial_directory(directory)
    entries = {name: entry for part in shards for name, entry in part.items()}
    total = sum(nbytes for _, nbytes in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in entries.items()}}
    try:
        (partial / _INDEX).write_text(json.dumps(index))
        for name in _COPIED:
            if (model_path / name).is_file():
                shutil.copyfile(model_path / name, partial / name)
        for path in partial.iterdir():
            _sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        raise SyncError(
            f"{directory} could not be written: {error}; free space, or set engine.sglang.sync_dir"
        ) from error
    return total


def prepare(directory: Path) -> None:
    """Makes an empty partial directory, also where an earlier try left one."""
    partial = partial_directory(directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SyncError(f"engine.sglang.sync_dir: {partial} cannot be made: {error}") from error


def write_checkpoint(
    directory: Path, streams: Sequence[Iterable[tuple[str, Tensor]]], model_path: Path, shard_bytes: int
) -> SendReport:
    """All of it from this process: prepare, shards, finish."""
    started = time.perf_counter()
    prepare(directory)
    shards = [write_shards(directory, f"part{i}", stream, shard_bytes) for i, stream in enumerate(streams)]
    total = finish(directory, shards, model_path)
    return SendReport(total, sum(len(s) for s in shards), time.perf_counter() - started)


def _write_shard(partial: Path, file: str, bucket: FlatBucket) -> dict[str, tuple[str, int]]:
    # A clone of each: safetensors refuses tensors that share memory, as views of a bucket do.
    tensors = {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
    save_file(tensors, partial / file, metadata={"format": "pt"})
    return {name: (file, tensor.nbytes) for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
