"""OpenAI's API for agents: chats of many sessions, each under a key of its own, answered by the run's engine.

HTTP -> checked request -> AgentSession -> Conversation -> the engine, and back. It runs on the environments' event
loop, and listens on loopback unless told otherwise. A parameter that would change an answer and is not served is
refused by name.

Source: OpenAI's reference of POST /v1/chat/completions and /v1/completions, as its Python client 3.57 has them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from megatron_daro.config.sections import LOOPBACK
from megatron_daro.environments.agent_session import AgentSession, ChatRequest, Message, RefusedRequestError, Reply
from megatron_daro.environments.environment import Conversation
from megatron_daro.environments.rendering import Turns
from megatron_daro.errors import RolloutError
from megatron_daro.ports import in_address

_MOST_BYTES = 32 * 2**20
_MOST_CHOICES = 128
_IGNORED = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity"),
    )
)
"""Parameters that do not change an answer of this model."""
_SERVED = frozenset(
    (
        *("messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "stream"),
        *("stream_options", "tools", "tool_choice", "logprobs"),
    )
)
_OF_CHATS = frozenset(("messages", "tools", "tool_choice", "max_completion_tokens"))
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Further parameters -> the values at which they change nothing."""


class AgentEndpoint:
    """The server. Each session is found by its key."""

    def __init__(
        self,
        turns: Turns,
        warn: Callable[[str], None],
        max_turn_tokens: int | None,
        host: str = LOOPBACK,
        socket: str = "",
    ) -> None:
        """Listen to nothing yet.

        Args:
            turns: writes chats as tokens. warn: told if an agent asks for other sampling than the run's.
                max_turn_tokens: most tokens of an answer; None: what there is room for. host: where it listens and is
                reached; on any other than loopback /health needs a key too. socket: path of a Unix socket on which it
                listens as well.
        """
        self._turns, self._warn, self._most, self._host = turns, warn, max_turn_tokens, host
        self._socket = socket
        self._sessions: dict[str, AgentSession] = {}
        self._started: asyncio.Future[str] | None = None
        self._runner: web.AppRunner | None = None
        self._warned = False

    async def url(self) -> str:
        """Return the base URL of the API; the first call begins to listen."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._started)

    @contextmanager
    def session(self, conversation: Conversation) -> Iterator[str]:
        """Serve a conversation within the block, under the key that it gives."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = AgentSession(conversation, self._turns)
        try:
            yield key
        finally:
            del self._sessions[key]

    async def _start(self) -> str:
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise RolloutError(
                f"environment.host: got {self._host}, where this machine cannot listen ({error.strerror}); fix: set it "
                "to an address of the driver's machine"
            ) from error
        if self._socket:
            try:
                await web.UnixSite(self._runner, self._socket, backlog=1024).start()
            except OSError as error:
                raise RolloutError(
                    f"environment.sandbox: got {self._socket}, a socket that cannot be made ({error}); fix: set TMPDIR "
                    "to a shorter path"
                ) from error
            Path(self._socket).chmod(0o666)  # a sandbox's user is nobody; the socket's folder keeps others out
        named = in_address(self._host)
        return f"http://{named}:{self._runner.addresses[0][1]}/v1"

    async def _health(self, http: web.Request) -> web.Response:
        if self._host != LOOPBACK:
            self._session(http)
        return _json({"status": "ok", "sessions": len(self._sessions)})

    async def _models(self, http: web.Request) -> web.Response:
        self._session(http)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megatron_daro"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body, replies = await self._replies(http, _SERVED)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.get("model")}
        if not body.get("stream"):
            choices = [_choice(i, reply, self._logprobs(body, reply)) for i, reply in enumerate(replies)]
            return _json({**head, "object": "chat.completion", "choices": choices, "usage": _usage(replies)})
        return await _streamed(http, {**head, "object": "chat.completion.chunk"}, self._events(body, replies))

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body, replies = await self._replies(http, (_SERVED - _OF_CHATS) | {"prompt"})
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.get("model")}
        whole = {**head, "object": "text_completion"}
        choices = [self._text_choice(i, reply, body.get("logprobs") is not None) for i, reply in enumerate(replies)]
        if not body.get("stream"):
            return _json({**whole, "choices": choices, "usage": _usage(replies)})
        return await _streamed(http, whole, ({"choices": [choice]} for choice in choices))

    def _text_choice(self, index: int, reply: Reply, logprobs: bool) -> dict[str, Any]:
        said, texts = reply.completion, [self._turns.text_of(token) for token in reply.completion.tokens]
        told = {"tokens": texts, "token_logprobs": said.logprobs, "top_logprobs": None, "text_offset": None}
        text = reply.message["content"]
        return {
            "index": index,
            "text": text,
            "logprobs": told if logprobs else None,
            "finish_reason": reply.finish_reason,
        }

    async def _replies(self, http: web.Request, served: Collection[str]) -> tuple[dict[str, Any], list[Reply]]:
        """Return the body of a request and its answers. Raises RefusedRequestError."""
        session = self._session(http)
        try:
            body = orjson.loads(await http.read())
        except orjson.JSONDecodeError as error:
            raise RefusedRequestError(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise RefusedRequestError("the body is no JSON object")
        request = self._read(body, session.conversation, served)
        return body, await _all(session.answer(request, number) for number in range(request.count))

    def _session(self, http: web.Request) -> AgentSession:
        session = self._sessions.get(http.headers.get("Authorization", "").removeprefix("Bearer "))
        if session is None:
            raise RefusedRequestError(
                "Incorrect API key provided: it is of no rollout that is under way", None, "invalid_api_key"
            )
        return session

    def _read(self, body: Mapping[str, Any], conversation: Conversation, served: Collection[str]) -> ChatRequest:
        given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        for name, value in given.items():
            if name not in served and value not in _NEUTRAL.get(name, ()):
                raise RefusedRequestError(f"{name}: got {value!r:.80}, which is not served here; leave it out", name)
        own = conversation.request.sampling
        temperature = _number(given, "temperature", own.temperature, 0, 100)
        top_p = _number(given, "top_p", own.top_p, 1e-6, 1)
        trained = (temperature, top_p) == (own.temperature, own.top_p)
        if not trained and not self._warned:
            self._warned = True
            self._warn(
                f"environment.kind: an agent asks for temperature {temperature:g} and top_p {top_p:g}, the run samples "
                f"with {own.temperature:g} and {own.top_p:g}: such answers are given, but not trained; fix: leave both "
                "out of its requests, or set rollout.temperature and rollout.top_p"
            )
        limits = [_whole(given, name, 1) for name in ("max_tokens", "max_completion_tokens") if name in given]
        most = min([*limits, own.max_new_tokens, *([self._most] if self._most else [])])
        stop = given.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
            raise RefusedRequestError(f"stop: got {stop!r:.80}; allowed: texts", "stop")
        choice, tools = given.get("tool_choice", "auto"), given.get("tools") or []
        if choice not in ("auto", "none"):
            raise RefusedRequestError(f"tool_choice: got {choice!r:.80}; allowed: auto, none", "tool_choice")
        if tools and not self._turns.reads_calls:
            raise RefusedRequestError(
                "tools: the model's chat template does not write calls as <tool_call>{...}</tool_call>; leave them "
                "out, and have your agent describe its tools in a message and read calls from the text",
                "tools",
            )
        if not isinstance(tools, list) or not all(isinstance(one, dict) and "function" in one for one in tools):
            raise RefusedRequestError(f"tools: got {tools!r:.80}; allowed: functions", "tools")
        count = _whole(given, "n", 1) if "n" in given else 1
        if count > _MOST_CHOICES:
            raise RefusedRequestError(f"n: got {count}; allowed: 1 to {_MOST_CHOICES}", "n")
        return ChatRequest(
            messages=[] if "prompt" in served else _messages(given.get("messages")),
            prompt=_prompt(given.get("prompt")) if "prompt" in served else None,
            tools=tools,
            sampling=replace(
                own,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=most,
                stop=tuple(dict.fromkeys((*own.stop, *stop))),
            ),
            trained=trained,
            seed=_whole(given, "seed", None) if "seed" in given else None,
            count=count,
            stop=tuple(stop),
            calls=bool(tools) and choice == "auto",
        )

    def _logprobs(self, body: Mapping[str, Any], reply: Reply) -> dict[str, Any] | None:
        if not body.get("logprobs"):
            return None
        said = zip(reply.completion.tokens, reply.completion.logprobs, strict=True)
        texts = ((self._turns.text_of(token), logprob) for token, logprob in said)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in texts
            ],
            "refusal": None,
        }

    def _events(self, body: Mapping[str, Any], replies: list[Reply]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream: each answer in one piece, since all of it is there when the stream begins."""
        options = body.get("stream_options")
        counted = isinstance(options, dict) and bool(options.get("include_usage"))
        extra = {"usage": None} if counted else {}
        for index, reply in enumerate(replies):
            delta = dict(reply.message)
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            logprobs = self._logprobs(body, reply)
            yield {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}], **extra}
            end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reply.finish_reason}
            yield {"choices": [end], **extra}
        if counted:
            yield {"choices": [], "usage": _usage(replies)}


async def _streamed(
    http: web.Request, head: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in events:
        await response.write(b"data: " + orjson.dumps({**head, **event}) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _all(answers: Any) -> list[Reply]:
    """Return the answers of one request. The first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in answers]
    return [task.result() for task in tasks]


