"""What toy_agent.py asks, asked with clients of others: `environment.kind: clients_of_others:solve`.

Each problem has its client, a coroutine that gets a digit and a client of the package openai. What the trainer must
find is checked here too, for the embedded engine and for real servers.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from toy_agent import user


async def with_openai(digit, client):
    """The second turn is streamed."""
    first = await client.chat.completions.create(model="policy", messages=[user(digit)], max_tokens=4)
    said = first.choices[0].message
    stream = await client.chat.completions.create(model="policy", messages=[user(digit), said, user("7")], stream=True)
    assert "".join([part.choices[0].delta.content or "" async for part in stream])
    await client.chat.completions.create(model="policy", messages=[user(digit), user(digit)])
    return said.content


async def with_litellm(digit, client):
    import litellm

    async def say(*messages):
        options = {"api_base": str(client.base_url), "api_key": client.api_key, "max_tokens": 4}
        reply = await litellm.acompletion("openai/policy", [*messages], **options)
        return reply.choices[0].message.model_dump()

    first = await say(user(digit))
    await say(user(digit), first, user("7"))
    await say(user(digit), user(digit))
    return first["content"]


async def with_openai_agents(digit, client):
    import agents

    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    solver = agents.Agent(name="solver", model=model, model_settings=agents.ModelSettings(max_tokens=4))
    first = await agents.Runner.run(solver, digit)
    await agents.Runner.run(solver, [*first.to_input_list(), user("7")])
    await agents.Runner.run(solver, [user(digit), user(digit)])
    return first.final_output


async def with_mini_swe_agent(digit, client):
    """Two steps of one chat, not toy_agent's requests. The model's mark is its action, a comment of the shell."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    options = {"api_base": str(client.base_url), "api_key": client.api_key, "max_tokens": 4}
    texts = {"action_regex": "(####)", "observation_template": "7", "format_error_template": "7"}
    model = LitellmTextbasedModel(
        model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors", **texts
    )
    solver = DefaultAgent(
        model, LocalEnvironment(), system_template="", instance_template="{{task}}", step_limit=2, cost_limit=0.0
    )
    await asyncio.to_thread(solver.run, digit)


CLIENTS = (with_openai, with_litellm, with_openai_agents, with_mini_swe_agent)


def client_of(problem):
    """The one whose turn it is."""
    return CLIENTS[int(problem.statement.strip("=")) % len(CLIENTS)]


async def solve(problem, client):
    """Hold the conversation of one problem."""
    return await client_of(problem)(problem.statement.strip("="), client)


def environment(folder):
    """Variables of a run: where this module is, and what keeps clients from the network and from a person's files."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    names = {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {"PYTHONPATH": paths, "MSWEA_GLOBAL_CONFIG_DIR": str(folder), **names}


def check(run, most_apart):
    """Of three steps: every sampled token is trained, with the log-prob that the trainer finds itself, and each client
    had its sequences.

    Args:
        most_apart: of the log-prob of any token, nats.
    """
    from megatron_daro.observe.metrics import read_metrics
    from megatron_daro.rollout.recorder import read_step

    lines = [line for line in read_metrics(run) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["environment/failed"] == line["environment/restarted"] == 0 for line in lines)
    assert all(line["mismatch/logprob_abs_max"] < most_apart for line in lines)
    seen = set()
    for group, _ in [pair for step in (1, 2, 3) for pair in read_step(run, step)]:
        seen.add(client := client_of(group.prompt))
        for rollout in group.rollouts:
            assert rollout.loss_mask.sum() == rollout.generated_length
            sequences, turns = (0, 2) if client is with_mini_swe_agent else (2, 3)
            assert (len(rollout.contexts), len(rollout.turns)) == (sequences, turns)
    assert seen == {*CLIENTS}
