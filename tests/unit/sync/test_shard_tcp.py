"""Shards over TCP: both real ends on loopback, in threads. With SGLang around the receiving one: tests/sglang."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shard_cases import CASES, carried_out, checkpoint, server_shapes, shards

from megatron_daro.errors import EngineError, RefusedError, SyncError
from megatron_daro.sync import shard_tcp
from megatron_daro.sync.in_server import FOLDER, LOADER, megatron_daro_shards
from megatron_daro.sync.in_server.megatron_daro_shards import checksum_of, read_frame, receive, send_frame
from megatron_daro.sync.plan import SendPlan, SendReport, Target
from megatron_daro.sync.shard_tcp import ShardSender

SECONDS = 20.0


class Module(torch.nn.Module):
    """A rank of a server: parameters by SGLang's names, which have dots."""

    def __init__(self, shapes):
        super().__init__()
        self.held = {name: torch.nn.Parameter(torch.full(shape, float("nan"))) for name, shape in shapes.items()}

    def named_parameters(self):
        return iter(self.held.items())


class Fleet:
    """Servers whose ranks are threads; `meddle(server, rank, request)` may change a request or take its place."""

    def __init__(self, case, meddle=lambda server, rank, request: request):
        self.case, self.meddle = case, meddle
        ranks = case.server_layout.tensor
        self.modules = {(s, r): Module(server_shapes(case, r)) for s in range(case.servers) for r in range(ranks)}
        self.targets = tuple(Target(f"server {s}", f"http://{s}", 1, ranks) for s in range(case.servers))
        self.refusing = {}

    @asynccontextmanager
    async def calls(self):
        async def post(url, path, body, timeout_s):
            server = int(url.removeprefix("http://"))
            if server in self.refusing:
                raise self.refusing[server]
            assert (path, body["load_format"], body["flush_cache"]) == ("/update_weights_from_tensor", LOADER, False)
            await asyncio.gather(
                *(
                    asyncio.to_thread(self.load, server, rank, payload)
                    for rank, payload in enumerate(body["serialized_named_tensors"])
                )
            )
            return {"success": True}  # whatever the loader did

        yield post

    def load(self, server, rank, payload):
        (name, tensor), *_ = pickle.loads(base64.b64decode(payload))
        request = self.meddle(server, rank, json.loads(name))
        if request is not None:
            receive(self.modules[server, rank], [(json.dumps(request), tensor)])


def synced(case, fleet, *, before_sending=lambda senders: None, offered=lambda writes: writes, timeout_s=SECONDS):
    """The reports of all ranks of the trainer. offered: changes what they offer."""
    parameter = shards(case, checkpoint(case))
    world, plan = case.trainer_layout.world_size, case.plan(4)
    senders = [ShardSender("127.0.0.1", fleet.calls) for _ in range(world)]
    wanted = tuple(n // 4 for n in plan.balance().received)
    writes = offered([list(plan.writes(rank)) for rank in range(world)])
    offers = [sender.offer(own, wanted) for sender, own in zip(senders, writes, strict=True)]
    send_plan = SendPlan(transport="shards", targets=fleet.targets, bucket_bytes=2**20, timeout_s=timeout_s)
    shard_tcp.check_offers(offers, case.servers)
    before_sending(senders)

    def send(rank):
        held = {write.source: parameter(rank, write.source) for write in writes[rank]}
        return senders[rank].send(held, send_plan, offers if rank == 0 else ())

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(send, range(world)))


def failures(reports):
    joined = SendReport.beside(reports[0], reports[0])
    for report in reports[1:]:
        joined = joined.beside(report)
    assert joined.apart
    return joined.failures


def has_everything(case, fleet, server):
    expected = carried_out(case, checkpoint(case))
    for rank in range(case.server_layout.tensor):
        for name, parameter in fleet.modules[server, rank].held.items():
            if not torch.equal(parameter.nan_to_num(-1), expected[server, rank][name].nan_to_num(-1)):
                return False
    return True


