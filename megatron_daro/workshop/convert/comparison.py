"""Reads a written file back and compares it with its source, byte by byte."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.plan import Job, MegatronParameter, Plan
from megatron_daro.convert.runs import RowReader
from megatron_daro.errors import CheckpointError
from megatron_daro.workshop.convert.rows import windows
from megatron_daro.workshop.convert.stopping import StopFlag, raise_if_stopped


def compare_file(plan: Plan, job: Job, root: Path, stop: StopFlag | None = None) -> str:
    """Compare the tensors of a written file with the source, and return the file's name.

    Args:
        plan, job: that were carried out. root: of the target. stop: ends it early.

    Raises:
        CheckpointError: names the first tensor that differs. StoppedError: the flag was raised.
    """
    _forget(plan.weights_folder(root) / job.file)
    target: HFCheckpoint | MegatronWeights = (
        HFCheckpoint(root) if plan.format == "hf" else MegatronWeights(root, read_model_shape(plan.config))
    )
    with target, plan.tensors as source:
        for item in job.items:
            own = item.rule.hf_names if isinstance(item, MegatronParameter) else item.members or (item.name,)
            for name in own:
                _compare(name, source, target, plan.piece_bytes, stop)
    return job.file


def _compare(name: str, source: RowReader, target: RowReader, most_bytes: int, stop: StopFlag | None) -> None:
    if source.shape(name) != target.shape(name):
        raise CheckpointError(f"{name}: shape {target.shape(name)} was written, {source.shape(name)} is the source's")
    dtype = target.dtype(name)
    for start, end in windows(source.shape(name), source.dtype(name), most_bytes):
        raise_if_stopped(stop)
        expected, actual = source.read(name, start, end).to(dtype), target.read(name, start, end)
        if not torch.equal(expected.reshape(-1).view(torch.uint8), actual.reshape(-1).view(torch.uint8)):
            raise CheckpointError(
                f"{name}: rows {start} to {end} are not what the source has; a disk or a memory fault, or the source "
                "changed meanwhile. Convert again"
            )


def _forget(path: Path) -> None:
    """Let the system drop its copy of a file, so that the disk is read."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
