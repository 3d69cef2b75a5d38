"""Answers as a server streams them: what is kept of those that break, and what is given back when one has ended."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import collect, group
from sglang_stub_fleets import first, run, serving
from stub_server import StubServer, answered, deltas, one_ends_early, sampling_of, written

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


@pytest.mark.parametrize(
    ("sends_deltas", "tokens", "count", "interval"),
    [(False, 2, 2, 7), (False, 2, 1, None), (True, 2, 2, 2), (True, 2, 1, 2), (True, 256, 2, 256), (True, 0, 2, None)],
)
def test_answers_are_streamed_as_the_server_can(tmp_path, sends_deltas, tokens, count, interval):
    """Whole, where it sends all so far every time; in parts, where it sends what is new; the same tokens anyhow."""

    async def scenario():
        stub = {"info": {"incremental_streaming_output": sends_deltas}}
        async with serving(tmp_path, stub, stream_tokens=tokens) as fleet:
            rollouts = await collect(fleet.engine, [group(0, count=count, max_new_tokens=6)])
            assert [r.tokens[3:].tolist() for r in rollouts] == [[3, 4, 5, 6, 7, 8]] * count
            assert rollouts[0].logprobs.tolist() == pytest.approx([-0.5 - 0.01 * i for i in range(6)])
            assert {r.finish_reason for r in rollouts} == {"length"} and rollouts[0].weight_version == 1
            (body,) = fleet.stubs[0].bodies
            assert body["stream"] == (interval is not None)
            assert body["sampling_params"].get("stream_interval") == interval

    run(scenario())


def broken_after(stub, counts, newer_from, name):
    """Streams of 12 tokens, told by two, that break when each sample has told so many; newer_from: the number of the
    first event that is told when the server has newer weights, which have this name."""

    async def answer(request, body):
        events = []
        for index, (content, count) in enumerate(zip(stub.generated(body), counts, strict=True)):
            told = [e for e in deltas(content, index, 2) if e["meta_info"]["output_token_logprobs_length"] <= count]
            for event in told[newer_from:] if newer_from else ():
                event["meta_info"]["weight_version"] = name
            events += told
        return await written(request, events, breaks=True)

    return answer


@pytest.mark.parametrize(
    ("newer_from", "name", "kept"), [(None, "", [12, 7, 0]), (2, "2", [12, 3, 0]), (2, "other", [12, 3, 0])]
)
def test_tokens_of_running_answers_outlive_their_server(tmp_path, newer_from, name, kept):
    """They go on elsewhere from those of which it is certain which weights they are of."""

    async def scenario():
        stub = {"info": {"incremental_streaming_output": True}}
        async with serving(tmp_path, stub, stub, stream_tokens=2) as fleet:
            stubs = fleet.stubs
            first(stubs[0], 1, broken_after(stubs[0], [12, 7, 0], newer_from, name))
            if newer_from:
                fleet.servers[0].versions.add(2)
            rollouts = await collect(fleet.engine, [group(0, count=3)])
            assert [r.response_length for r in rollouts] == [12] * 3
            asked = {len(ids) - 3: sampling_of(body) for s in stubs for body in s.bodies for ids in body["input_ids"]}
            assert {length: sampling["max_new_tokens"] for length, sampling in asked.items()} == {
                count: 12 - count for count in kept[1:]
            }
            counted = list(range(3, 15))
            assert rollouts[0].tokens[3:].tolist() == rollouts[2].tokens[3:].tolist() == counted
            resumed = rollouts[1].tokens[3:].tolist()
            assert resumed == counted[: kept[1]] + [(3 + kept[1] + i) % 30 for i in range(12 - kept[1])]
            assert len(rollouts[1].logprobs) == 12 and rollouts[1].loss_mask.all()
            assert {version for r in rollouts for version, _ in r.spans} == {1}
            assert [server.tokens_in_flight for server in fleet.servers] == [0, 0] and not fleet.engine._held

    run(scenario())


def test_all_tokens_of_one_that_was_aborted_while_it_waited(tmp_path):
    """`_handle_abort_req` (tokenizer_manager.py, 0.5.23) tells the last token, and the log-probs of all."""

    async def scenario():
        async with serving(tmp_path, {"info": {"incremental_streaming_output": True}}, stream_tokens=2) as fleet:
            stub = fleet.stubs[0]

            async def waited(request, body):
                content = stub.generated(body)[0]
                told = deltas(content, 0, 2)[:2]
                meta = content["meta_info"]
                meta = meta | {"finish_reason": {"type": "abort"}, "output_token_logprobs_length": 5}
                meta["output_token_logprobs"] = meta["output_token_logprobs"][:5]
                meta["weight_versions"] = [{"version": "1", "start": 0, "end": 5}]
                return await written(request, [*told, {"output_ids": [7], "meta_info": meta, "index": 0}])

            first(stub, 1, waited)
            (rollout,) = await collect(fleet.engine, [group(0, count=1)])
            assert rollout.response_length == 12 and len(stub.bodies[-1]["input_ids"][0]) == 3 + 5

    run(scenario())


@pytest.mark.parametrize("fault", ["tokens are lost", "tokens are lost, and it breaks", "counts wrongly"])
def test_events_that_do_not_fit_each_other_are_refused(tmp_path, fault):
    async def scenario():
        async with serving(tmp_path, {"info": {"incremental_streaming_output": True}}, stream_tokens=2) as fleet:
            stub = fleet.stubs[0]

            async def wrong(request, body):
                events = deltas(stub.generated(body)[0], 0, 2)
                if fault.startswith("tokens are lost"):
                    del events[1]
                else:
                    events[2]["output_ids"] = events[2]["output_ids"][:1]
                breaks = fault.endswith("breaks")
                return await written(request, events[:3] if breaks else events, breaks)

            first(stub, 1, wrong)
            (rollout,) = await collect(fleet.engine, [group(0, count=1)])
            assert rollout.tokens[3:].tolist() == list(range(3, 15))
            assert fleet.engine.metrics()["engine/retries"] == 1

    run(scenario())


def test_streams_that_break_after_tokens_are_no_failures_in_a_row(tmp_path):
    async def scenario():
        async with serving(tmp_path, {"info": {"incremental_streaming_output": True}}, stream_tokens=2) as fleet:
            first(fleet.stubs[0], 5, broken_after(fleet.stubs[0], [2], None, ""))
            (rollout,) = await collect(fleet.engine, [group(0, count=1)])
            assert rollout.response_length == 12 and fleet.engine.metrics()["engine/retries"] == 5
            assert fleet.states == ["serving"]

    run(scenario())
