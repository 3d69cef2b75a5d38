"""Agents over HTTP: what is trained is what was sampled, whatever they do to their history; what they do wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import aiohttp
import chat_tokenizers
import pytest
from agent_forms import Exact, answers_of, assert_exact, run, tokenizer
from group_forms import plain_rollout, through_parquet

from megatron_daro.errors import RolloutError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.types import Group, Prompt

CALL = (
    "<think>It is a product.</think>I compute.\n"
    '<tool_call>\n{"name": "mul", "arguments": {"b": 7, "a": 6}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "mul", "description": "a*b", "parameters": {"type": "object"}}}]
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "6*7?"}]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def says(read, request):
    return CALL if "tool_response" not in read else "<think>So it is</think> 42"


async def calculator(problem, api):
    """Keeps its history as agents do: without thinking, with a call's JSON in another order."""
    first = await api.say(ASKED, tools=TOOLS)
    [call] = first["tool_calls"]
    assert (first["content"], first["reasoning_content"]) == ("I compute.", "It is a product.")
    history = [
        *ASKED,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I compute. "}],
            "tool_calls": [{**call, "function": {"name": "mul", "arguments": '{"a":6,  "b":7}'}}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "42"},
    ]
    second = await api.say(history, tools=TOOLS)
    assert second["content"] == "42" and "tool_calls" not in second
    third = await api.say(
        [
            *history,
            {"role": "assistant", "content": "<think>So it is</think>\n42"},
            {"role": "user", "content": "Sure?"},
        ],
        tools=TOOLS,
    )
    assert third["content"] == "42"
    return {"reward": 0.5, "rewards": {"format": 0.25}, "correct": True}


@pytest.mark.parametrize("together", [True, False])
def test_a_history_that_says_the_same_is_one_sequence_of_the_sampled_tokens(tokens, together):
    rollouts, engine, counts, _ = run(tokens, calculator, says, together=together)
    assert_exact(rollouts, engine)
    for rollout in rollouts:
        assert (rollout.logprobs[rollout.loss_mask == 0] == 0).all()
        assert rollout.contexts == () and len(rollout.turns) == 3 and rollout.finish_reason == "stop"
        assert (rollout.verdict.correct, rollout.verdict.reward) == (True, 0.75)
        assert [report.tool_calls for report in rollout.reports] == [1, 0, 0]
    read = tokens.decode(rollouts[0].tokens.tolist(), skip_special_tokens=False)
    assert read.startswith("<|im_start|>system\nBe short.\n\n# Tools") and read.count("It is a product.") == 1
    assert counts["environment/tool_calls"] == 2 and counts["environment/failed"] == 0
    assert [len(call.indices) for call in engine.asked] == ([2, 2, 2] if together else [1] * 6)


@pytest.mark.parametrize("together", [True, False])
def test_what_was_rewritten_branched_or_asked_several_times_at_once_is_trained_once_each(tokens, together):
    async def agent(problem, api):
        first = await api.say(ASKED)
        again = [*ASKED, first, {"role": "user", "content": "Sure?"}]
        await asyncio.gather(api.say(again, max_tokens=20), api.say(again, max_tokens=20))  # at once
        third = await api.say([*ASKED, first, {"role": "user", "content": "Really?"}])  # from the middle
        status, body = await api.post(
            {"messages": [{"role": "user", "content": f"So far: {third['content']}"}], "n": 3, "max_tokens": 20}
        )
        assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 3 * len("Answer 1") + 3
        chosen = body["choices"][2]["message"]
        await api.say(
            [{"role": "user", "content": f"So far: {third['content']}"}, chosen, {"role": "user", "content": "!"}]
        )
        return 0.25

    count = iter(range(1, 1000))
    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: f"Answer {next(count) % 10}", together=together)
    assert_exact(rollouts, engine)
    for rollout in rollouts:
        # The first and one of the two at once; the other; the one from the middle; three anew, one of which goes on.
        assert len(rollout.contexts) == 6 and sum(rollout.contexts) == len(rollout.tokens)
        assert len(answers_of(rollout)) == 8 and len(rollout.turns) == 8
        group = Group(3, Prompt("p", "easy", "unit", text="6*7?", tokens=(257,)), (rollout,), (rollout.verdict,))
        read = through_parquet([RecordedGroup(group)])[0].group
        assert plain_rollout(read.rollouts[0]) == plain_rollout(replace(rollout, verdict=None))
        assert (rollout.verdict.correct, rollout.verdict.reward) == (False, 0.25)


