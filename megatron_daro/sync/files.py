"""Weights as files of an HF checkpoint: exporting ranks write them into a directory beside the final one; the driver
then adds the index and renames the directory.

Servers read the checkpoint (`sync: disk`), or it is the result of a run. Nothing half written appears under the final
name, and no code (`*.py`) is copied with the tokenizer.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_daro import durable
from megatron_daro.config.lora import CONFIG_FILE, WEIGHTS_FILE
from megatron_daro.convert.hf_files import copy_model_files, shard_name, write_index
from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import WeightBucket, bucketize
from megatron_daro.sync.digests import noted
from megatron_daro.sync.plan import ORIGIN_FILE, Digest, SendReport, WeightFiles
from megatron_daro.sync.transport_sender import read_to_its_end

if TYPE_CHECKING:
    from megatron_daro.sync.transport_sender import Stream

Written = Mapping[str, tuple[str, int]]
"""Name of a tensor -> (name of its file, bytes)."""


def write_weight_files(stream: Stream, files: WeightFiles, label: str) -> SendReport:
    """Write one rank's files of the checkpoint into the partial directory.

    Args:
        stream: (HF name, tensor), read to its end, since each item may be a collective of all exporting ranks. label:
            of this rank, for the names of its files.

    Raises:
        SyncError: the disk refused.
    """
    started, digests = time.perf_counter(), dict[str, Digest]()
    partial, written = partial_directory(files.directory), dict[str, tuple[str, int]]()
    if files.digest_dtype:
        stream = noted(stream, files.digest_dtype, digests)
    with read_to_its_end(stream) as tensors:
        in_host_memory = ((name, tensor.cpu()) for name, tensor in tensors)  # the GPU may have no room for a whole file
        for number, bucket in enumerate(bucketize(in_host_memory, files.file_bytes)):
            try:
                written |= _write_file(partial, f"{label}-{number:05d}.safetensors", bucket)
            except (OSError, SafetensorError) as error:
                raise SyncError(f"weights could not be written: {partial}: {error}; {files.remedy}") from error
    total = sum(nbytes for _, nbytes in written.values())
    return SendReport(total, time.perf_counter() - started, digests, written)


def partial_directory(directory: Path) -> Path:
    """Return where the files of `directory` are written before it appears."""
    return directory.with_name(f".{directory.name}.partial")


def complete_checkpoint(
    files: WeightFiles,
    written: Written,
    model_path: Path,
    dtype: str,
    changes: Mapping[str, Any] = {},
) -> None:
    """Write index, configuration and tokenizer, then give the directory its final name; an older one there is deleted.

    Args:
        written: by all ranks. model_path: has the configuration and the tokenizer. dtype: of the tensors, by torch's
            name. changes: further entries of config.json.

    Raises:
        SyncError: the disk refused.
    """

    def fill(partial: Path) -> None:
        write_index(partial, _named_files(partial, written), sum(nbytes for _, nbytes in written.values()))
        copy_model_files(model_path, partial, dtype, always=True, further_layers=False, changes=changes)

    _complete(files, fill)


def complete_adapter(files: WeightFiles, written: Written, config: Mapping[str, Any]) -> None:
    """Join the tensors of all ranks in the one file that PEFT reads, then give the directory its final name; an older
    one there is deleted.

    Args:
        written: by all ranks. config: the content of adapter_config.json.

    Raises:
        SyncError: the disk refused.
    """

    def fill(partial: Path) -> None:
        parts = [partial / file for file in dict.fromkeys(file for file, _ in written.values())]
        tensors = {name: tensor for part in parts for name, tensor in load_file(part).items()}
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        for part in parts:
            part.unlink()
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    _complete(files, fill)


def _complete(files: WeightFiles, fill: Callable[[Path], None]) -> None:
    directory = files.directory
    partial, replaced = partial_directory(directory), directory.with_name(f".{directory.name}.replaced")
    try:
        fill(partial)
        if files.step is not None:
            (partial / ORIGIN_FILE).write_text(json.dumps({"step": files.step}) + "\n")
        durable.sync_folder(partial)
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        durable.sync(directory.parent)
    except (OSError, SafetensorError) as error:
        raise SyncError(f"{directory} could not be written: {error}; {files.remedy}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def open_checkpoint(files: WeightFiles) -> None:
    """Make an empty partial directory; delete one that an earlier try left. Raises SyncError: the disk refused."""
    partial = partial_directory(files.directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SyncError(f"{partial} cannot be made: {error}; {files.remedy}") from error


def _named_files(partial: Path, written: Written) -> dict[str, str]:
    """Rename the ranks' files as shards of a checkpoint, whose number is now known. Returns HF name -> file name."""
    files = list(dict.fromkeys(file for file, _ in written.values()))
    names = {file: shard_name(number, len(files)) for number, file in enumerate(files)}
    for file, name in names.items():
        (partial / file).rename(partial / name)
    return {tensor: names[file] for tensor, (file, _) in written.items()}


def _write_file(partial: Path, file: str, bucket: WeightBucket) -> dict[str, tuple[str, int]]:
    # Cloned, since safetensors refuses tensors that share memory, as views of a bucket do.
    tensors = {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
    save_file(tensors, partial / file, metadata={"format": "pt"})
    return {name: (file, tensor.nbytes) for name, tensor in tensors.items()}
