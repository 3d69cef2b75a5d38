"""Shards over TCP: both real ends on loopback, in threads. With SGLang around the receiving one: tests/sglang."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shard_cases import carried_out, checkpoint, shards
from shard_fleets import CASE, SECONDS, Fleet, Module, asked, case_of, fails_alone, failures, has_everything, synced

from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.errors import EngineError, RefusedError, SyncError
from megatron_daro.sync import shard_sender
from megatron_daro.sync.in_server import FOLDER, megatron_daro_shards
from megatron_daro.sync.in_server.megatron_daro_shards import (
    checksum_of,
    read_frame,
    receive,
    send_frame,
)
from megatron_daro.sync.plan import SendPlan
from megatron_daro.sync.shard_sender import ShardSender

LOADER = TRANSPORTS["shards"].loader


@pytest.mark.parametrize("name", ["wider_server", "etp_tp", "etp_of_servers"])
def test_every_rank_of_every_server_has_what_the_plan_says(name, monkeypatch):
    case = case_of(name)
    monkeypatch.setattr(shard_sender, "_PIECE_BYTES", 2048)  # tensors of this size are cut in pieces, too
    fleet = Fleet(case)
    reports = synced(case, fleet)
    assert failures(reports) == {}
    assert all(has_everything(case, fleet, server) for server in range(case.servers))
    written = [~v.isnan() for held in carried_out(case, checkpoint(case)).values() for v in held.values()]
    assert sum(report.num_bytes for report in reports) == 4 * sum(int(entries.sum()) for entries in written)


@pytest.mark.parametrize(
    ("sent", "held"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_each_update_of_the_same_ranks_arrives_also_in_another_dtype(sent, held):
    fleet = Fleet(CASE, dtype=held)
    senders = [ShardSender("127.0.0.1", fleet.calls) for _ in range(CASE.trainer_layout.world_size)]
    for factor in (0.5, 2.0):
        weights = {name: (factor * values).to(sent) for name, values in checkpoint(CASE).items()}
        assert failures(synced(CASE, fleet, weights=weights, senders=senders)) == {}
        assert all(has_everything(CASE, fleet, server, weights) for server in range(CASE.servers))


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
    fails_alone(fleet, synced(CASE, fleet), "unanswered", "rank 3")
    assert time.monotonic() - started < SECONDS / 2


def test_a_receiver_with_another_parameter_is_named():
    fleet = Fleet(CASE)
    held = fleet.modules[1, 2].held
    held["model.norm.weight"] = torch.nn.Parameter(torch.zeros(3))
    fails_alone(fleet, synced(CASE, fleet), "refused", "model.norm.weight")


def test_a_receiver_that_gets_less_than_was_offered_says_so():
    def more(server, rank, request):
        return {**request, "entries": request["entries"] + (1 if (server, rank) == (1, 0) else 0)}

    fleet = Fleet(CASE, more)
    fails_alone(fleet, synced(CASE, fleet), "refused", "entries in all")


def test_ranks_with_different_plans_send_nothing():
    def forgets(writes):
        return [writes[0][1:], *writes[1:]]

    fleet = Fleet(CASE)
    with pytest.raises(SyncError, match="layout"):
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
    assert "checksum" in next(iter(found.values())).text


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
        for sender in request["senders"]:
            with asked(sender, server, rank) as connection:
                send_frame(connection, {})
        return None

    fleet = Fleet(CASE, dies)
    fails_alone(fleet, synced(CASE, fleet), "unanswered", "rank 1")


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
    found = failures(synced(case, fleet, before_sending=lambda given, offers: senders.extend(given)))
    assert found
    assert all(has_everything(case, fleet, server) for server in range(3) if f"server {server}" not in found)
    assert time.monotonic() - started < SECONDS / 2


@pytest.mark.parametrize(
    "hello", [{"key": "0" * 32, "server": 0, "rank": 0}, {"server": 0, "rank": 0}, {"key": "0" * 32, "lost": "x"}]
)
def test_weights_are_given_to_nobody_without_the_key(hello):
    fleet = Fleet(CASE)
    answers = []

    def asks(senders, offers):
        offer = offers[0]

        def ask():
            with socket.create_connection((offer.host, offer.port)) as connection:
                send_frame(connection, hello)
                answers.append(read_frame(connection))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()

    assert failures(synced(CASE, fleet, before_sending=asks)) == {}
    assert [list(answer) for answer in answers] == [["error"]]


def test_what_is_no_frame_harms_nobody():
    fleet = Fleet(CASE)

    def rubbish(senders, offers):
        offer = offers[0]
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]"):
            with socket.create_connection((offer.host, offer.port)) as connection:
                connection.sendall(data)

    assert failures(synced(CASE, fleet, before_sending=rubbish)) == {}


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "said",
    [frame('{"key": "schlüssel"}'.encode()), frame(b"[" * 9999), (2**20).to_bytes(4, "big")],
    ids=["key that is not ASCII", "deep frame", "long frame"],
)
def test_a_stranger_is_sent_away_at_once_and_harms_nobody(said):
    strangers = []

    def knocks(senders, offers):
        strangers.append(socket.create_connection((offers[0].host, offers[0].port), SECONDS / 2))
        strangers[0].sendall(said)

    assert failures(synced(CASE, Fleet(CASE), before_sending=knocks)) == {}
    with strangers[0] as stranger, contextlib.suppress(ConnectionResetError):
        while stranger.recv(1024):
            pass


def test_a_fault_of_the_sender_itself_is_raised():
    parameter = shards(CASE, checkpoint(CASE))
    plan = CASE.plan(4)
    fleet = Fleet(replace(CASE, servers=3))
    sender = ShardSender("127.0.0.1", fleet.calls)
    offer = sender.offer(plan.writes(0), ())
    held = {w.source: parameter(0, w.source).to(torch.float64) for w in plan.writes(0)}
    details = {"shards_over": "tcp"}
    send_plan = SendPlan(transport="shards", targets=fleet.targets, bucket_bytes=1, timeout_s=SECONDS, details=details)
    report = sender.send(held, send_plan, [offer])
    assert {failure.kind for failure in report.failures.values()} == {"refused"}  # float64 cannot be received
    offer = sender.offer(plan.writes(0), ())
    with pytest.raises(KeyError):
        sender.send({}, send_plan, [offer])


def test_the_loader_raises_nothing_since_the_server_would_end():
    receive(Module({}), [("no JSON", torch.zeros(1))])
    receive(Module({}), [])
    receive(Module({}), [(json.dumps({"senders": [["127.0.0.1", 1, ""]], "server": 0}), torch.zeros(1))])


def test_the_loader_needs_nothing_of_this_package():
    text = (FOLDER / f"{LOADER.partition('.')[0]}.py").read_text()
    imported = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imported
    assert not [line for line in imported if "megatron_daro" in line]


@pytest.mark.parametrize("receiver", [{"server": 7, "rank": 0}, {"server": 0, "rank": 99}, {}])
def test_a_receiver_that_nobody_expects_is_given_nothing(receiver):
    answers = []

    def asks(senders, offers):
        offer = offers[0]

        def ask():
            with socket.create_connection((offer.host, offer.port)) as connection:
                send_frame(connection, {"key": offer.key, **receiver})
                answers.append(connection.recv(1))

        threading.Thread(target=ask, daemon=True).start()

    assert failures(synced(CASE, Fleet(CASE), before_sending=asks)) == {}
    assert answers in ([b""], [])


def test_frames_are_objects_of_a_bounded_length():
    here, there = socket.socketpair()
    with here, there:
        send_frame(here, {"a": [1, 2]})
        assert read_frame(there) == {"a": [1, 2]}
        send_frame(here, {"a": 12})  # nine bytes
        assert read_frame(there, 9) == {"a": 12}
        here.sendall(b"\0\0\0\x0a")
        with pytest.raises(ValueError, match="10"):
            read_frame(there, 9)
        here.sendall(b"\0\0\0\x02[]")
        with pytest.raises(ValueError, match=r"\[\]"):
            read_frame(there)
        here.sendall(b"\0\0\0\x08{}")
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            read_frame(there)
