"""What a run may compute on, and whether it fits: this machine, found without torch, or the nodes it was told of.

Checks compare the layout with it. A Ray cluster is asked by runtime/cluster.py. Of this machine a GPU counts only if
the installed torch was built for it, as the actor will see it. Tensor-parallel groups and servers, or a server's parts,
each have to fit on one node: checked with the expected nodes, and by runtime/cluster.py with those that are there.

NCCL's and torch's variables are read once by each process that weights are sent between: ranks set theirs before their
first process group, a server has them from its start, and what both ends of a communicator must agree on is here once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_daro.config.sections import ClusterSection, Config

_SMI_TIMEOUT_S = 20
_FP8_CAPABILITY = 8.9
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
# Compute capability by how a type's name begins.
THIS_MACHINE = "this machine"

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """kind; count: GPUs, or CPU cores, of all nodes; capability: the least compute capability of the GPUs, 0 without
    any, None if unknown; memory_bytes: of this machine, None if unknown or of others; nodes: the count of each; place:
    where, for messages.
    """

    kind: Literal["cpu", "gpu"]
    count: int
    capability: float | None = 0.0
    memory_bytes: int | None = None
    nodes: tuple[int, ...] = ()
    place: str = THIS_MACHINE

    @property
    def fp8(self) -> bool | None:
        """Whether every GPU multiplies 8-bit floats; None if unknown."""
        return None if self.capability is None else self.capability >= _FP8_CAPABILITY

    @property
    def per_node(self) -> tuple[int, ...]:
        """GPUs, or CPU cores, of each node."""
        return self.nodes or (self.count,)


def hardware_of(section: ClusterSection) -> Hardware | None:
    """Return what the configuration says of the nodes; None where it says nothing."""
    if section.gpus_per_node is None:
        return None
    return gpu_nodes([section.gpus_per_node] * section.nodes, section.gpu, "the nodes of the section cluster")


def unknown(place: str) -> Hardware:
    """Return nodes of which nothing is known: no layout is refused for their sake."""
    return Hardware("cpu", sys.maxsize, capability=None, place=place)


def gpu_nodes(counts: Sequence[int], gpu: str | None, place: str) -> Hardware:
    """Return nodes with so many GPUs each. Args: gpu: their type, such as "H100"; None: unknown."""
    return Hardware("gpu", sum(counts), capability=capability_of(gpu), nodes=tuple(counts), place=place)


def capability_of(gpu: str | None) -> float | None:
    """Return the compute capability of a GPU's type, such as "H100" or "A100-80G"; None of one that is not known."""
    names = [name for name in _CAPABILITIES if (gpu or "").upper().startswith(name)]
    return _CAPABILITIES[max(names, key=len)] if names else None


