"""An engine of your own: `engine.kind: module:Class` names a class with the methods of `ServerApi`.

GroupRequest -> `OwnEngine` -> one `answer` for each rollout -> checked -> Rollout; weights are passed as files. The
class runs in the driver, and asks servers of its own. Its answers are checked before anything is trained on them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from megatron_daro.config import Config
from megatron_daro.data.stops import tokens_until_stop, until_end
from megatron_daro.errors import ConfigError, DaroError, EngineError, SyncError
from megatron_daro.own_class import import_own_class, make_own
from megatron_daro.sync.plan import SendReport, WeightFiles
from megatron_daro.types import GroupRequest, Rollout, SamplingParams

_FILE_BYTES = 2**30
_ROUNDING = 1e-3
"""By how much rounding in a kernel may lift a log-prob above 0."""
_MOST_RUNNING = 256
"""Most answers in flight at once."""
_METHODS = {"start": 0, "answer": 3, "load_weights": 2, "close": 0}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated for one prompt.

    tokens: [R] ids, R in 1..max_new_tokens, including a stop token that was sampled. Tokens behind a text of
    sampling.stop are cut off. logprobs: [R], natural log, of the distribution with the temperature applied and top-p
    not applied. finish_reason: "length" if neither a stop token nor a stop text ended it.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]


class ServerApi(Protocol):
    """What the class of `engine.kind: module:Class` must offer.

    Its constructor takes the keyword arguments model_path (a Hugging Face directory), replicas and seed, and those of
    `engine.options`; it starts nothing. All methods run on the driver's event loop and must not block it; each may be
    cancelled. An exception in one ends the run, with the name of the class. The class may set
    `one_batch_at_a_time = True`, see the function of this name below.
    """

    async def start(self) -> None:
        """Start the servers, or find those that run, with the weights of model_path."""
        ...

    async def answer(self, prompt_tokens: tuple[int, ...], sampling: SamplingParams, seed: int, /) -> Answer:
        """Generate one response. Many calls run at once. Args: seed: for this response, in 0..2^32 - 1."""
        ...

    async def load_weights(self, directory: Path, version: int, /) -> None:
        """Load a Hugging Face directory into every server; called while no answer is in flight. After it returns, every
        answer must come from these weights, and the directory is removed."""
        ...

    async def close(self) -> None:
        """End the servers that `start` started. May be called twice, and before `start`."""
        ...


def own_engine_class(name: str, arguments: Mapping[str, Any]) -> type[ServerApi]:
    """Return the class that `engine.kind` names, after checking its signatures against `ServerApi`.

    Raises:
        ConfigError: it cannot be imported, lacks a method, or takes other arguments.
    """
    return import_own_class(
        "engine.kind",
        name,
        builtin="embedded, sglang",
        protocol=ServerApi,
        methods=_METHODS,
        arguments=arguments,
        options="engine.options",
    )


def one_batch_at_a_time(config: Config) -> bool:
    """Whether the engine works on one call at a time: the embedded one does, and one of your own that says so. Such an
    engine gets whole rounds of groups, whole turns of conversations, and no evaluation beside a batch, so that a run
    can be repeated exactly. Other engines get each request as soon as it exists.

    Raises:
        ConfigError: as `own_engine_class`.
    """
    engine = config.engine
    if not engine.is_own:
        return engine.kind == "embedded"
    own = own_engine_class(engine.kind, {"model_path": config.model.path, **engine.own_arguments})
    return getattr(own, "one_batch_at_a_time", False)


class OwnEngine:
    """The Engine and WeightInstaller of a run that uses a `ServerApi`."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        vocabulary: int,
        sync_dir: Path,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Make the user's object; start nothing.

        Args:
            name: module:Class. arguments: of its constructor. vocabulary: number of token ids.
            sync_dir: folder for weight files. decode: token ids of a response -> text.

        Raises:
            ConfigError: as `own_engine_class`, or the constructor raised.
        """
        engine = own_engine_class(name, arguments)
        self._api = make_own("engine.kind", name, engine, arguments, options="engine.options", error=ConfigError)
        self._name, self._vocabulary, self._decode = name, vocabulary, decode
        self._seed, self._files = int(arguments["seed"]), itertools.count()
        self.sync_dir = sync_dir
        self.version = 0
        self.fenced = ""
        self._slots = asyncio.Semaphore(_MOST_RUNNING)
        self._gate, self._idle, self._running = asyncio.Event(), asyncio.Event(), 0
        self._gate.set()
        self._idle.set()
        self._groups: dict[asyncio.Task[tuple[Rollout, ...]], int] = {}

    async def start(self) -> None:
        """Start the user's servers. Raises EngineError."""
        await self.call("start", self._api.start())

    async def close(self) -> None:
        """Stop all answers, end the user's servers and remove weight files. May be called twice."""
        await self.abort()
        try:
            await self.call("close", self._api.close())
        finally:
            shutil.rmtree(self.sync_dir, ignore_errors=True)

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request once all have ended; groups that were aborted are left out.

        Raises:
            EngineError: the engine failed, or an answer is not what was asked for.
        """
        tasks = {asyncio.create_task(self._group(request)): request.group_id for request in requests}
        self._groups |= tasks
        try:
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():
                        yield task.result()
        finally:
            for task in tasks:
                task.cancel()
                self._groups.pop(task, None)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all)."""
        for task, group_id in self._groups.items():
            if group_ids is None or group_id in group_ids:
                task.cancel()

    def begin_update(self, version: int, only: str | None = None) -> _OwnUpdate | None:
        """Begin an update of the whole engine; None with `only`, since its servers do not come back one by one."""
        return None if only else _OwnUpdate(self, version, self.sync_dir / f"version_{version:06d}-{next(self._files)}")

    def when_back(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Do nothing: servers do not come back one by one."""

    async def hold(self) -> None:
        """Let no answer begin, and wait for those in flight, so that each has tokens of one weight version only."""
        self._gate.clear()
        await self._idle.wait()

    def let_go(self, fenced: str = "") -> None:
        """Let answers begin again. Args: fenced: if not empty, why they fail instead."""
        self.fenced = fenced
        self._gate.set()

    async def load(self, directory: Path, version: int) -> None:
        """Have the user's servers load the weight files. Raises EngineError."""
        await self.call("load_weights", self._api.load_weights(directory, version))
        self.version = version

    async def call(self, method: str, result: Awaitable[_Result]) -> _Result:
        """Await one of the user's methods and return its result. Raises EngineError for anything that it raises."""
        try:
            return await result
        except Exception as error:
            reason = str(error) if isinstance(error, DaroError) else f"{type(error).__name__}: {error}"
            raise EngineError(f"engine {self._name}.{method} failed: {reason}") from error

    async def _group(self, request: GroupRequest) -> tuple[Rollout, ...]:
        tasks = [asyncio.ensure_future(self._rollout(request, index)) for index in request.indices]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rollout(self, request: GroupRequest, index: int) -> Rollout:
        async with self._slots:
            while not self._gate.is_set():
                await self._gate.wait()
            if self.fenced:
                raise EngineError(f"engine {self._name} does not generate: {self.fenced}; resume the run")
            self._running += 1
            self._idle.clear()
            try:
                seed = zlib.crc32(repr((self._seed, request.group_id, request.draw, index)).encode())
                answering = self._api.answer(request.prompt.tokens, request.sampling, seed)
                answer = await self.call("answer", answering)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()
        tokens, logprobs = self._checked(answer, request.sampling)
        rollout = Rollout(
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            attempt=request.attempt,
            index=index,
            tokens=np.concatenate([np.asarray(request.prompt.tokens, np.int32), tokens]),
            prompt_length=len(request.prompt.tokens),
            loss_mask=np.ones(len(tokens), np.uint8),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            weight_version=self.version,
            text=self._decode(tokens.tolist()),
        )
        return until_end(rollout, request, self._decode)

    def _checked(self, answer: object, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 [R] tokens and float32 [R] log-probs. Raises EngineError: they break the rules of `Answer`."""
        if not isinstance(answer, Answer):
            raise self._wrong(f"a {type(answer).__name__}", "megatron_daro.engine.own.Answer")
        count, most = len(answer.tokens), sampling.max_new_tokens
        if not 1 <= count <= most:
            raise self._wrong(f"{count} tokens", f"1 to {most}, which was max_new_tokens")
        if len(answer.logprobs) != count:
            raise self._wrong(f"{len(answer.logprobs)} log-probs for {count} tokens", "one log-prob for each token")
        for token in answer.tokens:
            if not isinstance(token, int | np.integer) or not 0 <= token < self._vocabulary:
                raise self._wrong(f"token {token!r}", f"integers from 0 to {self._vocabulary - 1}")
        for logprob in answer.logprobs:
            if not isinstance(logprob, float | int | np.floating) or not -math.inf < logprob <= _ROUNDING:
                raise self._wrong(f"log-prob {logprob!r}", "finite numbers, at most 0")
        kept = tokens_until_stop([int(token) for token in answer.tokens], sampling.stop, self._decode)
        end = kept[0] if kept else count
        if any(token in sampling.stop_token_ids for token in answer.tokens[: end - 1]):
            raise self._wrong("tokens after a stop token", f"none after one of {sampling.stop_token_ids}")
        if kept:
            return np.asarray(answer.tokens, np.int32), np.asarray(answer.logprobs, np.float32)
        stopped = answer.tokens[-1] in sampling.stop_token_ids
        if answer.finish_reason != ("stop" if stopped else "length") or not (stopped or count == most):
            got = f"finish reason {answer.finish_reason!r} after {count} tokens, the last of them {answer.tokens[-1]}"
            raise self._wrong(
                got, f"stop after one of {(*sampling.stop_token_ids, *sampling.stop)}, or length after {most} tokens"
            )
        return np.asarray(answer.tokens, np.int32), np.asarray(answer.logprobs, np.float32)

    def _wrong(self, got: str, allowed: str) -> EngineError:
        return EngineError(f"engine {self._name}.answer: got {got}; allowed: {allowed}; fix: correct the class")


class _OwnUpdate:
    """One update: the policy writes files and the engine loads them; if that fails, it generates no more. `prepare`
    always returns files, so `blame` is never called, and `accept` only after `install`. Nothing is probed: if weights
    were not loaded, `mismatch/logprob_abs_max` of the next step shows it."""

    def __init__(self, engine: OwnEngine, version: int, directory: Path) -> None:
        self._engine, self._version, self._directory = engine, version, directory

    async def prepare(self) -> WeightFiles:
        """Wait for the answers in flight, then ask for weight files."""
        await self._engine.hold()
        remedy = "free space on the disk of trainer.run_dir"
        return WeightFiles(directory=self._directory, file_bytes=_FILE_BYTES, remedy=remedy)

    async def blame(self, report: SendReport) -> None:
        """Raise SyncError: if files cannot be written, the run ends."""
        raise SyncError(f"weights of version {self._version} were not written: {report.failures}")

    async def install(self, report: SendReport) -> None:
        """Have the engine load the weight files. Raises SyncError."""
        try:
            await self._engine.load(self._directory, self._version)
        except EngineError as error:
            raise SyncError(f"weights of version {self._version} did not reach the engine: {error}") from error

    async def accept(self) -> Mapping[str, float]:
        """Remove the files and let answers begin again."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._engine.let_go()
        return {}

    def abandon(self, error: SyncError) -> None:
        """Let every answer fail from now on."""
        self._engine.let_go(str(error))
