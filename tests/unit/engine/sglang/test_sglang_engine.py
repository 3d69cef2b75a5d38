"""Requests of the engine: what is asked again and where, what ends a run, and what is told to servers when it stops."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web
from sglang_pool import collect, engine_of, group
from sglang_stub_fleets import StubHandle, Weights, first, rig, run, serving
from stub_server import StubServer, answered, answering, reset, truncated

from megatron_daro.engine.sglang import fleet as fleet_module
from megatron_daro.errors import EngineError
from megatron_daro.sync.publish import WeightSync

UPDATE = "/update_weight_version"


def altered(stub, change):
    """As the stub answers, after `change(first sample)`."""

    async def answer(request, body):
        content = stub.generated(body)
        change(content[0])
        return await answered(request, body, content)

    return answer


def aborting(stub):
    """The stub ends every sample before its first token."""

    async def answer(request, body):
        return await answered(request, body, [stub.one([], "abort") for _ in body["input_ids"]])

    return answer


def test_a_group_is_one_request_with_all_its_samples(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1, decode=lambda ids: f"{len(ids)} tokens") as fleet:
            rollouts = await collect(fleet.engine, [group(5, count=3, max_new_tokens=6, temperature=0.7)])
            (body,) = fleet.stubs[0].bodies
            assert [len(ids) for ids in body["input_ids"]] == [3, 3, 3]
            assert body["sampling_params"][0]["temperature"] == 0.7 and body["return_logprob"]
            assert [r.index for r in rollouts] == [0, 1, 2]
            for r in rollouts:
                assert (r.group_id, r.prompt_id, r.weight_version, r.text) == (5, "p5", 1, "6 tokens")
                assert r.tokens[3:].tolist() == [3, 4, 5, 6, 7, 8]
                assert r.logprobs.tolist() == pytest.approx([-0.5 - 0.01 * i for i in range(6)])

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [answering(500), reset, truncated],
    ids=["500", "reset", "truncated"],
)
def test_a_request_that_fails_is_made_again(tmp_path, answer):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            first(fleet.stubs[0], 4, answer)
            rollouts = await collect(fleet.engine, [group(0)])
            assert [(r.group_id, r.index, r.response_length) for r in rollouts] == [(0, i, 12) for i in range(4)]
            assert fleet.stubs[0].calls["/generate"] == 5 and fleet.states == ["serving"]
            assert fleet.engine.metrics()["engine/retries"] == 4
            names = [body["rid"] for body in fleet.stubs[0].bodies]
            assert len(set(names)) == len(names), "a name that is used again would be refused"

    run(scenario())


def test_the_next_turn_of_a_conversation_goes_to_the_server_of_the_last(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:

            async def turn(group_id, index, turn_number):
                request = replace(group(group_id), indices=(index,), attempt=1, turn=turn_number)
                before = [stub.calls["/generate"] for stub in fleet.stubs]
                await collect(fleet.engine, [request])
                after = [stub.calls["/generate"] for stub in fleet.stubs]
                return [new > old for old, new in zip(before, after, strict=True)].index(True)

            fleet.servers[0].tokens_in_flight = 1  # so that the first turns go to the other one
            places = [await turn(*one, 0) for one in ((0, 0), (0, 1), (1, 0))]
            fleet.servers[0].tokens_in_flight, fleet.servers[1].tokens_in_flight = 0, 1
            later = [await turn(*one, 1) for one in ((0, 0), (0, 1), (1, 0))]
            assert places == later == [1, 1, 1]
            assert await turn(7, 0, 0) == 0 and await turn(8, 0, 3) == 0  # nothing is known of these

    run(scenario())


def test_a_request_that_failed_is_made_again_elsewhere(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            fleet.stubs[0].answers["/generate"] = answering(500)
            assert len(await collect(fleet.engine, [group(0)])) == 4
            assert [stub.calls["/generate"] for stub in fleet.stubs] == [1, 1]
            assert fleet.states == ["serving", "serving"]

    run(scenario())


def test_five_failures_in_a_row_fence_a_server(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            first(fleet.stubs[0], 5, answering(500))
            for number in range(5):
                assert fleet.states == ["serving", "serving"]
                assert len(await collect(fleet.engine, [group(number)])) == 4
            assert fleet.states == ["fenced", "serving"]
            assert "told to" in fleet.servers[0].reason

    run(scenario())


def test_answers_that_have_ended_but_do_not_fit_are_failures_in_a_row(tmp_path):
    """Of a stream each is known to have ended before it is known whether it fits."""

    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            first(fleet.stubs[0], 5, altered(fleet.stubs[0], lambda one: one["output_ids"].append(3)))
            with pytest.raises(EngineError, match="server 0"):
                await collect(fleet.engine, [group(0)])
            assert fleet.states == ["fenced"]

    run(scenario())


def test_a_moment_in_which_everything_fails_costs_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "_FAILING_S", 1000.0)

    async def scenario():
        async with serving(tmp_path) as fleet:
            for stub in fleet.stubs:
                first(stub, 12, answering(500))
            rollouts = await collect(fleet.engine, [group(i) for i in range(12)])
            assert len(rollouts) == 48 and fleet.states == ["serving", "serving"]

    run(scenario())


def test_failures_with_successes_between_do_not_add_up(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            for number in range(3):
                first(fleet.stubs[0], 3, answering(500))
                assert await collect(fleet.engine, [group(number)])
            assert fleet.states == ["serving"]

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "told"), [(lambda stub: answering(500), "told to"), (aborting, "aborted")], ids=["500", "aborted"]
)
def test_a_group_that_always_fails_comes_back_as_nothing_with_a_warning(tmp_path, failure, told):
    async def scenario():
        async with serving(tmp_path) as fleet:
            for stub in fleet.stubs:
                stub.answers["/generate"] = failure(stub)
            assert await collect(fleet.engine, [group(3)]) == []
            assert [stub.calls["/generate"] for stub in fleet.stubs] == [4, 4]
            assert any("group 3" in text and told in text for text in fleet.warnings)
            assert fleet.engine.metrics()["engine/retries"] == 8

    run(scenario())


def test_a_refused_request_ends_with_its_prompt_and_the_engine_goes_on(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            for stub in fleet.stubs:
                first(stub, 1, answering(400, {"error": {"message": "top_p must be in (0, 1]"}}))
            with pytest.raises(EngineError, match=r"p1.*top_p must be in"):
                await collect(fleet.engine, [group(1)])
            assert sum(stub.calls["/generate"] for stub in fleet.stubs) == 1
            for stub in fleet.stubs:
                stub.answers.clear()
            assert len(await collect(fleet.engine, [group(2)])) == 4
            assert fleet.states == ["serving", "serving"]

    run(scenario())


def test_a_request_that_was_cut_short_goes_on_from_its_tokens(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            stub = fleet.stubs[0]
            first(stub, 1, answering(200, [stub.one([1, 2], "abort"), stub.one([4, 5], "abort")]))
            stub.weight_version = "1"
            rollouts = await collect(fleet.engine, [group(0, count=2)])
            (again,) = stub.bodies
            assert [ids[3:] for ids in again["input_ids"]] == [[1, 2], [4, 5]]
            assert again["sampling_params"][0]["max_new_tokens"] == 10
            assert [r.tokens[3:5].tolist() for r in rollouts] == [[1, 2], [4, 5]]
            assert {(r.response_length, r.finish_reason) for r in rollouts} == {(12, "length")}

    run(scenario())


def test_samples_that_were_whole_are_not_asked_for_again(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            stub = fleet.stubs[0]
            answers = [stub.one([9] * 12), stub.one([1, 2, 3], "abort"), stub.one([4], "abort")]
            first(stub, 1, answering(200, answers))
            rollouts = await collect(fleet.engine, [group(0, count=3)])
            # Two lengths: two requests.
            assert sorted((len(b["input_ids"][0]), b["sampling_params"][0]["max_new_tokens"]) for b in stub.bodies) == [
                (4, 11),
                (6, 9),
            ]
            assert [r.index for r in rollouts] == [0, 1, 2] and rollouts[0].tokens[3:].tolist() == [9] * 12
            assert {r.response_length for r in rollouts} == {12}

    run(scenario())


@pytest.mark.parametrize(("given", "claimed"), [(1, "7"), (1, "default"), (0, "default")])
def test_answers_of_weights_that_a_server_was_never_given_are_refused(tmp_path, given, claimed):
    async def scenario():
        async with serving(tmp_path, updated=Weights(given)) as fleet:
            fleet.stubs[0].weight_version = claimed
            rollouts = await collect(fleet.engine, [group(0)])
            assert {r.weight_version for r in rollouts} == {given}
            assert [stub.calls["/generate"] for stub in fleet.stubs] == [1, 1]
            if claimed == "7":
                assert "version 7" in fleet.servers[0].reason and fleet.states == ["fenced", "serving"]

    run(scenario())


def test_abort_of_a_group_tells_its_server_and_gives_back_what_there_is(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            stub = fleet.stubs[0]
            stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0, count=2), group(1, count=2)]))
            await fleet.until(lambda: stub.running == 2)
            await fleet.engine.abort({1})
            await fleet.until(lambda: stub.running == 1)
            rid = next(b["rid"] for b in stub.bodies if b["input_ids"][0] == list(group(1).prompt.tokens))
            assert {body["rid"] for body in stub.said["/abort_request"]} == {f"{rid}_0", f"{rid}_1"}
            stub.gate.set()
            answered = {(r.group_id, r.finish_reason, r.response_length) for r in await working}
            assert answered == {(0, "length", 12), (1, "abort", 2)}

    run(scenario())


def test_an_abort_that_overtakes_its_request_is_sent_again(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            stub = fleet.stubs[0]
            stub.gate.clear()

            async def late(request, body):
                while not stub.calls["/abort_request"]:
                    await asyncio.sleep(0.01)
                return await stub.generate(request, body)

            stub.answers["/generate"] = late
            working = asyncio.create_task(collect(fleet.engine, [group(0, count=2)]))
            await fleet.until(lambda: stub.calls["/generate"] == 1)
            await fleet.engine.abort()
            assert {r.finish_reason for r in await asyncio.wait_for(working, 20)} == {"abort"}

    run(scenario())


def test_closing_the_stream_tells_the_servers_to_stop(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            fleet.stubs[1].gate.clear()
            stream = fleet.engine.generate([group(i) for i in range(8)])
            await anext(stream)
            await fleet.until(lambda: fleet.stubs[1].running > 0)
            await stream.aclose()
            assert fleet.stubs[1].calls["/abort_request"] >= 4
            await fleet.until(lambda: fleet.stubs[1].running == 0)
            assert all(server.tokens_in_flight == 0 for server in fleet.servers)
            fleet.stubs[1].gate.set()
            assert len(await collect(fleet.engine, [group(i) for i in range(4)])) == 16

    run(scenario())


def test_requests_wait_while_all_servers_change_their_weights(tmp_path):
    async def scenario():
        weights, may_go_on = Weights(1), asyncio.Event()
        async with serving(tmp_path, updated=weights) as fleet:

            async def slow(request, body):
                await may_go_on.wait()
                return web.json_response({})

            for stub in fleet.stubs:
                stub.answers["/flush_cache"] = slow
            updating = asyncio.create_task(fleet.publish(weights, 2))
            await fleet.until(lambda: all(stub.calls["/flush_cache"] for stub in fleet.stubs))
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await asyncio.sleep(0.1)
            assert not any(stub.bodies for stub in fleet.stubs)
            may_go_on.set()
            await updating
            assert {r.weight_version for r in await working} == {2}

    run(scenario())


def test_two_updates_at_once_are_made_one_after_the_other(tmp_path):
    async def scenario():
        weights = Weights()
        async with serving(tmp_path, count=1, updated=weights) as fleet:
            await asyncio.gather(*(fleet.publish(weights, v) for v in (2, 3)))
            order = [path for path in fleet.stubs[0].order if path in ("/pause_generation", "/continue_generation")]
            assert order == ["/pause_generation", "/continue_generation"] * 2
            assert [body["new_version"] for body in fleet.stubs[0].said[UPDATE]] == ["2", "3"]

    run(scenario())


def test_an_abort_ends_a_group_that_waits_for_a_server(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=1) as fleet:  # without weights it gets no request
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await asyncio.sleep(0.05)
            await fleet.engine.abort()
            assert await working == [] and not fleet.stubs[0].bodies
            await fleet.publish(Weights(), 1)
            assert len(await collect(fleet.engine, [group(1)])) == 4

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
            await fleet.until(lambda: stub.running == 0)
            await asyncio.sleep(0.02)
            assert working.cancelled() and stub.calls["/generate"] == 1

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


def test_the_end_of_the_engine_ends_those_who_wait(tmp_path):
    async def scenario():
        async with serving(tmp_path) as fleet:
            for stub in fleet.stubs:
                stub.gate.clear()
            working = asyncio.create_task(collect(fleet.engine, [group(0)]))
            await fleet.until(lambda: sum(stub.running for stub in fleet.stubs) == 1)
            await fleet.engine.close()
            await asyncio.wait({working})
            assert isinstance(working.exception(), EngineError) or working.result() == []
            with pytest.raises(EngineError, match="closed"):
                await collect(fleet.engine, [group(1)])
            await fleet.engine.close()

    run(scenario())


def test_an_engine_that_was_not_started_says_so(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            engine = engine_of([stub.url], tmp_path)
            with pytest.raises(EngineError):
                await collect(engine, [group(0)])
            with pytest.raises(EngineError):
                await WeightSync(Weights(), engine).publish(1)
            await engine.close()
            assert stub.calls.total() == 0

    run(scenario())
