"""Servers that die, stall, or do not start: each is given up, started again so often and no oftener, and comes back
with the policy's weights before it gets a request."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from sglang_pool import collect, engine_of, expected, group, section, started
from sglang_stub_fleets import StubHandle, Weights, rig, run
from stub_server import StubServer, answering, never, reset, times

from megatron_daro.errors import EngineError, SyncError

JOINING = [
    *("/server_info", "/openapi.json", "/generate", "/model_info"),  # is it up, can it generate, is it the right one
    *("/pause_generation", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"),
    *("/flush_cache", "/update_weight_version", "/continue_generation", "/generate"),
]


def managed(tmp_path, *stubs, **options):
    return rig(tmp_path, *stubs, **{"handles": StubHandle, "max_restarts": 5, **options})


def test_a_dead_idle_server_is_started_again_and_has_the_weights_before_any_request(tmp_path):
    async def scenario():
        weights = Weights(4)
        async with managed(tmp_path, updated=weights) as fleet:
            handle, stub = fleet.handles[0], fleet.stubs[0]
            weights.version = 5  # trained on meanwhile
            handle.dead = "its process ended with signal 9"
            await fleet.until(lambda: fleet.servers[0].state == "serving" and handle.launches == 2)
            assert stub.order == JOINING
            assert handle.stops == 1, "what is left of it must be ended first"
            assert fleet.servers[0].version == 5
            assert [t.name for t in weights.plans[-1].targets] == ["server 0"], "the other is not disturbed"
            assert fleet.stubs[1].order == []
            assert any("server 0" in text and "signal 9" in text for text in fleet.warnings)
            metrics = fleet.engine.metrics()
            assert (metrics["engine/servers"], metrics["engine/fenced"], metrics["engine/restarts"]) == (2, 1, 1)

    run(scenario())


def test_before_any_weights_it_waits_for_the_next_update(tmp_path):
    async def scenario():
        async with managed(tmp_path) as fleet:
            fleet.handles[0].dead = "gone"
            await fleet.until(lambda: fleet.handles[0].launches == 2 and fleet.states == ["joining", "joining"])
            await fleet.publish(Weights(1), 1)
            assert fleet.states == ["serving", "serving"]

    run(scenario())


def test_a_request_to_a_dead_server_is_answered_by_the_other(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=4000) as fleet:
            fleet.stubs[0].answers["/generate"] = reset
            fleet.handles[0].dead = "its process ended with signal 9"
            rollouts = await collect(fleet.engine, [group(0)])
            assert len(rollouts) == 4 and fleet.states == ["fenced", "serving"]
            assert "signal 9" in fleet.servers[0].reason

    run(scenario())


def test_requests_that_fail_are_explained_by_the_end_of_the_process(tmp_path):
    """It is seen late: a process counts as gone when all its children are."""

    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=4000) as fleet:
            fleet.stubs[0].answers["/generate"] = reset
            for number in range(5):
                assert len(await collect(fleet.engine, [group(number)])) == 4, "it was answered by the other"
            fleet.handles[0].dead = "its process ended with signal 9"
            await fleet.until(lambda: fleet.states == ["fenced", "serving"])
            assert "signal 9" in fleet.servers[0].reason

    run(scenario())


@pytest.mark.parametrize("path", ["/begin_weight_update", "/update_weights_from_distributed"])
def test_an_update_that_breaks_off_is_explained_by_the_end_of_the_process(tmp_path, path):

    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0) as fleet:
            sick = fleet.stubs[0]
            sick.answers[path] = sick.answers["/model_info"] = reset
            update = asyncio.create_task(fleet.publish(Weights(), 2))
            await fleet.until(lambda: sick.calls[path])
            fleet.handles[0].dead = "its process ended with signal 9"
            await update
            assert fleet.states == ["fenced", "serving"]
            assert "signal 9" in fleet.servers[0].reason

    run(scenario())


def test_a_stalled_servers_requests_are_answered_by_the_other_under_the_same_id(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=0, stall_timeout_s=0.4) as fleet:
            stub = fleet.stubs[0]
            stub.gate.clear()
            stub.answers["/health"] = never
            rollouts = await collect(fleet.engine, [group(7)])
            assert [(r.group_id, r.attempt, r.index) for r in rollouts] == [(7, 0, i) for i in range(4)]
            assert fleet.states == ["fenced", "serving"] and "stall_timeout_s" in fleet.servers[0].reason
            await fleet.until(lambda: stub.running == 0)  # nobody waits there any more

    run(scenario())


def test_idle_servers_that_answer_are_left_alone(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), stall_timeout_s=0.4) as fleet:
            await fleet.until(lambda: all(stub.calls["/health"] >= 3 for stub in fleet.stubs))
            assert fleet.states == ["serving", "serving"] and fleet.engine.metrics()["engine/fenced"] == 0

    run(scenario())


def test_restarts_are_bounded(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights(), max_restarts=3) as fleet:
            handle = fleet.handles[0]
            handle.failing, handle.dead = 100, "gone"
            await fleet.until(lambda: handle.launches == 1 + 3)
            await asyncio.sleep(0.3)
            assert (handle.launches, handle.stops) == (1 + 3, 1 + 3)
            assert sum("no GPU is free" in text for text in fleet.warnings) == 3
            assert fleet.warnings[-1].endswith("stays away: engine.sglang.max_restarts is 3")
            assert "gone" in fleet.servers[0].reason and "no GPU is free" in fleet.servers[0].reason
            assert len(await collect(fleet.engine, [group(0)])) == 4, "the other one serves"

    run(scenario())


def test_servers_that_run_already_come_back_when_they_answer_again(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with rig(tmp_path, updated=weights, max_restarts=1000) as fleet:
            stub = fleet.stubs[0]
            stub.answers["/server_info"] = stub.answers["/generate"] = reset
            for number in range(5):
                await collect(fleet.engine, [group(number)])
            await fleet.until(lambda: any("engine.sglang.urls" in text for text in fleet.warnings))
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
            handle = fleet.handles[0]
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
            watching = asyncio.create_task(fleet.engine.fatal_error())
            await fleet.until(lambda: all(stub.running for stub in fleet.stubs))
            for i, handle in enumerate(fleet.handles):
                handle.dead, handle.failing = f"signal {9 + i}", 100
            gone = "server 0: .*signal 9.* server 1: .*signal 10"
            with pytest.raises(EngineError, match=gone):
                await working
            with pytest.raises(EngineError, match=gone):
                await collect(fleet.engine, [group(2)])
            with pytest.raises(EngineError, match=gone):
                await fleet.publish(Weights(2), 2)
            assert "signal 10" in str(await watching)

    run(scenario())


def test_a_watcher_that_fails_ends_the_fleet(tmp_path):
    async def scenario():
        async with managed(tmp_path, updated=Weights()) as fleet:
            fleet.handles[0].dead = RuntimeError("a fault of this program")
            error = await fleet.engine.fatal_error()
            assert "a fault of this program" in str(error)

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
            assert fleet.states[0] == "serving", "it waits for nobody"
            await fleet.until(lambda: fleet.states == ["serving", "serving"])
            assert handles[1].launches == 3

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


def test_the_only_server_dies_and_the_run_waits_until_it_is_back(tmp_path):
    async def scenario():
        async with managed(tmp_path, count=1, updated=Weights(2)) as fleet:
            (handle,), (stub,) = fleet.handles, fleet.stubs
            stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await fleet.until(lambda: stub.running)
            handle.dead, handle.failing = "signal 9", 1
            await fleet.until(lambda: fleet.servers[0].restarts == 2)
            stub.gate.set()
            assert len(await working) == 4 and fleet.states == ["serving"]

    run(scenario())


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_distributed"])
def test_an_update_waits_for_the_only_server_where_it_ends_in_it(tmp_path, path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, count=1, updated=weights) as fleet:
            (handle,), (stub,) = fleet.handles, fleet.stubs

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


def test_an_update_that_all_left_goes_on_with_one_that_is_back(tmp_path):
    async def scenario():
        weights, sharing = Weights(2), expected(tmp_path, shares_gpus=True)  # so that nobody waits for a start
        async with managed(tmp_path, updated=weights, expect=sharing) as fleet:

            async def fails_later(request, body):
                await fleet.until(lambda: fleet.states[0] == "joining")
                return await answering(500)(request, body)

            fleet.stubs[0].answers["/pause_generation"] = times(1, answering(500), answering(200, {}))
            fleet.stubs[1].answers["/flush_cache"] = fails_later
            metrics = await fleet.publish(weights, 3)
            assert metrics["sync/servers"] == 1 and fleet.servers[0].version == 3

    run(scenario())


def test_what_an_update_began_with_one_process_it_does_not_go_on_with_in_the_next(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, updated=weights) as fleet:
            stub = fleet.stubs[0]
            stub.answers["/pause_generation"] = times(1, never, answering(200, {}))
            update = asyncio.create_task(fleet.publish(weights, 3))
            await fleet.until(lambda: stub.calls["/pause_generation"])
            fleet.engine.fleet.fence(fleet.servers[0], "killed")
            await update
            await fleet.until(lambda: fleet.states == ["serving", "serving"])
            assert stub.calls["/pause_generation"] == 2, "of this update, and of that which brought the weights"

    run(scenario())


def test_a_server_that_comes_back_and_never_serves_is_not_waited_for_for_ever(tmp_path):
    async def scenario():
        weights = Weights(2)
        async with managed(tmp_path, count=1, updated=weights, max_restarts=1000) as fleet:
            fleet.stubs[0].answers["/flush_cache"] = answering(500)
            with pytest.raises(SyncError, match="status 500"):
                await fleet.publish(weights, 3)
            assert fleet.handles[0].launches <= 4

    run(scenario())


class Dying(StubHandle):
    """Its process ends before it listens."""

    async def launch(self):
        self.dead = "its process ended with exit code 1; log server_0.log: ImportError"
        return "http://127.0.0.1:9"


def test_a_process_that_ends_while_it_starts_is_an_error_with_its_reason(tmp_path):
    async def scenario():
        with pytest.raises(EngineError, match=r"server 0.*exit code 1.*ImportE"):
            async with managed(tmp_path, count=1, handles=Dying):
                pass

    run(scenario())


def test_a_server_that_is_too_slow_to_start_names_the_option(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/server_info"] = answering(503)
            with pytest.raises(EngineError, match=r"engine\.sglang\.start_timeout_s"):
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
            handles = fleet.handles
            await fleet.engine.close()
            fleet.engine.fleet.fence(fleet.servers[0], "too late")
            await asyncio.sleep(0.1)
            assert [(handle.launches, handle.stops) for handle in handles] == [(1, 1), (1, 1)]

    run(scenario())


def test_a_server_that_cannot_be_ended_keeps_no_other_from_its_end(tmp_path):
    class Stays(StubHandle):
        async def stop(self):
            await super().stop()
            raise EngineError("it stays")

    async def scenario():
        async with managed(tmp_path, handles=Stays) as fleet:
            await fleet.engine.close()
            assert [handle.stops for handle in fleet.handles] == [1, 1]

    run(scenario())


async def started_with(tmp_path, reply, **options):
    """What is told of the start of a server that runs already, and answers the first /generate so."""
    async with StubServer() as stub:
        stub.answers["/generate"] = reply
        warnings = []
        engine = engine_of([stub.url], tmp_path, options=section(**options), warnings=warnings)
        try:
            with pytest.raises(EngineError) as raised:
                await engine.start()
        finally:
            await engine.close()
        return str(raised.value), warnings, stub.url


def test_a_server_whose_first_token_fails_ends_the_start_with_its_cause(tmp_path):
    """At once: `engine.sglang.start_timeout_s` is for servers that load."""
    words, _, url = run(started_with(tmp_path, answering(500, {"error": {"message": "CUDA error\x1b[2J"}})))
    assert url in words and r"status 500: CUDA error\x1b[2J" in words and words.isprintable()


def test_what_a_slow_start_waits_for_is_said_meanwhile_and_at_its_end(tmp_path):
    words, warnings, url = run(started_with(tmp_path, answering(503), start_timeout_s=1))
    assert "status 503: told to" in words and "start_timeout_s" in words
    assert 1 < len(warnings) < 6 and all(url in one and "status 503: told to" in one for one in warnings)


def test_a_server_that_describes_itself_in_another_form_is_refused(tmp_path):
    async def scenario():
        async with StubServer(info={"max_total_num_tokens": "many\x1b[2J"}) as stub:
            engine = engine_of([stub.url], tmp_path)
            with pytest.raises(EngineError, match="max_total_num_tokens: got 'many") as raised:
                await engine.start()
            assert stub.url in str(raised.value) and str(raised.value).isprintable()

    run(scenario())
