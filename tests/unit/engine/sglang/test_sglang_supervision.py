"""Servers that die, stall, or do not start: each is given up, started again so often and no oftener, and comes back
with the policy's weights before it gets a request."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from sglang_pool import collect, engine_of, expected, group, started
from sglang_stub_fleets import StubHandle, Weights, rig, run
from stub_server import StubServer, answering, never, reset, times

from megatron_daro.engine.sglang import fleet as fleet_module
from megatron_daro.engine.sglang import supervision
from megatron_daro.errors import EngineError, SyncError

JOINING = [
    *("/server_info", "/openapi.json", "/generate", "/model_info"),  # is it up, can it generate, is it the right one
    *("/pause_generation", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"),
    *("/flush_cache", "/update_weight_version", "/continue_generation", "/generate"),
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Looks and tries again at once."""
    for name in ("_WATCH_S", "_POLL_S", "_RESTART_PAUSE_S"):
        monkeypatch.setattr(supervision, name, 0.02)
    monkeypatch.setattr(fleet_module, "_FAILING_S", 0.0)


def managed(tmp_path, *stubs, **options):
    return rig(tmp_path, *stubs, **{"handles": StubHandle, "max_restarts": 5, **options})


def handles_of(fleet):
    return list(fleet.engine._supervision._handles.values())


def test_a_dead_idle_server_is_started_again_and_has_the_weights_before_any_request(tmp_path):
    async def scenario():
        weights = Weights(4)
        async with managed(tmp_path, updated=weights) as fleet:
            handle, stub = handles_of(fleet)[0], fleet.stubs[0]
            weights.version = 5  # trained on meanwhile
            handle.dead = "its process ended with signal 9"
            await fleet.until(lambda: fleet.servers[0].state == "serving" and handle.launches == 2)
            assert stub.order == JOINING
            assert handle.stops == 1, "what is left of it must be ended first"
            assert fleet.servers[0].version == 5 and fleet.servers[0].versions == {5}
            assert [t.name for t in weights.plans[-1].targets] == ["server 0"], "the other is not disturbed"
            assert fleet.stubs[1].order == []
            assert "SGLang server 0 is given up: its process ended with signal 9" in fleet.warnings
            metrics = fleet.engine.metrics()
            assert (metrics["engine/servers"], metrics["engine/fenced"], metrics["engine/restarts"]) == (2, 1, 1)

    run(scenario())


def test_before_any_weights_it_waits_for_the_next_update(tmp_path):
    async def scenario():
        async with managed(tmp_path) as fleet:
            handles_of(fleet)[0].dead, client = "gone", fleet.servers[0].client
            await fleet.until(lambda: handles_of(fleet)[0].launches == 2 and fleet.states == ["joining", "joining"])
            assert fleet.servers[0].reason == "" and fleet.servers[0].client is not client and client._session is None
            await fleet.publish(Weights(1), 1)
            assert fleet.states == ["serving", "serving"]

    run(scenario())


def test_a_death_is_seen_at_the_first_request_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_WATCH_S", 1000)

    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=4000) as fleet:
            fleet.stubs[0].answers["/generate"] = reset
            handles_of(fleet)[0].dead = "its process ended with signal 9"
            rollouts = await collect(fleet.engine, [group(0)])
            assert len(rollouts) == 4 and fleet.states == ["fenced", "serving"]
            assert fleet.stubs[0].calls["/generate"] == 1 and fleet.servers[0].reason.endswith("signal 9")

    run(scenario())


@pytest.mark.parametrize("ends", [True, False])
def test_requests_that_fail_are_explained_by_the_end_of_the_process_where_it_ends(tmp_path, monkeypatch, ends):
    """It is seen late: a process counts as gone when all its children are."""
    monkeypatch.setattr(supervision, "_WATCH_S", 1000)
    monkeypatch.setattr(supervision, "_DEATH_S", 30 if ends else 0.3)

    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=4000) as fleet:
            fleet.stubs[0].answers["/generate"] = reset
            for number in range(5):
                assert len(await collect(fleet.engine, [group(number)])) == 4, "it was answered by the other"
            assert fleet.stubs[0].calls["/generate"] == 5
            if ends:
                assert fleet.states == ["joining", "serving"]
                handles_of(fleet)[0].dead = "its process ended with signal 9"
            await fleet.until(lambda: fleet.states == ["fenced", "serving"])
            reason = "its process ended with signal 9" if ends else "5 requests in a row failed"
            assert fleet.servers[0].reason.startswith(reason)

    run(scenario())


