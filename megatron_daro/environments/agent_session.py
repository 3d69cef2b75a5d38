"""The chats of one rollout of an agent: which tokens a request continues, and what it is answered.

Messages of a request -> the context whose messages they continue, and the tokens that are new -> Conversation -> reply.
A message of the model's is recognised by its content: its text without thinking, and its calls, however their JSON is
written. Its tokens stay as they were sampled; only the messages after it are rendered. If the messages have no earlier
answer, or it was given with other tools, all of them are rendered and a new context begins. If that answer has been
continued since, or is just being continued, the request is a branch: a context of its own that begins with the same
tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_daro.environments.context import Context
from megatron_daro.environments.environment import Completion, Conversation, OutOfRoomError
from megatron_daro.environments.rendering import CALL_BEGINS, Turns, calls_in
from megatron_daro.errors import ConfigError
from megatron_daro.thinking import THINK, THINKING_TAGS, behind_thinking
from megatron_daro.types import SamplingParams

Message = dict[str, Any]
_TAG = re.compile("|".join(map(re.escape, (*THINKING_TAGS, *THINKING_TAGS.values()))))


class RefusedRequestError(Exception):
    """A request that is not served. parameter: which part. code: as OpenAI calls it."""

    def __init__(self, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.code = parameter, code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """messages: as chat templates take them. tools: likewise. sampling: of each answer. trained: whether it is sampled
    as the run samples. seed: of the first answer, and one more for each further answer; None: each has the number of
    its turn instead. count: number of answers. stop: texts that end an answer, and are not part of its text. calls:
    whether it may call tools. prompt: text or token ids in the place of messages.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    sampling: SamplingParams
    trained: bool
    seed: int | None
    count: int
    stop: tuple[str, ...]
    calls: bool
    prompt: str | tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """message: of the assistant. completion: what the model said. read: number of tokens before it."""

    message: Message
    completion: Completion
    read: int
    finish_reason: str


@dataclass(slots=True, eq=False)
class _Chat:
    """A context and the messages that it stands for. ends: for each answer, how many messages and tokens there are up
    to and including it. raw: the text of a chat without messages; empty if its prompt was token ids. None: it has
    messages."""

    context: Context
    tools: str = ""
    messages: list[object] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    raw: str | None = None


