"""A server process that speaks as SGLang does and answers from memory, for control_plane.py and evaluate.py.

    python benchmarks/canned_server.py [--rate R --under-way N] SAMPLES TOKENS FIRST VOCABULARY ENDING...   # prints URL

Every answer has SAMPLES samples of TOKENS tokens: random ids from FIRST on, then one of the ENDINGs
(ids with commas) in turn. A few
different bodies are made when it starts; sending one costs this process no work per token. It answers at once, or, with
--rate, after about the time that generation would take: R tokens a second for N requests together, the others wait, and
each takes between half and one and a half of the mean, so that not all end at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from loopback_server import listen
from stub_server import ALL_CALLS, sampling_of

DISTINCT = 4


def body(samples: int, tokens: int, ordinary: range, endings: list[list[int]], seed: int) -> bytes:
    """One answer: half of the samples end with the first ending, the others with the second."""
    rng = random.Random(seed)
    answers = []
    for sample in range(samples):
        ending = endings[sample % len(endings)]
        ids = [*rng.choices(ordinary, k=tokens - len(ending)), *ending]
        pairs = [[-rng.random(), token, None] for token in ids]
        span = {"version": "0", "start": 0, "end": len(ids)}
        meta = {"finish_reason": {"type": "stop", "matched": ids[-1]}, "output_token_logprobs": pairs}
        answers.append({"output_ids": ids, "meta_info": meta | {"weight_version": "0", "weight_versions": [span]}})
    return orjson.dumps(answers)


def application(bodies: list[bytes], vocabulary: int, *, pause_s: float = 0.0, under_way: int = 1 << 30) -> Any:
    """What answers each call; an answer takes pause_s, of at most `under_way` requests at once."""
    turns, room, lengths = itertools.cycle(bodies), asyncio.Semaphore(under_way), random.Random(0)
    info = {"version": "0.5.23", "device": "cpu", "dtype": "float32", "max_total_num_tokens": 10**9}
    info |= {"max_req_input_len": 10**6, "tp_size": 1, "model_path": "/model", "skip_tokenizer_init": True}

    async def answer(request: web.Request) -> web.StreamResponse:
        said = await request.json() if request.can_read_body else {}
        if request.path == "/server_info":
            return web.json_response(info)
        if request.path == "/openapi.json":
            return web.json_response({"paths": {path: {} for path in ALL_CALLS}})
        if request.path == "/model_info":
            return web.json_response({"model_type": "qwen2"})
        if request.path == "/generate":
            bias = sampling_of(said).get("logit_bias", {})
            if any(int(token) >= vocabulary for token in bias):
                return web.json_response(
                    {"error": {"message": "logit_bias must has keys in the vocabulary"}}, status=400
                )
            count = sampling_of(said)["max_new_tokens"]
            if count > 100:
                async with room:
                    await asyncio.sleep(pause_s * lengths.uniform(0.5, 1.5))
                return web.Response(body=next(turns), content_type="application/json")
            pairs = [[-0.5, token, None] for token in range(3, 3 + count)]
            one = {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": pairs}}
            several = isinstance(said["input_ids"][0], list)
            return web.json_response([one] * len(said["input_ids"]) if several else one)
        return web.json_response({"success": True})

    return answer


async def serve(args: argparse.Namespace) -> None:
    endings = [list(map(int, text.split(","))) for text in args.endings]
    bodies = [body(args.samples, args.tokens, range(args.first, args.vocabulary), endings, s) for s in range(DISTINCT)]
    pause_s = args.tokens * args.samples * args.under_way / args.rate if args.rate else 0.0
    answers = application(bodies, args.vocabulary, pause_s=pause_s, under_way=args.under_way)
    runner, url = await listen(answers, largest_body=2**26)
    print(url, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends when whoever started it is gone
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second; 0: no limit")
    parser.add_argument("--under-way", type=int, default=1 << 30, help="requests at once")
    for name in ("samples", "tokens", "first", "vocabulary"):
        parser.add_argument(name, type=int)
    parser.add_argument("endings", nargs="+")
    asyncio.run(serve(parser.parse_args()))
