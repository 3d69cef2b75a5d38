"""Clients of somebody else's against the endpoint: what they read is what was said, and it is trained as sampled.

Skipped without their packages: bash tests/agents.sh
"""

from __future__ import annotations

import asyncio
import json

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


def test_litellm_with_tools_and_its_error_of_a_context_that_is_too_long(tokens, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network as it is imported
    litellm = pytest.importorskip("litellm", reason="the package litellm is not here: bash tests/agents.sh installs it")

    async def agent(problem, api):
        ask = {"model": "openai/policy", "api_base": api.base_url, "api_key": api.key, "max_retries": 0}
        reply = await litellm.acompletion(messages=ASKED, tools=TOOLS, **ask)
        message = reply.choices[0].message
        [call] = message.tool_calls
        assert message.content == "I compute." and message.reasoning_content == "It is a product."
        history = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        parts = [part async for part in await litellm.acompletion(messages=history, tools=TOOLS, stream=True, **ask)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "42"
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(messages=[{"role": "user", "content": "long " * 5000}], **ask)

    rollouts, engine, _, _ = run(tokens, agent, says)
    assert_exact(rollouts, engine)
    assert all(rollout.contexts == () and len(rollout.turns) == 2 for rollout in rollouts)


def test_the_runner_of_openai_agents(tokens):
    agents = pytest.importorskip(
        "agents", reason="the package openai-agents is not here: bash tests/agents.sh installs it"
    )

    async def agent(problem, api):
        @agents.function_tool
        def mul(a: int, b: int) -> int:
            """Multiply."""
            return a * b

        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=api.base_url, api_key=api.key)
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        solver = agents.Agent(name="solver", instructions="Be short.", model=model, tools=[mul])
        return (await agents.Runner.run(solver, "6*7?")).final_output

    rollouts, engine, counts, _ = run(tokens, agent, says)
    assert_exact(rollouts, engine)
    assert all(rollout.contexts == () and len(rollout.turns) == 2 for rollout in rollouts)
    assert "\n<tool_response>\n42\n" in tokens.decode(rollouts[0].tokens.tolist()) and counts["environment/failed"] == 0


def test_mini_swe_agent(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    mini = pytest.importorskip("minisweagent", reason="mini-swe-agent is not here: bash tests/agents.sh installs it")
    assert mini.__version__

    def bash(read, request):
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42" if "tool_response" in read else "expr 6 '*' 7"
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"<think>So.</think>I run it.\n<tool_call>\n{call}\n</tool_call>"

    def solve(api):
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel

        options = {"api_base": api.base_url, "api_key": api.key}
        model = LitellmModel(model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors")
        solver = DefaultAgent(
            model, LocalEnvironment(cwd=str(tmp_path)), system_template="Use bash.", instance_template="{{task}}"
        )
        return solver.run("6*7?")["submission"].strip()

    async def agent(problem, api):
        return await asyncio.to_thread(solve, api)

    rollouts, engine, counts, _ = run(tokens, agent, bash)
    assert_exact(rollouts, engine)
    assert all(rollout.contexts == () and len(rollout.turns) == 2 for rollout in rollouts)
    assert counts["environment/failed"] == 0 and counts["environment/tool_calls"] == 4
