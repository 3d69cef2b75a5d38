"""Supervision of the servers: starts them, watches their progress, restarts those that are fenced; lends their GPUs.

One watcher per server, beside the engine. When a server is fenced (by a watcher, a failed request or a failed weight
update), its process is ended and started again, and it returns as "joining": it gets no request until it has the
policy's weights. Progress means that a token came out, not that a port is open; an idle server is asked for one.

With `engine.colocate` the loop calls `release` when a batch is complete; at the next weight update each server takes
memory for its weights before they arrive, and for its cache before it serves. SGLang asserts that it is idle when it
gives memory back and that what it takes was given; a failed assertion ends the server, so both are ensured here.

Servers that are sent fp8 blocks are started with `fp8_arguments`; `fp8_matrices` says which these are, and at the first
update of each server what was sent as blocks is compared with what it has as blocks: a matrix that one end leaves in
bf16 would be read as other numbers.
Source: sglang 0.5.23: srt/utils/weight_checker.py: a checksum's answer names quantized matrices always, others unless
they are skipped, so that a skip of everything leaves the quantized ones; srt/models: which projections are fused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_daro.config.precision import FP8_BLOCK
from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.client import (
    FIRST_VERSION,
    LAST_TESTED,
    MEMORY_CALLS,
    NEEDED_CALLS,
    SYNC_CALLS,
    DisconnectedError,
    ServerFacts,
    SGLangClient,
    UnreachableError,
    version_number,
)
from megatron_daro.engine.sglang.fleet import Fleet, Server
from megatron_daro.engine.sglang.replies import Tokens, read
from megatron_daro.engine.sglang.servers import ServerHandle
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.families import families

_FP8_OLDEST_SGLANG = (0, 5, 23)
"""The first version that is known to tell which of its matrices are blocks."""
_SHARDS_SGLANG = (0, 5, 23)
"""The version whose parameters sync/shard_layouts.py describes."""
FP8_MANIFEST_CALL: Mapping[str, Any] = {"action": "checksum", "skip_tensor_list": ["."]}
"""Body of /weights_checker whose answer names the quantized matrices alone."""
_ROLES = ("qkv", "attention_output", "gate_up", "down", "expert_gate_up", "expert_down")
_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\.weight$"), ".qkv_proj.weight"),
    (re.compile(r"\.(gate|up)_proj\.weight$"), ".gate_up_proj.weight"),
)


def fp8_arguments() -> dict[str, Any]:
    """Arguments of a server that expects blocks. Its first weights are random: the files have none that fit."""
    blocks = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    overrides = json.dumps({"quantization_config": blocks})
    return {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": overrides}


def fp8_matrices(model_type: str) -> tuple[str, ...]:
    """Return the names of a family's matrices that are sent as blocks, with `{layer}` and `{expert}` for numbers."""
    tensors = families()[model_type].tensors
    return tuple(name for role in _ROLES for name in tensors.get(role, ()))


def fp8_disagreement(sent: Iterable[str], reported: Iterable[str]) -> str:
    """Why a server cannot read what was sent to it; empty where both ends mean the same matrices.

    Args:
        sent: HF names of the matrices that were sent as blocks. told: those that the server has so, in its names.
    """
    ours, theirs = {_server_name(name) for name in sent}, set(reported)
    if _manifest(ours) == _manifest(theirs):
        return ""
    unread, unsent = sorted(ours - theirs), sorted(theirs - ours)
    parts = [f"manifest {_manifest(theirs)} of {len(theirs)} matrices, sent was {_manifest(ours)} of {len(ours)}"]
    if unread:
        parts.append(f"it does not keep {len(unread)} of them as blocks, the first: {unread[0]}")
    if unsent:
        parts.append(f"it keeps {len(unsent)} as blocks that are sent otherwise, the first: {unsent[0]}")
    return "fp8 blocks: " + "; ".join(parts)


