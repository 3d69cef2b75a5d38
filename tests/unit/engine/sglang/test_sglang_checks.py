"""What a server says of itself, compared with what the run needs; more in tests/sglang/test_sglang_bad_inputs.py."""

from __future__ import annotations

import pytest
from sglang_pool import engine_of, expected, started
from sglang_stub_fleets import StubHandle, run
from stub_server import StubServer, answering, times

from megatron_daro.errors import EngineError


def refusal(tmp_path, stub, **options):
    """What the start of an engine with this server raises, as text; empty where it starts."""

    async def scenario():
        async with stub:
            try:
                async with started(engine_of([stub.url], tmp_path, **options)):
                    return ""
            except EngineError as error:
                return str(error)

    return run(scenario())


@pytest.mark.parametrize(
    ("vocabulary", "version", "taken"), [(31, "0.5.20", True), (32, "0.5.20", False), (32, "0.5.19", True)]
)
def test_the_vocabulary_is_compared_where_a_server_survives_the_question(tmp_path, vocabulary, version, taken):
    """A stub has 31 tokens; older servers die of a bias beyond their vocabulary."""
    said = refusal(tmp_path, StubServer(version=version), expect=expected(tmp_path, vocabulary=vocabulary))
    assert (said == "") == taken


@pytest.mark.parametrize("answer", [answering(500), answering(400)])
def test_a_server_that_does_not_say_its_vocabulary_is_used(tmp_path, answer):
    stub = StubServer()
    stub.answers["/generate"] = times(1, answering(200, {}), answer)  # the first one asks for a token
    assert refusal(tmp_path, stub, expect=expected(tmp_path, vocabulary=40)) == ""


def test_a_server_that_does_not_say_how_it_writes_a_text_is_used(tmp_path):
    stub = StubServer(info={"skip_tokenizer_init": False})
    stub.answers["/tokenize"] = answering(500)
    assert refusal(tmp_path, stub, expect=expected(tmp_path, encode=lambda text: [1])) == ""


def test_a_server_without_a_tokenizer_is_refused_where_answers_end_at_texts(tmp_path):
    assert "rollout.stop" in refusal(tmp_path, StubServer(), expect=expected(tmp_path, reads_text=True))


def test_a_started_server_that_describes_itself_otherwise_is_refused_by_its_interpreter(tmp_path):
    async def scenario():
        async with StubServer() as stub:
            stub.answers["/server_info"] = answering(200, [])
            with pytest.raises(EngineError, match=r"engine\.sglang\.python: server 0 .*; allowed: SGLang 0\.5\.18 to"):
                await engine_of([StubHandle(stub.url)], tmp_path).start()

    run(scenario())


LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("info", "lacks"),
    [
        (LORA, ""),
        ({**LORA, "lora_target_modules": ["all"]}, ""),
        ({}, "--enable-lora"),
        ({**LORA, "max_lora_rank": 3}, "--max-lora-rank 4"),
        ({**LORA, "lora_target_modules": ["q_proj"]}, "--lora-target-modules q_proj v_proj"),
    ],
)
def test_a_server_that_cannot_take_the_adapters_is_refused_with_what_it_needs(tmp_path, info, lacks):
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    said = refusal(tmp_path, StubServer(info=info), expect=expected(tmp_path, adapter=adapter))
    assert lacks in said if lacks else not said


def test_a_server_that_still_loads_is_waited_for(tmp_path):
    stub = StubServer()
    stub.answers["/server_info"] = times(3, answering(503), answering(200, {"version": "0.5.23"}))
    assert refusal(tmp_path, stub) == "" and stub.calls["/server_info"] == 4
