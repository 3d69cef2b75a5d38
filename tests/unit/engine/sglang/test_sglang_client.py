"""Calls to one server: which failures are worth another try, and what a server says of itself."""

import asyncio
import time

import pytest
from aiohttp import web
from stub_server import StubServer, answering, never, reset, truncated

from megatron_daro.engine.sglang.client import (
    DisconnectedError,
    RefusedError,
    SGLangClient,
    UnreachableError,
)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def asked(stub, path="/generate", **options):
    async with SGLangClient(stub.url) as client:
        return await client.post(path, {"input_ids": [[1]]}, **{"timeout_s": 10, **options})


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (answering(500), UnreachableError, "500.*told to"),
        (answering(422, {"detail": "no such field"}), RefusedError, "no such field"),
        (reset, DisconnectedError, "/generate"),
        (truncated, DisconnectedError, "/generate"),
    ],
)
def test_every_failure_is_one_to_repeat_or_one_not_to(answer, error, text):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = answer
            with pytest.raises(error, match=text):
                await asked(stub)
            assert stub.calls["/generate"] == 1

    run(scenario())


def streaming(*parts, end=True):
    """Events as they are cut into parts of a body."""

    async def answer(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        if not end:
            request.transport.abort()
        return response

    return answer


async def streamed(stub, timeout_s=10):
    async with SGLangClient(stub.url) as client:
        return [event async for event in client.stream("/generate", {"stream": True}, timeout_s=timeout_s)]


def test_events_are_whole_however_they_are_cut():
    whole = b'data: {"index": 1}\n\ndata: {"text": "a\\n\\ndata: b"}\n\ndata: [DONE]\n\n'
    expected = [{"index": 1}, {"text": "a\n\ndata: b"}]

    async def scenario():
        async with StubServer() as stub:
            for size in (1, 2, 7, 18, 19, 20, 21, 1000):
                parts = [whole[i : i + size] for i in range(0, len(whole), size)]
                stub.answers["/generate"] = streaming(*parts)
                assert await streamed(stub) == expected, size

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (streaming(b'data: {"index": 1}\n\n'), UnreachableError, "/generate"),
        (streaming(b'data: {"ind', end=False), DisconnectedError, "/generate"),
        (streaming(b'data: {"error": {"message": "too long", "code": 400}}\n\n'), RefusedError, "too long"),
        (streaming(b'data: {"error": {"message": "broken"}}\n\n'), UnreachableError, "broken"),
    ],
)
def test_what_goes_wrong_in_a_stream_is_one_to_repeat_or_one_not_to(answer, error, text):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = answer
            with pytest.raises(error, match=text):
                await streamed(stub)

    run(scenario())


async def all_events(client):
    return [event async for event in client.stream("/generate", {"stream": True}, timeout_s=60)]


READS = {"stream": all_events, "body": lambda client: client.post("/generate", {}, timeout_s=60)}


@pytest.mark.parametrize("kind", READS)
def test_what_is_being_read_when_the_client_is_closed_fails(kind):
    async def scenario():
        begun = asyncio.Event()

        async def never_ends(request, body):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'data: {"index": 1}\n\n')
            begun.set()
            await asyncio.sleep(60)

        async with StubServer() as stub:
            stub.answers["/generate"] = never_ends
            client = SGLangClient(stub.url)
            reading = asyncio.create_task(READS[kind](client))
            await begun.wait()
            await asyncio.sleep(0.05)  # what was written is there
            await client.close()
            with pytest.raises(DisconnectedError, match="/generate"):
                await asyncio.wait_for(reading, 10)

    run(scenario())


def test_a_server_that_never_answers_ends_at_the_deadline():
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = never
            with pytest.raises(UnreachableError, match="/generate"):
                await asked(stub, timeout_s=0.2)

    run(scenario())


def test_nothing_listening_is_unreachable():
    async def scenario():
        async with StubServer() as stub:
            await stub.stop()
            with pytest.raises(DisconnectedError, match=stub.url):
                await asked(stub)

    run(scenario())


def test_older_names_of_what_a_server_says_of_itself_are_asked_too():
    async def scenario():
        async with StubServer(version="0.5.18") as stub, SGLangClient(stub.url) as client:
            stub.answers["/server_info"] = answering(404)
            stub.answers["/get_server_info"] = answering(200, {"version": "0.5.18"})
            stub.answers["/model_info"] = answering(404)
            stub.answers["/get_model_info"] = answering(200, {"model_type": "old"})
            return (await client.facts(timeout_s=10)).version, await client.model_info(timeout_s=10)

    assert run(scenario()) == ("0.5.18", {"model_type": "old"})


@pytest.mark.parametrize("answer", [answering(400), reset], ids=["refused", "reset"])
def test_abort_names_each_request_and_forgives_refusals(answer):
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/abort_request"] = answer
            await client.abort([f"a_{i}" for i in range(30)], timeout_s=10)
            assert {body["rid"] for body in stub.said["/abort_request"]} == {f"a_{i}" for i in range(30)}

    run(scenario())


def test_a_call_is_json_past_any_proxy_and_leaves_nothing_behind(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def told(request, body):
        return web.json_response([request.content_type, body])

    async def scenario():
        async with StubServer() as stub, SGLangClient(f"{stub.url}/") as client:
            assert client.url == stub.url
            stub.answers["/generate"] = told
            assert await client.post("/generate", timeout_s=10) == ["application/json", {}]
            assert await client.post("/generate", {"a": 1}, timeout_s=10) == ["application/json", {"a": 1}]
            assert await client.get("/generate", timeout_s=10) == ["application/octet-stream", None]

    run(scenario())


def test_a_server_that_does_not_answer_an_abort_is_not_asked_for_each_request():
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/abort_request"] = never
            began = time.monotonic()
            await client.abort([f"a_{i}" for i in range(100)], timeout_s=0.2)
            assert time.monotonic() - began < 2 and stub.calls["/abort_request"] < 10

    run(scenario())
