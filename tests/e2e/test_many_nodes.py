"""Ray with several nodes on this machine, two of which pretend to have GPUs: placement, refusals, a node that dies."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from books import assert_books_add_up
from cli_runs import last_step, metric_lines, started, trained
from ray._private import ray_constants
from ray.cluster_utils import Cluster
from sglang_pool import cpu_servers

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.placement import Demand
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import ConfigError, DeadlineError
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step
from megatron_daro.runtime.placement import Placement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GPUS = 2
NODE = {"num_cpus": 8, "num_gpus": GPUS, "node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000}
# Two tensor-parallel groups: one on each of the nodes.
LAYOUT = {"tensor_parallel": 2, "data_parallel": 2, "precision": "fp32", "micro_batch_tokens": 64}


class Nodes:
    """A head without GPUs, as a login node is, and nodes with GPUS pretended ones each, all on loopback."""

    def __init__(self, head_cpus: int = 4, **changes: int) -> None:
        head = NODE | {"num_cpus": head_cpus, "num_gpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._cluster.add_node(wait=False, **NODE | changes) for _ in range(2)]
        self.address = self._cluster.address

    def add(self, **changes: int) -> Any:
        """One more node."""
        return self._cluster.add_node(**NODE | changes)

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_one(self) -> None:
        self.kill(self.nodes.pop())

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else Ray listens on the network card
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)  # for environments of tests
    made = Nodes(**getattr(request, "param", {}))
    yield made
    ray.shutdown()
    made.close()


@ray.remote
class Where:
    """A process that says where it is."""

    def node(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

    def gpus(self) -> str:
        return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def where(options: dict) -> tuple[str, int]:
    worker = Where.options(**options).remote()
    found = ray.get(worker.node.remote(), timeout=60)
    ray.kill(worker)
    return found


def test_groups_and_servers_are_whole_on_a_node_and_all_or_nothing_starts(nodes):
    ray.init(address=nodes.address, log_to_driver=False)
    actor = ActorSection(tensor_parallel=2, data_parallel=1)
    alone, limits = Demand(1, 2), Deadlines(placement=3.0)
    placement = Placement(Demand(1, 2, servers=1, server_size=2, noun="server"), actor, limits)
    asyncio.run(placement.start())
    assert placement.has_gpus
    (first, _), (second, _), (server, gpus) = (
        where(o) for o in (placement.rank(0), placement.rank(1), placement.server(0))
    )
    assert first == second != server
    assert gpus == 2
    # Everything is taken now: whoever comes next is told what is free, and holds nothing meanwhile.
    with pytest.raises(DeadlineError, match=r"'placement'.*0 GPUs"):
        asyncio.run(Placement(alone, actor, limits).start())
    too_large = ActorSection(tensor_parallel=4)
    with pytest.raises(ConfigError, match=r"4 GPUs"):
        asyncio.run(Placement(Demand(1, 4), too_large, limits).start())


@pytest.mark.heavy
def test_servers_in_turns_are_on_the_gpus_of_ranks(nodes):
    ray.init(address=nodes.address, log_to_driver=False)
    actor, demand = ActorSection(data_parallel=4), Demand(4, 1, servers=2, server_size=2, noun="server", shared=True)
    placement = Placement(demand, actor, Deadlines(placement=30.0))
    asyncio.run(placement.start())
    ranks = [Where.options(**placement.rank(rank)).remote() for rank in range(4)]
    places = [node for node, _ in ray.get([worker.node.remote() for worker in ranks], timeout=60)]
    gpus = ray.get([worker.gpus.remote() for worker in ranks], timeout=60)
    placement.take_gpus(dict(enumerate(gpus)))
    assert len({*zip(places, gpus, strict=True)}) == 4, "every rank has a GPU of its own"
    for number in range(2):
        node, own = where(placement.server(number))  # there is room beside the ranks, which have all GPUs
        assert own == 0, "it is told which GPUs it shares"
        shared = [rank for rank in range(4) if places[rank] == node]
        assert placement.gpus_of_server(number) == ",".join(sorted(gpus[rank] for rank in shared))


@pytest.mark.heavy
def test_a_run_over_two_nodes(nodes, tiny, tmp_path):
    at = {"RAY_ADDRESS": nodes.address}
    path = tiny.write_config(tmp_path / "two.yaml", {"actor": LAYOUT})
    with started(["train", path, "--dry-run", "actor.data_parallel=3"], tmp_path / "dry", at) as run:
        finished = run.finish()
        assert finished.code == 2
        assert f"at most {2 * GPUS} ranks: one per GPU of the Ray cluster at {nodes.address}" in finished.stderr
    run_dir = tmp_path / "run"
    command = ["train", path, f"trainer.run_dir={run_dir}"]
    with started([*command, "trainer.steps=3", "trainer.eval_every_steps=3"], tmp_path / "log", at) as run:
        finished = run.finish()
        assert finished.code == 0, finished.stderr
        assert "4 of 4 ranks (the first: rank 0) were given a GPU by Ray" in finished.stdout + finished.stderr
        assert [line["step"] for line in read_metrics(run_dir)] == [0, 1, 2, 3]


@pytest.mark.heavy
def test_conversations_of_a_lost_node_go_on_elsewhere_and_the_books_add_up(nodes, tiny, tmp_path):
    """On the node that is lost are workers of environments and verifiers, and no rank: it has no CPUs to give."""
    third = nodes.add(num_cpus=0, num_gpus=0)
    run_dir, path = tmp_path / "run", {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = ["train", tiny.config, "environment.kind=toy_steps:Steps", "environment.options.step_s=0.2"]
    command += ["environment.workers=3", "rollout.max_response_tokens=16", "actor.tensor_parallel=1"]
    command += ["algorithm.filter=none", "trainer.steps=4"]
    with started(
        [*command, f"trainer.run_dir={run_dir}"], tmp_path / "log", {"RAY_ADDRESS": nodes.address, **path}
    ) as run:
        run.wait_until(lambda: last_step(run_dir) >= 1, "first step")
        nodes.kill(third)
        finished = run.finish(limit_s=240)
        assert finished.code == 0, finished.stderr
        assert re.search(
            r"environment pool \d died: .*started again \(1 of 20 times\)", finished.stderr + finished.stdout
        )
    lines = [line for line in read_metrics(run_dir) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["environment/pool_restarts"] >= 1 and lines[-1]["environment/restarted"] == 0
    for line in lines:
        assert_books_add_up(line)
        assert line["rollout/groups_trained"] == 4 * line["step"]
    alone = tmp_path / "alone"
    trained([*command, f"trainer.run_dir={alone}"], tmp_path / "alone_log", path)
    for step in range(1, 5):
        for (one, _), (other, _) in zip(read_step(run_dir, step), read_step(alone, step), strict=True):
            for mine, theirs in zip(one.rollouts, other.rollouts, strict=True):
                assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.turns == theirs.turns


@pytest.mark.heavy
def test_the_death_of_a_node_ends_the_run_with_the_cause(nodes, tiny, tmp_path):
    path, run_dir = tiny.write_config(tmp_path / "two.yaml", {"actor": LAYOUT}), tmp_path / "run"
    command = ["train", path, f"trainer.run_dir={run_dir}", "trainer.steps=100000"]
    with started(command, tmp_path / "log", {"RAY_ADDRESS": nodes.address}) as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step")
        nodes.kill_one()
        finished = run.finish(limit_s=120)
        assert finished.code == 1
        assert re.fullmatch(r"WorkerDiedError: (actor rank|engine) \d died: .*--resume.*", finished.last_line)


@pytest.mark.heavy
@pytest.mark.skipif(
    "MEGATRON_DARO_LONG" not in os.environ, reason="tests/slurm does more: MEGATRON_DARO_LONG=1 runs it"
)
@pytest.mark.parametrize("nodes", [{"num_cpus": 2}], indirect=True)
def test_ranks_of_a_lost_node_are_replaced_on_a_spare_one(nodes, tiny, tmp_path):
    """A node for each tensor-parallel group, and a third one that has nothing to do; the engine is on the head."""
    nodes.add(num_cpus=2)
    path = tiny.write_config(tmp_path / "two.yaml", {"actor": LAYOUT | {"data_parallel": 2}})
    command = ["train", path, "trainer.steps=6", "trainer.save_every_steps=3"]
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    healing = [*command, f"trainer.run_dir={run_dir}", "trainer.replace_lost_ranks=true"]
    with started(healing, tmp_path / "log", {"RAY_ADDRESS": nodes.address}) as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step")
        nodes.kill_one()
        finished = run.finish(limit_s=300)
    said = " ".join((finished.stdout + finished.stderr).split())
    assert finished.code == 0, said[-4000:]
    assert re.search(r"rank 2, rank 3 died and was replaced in [\d.]+ s; steps repeated: [01]", said), said[-4000:]
    trained([*command, f"trainer.run_dir={alone}"], tmp_path / "alone_log")
    assert metric_lines(run_dir) == metric_lines(alone, range(7))


def node_of(nodes: Nodes, words: str) -> Any:
    """A node below whose Ray process one runs with these words in its command."""
    for node in nodes.nodes:
        below = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
        for process in below:
            with suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    return node
    raise AssertionError(f"no node runs {words}")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.skipif("MEGATRON_DARO_LONG" not in os.environ, reason="four minutes: MEGATRON_DARO_LONG=1 runs it")
@pytest.mark.parametrize("nodes", [{"num_cpus": 1, "num_gpus": 0, "head_cpus": 0}], indirect=True)
def test_a_server_of_a_lost_node_is_started_on_a_spare_one(nodes, tiny, tmp_path):
    """A node each for the rank and two servers, and one that has nothing to do."""
    sglang = cpu_servers(sync="distributed", stall_timeout_s=60, sync_timeout_s=120, request_timeout_s=120)
    nodes.nodes += [nodes.add(num_cpus=1, num_gpus=0) for _ in range(2)]
    actor = {"tensor_parallel": 1, "precision": "fp32", "micro_batch_tokens": 64}
    engine = {"kind": "sglang", "replicas": 2, "sglang": sglang}
    # What servers sample is not the same twice: with few rounds the filter can leave a batch smaller than asked.
    path = tiny.write_config(
        tmp_path / "servers.yaml", {"actor": actor, "engine": engine, "rollout": {"max_refill_rounds": 20}}
    )
    run_dir = tmp_path / "run"
    command = ["train", path, f"trainer.run_dir={run_dir}", "trainer.steps=100000", "trainer.save_every_steps=0"]
    with started(command, tmp_path / "log", {"RAY_ADDRESS": nodes.address}) as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step")
        nodes.kill(node_of(nodes, "ray::ServerWorker"))
        run.wait_until(lambda: read_metrics(run_dir)[-1].get("engine/servers") == 1, "step with one server")
        run.wait_until(lambda: read_metrics(run_dir)[-1].get("engine/servers") == 2, "step with both again")
        run.interrupt()
        finished = run.finish()
    assert finished.code == 130, finished.stderr
    for line in read_metrics(run_dir)[1:]:
        assert_books_add_up(line)
