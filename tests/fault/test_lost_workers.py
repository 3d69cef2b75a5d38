"""Answer workers, verifiers and environments on a Ray cluster of two nodes: both work, and a kill loses nothing. And a
rank that waits is not lost.

One cluster of two nodes on this machine and one set of workers serve all tests. Servers are stubs, since what is killed
stands on this side of HTTP; engine, workers, object store and verifiers are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import tiny_task
from aiohttp import web
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from run_configuration import run_context
from sglang_pool import collect, engine_of, group, section, started
from stub_server import StubServer

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.sections import EnvironmentSection, RewardSection
from megatron_daro.data.tokenizer import load_tokenizer
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.environments.conversations import Conversations
from megatron_daro.environments.rendering import Turns
from megatron_daro.environments.stepping import SteppedConversations
from megatron_daro.errors import ModelError, RolloutError, WorkerError
from megatron_daro.runtime import node_workers
from megatron_daro.runtime.answer_workers import AnswerWorkers
from megatron_daro.runtime.frozen_workers import end_frozen
from megatron_daro.runtime.node_pools import EnvironmentPools, VerifierPools, shares
from megatron_daro.runtime.ray_calls import WorkerDiedError
from megatron_daro.runtime.train_worker import TrainWorker
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams

LIMIT_S = 200
OPTIONS = section(max_tokens_in_flight=1_000_000)
PAIRS = [(rf"\boxed{{\frac{{{2 * (i % 3)}x}}{{2}}}}", "x", "Simplify.") for i in range(9)]
CORRECT = [i % 3 == 1 for i in range(9)]


NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def machines():
    """A cluster of two nodes, whose processes find the environments of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(machines):
    """Their ids."""
    return sorted(node["NodeID"] for node in ray.nodes())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tiny_task.save_tokenizer(directory, ["<pad>", "<bos>", "<eos>", *(chr(65 + i) for i in range(28))])
    return directory


