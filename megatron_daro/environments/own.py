"""What `environment.kind` names: an agent, a taskset of verifiers or a class, and what holds its conversations.

An agent is a program, or a coroutine function in the driver (agents.py); a taskset runs in worker processes
(verifiers_worker.py), and so does a class with `reset` and `step` (stepping.py).
"""

from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

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
from megatron_daro.environments.stepping import SteppedConversations, StepPool, pool_of
from megatron_daro.errors import ConfigError, RolloutError, SandboxError
from megatron_daro.sandbox import Sandbox
from megatron_daro.temporary import directory_until_exit
from megatron_daro.worker_pool.pool import WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def try_environment(section: EnvironmentSection) -> None:
    """Compare what `environment.kind` names with what it must offer; a class that runs in workers is made in one.

    Raises:
        ConfigError: it does not fit.
    """
    if section.of_verifiers:
        _start_one(agent_pool(section, workers=1))
    elif is_agent(section):
        if callable(own := _imported(section.kind)):
            check_function(section, own)
        elif shutil.which(section.command[0]) is None:
            raise ConfigError(
                f"environment.command: got {section.command[0]!r}, which is no program in PATH; fix: install it, or "
                "give its path"
            )
        if section.sandbox:
            try:
                Sandbox().check()
            except SandboxError as error:
                raise ConfigError(f"environment.sandbox: got true; {error}") from None
    else:
        step_environment_class(section.kind, section.options)
        _start_one(pool_of(section, workers=1))


def _start_one(pool: WorkerPool) -> None:
    try:
        with pool:
            pass
    except RolloutError as error:
        raise ConfigError(str(error)) from None


def is_agent(section: EnvironmentSection) -> bool:
    """Whether it is one that writes what the model reads by itself: a program, a taskset, or a coroutine function."""
    if section.has_agent_workers:
        return True
    return inspect.iscoroutinefunction(_imported(section.kind))


def _imported(kind: str) -> object:
    """Return what a kind names; None where it cannot be imported: whoever imports it next says why."""
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name) if name else None
    except Exception:
        return None


def make_environment(
    section: EnvironmentSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    warn: Callable[[str], None],
    pools: Callable[[], StepPool] | None = None,
    correct_reward: float = 1.0,
) -> Environment:
    """Return what holds conversations with environments in worker processes, or with agents.

    Args:
        chat: whether prompts are written by the tokenizer's chat template. warn: told what an environment in workers
            has to say of itself. pools: makes the worker processes; None: on this machine. correct_reward: from which
            on an agent's reward alone says that a problem is solved.

    Raises:
        ConfigError: a package is not installed, or the chat template cannot go on after an answer.
    """
    if is_agent(section):
        own = None if section.of_verifiers else _imported(section.kind)
        socket = f"{directory_until_exit('agents')}/endpoint" if section.sandbox else ""
        running = FunctionAgents(section, own) if callable(own) else CommandAgents(section, correct_reward, socket)
        endpoint = AgentEndpoint(Turns(tokenizer, chat=True), warn, section.max_turn_tokens, section.host, socket)
        return AgentConversations(endpoint, running, correct_reward)
    return SteppedConversations(section, Turns(tokenizer, chat=chat), warn, pools() if pools else None)