def case_of(name):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_of_every_server_has_what_the_plan_says(case, monkeypatch):
    monkeypatch.setattr(shard_tcp, "_PIECE_BYTES", 2048)  # tensors of this size are cut in pieces, too
    fleet = Fleet(case)
    reports = synced(case, fleet)
    assert failures(reports) == {}
    assert all(has_everything(case, fleet, server) for server in range(case.servers))
    written = [~v.isnan() for held in carried_out(case, checkpoint(case)).values() for v in held.values()]
    assert sum(report.num_bytes for report in reports) == 4 * sum(int(entries.sum()) for entries in written)


CASE = replace(case_of("wider_server"), servers=3)


def fails_alone(fleet, reports, kind, text, server=1):
    found = failures(reports)
    assert list(found) == [f"server {server}"]
    assert found[f"server {server}"].kind == kind
    assert text in found[f"server {server}"].text
    assert all(has_everything(fleet.case, fleet, other) for other in {0, 1, 2} - {server})


@pytest.mark.parametrize(
    ("error", "kind"), [(RefusedError("no session is open"), "refused"), (EngineError("reset"), "unanswered")]
)
def test_a_server_that_fails_its_call_fails_alone_and_at_once(error, kind):
    fleet = Fleet(CASE)
    fleet.refusing[1] = error
    started = time.monotonic()
    fails_alone(fleet, synced(CASE, fleet), kind, str(error))
    assert time.monotonic() - started < SECONDS / 2


def test_a_rank_that_never_connects_fails_its_server_as_soon_as_its_call_is_answered():
    fleet = Fleet(CASE, lambda server, rank, request: None if (server, rank) == (1, 3) else request)
    started = time.monotonic()
    fails_alone(fleet, synced(CASE, fleet), "unanswered", "rank 3: it did not connect")
    assert time.monotonic() - started < SECONDS / 2


def test_a_receiver_without_the_parameter_is_told_apart(monkeypatch):
    fleet = Fleet(CASE)
    held = fleet.modules[1, 2].held
    held["model.norm.weight"] = torch.nn.Parameter(torch.zeros(3))
    fails_alone(
        fleet, synced(CASE, fleet), "refused", "model.norm.weight, planned as (40,) and sent in float32, is (3,) here"
    )


def test_a_receiver_that_gets_less_than_was_offered_says_so():
    def more(server, rank, request):
        return {**request, "entries": request["entries"] + (1 if (server, rank) == (1, 0) else 0)}

    fleet = Fleet(CASE, more)
    fails_alone(fleet, synced(CASE, fleet), "refused", "entries in all")


def test_ranks_with_different_plans_send_nothing():
    def forgets(writes):
        return [writes[0][1:], *writes[1:]]

    fleet = Fleet(CASE)
    with pytest.raises(SyncError, match="they took different layouts"):
        synced(CASE, fleet, offered=forgets)
    assert all(values.isnan().all() for module in fleet.modules.values() for values in module.held.values())


def test_one_wrong_bit_on_the_way_is_noticed(monkeypatch):
    fleet = Fleet(CASE)
    read, spoiled = megatron_daro_shards.read_exactly, threading.Event()

    def reading(connection, into):
        read(connection, into)
        if not isinstance(into.obj, bytearray) and not spoiled.is_set():  # bytes of a tensor
            spoiled.set()
            into[7] ^= 1

    monkeypatch.setattr(megatron_daro_shards, "read_exactly", reading)
    found = failures(synced(CASE, fleet))
    assert len(found) == 1
    assert "not those that were sent (checksum" in next(iter(found.values())).text


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_changed_bit_changes_the_checksum(data, draw):
    place, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    other = bytearray(data)
    other[place] ^= 1 << bit
    first, second = checksum_of(memoryview(data), 5), checksum_of(memoryview(other), 5)
    assert first != second
    assert checksum_of(memoryview(data), first) != checksum_of(memoryview(data), second), "nor is it lost later"


