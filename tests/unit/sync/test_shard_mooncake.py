"""Shards carried by Mooncake's transfer engine, over its TCP: what differs from test_shard_tcp.py. Its protocol writes
to addresses that it is told, and it listens on every address of its machine: so each test has a network of its own."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_network import in_own_network
from shard_fleets import CASE, Fleet, asked, case_of, fails_alone, failures, has_everything, synced

from megatron_daro.errors import SyncError
from megatron_daro.sync import shard_tcp
from megatron_daro.sync.in_server import megatron_daro_shards as loader
from megatron_daro.sync.in_server.megatron_daro_shards import (
    checksum_of,
    checksum_of_words,
    packed,
    send_frame,
)

try:
    import mooncake.engine  # noqa: F401
except ImportError as error:  # of the package, or of a library that it needs
    MISSING = f"Mooncake's transfer engine is not to be had ({error}); pip install mooncake-transfer-engine-non-cuda"
else:
    MISSING = ""

OVER = "mooncake_tcp"


def apart(scenario, *arguments):
    """Run a function of this module in a network of its own."""
    if MISSING:
        pytest.skip(MISSING)
    in_own_network(__name__, scenario, *arguments)


def all_there(name, slot_bytes):
    loader._SLOT_BYTES, shard_tcp._PIECE_BYTES = slot_bytes, 2048
    case = case_of(name)
    fleet = Fleet(case)
    assert failures(synced(case, fleet, over=OVER)) == {}
    assert all(has_everything(case, fleet, server) for server in range(case.servers))
    (engine,) = loader._engines.values()
    kept = len(engine._kept)
    assert kept == sum(map(len, engine._free.values())), "all was given back"
    again = Fleet(case)
    assert failures(synced(case, again, over=OVER)) == {}
    assert all(has_everything(case, again, server) for server in range(case.servers))
    assert list(loader._engines.values()) == [engine]
    most = case.trainer_layout.world_size * case.servers * case.server_layout.tensor * 2
    assert len(engine._kept) <= min(most, 8 * (case.trainer_layout.world_size + case.servers * 8))


@pytest.mark.parametrize("slot_bytes", [2048, 2**24])
@pytest.mark.parametrize("name", ["wider_server", "etp"])
def test_every_rank_of_every_server_has_what_the_plan_says(name, slot_bytes):
    apart("all_there", name, slot_bytes)


def one_wrong_bit():
    loader._SLOT_BYTES = 4096
    write, spoiled = loader.Engine.write, threading.Event()

    def writing(self, session, source, address):
        if not spoiled.is_set():
            spoiled.set()
            source[7] ^= 1
        write(self, session, source, address)

    loader.Engine.write = writing
    fleet = Fleet(CASE)
    found = failures(synced(CASE, fleet, over=OVER))
    assert len(found) == 1
    assert "not those that were sent (checksum" in next(iter(found.values())).text


def test_one_wrong_bit_on_the_way_is_noticed():
    apart("one_wrong_bit")


def dies(granted):
    """A receiver that ends when it was given its pieces, or when its memory was granted."""
    loader._SLOT_BYTES = 4096

    def dying(server, rank, request):
        if (server, rank) != (1, 1):
            return request
        for sender in request["senders"]:
            with asked(sender, server, rank) as connection:
                if granted:  # nobody is there any more
                    send_frame(connection, {"session": "127.0.0.1:1", "slots": [4096, 8192]})
        return None

    fleet = Fleet(CASE, dying)
    fails_alone(fleet, synced(CASE, fleet, over=OVER), "unanswered", "rank 1: the connection was lost")


@pytest.mark.parametrize("granted", [False, True])
def test_a_receiver_that_dies_in_the_middle_fails_alone(granted):
    apart("dies", granted)


def gives_up():
    """A receiver that fails after its first bundles says why, and the sender stops."""
    loader._SLOT_BYTES, shard_tcp._PIECE_BYTES = 2048, 1024
    fleet = Fleet(CASE)
    spoiled = fleet.modules[1, 2]
    place, placed = loader._Receipt._place, threading.Semaphore(5)

    def placing(self, piece, data):
        if any(v is self._parameters[piece[0]] for v in spoiled.held.values()) and not placed.acquire(blocking=False):
            raise MemoryError("no room")
        place(self, piece, data)

    loader._Receipt._place = placing
    fails_alone(fleet, synced(CASE, fleet, over=OVER), "group", "MemoryError: no room")


def test_what_a_receiver_says_in_the_middle_is_its_reason():
    apart("gives_up")


def lacking(host, protocol):
    raise ImportError("No module named 'mooncake'")


def test_servers_without_mooncake_say_so(monkeypatch):
    monkeypatch.setattr(loader, "engine_of", lacking)
    found = failures(synced(CASE, Fleet(CASE), over=OVER))
    assert set(found) == {"server 0", "server 1", "server 2"}
    assert all("ImportError: No module named 'mooncake'" in failure.text for failure in found.values())


def test_a_trainer_without_mooncake_blames_no_server(monkeypatch):
    class Granting:
        session = "127.0.0.1:1"

        def take(self, num_bytes, device):
            return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(shard_tcp, "engine_of", lacking)
    monkeypatch.setattr(loader, "engine_of", lambda host, protocol: Granting())
    with pytest.raises(SyncError, match="No module named 'mooncake'; fix: `pip install mooncake-transfer-engine`"):
        synced(CASE, Fleet(CASE), over=OVER)


PIECES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 700), st.sampled_from(["float32", "bfloat16"])), min_size=1
)


@given(PIECES, st.sampled_from([8, 512, 4096]))
def test_bundles_hold_every_piece_once_apart_and_aligned(sizes, slot):
    pieces = [["p", [rows, columns], [0, 0], [rows, columns], dtype] for rows, columns, dtype in sizes]
    before, loader._SLOT_BYTES = loader._SLOT_BYTES, slot
    try:
        slot_bytes, bundles = packed(pieces)
    finally:
        loader._SLOT_BYTES = before
    assert [index for bundle in bundles for index, _ in bundle] == list(range(len(pieces)))
    for bundle in bundles:
        end = 0
        for index, at in bundle:
            assert at % 8 == 0 and at >= end
            end = at + loader._bytes_of(pieces[index])
        assert end <= loader.bundle_bytes(pieces, bundle) <= slot_bytes


@given(st.binary(max_size=99), st.integers(0, 2**64 - 1))
def test_a_device_sums_as_numpy_does(data, before):
    data += b"\xff" * (-len(data) % 8)
    tensor = torch.frombuffer(bytearray(data or b"\x00" * 8), dtype=torch.uint8)
    assert checksum_of_words(tensor, before) == checksum_of(memoryview(data or b"\x00" * 8), before)


class TransferEngine:
    """Mooncake's, as far as it is called: each call returns 0 (transfer_engine_py.cpp) or what `results` has for it."""

    results: dict[str, int] = {}
    calls: list[tuple] = []

    def _called(self, name, *arguments):
        self.calls.append((name, *arguments))
        return self.results.get(name, 0)

    def initialize(self, *arguments):
        return self._called("initialize", *arguments)

    def register_memory(self, *arguments):
        return self._called("register_memory", *arguments)

    def transfer_sync_write(self, *arguments):
        return self._called("transfer_sync_write", *arguments)

    def get_rpc_port(self):
        return 1234


