"""Real SGLang servers for tests: two processes that stay up for the session, and engines made of them.

Used by tests/contract and tests/sglang. A server takes 15 to 40 s to start, an engine of servers that run already
half a second; so tests share the processes, each test makes an engine of its own, and what a test did to a server is
undone by the weight update with which the next engine begins. Servers listen on 127.0.0.1 only.
Without the environment of tools/sglang_cpu_env.sh tests that need it are skipped.
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen2Config, Qwen3MoeConfig

from megatron_daro.config.sections import SGLangSection
from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.client import connect_to_servers
from megatron_daro.engine.sglang.command import server_command
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.probe import probe_text
from megatron_daro.engine.sglang.process import ManagedProcess
from megatron_daro.engine.sglang.servers import ExternalServer
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.ports import reserve_port
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.sync import in_server
from megatron_daro.sync.digests import noted
from megatron_daro.sync.files import complete_checkpoint, open_checkpoint, write_weight_files
from megatron_daro.sync.plan import Digest, SendPlan, SendReport, WeightFiles
from megatron_daro.sync.publish import WeightSync
from megatron_daro.sync.senders import Senders
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams

VARIABLE = "MEGATRON_DARO_SGLANG"
HOST = "127.0.0.1"
VOCAB, CONTEXT = 31, 4096
START_LIMIT_S = 480
_LONGEST_LINE = 300  # one line of a log is all arguments of the server
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
}
_PROJECT = Path(__file__).resolve().parents[1]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def environment() -> Path | None:
    """The directory that tools/sglang_cpu_env.sh made: the one of MEGATRON_DARO_SGLANG, else .venv-sglang."""
    directory = Path(os.environ.get(VARIABLE) or _PROJECT / ".venv-sglang")
    return directory if (directory / "bin" / "python").exists() else None


def required_environment() -> Path:
    """The same; the test is skipped where there is none."""
    found = environment()
    if found is None:
        pytest.skip(f"no SGLang here: run tools/sglang_cpu_env.sh, or set {VARIABLE} to the directory that it made")
    return found


def cpu_servers(**options: Any) -> dict[str, Any]:
    """`engine.sglang` of a run that starts small servers on this CPU; the test is skipped where there is no SGLang."""
    arguments = {**CPU_ARGUMENTS, "max_total_tokens": 4096}
    return {"python": str(required_environment() / "bin" / "python"), "arguments": arguments, **options}


def save_policy(
    directory: Path,
    seed: int,
    *,
    max_positions: int = CONTEXT,
    hidden: int = 32,
    intermediate: int = 48,
    experts: int = 0,
    glm: bool = False,
) -> Any:
    """A Qwen2 of 14,000 random weights, wide enough that two seeds differ clearly; saved, and returned.

    With experts, a Qwen3 with so many of them in each layer, or a GLM-4.5 whose first layer has none.
    """
    own = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8}
    config_class, own = (Qwen3MoeConfig, {**own, "num_experts": experts}) if experts else (Qwen2Config, {})
    if glm:
        own |= {"n_routed_experts": own.pop("num_experts"), "attention_bias": True, "routed_scaling_factor": 1.5}
        config_class, own = Glm4MoeConfig, {**own, "num_nextn_predict_layers": 0}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=not experts,
        **own,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(directory)
    return model


# The project's own stand-ins come before those that the environment was made with, which may be older.
SERVER_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (_PROJECT / "tools" / "sglang_cpu" / "stand_ins", in_server.FOLDER)))
}


class PooledServer:
    """One server process; after `kill` and `start` it is at the same address, with the weights of its files."""

    def __init__(self, model: Path, log: Path, seed: int, tensor_parallel: int = 1, **arguments: Any) -> None:
        """arguments: of the server, beside those of every test."""
        self.model, self.log = model, log
        self._python = required_environment() / "bin" / "python"
        self._ports = [reserve_port(HOST), reserve_port(HOST)]
        port, nccl_port = (reservation.port for reservation in self._ports)
        self.url = f"http://{HOST}:{port}"
        self._command = server_command(
            self._python,
            model_path=model,
            host=HOST,
            port=port,
            nccl_port=nccl_port,
            tensor_parallel=tensor_parallel,
            seed=seed,
            arguments={
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "custom_weight_loader": [TRANSPORTS["shards"].loader],
                **CPU_ARGUMENTS,
                **arguments,
            },
        )
        cores = "|".join(
            map(str, range(tensor_parallel))
        )  # without them it wants a NUMA node for each of several ranks
        self._env = SERVER_ENVIRONMENT | ({"SGLANG_CPU_OMP_THREADS_BIND": cores} if tensor_parallel > 1 else {})
        self._process: ManagedProcess | None = None
        self._served = False

    def start(self) -> None:
        """Starts the process unless it lives; `wait` waits until it serves."""
        if self._process is None or self._process.poll() is not None:
            self._served = False
            self._process = ManagedProcess(
                self._command, host=HOST, env=self._env, log_path=self.log, python=self._python
            )
            self._process.start()

    def wait(self) -> None:
        """Until it answers; a process that ends first, or is too slow, fails the test with the end of its log."""
        end = time.monotonic() + START_LIMIT_S
        while not self._served and not self._answers():  # asked once: /health takes a second
            assert self._process is not None and self._process.poll() is None, self.tail()
            assert time.monotonic() < end, f"no answer within {START_LIMIT_S} s: {self.tail()}"
            time.sleep(0.2)
        self._served = True

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int:
        """Process id, also of its session."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def death(self) -> str:
        """Why it is gone; empty while it lives."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"it ended with {code}"

    def tail(self) -> str:
        """The end of its log."""
        lines = [] if self._process is None else self._process.log_tail(30).splitlines()
        return "\n".join([f"{self.log}:", *(line[:_LONGEST_LINE] for line in lines)])

    def close(self) -> None:
        """Ends it and gives its ports back."""
        self.kill()
        for reservation in self._ports:
            reservation.close()

    def _answers(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=30) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def serving(directory: Path, **arguments: Any) -> Iterator[PooledServer]:
    """One server of DIRECTORY/model that serves, for the time of the block."""
    server = PooledServer(directory / "model", directory / "server.log", seed=0, **arguments)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


class Pool:
    """Two servers of one model. Nothing runs before the first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: list[PooledServer] = []
        self.starts = 0

    def up(self) -> list[PooledServer]:
        """Both servers, serving; those that a test killed are started again."""
        if not self._servers:
            model = self._directory / "model"
            save_policy(model, 0)
            self._servers = [PooledServer(model, self._directory / f"server_{i}.log", seed=i) for i in range(2)]
        for server in self._servers:
            server.start()
        for server in self._servers:
            server.wait()
        return self._servers

    def tails(self) -> str:
        """The ends of the logs, for a test that failed."""
        return "\n".join(server.tail() for server in self._servers)

    def down(self) -> None:
        """Ends both; the next use starts them again."""
        for server in self._servers:
            server.close()
        self._servers = []


