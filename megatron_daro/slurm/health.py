"""What must hold on a node before it joins a job: its GPUs, their memory, the disk.

Place in the data flow: node.py asks, the first node collects the answers of all. Each answer is a sentence that ends a
job, so it names what was found and what was asked for. Writes one small file, and removes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.errors import disk_fault

_NVIDIA_SMI = ["nvidia-smi", "--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits"]
_TIMEOUT_S = 30
MOST_USED_SHARE = 0.1
"""Share of a GPU's memory that may be in use before the job starts."""
TRIAL_BYTES = 2**20
MOST_CLOCK_OFFSET_S = 5.0
"""Clocks of two nodes may differ by this much: logs and file times are compared."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """gpus of the node; free_disk_gib in run_dir."""

    gpus: int
    free_disk_gib: float
    run_dir: Path


def problems(wanted: Wanted) -> list[str]:
    """Return what is wrong with this node; empty if nothing is."""
    return [*_gpu_problems(wanted.gpus), *_disk_problems(wanted)]


def clock_problems(offset_s: float) -> list[str]:
    """Return what is wrong with a clock that is `offset_s` ahead of the first node's."""
    if abs(offset_s) <= MOST_CLOCK_OFFSET_S:
        return []
    return [f"its clock is {offset_s:+.0f} s off the first node's; at most {MOST_CLOCK_OFFSET_S:g} s are allowed"]


def _gpu_problems(count: int) -> Iterator[str]:
    if not count:
        return
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except FileNotFoundError:
        yield f"{count} GPUs were asked for, and there is no nvidia-smi"
        return
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi gave no answer in {_TIMEOUT_S} s: a GPU or its driver hangs"
        return
    except subprocess.CalledProcessError as error:
        yield f"nvidia-smi failed: {(error.stdout + error.stderr).strip()[:200]}"
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    if len(rows) < count:
        yield f"{count} GPUs were asked for, and nvidia-smi shows {len(rows)}"
    for index, total, used in rows:
        if total.isdecimal() and used.isdecimal() and int(used) > MOST_USED_SHARE * int(total):
            yield f"GPU {index} has {used} of {total} MiB in use before the job began"


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
