"""The cluster as it is: what its nodes have, where a run is put, what is said where it has no room, what comes back."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
import ray._private.utils
from ray._private import ray_constants
from ray._private.node import Node

from megatron_daro.config import Hardware
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.hardware import Demand
from megatron_daro.errors import ConfigError, DeadlineError, WorkerError
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.runtime import cluster
from megatron_daro.runtime.cluster import Placement

ACTOR = ActorSection(tensor_parallel=2, data_parallel=2)


class Cluster:
    """nodes: (CPUs, GPUs) of each; placed: the node of each bundle; waits: looks until there is room."""

    def __init__(self, monkeypatch, nodes, placed=(), waits=0):
        self.asked, self.removed, self.waits, self.looks = [], [], waits, []
        self.nodes = [
            {"Alive": True, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}} for cpus, gpus in nodes
        ]
        self.nodes.append({"Alive": False, "Resources": {"CPU": 99, "GPU": 99}})
        monkeypatch.setattr(cluster.ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"GPU": 1.0, "CPU": 3.0})
        monkeypatch.setattr(cluster, "placement_group", self._group)
        table = {"bundles_to_node_id": dict(enumerate(placed))}
        monkeypatch.setattr(cluster, "placement_group_table", lambda group: table)
        monkeypatch.setattr(cluster, "remove_placement_group", self.removed.append)

    def _group(self, bundles, strategy):
        self.asked.append((bundles, strategy))
        return self

    def wait(self, seconds):
        self.looks.append(seconds)
        return len(self.looks) > self.waits


def started(demand, **deadlines):
    placement = Placement(demand, ACTOR, Deadlines(**deadlines))
    asyncio.run(placement.start())
    return placement


def bundles_of(placement, ranks):
    return [placement.rank(rank)["scheduling_strategy"].placement_group_bundle_index for rank in ranks]


def test_groups_that_follow_each_other_are_on_one_node_and_each_rank_has_a_gpu(monkeypatch):
    there = Cluster(monkeypatch, [(4, 0), (4, 4), (4, 4)], placed="abab", waits=2)
    placement = Placement(Demand(4, 2), ActorSection(tensor_parallel=2, data_parallel=4), Deadlines())
    asyncio.run(placement.start())
    assert placement.has_gpus and there.looks == [1.0, 1.0, 1.0]
    assert there.asked == [([{"CPU": 2, "GPU": 2}] * 4, "PACK")]
    assert bundles_of(placement, range(8)) == [0, 0, 2, 2, 1, 1, 3, 3]
    options = placement.rank(0)
    assert (options["num_cpus"], options["num_gpus"]) == (1, 1)
    placement.close()
    placement.close()
    assert there.removed == [there]
    with pytest.raises(AssertionError, match="start comes first"):
        placement.rank(0)


def test_on_cpus_neither_ranks_nor_servers_get_gpus(monkeypatch):
    there = Cluster(monkeypatch, [(8, 0)], placed="aaaa")
    placement = started(Demand(2, 2, servers=2, server_size=4))
    assert not placement.has_gpus and there.asked == [([{"CPU": 2}] * 2 + [{"CPU": 1}] * 2, "PACK")]
    assert placement.rank(0)["num_gpus"] == 0
    server = placement.server(1)
    assert server["num_gpus"] == 0 and server["scheduling_strategy"].placement_group_bundle_index == 3


def test_what_shares_gpus_is_in_one_bundle_and_what_must_be_together_on_one_node(monkeypatch):
    there = Cluster(monkeypatch, [(16, 4)], placed="a")
    placement = started(Demand(2, 2, servers=1, server_size=4, shared=True))
    ((bundles, strategy),) = there.asked
    assert len(bundles) == 1 and bundles[0]["GPU"] == 4 and strategy == "PACK" and placement.shares_gpus
    assert bundles_of(placement, range(4)) == [0] * 4
    server = placement.server(0)
    assert server["num_gpus"] == 0 and server["scheduling_strategy"].placement_group_bundle_index == 0
    there = Cluster(monkeypatch, [(16, 8)], placed="aaa")
    placement = started(Demand(2, 2, servers=1, server_size=4, together=True))
    assert there.asked[0][1] == "STRICT_PACK" and not placement.shares_gpus
    assert placement.server(0)["num_gpus"] == 4


def test_a_run_of_nothing_asks_for_nothing(monkeypatch):
    there = Cluster(monkeypatch, [(1, 0)])
    placement = Placement.of_engines(Demand(0, 1), Deadlines())
    asyncio.run(placement.start())
    placement.close()
    assert there.asked == [] and there.removed == []


def test_a_policy_alone_has_places_for_its_ranks_and_engines_alone_for_them(monkeypatch):
    there = Cluster(monkeypatch, [(9, 0)], placed="aa")
    placement = Placement.of_actor(ACTOR)
    asyncio.run(placement.start())
    assert there.asked == [([{"CPU": 2}] * 2, "PACK")] and bundles_of(placement, range(4)) == [0, 0, 1, 1]
    there = Cluster(monkeypatch, [(9, 0)], placed="aa")
    placement = Placement.of_engines(Demand(0, 1, servers=2), Deadlines())
    asyncio.run(placement.start())
    assert there.asked == [([{"CPU": 1}] * 2, "PACK")]


@pytest.mark.parametrize(("nodes", "what"), [([(9, 1), (9, 2)], "GPUs"), ([(2, 0), (1, 0)], "CPUs")])
def test_what_never_fits_is_refused_with_the_way_out(monkeypatch, nodes, what):
    there = Cluster(monkeypatch, nodes)
    with pytest.raises(ConfigError) as error:
        started(Demand(2, 2))
    assert str(error.value).startswith("the run does not fit the Ray cluster: ") and what in str(error.value)
    assert str(error.value).endswith("; lower actor.*_parallel or engine.replicas, or start more nodes")
    assert there.asked == []


@pytest.mark.parametrize(("gpus", "engine"), [(8, 4), (0, 1)])
def test_room_that_others_hold_too_long_is_said_with_what_is_free(monkeypatch, gpus, engine):
    Cluster(monkeypatch, [(8, gpus)], waits=10**9)
    with pytest.raises(DeadlineError) as error:
        started(Demand(2, 2, servers=1, server_size=4), placement=0.02)
    assert str(error.value).startswith("deadline 'placement'") and str(error.value).endswith(
        f": 2 x tensor-parallel group of 2 and 1 x engine of {engine} found no room; free in the Ray cluster: 1 GPUs "
        "and 3 CPUs; end what else runs there, or lower actor.*_parallel or engine.replicas, or start more nodes"
    )


class Gcs:
    """What Ray's server of a named cluster answers."""

    def __init__(self, *nodes):
        self.nodes, self.asked = nodes, []

    def __call__(self, address):
        self.asked.append(address)
        return self

    def get_all_node_info(self, timeout):
        assert timeout == cluster.CONNECT_TIMEOUT_S
        if not self.nodes:
            raise RuntimeError("deadline\nexceeded")
        return {
            number: SimpleNamespace(resources_total=total, state=int(not alive))
            for number, (total, alive) in enumerate(self.nodes)
        }


