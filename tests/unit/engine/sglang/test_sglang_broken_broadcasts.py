"""A broadcast by NCCL that breaks, to servers as SGLang 0.5.23 has them: each says 200 before the data is there, since
only the stream of its GPU waits for it, and one whose stream waits for ever says 200 to everything that leaves the GPU
alone, and takes part in nothing until it is started again. The wire is a fake; the sender, the update and the
supervision are the real ones. What they imitate is read in the pinned SGLang below."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from aiohttp import web
from sglang_pool import collect, group, required_environment
from sglang_stub_fleets import StubHandle, Weights, rig, run
from stub_server import reset

from megatron_daro.engine.sglang import receiving, supervision
from megatron_daro.engine.sglang.client import connect_to_servers
from megatron_daro.sync import broadcast
from megatron_daro.sync.broadcast import BroadcastSender

UPDATE_CALL = "/update_weights_from_distributed"
BUCKETS = 4


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(supervision, "_DEATH_S", 0.1)
    monkeypatch.setattr(receiving, "_FREE_S", 0.5)
    monkeypatch.setattr(broadcast, "_AFTER_FAILURE_S", 5.0)


class Wire:
    """What connects the sender's group with the servers': data arrives where everybody takes part.

    last: what arrives before one of them dies; then all others that are in the group wait for ever, but for `spared`,
    and `broken` is set. open: groups of the sender.
    """

    def __init__(self):
        self.stubs, self.broken, self.spared, self.open = [], threading.Event(), (), set()
        self.last = None

    def join(self, name, world_size, store, **options):
        self.open.add(name)
        return Ends(self, name)


class Ends:
    """The sender's end of a group of NCCL, as SendGroup is."""

    def __init__(self, wire, name):
        self._wire, self._name, self._aborted = wire, name, threading.Event()

    def broadcast(self, data, timeout_s):
        in_it = [stub for stub in self._wire.stubs if self._name in stub.groups]
        if self._wire.last == 0:
            for stub in in_it:
                if stub not in self._wire.spared:
                    stub.blocked.set()
            self._wire.last = None
            self._wire.broken.set()
        if any(stub.blocked.is_set() for stub in in_it):
            what = "aborted" if self._aborted.wait(timeout_s) else "timed out"
            raise RuntimeError(f"NCCL communicator was {what}")
        if self._wire.last:
            self._wire.last -= 1

    def break_off(self):
        self._aborted.set()

    def close(self, *, broken=False):
        self._wire.open.discard(self._name)


