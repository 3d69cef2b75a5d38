"""Answers as a server streams them: what is kept of those that break, and what is given back when one has ended."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import collect, group
from sglang_stub_fleets import first, run, serving
from stub_server import StubServer, answered, one_ends_early, written

from megatron_daro.errors import EngineError

pytestmark = pytest.mark.usefixtures("no_pauses")


def test_what_an_answer_holds_is_given_back_when_it_has_ended(tmp_path):
    """So that the next group begins although one answer of the first goes on."""

    async def scenario():
        async with serving(tmp_path, count=1, max_tokens_in_flight=60) as fleet:
            (stub,), (server,) = fleet.stubs, fleet.servers
            # 3 of the prompt and 4 of 16: a sample is reckoned with 7 tokens before any answer came.
            stub.answers["/generate"], let_go_on = one_ends_early(stub)
            first = asyncio.create_task(collect(fleet.engine, [group(0, count=8, max_new_tokens=16)]))
            await fleet.until(lambda: stub.calls["/generate"] == 1)
            await fleet.until(lambda: server.tokens_in_flight == 7 * 7)
            second = asyncio.create_task(collect(fleet.engine, [group(1, count=1, max_new_tokens=2)]))
            stub.answers.clear()
            assert len(await second) == 1 and not first.done()
            stub.gate.clear()
            third = asyncio.create_task(collect(fleet.engine, [group(2, count=1, max_new_tokens=2)]))
            await fleet.until(lambda: stub.running == 1)
            third_holds = server.tokens_in_flight - 7 * 7
            let_go_on.set()
            assert len(await first) == 8 and server.tokens_in_flight == third_holds > 0
            stub.gate.set()
            assert len(await third) == 1 and server.tokens_in_flight == 0 and not fleet.engine._held

    run(scenario())


def test_a_stream_that_breaks_gives_everything_back_once_and_keeps_what_had_ended(tmp_path):
    async def broken(stub, request):
        return await written(request, [stub.one([1, 2]) | {"index": 0}], breaks=True)

    async def scenario():
        async with serving(tmp_path) as fleet:
            stub = fleet.stubs[0]
            first(stub, 1, lambda request, body: broken(stub, request))
            rollouts = await collect(fleet.engine, [group(0, count=3)])
            assert [r.index for r in rollouts] == [0, 1, 2]
            assert rollouts[0].tokens[3:].tolist() == [1, 2], "it is not asked for again"
            assert [len(body["input_ids"]) for stub in fleet.stubs for body in stub.bodies] == [2]
            assert [server.tokens_in_flight for server in fleet.servers] == [0, 0] and not fleet.engine._held

    run(scenario())


@pytest.mark.parametrize(("status", "asked"), [(503, 2), (400, 1)])
def test_a_status_within_a_stream_is_what_it_would_be_without(tmp_path, status, asked):
    async def refusing(request, body):
        answer = StubServer().one([], "abort")
        answer["meta_info"]["finish_reason"] |= {"status_code": status, "message": "queue is full"}
        return await answered(request, body, [answer] * 2)

    async def scenario():
        async with serving(tmp_path) as fleet:
            first(fleet.stubs[0], 1, refusing)
            if status == 503:
                assert len(await collect(fleet.engine, [group(0, count=2)])) == 2
            else:
                with pytest.raises(EngineError, match=r"refused the request.*status 400: queue is full"):
                    await collect(fleet.engine, [group(0, count=2)])
            assert sum(stub.calls["/generate"] for stub in fleet.stubs) == asked

    run(scenario())


@pytest.mark.parametrize(("sends_deltas", "count", "interval"), [(False, 2, 7), (False, 1, None), (True, 2, None)])
def test_answers_are_streamed_where_the_server_sends_them_whole(tmp_path, sends_deltas, count, interval):
    """And asked for at once of one that sends only what is new; the same tokens anyhow."""

    async def scenario():
        async with serving(tmp_path, {"info": {"incremental_streaming_output": sends_deltas}}) as fleet:
            rollouts = await collect(fleet.engine, [group(0, count=count, max_new_tokens=6)])
            assert [r.tokens[3:].tolist() for r in rollouts] == [[3, 4, 5, 6, 7, 8]] * count
            assert rollouts[0].logprobs.tolist() == pytest.approx([-0.5 - 0.01 * i for i in range(6)])
            assert {r.finish_reason for r in rollouts} == {"length"} and rollouts[0].weight_version == 1
            (body,) = fleet.stubs[0].bodies
            assert body["stream"] == (interval is not None)
            assert body["sampling_params"].get("stream_interval") == interval

    run(scenario())


def test_streams_that_break_after_an_answer_are_no_failures_in_a_row(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            stub = fleet.stubs[0]

            async def breaks_after_one(request, body):
                return await written(request, [stub.generated(body)[0] | {"index": 0}], breaks=True)

            first(stub, 5, breaks_after_one)
            rollouts = await collect(fleet.engine, [group(0, count=7)])
            assert [r.tokens[3:].tolist() for r in rollouts] == [list(range(3, 15))] * 7
            assert fleet.engine.metrics()["engine/retries"] == 5 and fleet.states == ["serving"]

    run(scenario())
