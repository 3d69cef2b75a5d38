"""Tokens per second of SGLangEngine against a bare aiohttp loop, on one real server with the same requests.

    OMP_NUM_THREADS=1 python benchmarks/sglang_client.py --json                          # about 3 minutes on 2 cores
    OMP_NUM_THREADS=1 python benchmarks/sglang_client.py --pairs 2 --groups 4 --tokens 16

A small random Qwen2 on a CPU server, so that whatever the client costs shows as much as it ever will. Both sides post
the same bodies (a group of samples each, log-probs asked for, answers of a fixed length), all groups at once. The
bare loop posts, reads and parses (orjson), and counts tokens; the engine makes Rollouts with text, versions and checks.
They take turns, which one begins changes, and the medians are compared. Exit code 1 if the ratio is below 0.90.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import sglang_servers
from rich.console import Console
from rich.table import Table
from sglang_pool import give
from transformers import AutoModelForCausalLM

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import generation
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.generation import DirectAnswers
from megatron_daro.engine.sglang.supervision import Expected
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=sglang_servers.PYTHON, help="interpreter of the server")
    parser.add_argument("--groups", type=int, default=8, help="HTTP requests at once")
    parser.add_argument("--samples", type=int, default=8, help="of each group")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--pairs", type=int, default=25, help="turns of each side")
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/sglang_client.json")
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
        answers=DirectAnswers(lambda ids: " ".join(map(str, ids))),
        warn=print,
        run_dir=directory,
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
        for _ in range(arguments.pairs + 1):
            # A session of its own for each turn: like the engine's, it keeps connections no longer than the server.
            for side in ("engine", "bare") if len(rates["bare"]) % 2 else ("bare", "engine"):
                rates[side].append(await turn(side, engine, url, asked))
    finally:
        await engine.close()
    return {side: values[1:] for side, values in rates.items()}  # the first turn warms up


async def turn(side: str, engine: SGLangEngine, url: str, asked: Sequence[GroupRequest]) -> float:
    """Tokens per second of one turn of one side."""
    number = time.monotonic_ns()
    bodies = [
        generation.calls(request, f"bare-{number}-{i}", cache_key="bare")[0].body for i, request in enumerate(asked)
    ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        tokens = await (by_engine(engine, asked) if side == "engine" else by_hand(session, url, bodies))
        seconds = time.perf_counter() - started
    expected = sum(len(request.indices) * request.sampling.max_new_tokens for request in asked)
    if tokens != expected:
        raise SystemExit(f"{side}: {tokens} tokens came, not {expected}; see the server's log")
    return tokens / seconds


def summarized(arguments: argparse.Namespace, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, quartiles and the ratio."""
    medians = {side: statistics.median(values) for side, values in rates.items()}
    pairs = sorted(own / bare for own, bare in zip(rates["engine"], rates["bare"], strict=True))
    return {
        "setup": {
            **{key: getattr(arguments, key) for key in ("groups", "samples", "tokens", "pairs")},
            **sglang_servers.versions(arguments.python),
        },
        "engine_tokens_per_s": medians["engine"],
        "bare_tokens_per_s": medians["bare"],
        "ratio": medians["engine"] / medians["bare"],
        "pair_ratio_quartiles": [float(q) for q in np.quantile(pairs, (0.25, 0.5, 0.75))],
        "goal": GOAL,
        "rates": rates,
    }


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="sglang_client_") as name:
        result = summarized(arguments, asyncio.run(measure(arguments, Path(name))))
    table = Table("side", "tokens/s, median", "lowest", "highest", title=f"{arguments.pairs} turns each")
    for side in ("engine", "bare"):
        rates = result["rates"][side]
        table.add_row(side, *(f"{value:.0f}" for value in (statistics.median(rates), min(rates), max(rates))))
    Console().print(table)
    quartiles = ", ".join(f"{q:.3f}" for q in result["pair_ratio_quartiles"])
    print(f"ratio of medians {result['ratio']:.3f}, at least {GOAL} (quartiles of the ratio in a pair: {quartiles})")
    if arguments.json:
        sglang_servers.write_results("sglang_client", result)
    if result["ratio"] < GOAL:
        raise SystemExit("MISSED: the engine is slower than the goal allows")


if __name__ == "__main__":
    main()
