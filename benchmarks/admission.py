"""Tokens per second of the same client and servers, with the room of answers given back one by one, or group by group.

    OMP_NUM_THREADS=1 python benchmarks/admission.py --json                              # about 15 minutes on 2 cores
    OMP_NUM_THREADS=1 python benchmarks/admission.py --pairs 2 --groups 160 --json      # 4 minutes

The client is the run's own engine, over HTTP on loopback. The servers (a process of their own) have no model; they keep
SGLang's book of the cache: who is let in, who is sent back when it is full, and how long a step takes with as many
tokens in it. Answers are log-normal in length and the same on both sides. One side's servers say that they stream whole
answers, the other's that they stream deltas, with which the client asks for a group as one. All sizes are a tenth of
those of a 32B model on four H100s, and time goes by twice as fast. Sides take turns; medians are compared.

Exit code 1 if the ratio is below 1.35 or the cache less than 75 % full while groups wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sglang_servers
from aiohttp import ClientSession, web
from rich.console import Console
from rich.table import Table
from sglang_pool import engine_of, section

from megatron_daro.engine.sglang.client import NEEDED_CALLS, SYNC_CALLS
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

RATIO_GOAL, FULL_GOAL = 1.35, 0.75
CACHE, CAP, PROMPT_TOKENS = 79_000, 2_000, 16
"""Tokens of a server's cache: a tenth of (4 x 80 GB x 0.85 - 65.5 GB of weights) / 262 KB a token (64 layers, 8 heads
of 128, keys and values, bf16). The longest answer."""
MEDIAN, SIGMA = 250, 1.0
WEIGHTS_MS, FULL_CACHE_MS = 7.0, 15.0
"""A step reads all weights (65.5 GB at 4 x 3.35 TB/s, and 2 ms of everything else), and what is in the cache."""
FASTER, STRIDE = 2, 4
"""Tokens that are generated between two looks at the clock."""
CLIP, FIRST_RATIO, LAST_RATIO, DECAY_STEPS = 410, 0.7, 0.7 * 0.14, 600
"""SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION (a tenth of 4096), SGLANG_INIT_NEW_TOKEN_RATIO, that times
SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, and SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS: sglang/srt/environ.py, 0.5.23."""
PAIRS = [b"[-0.5,%d,null]" % (3 + i % 1000) for i in range(CAP)]
IDS = [b"%d" % (3 + i % 1000) for i in range(CAP)]


def length_of(group: int, sample: int) -> int:
    """Tokens of an answer."""
    return int(np.clip(np.random.default_rng([group, sample]).lognormal(np.log(MEDIAN), SIGMA), 1, CAP))


@dataclass(eq=False)
class Sample:
    """An answer that is being generated. group: of its request: the prompt is in the cache once."""

    group: object
    length: int
    made: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KvBook:
    """One server: its waiting and its running samples, and the tokens of both in its cache."""

    def __init__(self) -> None:
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.ratio, self.retracted, self.tokens = FIRST_RATIO, 0, 0
        self.fills: list[tuple[float, float]] = []  # (seconds of a step, part of the cache in use)
        self.counts = True
        self.came = asyncio.Event()

    @property
    def used(self) -> int:
        """Tokens in the cache."""
        groups = {sample.group for sample in self.running}
        return len(groups) * PROMPT_TOKENS + sum(sample.made for sample in self.running)

    def admit(self) -> None:
        """Let in who fits beside what the running ones are expected to need.

        Source: `rem_total_token_offset` and `add_one_req` in sglang/srt/managers/schedule_policy.py, 0.5.23: of each
        running request min(max_new_tokens - generated, clip) * ratio, of a new one its prompt and min(max_new_tokens,
        clip).
        """
        reserved = sum(min(CAP - sample.made, CLIP) for sample in self.running) * self.ratio
        free = CACHE - self.used - reserved
        while self.waiting:
            sample = self.waiting[0]
            need = sample.made + PROMPT_TOKENS + min(CAP - sample.made, CLIP)
            if need > free and self.running:
                return
            free -= need
            self.running.append(self.waiting.popleft())

    def retract(self) -> None:
        """Send back who has generated least until the next tokens fit.

        Source: `retract_decode` in sglang/srt/managers/schedule_batch.py, 0.5.23; the ratio rises by a little here.
        """
        while self.used + len(self.running) * STRIDE > CACHE and len(self.running) > 1:
            least = min(self.running, key=lambda sample: sample.made)
            self.running.remove(least)
            self.waiting.append(least)
            self.retracted += 1
            self.ratio = min(1.0, self.ratio + 0.02)

    async def run(self) -> None:
        """Generate for ever."""
        clock = time.monotonic()
        while True:
            if not (self.waiting or self.running):
                self.came.clear()
                await self.came.wait()
                clock = time.monotonic()
            self.admit()
            self.retract()
            fill = self.used / CACHE
            seconds = STRIDE * (WEIGHTS_MS + FULL_CACHE_MS * fill) / 1000 / FASTER
            self.fills.append((seconds if self.counts else 0.0, fill))
            for sample in self.running:
                step = min(STRIDE, sample.length - sample.made)
                sample.made, self.tokens = sample.made + step, self.tokens + step
                if sample.made == sample.length:
                    sample.ended.set()
            self.running = [sample for sample in self.running if sample.made < sample.length]
            self.ratio = max(LAST_RATIO, self.ratio - STRIDE * (FIRST_RATIO - LAST_RATIO) / DECAY_STEPS)
            clock += seconds
            await asyncio.sleep(max(clock - time.monotonic(), 0))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one group, sample by sample where a stream is asked for."""
        body = await request.json()
        prompts = body["input_ids"]
        if isinstance(prompts[0], int):  # whether it serves
            return web.Response(body=answer_of(0, 1), content_type="application/json")
        group = object()
        samples = [Sample(group, length_of(prompt[0] * 1000 + prompt[1], i)) for i, prompt in enumerate(prompts)]
        self.waiting.extend(samples)
        self.came.set()
        if not body["stream"]:
            for sample in samples:
                await sample.ended.wait()
            answers = [answer_of(i, sample.length) for i, sample in enumerate(samples)]
            return web.Response(body=b"[" + b",".join(answers) + b"]", content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def numbered(index: int) -> int:
            await samples[index].ended.wait()
            return index

        for ended in asyncio.as_completed([numbered(index) for index in range(len(samples))]):
            index = await ended
            await response.write(b"data: " + answer_of(index, samples[index].length) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def answer_of(index: int, length: int) -> bytes:
    """One answer as SGLang writes it."""
    return (
        b'{"index":%d,"output_ids":[%s],"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":[%s]}}'
        % (index, b",".join(IDS[:length]), b",".join(PAIRS[:length]))
    )


async def serve(servers: int, deltas: bool) -> None:
    """Listen until standard input ends."""
    facts = {"version": "0.5.23", "max_total_num_tokens": CACHE, "max_req_input_len": 10**6, "device": "cpu"}
    facts |= {"dtype": "float32", "model_path": "/model", "skip_tokenizer_init": True}
    facts |= {"incremental_streaming_output": deltas}
    calls = (*NEEDED_CALLS, *(call for calls in SYNC_CALLS.values() for call in calls))
    books, urls, runners = [KvBook() for _ in range(servers)], [], []

    def application(book: KvBook) -> web.Application:
        async def answer(request: web.Request) -> web.StreamResponse:
            fixed: dict[str, Any] = {
                "/server_info": facts,
                "/openapi.json": {"paths": {path: {} for path in calls}},
                "/model_info": {"model_type": "qwen2"},
                "/book": {"tokens": book.tokens, "retracted": book.retracted, "fills": book.fills},
            }
            if request.path == "/generate":
                return await book.generate(request)
            if request.path == "/no_more_wait":
                book.counts = False
            return web.json_response(fixed.get(request.path, {"success": True}))

        made = web.Application(client_max_size=2**26)
        made.router.add_route("*", "/{path:.*}", answer)
        return made

    tasks = [asyncio.create_task(book.run()) for book in books]
    for book in books:
        runner = web.AppRunner(application(book), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(" ".join(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends when whoever started it is gone
    for task in tasks:
        task.cancel()


async def side(arguments: argparse.Namespace, deltas: bool, directory: Path) -> dict[str, float]:
    """One turn of one side."""
    command = [sys.executable, __file__, "--serve", str(arguments.servers), *(["--deltas"] if deltas else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    urls = process.stdout.readline().split()
    engine = engine_of(urls, directory, options=section(max_restarts=0), warnings=[])
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=CAP)
    requests = [
        GroupRequest(
            i, 0, Prompt(f"p{i}", "", "", tokens=(i // 1000, i % 1000, *range(PROMPT_TOKENS - 2))),
            tuple(range(arguments.samples)), sampling,
        )
        for i in range(arguments.groups)
    ]  # fmt: skip
    await engine.start()
    engine.serve_as_loaded()
    engine.fleet.learn_lengths(iter([int(np.exp(np.log(MEDIAN) + SIGMA**2 / 2))]))  # as after a first batch
    try:
        async with ClientSession() as session:
            watch = asyncio.create_task(tell_last_begun(engine, session, urls, arguments.groups * arguments.samples))
            started = time.perf_counter()
            tokens = sum([r.response_length async for rollouts in engine.generate(requests) for r in rollouts])
            seconds = time.perf_counter() - started
            watch.cancel()
            books = [await (await session.get(f"{url}/book")).json() for url in urls]
    finally:
        await engine.close()
        process.kill()
        process.wait()
    expected = sum(length_of(i, k) for i in range(arguments.groups) for k in range(arguments.samples))
    if tokens != expected:
        raise SystemExit(f"{tokens} tokens came, not {expected}")
    steps = [step for book in books for step in book["fills"]]
    weight = sum(seconds for seconds, _ in steps)
    full = sum(seconds * fill for seconds, fill in steps) / weight
    return {"tokens_per_s": tokens / seconds, "full": full, "retracted": sum(book["retracted"] for book in books)}


async def tell_last_begun(engine: Any, session: ClientSession, urls: list[str], samples: int) -> None:
    """Have servers stop to count how full they are once no group waits for room any more."""
    begun: set[str] = set()
    while len(begun) < samples:
        begun |= engine._held.keys()
        await asyncio.sleep(0.02)
    for url in urls:
        await (await session.post(f"{url}/no_more_wait", json={})).read()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16, help="of each group")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/admission.json")
    parser.add_argument("--serve", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--deltas", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.deltas))
        return
    turns: dict[str, list[dict[str, float]]] = {"by answer": [], "by group": []}
    with tempfile.TemporaryDirectory(prefix="admission_") as name:
        for pair in range(arguments.pairs):
            for which in ("by answer", "by group") if pair % 2 else ("by group", "by answer"):
                turns[which].append(asyncio.run(side(arguments, which == "by group", Path(name))))
    medians = {which: {key: statistics.median(t[key] for t in of) for key in of[0]} for which, of in turns.items()}
    ratios = sorted(
        a["tokens_per_s"] / g["tokens_per_s"] for a, g in zip(turns["by answer"], turns["by group"], strict=True)
    )
    table = Table("room is given back", "tokens/s", "cache in use", "sent back", title=f"{arguments.pairs} turns each")
    for which, of in medians.items():
        table.add_row(which, f"{of['tokens_per_s']:.0f}", f"{of['full']:.0%}", f"{of['retracted']:.0f}")
    Console().print(table)
    ratio, full = statistics.median(ratios), medians["by answer"]["full"]
    print(f"ratio in a pair: median {ratio:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}; at least {RATIO_GOAL}")
    problems = [f"ratio {ratio:.2f}; goal {RATIO_GOAL}"] if ratio < RATIO_GOAL else []
    problems += [f"cache {full:.0%} full; goal {FULL_GOAL:.0%}"] if full < FULL_GOAL else []
    result = {
        "setup": {key: getattr(arguments, key) for key in ("servers", "groups", "samples", "pairs")},
        "medians": medians,
        "ratio": ratio,
        "turns": turns,
        "problems": problems,
    }
    sglang_servers.conclude("admission", json.loads(json.dumps(result)), write=arguments.json)


if __name__ == "__main__":
    main()