def _manifest(names: Iterable[str]) -> str:
    """Return the first 12 hex digits of sha256 of the sorted names and the block's size."""
    lines = [*sorted(names), f"e4m3 {FP8_BLOCK}x{FP8_BLOCK}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _server_name(name: str) -> str:
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name


_POLL_S = 0.5
_SAY_S = 30.0
_WATCH_S = 2.0
_CALL_S = 10.0
_FIRST_TOKEN_S = 60.0
_RESTART_PAUSE_S = 1.0
_LONGEST_RESTART_PAUSE_S = 60.0
# So many starts in a row after which a server served nobody, and the run waits for it no longer.
_UNSERVED_STARTS = 3
# How long a process may take to be seen as gone after its connections broke.
_DEATH_S, _DEATH_POLL_S = 3.0, 0.1
_SETTLE_POLL_S = 0.05
# The oldest version of which is known that it refuses a bias beyond its vocabulary, instead of dying of it.
_VOCABULARY_VERSION = (0, 5, 20)


def still_starts(error: UnreachableError) -> bool:
    """Whether a server that did not answer is there, and only not ready yet."""
    return error.status == 503


class UnusableServerError(EngineError):
    """A server is not what the run needs; started again it would be the same."""


def unusable(url: str, error: EngineError) -> EngineError:
    """Return why a server of `engine.sglang.urls` cannot be used."""
    if isinstance(error, RefusedError):
        return UnusableServerError(
            f"engine.sglang.urls: {url} is no SGLang server ({error}); allowed: SGLang 0.5.18 or newer, itself and not "
            "a router in front of it"
        )
    return EngineError(f"engine.sglang.urls: {url} does not answer ({error}); allowed: SGLang servers that run")


@dataclass(frozen=True, slots=True)
class Expected:
    """What every server must be.

    model_path: of the policy. model_type, vocabulary: of its config.json (None: not compared). longest_prompt, longest:
    tokens of a prompt, and of a prompt with its answer. encode: text -> ids of the trainer's tokenizer. shares_gpus:
    with the trainer, in turns: it can give its memory back. reads_text: answers end at texts, which a server without a
    tokenizer refuses.
    """

    model_path: Path
    model_type: str
    longest_prompt: int
    longest: int
    encode: Callable[[str], list[int]] | None = None
    vocabulary: int | None = None
    shares_gpus: bool = False
    reads_text: bool = False


@dataclass(slots=True)
class _Wait:
    """A wait for a server that does not generate yet; a person is told now and then what keeps it from that."""

    server: str
    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    next_s: float = field(default_factory=lambda: _SAY_S)
    reason: str = "no answer yet"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def go_on(self, error: EngineError) -> None:
        """Note why it is not there yet."""
        self.reason = str(error)
        if self.seconds >= self.next_s:
            self.next_s = 2 * self.next_s
            self.tell(f"waiting for {self.server} for {self.seconds:.0f} s: {error}")


class Supervision:
    """Life and death of the servers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        handles: Mapping[str, ServerHandle],
        options: SGLangSection,
        expected: Expected,
        *,
        warn: Callable[[str], None],
        loads: Callable[[str], None] = lambda text: None,
        join: Callable[[Server], Awaitable[None]],
    ) -> None:
        """Args: handles: by server name. join: gives a server the policy's weights (or leaves that to the next
        update). warn: tells a person. loads: tells a person which server loads."""
        self._loads = loads
        self._fleet, self._handles, self._options, self._expected = fleet, handles, options, expected
        self._warn, self._join = warn, join
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._may_start = asyncio.Event()  # cleared while others have the GPUs
        self._may_start.set()
        self._unsettled: set[str] = set()  # servers whose process is being ended or started

    async def start(self) -> None:
        """Start all servers at once and watch them from then on. One whose process fails is started again beside the
        others.

        Raises:
            EngineError: none started, or one cannot be used: one that runs already, one with another model or without
                what the run needs, one that shares its GPUs with the trainer.
        """
        starting = [asyncio.create_task(self._start(server)) for server in self._fleet.servers]
        for task in starting:
            task.add_done_callback(lambda _: self._tell(starting))
        self._tell(starting)
        try:
            failures = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            raise
        if all(failures):
            raise EngineError(str(failures[0]))
        for server, failure in zip(self._fleet.servers, failures, strict=True):
            if failure:
                self._fleet.fence(server, str(failure))
        for server in self._fleet.servers:
            self._run(self._watch(server))

    def _tell(self, starting: Sequence[asyncio.Task[EngineError | None]]) -> None:
        """Name the first server that is still to come."""
        ended = sum(task.done() for task in starting)
        if ended < len(starting):
            self._loads(f"server {ended + 1} of {len(starting)} loads")

    async def _start(self, server: Server) -> EngineError | None:
        """Bring a server up for the first time; returns why it must be started again."""
        try:
            await self._bring_up(server)
        except UnusableServerError:
            raise
        except EngineError as error:
            again = self._handles[server.name].restartable and self._options.max_restarts
            if not again or self._expected.shares_gpus:
                raise
            return error
        return None

    def revive(self, server: Server) -> None:
        """Brings a fenced server back, in the background."""
        if self._closing:
            return
        self._warn(f"SGLang {server.name} is given up: {server.reason}")
        server.is_awaited = self._may_be_awaited(server)
        self._unsettled.add(server.name)
        self._run(self._revive(server))

    def hold_starts(self) -> None:
        """Start no process again from now on, until `allow_starts`: others have the GPUs."""
        self._may_start.clear()

    def allow_starts(self) -> None:
        """Start those again that waited for it."""
        self._may_start.set()

    async def settled(self) -> None:
        """Wait until no process is being ended or started."""
        while self._unsettled and not self._closing:
            await asyncio.sleep(_SETTLE_POLL_S)

    async def close(self) -> None:
        """Stop watching and end every process of ours. May be called twice."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CALL_S)
        await asyncio.gather(*(handle.stop() for handle in self._handles.values()), return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self._fleet.servers))

    async def examine(self, server: Server) -> None:
        """Fences the server now if its process is gone."""
        reason = await self._handles[server.name].death()
        if reason and server.state in ("serving", "updating", "joining"):
            self._fleet.fence(server, reason)

    def give_up(self, server: Server, reason: str) -> None:
        """Fences a server whose requests fail. If its process turns out to be gone that is the reason: its log says
        more than a connection that broke; but the end of all its children takes a moment."""
        if self._handles[server.name].restartable:
            self._fleet.set_state(server, "joining")  # it gets no request meanwhile
            self._run(self._give_up(server, reason))
        else:
            self._fleet.fence(server, reason)

    async def _give_up(self, server: Server, reason: str) -> None:
        death = await self.death_of(server)
        if server.state == "joining":
            self._fleet.fence(server, death or reason)

    async def death_of(self, server: Server) -> str:
        """Why the process of a server that cannot be reached is gone, which may take a moment to be seen; empty where
        it lives, and where nobody knows."""
        handle = self._handles[server.name]
        end = time.monotonic() + _DEATH_S
        while not (reason := await handle.death()) and handle.restartable and time.monotonic() < end:
            await asyncio.sleep(_DEATH_POLL_S)
        return reason

    def _may_be_awaited(self, server: Server) -> bool:
        """Whether the run may go on without any other server until this one is back. Not where it waits for the
        trainer to leave the GPUs, nor where it never served: what kept it from that will be there again."""
        return (
            server.has_served
            and self._handles[server.name].restartable
            and not self._expected.shares_gpus
            and server.restarts < self._options.max_restarts
            and server.unserved_starts < _UNSERVED_STARTS
        )

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wait for a watcher, which must not end; if one does, the run must not go on unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fleet.fail(EngineError(f"supervision of the SGLang servers failed: {task.exception()!r}"))

    async def _bring_up(self, server: Server) -> None:
        """Process, first answer, first token, and whether it is what it must be. Leaves it "joining"."""
        handle = self._handles[server.name]
        server.unserved_starts += 1
        url = await handle.launch()
        await server.client.close()
        server.client = SGLangClient(url)
        server.versions, server.version, server.released = set(), None, frozenset()
        wait = _Wait(f"{server.name} at {url}", self._warn)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                server.facts = await self._first_answer(server, handle, wait)
                if not handle.restartable:
                    await self._wake(server)
                await self._first_token(server, handle, wait)
        except TimeoutError:
            raise EngineError(
                f"{wait.server} did not generate within {wait.seconds:.0f} s ({wait.reason}); raise "
                "engine.sglang.start_timeout_s if it is only slow"
            ) from None
        await self._check(server)
        server.reason = ""
        self._fleet.set_state(server, "joining")

    async def _first_answer(self, server: Server, handle: ServerHandle, wait: _Wait) -> ServerFacts:
        while True:
            try:
                return await server.client.facts(timeout_s=_CALL_S)
            except UnreachableError as error:
                reason = await handle.death()
                if reason:
                    raise EngineError(f"{server.name} did not start: {reason}") from None
                if not handle.restartable and not still_starts(error):
                    raise unusable(server.url, error) from None
                wait.go_on(error)
            except RefusedError as error:
                raise unusable(server.url, error) from None
            await asyncio.sleep(_POLL_S)

    async def _wake(self, server: Server) -> None:
        """Wake a server that ran before this run and may still be paused: its last weight update failed, or was never
        ended."""
        with contextlib.suppress(EngineError):  # what it lacks is said below, what hangs shows at the first token
            await server.client.post("/continue_generation", timeout_s=_CALL_S)

    async def _first_token(self, server: Server, handle: ServerHandle, wait: _Wait) -> None:
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        while True:
            try:
                await server.client.post("/generate", body, timeout_s=_FIRST_TOKEN_S)
                return
            except UnreachableError as error:
                reason = await handle.death()
                if reason:
                    raise EngineError(f"{server.name} did not start: {reason}") from None
                is_gone = isinstance(error, DisconnectedError) and not handle.restartable
                if is_gone or (error.status and not still_starts(error)):
                    raise EngineError(
                        f"{wait.server} cannot generate a token ({error}); allowed: a server that answers /generate; "
                        "look at its log"
                    ) from None
                wait.go_on(error)
            await asyncio.sleep(_POLL_S)

    async def _check(self, server: Server) -> None:
        """Raise EngineError where the server cannot do what the run needs, all reasons at once."""
        facts = server.facts
        assert facts is not None
        calls = SYNC_CALLS[self._options.sync] + (MEMORY_CALLS if self._expected.shares_gpus else ())
        problems = _version_problems(facts, calls) + _length_problems(facts, self._expected)
        if self._options.fp8_blocks:
            problems += _block_problems(facts)
        if self._options.sync == "shards":
            problems += _shard_problems(facts)
        model_type = (await server.client.model_info(timeout_s=_CALL_S)).get("model_type")
        if model_type and model_type != self._expected.model_type:
            problems.append(
                f"it serves a model of type {model_type!r}; allowed: {self._expected.model_type!r}, as model.path"
            )
        if self._expected.reads_text and not facts.has_tokenizer:
            problems.append(
                "it was started with --skip-tokenizer-init, and answers end at texts (rollout.stop or a template's); "
                "start it without"
            )
        if facts.has_tokenizer and self._expected.encode and "/tokenize" in facts.calls:
            problems += await self._tokenizer_problems(server, self._expected.encode)
        if self._expected.vocabulary and version_number(facts.version) >= _VOCABULARY_VERSION:
            problems += await self._vocabulary_problems(server, self._expected.vocabulary)
        if problems:
            field_name = "engine.sglang" if self._handles[server.name].restartable else "engine.sglang.urls"
            message = f"{field_name}: {server.name} at {server.url} cannot be used: " + "; ".join(problems)
            raise UnusableServerError(message)
        if facts.newer_than_tested():
            tested = ".".join(map(str, LAST_TESTED))
            self._warn(f"{server.name} is SGLang {facts.version}, newer than {tested}, the newest that was tested")

    async def _tokenizer_problems(self, server: Server, encode: Callable[[str], list[int]]) -> list[str]:
        text = "If 3x + 4 = 10, then x = 2."
        try:
            answer = await server.client.post("/tokenize", {"prompt": text}, timeout_s=_CALL_S)
            ids = read(Tokens, answer).tokens
        except EngineError:
            return []
        expected = encode(text)
        if ids == expected or ids[1:] == expected:
            return []
        return [
            f"its tokenizer writes {text!r} as {ids[:8]}..., that of model.path as {expected[:8]}...; serve the same "
            "model, or start the server with --skip-tokenizer-init"
        ]

    async def _vocabulary_problems(self, server: Server, vocabulary: int) -> list[str]:
        """Check that the server refuses a bias for the first token beyond the vocabulary, and no smaller one."""
        bias = {"max_new_tokens": 1, "logit_bias": {str(vocabulary): 0.0}}
        try:
            await server.client.post("/generate", {"input_ids": [0], "sampling_params": bias}, timeout_s=_CALL_S)
            served = f"more than {vocabulary}"
        except UnreachableError:
            return []
        except RefusedError as error:
            last = re.search(r"logit_bias .*\[0, (\d+)\]", str(error))
            if last is None or int(last[1]) == vocabulary - 1:
                return []
            served = str(int(last[1]) + 1)
        return [f"its model has a vocabulary of {served} tokens, that of model.path {vocabulary}; serve the same model"]

    async def _watch(self, server: Server) -> None:
        """Look every few seconds whether the process lives and whether tokens come."""
        limit = self._options.stall_timeout_s
        while True:
            await asyncio.sleep(min(_WATCH_S, limit / 4))
            if server.state not in ("serving", "joining"):
                continue
            await self.examine(server)
            silent = time.monotonic() - server.last_progress
            if server.state != "serving" or silent < limit / 2:
                continue
            if await server.client.healthy(timeout_s=max(limit - silent, 1.0)):
                server.progressed()
            elif server.state == "serving":
                self._fleet.fence(server, f"no token came out of it for {limit:g} s (engine.sglang.stall_timeout_s)")

    async def _revive(self, server: Server) -> None:
        """End what is left of the process and start another, until one is up or the restarts are used up."""
        pause, given_up_for = _RESTART_PAUSE_S, server.reason
        await self._end_process(server)
        while True:
            await self._may_start.wait()
            if server.restarts >= self._options.max_restarts:
                self._warn(f"SGLang {server.name} was started {server.restarts} times again and stays away")
                return
            server.restarts += 1
            self._fleet.set_state(server, "starting")
            self._unsettled.add(server.name)
            try:
                await self._bring_up(server)
                self._unsettled.discard(server.name)
                break
            except EngineError as error:
                server.reason = f"{given_up_for}; then it could not be started again: {error}"
                self._warn(f"SGLang {server.name} could not be started again: {error}")
                server.is_awaited = self._may_be_awaited(server)
                self._fleet.end_if_all_gone()
            await self._end_process(server)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RESTART_PAUSE_S)
        await self._join(server)

    async def _end_process(self, server: Server) -> None:
        await self._handles[server.name].stop()
        self._unsettled.discard(server.name)


