"""The hardware of a run: this machine, examined without torch, or the nodes that the configuration names.

Checks compare the layout with it. A Ray cluster is asked by runtime/cluster.py. A GPU of this machine counts only if
the installed torch was built for it, since the actor sees no other.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_daro.config.sections import ClusterSection
from megatron_daro.errors import ConfigError

_SMI_TIMEOUT_S = 20
_FP8_CAPABILITY = 8.9
# Compute capability by the beginning of a type's name.
_CAPABILITIES = {
    **dict.fromkeys(("V100",), 7.0),
    **dict.fromkeys(("T4",), 7.5),
    **dict.fromkeys(("A100", "A800", "A30"), 8.0),
    **dict.fromkeys(("A10", "A40", "A16", "A2"), 8.6),
    **dict.fromkeys(("L4", "L20", "L40"), 8.9),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), 9.0),
    **dict.fromkeys(("B100", "B200", "GB200"), 10.0),
    **dict.fromkeys(("B300", "GB300"), 10.3),
}
THIS_MACHINE = "this machine"

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """count: GPUs, or CPU cores, of all nodes. capability: the least compute capability of the GPUs; 0 without GPUs,
    None if unknown. memory_bytes: of this machine; None if unknown, or for other machines. nodes: the count of each
    node. place: where the hardware is, for messages.
    """

    kind: Literal["cpu", "gpu", "unknown"]
    count: int
    capability: float | None = 0.0
    memory_bytes: int | None = None
    nodes: tuple[int, ...] = ()
    place: str = THIS_MACHINE

    @property
    def fp8(self) -> bool | None:
        """Whether every GPU can multiply 8-bit floats; None if unknown."""
        return None if self.capability is None else self.capability >= _FP8_CAPABILITY

    @property
    def per_node(self) -> tuple[int, ...]:
        """GPUs, or CPU cores, of each node."""
        return self.nodes or (self.count,)


def hardware_of(section: ClusterSection) -> Hardware | None:
    """Return the nodes that the configuration describes; None if it describes none."""
    if section.gpus_per_node is None:
        return None
    return gpu_nodes([section.gpus_per_node] * section.nodes, section.gpu, "the nodes of the section cluster")


def unknown(place: str) -> Hardware:
    """Return nodes about which nothing is known: no layout is refused because of them."""
    return Hardware("unknown", sys.maxsize, capability=None, place=place)


def gpu_nodes(counts: Sequence[int], gpu: str | None, place: str) -> Hardware:
    """Return nodes with GPUs. Args: counts: GPUs of each node. gpu: their type, such as "H100"; None: unknown."""
    return Hardware("gpu", sum(counts), capability=capability_of(gpu), nodes=tuple(counts), place=place)


def capability_of(gpu: str | None) -> float | None:
    """Return the compute capability of a type of GPU, such as "H100" or "A100-80G"; None if the type is not known."""
    names = [name for name in _CAPABILITIES if (gpu or "").upper().startswith(name)]
    return _CAPABILITIES[max(names, key=len)] if names else None


def gpus_with_own_first(own: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that computes on its own GPUs and maps memory of the node's other GPUs.

    Args:
        own: the process's present CUDA_VISIBLE_DEVICES, numbers or UUIDs; None: it sees all GPUs, and nvidia-smi must
            work.
    """
    rows = _gpu_rows()
    mine = visible_rows(rows, own)
    by_uuid = any(name.strip().startswith("GPU-") for name in (own or "").split(","))
    others = [row for row in rows if row not in mine]
    return ",".join(row[1 if by_uuid else 0] for row in [*mine, *others]) or own or ""


def detect() -> Hardware:
    """Return the hardware of this machine, as torch would use it (CUDA_VISIBLE_DEVICES respected).

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names slices of GPUs.
    """
    capabilities = _gpu_capabilities() if torch_cuda() is not None else []
    if not capabilities:
        if torch_hip() is not None and (amd := _amd_gpus()):
            return Hardware("gpu", amd, capability=None, memory_bytes=_memory_bytes())
        return Hardware("cpu", len(os.sched_getaffinity(0)), memory_bytes=_memory_bytes())
    return Hardware("gpu", len(capabilities), capability=min(capabilities), memory_bytes=_memory_bytes())


def _memory_bytes() -> int:
    """Return the machine's memory, or the limit of this container (cgroup version 2 or 1) if that is smaller."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)


def torch_cuda() -> Version | None:
    """Return the CUDA version for which the installed torch was built; None if it was built without CUDA. It is read
    from torch's version file, because importing torch takes seconds."""
    return _torch_built_for("cuda")


def torch_hip() -> Version | None:
    """Return the ROCm version for which the installed torch was built, as `torch_cuda` does for CUDA."""
    return _torch_built_for("hip")


def _torch_built_for(platform: str) -> Version | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(rf"^{platform}\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return version_of(match.group(1)) if match else None


def version_of(text: str) -> Version:
    """Return the numbers at the beginning of a version: "2.20.2+cu13" -> (2, 20, 2)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _gpu_capabilities() -> list[float]:
    """Return the compute capability of each visible GPU; empty without a working nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and visible.startswith("MIG-"):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: got {visible}, slices of GPUs (MIG), between which NCCL does not send; allowed: "
            "whole GPUs; fix: ask for whole ones, or set CUDA_VISIBLE_DEVICES= for a run on the CPU"
        )
    rows = visible_rows(_gpu_rows(), visible)
    return [float(capability) for _, _, capability in rows]


def _gpu_rows() -> list[list[str]]:
    """Return [index, uuid, capability] of each GPU of this machine; empty without a working nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]


def rocm_rows(timeout_s: float) -> list[list[str]]:
    """Return [card, total bytes, used bytes] of each AMD GPU of this machine.

    rocm-smi prints them as lines such as `card0,206141652992,297795584`.

    Raises:
        FileNotFoundError: there is no rocm-smi. subprocess.SubprocessError: it failed, or did not answer in time.
    """
    command = ["rocm-smi", "--showmeminfo", "vram", "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    return [line.split(",") for line in done.stdout.split() if re.match(r"card\d+,\d+,\d+$", line)]


def _amd_gpus() -> int:
    """Return how many AMD GPUs are visible; 0 without a working rocm-smi."""
    try:
        rows = rocm_rows(_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return 0
    numbered = [[card.removeprefix("card"), ""] for card, _, _ in rows]
    visible = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return len(visible_rows(numbered, visible))


def visible_rows(rows: list[list[str]], visible: str | None) -> list[list[str]]:
    """Return the rows [index, uuid, capability] that CUDA_VISIBLE_DEVICES names. As in CUDA, an unknown name ends the
    list."""
    if visible is None:
        return rows
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        matching_rows = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if not matching_rows:
            break
        chosen.append(matching_rows[0])
    return chosen
