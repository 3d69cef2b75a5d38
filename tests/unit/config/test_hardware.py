"""What a machine and a cluster have, what a run needs of them, and why it does not fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_daro.config import Hardware, hardware
from megatron_daro.config.hardware import Demand, gpu_nodes, hardware_of, misfit, unknown, version_of
from megatron_daro.config.sections import ClusterSection


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Makes nvidia-smi or rocm-smi print lines; torch is built for CUDA, or for what is said."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str, lines: str, *, cuda: bool = True) -> None:
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n/bin/cat <<END\n{lines}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setattr(hardware, "torch_cuda", lambda: (13, 0) if cuda else None)
        monkeypatch.setattr(hardware, "torch_hip", lambda: None if cuda else (6, 4))

    return make


def test_gpus_are_counted_with_the_least_capability(tools, monkeypatch):
    tools("nvidia-smi", "0, GPU-a, 9.0\n1, GPU-b, 8.0\n2, GPU-c, 8.9\nno, row\na, b, c, d")
    found = hardware.detect()
    assert (found.kind, found.count, found.capability, found.fp8) == ("gpu", 3, 8.0, False)
    assert found.memory_bytes > 2**28 and found.place == "this machine" and found.per_node == (3,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert (hardware.detect().count, hardware.detect().fp8) == (2, True)


def test_without_a_torch_for_gpus_there_are_cores(tools):
    tools("nvidia-smi", "0, GPU-a, 9.0", cuda=False)
    found = hardware.detect()
    assert (found.kind, found.count, found.capability, found.fp8) == ("cpu", len(os.sched_getaffinity(0)), 0.0, False)
    assert found.memory_bytes > 2**28


def test_gpus_of_amd_have_no_capability(tools, monkeypatch):
    tools("rocm-smi", "device,VRAM Total Memory (B)\ncard0,20,1\ncard1,20,2\nxcard2,20,2", cuda=False)
    found = hardware.detect()
    assert (found.kind, found.count, found.capability) == ("gpu", 2, None) and found.memory_bytes > 2**28
    assert hardware.rocm_rows(5.0) == [["card0", "20", "1"], ["card1", "20", "2"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.detect().count == 1
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    assert hardware.detect().count == 2, "its own variable counts first"


@pytest.mark.parametrize(("name", "cuda"), [("nvidia-smi", True), ("rocm-smi", False)])
def test_a_tool_that_fails_shows_no_gpus(tools, tmp_path, name, cuda):
    tools(name, "", cuda=cuda)
    (tmp_path / name).write_text("#!/bin/sh\necho '0, GPU-a, 9.0'; echo card0,1,1; exit 9\n")
    assert hardware.detect().kind == "cpu"


def test_tools_are_given_twenty_seconds(monkeypatch):
    asked = []
    done = type("Done", (), {"stdout": "0, GPU-a, 9.0\n"})
    monkeypatch.setattr(hardware.subprocess, "run", lambda command, **options: asked.append((command, options)) or done)
    assert hardware._gpu_rows() == [["0", "GPU-a", "9.0"]] and hardware._amd_gpus() == 0
    assert [command[0] for command, _ in asked] == ["nvidia-smi", "rocm-smi"]
    options = {"capture_output": True, "text": True, "timeout": 20, "check": True}
    assert [given for _, given in asked] == [options, options]


def test_memory_is_the_smallest_limit_that_can_be_read(monkeypatch):
    read = {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "4096"}
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: read[str(path)])
    assert hardware._memory_bytes() == 4096
    read["/sys/fs/cgroup/memory.max"] = "2048"
    assert hardware._memory_bytes() == 2048
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: "max")
    assert hardware._memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_torch_without_its_version_file_is_built_for_nothing(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    assert hardware.torch_cuda() is None and hardware.torch_hip() is None


@pytest.mark.parametrize(("line", "version"), [("cuda: Optional[str] = '12.8'", (12, 8)), ("cuda = None", None)])
def test_what_torch_is_built_for_stands_in_its_version_file(tmp_path, monkeypatch, line, version):
    (tmp_path / "version.py").write_text(f"hip: Optional[str] = '6.4'\n{line}\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: spec)
    assert hardware.torch_cuda() == version and hardware.torch_hip() == (6, 4)
    assert version_of("13.0.1rc1") == (13, 0, 1)


def test_a_cluster_is_what_its_section_says():
    assert hardware_of(ClusterSection(nodes=3)) is None
    found = hardware_of(ClusterSection(nodes=3, gpus_per_node=4, gpu="H100"))
    assert found == Hardware("gpu", 12, 9.0, nodes=(4, 4, 4), place="the nodes of the section cluster")
    assert gpu_nodes([2, 1], None, "x") == Hardware("gpu", 3, None, nodes=(2, 1), place="x")
    nobody_knows = unknown("y")
    assert (nobody_knows.kind, nobody_knows.count, nobody_knows.fp8) == ("cpu", sys.maxsize, None)
    assert nobody_knows.place == "y" and nobody_knows.memory_bytes is None


SPREAD = Demand(4, 2, servers=3, server_size=16, server_nodes=2, noun="server")
SHARED = Demand(4, 2, servers=1, server_size=8, noun="server", shared=True)


def test_pieces_are_counted():
    assert (SPREAD.parts, SPREAD.part_size, SPREAD.processes, SPREAD.gpus) == (6, 8, 14, 56)
    assert (SPREAD.unit, SPREAD.servers_of_unit) == (2, 0)
    assert SPREAD.sizes(gpus=True) == [2] * 4 + [8] * 6 and SPREAD.sizes(gpus=False) == [2] * 4 + [1] * 6
    assert (SHARED.gpus, SHARED.unit, SHARED.servers_of_unit) == (8, 8, 1)
    assert SHARED.sizes(gpus=False) == [9]
    small = Demand(2, 4, servers=4, server_size=2, shared=True)
    assert (small.unit, small.servers_of_unit) == (4, 2) and small.sizes(gpus=False) == [6, 6]
    on_cpus = Demand(1, 2, servers=3, server_size=0)
    assert on_cpus.sizes(gpus=True) == [2] and on_cpus.sizes(gpus=False) == [2, 1, 1, 1] and on_cpus.gpus == 2


@pytest.mark.parametrize(
    ("demand", "gpus", "text"),
    [
        (SPREAD, True, "4 x tensor-parallel group of 2 and 3 x server of 16 in 2 parts"),
        (SPREAD, False, "4 x tensor-parallel group of 2 and 3 x server of 1 in 2 parts"),
        (SHARED, True, "4 x tensor-parallel group of 2, whose GPUs 1 x server of 8 share,"),
        (SHARED, False, "4 x tensor-parallel group of 2 and 1 x server of 1"),
        (Demand(0, 1, servers=2, server_size=4), True, "2 x engine of 4"),
        (Demand(1, 2, servers=3, server_size=0), True, "1 x tensor-parallel group of 2"),
        (Demand(1, 2), True, "1 x tensor-parallel group of 2"),
    ],
)
def test_pieces_are_said_in_words(demand, gpus, text):
    assert demand.text(gpus=gpus) == text


@pytest.mark.parametrize(
    ("demand", "nodes", "why"),
    [
        (Demand(2, 4), [8], ""),
        (Demand(2, 4), [4, 4], ""),
        (Demand(3, 4), [8, 2], "3 x tensor-parallel group of 4 need 12 GPUs, each of them whole on one node; "
         "1 node of 8 and 1 of 2 with 10 GPUs in all: no room for 1 of them"),
        (Demand(1, 4), [], "1 x tensor-parallel group of 4 need 4 GPUs, each of them whole on one node; "
         "0 nodes with 0 GPUs in all: no room for 1 of them"),
        (Demand(1, 4, servers=1, together=True), [4, 5], ""),
        (Demand(1, 4, servers=2, together=True), [4, 5, 5], "1 x tensor-parallel group of 4 and 2 x engine of 1 need "
         "6 GPUs, all of them on one node, since engine.sglang.sync tensor hands over memory of a node's GPUs; there "
         "are 2 nodes of 5 and 1 of 4"),
        # The largest first, each where it leaves least: 3 to the node of 3, so that 4 has one, too.
        (Demand(1, 3, servers=1, server_size=4), [4, 3], ""),
        (Demand(1, 3, servers=4, server_size=1), [4, 3], ""),
        (Demand(1, 2, servers=1, server_size=3), [5, 2], ""),
        (Demand(2, 2, servers=1, server_size=3), [5, 2], ""),
    ],
)  # fmt: skip
def test_pieces_find_room_or_it_is_said_why_not(demand, nodes, why):
    assert misfit(demand, nodes) == why


def test_cpus_are_counted_where_servers_take_one_each():
    demand = Demand(1, 2, servers=3, server_size=8)
    assert misfit(demand, [5], what="CPUs") == ""
    assert "need 5 CPUs" in misfit(demand, [4], what="CPUs")