@pytest.fixture
def named(monkeypatch):
    def with_nodes(*nodes):
        gcs = Gcs(*nodes)
        monkeypatch.setattr(cluster, "GcsClient", gcs)
        monkeypatch.setattr(cluster, "check_address", gcs.asked.append)
        monkeypatch.setattr(cluster.services, "canonicalize_bootstrap_address", lambda given: f"canonical {given}")
        return gcs

    return with_nodes


def test_nobody_is_asked_without_an_address_and_that_of_the_environment_counts(monkeypatch, named):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gcs = named(({"CPU": 8.0}, True), ({"CPU": 4.0}, True), ({"CPU": 99.0}, False), ({"memory": 1.0}, True))
    assert cluster.ask() is None and cluster.ask("") is None
    monkeypatch.setenv("RAY_ADDRESS", "ray://h:1")
    place = "the Ray cluster at canonical h:1"
    assert cluster.ask() == Hardware("cpu", 12, nodes=(8, 4, 0), place=place)
    assert gcs.asked == ["ray://h:1", "canonical h:1"]
    assert cluster.ask("other:2").place == "the Ray cluster at canonical other:2"


@pytest.mark.parametrize(("second", "name"), [("H100", "H100"), ("A100", None)])
def test_gpus_of_a_named_cluster_are_counted_by_node(named, second, name):
    types = [{"accelerator_type:H100": 1.0}, {f"accelerator_type:{second}": 1.0}]
    named(({"CPU": 8.0, "GPU": 4.0, **types[0]}, True), ({"CPU": 8.0}, True), ({"GPU": 2.0, **types[1]}, True))
    found = cluster.ask("h:1")
    assert (found.kind, found.count, found.nodes) == ("gpu", 6, (4, 2))
    assert found == cluster.gpu_nodes([4, 2], name, "the Ray cluster at canonical h:1")


