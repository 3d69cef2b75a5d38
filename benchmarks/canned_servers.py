"""Servers that speak as SGLang does and answer from memory: one process, many ports.

    python benchmarks/canned_servers.py SPECIFICATION         # JSON; prints the URLs, in one line

Every answer has as many samples as were asked for: random ids, then one of the endings. A few different bodies are made
when the process starts; sending one costs no work per token. It ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.engine.sglang.vetting import NEEDED_CALLS

_CALLS = (*NEEDED_CALLS, *(call for transport in TRANSPORTS.values() for call in transport.calls))
_SESSION_CALLS = ("/begin_weight_update", "/end_weight_update")
_VERSION = b'"@version"'
_SHORT = 100
"""Answers of at most so many tokens are to the engine's own questions, not to prompts."""
_CACHE_TOKENS, _LONGEST_INPUT = 10**9, 10**6


@dataclass(frozen=True, slots=True)
class CannedAnswers:
    """What servers answer. Plain JSON values.

    servers: how many there are. lengths: tokens of each sample of each body, in turn the answer to a prompt. ordinary:
    first and last token id (not included) of answers. endings: token ids, the right one and the wrong one; the last id
    ends the answer. vocabulary: of the model. delay_s: until the longest sample is there, times a random number in
    spread. concurrency: requests that one server answers at once, the others wait; 0: all.
    """

    servers: int
    lengths: list[list[int]]
    ordinary: tuple[int, int]
    endings: list[list[int]]
    vocabulary: int
    delay_s: float = 0.0
    spread: tuple[float, float] = (1.0, 1.0)
    concurrency: int = 0


class Bodies:
    """Answers ready to be sent."""

    def __init__(self, canned: CannedAnswers) -> None:
        """Make them; sample i of a body ends with ending i in turn."""
        self._made = [_samples(canned, lengths, seed) for seed, lengths in enumerate(canned.lengths)]
        longest = max(map(max, canned.lengths))
        self._waits = [canned.delay_s * max(lengths) / longest for lengths in canned.lengths]
        self._turns = itertools.cycle(range(len(self._made)))
        self._ready: dict[tuple[int, int, str, bool], bytes] = {}

    def next(self, samples: int, version: str, *, streams: bool) -> tuple[float, bytes]:
        """Seconds to wait, and the body. streams: whether it is that of a stream, all of which comes at once."""
        index = next(self._turns)
        key = index, samples, version, streams
        if key not in self._ready:
            self._ready = {one: body for one, body in self._ready.items() if one[2] == version}
            canned = self._made[index]
            answers = [canned[i % len(canned)] for i in range(samples)]
            whole = _stream(answers) if streams else b"[" + b",".join(answers) + b"]"
            self._ready[key] = whole.replace(_VERSION, json.dumps(version).encode())
        return self._waits[index], self._ready[key]


def _samples(canned: CannedAnswers, lengths: list[int], seed: int) -> list[bytes]:
    rng, samples = random.Random(seed), []
    for sample, length in enumerate(lengths):
        ending = canned.endings[sample % len(canned.endings)]
        ids = [*rng.choices(range(*canned.ordinary), k=max(length - len(ending), 1)), *ending]
        pairs = [[-rng.random(), token, None] for token in ids]
        version = _VERSION.decode().strip('"')
        span = {"version": version, "start": 0, "end": len(ids)}
        meta = {"finish_reason": {"type": "stop", "matched": ids[-1]}, "output_token_logprobs": pairs}
        samples.append(
            orjson.dumps(
                {"output_ids": ids, "meta_info": meta | {"weight_version": version, "weight_versions": [span]}}
            )
        )
    return samples


def _stream(answers: Sequence[bytes]) -> bytes:
    """The events of a stream: of each sample the first token, then all. Source: `SGLangClient.stream`."""
    firsts = [b'{"output_ids":[0],"meta_info":{"finish_reason":null}}'] * len(answers)
    numbered = itertools.chain(enumerate(firsts), enumerate(answers))
    events = [b'data: {"index":%d,' % index + answer.removeprefix(b"{") + b"\n\n" for index, answer in numbered]
    return b"".join(events) + b"data: [DONE]\n\n"


class CannedServer:
    """One server: what answers its calls."""

    def __init__(self, canned: CannedAnswers, bodies: Bodies) -> None:
        self._canned, self._bodies, self._version = canned, bodies, "0"
        self._room = asyncio.Semaphore(canned.concurrency or sys.maxsize)
        self._random = random.Random(0)
        facts = {"version": "0.5.23", "max_total_num_tokens": _CACHE_TOKENS, "max_req_input_len": _LONGEST_INPUT}
        facts |= {"device": "cpu", "dtype": "float32", "tp_size": 1}
        fixed: dict[str, Callable[[], object]] = {
            "/server_info": lambda: facts | {"model_path": "/model", "skip_tokenizer_init": False},
            "/openapi.json": lambda: {"paths": {path: {} for path in (*_CALLS, *_SESSION_CALLS)}},
            "/model_info": lambda: {"model_type": "qwen2"},
        }
        self._fixed = fixed

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as a server would."""
        body = await request.json() if request.can_read_body else {}
        if request.path in self._fixed:
            return web.json_response(self._fixed[request.path]())
        if request.path == "/update_weight_version":
            self._version = body["new_version"]
        if request.path == "/generate":
            return await self._generate(body)
        return web.json_response({"success": True})

    async def _generate(self, body: dict[str, Any]) -> web.StreamResponse:
        sampling = body["sampling_params"]
        sampling = sampling[0] if isinstance(sampling, list) else sampling
        if any(int(token) >= self._canned.vocabulary for token in sampling.get("logit_bias", {})):
            text = "logit_bias must has keys in the vocabulary"
            return web.json_response({"error": {"message": text}}, status=400)
        count = sampling.get("max_new_tokens", 1)
        several = isinstance(body["input_ids"][0], list)
        if count > _SHORT and several:
            async with self._room:
                streams = body.get("stream", False)
                wait, answers = self._bodies.next(len(body["input_ids"]), self._version, streams=streams)
                await asyncio.sleep(wait * self._random.uniform(*self._canned.spread))
            return web.Response(body=answers, content_type="text/event-stream" if streams else "application/json")
        pairs = [[-0.5, token, None] for token in range(3, 3 + count)]
        one = {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": pairs}}
        return web.json_response([one] * len(body["input_ids"]) if several else one)


async def serve(canned: CannedAnswers) -> None:
    """Listen on loopback until standard input ends."""
    bodies, runners = Bodies(canned), []
    for _ in range(canned.servers):
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", CannedServer(canned, bodies).answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
    print(" ".join(f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends when whoever started it is gone
    for runner in runners:
        await runner.cleanup()


@contextmanager
def canned_servers(canned: CannedAnswers) -> Iterator[list[str]]:
    """Run the servers in a process of their own; their URLs. They end with the block."""
    command = [sys.executable, __file__, json.dumps(dataclasses.asdict(canned))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        urls = process.stdout.readline().split()
        if len(urls) != canned.servers:
            raise SystemExit("the canned servers did not start; their error is above")
        yield urls
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(serve(CannedAnswers(**json.loads(sys.argv[1]))))
