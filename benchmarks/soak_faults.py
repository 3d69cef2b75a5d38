"""Faults for real SGLang servers, between engine and server and in the servers' processes.

Place in the data flow: sglang_soak.py builds an `Injector` from a seeded schedule; it causes one fault after the other
through soak_proxy.py, each only while all servers serve, and follows it until the engine noticed and all serve again.
It refuses to count a fault that left no evidence.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak_proxy import ProxiedServer, Proxy, Rule, set_sleep

from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.fleet import Server, State

KINDS = ("kill_idle", "kill_serving", "kill_sync", "stop", "http_500", "reset", "slow_down")
SYNC_PATHS = (
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
    "/continue_generation",
)
_OF_SHARDS = "/update_weights_from_tensor"
_ALL_SERVE_S = 300.0
_TRIGGER_S = 120.0
_QUIET_S = 5.0
_EXTRA = 5


@dataclass
class Fault:
    """One fault. step: of which it is due. Times: seconds since the start of the soak; None: did not happen."""

    kind: str
    step: int
    server: str = ""
    variant: str = ""
    injected_s: float | None = None
    noticed_s: float | None = None
    healed_s: float | None = None
    evidence: list[str] = field(default_factory=list)


def schedule(steps: int, each: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Faults of every kind in random order, spread over the steps; the first and last few steps are left alone."""
    rng = random.Random(seed)
    kinds = [kind for kind in kinds for _ in range(each)]
    rng.shuffle(kinds)
    first, last = 3, max(steps - 5, 4)
    return [Fault(kind, first + i * (last - first) // max(len(kinds) - 1, 1)) for i, kind in enumerate(kinds)]


class Injector:
    """Causes the faults of a schedule, one at a time."""

    def __init__(
        self,
        engine: SGLangEngine,
        handles: dict[str, ProxiedServer],
        faults: list[Fault],
        *,
        seed: int,
        sync: str,
        log: Callable[[str], None],
    ) -> None:
        """Args: handles: by server name, as the engine has them. sync: engine.sglang.sync. log: gets a line for each
        event."""
        self._engine, self._handles, self.faults, self._log = engine, handles, faults, log
        self._rng = random.Random(seed + 1)
        sending = SYNC_PATHS[2] if sync == "distributed" else _OF_SHARDS
        self._sync_paths = (*SYNC_PATHS[:2], sending, *SYNC_PATHS[3:])
        self._started = time.monotonic()
        self._waiting = list(faults)
        self._extra = _EXTRA
        self._current: asyncio.Task[None] | None = None
        self.fences: list[dict[str, Any]] = []
        inner = engine.fleet._on_fenced

        def fenced(server: Server) -> None:
            self._note_fence(server)
            inner(server)

        engine.fleet._on_fenced = fenced

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def all_serve(self) -> bool:
        """Whether every server serves (or takes weights at this moment)."""
        fleet = self._engine.fleet
        return len(fleet.of("serving", "updating")) == len(fleet.servers)

    async def gate(self, step: int, pace_s: float) -> None:
        """Before each batch: injects what is due, when all serve; otherwise lets a damaged fleet work on slowly."""
        if self._waiting and self._waiting[0].step <= step:
            if self._current:
                await self._current
            await self._until(self.all_serve, _ALL_SERVE_S)
            fault = self._waiting.pop(0)
            self._current = asyncio.create_task(self._run(fault))
            await asyncio.sleep(0)
        elif self._current and not self._current.done():
            await self._until(lambda: self._current is None or self._current.done(), pace_s)

    async def finish(self) -> None:
        """Waits for the last fault."""
        if self._current:
            await self._current

    async def _run(self, fault: Fault) -> None:
        server = self._rng.choice(self._engine.fleet.servers)
        handle = self._handles[server.name]
        proxy, fault.server = handle.proxy, server.name
        before = _Before(len(self.fences), self._engine.metrics()["engine/retries"], proxy.done.copy(), len(proxy.seen))
        await getattr(self, f"_{fault.kind}")(fault, server, handle)
        await self._until(lambda: self._noticed(fault, before, proxy), _TRIGGER_S)
        await asyncio.sleep(_QUIET_S if fault.kind in ("http_500", "reset") else 0)
        proxy.rule = None
        if fault.kind == "slow_down" and self._is(server, "serving"):
            await set_sleep(proxy, 0.0)
        self._collect(fault, before, proxy)
        evidence = f"{fault.kind}: {'; '.join(fault.evidence)[:300]}"
        if await self._until(self.all_serve, _ALL_SERVE_S):
            fault.healed_s = self.now()
            self._log(f"{fault.healed_s:7.1f} s  all serve again after {evidence}")
        else:
            self._log(f"{self.now():7.1f} s  NOT HEALED after {_ALL_SERVE_S:g} s: {evidence}")

    async def _kill_idle(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        await self._until(lambda: not any(handle.proxy.active.values()), _TRIGGER_S)
        fault.variant = self._rng.choice(("main", "child", "all"))
        self._mark(fault)
        handle.signal(signal.SIGKILL, fault.variant)

    async def _kill_serving(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        # Servers that join or take weights are asked to generate too.
        await self._kill_at(fault, handle, "/generate", lambda: self._is(server, "serving"))

    async def _kill_sync(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        path = self._rng.choice(self._sync_paths)
        await self._kill_at(fault, handle, path, lambda: self._is(server, "updating"))

    async def _kill_at(self, fault: Fault, handle: ProxiedServer, path: str, when: Callable[[], bool]) -> None:
        whom = self._rng.choice(("main", "child", "all"))
        fault.variant = f"{whom} at {path}"

        def kill() -> None:
            self._mark(fault)
            handle.signal(signal.SIGKILL, whom)

        handle.proxy.kill = kill
        handle.proxy.rule = _first(1, lambda asked: "kill" if asked == path and when() else "")

    async def _stop(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        fault.variant = self._rng.choice(("child", "all"))
        await asyncio.sleep(self._rng.uniform(0, 1.5))
        self._mark(fault)
        handle.signal(signal.SIGSTOP, fault.variant)

    async def _http_500(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        self._answer(fault, server, handle, "500")

    async def _reset(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        self._answer(fault, server, handle, self._rng.choice(("reset", "reset_answer")))

    def _answer(self, fault: Fault, server: Server, handle: ProxiedServer, action: str) -> None:
        """Some requests for rollouts, or one call of a weight update, get this instead of an answer."""
        path = self._rng.choice(("/generate", "/generate", self._rng.choice(self._sync_paths)))
        count = self._rng.randint(1, 8) if path == "/generate" else 1
        fault.variant = f"{count} x {action} at {path}"

        def rule(asked: str) -> str:
            if asked != path or (path == "/generate" and not self._is(server, "serving")):
                return ""
            if fault.injected_s is None:
                self._mark(fault)
            return action

        handle.proxy.rule = _first(count, rule)

    async def _slow_down(self, fault: Fault, server: Server, handle: ProxiedServer) -> None:
        seconds = self._rng.choice((5.0, 90.0))
        fault.variant = f"{seconds:g} s a forward pass"
        self._mark(fault)
        await set_sleep(handle.proxy, seconds)

    def _is(self, server: Server, state: State) -> bool:
        """Whether a server, or a later process of it, is in this state."""
        return any(one.name == server.name for one in self._engine.fleet.of(state))

    def _mark(self, fault: Fault) -> None:
        fault.injected_s = self.now()
        self._log(f"{fault.injected_s:7.1f} s  step {fault.step}: {fault.kind} ({fault.variant}) on {fault.server}")

    def _note_fence(self, server: Server) -> None:
        self.fences.append({"at_s": self.now(), "server": server.name, "reason": server.reason})
        self._log(f"{self.now():7.1f} s  fenced {server.name}: {server.reason[:200]}")

    def _noticed(self, fault: Fault, before: _Before, proxy: Proxy) -> bool:
        """Whether the engine did something about it: gave the server up, or asked again."""
        if fault.injected_s is None:
            return False
        if not self._reactions(fault, before, proxy):
            return False
        fault.noticed_s = self.now()
        # A process that is gone or stopped must be given up; a retry alone says too little.
        return fault.kind not in ("kill_idle", "kill_serving", "kill_sync", "stop") or self._fenced(fault, before)

    def _fenced(self, fault: Fault, before: _Before) -> bool:
        return any(fence["server"] == fault.server for fence in self.fences[before.fences :])

    def _reactions(self, fault: Fault, before: _Before, proxy: Proxy) -> list[str]:
        found = [f"fenced: {f['reason'][:160]}" for f in self.fences[before.fences :] if f["server"] == fault.server]
        if retries := self._engine.metrics()["engine/retries"] - before.retries:
            found.append(f"{retries:g} requests made again")
        if fault.kind in ("http_500", "reset") and " at /generate" not in fault.variant:
            path = fault.variant.split(" at ")[1]
            asked = sum(seen == path for _, seen in proxy.seen[before.seen :])
            if asked > 1:
                found.append(f"{path} called again")
        return found

    def _collect(self, fault: Fault, before: _Before, proxy: Proxy) -> None:
        done = proxy.done - before.done
        fault.evidence = [f"{count} x {what}" for what, count in done.items()] + self._reactions(fault, before, proxy)
        needs_fence = fault.kind in ("kill_idle", "kill_serving", "kill_sync", "stop")
        missed = needs_fence and not self._fenced(fault, before)
        missed |= fault.kind == "kill_serving" and self._engine.metrics()["engine/retries"] == before.retries
        if missed or not self._reactions(fault, before, proxy):
            fault.noticed_s = None
            self._log(f"{self.now():7.1f} s  NOT NOTICED: {fault}")
            if self._extra:  # another of its kind, at once: how many went unnoticed stays in the table
                self._extra -= 1
                self.faults.append(Fault(fault.kind, fault.step))
                self._waiting.insert(0, self.faults[-1])

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Polls; False when the limit passed."""
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
        return True


@dataclass(frozen=True)
class _Before:
    """Counters at the beginning of a fault."""

    fences: int
    retries: float
    done: Counter[str]
    seen: int


def _first(count: int, rule: Rule) -> Rule:
    """The rule for as many requests as it acts on, then none."""
    left = [count]

    def limited(path: str) -> str:
        action = rule(path) if left[0] else ""
        left[0] -= bool(action)
        return action

    return limited