@pytest.mark.parametrize("phase", ["begin", "send"])
def test_an_update_that_breaks_off_is_explained_by_the_end_of_the_process(tmp_path, monkeypatch, phase):
    """Nobody looks after a server in an update, and the end of all its children is seen late."""
    monkeypatch.setattr(supervision, "_DEATH_S", 30)
    path = {"begin": "/begin_weight_update", "send": "/update_weights_from_distributed"}[phase]

    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0) as fleet:
            sick = fleet.stubs[0]
            sick.answers[path] = sick.answers["/model_info"] = reset
            update = asyncio.create_task(fleet.publish(Weights(), 2))
            await fleet.until(lambda: sick.calls[path] and (phase == "begin" or sick.calls["/model_info"]))
            handles_of(fleet)[0].dead = "its process ended with signal 9"
            await update
            assert fleet.states == ["fenced", "serving"]
            assert fleet.servers[0].reason == f"weight update, {phase}: its process ended with signal 9"

    run(scenario())


@pytest.mark.parametrize("answer", [never, answering(503), reset])
def test_a_server_out_of_which_no_token_comes_is_given_up(tmp_path, answer):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=0.4) as fleet:
            fleet.stubs[0].answers["/health"] = answer
            await fleet.until(lambda: fleet.states[0] == "fenced")
            assert "no token came out of it for 0.4 s (engine.sglang.stall_timeout_s)" in fleet.servers[0].reason

    run(scenario())


def test_a_stalled_servers_requests_are_answered_by_the_other_under_the_same_id(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=0.4) as fleet:
            stub = fleet.stubs[0]
            stub.gate.clear()
            stub.answers["/health"] = never
            rollouts = await collect(fleet.engine, [group(7)])
            assert [(r.group_id, r.attempt, r.index) for r in rollouts] == [(7, 0, i) for i in range(4)]
            assert stub.calls["/generate"] == 1 and fleet.states == ["fenced", "serving"]
            await fleet.until(lambda: stub.running == 0)  # nobody waits there any more

    run(scenario())


def test_idle_servers_that_answer_are_left_alone(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), stall_timeout_s=2) as fleet:
            began = min(server.last_progress for server in fleet.servers)
            await fleet.until(lambda: all(stub.calls["/health"] >= 2 for stub in fleet.stubs))
            assert all(server.last_progress > began + 0.9 for server in fleet.servers), "a token is progress"
            assert fleet.states == ["serving", "serving"] and fleet.engine.fleet.fenced_count == 0

    run(scenario())


def test_restarts_are_bounded(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=3) as fleet:
            handle = handles_of(fleet)[0]
            handle.failing, handle.dead = 100, "gone"
            await fleet.until(lambda: any("stays away" in text for text in fleet.warnings))
            assert handle.launches == 1 + 3
            assert sum("could not be started again: no GPU is free" in text for text in fleet.warnings) == 3
            await asyncio.sleep(0.2)
            assert (handle.launches, handle.stops) == (1 + 3, 1 + 3) and fleet.states[0] == "starting"
            assert fleet.servers[0].reason == "gone; then it could not be started again: no GPU is free"
            assert len(await collect(fleet.engine, [group(0)])) == 4, "the other one serves"

    run(scenario())


def test_restarts_that_fail_at_first_are_repeated(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights()) as fleet:
            handle = handles_of(fleet)[0]
            handle.failing, handle.dead = 2, "gone"
            await fleet.until(lambda: handle.launches == 4 and fleet.states[0] == "serving")

    run(scenario())