@pytest.fixture(scope="module")
def run():
    """Runs a coroutine on the event loop that the shared workers live on. Nothing here may wait for ever."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture(scope="module")
def warnings():
    """What the shared workers said."""
    return []


@pytest.fixture(scope="module")
def workers(nodes, model, run, warnings, tmp_path_factory):
    """An answer worker on each node, for all tests: each takes seconds to start."""
    made = AnswerWorkers(
        run_context(warn=warnings.append, run_dir=tmp_path_factory.mktemp("run"), model={"path": model})
    )
    run(made.start())
    yield made
    run(made.close())


def test_a_rank_that_waits_for_its_peers_answers_and_can_be_aborted(machines, tmp_path):
    """Of two ranks the other one never comes."""
    rank = TrainWorker.options(num_cpus=0).remote(0)
    try:
        settings, actor = SimpleNamespace(expandable_segments=True), ActorSection(data_parallel=2)
        meeting = rank.setup.remote(f"file://{tmp_path}/ranks", settings, actor, AlgorithmSection(), 1, 900.0)
        ray.get(rank.snapshots.remote(), timeout=60)
        ray.get(rank.abort.remote(), timeout=60)
        assert ray.wait([meeting], timeout=0) == ([], [meeting])
    finally:
        ray.kill(rank)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


class Kept:
    """Workers that outlive the engine of one test."""

    def __init__(self, inner):
        self._inner, self.ask, self.when_ended = inner, inner.ask, inner.when_ended

    @property
    def restarts(self):
        return self._inner.restarts

    async def start(self):
        pass

    async def close(self):
        pass


@asynccontextmanager
async def asking(stub, run_dir, answers, warnings=None):
    """An engine of this stub, whose server counts as having weights; the stub answers when its gate is set."""
    stub.weight_version = "0"
    async with started(
        engine_of([stub.url], run_dir, options=OPTIONS, answers=Kept(answers), warnings=warnings)
    ) as engine:
        for server in engine.fleet.servers:
            server.versions = {0}
            engine.fleet.serve(server, 0)
        stub.gate.clear()
        stub.calls.clear()
        yield engine
        stub.gate.set()


async def all_back(workers):
    """Node and process of each, once both are there."""
    while True:
        with suppress(WorkerError):
            if len(set(found := await places(workers))) == 2:
                return found
        await asyncio.sleep(0.01)


async def places(workers):
    """Node and process of each: calls go to the least busy one, of equals the first."""
    return await asyncio.gather(*(workers.call("ready") for _ in range(2)))


def kill(place):
    os.kill(place[1], signal.SIGKILL)


def test_both_nodes_ask_and_rollouts_are_those_of_one_process(nodes, model, workers, warnings, run, tmp_path):
    async def scenario():
        async with StubServer() as stub:
            assert sorted(node for node, _ in await places(workers.workers)) == nodes
            requests = [group(i, max_new_tokens=4000) for i in range(6)]
            async with asking(stub, tmp_path, workers) as engine:
                working = asyncio.create_task(collect(engine, requests))
                await until(lambda: stub.running == 6)
                stub.gate.set()
                remote = await working
            async with asking(stub, tmp_path, DirectAsker(decoder(model))) as engine:
                stub.gate.set()
                local = await collect(engine, requests)
        assert described(remote) == described(local) and len(remote) == 24 and not warnings
        # Mapped from the object store: nothing was copied, so nothing may be written.
        assert not any(a.flags.owndata or a.flags.writeable for r in remote for a in (r.tokens, r.logprobs))

    run(scenario())


def decoder(model):
    tokenizer = load_tokenizer(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def described(rollouts):
    found = sorted(rollouts, key=lambda r: (r.group_id, r.index))
    return [(r.group_id, r.index, r.tokens.tolist(), r.logprobs.tolist(), r.loss_mask.tolist(), str(r)) for r in found]


def test_a_killed_answer_worker_loses_no_group_and_is_started_again(workers, warnings, run, tmp_path):
    async def scenario():
        async with StubServer() as stub:
            before = await places(workers.workers)
            async with asking(stub, tmp_path, workers) as engine:
                working = asyncio.create_task(collect(engine, [group(i) for i in range(6)]))
                await until(lambda: stub.running == 6)
                kill(before[0])
                await until(lambda: stub.calls["/generate"] == 9)
                stub.gate.set()
                rollouts = await working
                assert Counter(r.group_id for r in rollouts) == dict.fromkeys(range(6), 4)
                assert all(r.response_length == 12 and r.finish_reason == "length" for r in rollouts)
                metrics = engine.metrics()
                assert (metrics["engine/retries"], metrics["engine/answer_worker_restarts"]) == (3, 1)
                assert metrics["engine/fenced"] == 0 and engine.fleet.servers[0].failures == 0
                after = await all_back(workers.workers)
                assert after[0][0] == before[0][0] and after[0][1] != before[0][1]
                assert after[1] == before[1]
                assert len(await collect(engine, [group(i) for i in range(4)])) == 16
        (warning,) = warnings
        assert "answer worker 0" in warning

    run(scenario())


@pytest.mark.heavy
def test_an_abort_reaches_the_server_and_a_closed_stream_drops_its_connection(workers, run, tmp_path):
    async def scenario():
        async with StubServer() as stub, asking(stub, tmp_path, workers) as engine:
            working = asyncio.create_task(collect(engine, [group(0, count=2)]))
            await until(lambda: stub.running == 1)
            await engine.abort({0})
            assert [(r.finish_reason, r.response_length) for r in await working] == [("abort", 2)] * 2
            question = asyncio.create_task(collect(engine, [group(1)]))
            await until(lambda: stub.running == 1)
            stub.answers["/abort_request"] = ignored
            question.cancel()
            await asyncio.wait([question])
            await until(lambda: stub.running == 0)

    run(scenario())


async def ignored(request, body):
    return web.json_response({})


@pytest.mark.heavy
def test_a_worker_that_hangs_is_ended_by_its_deadline(workers, warnings, run):
    async def scenario():
        (_, pid), (_, other) = await places(workers.workers)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match="ready"):
            await workers.workers.call("ready", timeout_s=0.5)
        assert (await workers.workers.call("ready", timeout_s=LIMIT_S))[1] == other
        assert pid not in [found for _, found in await all_back(workers.workers)]
        assert "deadline 'ready'" in warnings[-1]

    run(scenario())


@pytest.mark.heavy
def test_workers_lost_too_often_are_left_out_and_with_none_the_run_ends(workers, warnings, run, tmp_path, monkeypatch):
    monkeypatch.setattr(node_workers, "MAX_RESTARTS", 0)

    async def scenario():
        async with StubServer() as stub, asking(stub, tmp_path, workers) as engine:
            working = asyncio.create_task(collect(engine, [group(0)]))
            await until(lambda: stub.running == 1)
            for place in await places(workers.workers):
                kill(place)
            with pytest.raises(WorkerError, match="answer worker"):
                await working

    run(scenario())


def test_what_cannot_start_says_why(nodes, run, tmp_path):
    nothing = AnswerWorkers(
        run_context(run_dir=tmp_path, model={"path": tmp_path / "nothing"}, engine={"sglang": {"answer_workers": 1}})
    )
    with pytest.raises((ModelError, WorkerError), match="nothing"):
        run(nothing.start())
    run(nothing.close())


def test_verdicts_come_from_both_nodes_also_after_a_pool_was_killed(nodes, run, tmp_path):
    async def scenario():
        warnings = []
        section = RewardSection(workers=2, timeout_s=60)
        verdicts = VerifierPools(run_context(warn=warnings.append, run_dir=tmp_path, reward=section))
        try:
            await verdicts.start()
            before = await places(verdicts.workers)
            assert sorted(node for node, _ in before) == nodes
            results = await asyncio.gather(*(verdicts.workers.call("ask", *PAIRS) for _ in range(6)))
            assert [[v.correct for v in found] for found, _, _ in results] == [CORRECT] * 6
            assert {place for _, place, _ in results} == set(before)
            scoring = [asyncio.create_task(verdicts.score_async(PAIRS)) for _ in range(6)]
            for _ in range(20):  # turns of the event loop: the answers may be there before a timer is
                await asyncio.sleep(0)
            kill(before[0])
            results = await asyncio.gather(*scoring)
            assert [[v.correct for v in found] for found in results] == [CORRECT] * 6
            # Its calls may have ended before it did: then the next one finds it gone.
            await asyncio.gather(*(verdicts.score_async(PAIRS) for _ in range(4)))
            after = await all_back(verdicts.workers)
            assert after[0][1] != before[0][1] and verdicts.workers.restarts == 1
        finally:
            await verdicts.close()
        assert "verifier pool 0" in warnings[0] and len(warnings) == 1

    run(scenario())


class Digits:
    """An engine whose answers are a digit that depends on the request; writes a digit or "=" as one token."""

    def __init__(self):
        self.answered = 0

    async def generate(self, requests):
        for request in requests:
            await asyncio.sleep(0)
            self.answered += 1
            yield tuple(self._answer(request, index) for index in request.indices)

    def _answer(self, request, index):
        digit = 3 + (7 * request.group_id + 3 * index + 5 * request.turn) % 10
        tokens, one = np.array([*request.prompt.tokens, digit], np.int32), np.ones(1, np.uint8)
        place = request.prompt.id, request.group_id, request.attempt, index
        return Rollout(*place, tokens, len(tokens) - 1, one, -one.astype(np.float32), "stop", 1, str(digit - 3))

    async def abort(self, group_ids=None): ...

    def encode(self, text, add_special_tokens):
        return [13 if c == "=" else 3 + int(c) for c in text]


def conversations(engine, section, pools, warn):
    held = SteppedConversations(section, Turns(engine, chat=False), warn, pools)
    return Conversations(
        section, held, engine, None, reward=RewardSection(), decode=str, vocabulary=20, together=False, notices=None
    )


async def held(rollouter):
    """500 conversations of up to four turns."""
    prompts = [Prompt(f"p{g}", str(g % 10), "s", text=f"{g % 10}=", tokens=(1, 3 + g % 10, 13)) for g in range(125)]
    sampling = SamplingParams(max_new_tokens=20)
    asked = [GroupRequest(g, 0, prompt, (0, 1, 2, 3), sampling) for g, prompt in enumerate(prompts)]
    try:
        found = [one async for some in rollouter.generate(asked) for one in some]
    finally:
        await rollouter.close()
    return sorted((r.group_id, r.index, r.finish_reason, r.verdict.reason, *r.tokens.tolist()) for r in found)


async def under_way(section, warnings, run_dir):
    """Pools on all nodes, who holds the conversations, and the task in which 300 turns are answered by now."""
    engine = Digits()
    pools = EnvironmentPools(run_context(warn=warnings.append, run_dir=run_dir), section)
    rollouter = conversations(engine, section, pools, warnings.append)
    working = asyncio.create_task(held(rollouter))
    await until(lambda: engine.answered >= 300)
    return pools, rollouter, working


def step_pools():
    """Processes of this test's cluster that hold the workers of environments."""
    found = psutil.Process().children(recursive=True)
    return [one.pid for one in found if one.is_running() and "PoolWorker" in " ".join(one.cmdline())]


