"""The start of one server: process, first answer, first token, and whether it is what the run needs (vetting.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import vetting
from megatron_daro.engine.sglang.client import DisconnectedError, ServerFacts, SGLangClient, UnreachableError
from megatron_daro.engine.sglang.fleet import Server
from megatron_daro.engine.sglang.interpreter import LAST_TESTED, OLDEST_SGLANG, dotted
from megatron_daro.engine.sglang.servers import ServerHandle
from megatron_daro.engine.sglang.vetting import Expected, UnusableServerError
from megatron_daro.errors import EngineError, RefusedError

_POLL_S = 0.5
_SAY_S = 30.0
_CALL_S = 10.0
_FIRST_TOKEN_S = 60.0


async def bring_up(
    server: Server, handle: ServerHandle, options: SGLangSection, expected: Expected, warn: Callable[[str], None]
) -> None:
    """Start a server's process and wait until it generates; then vet it.

    Args:
        server: gets its new address and what it says of itself. handle: of its process. options: engine.sglang.
        expected: what it must be. warn: tells the user what is waited for, and of an untested version.

    Raises:
        EngineError: it did not start, or not in time. UnusableServerError: it is not what the run needs.
    """
    server.client = SGLangClient(await handle.launch())
    wait = _Wait(f"{server.name} at {server.url}", warn)
    try:
        async with asyncio.timeout(options.start_timeout_s):
            server.facts = await _first_answer(server, handle, wait)
            if not handle.restartable:
                await _wake(server)
            await _first_token(server, handle, wait)
    except TimeoutError:
        raise EngineError(
            f"{wait.server} did not generate within {wait.seconds:.0f} s ({wait.reason}); raise "
            "engine.sglang.start_timeout_s if it is only slow"
        ) from None
    report = await vetting.report_of(server.client, server.facts, expected)
    if problems := vetting.problems(report, expected, options):
        field_name = "engine.sglang" if handle.restartable else "engine.sglang.urls"
        message = f"{field_name}: {server.name} at {server.url} cannot be used: " + "; ".join(problems)
        raise UnusableServerError(message)
    if note := vetting.untested(server.facts):
        warn(f"{server.name} is {note}")
    server.reason = ""


@dataclass(slots=True)
class _Wait:
    """A wait for a server that does not generate yet; tells the user, at growing intervals, why it does not."""

    server: str
    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    next_s: float = field(default_factory=lambda: _SAY_S)
    reason: str = "no answer yet"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def go_on(self, error: EngineError) -> None:
        """Note why it does not generate yet."""
        self.reason = str(error)
        if self.seconds >= self.next_s:
            self.next_s = 2 * self.next_s
            self.tell(f"waiting for {self.server} for {self.seconds:.0f} s: {error}")


async def _first_answer(server: Server, handle: ServerHandle, wait: _Wait) -> ServerFacts:
    while True:
        try:
            return await server.client.facts(timeout_s=_CALL_S)
        except UnreachableError as error:
            await _check_alive(server, handle)
            if not handle.restartable and not still_starts(error):
                raise unusable(server.url, error) from None
            wait.go_on(error)
        except RefusedError as error:
            if not handle.restartable:
                raise unusable(server.url, error) from None
            raise UnusableServerError(
                f"engine.sglang.python: {wait.server} does not describe itself as SGLang does ({error}); allowed: "
                f"SGLang {dotted(OLDEST_SGLANG)} to {dotted(LAST_TESTED)}; install one of these there"
            ) from None
        await asyncio.sleep(_POLL_S)


async def _wake(server: Server) -> None:
    """Resume a server that ran before this run, and may still be paused if its last weight update failed or never
    ended."""
    with contextlib.suppress(EngineError):  # vetting reports a missing call, and `_first_token` a server that hangs
        await server.client.post("/continue_generation", timeout_s=_CALL_S)


async def _first_token(server: Server, handle: ServerHandle, wait: _Wait) -> None:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    while True:
        try:
            await server.client.post("/generate", body, timeout_s=_FIRST_TOKEN_S)
            return
        except UnreachableError as error:
            await _check_alive(server, handle)
            is_gone = isinstance(error, DisconnectedError) and not handle.restartable
            if is_gone or (error.status and not still_starts(error)):
                raise EngineError(
                    f"{wait.server} cannot generate a token ({error}); allowed: a server that answers /generate; "
                    "look at its log"
                ) from None
            wait.go_on(error)
        await asyncio.sleep(_POLL_S)


async def _check_alive(server: Server, handle: ServerHandle) -> None:
    """Raise EngineError if the process of a server that is waited for has ended."""
    if reason := await handle.death():
        raise EngineError(f"{server.name} did not start: {reason}") from None


def unusable(url: str, error: EngineError) -> EngineError:
    """Return the error for a server of `engine.sglang.urls` that did not describe itself."""
    if isinstance(error, RefusedError):
        return UnusableServerError(
            f"engine.sglang.urls: {url} is no SGLang server ({error}); allowed: SGLang {dotted(OLDEST_SGLANG)} or "
            "newer, itself and not a router in front of it"
        )
    return EngineError(f"engine.sglang.urls: {url} does not answer ({error}); allowed: SGLang servers that run")


def still_starts(error: UnreachableError) -> bool:
    """Whether the error shows a server that is running but not ready yet."""
    return error.status == 503