def test_servers_that_run_already_come_back_when_they_answer_again(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with rig(tmp_path, updated=weights, max_restarts=1000) as fleet:
            stub = fleet.stubs[0]
            stub.answers["/server_info"] = stub.answers["/generate"] = reset
            for number in range(5):
                await collect(fleet.engine, [group(number)])
            await fleet.until(lambda: any("could not be started again" in text for text in fleet.warnings))
            assert "engine.sglang.urls" in fleet.warnings[-1]
            stub.answers.clear()
            await fleet.until(lambda: fleet.states == ["serving", "serving"])
            assert fleet.servers[0].version == 2

    run(scenario())


def pausing(stub):
    """As SGLang: nothing is generated between the two calls."""
    for path, change in (("/pause_generation", stub.gate.clear), ("/continue_generation", stub.gate.set)):

        async def answer(request, body, change=change):
            change()
            return web.json_response({"success": True})

        stub.answers[path] = answer


def test_a_server_that_runs_already_and_was_left_paused_starts(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            pausing(stub)
            stub.gate.clear()
            async with started(engine_of([stub.url], tmp_path)) as engine:
                assert engine.fleet.servers[0].state == "joining"

    run(scenario())


def test_a_server_that_runs_already_comes_back_from_an_update_that_failed(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with rig(tmp_path, updated=weights, max_restarts=1000) as fleet:
            stub = fleet.stubs[0]
            pausing(stub)
            stub.answers["/flush_cache"] = times(1, answering(500), answering(200, {}))
            await fleet.publish(weights, 3)
            await fleet.until(lambda: fleet.states == ["serving", "serving"])
            assert stub.calls["/flush_cache"] == 2 and fleet.engine.metrics()["engine/fenced"] == 1

    run(scenario())


def test_a_server_that_cannot_take_the_weights_when_it_comes_back_is_fenced_again(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, updated=weights, sync="disk", max_restarts=1000) as fleet:  # three take 10 ms
            handle = handles_of(fleet)[0]
            weights.broken = SyncError("no space left")
            handle.dead = "gone"
            await fleet.until(lambda: handle.launches >= 3)  # or it would wait, paused, for ever
            weights.broken = None
            await fleet.until(lambda: fleet.states == ["serving", "serving"])

    run(scenario())


def test_when_all_are_gone_everyone_is_told_why(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights()) as fleet:
            for stub in fleet.stubs:
                stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0), group(1)]))
            watching = asyncio.create_task(fleet.engine.ended())
            await fleet.until(lambda: all(stub.running for stub in fleet.stubs))
            for i, handle in enumerate(handles_of(fleet)):
                handle.dead, handle.failing = f"signal {9 + i}", 100
            gone = "all 2 SGLang servers are gone: server 0: .*; server 1: signal 10"
            with pytest.raises(EngineError, match=gone):
                await working
            with pytest.raises(EngineError, match=gone):
                await collect(fleet.engine, [group(2)])
            with pytest.raises(EngineError, match=gone):
                await fleet.publish(Weights(2), 2)
            assert "all 2 SGLang servers are gone" in str(await watching)

    run(scenario())


def test_a_watcher_that_fails_ends_the_fleet(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights()) as fleet:
            handles_of(fleet)[0].dead = RuntimeError("a fault of this program")
            error = await fleet.engine.ended()
            assert "supervision" in str(error) and "a fault of this program" in str(error)

    run(scenario())


def failing_at_first(starts):
    """Handles of servers, of which each fails so many starts."""
    handles = []

    def handle_of(url):
        handles.append(StubHandle(url))
        handles[-1].failing = starts[len(handles) - 1]
        return handles[-1]

    return handles, handle_of


def test_a_server_whose_first_start_fails_is_started_again_beside_the_others(tmp_path):
    handles, handle_of = failing_at_first([0, 2])

    async def scenario():
        async with managed(tmp_path, handles=handle_of) as fleet:
            await fleet.publish(Weights(1), 1)
            assert fleet.servers[0].state == "serving", "it waits for nobody"
            await fleet.until(lambda: fleet.states == ["serving", "serving"])
            assert handles[1].launches == 3
            assert "SGLang server 1 is given up: no GPU is free" in fleet.warnings

    run(scenario())


@pytest.mark.parametrize(
    ("starts", "options"),
    [([1, 1], {}), ([0, 1], {"max_restarts": 0}), ([0, 1], {"shares_gpus": True})],
    ids=["none starts", "no restarts", "GPUs shared with the trainer"],
)
def test_a_start_that_fails_ends_the_servers_that_did_start(tmp_path, starts, options):
    handles, handle_of = failing_at_first(starts)
    if options.pop("shares_gpus", False):
        options = {"expect": expected(tmp_path, shares_gpus=True)}

    async def scenario():
        with pytest.raises(EngineError, match="no GPU is free"):
            async with managed(tmp_path, handles=handle_of, **options):
                pass
        assert [handle.stops for handle in handles] == [1, 1]

    run(scenario())


def test_a_server_that_is_not_what_the_run_needs_ends_the_start_whoever_else_started(tmp_path):
    async def scenario():
        with pytest.raises(EngineError, match="serves a model of type 'llama'"):
            async with managed(tmp_path, {}, {"model_type": "llama"}):
                pass

    run(scenario())


