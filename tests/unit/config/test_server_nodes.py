"""Servers that are spread over several nodes: what is refused before anything starts, and what places they need."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, check, resolve
from megatron_daro.config.hardware import demand_of

CLUSTER = Hardware("gpu", 24, capability=9.0, nodes=(8, 8, 8), place="the cluster")
RIGHT = (
    *("engine.kind=sglang", "engine.sglang.python=/usr/bin/python3", "engine.sglang.tensor_parallel=16"),
    *("engine.sglang.nodes=2", "actor.tensor_parallel=2", "actor.data_parallel=4"),
)


def problems(run_files, *overrides):
    return [str(problem) for problem in check(resolve(run_files.file, [*RIGHT, *overrides]), CLUSTER).problems]


def test_a_server_that_no_node_holds_is_spread(run_files):
    assert problems(run_files) == []
    whole = problems(run_files, "engine.sglang.nodes=1")
    assert len(whole) == 1 and "no room for 1 of them" in whole[0], "as one piece it has no place"
    demand = demand_of(resolve(run_files.file, RIGHT))
    assert demand.sizes(gpus=True) == [2] * 4 + [8] * 2 and demand.gpus == 24
    assert demand.processes == 8 + 2
    assert "1 x server of 16 in 2 parts" in demand.text(gpus=True)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.sglang.nodes=3"], "got 3 with tensor_parallel 16"),
        (["engine.sglang.sync=tensor"], "got 2 with sync tensor"),
        (["engine.sglang.python=null", 'engine.sglang.urls=["http://10.0.0.5:30000"]'], "servers that run already"),
        (["engine.colocate=true", "engine.sglang.sync=disk"], "got 2 with engine.colocate"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(run_files, overrides, words):
    lines = [line for line in problems(run_files, *overrides) if words in line]
    assert len(lines) == 1 and lines[0].startswith("engine.sglang.nodes: got "), problems(run_files, *overrides)