@pytest.fixture
def transfer_engine(monkeypatch):
    monkeypatch.setattr(TransferEngine, "results", {})
    monkeypatch.setattr(TransferEngine, "calls", [])
    module = ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(loader, "_engines", {})
    return TransferEngine


def test_memory_that_was_given_back_is_registered_once(transfer_engine):
    engine = loader.engine_of("10.0.0.1", "rdma")
    assert loader.engine_of("10.0.0.1", "rdma") is engine is not loader.engine_of("10.0.0.1", "tcp")
    assert transfer_engine.calls[0] == ("initialize", "10.0.0.1", "P2PHANDSHAKE", "rdma", "")
    assert engine.session == "10.0.0.1:1234" and loader.Engine("fd::1", "tcp").session == "[fd::1]:1234"
    first, cpu = engine.take(64, torch.device("cpu")), torch.device("cpu")
    assert first.dtype == torch.uint8 and first.tolist() == [0] * 64
    assert transfer_engine.calls[-1] == ("register_memory", first.data_ptr(), 64)
    second = engine.take(64, cpu)
    assert second.data_ptr() != first.data_ptr()
    engine.give_back(first)
    count = len(transfer_engine.calls)
    assert engine.take(32, cpu).nbytes == 32 and len(transfer_engine.calls) == count + 1
    assert engine.take(64, cpu) is first and len(transfer_engine.calls) == count + 1
    engine.write("10.0.0.2:5", first[:16], 4096)
    assert transfer_engine.calls[-1] == ("transfer_sync_write", "10.0.0.2:5", first.data_ptr(), 4096, 16)


def test_what_mooncake_refuses_is_named(transfer_engine):
    engine = loader.Engine("10.0.0.1", "rdma")
    transfer_engine.results.update(initialize=-1, register_memory=-1, transfer_sync_write=-1)
    with pytest.raises(OSError, match=r"does not start on 10\.0\.0\.1 with the protocol 'rdma'"):
        loader.Engine("10.0.0.1", "rdma")
    with pytest.raises(OSError, match="cannot register 64 bytes of cpu"):
        engine.take(64, torch.device("cpu"))
    with pytest.raises(OSError, match="could not write to there; its own log says more"):
        engine.write("there", torch.zeros(8, dtype=torch.uint8), 0)
