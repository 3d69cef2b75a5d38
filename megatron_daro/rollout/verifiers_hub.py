"""Environments of the package `verifiers`, as they are: `environment.kind: verifiers:NAME`.

Its environment holds the conversation and judges it; its client is ours, which asks the run's engine by tokens. Only
what an environment adds to the conversation is rendered and encoded. Refuses by name what would be trained as something
else: rewards of a group, histories that are rewritten, parallel requests, other sampling, images.

    python -m megatron_daro.rollout.verifiers_hub NAME --model DIR > train.jsonl    # the environment's own problems

Source: github.com/PrimeIntellect-ai/verifiers 0.3.1, verifiers/legacy (the classes that `import verifiers` gives).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_daro.config.sections import EnvironmentSection
from megatron_daro.data.formats import ParsedRow, parse_row
from megatron_daro.data.prompts import prompt_of, unique_ids
from megatron_daro.data.tokenizer import load_tokenizer
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.rollout.environment import Completion, Conversation, OutOfRoomError
from megatron_daro.rollout.rendering import CALL_BEGINS, Turns, calls_in
from megatron_daro.types import Prompt, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "eval")
_DEFAULTS: Mapping[str, object] = {"n": 1, "extra_body": {}}
_LIMITS = ("max_tokens", "max_completion_tokens")
_NO_ANSWER = "-"


class _Tool(Protocol):
    """What is read of a `verifiers.Tool`."""

    name: str
    description: str
    parameters: Mapping[str, object]


class _Client(Protocol):
    """What is read of our `verifiers.Client`."""

    trajectory: Sequence[Mapping[str, Any]]


class HubEnvironment:
    """One of its environments as an `Environment`: an object in the driver, which serves all conversations."""

    def __init__(self, section: EnvironmentSection, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load it. Raises ConfigError: it cannot be loaded, or is not served."""
        self._section = section
        self._vf, self._own = load(section)
        if not tokenizer.chat_template:
            raise _unserved(section, "needs a chat", f"a model with a chat template, unlike {tokenizer.name_or_path}")
        self._turns = Turns(tokenizer, chat=True)
        self._rows = {prompt.id: row for split in SPLITS for prompt, row in self._prompts(split)}

    async def rollout(self, prompt: Prompt, conversation: Conversation) -> Verdict:
        """Let it hold one conversation and judge it. Raises RuntimeError: it ended with an error."""
        row = self._rows.get(prompt.id)
        if row is None:
            raise conversation.refuse(
                f"the problem {prompt.id} is none of its own",
                "those of its datasets",
                f"write data.train with python -m {__spec__.name} {self._section.kind.partition(':')[2]} --model DIR",
            )
        client = _client(self._vf, conversation, _Talk(conversation, self._turns, self._section.max_turn_tokens))
        output = await self._own.run_rollout(row, client, "policy", {})
        if conversation.fault is not None:
            raise conversation.fault
        if output["error"] is not None:
            raise RuntimeError(f"{output['error']['error']}: {output['error']['message']}")
        if any(step["reward"] is not None for step in client.trajectory):
            raise conversation.refuse("a step of the trajectory has a reward", "rewards of its rubric")
        rewards = {re.sub(r"[^\w.-]", "_", name)[:64]: float(value) for name, value in output["metrics"].items()}
        correct = output["reward"] >= self._own.pass_threshold
        reason = str(output["stop_condition"] or "done")[:40]
        if self._section.reward_weights:
            conversation.report(rewards=rewards)
            return conversation.verdict(correct, reason)
        conversation.report(float(output["reward"]))
        return Verdict(correct, float(output["reward"]), reason, tuple(rewards.items()))

    def problems(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield its problems as rows of a training file. split: train or eval."""
        name = self._section.kind + (":eval" if split == "eval" else "")
        for row in self._dataset(split):
            answer = row.get("answer")
            text = answer if isinstance(answer, str) else json.dumps(answer)
            messages = self._turns.with_tools([_plain(self._section, m) for m in row["prompt"]], self._tools(row))
            yield {"messages": messages, "answer": text.strip() or _NO_ANSWER, "data_source": name}

    def _prompts(self, split: str) -> list[tuple[Prompt, dict[str, Any]]]:
        """Return each problem as the run reads it from a training file, and the row that it is."""
        parsed = [
            (parse_row(problem), row) for problem, row in zip(self.problems(split), self._dataset(split), strict=True)
        ]
        usable = [(prompt_of(one, ""), row) for one, row in parsed if isinstance(one, ParsedRow)]
        return list(zip(unique_ids([prompt for prompt, _ in usable]), [row for _, row in usable], strict=True))

    def _dataset(self, split: str) -> list[dict[str, Any]]:
        """Return its rows. Of evaluation none where it has no set of its own."""
        if split == "eval":
            return [dict(row) for row in self._own.build_eval_dataset() or ()]
        return [dict(row) for row in self._own.build_dataset() or ()]

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        info = row.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        tools = [_tool(self._vf.Tool.model_validate(t)) for t in info.get("tool_defs") or self._own.tool_defs or ()]
        if tools and not self._turns.reads_calls:
            raise _unserved(
                self._section, "has tools", "models whose chat template writes calls as <tool_call>{...}</tool_call>"
            )
        return tools


def load(section: EnvironmentSection) -> tuple[ModuleType, Any]:
    """Return the package and the environment. Raises ConfigError: it cannot be loaded, or is not served."""
    name = section.kind.partition(":")[2]
    try:
        vf = importlib.import_module("verifiers")
        classic = hasattr(vf, "load_environment")
        with _own_signal_handlers():
            own: Any = vf.load_environment(name, **section.options) if classic else None
    except Exception as error:  # whatever its module raises
        raise ConfigError(
            f"environment.kind: {section.kind} cannot be loaded ({type(error).__name__}: {error}); allowed: an "
            "environment of the package verifiers; fix: pip install verifiers and the environment, or correct "
            "environment.options"
        ) from error
    if not classic:
        raise ConfigError(
            f"environment.kind: got {section.kind} with verifiers {vf.__version__}, which has no load_environment; "
            "allowed: 0.3, which has the classic environments; fix: pip install 'verifiers<0.4'"
        )
    if own.requires_group_rollouts:
        raise _unserved(section, "has rewards of a whole group", "rewards of one rollout each")
    if own.provides_advantages:
        raise _unserved(section, "has advantages of its own", "rewards; advantages are those of `algorithm`")
    if own.message_type != "chat":
        raise _unserved(section, f"has messages of type {own.message_type}", "chat")
    return vf, own


def _unserved(section: EnvironmentSection, got: str, allowed: str) -> ConfigError:
    return ConfigError(f"environment.kind: {section.kind} {got}; allowed: {allowed}; fix: use another environment")


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the run's handlers: `Environment.__post_init__` puts its own in their place, which end the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Talk:
    """A conversation as its environment sees it: chats that grow, and answers to them."""

    def __init__(self, conversation: Conversation, turns: Turns, max_turn_tokens: int | None) -> None:
        self._conversation, self._turns, self._most = conversation, turns, max_turn_tokens
        self._seen: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = None

    async def answer(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, sampling: Mapping[str, object]
    ) -> Completion:
        """Show the model what is new in the chat, and let it go on. Raises OutOfRoomError."""
        limit = _limit(self._conversation, sampling, self._most)
        self._show(chat, tools)
        completion = await self._conversation.generate(limit)
        self._seen, self._tools = list(chat), tools
        return completion

    def calls(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the tools that an answer calls, which are counted."""
        calls, unreadable = calls_in(completion.text) if self._tools else ([], 0)
        self._conversation.report(tool_calls=len(calls), tool_errors=unreadable)
        return calls

    def said(self, message: Mapping[str, Any]) -> None:
        """Remember an answer as the environment was told it."""
        self._seen.append(_message(self._conversation, message))

    @property
    def turn(self) -> int:
        """Messages before the last answer."""
        return len(self._seen)

    def _show(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        conversation = self._conversation
        if not self._seen:
            if self._turns.prompt(chat, tools or ()) != list(conversation.tokens):
                raise conversation.refuse(
                    "the prompt is another than that of the problem",
                    "data.prompt_template chat, data.template {prompt}, an environment that begins with its row",
                    f"set them, or write data.train again with python -m {__spec__.name}",
                )
            return
        old, new = chat[: len(self._seen)], chat[len(self._seen) :]
        if old != self._seen or tools != self._tools or not new:
            raise conversation.refuse(
                "a request does not go on from the last answer", "messages that are added behind it, same tools"
            )
        if any(one["role"] not in ("user", "tool") for one in new):
            roles = ", ".join(one["role"] for one in new)
            raise conversation.refuse(f"messages of {roles} are added", "messages of user or tool")
        try:
            conversation.observe(self._turns.messages(new, conversation.last_token))
        except ConfigError as error:
            raise conversation.refuse(str(error), "a template that renders them") from error


def _client(vf: ModuleType, conversation: Conversation, talk: _Talk) -> _Client:
    """Return a `verifiers.Client` that asks the run's engine to go on with this conversation."""

    class EngineClient(vf.Client):  # type: ignore[name-defined,misc]
        trajectory: Sequence[Mapping[str, Any]] = ()

        def setup_client(self, config: object) -> None:
            """Need nothing."""

        async def to_native_tool(self, tool: _Tool) -> dict[str, Any]:
            return _tool(tool)

        async def to_native_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict]:
            return [_message(conversation, one) for one in messages], {}

        async def get_native_response(
            self,
            prompt: list[dict[str, Any]],
            model: str,
            sampling_args: Mapping[str, object],
            tools: list[dict[str, Any]] | None = None,
            state: Mapping[str, Any] | None = None,
            **others: object,
        ) -> Completion:
            if others:
                raise conversation.refuse(
                    f"a request has {', '.join(others)}", "messages, tools, and a limit of tokens"
                )
            self.trajectory = [] if state is None else state["trajectory"]
            try:
                return await talk.answer(prompt, tools, sampling_args)
            except OutOfRoomError as error:
                raise vf.OverlongPromptError(str(error)) from error

        async def raise_from_native_response(self, response: Completion) -> None:
            """Nothing is wrong with it."""

        async def from_native_response(self, response: Completion) -> object:
            calls, turn, cut = talk.calls(response), talk.turn, response.finish_reason == "length"
            tool_calls = [
                vf.ToolCall(id=f"call_{turn}_{i}", name=one["name"], arguments=json.dumps(one["arguments"]))
                for i, one in enumerate(calls)
            ]
            message = vf.types.ResponseMessage(
                content=response.text[: response.text.index(CALL_BEGINS)].rstrip() if calls else response.text,
                tool_calls=tool_calls or None,
                finish_reason="length" if cut else "tool_calls" if tool_calls else "stop",
                is_truncated=cut,
            )
            talk.said(message)
            length = len(response.tokens)
            read = len(conversation.tokens) - length
            usage = vf.types.Usage(
                prompt_tokens=read, reasoning_tokens=0, completion_tokens=length, total_tokens=read + length
            )
            return vf.Response(id=f"turn_{turn}", created=0, model="policy", usage=usage, message=message)

        async def close(self) -> None:
            """Hold nothing."""

    client: _Client = EngineClient(None)
    return client


def _limit(conversation: Conversation, sampling: Mapping[str, object], most: int | None) -> int | None:
    """Return the tokens of an answer. Other sampling than the run's would be trained as the run's: refused."""
    given = {k: v for k, v in sampling.items() if v is not None and k not in _LIMITS and _DEFAULTS.get(k) != v}
    if given:
        raise conversation.refuse(
            f"a request samples with {', '.join(given)}",
            "max_tokens; the rest is that of rollout.temperature and top_p",
        )
    limits = [int(str(sampling[name])) for name in _LIMITS if sampling.get(name) is not None] + ([most] if most else [])
    return min(limits, default=None)


def _tool(tool: _Tool) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _message(conversation: Conversation, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of verifiers as plain values. What is no text is refused."""
    try:
        return _texts(message)
    except ValueError as error:
        raise conversation.refuse(str(error), "text") from error


def _plain(section: EnvironmentSection, message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _texts(message)
    except ValueError as error:
        raise _unserved(section, str(error), "text") from error


def _texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return role and text of a message, and which tools it calls or answers. Raises ValueError: it is not text."""
    if isinstance(message, str):
        raise ValueError("has a prompt that is a text without roles")
    get = message.get  # of a mapping, or of verifiers' message
    content = get("content") or ""
    if not isinstance(content, str):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if other := {str(part.get("type")) for part in parts} - {"text"}:
            raise ValueError(f"has a message with {', '.join(sorted(other))}")
        content = "".join(part["text"] for part in parts)
    plain: dict[str, Any] = {"role": get("role"), "content": content}
    if get("tool_call_id"):
        plain["tool_call_id"] = get("tool_call_id")
    if get("tool_calls"):
        plain["tool_calls"] = [_written(one.id, one.name, one.arguments) for one in get("tool_calls") or ()]
    return plain


def _written(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as chat templates take it, with its arguments as a mapping where they are one."""
    try:
        read = json.loads(arguments)
    except ValueError:
        read = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the problems of an environment, one JSON object a line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    parser.add_argument("name", help="as in environment.kind: verifiers:NAME")
    parser.add_argument("--model", required=True, help="directory of the model, whose chat template writes tools")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, as environment.options")
    given = parser.parse_args(arguments)
    try:
        section = EnvironmentSection(kind=f"verifiers:{given.name}", options=given.options)
        environment = HubEnvironment(section, load_tokenizer(given.model, chat_template=True))
        rows = list(environment.problems(given.split))
    except DaroError as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
