"""`plan --sync` counts what the ranks of the recipe would send: the same layout, made by their own code."""

from __future__ import annotations

import pytest
from test_plan_memory import small_experts

from megatron_daro.config import Config
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.runtime.shard_export import trainer_layout
from megatron_daro.sync.shard_layouts import server_layout
from megatron_daro.sync.shard_plan import ShardPlan
from megatron_daro.workshop.plan.gpus import find_gpu
from megatron_daro.workshop.plan.shard_sync import sync_rows


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