def test_an_answer_that_was_cut_is_continued_from_its_tokens(tokens):
    async def agent(problem, api):
        status, body = await api.post({"messages": ASKED, "max_tokens": 4, "logprobs": True})
        [choice] = body["choices"]
        assert status == 200 and choice["finish_reason"] == "length" and choice["message"]["content"] == "Answ"
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["A", "n", "s", "w"]
        await api.say([*ASKED, choice["message"], {"role": "user", "content": "And?"}], max_completion_tokens=3)

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0,))
    assert_exact(rollouts, engine)
    assert "Answ<|im_end|>\n<|im_start|>user" in tokens.decode(rollouts[0].tokens.tolist(), skip_special_tokens=False)
    assert rollouts[0].verdict.reason == "match"  # the verifier judged the last answer


def test_an_answer_that_repeats_itself_is_cut_for_the_agent_and_in_what_is_trained(tokens):
    async def agent(problem, api):
        _, body = await api.post({"messages": ASKED})
        assert body["choices"][0]["finish_reason"] == "length"

    rollouts, engine, _, _ = run(tokens, agent, lambda *_: "no" * 50, indices=(0,), repetition=(8, 4))
    assert_exact(rollouts, engine)
    assert rollouts[0].finish_reason == "repetition" and rollouts[0].generated_length == 8


def test_requests_that_ask_for_what_is_not_served_are_refused_by_name(tokens):
    wrong = {
        "temperature": {"temperature": -1},
        "top_k": {"top_k": 5},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "response_format": {"response_format": {"type": "json_object"}},
        "logit_bias": {"logit_bias": {"5": 1}},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
        "max_tokens": {"max_tokens": 0},
        "n": {"n": 0},
        "stop": {"stop": [1]},
        "messages": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    }

    async def agent(problem, api):
        for name, body in wrong.items():
            status, reply = await api.post({"messages": ASKED, **body})
            assert status == 400 and reply["error"]["param"] == name and name in reply["error"]["message"], reply
        for body in (b"{", b"[]", b"", b'{"messages": []}', b'{"messages": [{"content": "x"}]}'):
            status, reply = await api.post(body)
            assert status == 400 and reply["error"]["type"] == "invalid_request_error"
        status, reply = await api.post({"messages": [{"role": "user", "content": "x" * 10_000_000}]})
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert (await api.post(b"x" * (33 * 2**20)))[0] == 413
        for key in ("", "sk-other", "EMPTY"):
            status, reply = await api.post({"messages": ASKED}, key=key)
            assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        neutral = {"user": "u", "top_k": -1, "presence_penalty": 0.0, "response_format": {"type": "text"}, "seed": 3}
        assert (await api.say(ASKED, **neutral, temperature=1, parallel_tool_calls=True))["content"] == "No"
        return "an answer of its own"

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "No", indices=(0,))
    assert_exact(rollouts, engine)
    assert len(engine.asked) == 1


def test_equal_seeds_draw_equal_random_numbers_that_no_other_answer_draws(tokens):
    async def agent(problem, api):
        for seed in ({}, {}, {}, {"seed": 2}, {"seed": 2}, {"seed": 3}):
            await api.say(ASKED, **seed)
        return "No"

    _, engine, _, _ = run(tokens, agent, lambda read, request: "No", indices=(0,))
    *others, first, second, third = [one.draw for one in engine.asked]
    assert first == second and len({*others, first, third}) == 5


def test_completions_go_on_from_the_tokens_of_a_text_and_of_ids(tokens):
    async def agent(problem, api):
        async def complete(prompt, **others):
            status, body = await api.post({"prompt": prompt, **others}, path="/completions")
            assert status == 200 and body["object"] == "text_completion"
            return body["choices"]

        [first] = await complete("1+1=", max_tokens=4, logprobs=0)
        assert first["text"] == "Answ" and first["finish_reason"] == "length"
        assert first["logprobs"]["tokens"] == ["A", "n", "s", "w"] and len(first["logprobs"]["token_logprobs"]) == 4
        [second] = await complete(f"1+1={first['text']}, so", stop="w")
        assert second["text"] == "Ans" and second["finish_reason"] == "stop"
        ids = tokens.encode("2+2=", add_special_tokens=False)
        one, _ = await complete(ids, n=2, max_tokens=3)
        [last] = await complete([*ids, *tokens.encode(one["text"] + "!", add_special_tokens=False)], max_tokens=3)
        assert last["text"] == "Ans"
        for body in ({"prompt": ["a", "b"]}, {"prompt": [10**6]}, {"prompt": "a", "echo": True}, {"messages": ASKED}):
            assert (await api.post(body, path="/completions"))[0] == 400

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0,))
    assert_exact(rollouts, engine)
    read = [tokens.decode(list(one.prompt.tokens)) for one in engine.asked]
    assert read == ["1+1=", "1+1=Answ, so", "2+2=", "2+2=", "2+2=Ans!"]
    assert len(rollouts[0].contexts) == 4  # the first token of a rollout is the problem's; then three that were begun


