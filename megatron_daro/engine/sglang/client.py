"""Asynchronous HTTP calls to one SGLang server, each with a deadline; and what a server says of itself.

The engine's parts call servers through it, and so do the senders of sync/ in the exporting ranks. It knows the native
endpoints and their shapes, nothing of groups, versions or weights. Every call has a deadline. A server that cannot be
reached (worth another try) raises another error than one that refuses a request (not worth one).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from megatron_daro.engine.sglang.replies import (
    BadAnswerError,
    OpenAPI,
    ServerInfo,
    error_message,
    error_status,
    printable,
    printable_values,
    read,
)
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.sync.plan import Post

_CONNECT_S = 10.0
# Shorter than the server's own 5 s, so that it does not close a connection at the moment we reuse it.
_KEEPALIVE_S = 2.0
_ABORTS_AT_ONCE = 4
_DATA, _DONE, _EVENT_END = b"data: ", b"[DONE]", b"\n\n"


class UnreachableError(EngineError):
    """No complete answer came: connection refused or reset, a deadline, a 5xx. Another try, or another server, may
    succeed.

    status: of a 5xx; else 0."""

    status = 0


class DisconnectedError(UnreachableError):
    """The connection could not be made, or broke: no answer, and maybe the request did not arrive either."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself.

    version: as text. calls: its endpoints. device: "cpu", "cuda", ... max_tokens: tokens its cache holds.
    max_input_tokens: longest prompt. context_tokens: longest prompt with its answer. tensor_parallel: ranks of its
    process group. has_tokenizer: whether it reads and writes text beside token ids. quantization: what its layers'
    matrices are cast to, such as "fp8"; "": nothing. streams_deltas: whether each event of a stream has only the new
    tokens (--incremental-streaming-output), instead of all so far. lora: whether it takes adapters. lora_rank,
    lora_targets: the largest rank, and the matrices, that adapters may have; 0 and empty if it does not say.
    """

    version: str
    calls: frozenset[str]
    device: str
    dtype: str
    max_tokens: int
    max_input_tokens: int
    context_tokens: int
    tensor_parallel: int
    has_tokenizer: bool
    quantization: str = ""
    streams_deltas: bool = False
    lora: bool = False
    lora_rank: int = 0
    lora_targets: frozenset[str] = frozenset()

    @property
    def has_sessions(self) -> bool:
        """Whether weight updates are enclosed in /begin_weight_update and /end_weight_update (0.5.21 and newer)."""
        return "/begin_weight_update" in self.calls

    @property
    def has_checksums(self) -> bool:
        """Whether the server can compute checksums of its tensors."""
        return "/weights_checker" in self.calls


class SGLangClient:
    """Connections to one server. Use it inside one event loop; `close` it, or leave its `async with`, when done."""

    def __init__(self, url: str) -> None:
        """Connect to nothing. Args: url: http://host:port."""
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop all connections; present and later calls fail. May be called twice."""
        self._closed = True
        # Closing only the session would leave the reader of a body without a length waiting: `ResponseHandler.close`
        # forgets the body before `connection_lost` could end it (aiohttp/client_proto.py, 3.14.5).
        for response in self._responses:
            response.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float) -> object:
        """Return the JSON answer of a GET. Raises as `post` does."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> object:
        """Return the JSON answer of a POST; None if the body of the answer is empty or not JSON.

        Raises:
            UnreachableError: connection, deadline or 5xx. RefusedError: 4xx, with what the server said.
        """
        return await self._call("POST", path, body or {}, timeout_s)

    async def stream(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> AsyncGenerator[Any, None]:
        """Yield the events of a streamed answer, each as JSON; an answer that is not streamed is yielded whole.

        Source: `serve_generate_request` in sglang/srt/entrypoints/http_server.py, 0.5.23: "data: JSON", an empty line,
        and "data: [DONE]" at the end; an error on the way is an event {"error": {"message", "code"}}.

        Raises:
            UnreachableError: connection, deadline, 5xx, or a stream without its end. RefusedError: 4xx, with what the
                server said.
        """
        async with self._response("POST", path, body, timeout_s) as response:
            if response.content_type != "text/event-stream":
                yield _parsed(await response.read())
                return
            async for line in _events(response.content):
                if line == _DONE:
                    return
                event = _parsed(line)
                if (status := error_status(event)) is not None:
                    self._check(path, status, line)
                yield event
        raise UnreachableError(f"{self.url}{path}: the stream of answers ended before its end was told")

    async def facts(self, *, timeout_s: float) -> ServerFacts:
        """Return what the server says of itself. Raises as `post`; RefusedError also if it is not an SGLang server."""
        try:
            info = await self.get("/server_info", timeout_s=timeout_s)
        except RefusedError:
            info = await self.get("/get_server_info", timeout_s=timeout_s)  # its name before 0.5.19
        described = await self.get("/openapi.json", timeout_s=timeout_s)
        try:
            return _facts(read(ServerInfo, info), read(OpenAPI, described))
        except BadAnswerError as error:
            raise RefusedError(f"{self.url}: /server_info: {error}; this is no SGLang server") from None

    async def model_info(self, *, timeout_s: float) -> Mapping[str, str]:
        """Return the text values with which it describes its model; empty if it answers none. Raises as `post` does."""
        try:
            info = await self.get("/model_info", timeout_s=timeout_s)
        except RefusedError:
            info = await self.get("/get_model_info", timeout_s=timeout_s)  # its name before 0.5.19
        return printable_values(info)

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float) -> None:
        """Ask the server to abort these requests, each call within `timeout_s`; it ignores names that it does not know.

        A few calls are sent at a time, on reused connections: opening thousands at once would block the event loop for
        seconds. When every one of these senders has met a deadline or a 5xx, the rest is not sent.
        """
        remaining_ids = iter(request_ids)

        async def send() -> None:
            for rid in remaining_ids:
                try:
                    await self.post("/abort_request", {"rid": rid}, timeout_s=timeout_s)
                except (RefusedError, DisconnectedError):
                    continue
                except UnreachableError:
                    return

        await asyncio.gather(*(send() for _ in request_ids[:_ABORTS_AT_ONCE]))

    async def healthy(self, *, timeout_s: float) -> bool:
        """Whether the server generates a token after the call began; an idle one generates one for this."""
        try:
            await self.get("/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> object:
        async with self._response(method, path, body, timeout_s) as response:
            return _parsed(await response.read())

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the response to an accepted call, to be read within the block."""
        if self._closed:
            raise DisconnectedError(f"{self.url}{path}: its connections were closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                self._responses.add(response)
                try:
                    if response.status >= 400:
                        self._check(path, response.status, await response.read())
                    yield response
                finally:
                    self._responses.discard(response)
        except TimeoutError as error:
            raise UnreachableError(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DisconnectedError(f"{self.url}{path}: {type(error).__name__}: {printable(error)}") from error

    def _check(self, path: str, status: int, content: bytes) -> None:
        """Raise the error that a status of 400 or more stands for."""
        if status >= 500:
            failed = UnreachableError(f"{self.url}{path}: status {status}: {error_message(_parsed(content), content)}")
            failed.status = status
            raise failed
        if status >= 400:
            raise RefusedError(f"{self.url}{path}: status {status}: {error_message(_parsed(content), content)}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield what follows "data: " in each event, however the network split it."""
    buffer, looked = bytearray(), 0
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(_EVENT_END, looked)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_EVENT_END)]
            looked = 0
            if event.startswith(_DATA):
                yield event[len(_DATA) :]
        looked = max(len(buffer) - len(_EVENT_END) + 1, 0)


