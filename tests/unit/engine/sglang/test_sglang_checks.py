"""What a server says of itself, compared with what the run needs: which are used, and what is said of the others."""

from __future__ import annotations

import asyncio

import pytest
from sglang_pool import engine_of, expected, started
from sglang_stub_fleets import StubHandle, Weights, rig, run
from stub_server import ALL_CALLS, StubServer, answering, reset, times

from megatron_daro.engine.sglang import supervision
from megatron_daro.engine.sglang.client import ServerFacts
from megatron_daro.errors import EngineError


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for name in ("_WATCH_S", "_POLL_S"):
        monkeypatch.setattr(supervision, name, 0.02)


async def told_of(tmp_path, stub, *, handle=None, **options):
    """What the start of an engine with this server says: the error, or its warnings."""
    warnings = []
    async with stub:
        servers = [stub.url if handle is None else handle(stub.url)]
        try:
            async with started(engine_of(servers, tmp_path, warnings=warnings, **options)) as engine:
                assert [server.state for server in engine.fleet.servers] == ["joining"]
        except EngineError as error:
            return str(error)
    return warnings


def facts(**changes):
    plain = {
        "version": "0.5.23", "calls": frozenset(ALL_CALLS), "device": "cuda", "dtype": "bfloat16", "max_tokens": 4096,
        "max_input_tokens": 4090, "context_tokens": 4090, "tensor_parallel": 1, "model_path": "/m",
        "has_tokenizer": True,
    }  # fmt: skip
    return ServerFacts(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"version": "0.5.18"}, []),
        ({"version": "main"}, []),
        ({"version": "0.5.17"}, ["it is SGLang 0.5.17; allowed: 0.5.18 or newer"]),
        (
            {"calls": frozenset(ALL_CALLS) - {"/flush_cache", "/generate"}},
            ["SGLang 0.5.23 lacks /generate, /flush_cache; allowed: 0.5.18 or newer, over HTTP"],
        ),
        (
            {"calls": frozenset(ALL_CALLS) - {"/update_weights_from_disk"}},
            [
                "SGLang 0.5.23 lacks /update_weights_from_disk; allowed: 0.5.18 or newer, over HTTP, or another "
                "engine.sglang.sync"
            ],
        ),
    ],
)
def test_versions_and_calls_that_are_too_few_are_named(changes, said):
    assert supervision._version_problems(facts(**changes), ("/update_weights_from_disk",)) == said


@pytest.mark.parametrize(
    ("prompt", "context", "words"),
    [
        (64, 120, ""),  # 8 tokens that it keeps to itself
        (0, 0, ""),  # it does not say
        (63, 63, "its longest prompt is 63 tokens, data.max_prompt_tokens is 64; raise"),
        (1, 500, "its longest prompt is 1 tokens"),
        (64, 119, "its context is about 119 tokens, prompt and answer may be 128; raise"),
        (0, 1, "its context is about 1 tokens"),
    ],
)
def test_prompts_and_answers_that_are_too_long_for_a_server_are_named(tmp_path, prompt, context, words):
    given = facts(max_input_tokens=prompt, context_tokens=context)
    problems = supervision._length_problems(given, expected(tmp_path))  # 64 tokens of a prompt, 128 of both
    assert len(problems) == bool(words) and words in "".join(problems)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.5.23", "quantization": "fp8"}, ""),
        ({"version": "0.5.24", "quantization": "fp8"}, ""),
        ({"version": "0.5.22", "quantization": "fp8"}, "SGLang 0.5.22 cannot tell which of its matrices are fp8"),
        (
            {"quantization": "fp8", "calls": frozenset()},
            "cannot tell which of its matrices are fp8 blocks; allowed with engine.sglang.fp8_blocks: 0.5.23 or newer",
        ),
        ({"quantization": "awq"}, "--quantization 'fp8' --load-format 'dummy' --json-model-override-args '{"),
    ],
)
def test_servers_that_do_not_take_blocks_are_named(changes, words):
    problems = supervision._block_problems(facts(**changes))
    assert len(problems) == bool(words) and words in "".join(problems)


def test_everything_that_is_wrong_with_a_server_is_said_at_once(tmp_path):
    stub = {"version": "0.5.17", "model_type": "llama", "info": {"max_req_input_len": 9}}
    said = run(told_of(tmp_path, StubServer(**stub)))
    assert said.startswith("engine.sglang.urls: server 0 at http://127.0.0.1:")
    for words in ("cannot be used: it is SGLang 0.5.17", "; its longest prompt is 9", "; it serves a model of type"):
        assert words in said
    assert run(told_of(tmp_path, StubServer(**stub), handle=StubHandle)).startswith("engine.sglang: server 0 at http:")


@pytest.mark.parametrize(("version", "warned"), [("0.5.23", False), ("0.5.24", True)])
def test_a_version_that_nobody_tried_is_a_warning(tmp_path, version, warned):
    said = run(told_of(tmp_path, StubServer(version=version)))
    assert said == ([f"server 0 is SGLang {version}, newer than 0.5.23, the newest that was tested"] * warned)


@pytest.mark.parametrize(
    ("vocabulary", "version", "words"),
    [
        (31, "0.5.20", ""),
        (30, "0.5.20", "its model has a vocabulary of more than 30 tokens, that of model.path 30; serve the same"),
        (32, "0.5.20", "its model has a vocabulary of 31 tokens, that of model.path 32"),
        (32, "0.5.19", ""),  # it would die of the question
        (None, "0.5.20", ""),
    ],
)
def test_the_vocabulary_is_compared_where_a_server_survives_the_question(tmp_path, vocabulary, version, words):
    """A stub has 31 tokens."""
    said = run(told_of(tmp_path, StubServer(version=version), expect=expected(tmp_path, vocabulary=vocabulary)))
    assert words in said if words else said == []


