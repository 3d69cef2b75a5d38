"""What many conversations at once cost the driver: environments, columns and verdicts real, answers canned.

    OMP_NUM_THREADS=1 python benchmarks/conversations.py --repeats 3 --json    # about 8 minutes on 2 cores

It also measures what the contract of environments costs a run without one: a batch of 2,048 answers through
`SingleTurn`, less the same batch straight from engine and verifiers, as a share of the driver's CPU that
benchmarks/control_plane.py finds for such a batch. The two alternate.

Each rollout has several turns of canned tokens; the engine answers after a pause, as servers do, so that all
conversations are under way at once: after 2 to 6 seconds, or each after 2, so that all answers of a turn come at one
moment, which no servers do. `rollout` is a class in the driver, `step` one in worker processes. CPU is that of this
process, all threads; a stall is how late its event loop woke from pauses of 5 ms. Each row is a process of its own that
freezes what it has imported, as a run does; with --repeats it is the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_daro.config.sections import EnvironmentSection, RewardSection
from megatron_daro.garbage import spare_event_loop
from megatron_daro.rollout.conversations import Conversations
from megatron_daro.rollout.rendering import Turns
from megatron_daro.rollout.rollouter import SingleTurn, judge
from megatron_daro.rollout.stepping import Step, SteppedConversations
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams, Verdict
from megatron_daro.workshop.rehearse.loop import Watch, cpu_s

GROUP, TURNS, GENERATED, OBSERVED, PROMPT = 8, 4, 200, 50, 100
ROWS = {
    f"{kind}, {name}": (kind, spread_s)
    for kind in ("InDriver", "InWorkers")
    for name, spread_s in (("at once", 0.0), ("over 4 s", 4.0))
}
RESULTS = Path(__file__).parent / "results"


ONES, LOGPROBS = np.ones(GENERATED, np.uint8), -np.ones(GENERATED, np.float32)


@cache
def canned(length: int) -> np.ndarray:
    """Return a prompt of so many tokens with its answer; as those of answer workers, they are there and not copied."""
    turns = (length - PROMPT) // (GENERATED + OBSERVED)
    said = [*range(3, 3 + GENERATED), *range(3, 3 + OBSERVED)] * turns
    return np.array([*range(3, 3 + PROMPT), *said, *range(3, 3 + GENERATED)], np.int32)


class CannedEngine:
    """Answers each request after a pause of its own: as SGLangEngine, which has a task for each."""

    def __init__(self, pause_s: float = 2.0, spread_s: float = 0.0) -> None:
        self._pause_s, self._spread_s = pause_s, spread_s

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request."""
        tasks = [asyncio.ensure_future(self._answer(request)) for request in requests]
        for answer in asyncio.as_completed(tasks):
            yield await answer

    async def _answer(self, request: GroupRequest) -> tuple[Rollout, ...]:
        place = request.prompt.id, request.group_id, request.attempt
        await asyncio.sleep(self._pause_s + self._spread_s * (hash((*place[1:], request.indices)) % 1000) / 1000)
        length = len(request.prompt.tokens)
        return tuple(
            Rollout(*place, i, canned(length), length, ONES, LOGPROBS, "stop", 1, "x") for i in request.indices
        )

    async def abort(self, group_ids: object = None) -> None:
        """Stop nothing."""


class InDriver:
    """The environment as one coroutine."""

    async def rollout(self, prompt: Prompt, conversation: Any) -> Verdict:
        """Hold a conversation."""
        for turn in range(TURNS):
            if turn:
                conversation.observe(range(3, 3 + OBSERVED))
            await conversation.generate(GENERATED)
        return Verdict(True, 1.0, "match")


class InWorkers:
    """The same, step by step."""

    def reset(self, prompt: Prompt) -> Step:
        """Begin."""
        return Step(state=1)

    def step(self, state: int, answer: str) -> Step:
        """Go on."""
        return Step(done=True, correct=True) if state == TURNS else Step("x" * OBSERVED, state + 1)


class Letters:
    """Writes an observation as one token a letter."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return ids."""
        return list(range(3, 3 + len(text)))


class Quiet:
    """Says nothing."""

    def warn(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)


def rollouter(kind: str, spread_s: float) -> Conversations:
    """Return one of either kind."""
    section = EnvironmentSection(kind=f"conversations:{kind}", workers=2, max_turns=TURNS, timeout_s=3600)
    held = InDriver() if kind == "InDriver" else SteppedConversations(section, Turns(Letters(), chat=False), print)  # type: ignore[arg-type]
    return Conversations(
        section,
        held,
        CannedEngine(spread_s=spread_s),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        reward=RewardSection(),
        decode=lambda ids: "",
        vocabulary=1000,
        together=False,
        notices=Quiet(),  # type: ignore[arg-type]
    )