def gpus_with_own_first(own: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES of a process that computes on its own GPUs and maps memory of the node's others.

    Args:
        own: its CUDA_VISIBLE_DEVICES, numbers or UUIDs; None: it sees all. Without nvidia-smi nothing changes.
    """
    rows = _gpu_rows()
    mine = visible_rows(rows, own)
    by_uuid = any(name.strip().startswith("GPU-") for name in (own or "").split(","))
    others = [row for row in rows if row not in mine]
    return ",".join(row[1 if by_uuid else 0] for row in [*mine, *others]) or own or ""


def detect() -> Hardware:
    """Return the hardware of this machine, as torch would use it (CUDA_VISIBLE_DEVICES respected)."""
    capabilities = _gpu_capabilities() if torch_cuda() is not None else []
    if not capabilities:
        if torch_hip() is not None and (amd := _amd_gpus()):
            return Hardware("gpu", amd, capability=None, memory_bytes=_memory_bytes())
        return Hardware("cpu", len(os.sched_getaffinity(0)), memory_bytes=_memory_bytes())
    return Hardware("gpu", len(capabilities), capability=min(capabilities), memory_bytes=_memory_bytes())


def _memory_bytes() -> int:
    """Return the machine's memory, or the smaller limit of this container (cgroup version 2, or 1)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)


def torch_cuda() -> Version | None:
    """Return the CUDA that the installed torch was built for, read from its version file because importing it takes
    seconds; None: none."""
    return _torch_built_for("cuda")


def torch_hip() -> Version | None:
    """Return the ROCm that the installed torch was built for, read likewise; None: none."""
    return _torch_built_for("hip")


def _torch_built_for(platform: str) -> Version | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(rf"^{platform}\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return version_of(match.group(1)) if match else None


def version_of(text: str) -> Version:
    """Return the numbers that a version begins with: "2.20.2+cu13" -> (2, 20, 2)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _gpu_capabilities() -> list[float]:
    """Compute capability of each visible GPU; empty without a working nvidia-smi."""
    rows = visible_rows(_gpu_rows(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [float(capability) for _, _, capability in rows]


def _gpu_rows() -> list[list[str]]:
    """[index, uuid, capability] of each GPU of this machine; empty without a working nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]


def rocm_rows(timeout_s: float) -> list[list[str]]:
    """Return [card, total bytes, used bytes] of each AMD GPU of this machine.

    They are lines such as `card0,206141652992,297795584`.

    Raises:
        FileNotFoundError: no rocm-smi. subprocess.SubprocessError: it failed, or gave no answer in time.
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
    """Return the rows [index, uuid, capability] that CUDA_VISIBLE_DEVICES names; like CUDA's, the list ends at an
    unknown name."""
    if visible is None:
        return rows
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        matching_rows = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if not matching_rows:
            break
        chosen.append(matching_rows[0])
    return chosen


@dataclass(frozen=True, slots=True)
class Demand:
    """The pieces of a run.

    groups: tensor-parallel groups of the actor, of group_size ranks each. servers: engines that the run starts, of
    server_size GPUs each; 0 for those that compute on the CPU; each in server_nodes equal parts. noun: what one is
    called in messages. together: all on one node, since its processes share GPU memory. shared: servers have the GPUs
    of the ranks, in turns with them.
    """

    groups: int
    group_size: int
    servers: int = 0
    server_size: int = 1
    server_nodes: int = 1
    noun: str = "engine"
    together: bool = False
    shared: bool = False

    @property
    def processes(self) -> int:
        """Ranks, and engines or their parts."""
        return self.groups * self.group_size + self.parts

    @property
    def parts(self) -> int:
        """Parts of servers, each of which has a place of its own."""
        return self.servers * self.server_nodes

    @property
    def part_size(self) -> int:
        """GPUs of such a part."""
        return self.server_size // self.server_nodes

    @property
    def gpus(self) -> int:
        """GPUs, where there are some."""
        own = 0 if self.shared else self.servers * self.server_size
        return self.groups * self.group_size + own

    @property
    def unit(self) -> int:
        """Ranks of a piece that stays together: a tensor-parallel group, or those whose GPUs a larger server shares."""
        return max(self.group_size, self.server_size) if self.shared else self.group_size

    @property
    def servers_of_unit(self) -> int:
        """Servers that share the GPUs of such a piece."""
        return self.unit // max(self.server_size, 1) if self.shared else 0

    def sizes(self, *, gpus: bool) -> list[int]:
        """Return what each piece takes of its node (GPUs, or CPUs), groups first."""
        if self.shared:
            size = self.unit + (0 if gpus else self.servers_of_unit)
            return [size] * (self.groups * self.group_size // self.unit)
        part = self.part_size if gpus else 1
        return [self.group_size] * self.groups + ([part] * self.parts if part else [])

    def text(self, *, gpus: bool) -> str:
        """Return the pieces in words, without those that take nothing."""
        size = self.server_size if gpus else 1
        parts = [f"{self.groups} x tensor-parallel group of {self.group_size}"] if self.groups else []
        if self.shared and gpus:
            return f"{parts[0]}, whose GPUs {self.servers} x {self.noun} of {size} share,"
        spread = f" in {self.server_nodes} parts" if self.server_nodes > 1 else ""
        parts += [f"{self.servers} x {self.noun} of {size}{spread}"] if self.servers and size else []
        return " and ".join(parts)


def demand_of(config: Config, *, engines: bool = True) -> Demand:
    """Return the pieces of a run. Args: engines: False for one that generates nothing."""
    actor, demand = config.actor, engines_of(config)
    groups = actor.world_size // actor.tensor_parallel
    servers = demand.servers if engines else 0
    shared = servers > 0 and config.engine.colocate
    # Servers that share the GPUs of ranks are on a node with these, and get their weights there.
    maps_memory = config.engine.kind == "sglang" and config.engine.sglang.transport.maps_memory
    together = servers > 0 and not shared and maps_memory
    return replace(
        demand, groups=groups, group_size=actor.tensor_parallel, servers=servers, together=together, shared=shared
    )


def engines_of(config: Config) -> Demand:
    """Return the pieces of what only generates."""
    engine = config.engine
    started = 0 if engine.kind == "sglang" and engine.sglang.urls else engine.replicas
    if engine.kind != "sglang":
        return Demand(0, 1, started, server_size=0)
    return Demand(0, 1, started, engine.sglang.tensor_parallel, engine.sglang.nodes, "server")


def misfit(demand: Demand, nodes: Sequence[int], *, what: str = "GPUs") -> str:
    """Return why the pieces do not fit, with the numbers; empty if they do.

    The largest piece goes first, to the node where it leaves least: right where sizes divide one another, as powers of
    two do.

    Args:
        demand: the pieces.
        nodes: what each node has.
        what: what is counted: "GPUs", or "CPUs", of which a server takes one.
    """
    gpus, free, homeless = what == "GPUs", list(nodes), list[int]()
    total, have = sum(demand.sizes(gpus=gpus)), sum(nodes)
    if demand.together:
        if total <= max(nodes, default=0):
            return ""
        why = "all of them on one node, since engine.sglang.sync tensor hands over memory of a node's GPUs"
        return f"{demand.text(gpus=gpus)} need {total} {what}, {why}; there are {_listed(nodes)}"
    for size in sorted(demand.sizes(gpus=gpus), reverse=True):
        room = [index for index, free_bytes in enumerate(free) if free_bytes >= size]
        if room:
            free[min(room, key=lambda index: free[index])] -= size
        else:
            homeless.append(size)
    if not homeless:
        return ""
    return (
        f"{demand.text(gpus=gpus)} need {total} {what}, each of them whole on one node; {_listed(nodes)} "
        f"with {have} {what} in all: no room for {len(homeless)} of them"
    )


def _listed(nodes: Sequence[int]) -> str:
    """Nodes in words: "2 nodes of 8 and 1 of 4"."""
    if not nodes:
        return "0 nodes"
    counts = {size: list(nodes).count(size) for size in sorted(set(nodes), reverse=True)}
    texts = [f"{count} of {size}" for size, count in counts.items()]
    first, *rest = texts
    first = first.replace(" of ", " node of " if first.startswith("1 ") else " nodes of ", 1)
    return " and ".join([first, *rest])


_BOTH_ENDS = {
    # How a GPU's memory is handed to another process of its node: by cuMem handles (1) or CUDA IPC (0). NCCL takes 1
    # by itself, and SGLang 0.5.23 sets 0 where it finds nothing (srt/entrypoints/engine.py, _set_envs_and_config): then
    # one end exports a handle that the other cannot open (NCCL 2.30, transport/p2p.cc), and the first broadcast between
    # a rank and a server of one node fails.
    "NCCL_CUMEM_ENABLE": "0",
}
_RANK = {
    # A watchdog of torch that sees an error of NCCL asks all groups for a dump; the default group's monitor then waits
    # for it and ends the process 480 s later, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says
    # (torch 2.13, ProcessGroupNCCL.cpp, broadcastDumpSignal and HeartbeatMonitor::runLoop). A broken broadcast to a
    # server is no reason to end a rank.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Megatron overlaps communication of tensor and context parallelism by the order of kernels in one queue
    # (megatron/core/tensor_parallel/layers.py asks for it).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def nccl_of_both_ends(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank and a server of the same node must have alike."""
    return {name: inherited.get(name, value) for name, value in _BOTH_ENDS.items()}


def nccl_of_rank(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank of the actor must have before its first process group."""
    return nccl_of_both_ends(inherited) | {name: inherited.get(name, value) for name, value in _RANK.items()}