@pytest.mark.parametrize("answer", [answering(500), answering(400), answering(400, {"message": "[0, 5]"})])
def test_a_server_that_does_not_say_its_vocabulary_is_used(tmp_path, answer):
    stub = StubServer()
    stub.answers["/generate"] = times(1, answering(200, {}), answer)  # the first one asks for a token
    assert run(told_of(tmp_path, stub, expect=expected(tmp_path, vocabulary=40))) == []
    assert stub.said["/generate"][1] == {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "logit_bias": {"40": 0.0}},
    }


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        (answering(200, {"tokens": [1, 2, 3]}), True),
        (answering(200, {"tokens": [0, 1, 2, 3]}), True),  # behind a token that begins a text
        (answering(200, {"tokens": [0, 0, 1, 2, 3]}), False),
        (answering(200, {"tokens": [1, 2]}), False),
        (answering(500), True),
        (answering(200, {}), True),
        (answering(200, [1]), True),
    ],
)
def test_the_tokenizer_is_compared_where_a_server_has_one_and_says(tmp_path, answer, used):
    def asked(**info):
        stub = StubServer(info=info)
        stub.answers["/tokenize"] = answer
        said = run(told_of(tmp_path, stub, expect=expected(tmp_path, encode=lambda text: [1, 2, 3])))
        return said, stub.calls["/tokenize"]

    said, count = asked(skip_tokenizer_init=False)
    assert count == 1 and said == [] if used else "that of model.path as [1, 2, 3]...; serve the same model" in said
    assert asked(skip_tokenizer_init=True) == ([], 0)


def test_a_server_with_a_tokenizer_is_used_where_nobody_can_compare(tmp_path):
    info = {"skip_tokenizer_init": False}
    assert run(told_of(tmp_path, StubServer(info=info))) == []
    stub = StubServer(info=info, paths=[call for call in ALL_CALLS if call != "/tokenize"])
    assert run(told_of(tmp_path, stub, expect=expected(tmp_path, encode=lambda text: [1]))) == []
    assert stub.calls["/tokenize"] == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answering(404), r"is no SGLang server \(.*status 404.*\); allowed: SGLang 0\.5\.18 or newer, itself"),
        (reset, r"does not answer \(.*\); allowed: SGLang servers that run"),
        (answering(500), r"does not answer \(.*status 500"),
    ],
)
def test_an_address_that_is_no_server_is_named_at_once(tmp_path, answer, words):
    stub = StubServer()
    stub.answers |= dict.fromkeys(("/server_info", "/get_server_info"), answer)

    async def scenario():
        with pytest.raises(EngineError, match=rf"engine\.sglang\.urls: {stub.url}.* {words}"):
            async with started(engine_of([stub.url], tmp_path)):
                pass

    async def whole():
        async with stub:
            await scenario()

    run(whole())


def test_a_server_that_still_loads_is_waited_for(tmp_path):
    stub = StubServer()
    stub.answers["/server_info"] = times(3, answering(503), answering(200, stub._info))
    assert run(told_of(tmp_path, stub)) == [] and stub.calls["/server_info"] == 4


def test_what_is_waited_for_at_the_first_token_is_the_first_token(tmp_path):
    """One that is woken and one that dies of the request."""
    stub = StubServer()
    assert run(told_of(tmp_path, stub)) == []
    assert stub.order[2:4] == ["/continue_generation", "/generate"]
    assert stub.bodies[0] == {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}

    class DiesOfIt(StubHandle):
        async def launch(self):
            self.dead = "its process ended with signal 11"
            return self.url

    stub = StubServer()
    stub.answers["/generate"] = reset
    said = run(told_of(tmp_path, stub, handle=DiesOfIt))
    assert said == "server 0 did not start: its process ended with signal 11"
    assert "/continue_generation" not in stub.order, "it was just started"


def test_pauses_between_starts_double_up_to_a_longest_one(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_RESTART_PAUSE_S", 10.0)
    monkeypatch.setattr(supervision, "_LONGEST_RESTART_PAUSE_S", 50.0)
    pauses, sleep = [], asyncio.sleep

    async def at_once(seconds, *result):
        if seconds >= 10:
            pauses.append(seconds)
        return await sleep(0 if seconds >= 10 else seconds, *result)

    async def scenario():
        handles = []
        made = lambda url: handles.append(StubHandle(url)) or handles[-1]
        async with rig(tmp_path, count=2, handles=made, max_restarts=9, updated=Weights()) as fleet:
            monkeypatch.setattr(asyncio, "sleep", at_once)
            handles[0].failing, handles[0].dead = 5, "gone"
            await fleet.until(lambda: fleet.servers[0].restarts == 6 and fleet.states == ["serving", "serving"])
            assert [text for text in fleet.warnings if "could not be started again: no GPU is free" in text]

    run(scenario())
    assert pauses == [10.0, 20.0, 40.0, 50.0, 50.0]


@pytest.mark.parametrize("idle_after", [2, None])
def test_a_server_that_does_not_become_idle_in_time_keeps_no_memory(tmp_path, monkeypatch, idle_after):
    monkeypatch.setattr(supervision, "_IDLE_POLL_S", 0.01)

    async def scenario():
        async with rig(tmp_path, sync="disk", updated=Weights(), sync_timeout_s=30 if idle_after else 1) as fleet:
            busy = times(idle_after or 10**6, answering(400), answering(200, {}))
            fleet.stubs[0].answers["/flush_cache"] = busy
            await fleet.engine.release_memory()
            assert fleet.states == ["joining" if idle_after else "fenced", "joining"]
            if not idle_after:
                assert "giving its memory to the trainer: http" in fleet.servers[0].reason

    run(scenario())
