"""What thin ranks answer and how long they take, how a lost one ends, and the processes that stand for all."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_daro.workshop.rehearse import thin_ranks
from megatron_daro.workshop.rehearse.setting import NodeMap
from megatron_daro.workshop.rehearse.thin_ranks import Loss, RankHandle, Script, ThinRanks

SCRIPT = Script(
    train_s=0.25,
    logprobs_s=0.5,
    send_s=0.75,
    stages={0: (100, 2), 1: (200, 3)},
    answering=frozenset({1}),
    stage_of={2: 1},
)
BATCH = SimpleNamespace(
    advantages_N=np.array([1.0, 3.0], np.float32), rollout_logprobs_R=np.array([-1.0, -2.0], np.float32)
)


@pytest.fixture
def slept(monkeypatch):
    """Seconds that were waited, in place of waiting."""
    times: list[float] = []

    async def sleep(seconds):
        times.append(seconds)

    monkeypatch.setattr(thin_ranks.asyncio, "sleep", sleep)
    return times


def test_a_thin_rank_takes_its_time_and_answers_only_where_its_answer_counts(slept):
    ranks = ThinRanks(SCRIPT)
    answering, other = (asyncio.run(ranks.train(rank, BATCH, [], 7)) for rank in (1, 0))
    assert (answering.step, answering.metrics) == (7, {"loss/policy": 2.0, "loss/grad_norm": 1.0})
    assert (other.step, other.metrics) == (7, {}) and slept == [0.25, 0.25]
    assert asyncio.run(ranks.run_pass(0, "x", BATCH, [])) is None and len(slept) == 2
    scored = asyncio.run(ranks.run_pass(1, "x", BATCH, []))
    assert scored.dtype == np.float32 and scored.tolist() == pytest.approx([-0.999, -1.998]) and slept[2:] == [0.5]
    assert asyncio.run(ranks.score(1, BATCH, [], 1.0)).tolist() == [-0.5, -0.5]
    assert asyncio.run(ranks.score(0, BATCH, [], 1.0)) is None
    assert thin_ranks.PROBED == -0.5  # as a canned server says


def test_the_sender_of_a_stage_reports_its_bytes(slept):
    ranks = ThinRanks(SCRIPT)
    report = asyncio.run(ranks.export(2, object()))  # type: ignore[arg-type]
    assert report == thin_ranks.SendReport(200, 3, 0.75) and slept == [0.75]
    assert asyncio.run(ranks.export(2, None)) is None and asyncio.run(ranks.export(1, object())) is None  # type: ignore[arg-type]


def test_a_thin_rank_writes_its_file_of_a_checkpoint(tmp_path, slept):
    asyncio.run(ThinRanks(SCRIPT).start_save(12, tmp_path))
    asyncio.run(ThinRanks(SCRIPT).finish_save(12))
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("shard_00012.safetensors", 0)]
    assert asyncio.run(ThinRanks(SCRIPT).ready()) == thin_ranks.os.getpid()


@pytest.mark.parametrize("how", ["killed", "silent", ""])
def test_a_lost_node_ends_or_falls_silent_in_its_step(monkeypatch, how):
    class DiedError(Exception):
        pass

    def end(code):
        raise DiedError(code)

    monkeypatch.setattr(thin_ranks.os, "_exit", end)
    ranks = ThinRanks(dataclasses.replace(SCRIPT, train_s=0.0, loses_at=2, own_loss=how))

    async def step(number):
        async with asyncio.timeout(0.05):
            return (await ranks.train(1, BATCH, [], number)).step

    assert asyncio.run(step(1)) == 1
    with pytest.raises(DiedError if how == "killed" else TimeoutError) as caught:
        asyncio.run(step(2))
    assert how != "killed" or caught.value.args == (1,)


def test_calls_to_ranks_are_counted_and_the_last_of_each_is_known():
    asked, made = thin_ranks._Asked(), []

    def remote(*given, **named):
        made.append((given, named))
        return len(made)

    host = SimpleNamespace(train=SimpleNamespace(remote=remote), sentinel=SimpleNamespace(remote=remote))
    first, second = (RankHandle(host, rank, asked) for rank in (4, 5))
    assert first.train.remote("a", b=1) == 1 and second.train.remote() == 2 and second.train.remote("c") == 3
    assert second.sentinel.remote() == 4 and made[0] == ((4, "a"), {"b": 1}) and made[2] == ((5, "c"), {})
    assert asked.count == 4 and {rank: call[:2] for rank, call in asked.calls.items()} == {
        4: ("train", 1),
        5: ("train", 3),
    }
    with pytest.raises(AttributeError):
        _ = first._hidden


@pytest.mark.parametrize(
    ("dead", "waiting", "expected"),
    [((), (), None), ((4,), (5,), ("train", (4,), (5,))), ((), (5, 4), ("train", (), (4, 5)))],
)
def test_ranks_that_never_answered_are_told_from_those_that_died(monkeypatch, dead, waiting, expected):
    asked = thin_ranks._Asked()
    assert asked.unanswered() is None
    asked.calls = {4: ("train", "r4", 1.0), 5: ("train", "r5", 2.0), 6: ("train", "r6", 3.0)}
    open_ = [f"r{rank}" for rank in waiting]

    def wait(references, *, num_returns, timeout):
        assert (num_returns, timeout) == (3, 0)
        return [one for one in references if one not in open_], open_

    monkeypatch.setattr(thin_ranks.ray, "wait", wait)
    monkeypatch.setattr(thin_ranks, "_is_dead", lambda reference: reference in {f"r{rank}" for rank in dead})
    monkeypatch.setattr(thin_ranks.time, "perf_counter", lambda: 11.0)
    found = asked.unanswered()
    assert (found and (found.call, found.died, found.waiting)) == expected and (found is None or found.waited_s == 10.0)


@pytest.mark.parametrize(
    ("error", "dead"), [(None, False), (thin_ranks.DEATHS[0](), True), (thin_ranks.RayError(), False)]
)
def test_only_the_death_of_a_process_is_one(monkeypatch, error, dead):
    def get(reference, timeout):
        assert timeout == 0
        if error:
            raise error

    monkeypatch.setattr(thin_ranks.ray, "get", get)
    assert thin_ranks._is_dead("r") is dead


def test_processes_of_thin_ranks_are_ended_once(monkeypatch):
    killed: list[object] = []
    monkeypatch.setattr(thin_ranks.ray, "kill", lambda host, no_restart: killed.append((host, no_restart)))
    workers = thin_ranks.ThinWorkers(["a", "b"])
    workers["x"] = "handle"
    workers.dismiss()
    workers.dismiss()
    assert killed == [("a", True), ("b", True)] and workers.dismissed and not workers.data


def group_of(monkeypatch, loss: Loss | None):
    """A policy group whose processes are named by their scripts."""
    made: list[Script] = []

    class Host:
        def __init__(self, script):
            made.append(script)
            self.ready = SimpleNamespace(remote=lambda: len(made))

    async def gather(calls):
        assert list(calls) == [f"thin ranks {i}" for i in range(len(made))]

    monkeypatch.setattr(thin_ranks, "actor_class", lambda kind: SimpleNamespace(remote=Host))
    monkeypatch.setattr(thin_ranks, "gather", gather)
    group = thin_ranks.ThinPolicyGroup.__new__(thin_ranks.ThinPolicyGroup)
    nodes = NodeMap(5, (0, 0, 1, 2, 3, 3), ((4,),))
    begun: list[int] = []
    group.rehearse(["p"], nodes, SCRIPT, loss, on_begin=lambda: begun.append(1), on_loss=lambda: None)
    asyncio.run(group.start())
    hosts = [handle._host for handle in group.workers.values()]
    return group, made, hosts, begun


def test_three_processes_stand_for_all_ranks_and_one_for_the_lost_node(monkeypatch):
    group, made, hosts, _ = group_of(monkeypatch, None)
    assert made == [SCRIPT] * 3 and hosts[0] is hosts[1] is hosts[4] is hosts[5] and len(set(map(id, hosts))) == 3
    assert list(group.workers) == [f"actor rank {rank}" for rank in range(6)] and group._places == ["p"]
    _, made, hosts, _ = group_of(monkeypatch, Loss(3, 2, "silent"))
    assert made == [dataclasses.replace(SCRIPT, loses_at=2)] * 3 + [
        dataclasses.replace(SCRIPT, loses_at=2, own_loss="silent")
    ]
    assert hosts[4] is hosts[5] and hosts[4] not in hosts[:4] and hosts[0] is hosts[1]
    _, made, _, _ = group_of(monkeypatch, Loss(4, 2))  # of servers only
    assert made == [SCRIPT] * 3


def test_the_loop_begins_with_the_first_sync(monkeypatch):
    group, _, _, begun = group_of(monkeypatch, None)
    seen: list[object] = []

    async def export(self, plan):
        seen.append((plan, len(begun)))

    monkeypatch.setattr(thin_ranks.PolicyGroup, "export", export)
    for plan in "ab":
        asyncio.run(group.export(plan))
    assert seen == [("a", 1), ("b", 1)]