def test_another_address_than_loopbacks_says_nothing_without_a_key(tokens):
    async def agent(problem, api):
        assert api.base_url.startswith("http://127.0.0.2:")
        async with aiohttp.ClientSession() as http:
            for path in ("/health", "/v1/models"):
                async with http.get(api.base_url.removesuffix("/v1") + path) as reply:
                    assert reply.status == 401
        await api.say(ASKED)

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "No", indices=(0,), host="127.0.0.2")
    assert_exact(rollouts, engine)
    with pytest.raises(RolloutError, match=r"environment\.host: got 192\.0\.2\.1"):
        run(tokens, agent, lambda read, request: "No", indices=(0,), host="192.0.2.1")


def test_a_socket_of_too_long_a_path_ends_the_run(tokens):
    with pytest.raises(RolloutError, match=r"environment\.sandbox.*TMPDIR"):
        run(tokens, None, lambda read, request: "No", indices=(0,), socket=f"/tmp/{'x' * 108}")


def test_a_thousand_connections_at_once_are_all_answered(tokens):
    agents, each = 10, 100
    barrier = asyncio.Barrier(agents)

    async def agent(problem, api):
        host, port = api.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"messages": [{"role": "user", "content": "?"}], "max_tokens": 2})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api.key}\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(each)]
        await barrier.wait()  # all of all are open
        for _, writer in streams:
            writer.write((head + body).encode())
        for reader, writer in streams:
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    rollouts, engine, counts, _ = run(
        tokens, agent, lambda read, request: "No", indices=range(agents), room=20_000, together=False
    )
    assert_exact(rollouts, engine)
    assert len(engine.answers) == agents * each and counts["environment/restarted"] == 0


def test_other_sampling_is_given_and_not_trained_and_a_person_is_told(tokens):
    async def agent(problem, api):
        first = await api.say(ASKED, temperature=0.5, top_p=0.9, stop=["w"])
        assert first["content"] == "Ans"
        await api.say([*ASKED, first, {"role": "user", "content": "And?"}])

    rollouts, engine, _, progress = run(tokens, agent, lambda read, request: "Answer", indices=(0,))
    cold, own = (one.sampling for one in engine.asked)
    assert (cold.temperature, cold.top_p, cold.stop) == (0.5, 0.9, ("w",))
    assert (own.temperature, own.top_p, own.stop) == (1.0, 1.0, ())
    assert len(answers_of(rollouts[0])) == 1 and rollouts[0].generated_length == 2 * len("Answer.")
    assert "temperature 0.5" in " ".join(progress.messages)


@pytest.mark.parametrize("bears_it", [True, False])
def test_out_of_room_is_an_error_that_agents_know_and_the_rollout_ends_as_wrong(tokens, bears_it):
    async def agent(problem, api):
        history = list(ASKED)
        for _ in range(100):
            status, reply = await api.post({"messages": history})
            if status == 400:
                assert reply["error"]["code"] == "context_length_exceeded"
                assert "maximum context length" in reply["error"]["message"]
                if not bears_it:
                    raise RuntimeError("an agent that raises")
                return {"correct": False}
            history += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
        raise AssertionError("never out of room")

    rollouts, engine, counts, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0,), room=300)
    assert_exact(rollouts, engine)
    assert rollouts[0].finish_reason == "length" and not rollouts[0].verdict.correct
    assert rollouts[0].verdict.reason == ("no_match" if bears_it else "out_of_room")
    assert rollouts[0].response_length <= 300 and counts["environment/failed"] == 0


def test_two_at_once_that_have_no_room_together_come_one_after_the_other(tokens):
    async def agent(problem, api):
        await asyncio.gather(*(api.say([{"role": "user", "content": str(i)}]) for i in range(3)))

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0,), room=200)
    assert_exact(rollouts, engine)
    assert len(rollouts[0].contexts) == 3 and rollouts[0].response_length <= 200