def _facts(info: ServerInfo, described: OpenAPI) -> ServerFacts:
    states = info.internal_states
    return ServerFacts(
        version=info.version,
        calls=frozenset(described.paths),
        device=info.device or "",
        dtype=info.dtype or "",
        max_tokens=info.max_total_num_tokens or (states[0].max_total_num_tokens if states else None) or 0,
        max_input_tokens=info.max_req_input_len or 0,
        context_tokens=info.context_length or info.max_req_input_len or 0,
        tensor_parallel=info.tp_size or 1,
        has_tokenizer=not info.skip_tokenizer_init,
        quantization=info.quantization or "",
        streams_deltas=bool(info.incremental_streaming_output),
        lora=bool(info.enable_lora),
        lora_rank=info.max_lora_rank or 0,
        lora_targets=frozenset(info.lora_target_modules or ()),
    )


def _parsed(content: bytes) -> object:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


@asynccontextmanager
async def connect_to_servers() -> AsyncIterator[Post]:
    """Give a function that posts to any server, on connections that are kept within the block. The exporting ranks hand
    this to their senders, which call each server once per bucket."""
    clients: dict[str, SGLangClient] = {}

    async def post(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> object:
        return await clients.setdefault(url, SGLangClient(url)).post(path, body, timeout_s=timeout_s)

    try:
        yield post
    finally:
        for client in clients.values():
            await client.close()
