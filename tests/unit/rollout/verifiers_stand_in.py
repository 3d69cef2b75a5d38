"""What the adapter reads of the package verifiers 0.3.1, for tests without it; the lines quoted are its own.

Source: verifiers/legacy: types.py, errors.py, clients/client.py, envs/environment.py.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Callable, Sequence
from typing import Any

import pydantic


class Record(pydantic.BaseModel):
    """`class CustomBaseModel(BaseModel): "Allow extras and dict-like attribute access."`"""

    model_config = pydantic.ConfigDict(extra="allow")

    def get(self, key: str, default: object = None) -> Any:
        return getattr(self, key, default)


class Tool(Record):
    name: str
    description: str
    parameters: dict[str, object]


class ToolCall(Record):
    id: str
    name: str
    arguments: str


class ResponseMessage(Record):
    role: str = "assistant"
    content: str
    tool_calls: list[ToolCall] | None
    finish_reason: str
    is_truncated: bool


class Usage(Record):
    prompt_tokens: int
    reasoning_tokens: int
    completion_tokens: int
    total_tokens: int


class Response(Record):
    id: str
    created: int
    model: str
    usage: Usage
    message: ResponseMessage


class OverlongPromptError(Exception):
    """`class OverlongPromptError(Error)`"""


class Client:
    def __init__(self, client_or_config: object) -> None:
        """`self._client = client_or_config`"""

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        """As its own, but for headers and authentication."""
        native_prompt, extra_kwargs = await self.to_native_prompt(prompt)
        native_tools = None if tools is None else [await self.to_native_tool(tool) for tool in tools]
        native_response = await self.get_native_response(
            native_prompt, model, sampling_args, native_tools, **extra_kwargs, **kwargs
        )
        await self.raise_from_native_response(native_response)
        return await self.from_native_response(native_response)


class Environment:
    """rows: problems. talk: `await talk(ask, row)` gives what `run_rollout` returns beside the defaults; `ask` is
    `get_model_response`."""

    requires_group_rollouts = provides_advantages = False
    message_type = "chat"
    pass_threshold = 0.5
    """`pass_threshold: float = 0.5`"""

    def __init__(self, rows: Sequence[dict], talk: Callable, *, evaluation=None, tools=(), **attributes) -> None:
        self.rows, self.talk, self.evaluation = rows, talk, evaluation
        self.tool_defs = list(tools) or None
        for name, value in attributes.items():
            setattr(self, name, value)
        signal.signal(signal.SIGTERM, lambda _, __: exit(143))  # `signal.signal(signal.SIGTERM, lambda _, __: (`
        signal.signal(signal.SIGINT, lambda _, __: exit(130))

    def build_dataset(self):
        """`def build_dataset(self) -> "Dataset | None"`"""
        return self.rows

    def build_eval_dataset(self):
        """`def build_eval_dataset(self) -> "Dataset | None"`"""
        return self.evaluation

    async def run_rollout(self, input, client, model, sampling_args):
        self.clients = [*getattr(self, "clients", []), client]
        state: dict[str, Any] = {"trajectory": []}

        async def ask(messages, *, sampling=None, **others):
            given = {"tools": self.tool_defs, "state": state} | others
            response = await client.get_response(messages, model, {**sampling_args, **(sampling or {})}, **given)
            state["trajectory"].append({"reward": None})
            return response

        output = {"reward": 1.0, "metrics": {}, "error": None, "stop_condition": None}
        return output | (await self.talk(ask, input) or {})


def module(environment: Callable[..., Environment]) -> types.ModuleType:
    """Return the package, whose `load_environment` is this function of (name, **options)."""
    made = types.ModuleType("verifiers")
    made.__version__ = "0.3.1"
    made.load_environment = environment
    made.types = types.SimpleNamespace(ResponseMessage=ResponseMessage, Usage=Usage)
    for one in (Client, Response, Tool, ToolCall, OverlongPromptError):
        setattr(made, one.__name__, one)
    return made
