"""Servers and ranks on the same GPUs in turns: what is refused before anything starts, and what pieces there are."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, check, resolve
from megatron_daro.config.hardware import Demand, demand_of, misfit

NODE = Hardware("gpu", 8, capability=9.0)
RIGHT = (
    *("engine.kind=sglang", "engine.sglang.python=/usr/bin/python3", "engine.colocate=true"),
    *("engine.sglang.sync=tensor", "actor.tensor_parallel=2", "actor.data_parallel=4", "engine.replicas=4"),
    "engine.sglang.tensor_parallel=2",
)


def problems(run_files, *overrides):
    return [str(problem) for problem in check(resolve(run_files.file, [*RIGHT, *overrides]), NODE).problems]


def test_every_gpu_of_a_node_has_a_rank_and_a_servers_rank(run_files):
    assert problems(run_files) == []
    assert problems(run_files, "engine.sglang.tensor_parallel=1", "engine.replicas=8") == []
    assert problems(run_files, "engine.sglang.tensor_parallel=8", "engine.replicas=1") == []
    apart = problems(run_files, "engine.colocate=false")
    assert len(apart) == 1 and "16 GPUs" in apart[0], "with GPUs of their own there is no room"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["engine.sglang.sync=distributed"], "engine.sglang.sync", "NCCL takes no two processes of one GPU"),
        (["engine.sglang.sync=shards"], "engine.sglang.sync", "got shards with engine.colocate"),
        (["rollout.max_staleness=1"], "rollout.max_staleness", "nothing is generated while a batch is trained"),
        (["trainer.replace_lost_ranks=true"], "trainer.replace_lost_ranks", "a GPU that servers have"),
        (["engine.replicas=2"], "engine.replicas", "got 2 x 2 GPUs, with 8 ranks"),
        (["engine.sglang.tensor_parallel=3"], "engine.sglang.tensor_parallel", "a divisor or a multiple"),
        (["engine.sglang.tensor_parallel=16"], "engine.sglang.tensor_parallel", "does not divide the 8 ranks"),
        (["actor.megatron={nccl_ub: true}"], "actor.megatron.nccl_ub", "memory that NCCL registered stays"),
        (
            ["engine.sglang.arguments={enable-memory-saver: false}"],
            *("engine.sglang.arguments", "a server keeps its memory"),
        ),
        (
            ["engine.sglang.arguments={quantization: fp8, load_format: flash_rl}"],
            *("engine.sglang.arguments", "quantization with engine.colocate"),
        ),
    ],
)
def test_what_cannot_take_turns_is_refused_by_name(run_files, overrides, field, words):
    lines = [line for line in problems(run_files, *overrides) if words in line]
    assert len(lines) == 1 and lines[0].startswith(f"{field}: got "), problems(run_files, *overrides)


def test_only_servers_of_the_run_share_its_gpus(run_files):
    lines = problems(run_files, "engine.sglang.python=null", 'engine.sglang.urls=["http://10.0.0.5:30000"]')
    assert any(line.startswith("engine.colocate: got true with servers that run already") for line in lines)
    run_files.write({})
    lines = [str(p) for p in check(resolve(run_files.file, ["engine.colocate=true"]), NODE).problems]
    assert any(line.startswith("engine.colocate: got true with engine.kind embedded") for line in lines)


def test_pieces_are_as_large_as_the_larger_of_group_and_server(run_files):
    demand = demand_of(resolve(run_files.file, list(RIGHT)))
    assert demand.shared and demand.gpus == 8 and demand.sizes(gpus=True) == [2, 2, 2, 2]
    assert demand.sizes(gpus=False) == [3, 3, 3, 3], "a CPU for the server beside those of the ranks"
    assert Demand(4, 2, servers=1, server_size=8, shared=True).sizes(gpus=True) == [8]
    assert Demand(1, 8, servers=4, server_size=2, shared=True).sizes(gpus=True) == [8]
    assert demand_of(resolve(run_files.file, list(RIGHT)), engines=False).sizes(gpus=True) == [2, 2, 2, 2]
    why = misfit(Demand(4, 2, servers=1, server_size=8, noun="server", shared=True), [4, 4])
    assert "whose GPUs 1 x server of 8 share, need 8 GPUs" in why
