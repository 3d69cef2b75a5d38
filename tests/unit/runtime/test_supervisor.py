"""What watches a run: the first that ends is the news, and nothing goes on waiting afterwards."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from megatron_daro.errors import EngineError, WorkerError
from megatron_daro.runtime import supervisor
from megatron_daro.runtime.healing import first_death
from megatron_daro.runtime.supervisor import WorkerDiedError, WorkerGroup, gather, supervised, translated


@pytest.mark.parametrize("dies", [True, False])
def test_nothing_watches_on_when_the_run_has_ended(dies):
    async def endless():
        await asyncio.Future()

    async def ended():
        return OSError("gone")

    async def run():
        endings = [endless(), endless(), *([ended()] if dies else [])]
        work = endless() if dies else asyncio.sleep(0.01, "done")
        try:
            return await supervised(work, [], endings)
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    if dies:
        with pytest.raises(OSError, match="gone"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == "done"


class Watched:
    """A worker whose sentinel ends as told."""

    def __init__(self):
        self.end = asyncio.get_running_loop().create_future()
        self.sentinel = SimpleNamespace(remote=lambda: self.end)


def group_of(*names):
    group = WorkerGroup()
    group.update({name: Watched() for name in names})
    return group


def test_a_dismissed_group_ends_every_process_once_and_is_empty(monkeypatch):
    killed = []
    monkeypatch.setattr(supervisor.ray, "kill", lambda worker, no_restart: killed.append((worker, no_restart)))
    group = WorkerGroup()
    group.update({"a": 1, "b": 2})
    group.dismiss()
    group.dismiss()
    assert killed == [(1, True), (2, True)] and group.dismissed and not group


@pytest.mark.parametrize("error", [RayActorError(), None])
def test_the_death_of_a_worker_of_any_group_ends_the_run_after_it_has_closed(error):
    closed = []

    async def work():
        try:
            await asyncio.Future()
        finally:
            await asyncio.sleep(0)
            closed.append("closed")
            raise OSError("a consequence")

    async def run():
        groups = [group_of("engine 0"), group_of("actor rank 0", "actor rank 1")]
        task = asyncio.ensure_future(supervised(work(), groups))
        for _ in range(5):
            await asyncio.sleep(0)
        end = groups[1]["actor rank 1"].end
        end.set_exception(error) if error else end.set_result(None)
        await task

    with pytest.raises(WorkerError, match=r"^actor rank 1") as raised:
        asyncio.run(run())
    assert closed == ["closed"] and (error is None or type(raised.value) is WorkerDiedError)
    assert error is not None or str(raised.value) == "actor rank 1: RuntimeError: its sentinel returned"


@pytest.mark.parametrize("watch", [supervisor._first_death, None])
def test_the_end_of_a_dismissed_worker_is_no_news(watch):
    async def run():
        group = group_of("a", "b")
        death = asyncio.ensure_future(watch([group], []) if watch else first_death(group))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        group.dismissed = True
        group["a"].end.set_exception(RayActorError())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not death.done()
        death.cancel()
        await asyncio.wait([death])

    asyncio.run(run())


def test_who_begins_to_watch_a_group_that_was_dismissed_is_told_nothing():
    async def run():
        group = WorkerGroup()
        group.dismiss()
        death = asyncio.ensure_future(first_death(group))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not death.done()
        death.cancel()

    asyncio.run(run())


def test_the_first_death_of_a_group_says_who_it_was():
    async def run():
        group = group_of("a", "b")
        worker = group["b"]
        death = asyncio.ensure_future(first_death(group))
        await asyncio.sleep(0)
        worker.end.set_result(None)
        name, handle, error = await death
        assert (name, handle, str(error)) == ("b", worker, "b: RuntimeError: its sentinel returned")
        assert group["a"].end.cancelled()

    asyncio.run(run())


def test_a_run_that_is_cancelled_closes_before_it_ends():
    closed = []

    async def work():
        try:
            await asyncio.Future()
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    async def run():
        task = asyncio.ensure_future(supervised(work(), []))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and closed == ["closed"]

    asyncio.run(run())


def test_errors_of_ray_are_told_with_the_workers_name_and_its_own_errors_as_they_are():
    own = EngineError("the model is not there")
    assert translated("engine 0", RayTaskError("start", "traceback", own)) is own
    other = translated("engine 0", RayTaskError("start", "traceback", KeyError("x")))
    assert type(other) is WorkerError and str(other) == "engine 0 failed: KeyError: 'x'"
    lost = translated("engine 0", ActorUnavailableError("unavailable", None))
    assert type(lost) is WorkerDiedError and lost.died
    assert str(lost) == "engine 0 died: Ray lost the connection to its process; its node may be gone"
    assert "lost the connection" not in str(translated("engine 0", RayActorError()))
    no_memory = translated("engine 0", OutOfMemoryError("6 worker(s) were killed. " + "Top memory users " * 90))
    assert type(no_memory) is WorkerDiedError
    assert str(no_memory) == "engine 0 died: Ray ended its process because its node ran low on memory"
    no_node = translated("engine 0", NodeDiedError("the node was lost"))
    assert type(no_node) is WorkerDiedError and "its node may be gone" in str(no_node)
    assert str(translated("engine 0", ValueError("x"))) == "engine 0: ValueError: x"


def test_calls_are_named_by_their_workers_and_their_results_are_in_order():
    async def late():
        await asyncio.sleep(0.01)
        return 1

    async def soon():
        return 2

    async def too_late():
        raise GetTimeoutError("x")

    assert asyncio.run(gather([late(), soon()])) == [1, 2]
    with pytest.raises(WorkerError, match=r"^worker 1: GetTimeoutError: x$"):
        asyncio.run(gather([soon(), too_late()]))


@pytest.mark.parametrize("nodes", [None, 1, 2])
def test_the_news_of_a_death_is_waited_for_longer_where_nodes_may_be_gone(monkeypatch, nodes):
    """A rank that says it lost a peer is not the cause: for a while Ray may tell of a death."""
    monkeypatch.setattr(supervisor, "_NEWS_S", 0.05)
    monkeypatch.setattr(supervisor, "_NEWS_OF_A_NODE_S", 5.0)
    alive = [{"Alive": True}] * (nodes or 0) + [{"Alive": False}]
    monkeypatch.setattr(supervisor.ray, "is_initialized", lambda: nodes is not None)
    monkeypatch.setattr(supervisor.ray, "nodes", lambda: alive)

    async def says():
        raise WorkerError("connection closed by peer")

    async def dies():
        await asyncio.sleep(0.2)
        raise RayActorError

    async def run():
        await gather({"rank 0": says(), "rank 1": dies()})

    with pytest.raises(WorkerError, match="rank 1 died" if nodes == 2 else "connection closed"):
        asyncio.run(run())
