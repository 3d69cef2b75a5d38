"""What the endpoint of agents costs beside the engine: CPU a request, latency, memory, many sessions at once.

    python benchmarks/agent_endpoint.py

The engine answers at once; the agents are in a process of their own, which posts with aiohttp. CPU is that of the
endpoint's process over all requests: HTTP, JSON, chat template, tokens, conversations, columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "rollout"))

import chat_tokenizers

from megatron_daro.config.sections import EnvironmentSection, RewardSection
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.rollout.agent_endpoint import AgentEndpoint
from megatron_daro.rollout.agents import AgentConversations
from megatron_daro.rollout.conversations import Conversations
from megatron_daro.rollout.environment import Conversation
from megatron_daro.rollout.rendering import Turns
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams, Verdict

ANSWER, QUESTION = 64, 200
"""Tokens of each answer, characters of each message of a user."""


class Engine:
    """Answers at once."""

    def __init__(self, ids: list[int], text: str) -> None:
        self._ids, self._text = ids, text

    async def start(self) -> None:
        """Need nothing."""

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the same answer to each."""
        count = len(self._ids)
        for request in requests:
            tokens = np.array([*request.prompt.tokens, *self._ids], np.int32)
            place = request.prompt.id, request.group_id, request.attempt, request.indices[0]
            ones, zeros = np.ones(count, np.uint8), np.zeros(count, np.float32)
            yield (Rollout(*place, tokens, len(tokens) - count, ones, zeros, "stop", 0, self._text),)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """End nothing."""

    async def close(self) -> None:
        """Hold nothing."""


class Scorer:
    """Everything is right."""

    failed_starts = 0

    async def score_async(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Return as many verdicts."""
        return [Verdict(True, 1.0, "match") for _ in pairs]


class Elsewhere:
    """Agents in another process: a line for each to its standard input, a line back when it has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._ended = process, dict[str, asyncio.Event]()

    async def run(self, prompt: Prompt, conversation: Conversation, base_url: str, key: str) -> object:
        """Have it hold one conversation."""
        self._ended[key] = asyncio.Event()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([base_url, key]).encode() + b"\n")
        await self._ended[key].wait()
        return None

    async def listen(self) -> dict[str, Any]:
        """Return what it measured, once all have ended."""
        assert self._process.stdout is not None
        while True:
            line = json.loads(await self._process.stdout.readline())
            if isinstance(line, dict):
                return line
            self._ended.pop(line).set()

    async def close(self) -> None:
        """End nothing."""


async def measure(sessions: int, turns: int, folder: Path) -> dict[str, Any]:
    """Hold so many conversations at once, three times: what the last time measured, and memory after each."""
    chat_tokenizers.save(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = chat_tokenizers.TOOLS
    text = "a word " * (ANSWER // 7 + 1)
    ids = [*tokenizer.encode(text, add_special_tokens=False)[: ANSWER - 1], tokenizer.eos_token_id]
    section = EnvironmentSection(kind="agent", command=("elsewhere",))
    requests = [
        GroupRequest(
            group,
            0,
            Prompt("p", "-", "benchmark", text="x", tokens=(ids[-1],)),
            tuple(range(8)),
            SamplingParams(max_new_tokens=turns * (2 * QUESTION + ANSWER)),
        )
        for group in range(sessions // 8)
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--agents", str(turns), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    agents = Elsewhere(process)
    conversations = Conversations(
        section,
        AgentConversations(AgentEndpoint(Turns(tokenizer, chat=True), print, ANSWER), agents, 1.0),
        Engine(ids, text[: ANSWER - 1]),
        Scorer(),
        reward=RewardSection(),
        decode=response_decoder(tokenizer),
        vocabulary=len(tokenizer),
        together=False,
        notices=Notices(),
    )
    listening, memory = asyncio.create_task(agents.listen()), []
    for _ in range(3):
        begun, spent = time.perf_counter(), time.process_time()
        rollouts = [one for request in [requests] async for group in conversations.generate(request) for one in group]
        assert len(rollouts) == sessions // 8 * 8 and all(len(one.turns) == turns for one in rollouts)
        spent, took = time.process_time() - spent, time.perf_counter() - begun
        del rollouts
        memory.append(psutil.Process().memory_info().rss / 2**20)
    assert process.stdin is not None
    process.stdin.close()
    there = await listening
    await conversations.close()
    count = sessions // 8 * 8 * turns
    return {
        "requests": count,
        "cpu_ms_per_request": 1000 * spent / count,
        "requests_per_s": count / took,
        "latency_ms_median": there["median_ms"],
        "rss_mib": memory,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


class Notices:
    """Says everything."""

    def notice(self, message: str) -> None:
        """Print it."""
        print(message, file=sys.stderr)

    warn = notice


async def hold(turns: int) -> None:
    """The agents: one for each line of standard input, as `Elsewhere` writes them."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    took_ms: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:

        async def agent(url: str, key: str) -> None:
            messages, head = [{"role": "user", "content": "q" * QUESTION}], {"Authorization": f"Bearer {key}"}
            for _ in range(turns):
                begun = time.perf_counter()
                async with http.post(f"{url}/chat/completions", json={"messages": messages}, headers=head) as reply:
                    said = (await reply.json())["choices"][0]["message"]
                took_ms.append(1000 * (time.perf_counter() - begun))
                messages += [said, {"role": "user", "content": "q" * QUESTION}]
            print(json.dumps(key), flush=True)

        while line := await reader.readline():
            group.create_task(agent(*json.loads(line)))
    print(json.dumps({"median_ms": statistics.median(took_ms)}), flush=True)


def main() -> None:
    """Measure, or be the agents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256, help="at once, a multiple of 8")
    parser.add_argument("--turns", type=int, default=14, help="requests of each, one after the other")
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        asyncio.run(hold(given.agents))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(given.sessions, given.turns, Path(folder))), indent=2))


if __name__ == "__main__":
    main()