async def measured(kind: str, spread_s: float, count: int) -> dict[str, float | str]:
    """Hold `count` conversations at once."""
    sampling = SamplingParams(max_new_tokens=TURNS * (GENERATED + OBSERVED))
    prompts = [Prompt(f"p{i}", "1", "s", text="?", tokens=tuple(range(3, 3 + PROMPT))) for i in range(count // GROUP)]
    requests = [GroupRequest(i, 0, prompt, tuple(range(GROUP)), sampling) for i, prompt in enumerate(prompts)]
    holder, found = rollouter(kind, spread_s), 0
    spare_event_loop()
    began, cpu = time.monotonic(), cpu_s()
    try:
        with Watch() as watch:
            async for rollouts in holder.generate(requests):
                assert all(len(one.turns) == TURNS and one.finish_reason == "stop" for one in rollouts)
                found += len(rollouts)
    finally:
        await holder.close()
    assert found == len(requests) * GROUP
    return {
        "conversations": found,
        "turns": TURNS,
        "seconds": time.monotonic() - began,
        "cpu_s": cpu_s() - cpu,
        **watch.found(),
    }


class AtOnce(CannedEngine):
    """The same without a pause, in one go."""

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request."""
        for request in requests:
            yield await self._answer(request)


class Right:
    """A scorer of canned verdicts."""

    failed_starts = 0

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Return one for each."""
        return [Verdict(True, 1.0, "match")] * len(pairs)


async def contract(rounds: int) -> dict[str, float]:
    """Return the CPU milliseconds that the contract adds to a batch without an environment, and their share."""
    prompts = [Prompt(f"p{i}", "1", "s", text="?", tokens=tuple(range(3, 3 + PROMPT))) for i in range(256)]
    requests = [GroupRequest(i, 0, prompt, tuple(range(GROUP)), SamplingParams()) for i, prompt in enumerate(prompts)]
    engine, scorer = AtOnce(pause_s=0.0), Right()
    through = SingleTurn(engine, scorer)  # type: ignore[arg-type]

    async def bare() -> None:
        async for some in engine.generate(requests):
            await judge(scorer, [(one.text, prompts[one.group_id]) for one in some])

    async def contracted() -> None:
        async for some in through.generate(requests):
            await through.score([(one, prompts[one.group_id]) for one in some])

    found: dict[Any, list[float]] = {bare: [], contracted: []}
    for _ in range(rounds):
        for work, times in found.items():
            began = cpu_s()
            await work()
            times.append(1000 * (cpu_s() - began))
    bare_ms, contract_ms = (median(times) for times in found.values())
    whole = json.loads((RESULTS / "control_plane.json").read_text())["rows"]["10"]["driver_cpu_s"]
    return {"bare_ms": bare_ms, "contract_ms": contract_ms, "share": (contract_ms - bare_ms) / 1000 / whole}


def fresh(name: str, count: int, repeats: int) -> dict[str, Any]:
    """Return the medians of a row's numbers over processes of their own, and the words of the middle one."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--one", name, "--count", str(count)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800).stdout
        runs.append(json.loads(output.splitlines()[-1]))
    middle = sorted(runs, key=lambda run: run["latest_ms"])[(repeats - 1) // 2]
    numbers = {key: median(run[key] for run in runs) for key, value in middle.items() if not isinstance(value, str)}
    return middle | numbers | {"latest_ms_of_all": [run["latest_ms"] for run in runs], "load": os.getloadavg()[0]}


def main() -> None:
    """Measure all rows, and what they cost a run that has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1, help="processes of each row; median")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", action="store_true", help="also write benchmarks/results/conversations.json")
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asyncio.run(measured(*ROWS[arguments.one], arguments.count))))
        return
    rows = {name: fresh(name, arguments.count, arguments.repeats) for name in arguments.rows}
    shown = [key for key in next(iter(rows.values())) if key != "latest_ms_of_all"]
    table = Table("row", *shown)
    for name, row in rows.items():
        values = [row[key] for key in shown]
        table.add_row(name, *(value if isinstance(value, str) else f"{value:.4g}" for value in values))
    Console(width=160).print(table)
    single = asyncio.run(contract(41))
    print(f"without an environment: {single['share']:+.3%} of the driver's CPU of such a batch {single}")
    if arguments.json:
        (RESULTS / "conversations.json").write_text(json.dumps(rows | {"single_turn": single}, indent=1) + "\n")


if __name__ == "__main__":
    main()