def test_a_receiver_that_dies_in_the_middle_fails_alone():
    def dies(server, rank, request):
        if (server, rank) != (1, 1):
            return request
        for host, port, key in request["senders"]:
            with socket.create_connection((host, port)) as connection:
                send_frame(connection, {"key": key, "server": server, "rank": rank})
                read_frame(connection)
                send_frame(connection, {})
        return None

    fleet = Fleet(CASE, dies)
    fails_alone(fleet, synced(CASE, fleet), "unanswered", "rank 1: the connection was lost")


def test_a_receiver_that_stops_reading_costs_the_time_limit_and_fails_alone():
    held_open = []

    def freezes(server, rank, request):
        if (server, rank) != (1, 1):
            return request
        for host, port, key in request["senders"]:
            connection = socket.create_connection((host, port))
            held_open.append(connection)
            send_frame(connection, {"key": key, "server": server, "rank": rank})
        return None

    fleet = Fleet(CASE, freezes)
    fails_alone(fleet, synced(CASE, fleet, timeout_s=2.0), "unanswered", "timed out")
    for connection in held_open:
        connection.close()


def test_a_sender_that_is_stopped_spoils_those_that_it_serves_and_ends_at_once():
    case, started, stopped = CASE, time.monotonic(), threading.Lock()

    def stops(server, rank, request):
        with stopped:  # whoever comes first; the others find it so
            senders[0].close()
        return request

    senders = []
    fleet = Fleet(case, stops)
    found = failures(synced(case, fleet, before_sending=senders.extend))
    assert found
    assert all(has_everything(case, fleet, server) for server in range(3) if f"server {server}" not in found)
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize(
    "hello", [{"key": "0" * 32, "server": 0, "rank": 0}, {"server": 0, "rank": 0}, {"key": "0" * 32, "lost": "x"}]
)
def test_weights_are_given_to_nobody_without_the_key(hello):
    fleet = Fleet(CASE)
    answers = []

    def asks(senders):
        offer = senders[0]._serving.offer

        def ask():
            with socket.create_connection((offer.host, offer.port)) as connection:
                send_frame(connection, hello)
                answers.append(read_frame(connection))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()

    assert failures(synced(CASE, fleet, before_sending=asks)) == {}
    assert answers == [{"error": "the key is not that of this update"}]


def test_what_is_no_frame_harms_nobody():
    fleet = Fleet(CASE)

    def rubbish(senders):
        offer = senders[0]._serving.offer
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]"):
            with socket.create_connection((offer.host, offer.port)) as connection:
                connection.sendall(data)

    assert failures(synced(CASE, fleet, before_sending=rubbish)) == {}


def test_a_fault_of_the_sender_itself_is_raised():
    parameter = shards(CASE, checkpoint(CASE))
    plan = CASE.plan(4)
    fleet = Fleet(replace(CASE, servers=3))
    sender = ShardSender("127.0.0.1", fleet.calls)
    offer = sender.offer(plan.writes(0), ())
    held = {w.source: parameter(0, w.source).to(torch.float64) for w in plan.writes(0)}
    send_plan = SendPlan(transport="shards", targets=fleet.targets, bucket_bytes=1, timeout_s=SECONDS)
    report = sender.send(held, send_plan, [offer])
    assert {failure.kind for failure in report.failures.values()} == {"refused"}  # float64 cannot be received
    sender.offer(plan.writes(0), ())
    with pytest.raises(KeyError):
        sender.send({}, send_plan, [sender._serving.offer])


def test_the_loader_raises_nothing_since_the_server_would_end():
    receive(Module({}), [("no JSON", torch.zeros(1))])
    receive(Module({}), [])
    receive(Module({}), [(json.dumps({"senders": [["127.0.0.1", 1, ""]], "server": 0}), torch.zeros(1))])


def test_the_loader_needs_nothing_of_this_package():
    text = (FOLDER / f"{LOADER.partition('.')[0]}.py").read_text()
    imported = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imported
    assert not [line for line in imported if "megatron_daro" in line]
