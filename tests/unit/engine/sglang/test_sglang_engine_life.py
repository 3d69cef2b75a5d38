"""An engine from its start to its end: who may be updated, what it counts, what it keeps of requests and leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sglang_pool import collect, engine_of, group
from sglang_stub_fleets import StubHandle, Weights, first, rig, run, serving
from stub_server import StubServer, answering

from megatron_daro.engine.sglang import engine as engine_module
from megatron_daro.engine.sglang import fleet as fleet_module
from megatron_daro.engine.sglang.engine import Running
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.rollout.environment import TURN
from megatron_daro.types import Rollout

pytestmark = pytest.mark.usefixtures("no_pauses")


def rollout(index, tokens, finish_reason="abort"):
    ids, count = np.array([1, *range(tokens)], np.int32), tokens
    columns = ids, 1, np.ones(count, np.uint8), np.zeros(count, np.float32)
    return Rollout("p", 0, 0, index, *columns, finish_reason, 1)


def test_a_group_keeps_what_is_new_and_asks_for_the_rest():
    given = rollout(2, 1)
    running = Running(replace(group(0, count=4), partial={2: given}))
    running.partial = dict(running.request.partial)
    assert not running.take([rollout(0, 0)]), "nothing came"
    assert running.take([rollout(1, 3, "stop"), rollout(0, 2)])
    assert not running.take([rollout(0, 2)]), "no further than before"
    rest = running.remaining()
    assert rest.indices == (0, 2, 3) and {*rest.partial} == {0, 2}
    assert [one.index for one in running.collected()] == [0, 1], "what it was given is no answer"
    assert running.take([rollout(3, 1, "length"), rollout(2, 0, "stop")])
    assert [one.index for one in running.collected()] == [0, 1, 2, 3]
    assert running.remaining().indices == (0,)


def test_the_oldest_of_very_many_conversations_are_forgotten(monkeypatch):
    monkeypatch.setattr(engine_module, "_MOST_CONVERSATIONS", 2)
    last = engine_module._LastServers()
    turn = lambda number, attempt=TURN: replace(group(number), indices=(0,), attempt=attempt)
    for number in (0, 1, 0, 2):
        last.note(turn(number), f"server of {number}")
    last.note(group(0), "a group that is asked for at once")
    assert [last.of(turn(number)) for number in (0, 1, 2)] == ["server of 0", None, "server of 2"]
    assert last.of(turn(0, attempt=TURN - 1)) is None, "a first turn"


@pytest.mark.parametrize(("failures", "seconds"), [(1, 0.2), (3, 0.8), (5, 3.2), (6, 5.0), (60, 5.0)])
def test_pauses_double_up_to_a_longest_one_and_differ(monkeypatch, failures, seconds):
    monkeypatch.undo()
    for part in (0.5, 1.5):
        monkeypatch.setattr(engine_module.random, "uniform", lambda *ends, part=part: part if part in ends else 0)
        assert engine_module._pause_s(failures) == pytest.approx(seconds * part)


def test_each_failure_is_followed_by_a_pause_that_a_stop_ends(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(fleet_module, "_FAILING_S", 1000.0)
    monkeypatch.setattr(engine_module, "_pause_s", lambda failures: pauses.append(failures) or 0.0)

    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            fleet.stubs[0].answers["/generate"] = answering(500)
            assert await collect(fleet.engine, [group(0)]) == [] and pauses == list(range(1, 9))
            monkeypatch.setattr(engine_module, "_pause_s", lambda failures: pauses.append(failures) or 1000.0)
            working = asyncio.create_task(collect(fleet.engine, [group(1)]))
            await fleet.until(lambda: len(pauses) == 9)
            await fleet.engine.abort({1})
            assert await working == []

    run(scenario())


def test_a_stop_ends_what_is_waited_for():
    async def scenario():
        stop, ended, before = asyncio.Event(), [], asyncio.all_tasks()

        async def work():
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(True)

        waiting = asyncio.create_task(engine_module._stoppable(work(), stop))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stop.set()
        assert await waiting is None
        await asyncio.sleep(0)
        assert ended == [True] and asyncio.all_tasks() == before

    run(scenario())


def test_a_group_that_waits_for_a_server_is_stopped_and_takes_no_room(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (server,) = fleet.servers
            fleet.engine.fleet.set_state(server, "joining")
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await fleet.until(lambda: fleet.engine.fleet._line.locked())
            await fleet.engine.abort()
            assert await working == [] and fleet.stubs[0].calls["/generate"] == 0
            fleet.engine.fleet.set_state(server, "serving")
            assert len(await collect(fleet.engine, [group(1)])) == 4 and server.tokens_in_flight == 0

    run(scenario())


def test_a_request_in_flight_holds_its_prompt_what_it_resumes_and_a_guess(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (server,), (stub,) = fleet.servers, fleet.stubs
            stub.gate.clear()
            one = group(0, count=2, length=3, max_new_tokens=44)
            asked = replace(one, partial={0: replace(rollout(0, 4), prompt_length=1)})
            working = asyncio.create_task(collect(fleet.engine, [asked]))
            await fleet.until(lambda: stub.running == 2)
            assert server.tokens_in_flight == (3 + 4 + 10) + (3 + 11)  # a quarter of what each may get
            stub.gate.set()
            await working
            assert server.tokens_in_flight == 0

    run(scenario())


@pytest.mark.parametrize("count", [1, 2], ids=["whole", "streamed"])
def test_lengths_of_answers_that_ended_are_learnt_and_those_of_aborted_ones_are_not(tmp_path, count):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (stub,) = fleet.stubs
            first(stub, 1, answering(200, [stub.one([1, 2], "abort")] * count))
            stub.weight_version = "1"
            learnt = []
            learn = fleet.engine.fleet.learn_lengths
            fleet.engine.fleet.learn_lengths = lambda lengths: learn(iter(learnt.extend(lengths) or learnt[-1:]))
            rollouts = await collect(fleet.engine, [group(0, count=count, max_new_tokens=12)])
            assert [one.response_length for one in rollouts] == [12] * count
            assert learnt == [12] * count
            await collect(fleet.engine, [group(1, count=count, max_new_tokens=12)])
            assert learnt == [12] * count * 2

    run(scenario())


def test_a_request_of_one_answer_that_succeeds_ends_a_row_of_failures(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            for number in range(3):
                first(fleet.stubs[0], 3, answering(500))
                assert await collect(fleet.engine, [group(number, count=1)])
            assert fleet.states == ["serving"] and fleet.servers[0].failures == 0

    run(scenario())


def test_nothing_is_left_of_requests_that_ended(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            ours = lambda: {task for task in asyncio.all_tasks() if "RequestHandler" not in repr(task)}
            before = ours()
            await collect(fleet.engine, [group(i) for i in range(6)])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ours() == before
            assert not fleet.engine._running and not fleet.engine._held

    run(scenario())


def test_a_consumer_that_is_cancelled_ends_its_requests_and_they_are_not_made_again(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (stub,) = fleet.stubs
            stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0, count=2)]))
            await fleet.until(lambda: stub.running == 1)
            working.cancel()
            await asyncio.wait({working})
            assert working.cancelled() and stub.calls["/abort_request"] == 2
            await asyncio.sleep(0.02)
            assert stub.calls["/generate"] == 1 and not fleet.engine._running

    run(scenario())


def test_aborts_are_not_repeated_when_everything_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "_ABORT_AGAIN_S", 0.01)

    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (stub,) = fleet.stubs
            stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0, count=2)]))
            await fleet.until(lambda: stub.running == 1)
            stub.answers["/abort_request"] = answering(200)  # lost
            await fleet.engine.abort()
            await fleet.until(lambda: stub.calls["/abort_request"] >= 4)
            del stub.answers["/abort_request"]
            assert {one.finish_reason for one in await working} == {"abort"}
            await fleet.until(lambda: not fleet.engine._aborting)
            await fleet.engine.abort()
            await fleet.until(lambda: not fleet.engine._aborting)

    run(scenario())


def test_a_second_start_is_nothing_and_a_closed_engine_does_nothing(tmp_path):
    async def scenario():
        handles = []
        made = lambda url: handles.append(StubHandle(url)) or handles[-1]
        async with rig(tmp_path, count=1, handles=made) as fleet:
            await fleet.engine.start()
            assert handles[0].launches == 1
            clients = fleet.engine._answers._clients
            await fleet.engine.close()
            assert fleet.engine._answers._clients is not clients
            assert not [task for task in asyncio.all_tasks() if "Supervision" in repr(task)], "nobody watches"
            for call in (lambda: fleet.engine.update(1), fleet.engine.release_memory):
                with pytest.raises(EngineError, match="not running"):
                    await call()

    run(scenario())


def test_a_start_that_is_given_up_ends_the_servers(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/server_info"] = answering(503)
            handle = StubHandle(stub.url)
            engine = engine_of([handle], tmp_path)
            starting = asyncio.create_task(engine.start())
            while not stub.calls["/server_info"]:
                await asyncio.sleep(0.01)
            starting.cancel()
            await asyncio.wait({starting})
            assert starting.cancelled() and handle.stops == 1

    run(scenario())


def test_one_server_is_updated_where_it_waits_for_weights_and_all_where_no_other_update_has_them(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=3) as fleet:
            engine = fleet.engine
            assert engine.update(1, only="nobody") is None
            one = engine.update(1, only="server 1")
            assert fleet.states == ["joining", "updating", "joining"]
            assert [target.name for target in (await one.prepare()).targets] == ["server 1"]
            assert engine.update(1, only="server 1") is None, "it does not wait for weights any more"
            engine.fleet.set_state(fleet.servers[0], "serving")
            others = engine.update(2)
            assert fleet.states == ["updating"] * 3
            plan = await others.prepare()
            assert [target.name for target in plan.targets] == ["server 0", "server 2"]
            with pytest.raises(SyncError, match="no SGLang server can take weights: all are being started again"):
                engine.update(3)

    run(scenario())


def test_servers_that_keep_their_weights_serve_at_once_and_each_when_it_is_back(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=2) as fleet:
            assert fleet.states == ["joining", "joining"]
            fleet.engine.serve_as_loaded()
            assert fleet.states == ["serving", "serving"]
            for server in fleet.servers:
                fleet.engine.fleet.set_state(server, "joining")
            await fleet.engine._when_back("server 1")
            assert fleet.states == ["joining", "serving"]

    run(scenario())


def test_what_was_given_up_started_and_asked_again_is_counted(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=3) as fleet:
            engine = fleet.engine
            fleet.servers[0].restarts, fleet.servers[2].restarts = 1, 3
            engine.fleet.fenced_count, engine._retries, engine._answers.restarts = 2, 5, 7
            engine.fleet.set_state(fleet.servers[1], "updating")
            told = {"servers": 2.0, "fenced": 2.0, "restarts": 4.0, "retries": 5.0, "answer_worker_restarts": 7.0}
            assert engine.metrics() == {f"engine/{name}": value for name, value in told.items()}

    run(scenario())


def test_files_are_written_below_the_run_and_prompts_of_each_version_have_a_key_of_their_own(tmp_path):
    async def scenario():
        weights = Weights(3)
        async with serving(tmp_path, count=1, sync="disk", updated=weights) as fleet:
            assert weights.directories == [tmp_path / "sync" / "version_000003-0"]
            await collect(fleet.engine, [group(0, count=1)])
            await fleet.publish(weights, 4)
            await collect(fleet.engine, [group(0, count=1), group(1, count=1)])
            keys = [body["extra_key"].split("-", 1)[1] for body in fleet.stubs[0].bodies]
            assert [key for key in keys if "probe" not in key] == ["weights-3", "weights-4", "weights-4"]

    run(scenario())
