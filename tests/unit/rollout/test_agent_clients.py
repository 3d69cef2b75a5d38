"""Clients of somebody else's against the endpoint: what they read is what was said, and it is trained as sampled.

Skipped without the package openai: bash tests/agents.sh
"""

from __future__ import annotations

import asyncio

import pytest
from agent_forms import assert_exact, run, tokenizer
from test_agents import ASKED, TOOLS, says

openai = pytest.importorskip("openai", reason="the package openai is not here: bash tests/agents.sh installs it")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def calculate(client, streamed):
    """Two turns with a tool by the synchronous client."""
    ask = {"model": "policy", "tools": TOOLS, "tool_choice": "auto"}
    if streamed:
        with client.chat.completions.stream(messages=ASKED, **ask) as stream:
            for _ in stream:
                pass
            [choice] = stream.get_final_completion().choices
    else:
        [choice] = client.chat.completions.create(messages=ASKED, **ask).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I compute."
    [call] = choice.message.tool_calls
    assert call.function.name == "mul" and call.type == "function"
    history = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    if streamed:
        parts = list(
            client.chat.completions.create(messages=history, stream=True, stream_options={"include_usage": True}, **ask)
        )
        assert parts[-1].usage.total_tokens == parts[-1].usage.prompt_tokens + parts[-1].usage.completion_tokens
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    answer = client.chat.completions.create(messages=history, **ask)
    assert (
        answer.choices[0].finish_reason == "stop"
        and answer.usage.completion_tokens == len("<think>So it is</think> 42") + 1
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_the_synchronous_client_with_tools(tokens, streamed):
    async def agent(problem, api):
        client = openai.OpenAI(base_url=api.base_url, api_key=api.key)
        assert await asyncio.to_thread(lambda: [one.id for one in client.models.list()]) == ["policy"]
        assert await asyncio.to_thread(calculate, client, streamed) == "42"

    rollouts, engine, _, _ = run(tokens, agent, says)
    assert_exact(rollouts, engine)
    assert all(rollout.contexts == () and len(rollout.turns) == 2 for rollout in rollouts)


def test_errors_are_those_that_the_client_knows(tokens):
    async def agent(problem, api):
        client = openai.AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0)
        ask = client.chat.completions.create
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").chat.completions.create(model="policy", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            await ask(model="policy", messages=ASKED, frequency_penalty=1)
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(model="policy", messages=[{"role": "user", "content": "long " * 1000}])
        assert raised.value.code == "context_length_exceeded"
        said = await ask(model="policy", messages=ASKED, n=2, seed=5, stop=["w"], logprobs=True, temperature=1.0)
        assert [choice.message.content for choice in said.choices] == ["Ans", "Ans"]
        assert len(said.choices[0].logprobs.content) == len("Answer") + 1

    rollouts, engine, _, _ = run(tokens, agent, lambda read, request: "Answer", indices=(0,), room=1000)
    assert_exact(rollouts, engine)