def test_agents_that_fail_cost_their_rollout_and_are_counted(tokens):
    kinds = iter(("raises", "silent", "odd", "fine"))

    async def agent(problem, api):
        kind = next(kinds)
        if kind == "silent":
            return {"correct": True}
        await api.say(ASKED)
        if kind == "raises":
            raise RuntimeError("no such tool")
        return {"reward": "high"} if kind == "odd" else {"correct": True}

    rollouts, _, counts, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0, 1, 2, 3))
    assert sorted(rollout.finish_reason for rollout in rollouts) == ["abort", "abort", "abort", "stop"]
    reasons = {
        name.rpartition("/")[2]: count for name, count in counts.items() if name.startswith("environment/failed/")
    }
    assert reasons == {"crash": 1, "memory": 0, "no_call": 1, "outcome": 1} and counts["environment/failed"] == 3


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (False, (False, -1.0)),
        (True, (True, 1.0)),
        ({"reward": 1.0, "done": True}, (True, 1.0)),
        ({"reward": 0.2, "answer": "5"}, (True, 0.2)),
        ({"answer": "5", "truncated": False}, (True, 1.0)),
        (None, (True, 1.0)),  # the verifier judges the model's last answer
        ([], None),
    ],
)
def test_how_an_agent_says_that_it_went(tokens, outcome, verdict):
    async def agent(problem, api):
        await api.say(ASKED)
        return outcome

    [rollout], _, _, _ = run(tokens, agent, lambda read, request: "easy", indices=(0,))
    assert (rollout.verdict and (rollout.verdict.correct, rollout.verdict.reward)) == verdict


@pytest.mark.parametrize(
    ("path", "body", "says", "correct"),
    [
        ("/chat/completions", {"messages": ASKED}, "Perhaps #### 42", False),
        ("/chat/completions", {"messages": ASKED}, "So it is</think> #### 42", True),
        ("/completions", {"prompt": "6*7=<think>"}, "Perhaps #### 42", False),
        ("/completions", {"prompt": "6*7="}, "Surely #### 42", True),
    ],
)
def test_an_answer_that_was_cut_in_its_thinking_is_not_right(tmp_path, path, body, says, correct):
    tokens = tokenizer(tmp_path, chat_tokenizers.CHATML.replace("assistant\n", "assistant\n<think>\n"))

    async def agent(problem, api):
        assert (await api.post(body, path=path))[0] == 200

    [rollout], _, _, _ = run(tokens, agent, lambda *_: says, indices=(0,), answer="42", scorer=Exact())
    assert rollout.verdict.correct is correct


def test_an_agent_that_hangs_is_ended(tokens):
    begun = []

    async def agent(problem, api):
        begun.append(api)
        hangs = len(begun) == 1
        await api.say(ASKED)
        if hangs:
            await asyncio.sleep(3600)
        return {"correct": True}

    rollouts, _, counts, _ = run(tokens, agent, lambda read, request: "Answer", timeout_s=0.6, together=False)
    assert sorted(rollout.finish_reason for rollout in rollouts) == ["abort", "stop"]
    assert counts["environment/timeouts"] == 1


def test_a_key_ends_with_its_rollout(tokens):
    apis, ended = [], asyncio.Event()

    async def agent(problem, api):
        apis.append(api)
        if len(apis) == 1:
            await api.say(ASKED)
            asyncio.get_running_loop().call_later(0.2, ended.set)
            return {"correct": True}
        await ended.wait()
        status, reply = await api.post({"messages": ASKED}, key=apis[0].key)
        assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        await api.say(ASKED)
        return {"correct": False}

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "Answer", together=False)
    assert_exact(rollouts, engine)
    assert len(engine.answers) == 2


def test_who_hangs_up_loses_the_answer_and_nothing_else(tokens):
    arrived, hung_up, said = threading.Event(), threading.Event(), []

    async def agent(problem, api):
        asked = asyncio.create_task(api.say([{"role": "user", "content": "slow"}]))
        await asyncio.to_thread(arrived.wait, 60)
        asked.cancel()
        await asyncio.wait([asked])
        await api.say(ASKED)
        hung_up.set()
        while len(said) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the late answer comes while the conversation lasts

    async def slow(engine, requests):
        if any("slow" in engine._tokens.decode(list(one.prompt.tokens)) for one in requests):
            arrived.set()
            await asyncio.to_thread(hung_up.wait, 60)

    rollouts, engine, _, _ = run(
        tokens, agent, lambda read, request: said.append(read) or "Answer", indices=(0,), together=False, before=slow
    )
    assert len(engine.answers) == 2 and len(answers_of(rollouts[0])) == 1
    assert "slow" not in tokens.decode(rollouts[0].tokens.tolist())
