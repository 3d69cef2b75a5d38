"""What an evaluation costs beside the servers' own time.

    python benchmarks/evaluate.py --answers 512 --json

Two servers of this machine answer from memory after the time that generation would take (--rate tokens a second for
all requests of one together, at most --under-way of them at once). The same requests are made by a bare loop
(aiohttp, JSON, nothing is looked at) and by the evaluation's own loop (requests of the engine, parsing and checks,
text, verdicts by the pool, Parquet), in turns. Goal: 1.1 of the bare loop's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import aiohttp
import harness
from canned_servers import CannedAnswers, canned_servers
from sglang_pool import engine_of, section

from megatron_daro.config.sections import EvalSet
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.engine.sglang.request import calls_of
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Prompt
from megatron_daro.workshop.evaluate.answers import AnswerStore
from megatron_daro.workshop.evaluate.asking import Parts, ask
from megatron_daro.workshop.evaluate.questions import Question, questions_of, requests

SERVERS, DISTINCT, LIMIT_S, GOAL = 2, 4, 60.0, 1.1


def questions(args: argparse.Namespace) -> list[Question]:
    """Sums, eight samples each."""
    prompts = tuple(
        Prompt(str(i), str(2 * i), "sums", text=f"{i} + {i}?", tokens=tuple(range(3, 203)))
        for i in range(args.answers // 8)
    )
    one = EvalSet(name="sums", path=Path("x"), rollouts_per_prompt=8, temperature=1.0)
    return questions_of([HeldOut(one, prompts)], max_new_tokens=args.tokens, stops=Stops((2,)))


def text_of(ids: Sequence[int]) -> str:
    """As long as a real answer, right for one problem in some."""
    return "Let us compute. " * (len(ids) // 4) + f"\\boxed{{{ids[0]}}}"


async def bare(urls: Sequence[str], asked: Sequence[Question], window: int) -> None:
    """Post, parse JSON, forget."""
    bodies = [
        calls_of(request, f"bare-{i}", seed=0, cache_key="x")[0].body for i, request in enumerate(requests(asked, ()))
    ]
    left = iter(enumerate(bodies))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for i, body in left:
                async with session.post(f"{urls[i % len(urls)]}/generate", json=body) as answer:
                    json.loads(await answer.read())

        await asyncio.gather(*(work() for _ in range(window)))


async def evaluation(urls: Sequence[str], asked: Sequence[Question], window: int, pool: RewardPool, out: Path) -> None:
    """The loop of `megatron-daro eval`."""
    options = section(max_tokens_in_flight=10**9)
    engine = engine_of(list(urls), out, options=options, warnings=[], decode=text_of)
    await engine.start()
    try:
        engine.serve_as_loaded()
        parts = Parts(engine, pool, AnswerStore(out), window, lambda answer: None, LIMIT_S)
        await ask(parts, requests(asked, ()), asked)
    finally:
        await engine.close()


def canned_answers(args: argparse.Namespace) -> CannedAnswers:
    """Each after about the time that generation would take: between half and one and a half of the mean, so that not
    all end at once."""
    return CannedAnswers(
        servers=SERVERS,
        lengths=[[args.tokens]] * DISTINCT,
        ordinary=(3, 1000),
        endings=[[2]],
        vocabulary=1000,
        delay_s=args.tokens * args.under_way / args.rate,
        spread=(0.5, 1.5),
        concurrency=args.under_way,
    )


def measured(args: argparse.Namespace, urls: Sequence[str]) -> dict[str, list[harness.Seconds]]:
    """Seconds of both loops, in turns; the first turn is for caches and imports."""
    asked, window = questions(args), SERVERS * args.under_way
    with RewardPool("math", workers=2) as pool:
        pool.score([("\\boxed{1+1}", "x^2")])

        def bare_turn() -> harness.Seconds:
            return harness.timed(lambda: asyncio.run(bare(urls, asked, window)))[1]

        def evaluation_turn() -> harness.Seconds:
            with tempfile.TemporaryDirectory() as folder:
                return harness.timed(lambda: asyncio.run(evaluation(urls, asked, window, pool, Path(folder))))[1]

        return harness.in_turns({"bare": bare_turn, "evaluation": evaluation_turn}, args.repeats)


def main() -> None:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens a second of each server")
    parser.add_argument("--under-way", type=int, default=64, help="requests at once of each server")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with canned_servers(canned_answers(args)) as urls:
        seconds = measured(args, urls)
    wall = {name: median(one.wall for one in of_loop) for name, of_loop in seconds.items()}
    cpu_ms = {name: 1000 * median(one.cpu for one in of) / args.answers for name, of in seconds.items()}
    ratio = wall["evaluation"] / wall["bare"]
    rows = {name: [wall[name], cpu_ms[name]] for name in wall}
    harness.table(f"{args.answers} answers", ("seconds", "CPU ms an answer"), rows)
    result = {"setup": harness.setup_of(args), "wall_s": wall, "cpu_ms_per_answer": cpu_ms, "ratio": ratio}
    problems = harness.at_most("an evaluation over a bare loop", ratio, GOAL)
    harness.conclude("evaluate", result, problems, write=args.json)


if __name__ == "__main__":
    main()