def test_a_cluster_that_does_not_say_what_it_has_is_refused(named):
    named()
    with pytest.raises(ConfigError, match=r"got 'h:1', which did not say what its nodes have \(deadline exceeded\)"):
        cluster.ask("h:1")


@pytest.fixture
def rays(monkeypatch, tmp_path):
    """What `cluster` does with Ray, in order."""
    done = []
    monkeypatch.setattr(cluster, "_prepare_environment", lambda: done.append("environment"))
    monkeypatch.setattr(cluster, "check_limits", lambda: done.append("limits"))
    monkeypatch.setattr(cluster, "check_address", lambda address: done.append(f"check {address}"))
    monkeypatch.setattr(cluster.ray, "init", lambda **options: done.append(("init", options)))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path) if len(str(tmp_path)) <= 40 else None)

    def start(processes, directory):
        assert directory.is_dir()
        done.append(f"start {processes}")
        return SimpleNamespace(kill=lambda: done.append(f"kill {directory.is_dir()}"))

    monkeypatch.setattr(cluster, "_start_private", start)
    return done


def test_a_private_cluster_is_shut_down_before_its_helpers_and_its_directory_go(monkeypatch, rays):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with cluster.cluster(5):
        assert rays == ["environment", "limits", "start 5"]
    assert rays[3:] == ["shutdown", "kill True"]


def test_a_named_cluster_is_joined_and_left(monkeypatch, rays):
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    with cluster.cluster(5):
        assert rays[2] == "check h:1"
        (_, options) = rays[3]
    assert options == {"address": "h:1", "log_to_driver": False, "logging_level": cluster.logging.ERROR}
    assert rays[4:] == ["shutdown"]


def test_what_ray_raises_at_the_start_is_a_sentence_and_its_handler_stays_out(monkeypatch, rays):
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    before, seen = ray._private.utils.set_sigterm_handler, []

    def fails(**options):
        seen.append(ray._private.utils.set_sigterm_handler is before)
        ray._private.utils.set_sigterm_handler(lambda *_: None)
        raise RuntimeError("no room")

    monkeypatch.setattr(cluster.ray, "init", fails)
    with pytest.raises(WorkerError, match="Ray did not start: no room") as error, cluster.cluster(5):
        pytest.fail("it did not start")
    assert seen == [False] and ray._private.utils.set_sigterm_handler is before
    assert isinstance(error.value.__cause__, RuntimeError) and rays[-1] == "check h:1"


@pytest.mark.parametrize("before", [None, "1"])
def test_ray_is_told_that_the_cluster_is_of_one_machine_only_while_it_starts(monkeypatch, before):
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    with pytest.raises(KeyError), cluster._of_one_machine():
        assert os.environ[name] == "0" and ray_constants.ENABLE_RAY_CLUSTER is False
        raise KeyError
    assert os.environ.get(name) == before and ray_constants.ENABLE_RAY_CLUSTER is True


def test_ray_starts_no_process_that_a_run_does_not_use_and_others_of_this_process_may(monkeypatch, tmp_path):
    helpers = ("start_monitor", "start_log_monitor", "start_api_server")
    started: list[str] = []
    for name in helpers:
        monkeypatch.setattr(Node, name, lambda node, name=name, **options: started.append(name))

    def starts_all(**options):
        node = object.__new__(Node)
        node.start_monitor()
        node.start_log_monitor()
        node.start_api_server(include_dashboard=False, raise_on_failure=False)

    monkeypatch.setattr(cluster.ray, "init", starts_all)
    monkeypatch.setattr(cluster, "_end_helpers_after_this_process", lambda directory: directory)
    cluster._start_private(1, tmp_path)
    assert started == []
    starts_all()
    assert tuple(started) == helpers


