"""Which GPUs a process sees, as CUDA and as servers that map memory need it."""

from __future__ import annotations

from megatron_daro.config.hardware import gpus_with_own_first, visible_rows


def test_cuda_visible_devices_is_read_as_cuda_reads_it():
    rows = [["0", "GPU-aa", "9.0"], ["1", "GPU-bb", "8.0"], ["2", "GPU-cc", "9.0"]]
    assert visible_rows(rows, None) == rows
    assert visible_rows(rows, "") == []
    assert visible_rows(rows, "2,0") == [rows[2], rows[0]]
    assert visible_rows(rows, "GPU-b") == [rows[1]]
    assert visible_rows(rows, "0,-1,1") == [rows[0]]


def test_a_server_that_maps_memory_sees_its_own_gpus_first_and_then_the_others(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, GPU-a, 9.0\\n1, GPU-b, 9.0\\n2, GPU-c, 9.0\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus_with_own_first("2,1") == "2,1,0"
    assert gpus_with_own_first("GPU-b") == "GPU-b,GPU-a,GPU-c"
    assert gpus_with_own_first(None) == "0,1,2"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpus_with_own_first("1") == "1", "without nvidia-smi it is left as it is"
