"""Calls to one server: which failures are worth another try, and what a server says of itself."""

import asyncio
import time

import pytest
from aiohttp import web
from stub_server import StubServer, answering, never, reset, truncated

from megatron_daro.engine.sglang import client as client_module
from megatron_daro.engine.sglang.client import (
    DisconnectedError,
    RefusedError,
    ServerFacts,
    SGLangClient,
    UnreachableError,
    calls_to_servers,
    version_number,
)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def asked(stub, path="/generate", **options):
    async with SGLangClient(stub.url) as client:
        return await client.post(path, {"input_ids": [[1]]}, **{"timeout_s": 10, **options})


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (answering(500), UnreachableError, "status 500: told to"),
        (answering(503), UnreachableError, "status 503"),
        (answering(400), RefusedError, "status 400: told to"),
        (answering(422, {"detail": "no such field"}), RefusedError, "no such field"),
        (reset, DisconnectedError, "/generate"),
        (truncated, DisconnectedError, "Payload"),
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
        (answering(503), UnreachableError, "status 503: told to"),
        (streaming(b'data: {"index": 1}\n\n'), UnreachableError, "ended before its end was told"),
        (streaming(b'data: {"ind', end=False), DisconnectedError, "/generate"),
        (streaming(b'data: {"error": {"message": "too long", "code": 400}}\n\n'), RefusedError, "status 400: too long"),
        (streaming(b'data: {"error": {"message": "broken"}}\n\n'), UnreachableError, "status 500: broken"),
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


def test_an_answer_that_is_not_streamed_is_one_event():
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = answering(200, [1, 2])
            assert await streamed(stub) == [[1, 2]]

    run(scenario())


def test_a_server_that_never_answers_ends_at_the_deadline():
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = never
            with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
                await asked(stub, timeout_s=0.2)

    run(scenario())


def test_nothing_listening_is_unreachable():
    async def scenario():
        async with StubServer() as stub:
            await stub.stop()
            with pytest.raises(DisconnectedError, match=stub.url):
                await asked(stub)

    run(scenario())


def test_an_error_of_many_lines_becomes_one_short_line():
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = answering(400, {"error": {"message": "a\n" * 5000}})
            with pytest.raises(RefusedError) as caught:
                await asked(stub)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 500

    run(scenario())


def test_an_answer_that_is_no_json_is_none():
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/flush_cache"] = plain
            assert await client.post("/flush_cache", timeout_s=10) is None

    async def plain(request, body):
        from aiohttp import web

        return web.Response(text="Cache flushed.\n")

    run(scenario())


def test_facts_of_a_server():
    async def scenario(**options):
        async with StubServer(**options) as stub, SGLangClient(stub.url) as client:
            return await client.facts(timeout_s=10)

    facts = run(scenario())
    assert (facts.version, facts.device, facts.dtype, facts.max_tokens) == ("0.5.23", "cpu", "float32", 4096)
    assert (facts.max_input_tokens, facts.context_tokens, facts.tensor_parallel) == (4090, 4090, 1)
    assert facts.has_sessions and facts.has_checksums and not facts.has_tokenizer and not facts.newer_than_tested()
    assert run(scenario(version="0.6.0")).newer_than_tested()
    old = run(scenario(version="0.5.20", paths=["/generate"]))
    assert not old.has_sessions and not old.has_checksums


def test_the_older_name_of_server_info_is_asked_too():
    async def scenario():
        async with StubServer(version="0.5.18") as stub, SGLangClient(stub.url) as client:
            stub.answers["/server_info"] = answering(404)
            stub.answers["/get_server_info"] = answering(200, {"version": "0.5.18"})
            return await client.facts(timeout_s=10)

    assert run(scenario()).version == "0.5.18"


@pytest.mark.parametrize("info", [{"hello": "world"}, ["list"], 5])
def test_a_server_without_a_version_is_refused(info):
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/server_info"] = answering(200, info)
            with pytest.raises(RefusedError, match="no SGLang server"):
                await client.facts(timeout_s=10)

    run(scenario())


@pytest.mark.parametrize("answer", [answering(400), reset], ids=["refused", "reset"])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_abort_names_each_request_and_forgives_refusals(answer, count):
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/abort_request"] = answer
            await client.abort([f"a_{i}" for i in range(count)], timeout_s=10)
            assert {body["rid"] for body in stub.said["/abort_request"]} == {f"a_{i}" for i in range(count)}

    run(scenario())


SAYS_ALL = {
    "version": "0.5.22", "device": "cuda", "dtype": "bfloat16", "max_total_num_tokens": 1000, "max_req_input_len": 99,
    "context_length": 120, "tp_size": 4, "model_path": "/m", "skip_tokenizer_init": False, "quantization": "fp8",
    "incremental_streaming_output": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("info", "paths", "facts"),
    [
        (
            SAYS_ALL,
            {"/a": {}, "/b": {}},
            ("0.5.22", {"/a", "/b"}, "cuda", "bfloat16", 1000, 99, 120, 4, "/m", True, "fp8", True),
        ),
        ({"version": 5}, None, ("5", set(), "", "", 0, 0, 0, 1, "", True, "", False)),
        (
            {"version": "1", "internal_states": [{"max_total_num_tokens": 7}], "max_req_input_len": 3, "tp_size": None},
            {},
            ("1", set(), "", "", 7, 3, 3, 1, "", True, "", False),
        ),
        (
            {"version": "1", "internal_states": [], "context_length": None, "skip_tokenizer_init": True},
            {},
            ("1", set(), "", "", 0, 0, 0, 1, "", False, "", False),
        ),
    ],
)
def test_each_fact_is_where_the_server_says_it_and_may_be_missing(info, paths, facts):
    described = {} if paths is None else {"paths": paths}
    assert client_module._facts(info, described) == ServerFacts(facts[0], frozenset(facts[1]), *facts[2:])


