"""What the endpoint of agents costs: beside an engine that answers at once, and beside SGLang's own endpoint.

    python benchmarks/agent_endpoint.py --json
    OMP_NUM_THREADS=1 python benchmarks/agent_endpoint.py --pairs 7 --json    # also beside a real SGLang server

All agents at once, in a process of their own, which posts with aiohttp. The first engine answers at once: CPU is
that of the endpoint's process over all requests: HTTP, JSON, chat template, tokens, conversations, columns. With
--pairs, the same agents then ask a real SGLang server of a tiny model on the CPU, in turns through the endpoint (which
also returns log-probs and keeps the tokens for training) and by the server's own /v1/chat/completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import harness
import numpy as np
import psutil
import sglang_servers

sys.path.append(str(harness.ROOT / "tests" / "unit" / "environments"))

import chat_tokenizers
from sglang_pool import give
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_daro.config.sections import EnvironmentSection, RewardSection, SGLangSection
from megatron_daro.data.tokenizer import load_tokenizer, response_decoder
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.environments.agent_endpoint import AgentEndpoint
from megatron_daro.environments.agents import AgentConversations
from megatron_daro.environments.conversations import Conversations
from megatron_daro.environments.environment import Conversation
from megatron_daro.environments.rendering import Turns
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams, Verdict

ANSWER, QUESTION, ROLLOUTS, PAIR_TURNS = 64, 200, 8, 3
"""Tokens of an answer at most, characters of each message of a user, rollouts of a group, requests of an agent beside
SGLang."""
TURN = 2 * QUESTION + ANSWER
"""Tokens of a turn at most."""
GOAL_CPU_MS, GOAL_MEMORY, GOAL_RATIO = 3.0, 1.05, 0.9
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


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


class Agents:
    """Those in another process: a line for each to its standard input; a line back with what it measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._ended = process, dict[str, asyncio.Future[list[list[float]]]]()
        self._loop = asyncio.get_running_loop()
        self._listening = self._loop.create_task(self._listen())
        self.measured: list[list[float]] = []

    @classmethod
    async def start(cls, turns: int) -> Agents:
        """Return those that make so many requests each, one after the other."""
        command = [sys.executable, __file__, "--agents", str(turns)]
        return cls(await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    async def hold(self, base_url: str, key: str) -> None:
        """Have it hold one conversation; `measured` then has milliseconds and tokens of its answers."""
        self._ended[key] = self._loop.create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([base_url, key]).encode() + b"\n")
        self.measured += await self._ended[key]

    async def run(self, prompt: Prompt, conversation: Conversation, base_url: str, key: str) -> object:
        """Hold it, in the environments' thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.hold(base_url, key), self._loop))
        return None

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            key, measured = json.loads(line)
            self._ended.pop(key).set_result(measured)
        for left in self._ended.values():
            left.set_exception(RuntimeError("the agents' process has ended"))

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._listening
        await self._process.wait()


class Side:
    """The endpoint and what it asks, with as many sessions at once as asked for."""

    def __init__(
        self, sessions: int, turns: int, tokenizer: PreTrainedTokenizerBase, agents: Agents, engine: Any
    ) -> None:
        self._rollouts, self._turns = sessions // ROLLOUTS * ROLLOUTS, turns
        sampling = SamplingParams(max_new_tokens=turns * TURN, stop_token_ids=(tokenizer.eos_token_id,))
        prompt = Prompt("p", "-", "benchmark", text="x", tokens=(tokenizer.eos_token_id,))
        indices = tuple(range(ROLLOUTS))
        self._requests = [GroupRequest(g, 0, prompt, indices, sampling) for g in range(self._rollouts // ROLLOUTS)]
        self.conversations = Conversations(
            EnvironmentSection(kind="agent", command=("elsewhere",)),
            AgentConversations(AgentEndpoint(Turns(tokenizer, chat=True), print, ANSWER), agents, 1.0),
            engine,
            Scorer(),
            reward=RewardSection(),
            decode=response_decoder(tokenizer),
            vocabulary=len(tokenizer),
            together=False,
            notices=Notices(),
        )

    async def hold(self) -> None:
        """Hold all conversations."""
        rollouts = [one async for group in self.conversations.generate(self._requests) for one in group]
        assert len(rollouts) == self._rollouts and all(len(one.turns) == self._turns for one in rollouts)


class Notices:
    """Says everything."""

    def notice(self, message: str) -> None:
        """Print it."""
        print(message, file=sys.stderr)

    warn = notice


async def alone(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The endpoint before an engine that answers at once: medians of the rounds, and memory after each."""
    chat_tokenizers.save(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = chat_tokenizers.TOOLS
    text = "a word " * (ANSWER // 7 + 1)
    ids = [*tokenizer.encode(text, add_special_tokens=False)[: ANSWER - 1], tokenizer.eos_token_id]
    agents = await Agents.start(arguments.turns)
    side = Side(arguments.sessions, arguments.turns, tokenizer, agents, Engine(ids, text[: ANSWER - 1]))
    count, cpu_ms, rates, memory = arguments.sessions // ROLLOUTS * ROLLOUTS * arguments.turns, [], [], []
    for _ in range(arguments.rounds):
        begun, spent = time.perf_counter(), time.process_time()
        await side.hold()
        cpu_ms.append(1000 * (time.process_time() - spent) / count)
        rates.append(count / (time.perf_counter() - begun))
        memory.append(psutil.Process().memory_info().rss / 2**20)
    await side.conversations.close()
    latency_ms = median(ms for ms, _ in agents.measured)
    return {
        "requests_a_round": count,
        "cpu_ms_per_request": median(cpu_ms),
        "cpu_ms_per_request_of_rounds": cpu_ms,
        "requests_per_s": median(rates),
        "latency_ms": latency_ms,
        "rss_mib_after_rounds": memory,
    }


def save_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Of printable ASCII, so that whatever a random model says comes back as the same tokens."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(
        "".join(map(chr, (10, *range(32, 127))))
    )
    alphabet = sorted({letter for word, _ in letters for letter in word})
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=special
    )
    fast.chat_template = chat_tokenizers.CHATML
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