def test_conversations_go_on_elsewhere_when_the_environments_of_a_node_are_lost(nodes, run, tmp_path):
    section = EnvironmentSection(kind="toy_steps:Steps", options={"tries": 4}, workers=2)

    async def scenario():
        warnings = []
        pools, rollouter, working = await under_way(section, warnings, tmp_path)
        os.kill(step_pools()[-1], signal.SIGKILL)
        lost = await working
        assert pools.restarts == 1 and rollouter.counters()["environment/restarted"] == 0
        assert len(warnings) == 1 and "environment pool" in warnings[0]
        assert len(lost) == 500 and lost == await held(conversations(Digits(), section, None, print))

    run(scenario())


@pytest.mark.heavy
def test_conversations_go_on_elsewhere_when_a_node_is_lost(machines, nodes, run, tmp_path):
    section = EnvironmentSection(kind="toy_steps:Steps", options={"tries": 4}, workers=3)
    third = machines.add_node(**NODE)

    async def scenario():
        warnings = []
        pools, rollouter, working = await under_way(section, warnings, tmp_path)
        machines.remove_node(third, allow_graceful=False)
        found = await working
        assert len(found) == 500 and found == await held(conversations(Digits(), section, None, print))
        counters = rollouter.counters()
        assert (counters["environment/restarted"], counters["environment/pool_restarts"]) == (0, pools.restarts)
        assert pools.restarts >= 1 and "environment pool" in warnings[0]
        await until(lambda: sum(node["Alive"] for node in ray.nodes()) == len(nodes))  # for the tests that follow

    run(scenario())


