"""What `environment.kind` names: a class of one of two kinds or an environment of verifiers, and what holds its
conversations.

A class with `rollout` (environment.py) is an object in the driver, and so is what verifiers_hub.py loads; one with
`step` (stepping.py) runs in worker processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.errors import ConfigError
from megatron_daro.own_class import import_own_class, make_own
from megatron_daro.rollout.environment import Environment
from megatron_daro.rollout.rendering import Turns
from megatron_daro.rollout.step_worker import step_environment_class
from megatron_daro.rollout.stepping import StepEnvironment, SteppedConversations, StepPool
from megatron_daro.rollout.verifiers_hub import HubEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    module, _, name = kind.partition(":")
    try:
        own = getattr(importlib.import_module(module), name)
    except Exception:  # whoever imports it next says why
        return False
    return hasattr(own, "step") and not hasattr(own, "rollout")


def make_environment(
    section: EnvironmentSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool,
    warn: Callable[[str], None],
    pools: Callable[[], StepPool] | None = None,
) -> Environment | SteppedConversations:
    """Return the user's object, or what holds conversations with those in worker processes.

    Args:
        chat: whether prompts are written by the tokenizer's chat template. warn: told what an environment in workers
            has to say of itself. pools: makes the worker processes; None: on this machine.

    Raises:
        ConfigError: its class does not fit, its constructor raised, or the chat template cannot go on after an answer.
    """
    if section.of_verifiers:
        return HubEnvironment(section, tokenizer)
    own = environment_class(section)
    if is_stepped(section.kind):
        return SteppedConversations(section, Turns(tokenizer, chat=chat), warn, pools() if pools else None)
    arguments: dict[str, Any] = {"tokenizer": tokenizer, **section.options}
    cls = cast("type[Environment]", own)
    return make_own("environment.kind", section.kind, cls, arguments, options="environment.options", error=ConfigError)
