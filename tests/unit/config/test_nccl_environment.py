"""Both ends of a broadcast have the same environment, and what upstream does where nobody says anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_pool import required_environment

from megatron_daro.config import nccl_environment
from megatron_daro.engine.sglang.command import server_environment


@pytest.mark.parametrize("inherited", [{}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_CUMEM_ENABLE": "0"}], ids=str)
def test_a_rank_and_a_server_hand_out_memory_in_the_same_way(inherited):
    server = server_environment({}, host="10.0.0.1", python=Path("/p/python"), inherited=inherited)
    rank = nccl_environment.nccl_of_rank(inherited)
    assert server["NCCL_CUMEM_ENABLE"] == rank["NCCL_CUMEM_ENABLE"] == inherited.get("NCCL_CUMEM_ENABLE", "0")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in server


def test_a_rank_that_shares_its_gpu_can_give_the_memory_of_nccl_back():
    """It is in no group with a server; NCCL gives back what it allocated with cuMem."""
    assert nccl_environment.nccl_of_rank({}, shares_gpu=True)["NCCL_CUMEM_ENABLE"] == "1"


@pytest.mark.parametrize("of", [nccl_environment.nccl_of_rank, nccl_environment.nccl_of_server])
def test_both_ends_survive_the_dump_of_a_broken_group_unless_a_person_wants_it(of):
    assert of({})["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert of({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"})["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_a_server_whose_peer_died_leaves_the_broadcast_and_lives():
    """2 of torch's ErrorHandlingMode, by the header that torch brings: it aborts communicators and ends no process."""
    server = server_environment({}, host="10.0.0.1", python=Path("/p/python"), inherited={})
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    modes = (folder / "ProcessGroupNCCL.hpp").read_text().partition("enum ErrorHandlingMode {")[2].partition("}")[0]
    assert f"CleanUpOnly = {server['TORCH_NCCL_ASYNC_ERROR_HANDLING']}" in modes


def test_sglang_still_sets_what_the_ranks_are_set_to():
    """The line of upstream that this rests on: where the variable is unset SGLang makes it 0."""
    (engine,) = required_environment().glob("lib/python3*/site-packages/sglang/srt/entrypoints/engine.py")
    text = engine.read_text()
    assert 'if "NCCL_CUMEM_ENABLE" not in os.environ or cfg.enable_symm_mem:' in text
    value = "int(cfg.enable_symm_mem or kv_shard_symmetric_scratch)"
    assert f'os.environ["NCCL_CUMEM_ENABLE"] = str(\n            {value}' in text