def _choice(index: int, reply: Reply, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    message = {**reply.message, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish_reason}


def _usage(replies: list[Reply]) -> dict[str, int]:
    read, said = replies[0].read, sum(len(reply.completion.tokens) for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def _prompt(given: object) -> str | tuple[int, ...]:
    """Return one prompt. Raises RefusedRequestError."""
    one = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    if isinstance(one, str) and one:
        return one
    if isinstance(one, list) and one and all(isinstance(token, int) and not isinstance(token, bool) for token in one):
        return tuple(one)
    raise RefusedRequestError(f"prompt: got {given!r:.80}; allowed: one text, or one list of token ids", "prompt")


def _messages(given: object) -> list[Message]:
    """Return messages as chat templates take them. Raises RefusedRequestError."""
    if not isinstance(given, list) or not given:
        raise RefusedRequestError("messages: a list of at least one message is needed", "messages")
    return [_message(one) for one in given]


def _message(given: object) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(role, str):
        raise RefusedRequestError(f"messages: got {given!r:.80}; allowed: objects with a role", "messages")
    content = given.get("content") or ""
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content} - {"text"}
        if kinds:
            raise RefusedRequestError(f"messages: got content of type {kinds.pop()!r}; allowed: text", "messages")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RefusedRequestError(f"messages: got the content {content!r:.80}; allowed: text", "messages")
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    message |= {name: given[name] for name in ("name", "tool_call_id", "reasoning_content") if given.get(name)}
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
        except (TypeError, KeyError):
            raise RefusedRequestError(
                f"messages: got tool_calls {calls!r:.80}; allowed: functions", "messages"
            ) from None
    return message


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it: with its arguments parsed, if they are JSON."""
    try:
        arguments = json.loads(given["arguments"])
    except ValueError:
        arguments = given["arguments"]
    return {"name": given["name"], "arguments": arguments}


def _number(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RefusedRequestError(f"{name}: got {value!r:.80}; allowed: {least:g} to {most:g}", name)
    return float(value)


def _whole(given: Mapping[str, Any], name: str, least: int | None) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        allowed = "a whole number" if least is None else f"a whole number, at least {least}"
        raise RefusedRequestError(f"{name}: got {value!r:.80}; allowed: {allowed}", name)
    return value


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer refusals as OpenAI does."""
    try:
        return await handler(request)
    except RefusedRequestError as error:
        return _refusal(error)
    except ExceptionGroup as group:
        refused = group.subgroup(RefusedRequestError)
        if refused is None:
            raise
        return _refusal(refused.exceptions[0])  # type: ignore[arg-type]
    except web.HTTPException as error:
        return _json(_error(error.reason, None, None), error.status)


def _refusal(error: RefusedRequestError) -> web.Response:
    status = 401 if error.code == "invalid_api_key" else 400
    return _json(_error(str(error), error.parameter, error.code), status)


def _error(message: str, parameter: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": parameter, "code": code}}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
