"""The program of a worker that runs tasks of the package verifiers (0.4): with its tasksets, harnesses, rewards and
code.

CommandAgents -> (this) -> verifiers' Env -> the endpoint -> its rewards. One rollout at a time. Limits and protocol are
those of agent_worker.py. It refuses environments with several agents, since all of these would be trained as one.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_daro.errors import ConfigError
from megatron_daro.worker_pool.child import Answer, main

_SHOWN = 600


def load_tasks(kind: str, options: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return verifiers' Env of `environment.kind: verifiers:TASKSET`, and its tasks.

    Args:
        options: what its configuration has besides the taskset's name.

    Raises:
        ConfigError: it cannot be loaded, or is not served.
    """
    name = kind.partition(":")[2]
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        config = loaders.resolve_env_config({**options, "taskset": {**options.get("taskset", {}), "id": name}})
        env = loaders.load_environment(config)
        tasks = list(env.taskset) if env.taskset.bounded else []
    except Exception as error:  # whatever its module raises
        why = " ".join(str(error).split())
        raise ConfigError(
            f"environment.kind: {kind} cannot be loaded ({type(error).__name__}: {why}); allowed: a taskset of the "
            'package verifiers; fix: pip install "verifiers>=0.4,<0.5" and the taskset, or correct environment.options'
        ) from error
    if not tasks or len(config.agent_harnesses()) != 1:
        got = "has several agents" if tasks else "has no tasks, or endless ones"
        raise ConfigError(f"environment.kind: {kind} {got}; allowed: tasks that end, for one agent; fix: use another")
    return env, tasks


def answer(
    env: Any, tasks: Sequence[Any], settings: Mapping[str, Any], loop: asyncio.AbstractEventLoop, request: Any
) -> dict[str, Any]:
    """Run one rollout. Reply as agent_worker.py does: an exit status, and what a program would say in its last line."""
    problem = json.loads(request["problem"])
    os.environ.update(request["environment"])
    try:
        episode = loop.run_until_complete(_episode(env, tasks[int(problem["answer"])]))
    except Exception as error:  # the border of verifiers' code
        return {"reason": "ok", "status": 1, "line": "", "said": f"{type(error).__name__}: {error}"[-_SHOWN:]}
    if not episode.ok:
        errors = [error for one in (episode, *episode.traces) for error in one.errors]
        return {"reason": "ok", "status": 1, "line": "", "said": " ".join(str(error) for error in errors)[-_SHOWN:]}
    [trace] = episode.traces
    given = {name: one for name, one in trace.rewards.items() if one is not None}
    rewards = {_allowed(name): one.score if settings["weighted"] else one.value for name, one in given.items()}
    outcome = {"rewards": rewards, "correct": trace.reward >= settings["correct_reward"]}
    return {"reason": "ok", "status": 0, "line": json.dumps(outcome), "said": ""}


def _allowed(name: str) -> str:
    """Return the name in the form that is allowed for a reward (environment.py)."""
    return re.sub(r"[^\w.-]|^(?![A-Za-z_])", "_", name, flags=re.ASCII)[:64]


async def _episode(env: Any, task: Any) -> Any:
    """Run one episode, with a new client, since each rollout has a new key."""
    vf = importlib.import_module("verifiers.v1")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        return await env.run_episode(task, vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig()))


def load(settings: dict[str, Any]) -> Answer:
    """Load the taskset. Raises ConfigError: it cannot be loaded, or is not served."""
    env, tasks = load_tasks(settings["kind"], settings["options"])
    return partial(answer, env, tasks, settings, asyncio.new_event_loop())


def write_problems(arguments: Sequence[str]) -> int:
    """Write the tasks of a taskset of verifiers as problems, one JSON object a line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=write_problems.__doc__)
    parser.add_argument("taskset", help="as in environment.kind: verifiers:TASKSET")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, as environment.options")
    given = parser.parse_args(arguments)
    try:
        _, tasks = load_tasks(f"verifiers:{given.taskset}", given.options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for number, task in enumerate(tasks):
        text = task.data.prompt_text or task.data.name or task.key
        row = {"messages": [{"role": "user", "content": text}], "answer": str(number), "data_source": given.taskset}
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    is_worker = sys.argv[1:] and sys.argv[1].startswith("{")
    sys.exit(main(sys.argv[1], load, bounds_addresses=False) if is_worker else write_problems(sys.argv[1:]))
