"""An HTTP server of this process that speaks as SGLang does, and misbehaves when told to.

Used where a fault cannot be had from a real server: connections that break in the middle of an answer, answers of
another form, versions that nobody can install here. What it says of itself and the shape of its answers were taken
from SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from loopback_server import listen

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.engine.sglang.vetting import MEMORY_CALLS, NEEDED_CALLS

ALL_CALLS = (
    *NEEDED_CALLS,
    *(call for transport in TRANSPORTS.values() for call in transport.calls),
    *MEMORY_CALLS,
    *("/begin_weight_update", "/end_weight_update", "/weights_checker", "/tokenize"),
)
Answer = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


class StubServer:
    """One server. Use as an async context manager.

    Attributes:
        url: its address. calls: how often each path was asked for; order: the paths in their order.
        bodies: of /generate; said: of every other path. running, most_running: requests at once.
        weight_version: that it names. released: memory that it gave back. checksums: those of its tensors.
        groups: of weight updates, that it has open. blocked: its GPUs wait in a broadcast that nobody ends.
        answers: path -> coroutine that answers instead. gate: /generate answers only while it is set, or with two
            tokens and "abort" when the request is aborted.
    """

    def __init__(
        self,
        *,
        version: str = "0.5.23",
        paths: Iterable[str] = ALL_CALLS,
        info: dict[str, Any] | None = None,
        model_type: str = "qwen2",
        vocabulary: int = 31,
    ) -> None:
        self._paths, self._model_type, self._vocabulary = tuple(paths), model_type, vocabulary
        self._info = {
            "version": version,
            "device": "cpu",
            "dtype": "float32",
            "max_total_num_tokens": 4096,
            "max_req_input_len": 4090,
            "tp_size": 1,
            "model_path": "/model",
            "skip_tokenizer_init": True,
            **(info or {}),
        }
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.said: defaultdict[str, list[Any]] = defaultdict(list)
        self.checksums: dict[str, str] = {}
        self.answers: dict[str, Answer] = {}
        self.running = self.most_running = 0
        self.weight_version = "default"
        self.released: set[str] = set()
        self.groups: set[str] = set()
        self.blocked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._aborts: dict[str, asyncio.Event] = {}
        self.url = ""

    async def __aenter__(self) -> StubServer:
        self._runner, self.url = await listen(self._answer)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Nothing listens any more. May be called twice."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, (await request.json() if request.can_read_body else None)
        self.calls[path] += 1
        self.order.append(path)
        self.said[path].append(body)
        if path in self.answers:
            return await self.answers[path](request, body)
        if path == "/server_info":
            return web.json_response(self._info)
        if path == "/openapi.json":
            return web.json_response({"paths": {path: {} for path in self._paths}})
        if path == "/model_info":
            return web.json_response({"model_type": self._model_type})
        if path == "/generate":
            return await self.generate(request, body)
        if path == "/init_weights_update_group":
            self.groups.add(body["group_name"])
        if path == "/destroy_weights_update_group":
            return self._destroy_group(body["group_name"])
        if path == "/weights_checker":
            if self.blocked.is_set():  # "current_platform.synchronize()": srt/utils/weight_checker.py
                await never(request, body)
            return web.json_response({"success": True, "ranks": [{"checksums": self.checksums}]})
        if path == "/abort_request":
            self._abort(body)
        if path == "/release_memory_occupation":
            self.released |= set(body["tags"])
        if path == "/resume_memory_occupation":
            self.released -= set(body["tags"])
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
        known = path in self._paths or path == "/health"
        return web.json_response({"success": known}, status=200 if known else 404)

    def _destroy_group(self, name: str) -> web.StreamResponse:
        # "if group_name in self._model_update_group": srt/model_executor/model_runner_components/weight_updater.py
        known = name in self.groups
        self.groups.discard(name)
        message = "" if known else "The group to be destroyed does not exist."
        return web.json_response({"success": known, "message": message}, status=200 if known else 400)

    def start_again(self) -> None:
        """What its process had is gone."""
        self.groups.clear()
        self.blocked.clear()

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer one request when the gate is open, or with what an abort leaves."""
        if self.blocked.is_set():
            await asyncio.Event().wait()
        last = self._vocabulary - 1
        beyond = [token for token in sampling_of(body).get("logit_bias", {}) if int(token) > last]
        if beyond:
            message = f"logit_bias must has keys in [0, {last}], got {beyond[0]}."
            return web.json_response({"error": {"message": message}}, status=400)
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        aborted = self._aborts.setdefault(str(body.get("rid")), asyncio.Event())
        ends = [asyncio.ensure_future(event.wait()) for event in (self.gate, aborted)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.running -= 1
            for end in ends:
                end.cancel()
        whole = self.gate.is_set()
        answers = self.generated(body) if whole else [self.one([1, 2], "abort") for _ in body["input_ids"]]
        return await answered(request, body, answers)

    def _abort(self, body: dict[str, Any]) -> None:
        """Ends requests by the name of one of their samples, or all."""
        for name, event in self._aborts.items():
            if body.get("abort_all") or body.get("rid", "").startswith(name):
                event.set()

    def generated(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """As many tokens for each input as were asked for, counted up from the number of tokens in it."""
        count = sampling_of(body)["max_new_tokens"]
        inputs = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        answers = [self.one([(len(ids) + i) % 30 for i in range(count)]) for ids in inputs]
        if body.get("logprob_start_len") == 0:
            for ids, answer in zip(inputs, answers, strict=True):
                given = given_logprobs(body | {"input_ids": ids}, lambda i: -0.49 - 0.01 * i, self._vocabulary)
                answer["meta_info"]["input_token_logprobs"] = given
        return answers

    def one(self, ids: list[int], finish_reason: str = "length") -> dict[str, Any]:
        """The answer of one sample."""
        span = {"version": self.weight_version, "start": 0, "end": len(ids)}
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish_reason, "length": len(ids)},
                "output_token_logprobs": [[-0.5 - 0.01 * i, token, None] for i, token in enumerate(ids)],
                "weight_version": self.weight_version,
                "weight_versions": [span],
            },
        }


