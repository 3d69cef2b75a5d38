"""The shard-to-shard plan: every entry of every server parameter once, from a rank that has it, evenly spread.

Whether the servers' layouts are SGLang's own is asked of SGLang itself in tests/sglang/test_sglang_shard_plan.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.parallel_state import RankGenerator
from shard_cases import (
    CASES,
    all_writes,
    carried_out,
    checkpoint,
    padding,
    region,
    server_shapes,
    shards,
    times_written,
    tiny_config,
)

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import ModelError
from megatron_daro.sync.shard_layouts import (
    ServerLayout,
    TrainerLayout,
    server_layout,
    trainer_parts,
)
from megatron_daro.sync.shard_plan import ShardPlan

BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_every_entry_is_written_once_and_padding_never(case):
    boxes = {}
    for _, write in all_writes(case, case.plan()):
        boxes.setdefault((write.server, write.rank, write.target), []).append(write.target_box)
    expected = {
        (server, rank, name): shape
        for server in range(case.servers)
        for rank in range(case.server_layout.tensor)
        for name, shape in server_shapes(case, rank).items()
    }
    unwritten = [padding(case, rank) for rank in range(case.server_layout.tensor)]
    assert boxes.keys() <= expected.keys()
    for (server, rank, name), shape in expected.items():
        counts = times_written(shape, boxes.get((server, rank, name), []))
        assert counts.pop(0, 0) == unwritten[rank][name], (rank, name)
        assert counts.keys() <= {1}, (rank, name)


@each_case
def test_what_arrives_is_what_the_checkpoint_has(case):
    tensors = checkpoint(case)
    for (_, rank), parameters in carried_out(case, tensors).items():
        unwritten = padding(case, rank)
        for name, values in parameters.items():
            assert int(values.isnan().sum()) == unwritten[name]
        norm = "model.layers.3.input_layernorm.weight"
        assert parameters[norm].equal(tensors[norm])
        first = parameters["model.layers.5.self_attn.qkv_proj.weight"][0]
        at = rank % case.server_layout.tensor * case.shape.heads * case.shape.head_dim // case.server_layout.tensor
        assert first.equal(tensors["model.layers.5.self_attn.q_proj.weight"][at])


@each_case
def test_each_rank_writes_only_what_it_holds_and_no_more_than_its_share(case):
    holders = {}
    for held in trainer_parts(case.shape, case.trainer_layout):
        holders.setdefault(held.part.parameter, set()).update(held.ranks)
    plan, sent, links = case.plan(4), [0] * case.trainer_layout.world_size, set()
    parameter = shards(case, checkpoint(case))
    for sender, write in all_writes(case, plan):
        assert sender in holders[write.source]
        assert parameter(sender, write.source)[region(write.source_box)].numel() == write.entries > 0
        sent[sender] += 4 * write.entries
        links.add((sender, write.server, write.rank))
    balance = plan.balance()
    assert balance.sent == tuple(sent) and balance.links == len(links)
    assert sum(balance.received) * case.servers == sum(sent)
    assert max(sent) <= 1.1 * balance.floor


def test_stages_that_hold_more_send_more_and_the_floor_says_so():
    balance = BY_NAME["uneven_stages"].plan().balance()
    assert balance.over_mean == pytest.approx(balance.floor_over_mean, rel=0.02) and balance.floor_over_mean > 1.1


def test_two_receivers_are_not_begun_with_by_all():
    plan = BY_NAME["virtual_stages"].plan()
    first = {(write.server, write.rank) for write in (next(plan.writes(sender)) for sender in range(6))}
    assert len(first) > 3


@pytest.mark.parametrize(("tensor", "context", "data", "pipeline"), [(2, 1, 4, 3), (4, 2, 2, 1), (1, 2, 3, 2)])
def test_replicas_are_megatrons(tensor, context, data, pipeline):
    parts = tuple((range(i, i + 1),) for i in range(pipeline))
    layout = TrainerLayout(parts=parts, padded_vocab=16, tensor=tensor, context=context, data=data)
    ranks = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp").get_ranks("dp-cp")
    ours = [layout.holders(stage, place) for stage in range(pipeline) for place in range(tensor)]
    assert sorted(map(list, ours)) == sorted(map(sorted, ranks))


@pytest.mark.parametrize(("expert", "expert_tensor"), [(1, 1), (2, 2), (4, 1), (8, 2), (2, 4)])
def test_replicas_of_experts_are_megatrons(expert, expert_tensor):
    parts = ((range(1),), (range(1, 2),))
    layout = TrainerLayout(parts=parts, padded_vocab=16, tensor=2, data=8, expert=expert, expert_tensor=expert_tensor)
    copies = 16 // (expert * expert_tensor)
    generator = RankGenerator(tp=expert_tensor, ep=expert, dp=copies, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    ours = [
        layout.expert_holders(stage, own, place)
        for stage in range(2)
        for own in range(expert)
        for place in range(expert_tensor)
    ]
    assert sorted(map(list, ours)) == sorted(map(sorted, generator.get_ranks("dp")))


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("one_to_one", {"tp_size": 3}, "8 heads"),
        ("one_to_one", {"ep_size": 2, "tp_size": 2}, "ep_size"),
        ("one_to_one", {"quantization": "fp8"}, "quantization"),
        ("ep", {"tp_size": 4, "ep_size": 3}, "ep_size 3"),
        ("ep", {"moe_runner_backend": "flashinfer_cutlass"}, "moe_runner_backend"),
        ("ep", {"tp_size": 4, "ep_num_redundant_experts": 2}, "ep_num_redundant_experts"),
    ],
)
def test_a_server_whose_layout_is_not_known_is_refused(family, arguments, message):
    with pytest.raises(ModelError, match=message):
        server_layout(BY_NAME[family].shape, arguments)


def test_layers_that_no_stage_has_are_refused():
    case = BY_NAME["one_to_one"]
    lacking = replace(case.trainer_layout, parts=((range(5),),))
    with pytest.raises(ModelError, match="5 layers"):
        ShardPlan(case.shape, lacking, case.server_layout, 1)


def test_experts_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ModelError, match="EP 3"):
        TrainerLayout(parts=((range(1),),), padded_vocab=16, data=4, expert=3)


@pytest.mark.parametrize(
    ("family", "changes", "arguments", "message"),
    [
        ("one_to_one", {"ffn": 50}, {"tp_size": 4}, "tp_size 4"),
        ("ep", {"ffn": 20}, {"tp_size": 8}, "20 columns"),
        ("ep", {"number": 6}, {"tp_size": 8, "ep_size": 4}, "6 experts"),
        ("ep", {"dense_layers": (0,)}, {}, "dense layers"),
    ],
)
def test_a_model_that_a_server_cannot_cut_is_refused(family, changes, arguments, message):
    shape = BY_NAME[family].shape
    if shape.experts is None:
        changed = replace(shape, **changes)
    else:
        changed = replace(shape, experts=replace(shape.experts, **changes))
    with pytest.raises(ModelError, match=message):
        server_layout(changed, arguments)
    server_layout(shape, arguments)


@pytest.mark.parametrize("family", ["gpt_oss", "olmo3"])
def test_a_family_whose_servers_were_not_compared_is_refused(family):
    with pytest.raises(ModelError, match=family):
        server_layout(read_model_shape(tiny_config(family)), {"tp_size": 2})


def test_on_a_cpu_columns_are_padded_and_heads_must_divide():
    shape = BY_NAME["one_to_one"].shape
    assert server_layout(replace(shape, ffn=50), {"tp_size": 2, "device": "cpu"}).columns(50, 2) == 32
    assert ServerLayout(tensor=2, on_cpu=True).columns(65, 2) == 64
    assert ServerLayout(tensor=2).columns(50, 2) == 25
    server_layout(shape, {"tp_size": 4})
    with pytest.raises(ModelError, match="2 key-value heads"):
        server_layout(shape, {"tp_size": 4, "device": "cpu"})


def test_arguments_that_change_no_order_are_taken_under_all_their_names():
    usual = {"ep_num_redundant_experts": 0, "enable_eplb": False, "moe_dp_size": 1, "attn_cp_size": 1}
    usual |= {"quantization": None, "enable_lora": False, "cpu_offload_gb": 0, "torchao_config": None}
    usual |= {"speculative_algorithm": None, "rl_on_policy_target": None}
    shape = BY_NAME["ep"].shape
    assert server_layout(shape, usual) == ServerLayout()
    for name in ("ep_size", "ep", "expert_parallel_size"):
        assert server_layout(shape, {"tp_size": 4, name: 2}) == ServerLayout(tensor=4, expert=2)
    for name in usual:
        with pytest.raises(ModelError, match=f"{name} 7"):
            server_layout(shape, {name: 7})
