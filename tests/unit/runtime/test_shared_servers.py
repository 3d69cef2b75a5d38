"""Arguments of servers that share GPUs with ranks, and of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.servers import LaunchOptions
from megatron_daro.runtime.sglang_group import _sharing


def options(**arguments):
    return LaunchOptions(
        python=Path("python"), model_path=Path("model"), tensor_parallel=2, seed=0, arguments=arguments, env={},
        log_path=Path("log"),
    )  # fmt: skip


def test_one_that_shares_gpus_can_give_its_memory_back_and_leaves_room():
    made = _sharing(options(dtype="bfloat16"), "2,3")
    assert made.gpus == "2,3"
    assert made.arguments == {"dtype": "bfloat16", "enable_memory_saver": True, "mem_fraction_static": 0.6}


@pytest.mark.parametrize("name", ["mem_fraction_static", "mem-fraction-static"])
def test_what_a_person_gave_stays_however_it_is_spelled(name):
    given = SGLangSection(arguments={name: 0.8}).named_arguments
    assert _sharing(options(**given), "0").arguments == {"enable_memory_saver": True, "mem_fraction_static": 0.8}


@pytest.mark.parametrize(("given", "gpus"), [({}, None), ({"device": "cpu"}, "0")], ids=["apart", "on a CPU"])
def test_others_are_as_they_were(given, gpus):
    assert _sharing(options(**given), gpus) == options(**given)
