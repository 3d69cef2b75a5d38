"""Written and source compared byte by byte: every HF tensor read back from both sides, by way of the files.

Place in the data flow: `convert --verify`, and files that an earlier, interrupted run left. A Megatron checkpoint is
read as HF tensors by the same code that starts a run from it; so a wrong slice, name, cast or byte shows, whoever made
it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert import torch_dist
from megatron_daro.convert.hf_reader import HFCheckpoint
from megatron_daro.convert.jobs import StopFlag, StoppedError, windows
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.plan import Job, Parameter, Plan
from megatron_daro.convert.row_runs import RowReader
from megatron_daro.errors import CheckpointError


def compare_file(plan: Plan, job: Job, root: Path, stop: StopFlag | None = None) -> str:
    """Compare what one file holds with what it was made of; returns the file's name.

    Args:
        plan, job: that were carried out. root: of the target. stop: ends it early.

    Raises:
        CheckpointError: names the first tensor that differs. StoppedError: the flag was raised.
    """
    folder = root / torch_dist.RELEASE if plan.format == torch_dist.BACKEND else root
    _forget(folder / job.file)
    with ExitStack() as stack:
        if plan.format == "hf":
            source: RowReader = stack.enter_context(MegatronWeights(plan.source, read_model_shape(plan.config)))
            target: RowReader = stack.enter_context(HFCheckpoint(root))
        else:
            source = stack.enter_context(HFCheckpoint(plan.source))
            target = stack.enter_context(MegatronWeights(root, read_model_shape(plan.config)))
        for item in job.items:
            for name in item.rule.hf_names if isinstance(item, Parameter) else (item.name,):
                _compare(name, source, target, plan.piece_bytes, stop)
    return job.file


def _compare(name: str, source: RowReader, target: RowReader, most_bytes: int, stop: StopFlag | None) -> None:
    if source.shape(name) != target.shape(name):
        raise CheckpointError(f"{name}: shape {target.shape(name)} was written, {source.shape(name)} is the source's")
    dtype = target.dtype(name)
    for start, end in windows(source.shape(name), source.dtype(name), most_bytes):
        if stop is not None and stop.is_set():
            raise StoppedError
        expected, found = source.read(name, start, end).to(dtype), target.read(name, start, end)
        if not torch.equal(expected.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)):
            raise CheckpointError(
                f"{name}: rows {start} to {end} are not what the source has; a disk or a memory fault, or the source "
                "changed meanwhile. Convert again"
            )


def _forget(path: Path) -> None:
    """Let the system drop its copy of a file, so that the disk is read."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
