"""What an environment says becomes tokens: as plain text, or as a message of the model's chat template.

Observation -> ids that follow those that the model sampled. Only what is new is rendered and encoded; what the model
said is never encoded again. It refuses templates that cannot go on after an answer.

Why not the package renderers (0.1.12): for a model family that it does not know by name it renders every turn anew
(`DefaultRenderer.bridge_to_next_turn`), so that no sampled token would be kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_daro.data.tokenizer import response_decoder
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.thinking import is_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "x"}
_ANSWER = "What-the-model-said"
_OBSERVATION = "WhatTheEnvironmentSaid"
_SHOWN = 60
_FIX = "another chat_template.jinja, or data.prompt_template=plain with a class that has `step`"
CALL_BEGINS = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TRIED = {"name": "f", "arguments": {"x": "1 <2>"}}


class Turns:
    """Writes turns for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        """Try the template once. chat: whether prompts are written by it. Raises ConfigError."""
        self._tokenizer, self._chat = tokenizer, chat
        self._tried: set[tuple[str, ...]] = set()
        if chat:
            self._behind_answer([_USER])

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether what the template writes before an answer of the model begins its thinking."""
        before = self._rendered([_USER], generate=False)
        return is_thinking(self._rendered([_USER], generate=True).removeprefix(before))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the template writes calls of tools as `calls_in` reads them."""
        return calls_in(self.says_calls({"type": "function", "function": _TRIED}))[0] == [_TRIED]

    def plain(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a text as it stands, or the given ids. Raises ConfigError: the model has no such id."""
        if isinstance(prompt, str):
            return self._encoded(prompt)
        wrong = [token for token in prompt if not 0 <= token < len(self._tokenizer)]
        if wrong:
            raise ConfigError(f"prompt: got the token {wrong[0]}; allowed: 0 to {len(self._tokenizer) - 1}")
        return list(prompt)

    def text_of(self, token: int) -> str:
        """Return one token as text."""
        return str(self._tokenizer.decode([token]))

    def first(self, text: str) -> list[int]:
        """Return the ids of a text between the prompt and the first answer. Raises RolloutError: a chat has no place
        for it."""
        if self._chat:
            raise RolloutError(
                f"environment.kind: reset returned the observation {text!r:.60} in a chat, where the prompt ends with "
                "the beginning of the model's answer; allowed: none; fix: put it into the problem"
            )
        return self._encoded(text)

    def observation(self, text: str, role: str, last_token: int) -> list[int]:
        """Return the ids of an observation after an answer, up to where the model goes on.

        Args:
            last_token: the last token that the model said. If the template begins with this (stop) token, it is not
                written again.

        Raises:
            ConfigError: the template knows no such role.
        """
        return self.messages([{"role": role, "content": text}], last_token) if self._chat else self._encoded(text)

    def messages(self, messages: Sequence[Mapping[str, Any]], last_token: int) -> list[int]:
        """Return the ids of several messages of a chat, like `observation` for one."""
        ids = self._encoded(self._behind_answer(messages))
        return ids[1:] if ids[:1] == [last_token] else ids

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat up to where the model answers. tools: that the template tells the model of."""
        return self._encoded(self._rendered(messages, generate=True, tools=tools))

    def says_calls(self, call: Mapping[str, Any]) -> str:
        """Return how an answer that calls this tool is written, without what surrounds the answer."""
        answer = {"role": "assistant", "content": _ANSWER, "tool_calls": [call]}
        return self._rendered([_USER, answer], generate=False).partition(_ANSWER)[2]

    def check(self, response: Sequence[int], history: Sequence[Mapping[str, str]]) -> None:
        """Compare what was trained with the chat template's own text of the whole history.

        Args:
            response: all ids after the prompt. history: the same as messages.

        Raises:
            RolloutError: they differ: a server with that template would show the model something else.
        """
        trained = str(self._tokenizer.decode(list(response), skip_special_tokens=False))
        if self._chat:
            begin = self._rendered([_USER], generate=True)
            whole = self._rendered([_USER, *history], generate=False)
            rendered = whole.removeprefix(begin)
        else:
            rendered = "".join(message["content"] for message in history)
            trained = response_decoder(self._tokenizer)(response)
        same = next((i for i, (a, b) in enumerate(zip(trained, rendered, strict=False)) if a != b), None)
        if same is None and (trained.startswith(rendered) or rendered.startswith(trained)):
            return
        at = min(len(trained), len(rendered)) if same is None else same
        raise RolloutError(
            f"environment.strict: the conversation differs from its rendered history at character {at}: trained "
            f"{trained[at : at + _SHOWN]!r}, rendered {rendered[at : at + _SHOWN]!r}; allowed: the same text; fix: a "
            "chat template that keeps earlier answers as they are (those of reasoning models cut them), or "
            "environment.strict=false: what is trained is always what the model saw"
        )

    def _behind_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._tried:
            marked = [{**message, "content": f"{_OBSERVATION}{i}."} for i, message in enumerate(messages)]
            behind = self._after_answer(marked)
            if not all(message["content"] in behind for message in marked):
                raise ConfigError(
                    f"environment.kind: the chat template of {self._tokenizer.name_or_path} leaves out a message of "
                    f"role {', '.join(map(repr, roles))} behind an answer; allowed: a template that renders it; fix: "
                    f"role 'user', {_FIX}"
                )
            self._tried.add(roles)
        return self._after_answer(messages)

    def _after_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        whole = self._rendered([_USER, {"role": "assistant", "content": _ANSWER}, *messages], generate=True)
        if _ANSWER not in whole:
            raise ConfigError(
                f"environment.kind: the chat template of {self._tokenizer.name_or_path} leaves out an answer; allowed: "
                f"a template that renders it; fix: {_FIX}"
            )
        return whole[whole.index(_ANSWER) + len(_ANSWER) :]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        plain: list[dict[Any, Any]] = [dict(message) for message in messages]
        known: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            return str(
                self._tokenizer.apply_chat_template(plain, tools=known, tokenize=False, add_generation_prompt=generate)
            )
        except Exception as error:  # The model's template is a program, which may raise anything.
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"environment.kind: the chat template of {self._tokenizer.name_or_path} refuses messages of the roles "
                f"{roles} ({error}); allowed: roles that it knows; fix: role 'user', {_FIX}"
            ) from error

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]


def calls_in(text: str) -> tuple[list[dict[str, Any]], int]:
    """Return the tools that an answer calls, each with name and arguments, and how many calls cannot be read."""
    calls, unreadable = [], 0
    for part in _CALL.findall(text):
        try:
            call = json.loads(part)
            calls.append({"name": str(call["name"]), "arguments": dict(call.get("arguments") or {})})
        except (ValueError, TypeError, KeyError, AttributeError):
            unreadable += 1
    return calls, unreadable
