"""Replicas of the embedded engine: how requests are dealt out, how weights come, and what becomes of one that dies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from run_configuration import run_context

from megatron_daro.errors import EngineError, LostReceiversError, ModelError, SyncError, WorkerError
from megatron_daro.runtime import embedded_engines
from megatron_daro.runtime.embedded_engines import EmbeddedEngines
from megatron_daro.sync.plan import SendFailure, SendReport


class Actor:
    """A process: notes its calls, and fails all of them once it is dead, as Ray does. says: method -> its error."""

    def __init__(self, number, says):
        self.number, self.says, self.calls, self.killed = number, says, [], False
        self.dead = asyncio.get_running_loop().create_future()

    def die(self):
        if not self.dead.done():
            self.dead.set_exception(RayActorError())
            self.dead.exception()

    def __getattr__(self, method):
        if method.startswith("__"):
            raise AttributeError(method)
        own = {"sentinel": self._sentinel, "generate": self._generate}
        return SimpleNamespace(remote=own.get(method) or self._plain(method))

    def _plain(self, method):
        async def answer(*arguments):
            self.calls.append((method, *arguments))
            if self.dead.done():
                raise RayActorError
            if method in self.says:
                raise self.says[method]

        return answer

    async def _sentinel(self):
        await asyncio.shield(self.dead)

    async def _generate(self, requests):
        self.calls.append(("generate", [request.group_id for request in requests]))
        for request in requests:
            answer = asyncio.get_running_loop().create_future()
            if self.says.get("dies_before") == request.group_id:
                self.die()
            if self.dead.done():
                answer.set_exception(RayActorError())
            elif "generate" in self.says:
                answer.set_exception(self.says["generate"])
            else:
                rollout = SimpleNamespace(group_id=request.group_id, attempt=0, index=0, by=self.number)
                answer.set_result((rollout,))
            yield answer
            await asyncio.sleep(0)
        if self.says.get("endless"):
            yield asyncio.shield(self.dead)


class Group:
    """Three replicas of fakes. says: of the processes to come, by number; actors: all that were made."""

    def __init__(self, monkeypatch, replicas=3, max_restarts=2):
        self.actors, self.says, self.warnings = [], {}, []

        def remote(options):
            def make(number, *arguments):
                said = self.says.get(number, [])
                self.actors.append(Actor(number, said.pop(0) if said else {}))
                return self.actors[-1]

            return make

        made = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=remote(options)))
        monkeypatch.setattr(embedded_engines, "actor_class", lambda _: made)

        def kill(worker, no_restart):
            worker.killed = True
            worker.die()

        monkeypatch.setattr(embedded_engines.ray, "kill", kill)
        embedded = {"batch_size": 5, "threads": 2, "max_restarts": max_restarts}
        engine = {"replicas": replicas, "seed": 7, "embedded": embedded}
        run = run_context(
            warn=self.warnings.append,
            model={"path": "model", "trust_remote_code": True},
            actor={"precision": "bf16"},
            engine=engine,
        )
        self.engines = EmbeddedEngines(run, SimpleNamespace(server=lambda number: {"place": number}))

    async def served(self):
        """Start, and give everybody weights."""
        await self.engines.start()
        await self.updated(0)
        return self.engines

    async def with_one_that_waits_for_weights(self):
        """`served`, but engine 0 died and came back."""
        engines, asked = await self.served(), asyncio.Event()

        async def wanted(name):
            asked.set()

        engines.when_back(wanted)
        self.actors[0].die()
        await asked.wait()
        return engines

    async def updated(self, version, only=None):
        update = self.engines.begin_update(version, only=only)
        await update.prepare()
        await update.install(SendReport())
        return await update.accept()

    def newest(self, number):
        return [actor for actor in self.actors if actor.number == number][-1]


@pytest.fixture
def group(monkeypatch):
    return Group(monkeypatch)


def run(work):
    async def limited():
        async with asyncio.timeout(10):
            return await work

    return asyncio.run(limited())


def requests(*numbers):
    return [SimpleNamespace(group_id=number) for number in numbers]


async def answers(engines, *numbers):
    """(group, replica) of each answer."""
    return sorted([(one.group_id, one.by) async for (one,) in engines.generate(requests(*numbers))])


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_replica_that_cannot_load_the_model_ends_the_start(group):
    group.says[1] = [{"start": RayTaskError("start", "traceback", ModelError("no such file"))}]
    with pytest.raises(ModelError, match="no such file"):
        run(group.engines.start())


def test_requests_are_dealt_out_in_turn_and_all_answers_come(group):
    async def generate():
        engines = await group.served()
        assert await answers(engines, 0, 1, 2, 3) == [(0, 0), (1, 1), (2, 2), (3, 0)]
        assert await answers(engines, 5) == [(5, 2)] and await answers(engines, 6) == [(6, 0)]
        assert await answers(engines) == []

    run(generate())
    assert all(call[0] != "abort" for actor in group.actors for call in actor.calls)


@pytest.mark.parametrize("fails", [True, False])
def test_who_stops_reading_or_meets_an_error_has_the_rest_aborted_everywhere(group, fails):
    failure = RayTaskError("generate", "traceback", EngineError("out of memory"))
    group.says[1] = [{"generate": failure} if fails else {"endless": True}]

    async def generate():
        engines = await group.served()
        stream = engines.generate(requests(0, 1, 2))
        try:
            async for _ in stream:
                if not fails:
                    break
        finally:
            await stream.aclose()
            assert all(actor.calls[-1] == ("abort", [0, 1, 2]) for actor in group.actors)
            await engines.abort()

    if fails:
        with pytest.raises(EngineError, match="out of memory"):
            run(generate())
    else:
        run(generate())
    assert all(actor.calls[-1] == ("abort", None) for actor in group.actors)


def test_a_replica_that_dies_is_started_again_gets_the_weights_and_is_asked_for_all_of_it_again(group):
    """What it had answered is not given out twice."""
    group.says[1] = [{"dies_before": 4}]

    async def generate():
        engines = await group.served()
        engines.when_back(lambda name: group.updated(0, only=name))
        assert await answers(engines, 0, 1, 2, 3, 4, 5) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
        return await group.updated(1)

    assert run(generate()) == {"recovery/engine_restarts": 1.0}
    first, again = (actor for actor in group.actors if actor.number == 1)
    assert first.killed and ("generate", [1, 4]) in first.calls
    weights = [("open_update",), ("commit_update", 0)]
    assert again.calls[:4] == [("start",), *weights, ("generate", [1, 4])]
    (warning,) = group.warnings
    assert "engine 1" in warning and "--resume" not in warning


def test_a_replica_that_came_back_generates_only_once_it_has_weights(group):
    async def generate():
        engines = await group.with_one_that_waits_for_weights()
        waiting = asyncio.ensure_future(answers(engines, 0, 1))
        await settle()
        assert not waiting.done() and ("generate", [0]) not in group.newest(0).calls
        await group.updated(3, only="engine 0")
        assert await waiting == [(0, 0), (1, 1)]
        assert engines.begin_update(3, only="engine 0") is None  # it has them

    run(generate())


def test_an_abort_reaches_what_waits_for_a_replica_that_is_away(group):
    async def aborted():
        engines = await group.with_one_that_waits_for_weights()
        waiting = asyncio.ensure_future(answers(engines, 0, 1, 2, 3))
        await settle()
        await engines.abort([3])
        await settle()
        assert not waiting.done(), "group 0 is still wanted"
        await group.updated(3, only="engine 0")
        assert await waiting == [(0, 0), (1, 1), (2, 2)]
        group.newest(0).die()
        await settle()
        waiting = asyncio.ensure_future(answers(engines, 0, 1))
        await settle()
        await engines.abort()
        assert await waiting == [(1, 1)]

    run(aborted())


def test_without_a_policy_replicas_serve_as_they_were_loaded_also_when_they_come_back(group):
    async def generate():
        await group.engines.start()
        group.engines.serve_as_loaded()
        assert await answers(group.engines, 0, 1, 2) == [(0, 0), (1, 1), (2, 2)]
        group.actors[2].die()
        assert await answers(group.engines, 0, 1, 2) == [(0, 0), (1, 1), (2, 2)]

    run(generate())
    assert [actor.number for actor in group.actors] == [0, 1, 2, 2]
    assert all(call[0] != "open_update" for actor in group.actors for call in actor.calls)


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_replica_that_dies_too_often_ends_the_run_and_whoever_waits_for_it(monkeypatch, allowed):
    group = Group(monkeypatch, max_restarts=allowed)
    group.says[0] = [{"dies_before": 0}] * 4

    async def generate():
        engines = await group.served()
        engines.when_back(lambda name: group.updated(0, only=name))
        with pytest.raises(WorkerError, match="engine 0") as raised:
            await answers(engines, 0, 1)
        assert ("engine.embedded.max_restarts" in str(raised.value)) == bool(allowed)
        assert await engines.fatal_error() is raised.value
        with pytest.raises(WorkerError, match="engine 0"):
            engines.begin_update(1)

    run(generate())
    assert len(group.warnings) == allowed and len([a for a in group.actors if a.number == 0]) == allowed + 1


def test_what_cannot_be_loaded_again_ends_the_run(group):
    group.says[2] = [{}, {"start": RayTaskError("start", "traceback", ModelError("it was deleted"))}]

    async def generate():
        engines = await group.served()
        group.actors[2].die()
        return await engines.fatal_error(), await answers(engines, 0)

    with pytest.raises(ModelError, match="it was deleted"):
        run(generate())


def test_while_an_update_is_made_nothing_generates_and_after_a_failure_nothing_ever_does(group):
    async def update():
        engines = await group.served()
        one = engines.begin_update(4)
        plan = await one.prepare()
        assert plan.transport == "ray"
        assert [(target.name, target.worker) for target in plan.targets] == [
            (f"engine {actor.number}", actor) for actor in group.actors
        ]
        with pytest.raises(EngineError):
            await answers(engines, 0)
        await one.install(SendReport())
        assert await one.accept() == {"recovery/engine_restarts": 0.0}
        assert group.actors[0].calls[-2:] == [("open_update",), ("commit_update", 4)]
        assert await answers(engines, 0) == [(0, 0)]
        group.actors[2].says["commit_update"] = RayTaskError("c", "traceback", EngineError("a tensor is missing"))
        with pytest.raises(SyncError, match=r"version 5.*engine 2: a tensor is missing"):
            await group.updated(5)
        with pytest.raises(EngineError):
            await answers(engines, 0)

    run(update())


def test_a_replica_that_refuses_weights_is_named_with_what_it_said(group):
    async def blamed():
        engines = await group.served()
        update = engines.begin_update(2)
        await update.prepare()
        failures = {name: SendFailure("refused", text) for name, text in (("engine 0", "full"), ("engine 1", "gone"))}
        with pytest.raises(SyncError, match=r"engine 0: full.*engine 1: gone"):
            await update.blame(SendReport(failures=failures))

    run(blamed())


@pytest.mark.parametrize("phase", ["open_update", "send", "commit_update"])
def test_a_replica_that_dies_in_an_update_takes_no_part_and_catches_up(group, phase):
    async def update():
        engines, caught_up = await group.served(), []

        async def catch_up(name):
            caught_up.append(name)
            await group.updated(8, only=name)

        engines.when_back(catch_up)
        if phase != "send":
            group.actors[1].says[phase] = RayActorError()
        one = engines.begin_update(8)
        plan = await one.prepare()
        if phase == "send":
            await one.blame(SendReport(failures={"engine 1": SendFailure("unanswered", "engine 1 died")}))
            plan = await one.prepare()
        assert [target.name for target in plan.targets][-2:] != ["engine 1", "engine 2"] or phase == "commit_update"
        await one.install(SendReport())
        await one.accept()
        group.actors[1].die()
        assert await answers(engines, 0, 1, 2) == [(0, 0), (1, 1), (2, 2)]
        assert caught_up == ["engine 1"] and group.newest(1).calls[-2] == ("commit_update", 8)

    run(update())


def test_an_update_waits_for_the_first_replica_that_is_back_where_all_are_away(monkeypatch):
    group = Group(monkeypatch, replicas=1)

    async def update():
        await group.served()
        group.actors[0].die()
        await settle()
        return await group.updated(2)

    assert run(update()) == {"recovery/engine_restarts": 1.0}
    assert group.actors[1].calls == [("start",), ("open_update",), ("commit_update", 2)]


def test_an_update_that_reached_nobody_may_be_made_again(monkeypatch):
    group = Group(monkeypatch, replicas=1)

    async def update():
        engines = await group.served()
        one = engines.begin_update(2)
        await one.prepare()
        group.actors[0].die()
        await one.install(SendReport())
        with pytest.raises(LostReceiversError, match="version 2"):
            await one.accept()
        await group.updated(2)
        return await answers(engines, 0)

    assert run(update()) == [(0, 0)]


def test_a_failure_of_whoever_brings_the_weights_ends_the_run(group):
    async def fails(name):
        raise WorkerError("actor rank 0 failed")

    async def generate():
        engines = await group.served()
        engines.when_back(fails)
        group.actors[0].die()
        await answers(engines, 0)

    with pytest.raises(WorkerError, match="actor rank 0 failed"):
        run(generate())