def test_an_environment_that_cannot_be_made_on_a_node_ends_the_run_by_name(nodes, run, tmp_path):
    section = EnvironmentSection(kind="toy_steps:Steps", options={"wrong": "constructor"})

    async def scenario():
        pools = EnvironmentPools(run_context(run_dir=tmp_path), section)
        with pytest.raises(RolloutError, match=r"toy_steps:Steps.*no such game"):
            await held(conversations(Digits(), section, pools, print))

    run(scenario())


@pytest.mark.parametrize(
    ("workers", "nodes_", "expected"), [(2, 1, [2]), (5, 2, [3, 2]), (2, 4, [1, 1, 1, 1]), (8, 4, [2, 2, 2, 2])]
)
def test_verifiers_are_dealt_out_to_the_nodes(workers, nodes_, expected):
    assert shares(workers, nodes_) == expected


@ray.remote(num_cpus=0)
class Busy:
    """A process that answers one call after the other."""

    def compute(self, cpu_s):
        end_s = time.process_time() + cpu_s
        while time.process_time() < end_s:
            pass

    def lives(self):
        return os.getpid()


def test_a_process_that_stands_still_is_killed_and_one_that_is_only_busy_is_not(machines):
    """On either node: both answer nothing for several times as long as is allowed."""

    async def watch():
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        nodes = [NodeAffinitySchedulingStrategy(node, soft=False) for node in alive]
        workers = {
            f"{what} {i}": Busy.options(scheduling_strategy=n).remote()
            for what in ("frozen", "busy")
            for i, n in enumerate(nodes)
        }
        pids = {name: await worker.lives.remote() for name, worker in workers.items()}
        looks = asyncio.ensure_future(
            end_frozen(lambda: workers, lambda worker: worker.lives.remote(), hung_s=1.0, warn=warnings.append)
        )
        try:
            for name, worker in workers.items():
                if name.startswith("frozen"):
                    os.kill(pids[name], signal.SIGSTOP)
                else:
                    worker.compute.remote(4.0)
            for name in ("frozen 0", "frozen 1"):
                with pytest.raises(RayActorError):
                    await asyncio.wait_for(workers[name].lives.remote(), LIMIT_S)
            assert [await workers[name].lives.remote() for name in ("busy 0", "busy 1")] == [
                pids["busy 0"],
                pids["busy 1"],
            ]
        finally:
            looks.cancel()
            for worker in workers.values():
                ray.kill(worker)

    warnings = []
    asyncio.run(watch())
    assert sorted(line.partition(" has")[0] for line in warnings) == ["frozen 0", "frozen 1"]
