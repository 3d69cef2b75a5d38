"""What must hold on a node before it joins: its GPUs, their memory, the disk, its clock.

Each answer is a sentence that ends a job, so it names what is there and what is needed. Writes one small file, and
removes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config.hardware import rocm_rows
from megatron_daro.errors import disk_fault

_ECC = "ecc.errors.uncorrected.volatile.total"
_NVIDIA_SMI = ["nvidia-smi", f"--query-gpu=index,memory.total,memory.used,{_ECC}", "--format=csv,noheader,nounits"]
_TIMEOUT_S = 30
MOST_USED_SHARE = 0.1
"""Share of a GPU's memory that may be in use before the job starts."""
TRIAL_BYTES = 2**20
MOST_CLOCK_OFFSET_S = 5.0
"""Clocks of two nodes may differ by this much: logs and file times are compared."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a node must have: `gpus`, and `free_disk_gib` in run_dir."""

    gpus: int
    free_disk_gib: float
    run_dir: Path


def problems(wanted: Wanted) -> list[str]:
    """Return what is wrong with this node; empty if nothing is."""
    return [*gpu_problems(wanted.gpus), *_disk_problems(wanted)]


def clock_problems(offset_s: float) -> list[str]:
    """Return what is wrong with a clock that is `offset_s` ahead of the first node's."""
    if abs(offset_s) <= MOST_CLOCK_OFFSET_S:
        return []
    return [f"its clock is {offset_s:+.0f} s off the first node's; at most {MOST_CLOCK_OFFSET_S:g} s are allowed"]


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU as its driver's tool shows it: memory in MiB, and memory errors that could not be corrected."""

    index: str
    total: int
    used: int
    errors: int = 0


def gpu_problems(count: int, *, used: bool = False) -> list[str]:
    """Return what is wrong with the GPUs of this node.

    Args:
        count: how many there must be. used: whether a run may be using them.
    """
    if not count:
        return []
    rocm = not shutil.which("nvidia-smi") and shutil.which("rocm-smi") is not None
    tool = "rocm-smi" if rocm else _NVIDIA_SMI[0]
    try:
        gpus = _rocm_gpus() if rocm else _nvidia_gpus()
    except FileNotFoundError:
        return [f"{count} GPUs were asked for, and there is neither nvidia-smi nor rocm-smi"]
    except subprocess.TimeoutExpired:
        return [f"{tool} gave no answer in {_TIMEOUT_S} s: a GPU or its driver hangs"]
    except subprocess.CalledProcessError as error:
        return [f"{tool} failed: {(error.stdout + error.stderr).strip()[:200]}"]
    problems = [f"{count} GPUs were asked for, and {tool} shows {len(gpus)}"] if len(gpus) < count else []
    for gpu in gpus:
        if not used and gpu.used > MOST_USED_SHARE * gpu.total:
            problems.append(f"GPU {gpu.index} has {gpu.used} of {gpu.total} MiB in use before the job began")
        if gpu.errors:
            problems.append(f"GPU {gpu.index} has {gpu.errors} memory errors that could not be corrected (ECC)")
    return problems


def _nvidia_gpus() -> list[_Gpu]:
    rows = [[cell.strip() for cell in line.split(",")] for line in _printed(_NVIDIA_SMI) if line.count(",") >= 2]
    return [_Gpu(row[0], *(int(cell) if cell.isdecimal() else 0 for cell in row[1:4])) for row in rows]


def _rocm_gpus() -> list[_Gpu]:
    rows = rocm_rows(_TIMEOUT_S)
    return [_Gpu(card.removeprefix("card"), int(total) >> 20, int(used) >> 20) for card, total, used in rows]


def _printed(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


def _disk_problems(wanted: Wanted) -> Iterator[str]:
    directory = wanted.run_dir
    trial = directory / f".trial_{os.uname().nodename}_{os.getpid()}"
    try:
        free = shutil.disk_usage(directory).free
        with trial.open("wb") as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield disk_fault(error, directory)[0]
        return
    finally:
        trial.unlink(missing_ok=True)
    if free < wanted.free_disk_gib * 2**30:
        yield f"{directory} has {free / 2**30:.1f} GiB free; free_disk_gib asks for {wanted.free_disk_gib:g}"
