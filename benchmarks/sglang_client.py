"""Tokens per second of SGLangEngine against a bare aiohttp loop, on one real server with the same requests.

    OMP_NUM_THREADS=1 python benchmarks/sglang_client.py --json                          # about 3 minutes on 2 cores

A small random Qwen2 on a CPU server, so that whatever the client costs shows as much as it ever will. Both sides post
the same bodies (a group of samples each, log-probs asked for, answers of a fixed length), all groups at once. The
bare loop posts, reads and parses (orjson), and counts tokens; the engine makes Rollouts with text, versions and checks.
Goal: 0.90 of the bare loop's tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import harness
import numpy as np
import orjson
import sglang_servers
from sglang_pool import give
from transformers import AutoModelForCausalLM

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.request import calls_of
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.types import GroupRequest, Prompt, SamplingParams

GOAL = 0.90
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROMPT_TOKENS = 16


def parse_arguments() -> argparse.Namespace:
    parser = sglang_servers.arguments_of(__doc__)
    parser.add_argument("--groups", type=int, default=8, help="HTTP requests at once")
    parser.add_argument("--samples", type=int, default=8, help="of each group")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--pairs", type=int, default=25, help="turns of each side")
    return parser.parse_args()


def requests(arguments: argparse.Namespace) -> list[GroupRequest]:
    """The groups of every turn; nothing ends their answers but their length."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=arguments.tokens)
    prompts = rng.integers(0, SHAPE["vocab_size"], (arguments.groups, PROMPT_TOKENS)).tolist()
    return [
        GroupRequest(i, 0, Prompt(f"p{i}", "", "", tokens=tuple(tokens)), tuple(range(arguments.samples)), sampling)
        for i, tokens in enumerate(prompts)
    ]


def make_engine(arguments: argparse.Namespace, directory: Path) -> SGLangEngine:
    """An engine of one server, not started; it may send all groups at once."""
    model = directory / "model"
    sglang_servers.save_model(model, SHAPE)
    rows = arguments.groups * arguments.samples
    handle = sglang_servers.server(
        sglang_servers.require(arguments.python),
        model,
        directory / "server.log",
        dtype="float32",
        max_total_tokens=max(2 * rows * (PROMPT_TOKENS + arguments.tokens), 8192),
        max_running_requests=rows,
    )
    return SGLangEngine(
        {"server": handle},
        SGLangSection(start_timeout_s=300, request_timeout_s=300),
        Expected(model, "qwen2", PROMPT_TOKENS, PROMPT_TOKENS + arguments.tokens),
        asker=DirectAsker(lambda ids: " ".join(map(str, ids))),
        warn=print,
        run_dir=directory,
        seed=0,
        temperature=1.0,
        probe_tokens=range(8),
    )


async def by_engine(engine: SGLangEngine, asked: Sequence[GroupRequest]) -> int:
    """Tokens that came."""
    return sum([r.response_length async for rollouts in engine.generate(asked) for r in rollouts])


async def by_hand(session: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> int:
    """Tokens that came."""

    async def one(body: dict[str, Any]) -> int:
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{url}/generate", data=orjson.dumps(body), headers=headers) as answer:
            answer.raise_for_status()
            return sum(len(sample["output_ids"]) for sample in orjson.loads(await answer.read()))

    return sum(await asyncio.gather(*(one(body) for body in bodies)))


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Tokens per second of each turn, by side."""
    asked = requests(arguments)
    engine = make_engine(arguments, directory)
    rates: dict[str, list[float]] = {"engine": [], "bare": []}
    await engine.start()
    try:
        await give(engine, AutoModelForCausalLM.from_pretrained(directory / "model"), 0)  # no server answers before
        url = engine.fleet.servers[0].url
        for side, counts in harness.turns(rates, arguments.pairs):
            rate = await turn(side, engine, url, asked)
            if counts:
                rates[side].append(rate)
    finally:
        await engine.close()
    return rates


async def turn(side: str, engine: SGLangEngine, url: str, asked: Sequence[GroupRequest]) -> float:
    """Tokens per second of one turn of one side."""
    number = time.monotonic_ns()
    calls = [calls_of(one, f"bare-{number}-{i}", seed=0, cache_key="bare") for i, one in enumerate(asked)]
    bodies = [call.body for (call,) in calls]
    # A session of its own for each turn: like the engine's, it keeps connections no longer than the server.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        tokens = await (by_engine(engine, asked) if side == "engine" else by_hand(session, url, bodies))
        seconds = time.perf_counter() - started
    expected = sum(len(request.indices) * request.sampling.max_new_tokens for request in asked)
    if tokens != expected:
        raise SystemExit(f"{side}: {tokens} tokens came, not {expected}; see the server's log")
    return tokens / seconds


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="sglang_client_") as name:
        rates = asyncio.run(measure(arguments, Path(name)))
    medians = {side: median(values) for side, values in rates.items()}
    rows = {side: [medians[side], min(values), max(values)] for side, values in rates.items()}
    harness.table(f"tokens a second, {arguments.pairs} turns each", ("median", "lowest", "highest"), rows)
    pairs = [engine / bare for engine, bare in zip(rates["engine"], rates["bare"], strict=True)]
    result: dict[str, Any] = {
        "setup": sglang_servers.setup_of(arguments),
        "engine_tokens_per_s": medians["engine"],
        "bare_tokens_per_s": medians["bare"],
        "ratio": medians["engine"] / medians["bare"],
        "pair_ratio_quartiles": [float(q) for q in np.quantile(pairs, (0.25, 0.5, 0.75))],
        "rates": rates,
    }
    problems = harness.at_least("the engine's tokens a second over the bare loop's", result["ratio"], GOAL)
    harness.conclude("sglang_client", result, problems, write=arguments.json)


if __name__ == "__main__":
    main()