def test_a_server_that_does_not_describe_its_calls_is_none():
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/openapi.json"] = answering(200, [1])
            with pytest.raises(RefusedError, match="no SGLang server"):
                await client.facts(timeout_s=10)

    run(scenario())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x" * 300, "x" * 300),
        (b"x" * 301, "x" * 300 + "..."),
        (b'{"error": "short"}', "short"),
        (b'{"message": "m"}', "m"),
        (b'{"error": {"code": 5}}', "{'code': 5}"),
        (b"a\xff  b\n", "a\N{REPLACEMENT CHARACTER} b"),
    ],
)
def test_what_an_error_says_is_taken_from_where_it_stands_and_cut(content, said):
    assert client_module._said(content) == said


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
            assert not client._answers

    run(scenario())


def test_as_many_calls_as_there_are_run_at_once():
    """aiohttp has 100 connections where nobody says otherwise."""

    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.gate.clear()
            body = {"input_ids": [[1]], "sampling_params": {"max_new_tokens": 1}}
            calls = [asyncio.create_task(client.post("/generate", body, timeout_s=20)) for _ in range(103)]
            while stub.running < 103:
                await asyncio.sleep(0.01)
            stub.gate.set()
            await asyncio.gather(*calls)

    run(scenario())


def test_thousands_of_aborts_take_few_connections():
    """They are what the event loop works for when the surplus of a large batch ends: 2.2 s for 4,096 at once."""
    most = at_once = 0

    async def slow(request, body):
        nonlocal most, at_once
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        return await answering(200)(request, body)

    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/abort_request"] = slow
            names = [f"a_{i}" for i in range(200)]
            await client.abort(names, timeout_s=10)
            assert sorted(body["rid"] for body in stub.said["/abort_request"]) == sorted(names)
            assert 1 < most <= 4

    run(scenario())


def test_calls_of_an_export_use_their_connections_again():
    """One to each server for all buckets; closed when the export is over."""
    ports = {}

    def from_port(name):
        async def answer(request, body):
            ports.setdefault(name, []).append(request.transport.get_extra_info("peername")[1])
            return await answering(200)(request, body)

        return answer

    async def scenario():
        async with StubServer() as one, StubServer() as two:
            stubs = {"one": one, "two": two}
            for name, stub in stubs.items():
                stub.answers["/update_weights_from_distributed"] = from_port(name)
            for _ in range(2):
                async with calls_to_servers() as post:
                    for bucket in range(3):
                        for stub in stubs.values():
                            await post(stub.url, "/update_weights_from_distributed", {"names": [str(bucket)]}, 10)

    run(scenario())
    for seen in ports.values():
        first, second = seen[:3], seen[3:]
        assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_a_server_that_does_not_answer_an_abort_is_not_asked_for_each_request():
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers["/abort_request"] = never
            began = time.monotonic()
            await client.abort([f"a_{i}" for i in range(100)], timeout_s=0.2)
            assert time.monotonic() - began < 2 and stub.calls["/abort_request"] < 10

    run(scenario())


def test_healthy_is_what_the_server_says():
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            before = await client.healthy(timeout_s=10)
            stub.answers["/health"] = answering(503)
            return before, await client.healthy(timeout_s=10)

    assert run(scenario()) == (True, False)


def test_close_may_be_repeated_and_ends_running_calls():
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/generate"] = never
            client = SGLangClient(stub.url)
            task = asyncio.create_task(client.post("/generate", timeout_s=20))
            while not stub.calls["/generate"]:
                await asyncio.sleep(0.01)
            await client.close()
            with pytest.raises(UnreachableError):
                await task
            await client.close()

    run(scenario())


@pytest.mark.parametrize(
    ("text", "number"),
    [("0.5.23", (0, 5, 23)), ("0.5.23.post1", (0, 5, 23)), ("0.6.0rc1", (0, 6, 0)), ("main", ()), ("", ())],
)
def test_version_number(text, number):
    assert version_number(text) == number


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({}, {"model_type": "qwen2"}),
        ({"/model_info": (404, {}), "/get_model_info": (200, {"model_type": "old"})}, {"model_type": "old"}),
        ({"/model_info": (200, [1])}, {}),
    ],
)
def test_what_a_server_says_of_its_model(answers, told):
    async def scenario():
        async with StubServer() as stub, SGLangClient(stub.url) as client:
            stub.answers = {path: answering(*answer) for path, answer in answers.items()}
            return await client.model_info(timeout_s=10)

    assert run(scenario()) == told
