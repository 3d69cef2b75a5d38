"""Where ranks go: neighbours that exchange most on one node, no tensor-parallel group over two."""

from __future__ import annotations

import random

import pytest

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.placement import Demand, misfit
from megatron_daro.runtime.placement import assigned, group_order


def test_the_groups_of_a_replica_follow_each_other():
    actor = ActorSection(tensor_parallel=2, context_parallel=2, data_parallel=2, pipeline_parallel=2)
    # Megatron's rank is tp + 2 * (cp + 2 * (dp + 2 * pp)); a group is its rank // 2.
    groups = {(dp, pp, cp): cp + 2 * (dp + 2 * pp) for dp in range(2) for pp in range(2) for cp in range(2)}
    assert group_order(actor) == [groups[dp, pp, cp] for dp in range(2) for pp in range(2) for cp in range(2)]


def test_replicas_that_share_experts_are_nearer_than_stages():
    layout = {"tensor_parallel": 2, "data_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 2}
    actor = ActorSection(**layout, expert_tensor_parallel=2)
    # ETP is TP: experts lie on 4 consecutive ranks, which are two groups of one stage.
    assert group_order(actor) == [0, 1, 4, 5, 2, 3, 6, 7]


def test_stages_of_a_replica_share_a_node_where_it_has_room():
    actor = ActorSection(tensor_parallel=4, pipeline_parallel=2, data_parallel=2)
    bundle = assigned(group_order(actor), ["b", "a", "a", "b"])  # as Ray may have packed four bundles
    node = {group: ["b", "a", "a", "b"][index] for group, index in bundle.items()}
    assert sorted(bundle.values()) == [0, 1, 2, 3]
    assert node[0] == node[2] and node[1] == node[3], "group = replica + 2 * stage"
    assert node[0] != node[1]


def test_a_node_with_more_room_holds_a_whole_replica_first():
    actor = ActorSection(pipeline_parallel=3)
    nodes = ["small", "large", "large", "large"][:3]
    assert assigned(group_order(actor), nodes) == {0: 1, 1: 2, 2: 0}


@pytest.mark.parametrize(
    ("demand", "nodes", "fits"),
    [
        (Demand(2, 8), [8, 8], True),
        (Demand(2, 8), [12, 4], False),  # enough in all, but the second group has no node
        (Demand(4, 4, servers=2, server_size=8), [8, 8, 8, 8], True),  # the servers first, or they find no node
        (Demand(1, 8, servers=1, server_size=16), [8, 8, 8], False),
        (Demand(1, 8, servers=1, server_size=16, server_nodes=2), [8, 8, 8], True),
        (
            Demand(1, 8, servers=1, server_size=16, server_nodes=2),
            [16, 4, 4],
            False,
        ),  # a part is whole, too
        (Demand(8, 1, servers=50, server_size=0), [8], True),
        (Demand(1, 1), [], False),
        (Demand(1, 4, servers=1, server_size=4), [4, 4], True),
        (Demand(1, 4, servers=1, server_size=4, together=True), [4, 4], False),  # one maps the memory of the other
        (Demand(1, 4, servers=1, server_size=4, together=True), [4, 8], True),
        (Demand(4, 4, servers=2, server_size=8, shared=True), [8, 8], True),  # each with the ranks of its GPUs
    ],
)
def test_pieces_fit_whole_or_not(demand, nodes, fits):
    assert (misfit(demand, nodes) == "") == fits


def test_on_cpus_a_server_takes_one():
    demand = Demand(2, 2, servers=3, server_size=4)
    assert not misfit(demand, [4, 3], what="CPUs")
    assert "7 CPUs" in misfit(demand, [4, 2], what="CPUs")


def test_powers_of_two_are_refused_only_where_no_packing_exists():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [2 ** draw.randrange(4) for _ in range(2)]
        demand = Demand(draw.randrange(1, 5), sizes[0], draw.randrange(4), sizes[1])
        nodes = [draw.randrange(1, 13) for _ in range(draw.randrange(1, 4))]
        assert (misfit(demand, nodes) == "") == packs(demand.sizes(gpus=True), tuple(nodes)), (demand, nodes)


def packs(sizes: list[int], nodes: tuple[int, ...]) -> bool:
    """Whether some way to deal the pieces out exists: all are tried."""
    if not sizes:
        return True
    return any(
        packs(sizes[1:], (*nodes[:i], nodes[i] - sizes[0], *nodes[i + 1 :]))
        for i in range(len(nodes))
        if nodes[i] >= sizes[0] and nodes[i] not in nodes[:i]
    )
