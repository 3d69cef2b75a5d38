"""`plan --sync` counts what the ranks of the recipe would send: the same layout, made by their own code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_plan_memory import small, small_experts

from megatron_daro.config import Config
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.runtime.shard_export import trainer_layout
from megatron_daro.sync.shard_layouts import server_layout
from megatron_daro.sync.shard_plan import ShardPlan
from megatron_daro.workshop.plan.gpus import find_gpu
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.memory import Memory
from megatron_daro.workshop.plan.search import Choice, Servers, Trainers
from megatron_daro.workshop.plan.shard_sync import sync_rows
from megatron_daro.workshop.plan.times import TrainTimes


@pytest.mark.parametrize(("expert_tensor", "links"), [(None, 17), (4, 16)])
def test_experts_are_sent_as_the_recipe_cuts_them(expert_tensor, links):
    sizes = {"tensor_parallel": 4, "expert_parallel": 2, "data_parallel": 2, "expert_tensor_parallel": expert_tensor}
    config = Config.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train": ("x",)},
            "actor": sizes,
            "engine": {"kind": "sglang", "sglang": {"tensor_parallel": 4}},
        }
    )
    shape = read_model_shape(small_experts())
    [row] = sync_rows(config, shape, [], find_gpu("h100-80g"))
    ranks = trainer_layout(shape, config.actor, fused_norms=False, grouped_experts=False)
    plan = ShardPlan(shape, ranks, server_layout(shape, {"tp_size": 4}), config.engine.replicas, itemsize=2)
    assert row.balance == plan.balance() and row.balance.links == links


def rows(shape=None, choices=(), engine=None, **actor):
    servers = {"kind": "sglang", "replicas": 3, "sglang": {"tensor_parallel": 2}} if engine is None else engine
    made = {"model": {"path": "x"}, "data": {"train": ("x",)}, "actor": actor, "engine": servers}
    return sync_rows(Config.model_validate(made), shape or read_model_shape(small()), choices, find_gpu("h100-80g"))


def test_the_seconds_are_the_busiest_rank_s_bytes_over_its_share_of_the_network():
    [row] = rows(tensor_parallel=2, pipeline_parallel=2)
    assert (row.name, row.sizes, row.refused) == ("recipe", "2 2 1 1 1 1 to 3 x 2", "")
    busiest = max(*row.balance.sent, *row.balance.received)
    assert row.seconds == busiest / 50e9 and len(row.balance.sent) == 4 and len(row.balance.received) == 2
    [wide] = rows(tensor_parallel=2, pipeline_parallel=2, precision="fp32")
    assert sum(wide.balance.sent) == 2 * sum(row.balance.sent)


def test_layers_that_do_not_divide_and_servers_of_another_form_are_refused():
    [row] = rows(read_model_shape(small(num_hidden_layers=3)), pipeline_parallel=2)
    assert row.balance is None and "layers" in row.refused
    [row] = rows(read_model_shape(small()), engine={"kind": "sglang", "sglang": {"arguments": {"quantization": "fp8"}}})
    assert row.balance is None and "fp8" in row.refused


def test_choices_have_rows_by_their_number_and_those_that_share_gpus_none():
    trainers = Trainers(ModelLayout(2, 1, 1, "none", 4096), 2, 7, Memory(), TrainTimes(1.0, 0.0, 0.0, 0.0))
    apart = Choice(trainers, Servers(4, 1, 2, Memory(), 1.0), 0.0, 0.0, 0)
    shared = replace(apart, shared=True)
    found = rows(choices=[apart, shared, apart])
    assert [row.name for row in found] == ["recipe", "1", "3"] and found[1].sizes == "2 1 1 1 2 1 to 2 x 4"
    assert [row.name for row in rows(choices=[apart], engine={"kind": "embedded"})] == ["1"]
    together = {"kind": "sglang", "colocate": True, "sglang": {"tensor_parallel": 1}}
    assert rows(choices=[shared], engine=together) == []
