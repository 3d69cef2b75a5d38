"""What a machine and a cluster have, what a run needs of them, and why it does not fit."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_daro.config import Hardware, hardware, resolve
from megatron_daro.config.hardware import gpu_nodes, hardware_of, unknown, version_of
from megatron_daro.config.placement import Demand, demand_of, misfit
from megatron_daro.config.sections import ClusterSection
from megatron_daro.errors import ConfigError


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


def test_slices_of_gpus_are_refused_and_no_run_on_the_cpu(tools, monkeypatch):
    tools("nvidia-smi", "0, GPU-a, 9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        hardware.detect()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware.detect().kind == "cpu"


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


def test_memory_is_the_smallest_limit_that_can_be_read(tools, monkeypatch):
    read = {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "4096"}
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read.get(str(path)) or real(path, **how))
    tools("nvidia-smi", "", cuda=False)
    assert hardware.detect().memory_bytes == 4096
    read["/sys/fs/cgroup/memory.max"] = "2048"
    assert hardware.detect().memory_bytes == 2048
    read |= dict.fromkeys(read, "max")
    assert hardware.detect().memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    assert (nobody_knows.kind, nobody_knows.count, nobody_knows.fp8) == ("unknown", sys.maxsize, None)
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
    ("demand", "nodes", "numbers"),
    [
        (Demand(2, 4), [8], ()),
        (Demand(2, 4), [4, 4], ()),
        (Demand(3, 4), [8, 2], ("12 GPUs", "10 GPUs")),
        (Demand(1, 4), [], ("4 GPUs", "0 GPUs")),
        (Demand(1, 4, servers=1, together=True), [4, 5], ()),
        (Demand(1, 4, servers=2, together=True), [4, 5, 5], ("6 GPUs", "engine.sglang.sync")),
        (replace(SHARED, groups=4), [8], ()),
        (replace(SHARED, groups=4), [4, 4], ("8 GPUs",)),
        # The largest first, each where it leaves least: 3 to the node of 3, so that 4 has one, too.
        (Demand(1, 3, servers=1, server_size=4), [4, 3], ()),
        (Demand(1, 3, servers=4, server_size=1), [4, 3], ()),
        (Demand(1, 2, servers=1, server_size=3), [5, 2], ()),
        (Demand(2, 2, servers=1, server_size=3), [5, 2], ()),
    ],
)
def test_pieces_find_room_or_the_numbers_say_why_not(demand, nodes, numbers):
    why = misfit(demand, nodes)
    assert bool(why) == bool(numbers) and all(number in why for number in numbers)


def test_cpus_are_counted_where_servers_take_one_each():
    demand = Demand(1, 2, servers=3, server_size=8)
    assert misfit(demand, [5], what="CPUs") == ""
    assert "5 CPUs" in misfit(demand, [4], what="CPUs")


SERVERS = ["engine.kind=sglang", "engine.sglang.python=/usr/bin/python3"]
LAYOUT = ["actor.tensor_parallel=2", "actor.data_parallel=4"]


def test_the_pieces_of_a_run_follow_from_its_layout_and_its_servers(run_files):
    def of(*options, **named):
        return demand_of(resolve(run_files.file, [*SERVERS, *LAYOUT, *options]), **named)

    spread = of("engine.sglang.tensor_parallel=16", "engine.sglang.nodes=2")
    assert (spread.sizes(gpus=True), spread.gpus, spread.processes) == ([2] * 4 + [8] * 2, 24, 10)
    turns = [
        "engine.colocate=true",
        "engine.sglang.sync=tensor",
        "engine.replicas=4",
        "engine.sglang.tensor_parallel=2",
    ]
    assert of(*turns).shared and of(*turns).gpus == 8 and of(*turns).sizes(gpus=False) == [3, 3, 3, 3]
    assert of(*turns, engines=False).sizes(gpus=True) == [2, 2, 2, 2]
    assert of("engine.sglang.sync=tensor").together and not of(*turns).together
    own = resolve(run_files.file, ["engine.kind=my_module:MyEngine", "engine.replicas=4", *LAYOUT])
    assert demand_of(own).processes == 8, "the driver has it"