async def answered(request: web.Request, body: dict[str, Any], answers: list[dict[str, Any]]) -> web.StreamResponse:
    """These answers to a request of /generate, in the form that it asks for."""
    if body.get("stream"):
        return await streamed(request, answers)
    return web.json_response(text=json.dumps(answers))


async def streamed(
    request: web.Request, answers: list[dict[str, Any]], go_on: asyncio.Event | None = None
) -> web.StreamResponse:
    """The answers as events, in any order: of each its first token, then all. go_on: when the others end too.

    "yield b"data: " + dumps_json(out) + b"\\n\\n"" and "yield b"data: [DONE]\\n\\n"": `serve_generate_request` in
    sglang/srt/entrypoints/http_server.py; "result["index"] = rid_to_index[...]": `_stream_batch_responses` in
    managers/tokenizer_manager.py; "req.send_token_offset == 0 and num_unsent > 0": `accept` in
    managers/scheduler_components/output_streamer.py; 0.5.23.
    """
    events = [first_token(answer) | {"index": index} for index, answer in enumerate(answers)]
    events += [answer | {"index": index} for index, answer in reversed(list(enumerate(answers)))]
    return await written(request, events, go_on=go_on, at_once=len(answers) + 1)


async def written(
    request: web.Request,
    events: list[dict[str, Any]],
    breaks: bool = False,
    *,
    go_on: asyncio.Event | None = None,
    at_once: int = 0,
) -> web.StreamResponse:
    """A stream of these events; breaks: without its end. go_on: when those after the first `at_once` are told."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for number, event in enumerate(events):
        if go_on and number >= at_once:
            await go_on.wait()
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    if breaks:
        await asyncio.sleep(0.05)
        assert request.transport
        request.transport.abort()
    else:
        await response.write(b"data: [DONE]\n\n")
    return response


def one_ends_early(stub: StubServer) -> tuple[Answer, asyncio.Event]:
    """The last sample of each group ends at once; the others when the event is set."""
    go_on = asyncio.Event()

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return await streamed(request, stub.generated(body), go_on)

    return answer, go_on


def first_token(answer: dict[str, Any]) -> dict[str, Any]:
    """What a stream says of a sample at first."""
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"][:1]
    return {
        "output_ids": answer["output_ids"][:1],
        "meta_info": meta | {"finish_reason": None, "output_token_logprobs": pairs},
    }


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling of a request: that of its first sample where each has its own."""
    sampling = body["sampling_params"]
    return sampling[0] if isinstance(sampling, list) else sampling


def answering(status: int, content: Any = None) -> Answer:
    """Always this status."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response(content if content is not None else {"error": {"message": "told to"}}, status=status)

    return answer


def times(count: int, answer: Answer, otherwise: Answer) -> Answer:
    """`answer` the first `count` times."""
    left = [count]

    async def counted(request: web.Request, body: Any) -> web.StreamResponse:
        left[0] -= 1
        return await (answer if left[0] >= 0 else otherwise)(request, body)

    return counted


async def reset(request: web.Request, body: Any) -> web.StreamResponse:
    """The connection ends before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def truncated(request: web.Request, body: Any) -> web.StreamResponse:
    """The connection ends in the middle of the JSON."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'[{"output_ids": [1, 2')
    assert request.transport is not None
    request.transport.abort()
    return response


async def never(request: web.Request, body: Any) -> web.StreamResponse:
    """No answer for as long as somebody waits."""
    await asyncio.Event().wait()
    return web.Response()


def given_logprobs(body: dict[str, Any], logprob: Callable[[int], float], vocabulary: int) -> list[list[Any]]:
    """`input_token_logprobs` of an answer: (log-prob, id, text) of each token from logprob_start_len on.

    logprob: of the token at an index. Of the first nothing is known, and the last id of the vocabulary is told as 0:
    "[None] + input_token_logprobs[:-1]" and "x if x < self.model_config.vocab_size - 1 else 0", lines 38 and 54 of
    sglang/srt/managers/scheduler_components/logprob_result_processor.py; no text without a tokenizer or
    return_text_in_logprobs: `detokenize_logprob_tokens`, line 3106 of managers/tokenizer_manager.py; 0.5.23.
    tests/contract/test_sglang_ids.py compares this with a real server.
    """
    start = body["logprob_start_len"]
    ids = [i if i < vocabulary - 1 else 0 for i in body["input_ids"][start:]]
    return [[None if i == 0 else logprob(start + i), token, None] for i, token in enumerate(ids)]