def _version_problems(facts: ServerFacts, calls_of_options: Sequence[str]) -> list[str]:
    problems = []
    number = version_number(facts.version)
    first = ".".join(map(str, FIRST_VERSION))
    if number and number < FIRST_VERSION:
        problems.append(f"it is SGLang {facts.version}; allowed: {first} or newer")
    for calls, fix in ((NEEDED_CALLS, ""), (calls_of_options, ", or another engine.sglang.sync")):
        missing = [call for call in calls if call not in facts.calls]
        if missing:
            problems.append(
                f"SGLang {facts.version} lacks {', '.join(missing)}; allowed: {first} or newer, over HTTP{fix}"
            )
    return problems


def _block_problems(facts: ServerFacts) -> list[str]:
    oldest = ".".join(map(str, _FP8_OLDEST_SGLANG))
    if version_number(facts.version) < _FP8_OLDEST_SGLANG or not facts.has_checksums:
        got = f"SGLang {facts.version} cannot tell which of its matrices are fp8 blocks"
        return [f"{got}; allowed with engine.sglang.fp8_blocks: {oldest} or newer, with /weights_checker"]
    if facts.quantization != "fp8":
        arguments = " ".join(f"--{name.replace('_', '-')} '{v}'" for name, v in fp8_arguments().items())
        return [f"it does not wait for fp8 blocks; allowed: a server started with {arguments}"]
    return []


