"""What `environment.kind` names: an agent, a class of one of two kinds or an environment of verifiers, and what holds
its conversations.

An agent is a program, or a coroutine function in the driver (agents.py). A class with `rollout` (environment.py) is an
object in the driver, and so is what verifiers_hub.py loads; one with `step` (stepping.py) runs in worker processes.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.own_class import import_own_class, make_own
from megatron_daro.rollout.agent_endpoint import AgentEndpoint
from megatron_daro.rollout.agents import AgentConversations, CommandAgents, FunctionAgents, check_function
from megatron_daro.rollout.environment import Environment
from megatron_daro.rollout.rendering import Turns
from megatron_daro.rollout.step_worker import step_environment_class
from megatron_daro.rollout.stepping import StepEnvironment, SteppedConversations, StepPool, pool_of
from megatron_daro.rollout.verifiers_hub import HubEnvironment, load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def try_environment(section: EnvironmentSection) -> None:
    """Compare what `environment.kind` names with what it must offer; a class that runs in workers is made in one.

    Raises:
        ConfigError: it does not fit.
    """
    if section.of_verifiers:
        load(section)
    elif is_agent(section):
        if callable(own := _imported(section.kind)):
            check_function(section, own)
        elif shutil.which(section.command[0]) is None:
            raise ConfigError(
                f"environment.command: got {section.command[0]!r}, which is no program in PATH; fix: install it, or "
                "give its path"
            )
    else:
        environment_class(section)
        if is_stepped(section.kind):
            try:
                with pool_of(section, workers=1):
                    pass
            except RolloutError as error:
                raise ConfigError(str(error)) from None


def environment_class(section: EnvironmentSection) -> type[Environment] | type[StepEnvironment]:
    """Import the class that `environment.kind` names.

    Raises:
        ConfigError: it fits neither `Environment` nor, without a `rollout`, `StepEnvironment`.
    """
    if is_stepped(section.kind):
        return step_environment_class(section.kind, section.options)
    return import_own_class(
        "environment.kind",
        section.kind,
        builtin="single_turn",
        protocol=Environment,
        methods={"rollout": 2},
        arguments={"tokenizer": None, **section.options},
        options="environment.options",
    )


def is_stepped(kind: str) -> bool:
    """Whether the class has `step` and no `rollout`. False where it cannot be imported."""
    own = _imported(kind)
    return hasattr(own, "step") and not hasattr(own, "rollout")


def is_agent(section: EnvironmentSection) -> bool:
    """Whether it is one that writes what the model reads by itself: a program, or a coroutine function."""
    if section.kind == "agent" or section.of_verifiers:
        return section.kind == "agent"
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
) -> Environment | SteppedConversations | AgentConversations:
    """Return the user's object, or what holds conversations with those in worker processes, or with agents.

    Args:
        chat: whether prompts are written by the tokenizer's chat template. warn: told what an environment in workers
            has to say of itself. pools: makes the worker processes; None: on this machine. correct_reward: from which
            on an agent's reward alone says that a problem is solved.

    Raises:
        ConfigError: its class does not fit, its constructor raised, or the chat template cannot go on after an answer.
    """
    if section.of_verifiers:
        return HubEnvironment(section, tokenizer)
    if is_agent(section):
        own = _imported(section.kind)
        running = FunctionAgents(section, own) if callable(own) else CommandAgents(section)
        endpoint = AgentEndpoint(Turns(tokenizer, chat=True), warn, section.max_turn_tokens)
        return AgentConversations(endpoint, running, correct_reward)
    own = environment_class(section)
    if is_stepped(section.kind):
        return SteppedConversations(section, Turns(tokenizer, chat=chat), warn, pools() if pools else None)
    arguments: dict[str, Any] = {"tokenizer": tokenizer, **section.options}
    cls = cast("type[Environment]", own)
    return make_own("environment.kind", section.kind, cls, arguments, options="environment.options", error=ConfigError)
