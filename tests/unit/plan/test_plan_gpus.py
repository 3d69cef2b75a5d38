"""GPUs that the planner knows: the numbers of the data sheets, typed a second time, and files of one's own."""

from __future__ import annotations

import pytest

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import GPUS, find_gpu

# name: MiB; TFLOPS in bf16 and fp8; GB/s of memory, links, network; GPUs of a node, that links join; sustained.
SHEETS = {
    "a100-40g": (40960, 312, 0, 1555, 300, 25, 8, 8, 1),
    "a100-80g": (81920, 312, 0, 2039, 300, 25, 8, 8, 1),
    "h20-96g": (97871, 148, 296, 4000, 450, 50, 8, 8, 1),
    "h100-80g": (81559, 989, 1979, 3350, 450, 50, 8, 8, 1),
    "h200-141g": (143771, 989, 1979, 4800, 450, 50, 8, 8, 1),
    "b200-180g": (183359, 2250, 4500, 7700, 900, 50, 8, 8, 1),
    "b300-270g": (275040, 2250, 4500, 8000, 900, 100, 8, 8, 1),
    "gb200-186g": (189471, 2500, 5000, 8000, 900, 50, 4, 72, 1),
    "gb300-279g": (284208, 2500, 5000, 8000, 900, 100, 4, 72, 1.17),
    "mi300x-192g": (196592, 1307, 2615, 5300, 448, 50, 8, 8, 1),
}


def test_gpus_are_those_of_the_data_sheets():
    found = {
        name: (
            *(gpu.memory_mib, gpu.bf16_tflops, gpu.fp8_tflops, gpu.memory_gb_s, gpu.link_gb_s, gpu.network_gb_s),
            *(gpu.gpus_per_node, gpu.linked_gpus, gpu.sustained),
        )
        for name, gpu in GPUS.items()
    }
    assert found == SHEETS
    assert GPUS["mi300x-192g"].source == "AMD Instinct MI300X data sheet"


def test_what_a_file_leaves_out_is_as_on_a_machine_of_eight_with_400_gigabits_each(tmp_path):
    file = tmp_path / "mine.YML"
    file.write_text("{name: mine, memory_mib: 1000, bf16_tflops: 1, memory_gb_s: 10, link_gb_s: 5}")
    gpu = find_gpu(str(file))
    assert (gpu.fp8_tflops, gpu.network_gb_s, gpu.gpus_per_node, gpu.linked_gpus, gpu.sustained) == (0, 50, 8, 0, 1)
    assert gpu.linked == 8 and gpu.source == "own numbers"


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_mib", 0), ("fp8_tflops", -1), ("gpus_per_node", 0), ("linked_gpus", -1), ("sustained", 0)],
)
def test_a_number_that_no_gpu_has_is_refused(tmp_path, field, value):
    fields = {"name": "mine", "memory_mib": 1, "bf16_tflops": 1, "memory_gb_s": 1, "link_gb_s": 1, field: value}
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{name}: {number}\n" for name, number in fields.items()))
    with pytest.raises(ConfigError, match=rf"with {field}: Input should be greater.*fix: correct the file"):
        find_gpu(str(file))


def test_a_gpu_may_have_no_fp8_one_gpu_to_a_node_and_no_links_beyond_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{name: mine, memory_mib: 0.5, bf16_tflops: 0.5, memory_gb_s: 0.5, link_gb_s: 0.5, sustained: 0.5,"
        " gpus_per_node: 1, network_gb_s: 0.5}"
    )
    assert find_gpu(str(file)).linked == 1


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"--gpu: got '.*gone.yaml' \(No such file or directory\); allowed: a YAML"):
        find_gpu(str(tmp_path / "gone.yaml"))
    file = tmp_path / "twice.yaml"
    file.write_text("name: a\nname: b\n")
    with pytest.raises(ConfigError, match=r"name \(twice.yaml:2\): got the key twice"):
        find_gpu(str(file))
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="with file: "):
        find_gpu(str(file))


def test_a_name_that_is_like_none_is_answered_with_the_way_to_give_numbers():
    with pytest.raises(ConfigError, match=r"got 'zzz'; allowed: a100-40g, .*fix: give its numbers in a file"):
        find_gpu("zzz")
    with pytest.raises(ConfigError, match=r"fix: did you mean a100-[48]0g or a100-[48]0g\?"):
        find_gpu("a100")