def test_the_only_server_dies_and_the_run_waits_until_it_is_back(tmp_path):
    async def scenario():
        async with managed(tmp_path, count=1, updated=Weights(2)) as fleet:
            (handle,), (stub,) = handles_of(fleet), fleet.stubs
            stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await fleet.until(lambda: stub.running)
            handle.dead, handle.failing = "signal 9", 1
            await fleet.until(lambda: fleet.servers[0].restarts == 2)
            stub.gate.set()
            assert len(await working) == 4 and fleet.states == ["serving"]

    run(scenario())


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_distributed", "/flush_cache"])
def test_an_update_waits_for_the_only_server_where_it_ends_in_it(tmp_path, path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, count=1, updated=weights) as fleet:
            (handle,), (stub,) = handles_of(fleet), fleet.stubs

            async def die(request, body):
                stub.answers = dict.fromkeys((path, "/model_info", "/get_model_info"), reset)
                handle.dead = "signal 9"
                launch = handle.launch

                async def again():
                    stub.answers.clear()
                    return await launch()

                handle.launch = again
                return await reset(request, body)

            stub.answers[path] = die
            metrics = await fleet.publish(weights, 3)
            assert metrics["sync/servers"] == 1 and fleet.servers[0].version == 3
            assert fleet.engine.metrics()["engine/restarts"] == 1

    run(scenario())


def test_a_server_that_comes_back_and_never_serves_is_not_waited_for_for_ever(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, count=1, updated=weights, max_restarts=1000) as fleet:
            fleet.stubs[0].answers["/flush_cache"] = answering(500)
            with pytest.raises(SyncError, match=r"of version 3 .*flush the cache.*status 500"):
                await fleet.publish(weights, 3)
            assert handles_of(fleet)[0].launches <= 4

    run(scenario())


class Dying(StubHandle):
    """Its process ends before it listens."""

    async def launch(self):
        self.dead = "its process ended with exit code 1; log server_0.log: ImportError"
        return "http://127.0.0.1:9"


def test_a_process_that_ends_while_it_starts_is_an_error_with_its_reason(tmp_path):
    async def scenario():
        with pytest.raises(EngineError, match=r"server 0 did not start: its process ended with exit code 1; .*ImportE"):
            async with managed(tmp_path, count=1, handles=Dying):
                pass

    run(scenario())


def test_a_server_that_is_too_slow_to_start_names_the_option(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/server_info"] = answering(503)
            with pytest.raises(EngineError, match=r"not generate within \d+ s; raise engine\.sglang\.start_timeout_s"):
                async with managed(tmp_path, count=1, handles=lambda _: StubHandle(stub.url), start_timeout_s=0.3):
                    pass

    run(scenario())


def test_a_server_counts_as_started_when_it_generated(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/server_info"] = times(2, answering(503), answering(200, {"version": "0.5.23"}))
            stub.answers["/generate"] = times(2, answering(503), answering(200, {}))
            async with managed(tmp_path, count=1, handles=lambda _: StubHandle(stub.url)) as fleet:
                assert stub.calls["/generate"] == 3 and fleet.states == ["joining"]

    run(scenario())


def test_the_end_of_the_engine_ends_every_process_once_and_no_restart_follows(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights()) as fleet:
            handles = handles_of(fleet)
            await fleet.engine.close()
            fleet.engine.fleet.fence(fleet.servers[0], "too late")
            await asyncio.sleep(0.1)
            assert [(handle.launches, handle.stops) for handle in handles] == [(1, 1), (1, 1)]
            assert [server.client._session for server in fleet.servers] == [None, None]

    run(scenario())


def test_a_server_without_a_tokenizer_is_refused_where_answers_end_at_texts(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=1, expect=expected(tmp_path, reads_text=True)):
            raise AssertionError("it was taken")

    with pytest.raises(EngineError, match="--skip-tokenizer-init, and answers end at texts"):
        run(scenario())


def test_a_server_that_cannot_be_ended_keeps_no_other_from_its_end(tmp_path):
    class Stays(StubHandle):
        async def stop(self):
            await super().stop()
            raise EngineError("it stays")

    async def scenario():
        async with managed(tmp_path, handles=Stays) as fleet:
            await fleet.engine.close()
            assert [handle.stops for handle in handles_of(fleet)] == [1, 1]
            assert [server.client._session for server in fleet.servers] == [None, None]

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "awaited"),
    [
        ({}, True),
        ({"has_served": False}, False),
        ({"restarts": 4}, True),
        ({"restarts": 5}, False),
        ({"unserved_starts": 2}, True),
        ({"unserved_starts": 3}, False),
    ],
)
def test_a_run_waits_for_a_server_that_served_and_may_be_started_again(tmp_path, changes, awaited):
    async def scenario():
        async with managed(tmp_path, count=1) as fleet:
            supervisor, (server,), (handle,) = fleet.engine._supervision, fleet.servers, handles_of(fleet)
            server.has_served, server.unserved_starts = True, 0
            for name, value in changes.items():
                setattr(server, name, value)
            assert supervisor._may_be_awaited(server) is awaited
            handle.restartable = False
            assert not supervisor._may_be_awaited(server)
            handle.restartable, supervisor._expected = True, expected(tmp_path, shares_gpus=True)
            assert not supervisor._may_be_awaited(server)

    run(scenario())
