"""What a canned server answers to whom and after which time, and the processes of a fleet, of which one can be lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import make_mocked_request

from megatron_daro.errors import EngineError
from megatron_daro.workshop.rehearse import canned_server
from megatron_daro.workshop.rehearse.canned_server import Bodies, CannedAnswers, CannedFleet, CannedServer

CANNED = CannedAnswers(
    lengths=[[20, 40], [10, 10]], ordinary=(50, 90), endings=[[1, 2], [3, 2]], vocabulary=100, delay_s=2.0
)


def test_bodies_take_turns_and_wait_by_their_longest_sample():
    bodies = Bodies(CANNED)
    (first, one), (second, two), (third, again) = (bodies.next(1, "a", streams=False) for _ in range(3))
    assert (first, second, third) == (2.0, 0.5, 2.0) and one == again != two
    ids = json.loads(one)[0]["output_ids"]
    assert all(50 <= token < 90 for token in ids[:-2]) and len(set(ids)) > 5
    meta = json.loads(one)[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 2} and meta["weight_version"] == "a"
    assert meta["weight_versions"] == [{"version": "a", "start": 0, "end": 20}]
    assert [pair[1:] for pair in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert all(-1 <= pair[0] <= 0 for pair in meta["output_token_logprobs"])
    bodies.next(1, "b", streams=False)
    assert {key[2] for key in bodies._ready} == {"b"}
    short = CannedAnswers(lengths=[[1]], ordinary=(50, 51), endings=[[1, 2]], vocabulary=100)
    assert json.loads(Bodies(short).next(1, "a", streams=False)[1])[0]["output_ids"] == [50, 1, 2]


def asked(path: str, body: dict[str, object] | None = None, server: CannedServer | None = None):
    """What a canned server answers."""

    async def ask():
        request = make_mocked_request("POST", path)
        given = SimpleNamespace(path=request.path, can_read_body=body is not None, json=lambda: read())

        async def read():
            return body

        return await (server or CannedServer(CANNED, Bodies(CANNED))).answer(given)  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_a_canned_server_answers_every_call():
    facts = json.loads(asked("/server_info").text)
    assert (
        facts["version"] == "0.5.23" and facts["max_total_num_tokens"] == 10**9 and facts["max_req_input_len"] == 10**6
    )
    assert json.loads(asked("/model_info").text) == {"model_type": "qwen2"}
    paths = json.loads(asked("/openapi.json").text)["paths"]
    assert {"/generate", "/begin_weight_update", "/end_weight_update", *canned_server.NEEDED_CALLS} <= set(paths)
    assert json.loads(asked("/pause_generation", {}).text) == {"success": True}


def test_a_canned_server_tells_prompts_from_the_engines_own_questions(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(canned_server.asyncio, "sleep", sleep)
    server = CannedServer(dataclasses.replace(CANNED, spread=(3.0, 3.0)), Bodies(CANNED))
    asked("/update_weight_version", {"new_version": "9"}, server)
    prompt = {"input_ids": [[1], [1]], "sampling_params": [{"max_new_tokens": 101}] * 2}
    answer = asked("/generate", prompt, server)
    answers = json.loads(answer.body)
    assert len(answers) == 2 and answers[0]["meta_info"]["weight_version"] == "9" and waits == [6.0]
    assert answer.content_type == "application/json"
    assert asked("/generate", {**prompt, "stream": True}, server).content_type == "text/event-stream"
    short = {"input_ids": [[1], [1]], "sampling_params": {"max_new_tokens": 100}}
    answers = json.loads(asked("/generate", short, server).text)
    assert len(answers) == 2 and len(answers[0]["meta_info"]["output_token_logprobs"]) == 100
    assert answers[0]["meta_info"]["output_token_logprobs"][:2] == [[-0.5, 3, None], [-0.5, 4, None]]
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length"} and len(waits) == 2
    one = json.loads(asked("/generate", {"input_ids": [1], "sampling_params": {}}, server).text)
    assert len(one["meta_info"]["output_token_logprobs"]) == 1
    for token, status in ((99, 200), (100, 400)):
        biased = {"input_ids": [1], "sampling_params": {"logit_bias": {str(token): 1}}}
        answer = asked("/generate", biased, server)
        assert answer.status == status
    assert "logit_bias must has keys" in json.loads(answer.text)["error"]["message"]


def test_servers_of_the_lost_node_are_a_process_of_their_own(monkeypatch):
    started: list[list[int]] = []
    killed: list[object] = []

    class Popen:
        def __init__(self, command, **_):
            ports = json.loads(command[-1])["ports"]
            started.append(ports)
            self.stdout = SimpleNamespace(readline=lambda: " ".join(map(str, ports)) if len(started) < 3 else "")

        def kill(self):
            killed.append(self)

        def wait(self):
            return None

    monkeypatch.setattr(canned_server.subprocess, "Popen", Popen)
    with canned_server.canned_fleet(3, [1], CANNED) as fleet:
        ports = [int(url.rpartition(":")[2]) for url in fleet.urls]
        assert started == [[ports[0], ports[2]], [ports[1]]] and len(fleet.ports) == 6 and fleet.clashes == 0
        assert all(url.startswith("http://127.0.0.1:") for url in fleet.urls) and set(ports) < set(fleet.ports)
        fleet.lose()
        assert killed == [fleet._processes[1]]
    assert killed[1:] == fleet._processes
    with (
        pytest.raises(EngineError, match="the canned servers did not start"),
        canned_server.canned_fleet(1, [], CANNED),
    ):
        pass
    CannedFleet(1, []).lose()
