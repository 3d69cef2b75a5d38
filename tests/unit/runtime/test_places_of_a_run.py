"""The machines of a run: what a named cluster has, and which GPUs servers share with ranks."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from megatron_daro.config import Hardware
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.placement import Demand
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import ConfigError
from megatron_daro.runtime import cluster, ray_private
from megatron_daro.runtime.placement import Placement


@pytest.mark.parametrize(("server_size", "servers"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_servers_in_turns_have_the_gpus_of_ranks_each_once(monkeypatch, server_size, servers):
    """A node of eight GPUs, which Ray gives in any order, but those of a bundle to its ranks."""
    bundles = []
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 64, "GPU": 8}}])
    module = "megatron_daro.runtime.placement"
    monkeypatch.setattr(f"{module}.placement_group", lambda given, strategy: bundles.extend(given) or bundles_are_there)
    table = {"bundles_to_node_id": dict.fromkeys(range(8), "node")}
    monkeypatch.setattr(f"{module}.placement_group_table", lambda group: table)
    actor = ActorSection(tensor_parallel=2, pipeline_parallel=2, data_parallel=2)
    demand = Demand(4, 2, servers=servers, server_size=server_size, shared=True)
    placement = Placement(demand, actor, Deadlines())
    asyncio.run(placement.start())

    def bundle_of(options):
        return options["scheduling_strategy"].placement_group_bundle_index

    free = [
        [str(8 - number) for number in range(8) if number * len(bundles) // 8 == own] for own in range(len(bundles))
    ]
    gpu_of_rank = {rank: free[bundle_of(placement.rank(rank))].pop() for rank in range(8)}
    placement.take_gpus(gpu_of_rank)
    assert sum(bundle["GPU"] for bundle in bundles) == 8
    own = [placement.gpus_of_server(number).split(",") for number in range(servers)]
    assert sorted(gpu for gpus in own for gpu in gpus) == sorted(gpu_of_rank.values())
    for number, gpus in enumerate(own):
        assert len(gpus) == server_size
        places = {bundle_of(placement.rank(rank)) for rank, gpu in gpu_of_rank.items() if gpu in gpus}
        assert places == {bundle_of(placement.server(number))}, "a server is where its GPUs are"


bundles_are_there = SimpleNamespace(wait=lambda seconds: True)


class Gcs:
    """What Ray's server of a named cluster answers."""

    def __init__(self, *nodes):
        self.nodes = nodes

    def __call__(self, address):
        return self

    def get_all_node_info(self, timeout):
        if not self.nodes:
            raise RuntimeError("deadline\nexceeded")
        return {
            number: SimpleNamespace(resources_total=total, state=int(not alive))
            for number, (total, alive) in enumerate(self.nodes)
        }


@pytest.fixture
def named(monkeypatch):
    def with_nodes(*nodes):
        monkeypatch.setattr(ray_private, "GcsClient", Gcs(*nodes))
        monkeypatch.setattr(ray_private.services, "canonicalize_bootstrap_address", lambda given: f"canonical {given}")
        monkeypatch.setattr(socket, "create_connection", lambda where, timeout: SimpleNamespace(close=lambda: None))
        monkeypatch.setenv("RAY_ADDRESS", "ray://h:1")

    return with_nodes


def test_nobody_is_asked_without_an_address_and_that_of_the_environment_counts(monkeypatch, named):
    named(({"CPU": 8.0}, True), ({"CPU": 4.0}, True), ({"CPU": 99.0}, False), ({"memory": 1.0}, True))
    place = "the Ray cluster at canonical h:1"
    assert cluster.ask() == Hardware("cpu", 12, nodes=(8, 4, 0), place=place)
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster.ask() is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert cluster.ask() is None


@pytest.mark.parametrize(("second", "name"), [("H100", "H100"), ("A100", None)])
def test_gpus_of_a_named_cluster_are_counted_by_node(named, second, name):
    types = [{"accelerator_type:H100": 1.0}, {f"accelerator_type:{second}": 1.0}]
    named(({"CPU": 8.0, "GPU": 4.0, **types[0]}, True), ({"CPU": 8.0}, True), ({"GPU": 2.0, **types[1]}, True))
    found = cluster.ask()
    assert (found.kind, found.count, found.nodes) == ("gpu", 6, (4, 2))
    assert found == cluster.gpu_nodes([4, 2], name, "the Ray cluster at canonical h:1")


def test_a_cluster_that_does_not_say_what_it_has_is_refused(named):
    named()
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: got 'ray://h:1'.*deadline exceeded"):
        cluster.ask()