class ManagedServer:
    """A server of the pool as one that the engine started: a restart is real, the end of the engine spares it."""

    restartable = True

    def __init__(self, server: PooledServer) -> None:
        self._server, self._stopped = server, False
        self.launches = 0

    async def launch(self) -> str:
        """Hands out the running process the first time; afterwards starts it anew."""
        self.launches += 1
        if self._stopped:
            await asyncio.to_thread(self._server.kill)
            self._stopped = False
        await asyncio.to_thread(self._server.start)
        return self._server.url

    async def death(self) -> str:
        """Why it is gone."""
        return await asyncio.to_thread(self._server.death)

    async def stop(self) -> None:
        """Remembers that the process is not wanted any more; the next launch ends it."""
        self._stopped = True


def scheduler_of(server: PooledServer) -> psutil.Process:
    """The process that makes the tokens; the one that listens is another."""
    children = psutil.Process(server.pid).children(recursive=True)
    (found,) = [child for child in children if any("scheduler" in word for word in child.cmdline())]
    return found


def section(**options: Any) -> SGLangSection:
    """engine.sglang with limits that a busy machine of two cores keeps."""
    return SGLangSection(**{"stall_timeout_s": 120, "sync_timeout_s": 60, "request_timeout_s": 300, **options})


def expected(model: Path, **changes: Any) -> Expected:
    """What a server of the pool is."""
    return Expected(**{"model_path": model, "model_type": "qwen2", "longest_prompt": 64, "longest": 128, **changes})


