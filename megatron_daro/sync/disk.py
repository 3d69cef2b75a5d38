"""Weights as files that servers read: an HF checkpoint that several ranks write together and that appears at once.

Place in the data flow: exporting ranks write their shards into a directory beside the final one; whoever drives them
then writes the index and renames. Refuses to leave anything half written under the final name.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.plan import SendReport

_COPIED = ("config.json", "generation_config.json")
_INDEX = "model.safetensors.index.json"


def partial_directory(directory: Path) -> Path:
    """Where the files of `directory` are written before it appears."""
    return directory.with_name(f".{directory.name}.partial")


def write_shards(directory: Path, label: str, stream: Iterable[tuple[str, Tensor]], shard_bytes: int) -> SendReport:
    """Write this rank's tensors into the partial directory; read the stream to its end whatever happens.

    Args:
        directory: the final directory.
        label: distinguishes ranks in file names.
        stream: (HF name, tensor), maybe collective.
        shard_bytes: limit of a file.

    Returns:
        The report, with the files.

    Raises:
        SyncError: the disk refused.
    """
    started = time.perf_counter()
    partial, written, failure = partial_directory(directory), dict[str, tuple[str, int]](), ""
    for number, bucket in enumerate(bucketize(stream, shard_bytes)):
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
    total = sum(nbytes for _, nbytes in written.values())
    return SendReport(total, len(written), time.perf_counter() - started, files=written)


def finish(directory: Path, files: Mapping[str, tuple[str, int]], model_path: Path) -> None:
    """Write index and configuration and give the directory its name.

    Args:
        directory: the final directory. files: HF name -> (file name, bytes), of all ranks. model_path: has the
            configuration.
    """
    partial = partial_directory(directory)
    total = sum(nbytes for _, nbytes in files.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in files.items()}}
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


def prepare(directory: Path) -> None:
    """Make an empty partial directory, also where an earlier try left one."""
    partial = partial_directory(directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SyncError(f"engine.sglang.sync_dir: {partial} cannot be made: {error}") from error


def _write_shard(partial: Path, file: str, bucket: WeightBucket) -> dict[str, tuple[str, int]]:
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