@pytest.mark.parametrize(
    ("hardware", "gpus"), [(Hardware("gpu", 3, capability=9.0), 3), (Hardware("cpu", 7), 0)], ids=["gpu", "cpu"]
)
def test_a_private_cluster_listens_on_loopback_and_has_a_place_for_each_process(monkeypatch, tmp_path, hardware, gpus):
    starts = []
    monkeypatch.setattr(cluster, "detect", lambda: hardware)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: starts.append(options))
    monkeypatch.setattr(cluster, "_end_helpers_after_this_process", lambda directory: directory)
    assert cluster._start_private(6, tmp_path) == tmp_path
    (options,) = starts
    room = options.pop("object_store_memory")
    assert options == {
        "address": "local", "num_cpus": 6, "num_gpus": gpus, "include_dashboard": False, "log_to_driver": False,
        "logging_level": cluster.logging.ERROR, "_node_ip_address": "127.0.0.1", "_temp_dir": str(tmp_path),
    }  # fmt: skip
    assert 80_000_000 <= room <= 8_000_000_000


def test_another_failure_than_slowness_is_not_tried_again(monkeypatch, tmp_path):
    starts, killed = [], []

    def init(**options):
        starts.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "_kill_raylets", lambda: killed.append("raylets"))
    with pytest.raises(KeyboardInterrupt):
        cluster._start_private(1, tmp_path)
    assert len(starts) == 1 and killed == ["raylets"]


@pytest.mark.parametrize(
    ("memory", "shared", "room"),
    [(2e9, 1e10, 2e8), (1e12, 4e8, 2e8), (1e8, 1e12, 80_000_000), (1e15, 1e15, 8_000_000_000)],
)
def test_the_object_store_takes_a_tenth_of_memory_or_half_of_shared_memory(monkeypatch, memory, shared, room):
    sizes = {"SC_AVPHYS_PAGES": int(memory) // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(cluster.os, "sysconf", sizes.__getitem__)
    usage = SimpleNamespace(f_bavail=int(shared) // 512, f_frsize=512)
    monkeypatch.setattr(cluster.os, "statvfs", lambda path: {"/dev/shm": usage}[path])
    assert cluster._object_store_bytes() == pytest.approx(room, rel=1e-4)


class Child:
    def __init__(self, name, status="running", pid=7):
        self.pid, self._name, self._status, self.suspended = pid, name, status, False

    def name(self):
        return self._name

    def status(self):
        return self._status

    def suspend(self):
        self.suspended = True

    def children(self):
        return [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]


def test_raylets_are_stopped_before_they_are_killed_with_what_they_started(monkeypatch):
    children = [Child("bash"), Child("raylet", "zombie"), Child("raylet", pid=8)]
    monkeypatch.setattr(cluster.psutil, "Process", lambda: SimpleNamespace(children=lambda: children))
    monkeypatch.setattr(cluster, "descendants", lambda pid: [pid + 100])
    killed = []
    monkeypatch.setattr(cluster, "signal_all", lambda *arguments: killed.append((children[2].suspended, *arguments)))
    cluster._kill_raylets()
    assert killed == [(True, [108, 8], cluster.signal.SIGKILL)]


def test_helpers_that_outlive_the_raylet_are_known_to_the_shell_that_ends_them(monkeypatch, tmp_path):
    monkeypatch.setattr(
        cluster.psutil, "Process", lambda: SimpleNamespace(children=lambda: [Child("raylet", pid=8), Child("bash")])
    )
    started = []
    monkeypatch.setattr(cluster.subprocess, "Popen", lambda *a, **k: started.append((*a, k)) or "shell")
    assert cluster._end_helpers_after_this_process(tmp_path) == "shell"
    ((command, options),) = started
    assert command[:2] == ["/bin/sh", "-c"] and command[4:] == [str(tmp_path), "8", "11", "12"]
    pipe, null = cluster.subprocess.PIPE, cluster.subprocess.DEVNULL
    assert options == {"stdin": pipe, "stdout": null, "start_new_session": True}


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 10**6, 65536),
        (1024, -1, 65536),
        (65536, 10**6, None),
        (-1, -1, None),
        (512, 512, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_is_needed_and_allowed(monkeypatch, soft, hard, raised):
    limits = []
    monkeypatch.setattr(cluster.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(cluster.resource, "setrlimit", lambda which, limit: limits.append(limit))
    cluster.check_limits()
    assert limits == ([] if raised is None else [(raised, hard)])
    monkeypatch.setattr(cluster.resource, "getrlimit", lambda which: (511, 511))
    with pytest.raises(ConfigError, match="this process may have 511 "):
        cluster.check_limits()