def engine_of(
    servers: Sequence[Any],
    run_dir: Path,
    *,
    options: SGLangSection | None = None,
    decode: Any = None,
    answers: Any = None,
    temperature: float = 1.0,
    expect: Expected | None = None,
    warnings: list[str] | None = None,
    seed: int = 0,
) -> SGLangEngine:
    """An engine, not started. servers: handles, or URLs of servers that run already."""
    handles = {f"server {i}": ExternalServer(s) if isinstance(s, str) else s for i, s in enumerate(servers)}
    told = [] if warnings is None else warnings
    return SGLangEngine(
        handles,
        options or section(),
        expect or expected(run_dir),
        asker=answers or DirectAsker(decode or (lambda ids: " ".join(map(str, ids))), ExpertsFolder(run_dir)),
        warn=told.append,
        run_dir=run_dir,
        seed=seed,
        temperature=temperature,
        probe_tokens=probe_text(VOCAB, longest=64),
    )


@asynccontextmanager
async def started(engine: SGLangEngine) -> AsyncIterator[SGLangEngine]:
    """Started, and closed at the end; the servers of the pool live on."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class ModelWeights:
    """A WeightExporter of a transformers model in this process, with the senders of the policy's ranks.

    named: what it exports, instead of the model's parameters. bucket_bytes: instead of the plan's.
    """

    def __init__(self, model: Any, *, named: Iterable[tuple[str, Any]] | None = None, bucket_bytes: int = 0) -> None:
        self.model, self.version, self._bucket_bytes = model, 0, bucket_bytes
        self._named = named
        self._senders = Senders(HOST, "gloo", connect_to_servers)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Nothing changes these."""
        yield

    async def export(self, plan: SendPlan) -> SendReport:
        """From this process, over gloo."""
        plan = replace(plan, bucket_bytes=self._bucket_bytes or plan.bucket_bytes)
        return await asyncio.to_thread(self._senders.send, self._stream(), plan)

    async def write(self, files: WeightFiles) -> SendReport:
        """From this process."""
        open_checkpoint(files)
        report = await asyncio.to_thread(write_weight_files, self._stream(), files, "part")
        complete_checkpoint(files, report.files, Path(self.model.name_or_path), "float32")
        return report

    async def logprobs_of(self, rollouts: Sequence[Rollout], *, temperature: float) -> list[np.ndarray]:
        """By transformers."""
        return [logprobs_of(self.model, rollout, temperature) for rollout in rollouts]

    def digests(self, plan: SendPlan) -> dict[str, Digest]:
        """As an export would report them."""
        found: dict[str, Digest] = {}
        for _ in noted(self._stream(), plan.digest_dtype, found):
            pass
        return found

    def close(self) -> None:
        """Leaves the group of the servers."""
        self._senders.close()

    def _stream(self) -> Iterable[tuple[str, Any]]:
        return named_weights(self.model) if self._named is None else self._named


def named_weights(model: Any) -> list[tuple[str, Any]]:
    """(HF name, tensor) of a transformers model; tied ones once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


async def give(engine: Any, model: Any, version: int, **options: Any) -> Mapping[str, float]:
    """One sync of a model's weights, from a sender of its own. options: of ModelWeights."""
    weights = ModelWeights(model, **options)
    try:
        return await WeightSync(weights, engine).publish(version)
    finally:
        await asyncio.to_thread(weights.close)


def group(number: int, *, count: int = 4, length: int = 3, **sampling: Any) -> GroupRequest:
    """A group of random prompt tokens; nothing ends its answers but their length."""
    tokens = tuple(int(t) for t in np.random.default_rng(number).integers(0, VOCAB, length))
    prompt = Prompt(id=f"p{number}", answer="", source="test", tokens=tokens)
    return GroupRequest(number, 0, prompt, tuple(range(count)), SamplingParams(**{"max_new_tokens": 12, **sampling}))


async def collect(engine: SGLangEngine, requests: Sequence[GroupRequest]) -> list[Rollout]:
    """All rollouts of some groups."""
    return [rollout async for rollouts in engine.generate(requests) for rollout in rollouts]


def logprobs_of(model: Any, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    """float32 [R] by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor(rollout.tokens, dtype=torch.int64)[None]).logits[0].float() / temperature
    chosen = torch.tensor(rollout.tokens[rollout.prompt_length :], dtype=torch.int64)
    at = torch.arange(rollout.prompt_length - 1, len(rollout.tokens) - 1)
    return torch.log_softmax(logits, dim=-1)[at, chosen].numpy()


def worst_difference(model: Any, rollouts: Sequence[Rollout], temperature: float = 1.0) -> float:
    """Largest absolute difference between the servers' log-probs and those of a transformers model."""
    return max(float(np.abs(logprobs_of(model, r, temperature) - r.logprobs).max()) for r in rollouts)