async def beside_sglang(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens a second and median latency of an answer, through the endpoint and from SGLang's, in turns."""
    model = folder / "model"
    tokenizer = save_tokenizer(model)
    ends = {"eos_token_id": tokenizer.eos_token_id}
    sglang_servers.save_model(model, {**SHAPE, **ends, "vocab_size": len(tokenizer)})
    longest = PAIR_TURNS * TURN
    handle = sglang_servers.server(
        sglang_servers.require(arguments.python),
        model,
        folder / "server.log",
        dtype="float32",
        skip_tokenizer_init=False,
        max_total_tokens=arguments.sessions * longest,
        max_running_requests=arguments.sessions,
    )
    engine = SGLangEngine(
        {"server": handle},
        SGLangSection(start_timeout_s=300, request_timeout_s=300),
        Expected(model, "qwen2", longest, longest),
        asker=DirectAsker(response_decoder(tokenizer)),
        warn=print,
        run_dir=folder,
        seed=0,
        temperature=1.0,
        probe_tokens=range(8),
    )
    agents = await Agents.start(PAIR_TURNS)
    side = Side(arguments.sessions, PAIR_TURNS, tokenizer, agents, engine)
    rates: dict[str, list[float]] = {"endpoint": [], "sglang": []}
    latencies: dict[str, list[float]] = {name: [] for name in rates}
    await engine.start()
    try:
        await give(engine, AutoModelForCausalLM.from_pretrained(model), 0)  # no server answers before
        url = f"{engine.fleet.servers[0].url}/v1"
        for name, counts in harness.turns(rates, arguments.pairs):
            agents.measured, begun = [], time.perf_counter()
            if name == "endpoint":
                await side.hold()
            else:
                await asyncio.gather(*(agents.hold(url, f"none-{i}") for i in range(arguments.sessions)))
            took = time.perf_counter() - begun
            if counts:
                rates[name].append(sum(tokens for _, tokens in agents.measured) / took)
                latencies[name].append(median(ms for ms, _ in agents.measured))
    finally:
        await side.conversations.close()
        await engine.close()
    return {
        "tokens_per_s": {name: median(values) for name, values in rates.items()},
        "latency_ms": {name: median(values) for name, values in latencies.items()},
        "ratio": harness.median_of_ratios(rates["endpoint"], rates["sglang"]),
        "rates": rates,
    }


async def hold(turns: int) -> None:
    """The agents: one for each line of standard input, as `Agents` writes them."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:

        async def agent(url: str, key: str) -> None:
            messages, head = [{"role": "user", "content": "q" * QUESTION}], {"Authorization": f"Bearer {key}"}
            measured = []
            for _ in range(turns):
                begun, body = time.perf_counter(), {"messages": messages, "max_tokens": ANSWER}
                async with http.post(f"{url}/chat/completions", json=body, headers=head) as reply:
                    said = await reply.json()
                measured.append([1000 * (time.perf_counter() - begun), said["usage"]["completion_tokens"]])
                message = {name: said["choices"][0]["message"][name] for name in ("role", "content")}
                messages += [message, {"role": "user", "content": "q" * QUESTION}]
            print(json.dumps([key, measured]), flush=True)

        while line := await reader.readline():
            group.create_task(agent(*json.loads(line)))


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    result = {"alone": await alone(arguments, folder / "alone")}
    if arguments.pairs:
        result["beside_sglang"] = await beside_sglang(arguments, folder)
    return result


def main() -> None:
    """Measure, or be the agents."""
    parser = sglang_servers.arguments_of(__doc__)
    parser.add_argument("--sessions", type=int, default=256, help=f"at once, a multiple of {ROLLOUTS}")
    parser.add_argument("--turns", type=int, default=14, help="requests of each, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="of all sessions, with the engine that answers at once")
    parser.add_argument("--pairs", type=int, default=0, help="turns of each side with SGLang; 0: without it")
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agents:
        asyncio.run(hold(arguments.agents))
        return
    with tempfile.TemporaryDirectory(prefix="agent_endpoint_") as folder:
        result = asyncio.run(measure(arguments, Path(folder)))
    print(json.dumps(result, indent=2))
    one, memory = result["alone"], result["alone"]["rss_mib_after_rounds"]
    problems = harness.at_most("CPU of a request, ms", one["cpu_ms_per_request"], GOAL_CPU_MS)
    problems += harness.at_most(
        "memory after the last round over that after the first", memory[-1] / memory[0], GOAL_MEMORY
    )
    if arguments.pairs:
        ratio = result["beside_sglang"]["ratio"]
        problems += harness.at_least("tokens a second over those of SGLang's endpoint", ratio, GOAL_RATIO)
    setup = (
        sglang_servers.setup_of(arguments, "agents")
        if arguments.pairs
        else harness.setup_of(arguments, "python", "agents")
    )
    harness.conclude("agent_endpoint", {"setup": setup, **result}, problems, write=arguments.json)


if __name__ == "__main__":
    main()
