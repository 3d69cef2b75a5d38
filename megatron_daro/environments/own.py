"""What `environment.kind` names: an agent, a taskset of verifiers or a class, and the Environment that holds its
conversations.

An agent is a program, or a coroutine function in the driver (agents.py); a taskset runs in worker processes
(verifiers_worker.py), and so does a class with `reset` and `step` (stepping.py).
"""

from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_daro.config.rules.trainer import unread_without_step
from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.environments.agent_endpoint import AgentEndpoint
from megatron_daro.environments.agents import (
    AgentConversations,
    CommandAgents,
    FunctionAgents,
    agent_pool,
    check_function,
)
from megatron_daro.environments.environment import Environment
from megatron_daro.environments.rendering import Turns
from megatron_daro.environments.step_worker import step_environment_class
from megatron_daro.environments.stepping import EnvironmentPool, SteppedConversations, pool_of
from megatron_daro.errors import ConfigError, RolloutError, SandboxError
from megatron_daro.sandbox import Sandbox
from megatron_daro.temporary import directory_until_exit
from megatron_daro.worker_pool.pool import WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["single_turn", "steps", "program", "coroutine", "taskset"]


def try_environment(section: EnvironmentSection) -> None:
    """Check that what `environment.kind` names offers what it must; a taskset or class is loaded in a worker for that.

    Raises:
        ConfigError: it does not fit.
    """
    match kind_of(section):
        case "taskset":
            _start_one(agent_pool(section, workers=1))
        case "coroutine":
            if unread := unread_without_step(section):
                raise ConfigError(
                    f"{section.title}: got a coroutine and {' and '.join(unread)}; allowed: unset but for environments "
                    "with `step`; fix: remove what is set"
                )
            check_function(section, _imported(section.kind))
        case "program":
            _try_program(section)
        case "steps":
            step_environment_class(section.kind, section.options)
            _start_one(pool_of(section, workers=1))


def _try_program(section: EnvironmentSection) -> None:
    if shutil.which(section.command[0]) is None:
        raise ConfigError(
            f"environment.command: got {section.command[0]!r}, which is no program in PATH; fix: install it, or give "
            "its path"
        )
    if section.sandbox:
        try:
            Sandbox().check()
        except SandboxError as error:
            raise ConfigError(f"environment.sandbox: got true; {error}") from None


def _start_one(pool: WorkerPool) -> None:
    try:
        with pool:
            pass
    except RolloutError as error:
        raise ConfigError(str(error)) from None


def kind_of(section: EnvironmentSection) -> Kind:
    """Return what `environment.kind` names; a module of the user's is imported for that."""
    if section.kind == "single_turn":
        return "single_turn"
    if section.kind == "agent":
        return "program"
    if section.of_verifiers:
        return "taskset"
    return "coroutine" if inspect.iscoroutinefunction(_imported(section.kind)) else "steps"


def is_agent(section: EnvironmentSection) -> bool:
    """Whether it is an agent, which writes by itself what the model reads."""
    return kind_of(section) in ("program", "coroutine", "taskset")


def _imported(kind: str) -> Any:
    """Return what a kind names; None where it cannot be imported; its next import says why."""
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None


def try_turns(sections: Sequence[EnvironmentSection], tokenizer: PreTrainedTokenizerBase, prompt_template: str) -> None:
    """Check that the turns of these environments can be written as tokens.

    Raises:
        ConfigError: an agent without the chat template, or one that cannot go on after an answer.
    """
    for section in sections:
        if is_agent(section) and prompt_template != "chat":
            raise ConfigError(
                f"data.prompt_template: got {prompt_template!r} (environment.kind={section.kind}); allowed: chat with "
                "an agent, whose messages the tokenizer's chat template writes; fix: set data.prompt_template=chat"
            )
        if section.has_turns:
            Turns(tokenizer, chat=prompt_template == "chat")


def make_environment(
    section: EnvironmentSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    warn: Callable[[str], None],
    pools: Callable[[], EnvironmentPool] | None = None,
    correct_reward: float = 1.0,
) -> Environment:
    """Return the Environment that holds conversations, with worker processes or with agents.

    Args:
        chat: whether prompts are written by the tokenizer's chat template. warn: told what a person should know of
            environments in workers and of agents. pools: makes the worker processes; None: on this machine.
            correct_reward: an agent's reward of at least this says by itself that a problem is solved.

    Raises:
        ConfigError: a package is not installed, or the chat template cannot go on after an answer.
    """
    turns, kind, socket = Turns(tokenizer, chat=chat), kind_of(section), ""
    if kind == "steps":
        return SteppedConversations(section, turns, warn, pools() if pools else None)
    if section.sandbox:
        socket = f"{directory_until_exit('agents')}/endpoint"
    endpoint = AgentEndpoint(turns, warn, section.max_turn_tokens, section.host, socket)
    if kind == "coroutine":
        return AgentConversations(endpoint, FunctionAgents(section, _imported(section.kind)), correct_reward)
    return AgentConversations(endpoint, CommandAgents(section, correct_reward, socket), correct_reward)