class AgentSession:
    """The chats of one conversation. Used on the environments' event loop."""

    def __init__(self, conversation: Conversation, turns: Turns) -> None:
        self.conversation, self._turns = conversation, turns
        self._chats = [_Chat(conversation.first_context())]
        self._calls = 0

    async def answer(self, request: ChatRequest, number: int) -> Reply:
        """Return one answer to a request, the `number`th of `request.count`.

        Raises:
            RefusedRequestError: the messages cannot be rendered, or there is no room for them and an answer.
        """
        try:
            chat, shown = self._place(request) if request.prompt is None else self._place_prompt(request.prompt)
            read = len(chat.context.tokens) + len(shown)
            completion = await self.conversation.answer(
                chat.context,
                shown,
                request.sampling,
                trained=request.trained,
                seed=None if request.seed is None else request.seed + number,
            )
        except ConfigError as error:
            raise RefusedRequestError(str(error), "messages" if request.prompt is None else "prompt") from error
        except OutOfRoomError as error:
            raise self._too_long(str(error)) from error
        message, calls, unreadable = self._message(completion, request)
        self.conversation.report(tool_calls=calls, tool_errors=unreadable)
        if request.prompt is not None:
            chat.raw = request.prompt + message["content"] if isinstance(request.prompt, str) else ""
        else:
            chat.tools, chat.messages = _written(request.tools), [*map(known, request.messages), known(message)]
            chat.ends.append((len(chat.messages), len(chat.context.tokens)))
        if chat not in self._chats:
            self._chats.append(chat)
        reason = "length" if completion.finish_reason != "stop" else "tool_calls" if calls else "stop"
        return Reply(message, completion, read, reason)

    def _too_long(self, why: str) -> RefusedRequestError:
        most = self.conversation.request.sampling.max_new_tokens
        return RefusedRequestError(
            f"This model's maximum context length is {most} tokens. Please reduce the length of the messages. ({why})",
            "messages",
            "context_length_exceeded",
        )

    def _place(self, request: ChatRequest) -> tuple[_Chat, list[int]]:
        """Return the chat that the request continues, and the tokens to show in it."""
        messages, tools = list(map(known, request.messages)), _written(request.tools)
        found: tuple[_Chat, int, int] | None = None
        for chat in self._chats:
            for said, tokens in reversed(chat.ends if chat.tools == tools else []):
                if said < len(messages) and messages[:said] == chat.messages[:said]:
                    if found is None or said > found[1] or (said == found[1] and self._is_free(chat, said)):
                        found = chat, said, tokens
                    break
        if found is None:
            return self._begun(request)
        chat, said, tokens = found
        before = chat.context.tokens[:tokens].tolist()
        self._check_length(request.messages[said:])
        new = self._turns.messages(request.messages[said:], before[-1])
        if self._is_free(chat, said):
            return chat, new
        return _Chat(Context(), ends=chat.ends[: chat.ends.index((said, tokens)) + 1]), [*before, *new]

    def _is_free(self, chat: _Chat, said: int) -> bool:
        """Whether the chat has no answer after these messages, and none is under way."""
        return not chat.context.busy and chat.ends[-1][0] == said

    def _begun(self, request: ChatRequest) -> tuple[_Chat, list[int]]:
        self._check_length(request.messages)
        return self._anew(self._turns.prompt(request.messages, request.tools))

    def _place_prompt(self, prompt: str | tuple[int, ...]) -> tuple[_Chat, list[int]]:
        """Return the chat without messages that a prompt continues, and the tokens to show in it."""
        if isinstance(prompt, str):
            self._check_length([{"content": prompt}])
        found: tuple[_Chat, list[int]] | None = None
        for chat in self._chats:
            if chat.raw is None or chat.context.busy:
                continue
            if isinstance(prompt, str):
                begun, said = chat.raw, len(chat.raw)
            else:
                begun, said = tuple(chat.context.tokens.tolist()), len(chat.context.tokens)  # type: ignore[assignment]
            longest = found is None or len(chat.context.tokens) > len(found[0].context.tokens)
            if begun and len(prompt) > said and prompt[:said] == begun and longest:
                found = chat, self._turns.plain(prompt[said:])
        return found or self._anew(self._turns.plain(prompt))

    def _anew(self, ids: list[int]) -> tuple[_Chat, list[int]]:
        first = self._chats[0]
        base = list(first.context.base)
        if first.context.rollout is None and not first.context.busy and ids[: len(base)] == base:
            return first, ids[len(base) :]
        return _Chat(Context()), ids

    def _check_length(self, messages: Sequence[Message]) -> None:
        """Spare the tokenizer texts of megabytes. Raises OutOfRoomError: no text of that length can fit."""
        most = self._turns.longest_token * self.conversation.room
        if sum(len(str(message["content"])) for message in messages) > most:
            raise OutOfRoomError(f"messages of more than {most} characters")

    def _message(self, completion: Completion, request: ChatRequest) -> tuple[Message, int, int]:
        """Return the message that the agent gets, how many tools it calls, and how many calls cannot be read."""
        text = completion.text
        for stop in request.stop:
            text = text.partition(stop)[0]
        if request.prompt is not None:
            return {"role": "assistant", "content": text}, 0, 0
        whole = THINK + text if self._turns.opens_thinking else text
        content = behind_thinking(whole)
        calls, unreadable = calls_in(content) if request.calls else ([], 0)
        message: Message = {"role": "assistant", "content": content}
        if thought := _TAG.sub("", whole[: len(whole) - len(content)]).strip():
            message |= {"content": content.strip(), "reasoning_content": thought}
        if calls:
            message["content"] = content[: content.index(CALL_BEGINS)].strip() or None
            self._calls += 1
            message["tool_calls"] = [
                {
                    "id": f"call{self._calls:03d}{i:02d}",  # nine letters and digits, as Mistral's template wants them
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for i, call in enumerate(calls)
            ]
        return message, len(calls), unreadable


def known(message: Mapping[str, Any]) -> object:
    """Return what a message is compared by: one of the model's by its text without thinking and its calls, whatever the
    order of their arguments; any other by all of it."""
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        return role, content, message.get("tool_call_id"), message.get("name")
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return role, behind_thinking(content).strip(), tuple((one["name"], _plain(one["arguments"])) for one in functions)


def _plain(arguments: object) -> str:
    try:
        return _written(json.loads(arguments) if isinstance(arguments, str) else arguments)
    except ValueError:
        return str(arguments)


def _written(value: object) -> str:
    return json.dumps(value, sort_keys=True)