class Broadcasting(Weights):
    """The policy's end with the real sender."""

    def __init__(self, version=1):
        super().__init__(version)
        self.sender = BroadcastSender("127.0.0.1", "nccl", connect_to_servers)

    async def export(self, plan):
        self.plans.append(plan)
        stream = [(f"t{i}", torch.full((plan.bucket_bytes // 4,), float(i))) for i in range(BUCKETS)]
        return await asyncio.to_thread(self.sender.send, stream, plan)


class Restarting(StubHandle):
    """Its stub forgets what its process had."""

    stub = None

    async def launch(self):
        if self.launches:
            self.stub.start_again()
            self.stub.answers.clear()
        return await super().launch()


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()
    monkeypatch.setattr(broadcast.SendGroup, "join", wire.join)
    monkeypatch.setattr(broadcast, "SendStream", broadcast.NoStream)  # there is no GPU
    return wire


def broadcasting(tmp_path, wire, **options):
    """Three servers that a broadcast goes to, whose processes are ours."""
    given = {"count": 3, "handles": Restarting, "max_restarts": 5, "bucket_mib": 1, "sync_timeout_s": 50.0}
    return rig(tmp_path, **given | options)


def connected(fleet, wire):
    """Gives the wire and the handles their servers."""
    wire.stubs = fleet.stubs
    for handle, stub in zip(fleet.handles, fleet.stubs, strict=True):
        handle.stub = stub


def dies_after(fleet, wire, number, buckets, part_of=None):
    """The process of this server ends when so many buckets have arrived, and with it a part of server `part_of`, whose
    first part goes on to answer."""
    handles = fleet.handles
    stub, handle = fleet.stubs[number], handles[number]

    async def answer(request, body):
        if stub.calls[UPDATE_CALL] <= buckets:
            return web.json_response({"success": True})
        while not wire.broken.is_set():
            await asyncio.sleep(0.01)
        handle.dead = "its process ended with signal 9"
        if part_of is not None:
            handles[part_of].dead = "its process ended with signal 7"
        stub.answers |= dict.fromkeys((UPDATE_CALL, "/model_info", "/get_model_info", "/weights_checker"), reset)
        return await reset(request, body)

    stub.calls.clear()
    stub.answers[UPDATE_CALL], wire.last = answer, buckets


def test_servers_that_wait_for_ever_are_started_again_and_the_run_goes_on_with_the_others(tmp_path, wire):
    async def scenario():
        async with broadcasting(tmp_path, wire) as fleet:
            connected(fleet, wire)
            weights = Broadcasting()
            await fleet.publish(weights, 1)
            wire.spared = (fleet.stubs[2],)  # it had all that the dead one was to hand on
            dies_after(fleet, wire, 0, buckets=1)
            started = time.monotonic()
            metrics = await fleet.publish(weights, 2)
            assert time.monotonic() - started < 40, "the limit of a broadcast is not waited for"
            assert metrics["sync/servers"] == 1 and fleet.servers[2].version == 2
            assert [len(plan.targets) for plan in weights.plans[:3]] == [3, 3, 1]
            await fleet.until(lambda: fleet.states == ["serving"] * 3)
            assert {server.version for server in fleet.servers} == {2}
            assert len(await collect(fleet.engine, [group(0), group(1), group(2)])) == 12

    run(scenario())


def test_a_server_that_waits_because_a_part_of_it_died_is_given_up_for_that_death(tmp_path, wire):
    async def scenario():
        async with broadcasting(tmp_path, wire) as fleet:
            connected(fleet, wire)
            weights = Broadcasting()
            await fleet.publish(weights, 1)
            wire.spared = (fleet.stubs[2],)
            dies_after(fleet, wire, 0, buckets=1, part_of=1)
            await fleet.publish(weights, 2)
            assert any("signal 7" in text for text in fleet.warnings)

    run(scenario())


def test_where_all_survivors_wait_for_ever_the_run_waits_for_the_first_that_is_back(tmp_path, wire):
    async def scenario():
        async with broadcasting(tmp_path, wire) as fleet:
            connected(fleet, wire)
            weights = Broadcasting()
            await fleet.publish(weights, 1)
            dies_after(fleet, wire, 1, buckets=1)
            metrics = await fleet.publish(weights, 2)
            assert metrics["sync/servers"] >= 1 and fleet.engine.metrics()["engine/restarts"] == 3
            await fleet.until(lambda: fleet.states == ["serving"] * 3)
            assert {server.version for server in fleet.servers} == {2}

    run(scenario())


def test_a_server_keeps_one_group_of_each_sender_however_often_others_come_back(tmp_path, wire):
    async def scenario():
        async with broadcasting(tmp_path, wire) as fleet:
            connected(fleet, wire)
            weights = Broadcasting()
            await fleet.publish(weights, 1)
            handle = fleet.handles[1]
            for version in (2, 3, 4):
                restarts = fleet.servers[1].restarts
                handle.dead = "gone"
                await fleet.until(lambda before=restarts: fleet.servers[1].restarts > before)
                await fleet.until(lambda: fleet.states == ["serving"] * 3)
                await fleet.publish(weights, version)
                assert [len(stub.groups) for stub in fleet.stubs] == [1, 1, 1] and len(wire.open) == 1

    run(scenario())


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        (
            "model_executor/model_runner_components/weight_updater.py",
            # No wait by the host after the broadcast of a bucket, and groups that are kept until they are ended.
            [
                "        torch.distributed.broadcast(\n            flattened_tensor,\n            src=0,\n"
                "            group=self._model_update_group[group_name],\n        )\n"
                "        return bucket.reconstruct_tensors()\n",
                "self._model_update_group[group_name] = init_custom_process_group(",
                "pg = self._model_update_group.pop(group_name)",
                "The group to be destroyed does not exist.",
            ],
        ),
        (
            "utils/weight_checker.py",
            # A checksum waits for the device also where every tensor is skipped.
            [
                "any(pat in name for pat in (skip_tensor_list or ()))",
                ") -> Dict:\n        current_platform.synchronize()\n        start = time.perf_counter()\n",
            ],
        ),
        (
            "managers/scheduler_components/weight_updater.py",
            ["all_payloads, payload, group=self.tp_cpu_group"],  # from every rank of a server
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sglang_is_as_the_fakes_are(file, lines):
    (source,) = required_environment().glob("lib/python3*/site-packages/sglang/srt")
    text = (source / file).read_text()
    assert all(line in text for line in lines), [line for line in lines if line not in text]