def _shard_problems(facts: ServerFacts) -> list[str]:
    if version_number(facts.version) == _SHARDS_SGLANG:
        return []
    allowed = ".".join(map(str, _SHARDS_SGLANG))
    return [
        f"where SGLang {facts.version} keeps its weights is not known; allowed with engine.sglang.sync shards: "
        f"{allowed}; install it, or set engine.sglang.sync=distributed"
    ]


def _length_problems(facts: ServerFacts, expected: Expected) -> list[str]:
    problems = []
    if 0 < facts.max_input_tokens < expected.longest_prompt:
        problems.append(
            f"its longest prompt is {facts.max_input_tokens} tokens, data.max_prompt_tokens is "
            f"{expected.longest_prompt}; raise its context_length or max_total_tokens, or lower data.max_prompt_tokens"
        )
    elif 0 < facts.context_tokens < expected.longest - 8:
        problems.append(
            f"its context is about {facts.context_tokens} tokens, prompt and answer may be {expected.longest}; raise "
            "its context_length or max_total_tokens, or lower rollout.max_response_tokens"
        )
    return problems


MemoryTag = Literal["weights", "kv_cache"]
"""What a server gives back, by SGLang's names."""
_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")
_IDLE_POLL_S = 0.1


class SharedMemory:
    """The memory of all servers of a fleet."""

    def __init__(self, fleet: Fleet, supervision: Supervision, options: SGLangSection) -> None:
        """Change nothing."""
        self._fleet, self._supervision, self._options = fleet, supervision, options

    async def release(self) -> None:
        """Have every server give its memory back. One that is being started again is waited for; one that will not give
        it back is ended, and started again when it is the servers' turn. Returns when none has any.

        Raises:
            EngineError: none is left.
        """
        self._supervision.hold_starts()
        await self._supervision.settled()
        await asyncio.gather(*(self._release(server) for server in self._fleet.of("serving", "joining")))
        await self._supervision.settled()
        self._fleet.check()

    async def _release(self, server: Server) -> None:
        if server.released:
            return
        self._fleet.set_state(server, "joining")  # no request, and nobody asks it for a token
        limit = self._options.sync_timeout_s
        try:
            await server.client.post("/pause_generation", {"mode": "abort"}, timeout_s=limit)
            await _until_idle(server, limit)
            await server.client.post("/release_memory_occupation", {"tags": list(_TAGS)}, timeout_s=limit)
        except EngineError as error:
            self._fleet.fence(server, f"giving its memory to the trainer: {error}")
            return
        server.released = frozenset(_TAGS)


async def resume(server: Server, tag: MemoryTag, *, timeout_s: float) -> None:
    """Have a server take this memory again; nothing where it has it. What was in it is lost.

    Raises:
        EngineError: it did not, and it is not known what it has.
    """
    if tag in server.released:
        await server.client.post("/resume_memory_occupation", {"tags": [tag]}, timeout_s=timeout_s)
        server.released -= {tag}


async def _until_idle(server: Server, limit_s: float) -> None:
    """Wait until nothing runs on the server: it refuses to empty its cache before."""
    end = time.monotonic() + limit_s
    while True:
        try:
            await server.client.post("/flush_cache", timeout_s=limit_s)
            return
        except RefusedError:
            if time.monotonic() > end:
                raise
        await server.client.post("/abort_request", {"abort_all": True}, timeout_s=limit_s)
        await asyncio.sleep(_IDLE_POLL_S)
