"""What an evaluation costs beside the servers' own time, and how fast answers are verified.

    python benchmarks/evaluate.py [--answers 1024] [--tokens 1024] [--rate 2000] [--repeats 3] [--json]

Two servers of this machine answer from memory after the time that generation would take (--rate tokens a second for
all requests of one together, at most --under-way of them at once). The same requests are made by a bare loop
(aiohttp, JSON, nothing is looked at) and by the evaluation's own loop (requests of the engine, parsing and checks,
text, verdicts by the pool, Parquet), in turn; the ratio is that of their medians. Both do the work in one process; with
--cpu also the CPU time of each is shown. Then --verified answers of the math sets (or, where they are not there, of
made-up sums) are verified by the pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from sglang_pool import engine_of, section  # noqa: E402
from verifiers import FILES, golds_of, load  # noqa: E402

from megatron_daro.config.sections import EvalSet  # noqa: E402
from megatron_daro.data.stops import Stops  # noqa: E402
from megatron_daro.data.templates import HeldOut  # noqa: E402
from megatron_daro.engine.sglang.generation import calls  # noqa: E402
from megatron_daro.reward.pool import RewardPool  # noqa: E402
from megatron_daro.types import Prompt  # noqa: E402
from megatron_daro.workshop.evaluate.answers import (  # noqa: E402
    AnswerStore,
    Question,
    questions_of,
    requests,
)
from megatron_daro.workshop.evaluate.asking import Parts, ask  # noqa: E402
from megatron_daro.workshop.rehearse.canned_server import CannedAnswers, canned_fleet  # noqa: E402

SERVERS, DISTINCT, LIMIT_S = 2, 4, 60.0


def questions(args: argparse.Namespace) -> list[Question]:
    """Sums, eight samples each."""
    prompts = tuple(
        Prompt(str(i), str(2 * i), "sums", text=f"{i} + {i}?", tokens=tuple(range(3, 203)))
        for i in range(args.answers // 8)
    )
    one = EvalSet(name="sums", path=Path("x"), rollouts_per_prompt=8, temperature=1.0)
    return questions_of([HeldOut(one, prompts)], seed=0, max_new_tokens=args.tokens, stops=Stops((2,)))


def text_of(ids: Sequence[int]) -> str:
    """As long as a real answer, right for one problem in some."""
    return "Let us compute. " * (len(ids) // 4) + f"\\boxed{{{ids[0]}}}"


async def bare(urls: Sequence[str], asked: Sequence[Question], window: int) -> None:
    """Post, parse JSON, forget."""
    bodies = [calls(request, f"bare-{i}", cache_key="x")[0].body for i, request in enumerate(requests(asked, ()))]
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


def cpu_s(pool: RewardPool | None = None) -> float:
    """Of this process, and of a pool's workers, seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    workers = [psutil.Process(pid).cpu_times() for pid in (pool.worker_pids if pool else ())]
    return used.ru_utime + used.ru_stime + sum(one.user + one.system for one in workers)


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of both loops, and their ratio."""
    asked = questions(args)
    with canned_fleet(SERVERS, (), canned_answers(args)) as fleet:
        times = await timed(args, fleet.urls, asked)
    wall = {name: statistics.median(w for w, _ in some) for name, some in times.items()}
    cpu_ms = {name: 1000 * statistics.median(c for _, c in some) / args.answers for name, some in times.items()}
    return {"wall_s": wall, "ratio": wall["evaluation"] / wall["bare"], "cpu_ms_per_answer": cpu_ms}


def canned_answers(args: argparse.Namespace) -> CannedAnswers:
    """Each after about the time that generation would take: between half and one and a half of the mean, so that not
    all end at once."""
    return CannedAnswers(
        lengths=[[args.tokens]] * DISTINCT,
        ordinary=(3, 1000),
        endings=[[2]],
        vocabulary=1000,
        delay_s=args.tokens * args.under_way / args.rate,
        spread=(0.5, 1.5),
        concurrency=args.under_way,
    )


async def timed(
    args: argparse.Namespace, urls: Sequence[str], asked: Sequence[Question]
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of both loops, in turn."""
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "evaluation": []}
    window = SERVERS * args.under_way
    with RewardPool("math", workers=2) as pool, tempfile.TemporaryDirectory() as folder:
        pool.score([("\\boxed{1+1}", "x^2")])
        for turn in range(args.repeats + 1):
            for name in times:
                began, cpu = time.perf_counter(), cpu_s()
                if name == "bare":
                    await bare(urls, asked, window)
                else:
                    await evaluation(urls, asked, window, pool, Path(folder) / str(turn))
                if turn:  # the first is for caches and imports
                    times[name].append((time.perf_counter() - began, cpu_s() - cpu))
    return times


def verification(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for many answers in one pool."""
    import random

    folder, rng = args.data, random.Random(0)
    names = [name for name in FILES if (folder / "eval" / FILES[name][0]).is_file()]
    pairs = [pair for name in names for pair in load(golds_of(name, folder), rng, 6)]
    pairs = pairs or [(f"so \\boxed{{{i}+{i}}}", str(2 * i)) for i in range(1, 500)]
    distinct = len(pairs)
    pairs = (pairs * (args.verified // distinct + 1))[: args.verified]
    with RewardPool("math", workers=args.workers) as pool:
        pool.score([("\\boxed{1+1}", "x^2")])
        began, cpu = time.perf_counter(), cpu_s(pool)
        verdicts = pool.score(pairs)
        seconds, cpu = time.perf_counter() - began, cpu_s(pool) - cpu
        counters = pool.counters
    return {
        "answers": len(pairs),
        "distinct": min(distinct, len(pairs)),
        "in_workers": counters["judged"],
        "workers": args.workers,
        "seconds": seconds,
        "cpu_s": cpu,
        "right": sum(v.correct for v in verdicts),
        "sets": names,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens a second of each server")
    parser.add_argument("--under-way", type=int, default=64, help="requests at once of each server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verified", type=int, default=12_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {"client": asyncio.run(measured(args)), "verification": verification(args)}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    client, verified = found["client"], found["verification"]
    print(f"bare loop {client['wall_s']['bare']:.2f} s, evaluation {client['wall_s']['evaluation']:.2f} s: "
          f"ratio {client['ratio']:.3f}; CPU of the client {client['cpu_ms_per_answer']} ms an answer")  # fmt: skip
    print(f"{verified['answers']} answers ({verified['distinct']} distinct) verified in {verified['seconds']:.1f} s "
          f"({verified['cpu_s']:.1f} s of CPU time, {verified['in_workers']} of them in workers)")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
