"""GPUs that the planner knows by name, and files of one's own."""

from __future__ import annotations

import pytest

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import find_gpu

NEEDED = {"name": "mine", "memory_mib": 1000, "bf16_tflops": 1, "memory_gb_s": 10, "link_gb_s": 5}


@pytest.mark.parametrize(
    ("name", "found"), [("H100", "h100-80g"), ("h200-141g", "h200-141g"), ("mi300x", "mi300x-192g")]
)
def test_gpus_are_found_by_name(name, found):
    assert find_gpu(name).name == found


@pytest.mark.parametrize(("name", "near"), [("h100-90g", "h100-80g"), ("a100", "a100-40g"), ("zzz", "a100-40g")])
def test_a_name_that_is_unknown_or_not_the_only_one_is_answered_with_those_there_are(name, near):
    with pytest.raises(ConfigError, match=f"--gpu: got '{name}'.*{near}"):
        find_gpu(name)


def write(place, fields):
    file = place / "mine.yaml"
    file.write_text("".join(f"{name}: {number}\n" for name, number in fields.items()))
    return str(file)


def test_own_numbers_come_from_a_file(tmp_path):
    gpu = find_gpu(write(tmp_path, NEEDED))
    assert (gpu.name, gpu.memory_bytes, gpu.linked) == ("mine", 1000 * 2**20, gpu.gpus_per_node)


@pytest.mark.parametrize(
    ("field", "value"), [("memory_mib", 0), ("gpus_per_node", 0), ("linked_gpus", -1), ("memory_mb", 1)]
)
def test_a_number_that_no_gpu_has_is_refused_by_its_name(tmp_path, field, value):
    with pytest.raises(ConfigError, match=rf"\b{field}\b"):
        find_gpu(write(tmp_path, NEEDED | {field: value}))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        find_gpu(str(tmp_path / "gone.yaml"))
    file = tmp_path / "twice.yaml"
    file.write_text("name: a\nname: b\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:2"):
        find_gpu(str(file))
