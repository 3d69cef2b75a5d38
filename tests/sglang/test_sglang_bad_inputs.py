"""Servers and environments that cannot work: an error with the field and the fix, before the first weight update.

Stub servers say what no server here says of itself; what a real one must be asked is asked of a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading

import pytest
from cli_runs import run_cli
from sglang_pool import (
    VOCAB,
    collect,
    engine_of,
    expected,
    give,
    group,
    required_environment,
    save_policy,
    section,
    started,
    worst_difference,
)
from stub_server import ALL_CALLS, StubServer, answering
from transformers import AutoModelForCausalLM

from megatron_daro.engine.sglang.interpreter import check_environments
from megatron_daro.errors import ConfigError, EngineError, SyncError

ERROR, CONFIGURATION = 1, 2
URLS = "engine.sglang.urls"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def refusal(tmp_path, url, *, warnings=None, options=None, **expectation):
    """What the start of an engine of this one server says; empty where it starts."""
    engine = engine_of(
        [url], tmp_path, options=options, warnings=warnings, expect=expected(tmp_path, **expectation)
    )  # fmt: skip
    try:
        async with started(engine):
            return ""
    except EngineError as error:
        return str(error)


def refused(tmp_path, stub, prepare=lambda server: None, **options):
    """The same of a stub, which must not have been touched."""

    async def scenario():
        async with StubServer(**stub) as server:
            prepare(server)
            said = await refusal(tmp_path, server.url, **options)
            assert server.url in said or not said
            assert server.calls["/pause_generation"] == 0
            return said

    return run(scenario())


def no_sglang(content, status):
    def prepare(server):
        for path in ("/server_info", "/get_server_info", "/openapi.json"):
            server.answers[path] = answering(status, content)

    return prepare


def router(server):
    """What sglang-router 0.3.2 says of itself."""
    server.answers["/server_info"] = server.answers["/openapi.json"] = answering(404, "")
    server.answers["/get_server_info"] = answering(200, {"router_manager": True, "workers_count": 1})


@pytest.mark.parametrize("prepare", [no_sglang({"detail": "Not Found"}, 404), no_sglang("It works!", 200), router])
def test_a_url_of_something_else_is_no_sglang_server(tmp_path, prepare):
    said = refused(tmp_path, {}, prepare)
    assert said.startswith(URLS) and "0.5.18" in said


def test_a_url_that_speaks_no_http_is_named(tmp_path):
    async def greet(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    async def scenario():
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            said = await refusal(tmp_path, url)
            assert said.startswith(URLS) and url in said

    run(scenario())


def test_a_url_where_nothing_listens_is_named(tmp_path):
    async def scenario():
        async with StubServer() as server:
            await server.stop()
            return server.url, await refusal(tmp_path, server.url)

    url, said = run(scenario())
    assert said.startswith(URLS) and url in said


@pytest.mark.parametrize(
    ("stub", "expectation", "texts"),
    [
        pytest.param({"version": "0.5.17"}, {}, ["0.5.17", "0.5.18"], id="old"),
        pytest.param(
            {"paths": set(ALL_CALLS) - {"/abort_request", "/pause_generation"}}, {},
            ["/abort_request", "/pause_generation"], id="lacks-a-call",
        ),
        pytest.param(
            {"paths": set(ALL_CALLS) - {"/init_weights_update_group"}}, {},
            ["/init_weights_update_group", "engine.sglang.sync"], id="lacks-a-call-of-sync",
        ),
        pytest.param(
            {"model_type": "llama"}, {}, ["llama", "qwen2", "model.path"],
            id="other-model",
        ),
        pytest.param(
            {"vocabulary": 20}, {"vocabulary": 31},
            ["20", "31", "model.path"],
            id="smaller-vocabulary",
        ),
        pytest.param(
            {"vocabulary": 40}, {"vocabulary": 31},
            ["31", "model.path"],
            id="larger-vocabulary",
        ),
        pytest.param(
            {"info": {"max_req_input_len": 63}}, {},
            ["63", "64", "data.max_prompt_tokens"],
            id="short-prompts",
        ),
        pytest.param(
            {"info": {"context_length": 100}}, {},
            ["100", "128", "rollout.max_response_tokens"],
            id="short-context",
        ),
        pytest.param(
            {"version": "0.5.17", "model_type": "llama", "info": {"max_req_input_len": 1}}, {},
            ["0.5.17", "llama", "data.max_prompt_tokens"], id="all-at-once",
        ),
    ],
)  # fmt: skip
def test_a_server_that_cannot_do_what_the_run_needs_is_refused(tmp_path, stub, expectation, texts):
    said = refused(tmp_path, stub, **expectation)
    assert said.startswith(URLS) and "server 0" in said
    assert all(text in said for text in texts), said


@pytest.mark.parametrize(("ids", "fits"), [([5, 6, 7], True), ([1, 5, 6, 7], True), ([5, 6, 8], False), ([], False)])
def test_a_servers_tokenizer_must_be_that_of_the_model(tmp_path, ids, fits):
    def prepare(server):
        server.answers["/tokenize"] = answering(200, {"tokens": ids})

    said = refused(tmp_path, {"info": {"skip_tokenizer_init": False}}, prepare, encode=lambda text: [5, 6, 7])
    assert (said == "") == fits
    if not fits:
        assert "tokenizer" in said and "model.path" in said


def test_what_fits_is_accepted_and_a_version_that_nobody_tried_is_a_warning(tmp_path):
    warnings = []
    options = {"vocabulary": 31, "encode": lambda text: [], "warnings": warnings}
    assert refused(tmp_path, {}, **options) == "" and warnings == []
    assert refused(tmp_path, {"version": "0.6.0"}, **options) == ""
    (warning,) = warnings
    assert "server 0" in warning and "0.6.0" in warning


def test_another_way_of_sync_needs_other_calls(tmp_path):
    stub = {"paths": set(ALL_CALLS) - {"/init_weights_update_group", "/update_weights_from_distributed"}}
    assert refused(tmp_path, stub, options=section(sync="disk")) == ""
    assert "/update_weights_from_distributed" in refused(tmp_path, stub)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_server_of_another_vocabulary_or_size_is_refused(pool, tmp_path):
    server = pool.up()[0]

    async def scenario():
        for vocabulary in (VOCAB - 1, VOCAB + 1):
            said = await refusal(tmp_path, server.url, vocabulary=vocabulary)
            assert "vocabulary" in said and str(vocabulary) in said
        assert await refusal(tmp_path, server.url, vocabulary=VOCAB) == ""
        wider = save_policy(tmp_path / "wider", 0, hidden=48)
        async with started(engine_of([server.url], tmp_path, expect=expected(tmp_path / "wider"))) as engine:
            with pytest.raises(SyncError) as caught:
                await give(engine, wider, 1)
            assert "model.path" in str(caught.value), caught.value
        # It is left paused, with weights of two models; what the next run gives it is whole again.
        right = AutoModelForCausalLM.from_pretrained(server.model)
        async with started(engine_of([server.url], tmp_path, expect=expected(server.model))) as engine:
            await give(engine, right, 2)
            assert worst_difference(right, await collect(engine, [group(0)])) <= 1e-4

    run(scenario())


def arguments_of(tiny, tmp_path, **options):
    """Of `megatron-daro train` with these options of SGLang servers."""
    config = tiny.write_config(tmp_path / "bad.yaml", {"engine": {"kind": "sglang", "replicas": 1, "sglang": options}})
    return ["train", config, f"trainer.run_dir={tmp_path / 'run'}"]


def test_train_with_an_interpreter_that_is_not_there(tiny, tmp_path, refused):
    missing = tmp_path / "env" / "bin" / "python"
    finished = refused(arguments_of(tiny, tmp_path, python=str(missing)))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert finished.code == CONFIGURATION
    assert "engine.sglang.python" in finished.last_line
    assert str(missing) in finished.last_line


@contextlib.contextmanager
def web_server():
    """Something that listens and is no SGLang server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_train_with_the_url_of_something_else(tiny, tmp_path):
    with web_server() as url:
        finished = run_cli(arguments_of(tiny, tmp_path, urls=[url]), tmp_path / "log")
    assert "Traceback" not in finished.stderr and not (tmp_path / "run" / "checkpoints").exists()
    assert finished.code == ERROR
    assert URLS in finished.last_line and url in finished.last_line


def test_arguments_that_the_installed_sglang_does_not_know_are_refused(tiny, tmp_path):
    python = required_environment() / "bin" / "python"
    options = section(python=python, arguments={"mem_fraction_statik": 0.5, "no_such_thing": 1})
    with pytest.raises(ConfigError) as caught:
        check_environments(options)
    for text in ("engine.sglang.arguments.mem_fraction_statik", "mem_fraction_static", "no_such_thing"):
        assert text in str(caught.value)
