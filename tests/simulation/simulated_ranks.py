"""Ranks of the policy on the virtual loop: processes with Ray's queues, collective calls, deaths and freezes.

The driver's side is real (PolicyGroup, Healing, supervised), and so is what processes keep (SnapshotStore). Not so:
TrainWorker (runtime/train_worker.py), whose methods are imitated here one by one under the same names and in the same
concurrency groups; Ray; torch. Weights and optimizer of a rank are hash chains over all batches that they were trained
on, so that a step that is lost, doubled, torn or of another rank shows in every number that comes after it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache, partial
from types import CoroutineType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from virtual_loop import VirtualLoop

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import snapshot_store
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_store import SnapshotStore
from megatron_daro.runtime.train_worker import TrainWorker
from megatron_daro.sync.plan import SendReport
from megatron_daro.types import StepResult

_CLASS: Any = TrainWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
LAYOUT = dict.fromkeys(KINDS_OF_SNAPSHOT, (8,))
MEET_S = 1800.0


def chained(state: int, *parts: int) -> int:
    """The state after one more batch: 63 bits of all that came before."""
    return hash((state, *parts)) & 0x7FFF_FFFF_FFFF_FFFF


def unbroken(key: int, batches: list[int]) -> int:
    """The chain of a rank that was trained on each of these once, in this order."""
    state = chained(key)
    for number, batch in enumerate(batches, 1):
        state = chained(state, batch, number)
    return state


@dataclass(slots=True)
class Fault:
    """What befalls a rank's process. how: "dies" or "freezes". at_s: virtual seconds, or None. call: else before the
    call of this number, of all calls that the processes of this rank get."""

    rank: int
    how: str
    at_s: float | None = None
    call: int | None = None


@dataclass(slots=True)
class Meeting:
    """A world of process groups. aborts: whether an aborted or dead member ends the waits of the others, as a closed
    socket of gloo does; a communicator of NCCL does not."""

    world: int
    aborts: bool
    broken: bool = False
    left: set[int] = field(default_factory=set)
    arrived: dict[Any, dict[int, asyncio.Future]] = field(default_factory=lambda: defaultdict(dict))


class Cluster:
    """All processes of one schedule, and the network between them."""

    def __init__(
        self, loop: VirtualLoop, *, tensor: int, data: int, hosts: int, free: int, gloo: bool, faults: list[Fault]
    ) -> None:
        self.loop, self.random = loop, loop.random
        self.tensor, self.world, self.hosts, self.free, self.gloo = tensor, tensor * data, hosts, free, gloo
        self.calls = [0] * self.world
        self.faults, self.happened = faults, list[Fault]()
        self.processes = list[Process]()
        self.meetings: dict[str, Meeting] = {}
        self.disk: dict[tuple[Any, int], tuple[int, int, int]] = {}
        self.sent: tuple[int, int] | None = None
        self.restored = list[int]()
        self.on_death: Any = lambda process: None
        self.armed = False

    def arm(self) -> None:
        """Faults of a time are counted from now on, and of a call too."""
        self.armed, self.calls = True, [0] * self.world
        for fault in self.faults:
            if fault.at_s is not None:
                self.loop.call_later(fault.at_s, self._befall, fault)

    def _befall(self, fault: Fault) -> None:
        process = next((p for p in reversed(self.processes) if p.rank == fault.rank), None)
        if process is not None and process.alive and not process.frozen:
            self.happened.append(fault)
            process.freeze() if fault.how == "freezes" else process.die()

    def called(self, process: Process) -> None:
        """Count a call of a rank; the faults of this number come before it."""
        if not self.armed:
            return
        number = self.calls[process.rank] = self.calls[process.rank] + 1
        for fault in self.faults:
            if fault.rank == process.rank and fault.call == number:
                self._befall(fault)

    def start(self, rank: int) -> Handle:
        """A new process."""
        self.processes.append(Process(self, rank))
        return Handle(self.processes[-1], None)

    def delay(self, scale: float = 0.05) -> float:
        """Mostly short, now and then twenty times as long."""
        random = self.random.random()
        return scale * random * (20.0 if random > 0.97 else 1.0)


class Handle:
    """An actor handle as one process or the driver (None) has it."""

    __slots__ = ("__dict__", "caller", "process")

    def __init__(self, process: Process, caller: Process | None) -> None:
        self.process, self.caller = process, caller

    def __getattr__(self, name: str) -> Any:
        method = SimpleNamespace(remote=partial(self.process.submit, self.caller, _group_of(name), name))
        setattr(self, name, method)
        return method


@cache
def _group_of(name: str) -> str:
    """The concurrency group of a method."""
    return getattr(_CLASS, name).__ray_concurrency_group__


class Process:
    """One process. Calls of a concurrency group run one after the other, those of one caller in their order."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.loop, self.rank = cluster, cluster.loop, rank
        self.alive, self.frozen = True, False
        self.policy: Any = None
        self.states = SnapshotStore()
        self.snapshot: tuple[int, asyncio.Future] | None = None
        self._queues: dict[str, deque] = defaultdict(deque)
        self._busy: set[str] = set()
        self._pending: dict[asyncio.Future, Process | None] = {}
        self._last_arrival: dict[Any, float] = {}
        self._tasks: dict[asyncio.Task, None] = {}  # in order, unlike a set: they are cancelled in it
        self._ready_at = self.loop.time() + cluster.delay(2.0)

    # What Ray does.

    def submit(self, caller: Process | None, group: str, name: str, *arguments: Any, **options: Any) -> asyncio.Future:
        """Call a method; the future is the caller's."""
        answer, key = self.loop.create_future(), (caller, group)
        if not self.alive:
            self.loop.call_later(self.cluster.delay(), _fail, answer, RayActorError())
            return answer
        self._pending[answer] = caller
        arrival = max(self.loop.time() + self.cluster.delay(), self._last_arrival.get(key, self._ready_at) + 1e-7)
        self._last_arrival[key] = arrival
        self.loop.call_at(arrival, self._arrive, group, (name, arguments, options, answer))
        return answer

    def _arrive(self, group: str, call: tuple) -> None:
        self._queues[group].append(call)
        self._go_on(group)

    def _go_on(self, group: str) -> None:
        queue = self._queues[group]
        if not queue or group in self._busy or not self.alive or self.frozen:
            return None
        name, arguments, options, answer = queue.popleft()
        self.cluster.called(self)
        if not self.alive or self.frozen:
            return None
        try:
            result = getattr(self, name)(*arguments, **options)
        except Exception as error:
            return self._answer(answer, None, error)
        if type(result) is not CoroutineType:
            return self._answer(answer, result, None)
        self._busy.add(group)
        task = self.loop.create_task(result)
        self._tasks[task] = None
        task.add_done_callback(partial(self._done, group, answer))
        return None

    def _done(self, group: str, answer: asyncio.Future, task: asyncio.Task) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if not self.alive or task.cancelled():
            return
        if error is not None and not isinstance(error, Exception):
            raise error
        self._answer(answer, None if error else task.result(), error)
        self._busy.discard(group)
        self._go_on(group)

    def _answer(self, answer: asyncio.Future, result: Any, error: BaseException | None) -> None:
        if self._pending.pop(answer, self) is not self:
            self.loop.call_later(self.cluster.delay(), _resolve, answer, result, error and _task_error(error))

    def die(self) -> None:
        """kill -9. Each caller learns it when Ray tells it, for all of its calls at once."""
        if not self.alive:
            return
        self.cluster.on_death(self)
        self.alive = False
        for task in self._tasks:
            task.cancel()
        news = {caller: self.cluster.delay(0.5) for caller in self._pending.values()}
        for answer, caller in self._pending.items():
            self.loop.call_later(news[caller], _fail, answer, RayActorError())
        self._pending.clear()
        meeting = self.policy and self.policy.meeting
        if meeting and meeting.aborts:
            self.loop.call_later(self.cluster.delay(0.5), self._broken, meeting)

    def freeze(self) -> None:
        """SIGSTOP: nothing goes on, and nobody is told."""
        self.frozen = True

    async def _spend(self, seconds: float) -> None:
        """asyncio.sleep, in which frozen ones stay."""
        over = self.loop.create_future()
        timer = self.loop.call_later(seconds, _resolve, over, None, None)
        try:
            await over
        finally:
            timer.cancel()
        if self.frozen:
            await self.loop.create_future()

    async def _unless_frozen(self) -> None:
        if self.frozen:
            await self.loop.create_future()

    async def _get(self, answer: asyncio.Future) -> Any:
        """ray.get of what another process answers."""
        timer = self.loop.call_later(snapshot_store.SEND_S, _fail, answer, GetTimeoutError("not ready"))
        try:
            return await answer
        finally:
            timer.cancel()
            await self._unless_frozen()

    # Collective calls.

    async def _meet(self) -> None:
        """A collective call: all wait for all."""
        policy, meeting = self.policy, self.policy.meeting
        policy.calls += 1
        if meeting.broken or self.rank in meeting.left:
            raise RuntimeError("Connection closed by peer")
        here, arrived = self.loop.create_future(), meeting.arrived[policy.calls]
        arrived[self.rank] = here
        if len(arrived) == meeting.world:
            for future in meeting.arrived.pop(policy.calls).values():
                _resolve(future, None, None)
        await here
        await self._unless_frozen()

    def _broken(self, meeting: Meeting, rank: int | None = None) -> None:
        """End the waits of all members, or of one."""
        meeting.broken |= rank is None
        for arrived in meeting.arrived.values():
            for member, future in arrived.items():
                if rank in (None, member):
                    _fail(future, RuntimeError("Connection closed by peer"))

    # What TrainWorker does.

    def gpu(self) -> str:
        return ""

    async def sentinel(self) -> None:
        await self.loop.create_future()

    def rendezvous(self) -> str:
        meetings = self.cluster.meetings
        address = f"tcp://{len(meetings)}"
        meetings[address] = Meeting(self.cluster.world, self.cluster.gloo)
        return address

    async def setup(self, address: str, *settings: Any, heals: bool, to_be_restored: bool) -> None:
        """`dist.init_process_group` waits in a store, where nothing reaches it but the time-out."""
        meeting = self.cluster.meetings[address]
        arrived = meeting.arrived["setup"]
        arrived[self.rank] = self.loop.create_future()
        if len(arrived) == meeting.world:
            for future in arrived.values():
                _resolve(future, None, None)
        timer = self.loop.call_later(MEET_S, _fail, arrived[self.rank], RuntimeError("store time-out"))
        await arrived[self.rank]
        timer.cancel()
        await self._spend(self.cluster.delay(1.0))
        key, start = self.rank % self.cluster.tensor, 0 if to_be_restored else None
        self.policy = SimpleNamespace(
            meeting=meeting,
            calls=0,
            step=0,
            weights=chained(key) if start is None else 1,
            optimizer=chained(1000 + self.rank) if start is None else 1,
            snapshot=None,
            save=None,
        )
        await self._meet()

    def info(self) -> RankInfo:
        rank, tensor = self.rank, self.cluster.tensor
        return RankInfo(
            data_parallel=rank // tensor,
            stage=0,
            exports=rank < tensor,
            sends=rank == 0,
            reports=rank % tensor == 0,
            host=f"host {rank * self.cluster.hosts // self.cluster.world}",
            weights_key=(rank % tensor,),
        )

    async def train(self, batch: Any, micro_batches: Any, step: int, **columns: Any) -> StepResult:
        """actor/step.py: gradients, `check_gradients` (reduce; wait for who reads the weights), `apply_update`."""
        policy = self.policy
        await self._spend(self.cluster.delay(0.5))
        await self._meet()
        await self._settled(policy.save, policy.snapshot)
        await self._meet()
        policy.weights = chained(policy.weights, batch.number, step)
        await self._spend(self.cluster.delay(0.02))
        policy.optimizer = chained(policy.optimizer, batch.number, step)
        await self._meet()
        policy.step = step
        return StepResult({"loss": policy.weights} if self.rank % self.cluster.tensor == 0 else {})

    async def run_pass(self, name: str, batch: Any, micro_batches: Any) -> np.ndarray | None:
        await self._spend(self.cluster.delay(0.2))
        await self._meet()
        return np.array([self.policy.step], np.float32) if self.rank % self.cluster.tensor == 0 else None

    async def export(self, plan: Any, members: Any = (), what: str = "policy") -> SendReport | None:
        """Every rank that exports gathers along; the first one sends."""
        policy = self.policy
        sent = policy.weights, policy.step
        await self._spend(self.cluster.delay(0.3))
        if plan is None:
            return None
        self.cluster.sent = sent
        return SendReport(8)

    async def _settled(self, *waits: asyncio.Future | None) -> None:
        for wait in waits:
            if wait is not None:
                await _ended(wait)
        if self.frozen:
            await self.loop.create_future()

    def _background(self, work: Any) -> asyncio.Task:
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def start_save(self, directory: Any) -> None:
        """actor/policy.py: the one before is waited for. Collective: ranks agree on who writes what."""
        policy = self.policy
        await self._settled(policy.save)
        await self._meet()
        policy.save = self._background(self._write(directory, policy))

    async def _write(self, directory: Any, policy: Any) -> None:
        held = policy.step, policy.weights, policy.optimizer
        await self._spend(self.cluster.delay(0.5))
        self.cluster.disk[directory, self.rank] = held

    async def finish_save(self) -> None:
        await self._settled(self.policy.save)

    async def load(self, directory: Any) -> None:
        await self._meet()
        policy = self.policy
        await self._settled(policy.save, policy.snapshot)
        policy.step, policy.weights, policy.optimizer = self.cluster.disk[directory, self.rank]
        await self._meet()

    def snapshot_bytes(self) -> tuple[dict, int]:
        return dict.fromkeys(KINDS_OF_SNAPSHOT, 8), self.cluster.free

    def keep_own_twice(self, twice: bool) -> None:
        self.states.keep_own_twice(twice)

    async def start_snapshot(self, serial: int, keep: int | None) -> None:
        """actor/policy.py `start_snapshot`, then a thread that copies (actor/snapshot.py `PendingSnapshot`)."""
        policy = self.policy
        await self._settled(policy.snapshot)
        slot = self.states.own.open(keep)
        slot.layout, slot.rest = LAYOUT, {"rank": self.rank, "step": policy.step}
        policy.snapshot = self._background(self._copy(slot, serial, policy))
        self.snapshot = serial, policy.snapshot

    async def _copy(self, slot: Any, serial: int, policy: Any) -> None:
        for kind in KINDS_OF_SNAPSHOT:
            await self._spend(self.cluster.delay(0.1))
            slot.blocks[kind] = [torch.from_numpy(np.array([getattr(policy, kind)]).view(np.uint8))]
        slot.serial = serial

    async def finish_snapshot(self, serial: int, keep: int | None, peer: Handle | None, kinds: Any) -> None:
        if self.snapshot is None or self.snapshot[0] != serial:
            raise WorkerError(f"snapshot {serial} was given up; the newest is {self.snapshot}")
        await self._settled(self.snapshot[1])
        if peer is not None:
            await self._send(serial, keep, Handle(peer.process, self), kinds)

    async def _send(self, serial: int, keep: int | None, peer: Any, kinds: Any) -> None:
        """`SnapshotStore.send`, whose thread waits where this awaits."""
        slot = self.states.whole(serial)
        before = peer.open_copy.remote(self.rank, serial, keep)
        for kind in kinds:
            for number, block in enumerate(slot.blocks[kind]):
                taken = peer.take_block.remote(self.rank, serial, kind, number, block.numpy().copy())
                await self._get(before)
                before = taken
        await self._get(before)
        layout = {kind: slot.layout[kind] for kind in kinds}
        await self._get(peer.seal_copy.remote(self.rank, serial, layout, slot.rest))

    def open_copy(self, *arguments: Any) -> None:
        self.states.open_copy(*arguments)

    def take_block(self, *arguments: Any) -> None:
        self.states.take_block(*arguments)

    def seal_copy(self, *arguments: Any) -> None:
        self.states.seal_copy(*arguments)

    def keep_copies(self, *arguments: Any) -> None:
        self.states.keep_copies(*arguments)

    def describe(self, *arguments: Any) -> Any:
        return self.states.describe(*arguments)

    def block(self, *arguments: Any) -> Any:
        return self.states.block(*arguments).copy()

    def snapshots(self) -> Any:
        return self.states.serials

    def abort(self) -> None:
        """actor/parallel.py: gloo's sockets are shut, which their other ends see; of NCCL, this rank's waits end."""
        meeting = self.policy and self.policy.meeting
        if meeting:
            meeting.left.add(self.rank)
            self._broken(meeting, None if meeting.aborts else self.rank)

    async def leave(self) -> None:
        if self.policy is not None:
            await self._settled(self.policy.save, self.policy.snapshot)
        self.policy = self.snapshot = None
        await self._spend(self.cluster.delay(0.2))

    async def load_code(self) -> None:
        await self._spend(self.cluster.delay(1.0))

    async def adopt(self, serial: int, sources: Any) -> None:
        """`SnapshotStore.adopt`, whose thread waits where this awaits."""
        slot = self.states.own.open(None)
        slot.layout, slot.rest = {}, {}
        for source in sources:
            worker = Handle(source.worker.process, self)
            found = await self._get(worker.describe.remote(source.owner, serial))
            slot.rest = found.rest if source.rest else slot.rest
            for kind in source.kinds:
                slot.layout[kind] = found.layout[kind]
                for number in range(found.blocks[kind]):
                    block = await self._get(worker.block.remote(source.owner, serial, kind, number))
                    slot.blocks.setdefault(kind, [])[number : number + 1] = [torch.from_numpy(block.copy())]
        slot.layout = {kind: slot.layout[kind] for kind in KINDS_OF_SNAPSHOT}
        slot.serial = serial

    async def restore(self, serial: int) -> None:
        policy = self.policy
        await self._settled(policy.save, policy.snapshot)
        slot = self.states.whole(serial)
        assert slot.rest["rank"] == self.rank, "the snapshot of another rank"
        for kind in KINDS_OF_SNAPSHOT:
            setattr(policy, kind, int(slot.blocks[kind][0].numpy().view(np.int64)[0]))
        policy.step = slot.rest["step"]
        self.cluster.restored.append(policy.step)


async def _ended(future: asyncio.Future) -> None:
    """asyncio.wait for one future, at less cost: the same callbacks run."""
    over = future.get_loop().create_future()
    note = partial(_set, over)
    future.add_done_callback(note)
    try:
        await over
    finally:
        future.remove_done_callback(note)


def _set(over: asyncio.Future, future: asyncio.Future) -> None:
    if not over.done():
        over.set_result(None)


def _resolve(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if error is not None:
        _fail(future, error)
    elif not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # an answer that nobody wants is no fault


def _task_error(error: BaseException) -> BaseException:
    """What Ray makes of an error in an actor."""
    if not isinstance(error, Exception):
        return error
    return RayTaskError("call", "", error, proctitle="", pid=1, ip="127.0.0.1")
