"""Shards carried by Mooncake's transfer engine, over its TCP: what differs from test_shard_sender.py. Its protocol
writes to addresses that it is told, and it listens on every address of its machine: so each test has a network of its
own."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_network import in_own_network
from shard_fleets import CASE, Fleet, asked, case_of, fails_alone, failures, has_everything, synced

from megatron_daro.errors import SyncError
from megatron_daro.sync import shard_sender
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


def slots_of(slot_bytes):
    """Memory that a receiver lends is of this size; pieces are smaller."""
    loader._SLOT_BYTES = slot_bytes
    shard_sender._PIECE_BYTES = 2048


def all_there(name, slot_bytes):
    slots_of(slot_bytes)
    case = case_of(name)
    fleet = Fleet(case)
    assert failures(synced(case, fleet, over=OVER)) == {}
    assert all(has_everything(case, fleet, server) for server in range(case.servers))
    again = Fleet(case)
    assert failures(synced(case, again, over=OVER)) == {}
    assert all(has_everything(case, again, server) for server in range(case.servers))


@pytest.mark.parametrize(("name", "slot_bytes"), [("wider_server", 2**24), ("etp", 2048)])
def test_every_rank_of_every_server_has_what_the_plan_says(name, slot_bytes):
    apart("all_there", name, slot_bytes)


def one_wrong_bit():
    slots_of(4096)
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
    assert "checksum" in next(iter(found.values())).text


def test_one_wrong_bit_on_the_way_is_noticed():
    apart("one_wrong_bit")


def dies(granted):
    """A receiver that ends when it was given its pieces, or when its memory was granted."""
    slots_of(4096)

    def dying(server, rank, request):
        if (server, rank) != (1, 1):
            return request
        for sender in request["senders"]:
            with asked(sender, server, rank) as connection:
                if granted:  # nobody is there any more
                    send_frame(connection, {"session": "127.0.0.1:1", "slots": [4096, 8192]})
        return None

    fleet = Fleet(CASE, dying)
    fails_alone(fleet, synced(CASE, fleet, over=OVER), "unanswered", "rank 1")


@pytest.mark.parametrize("granted", [False, True])
def test_a_receiver_that_dies_in_the_middle_fails_alone(granted):
    apart("dies", granted)


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

    monkeypatch.setattr(shard_sender, "engine_of", lacking)
    monkeypatch.setattr(loader, "engine_of", lambda host, protocol: Granting())
    with pytest.raises(SyncError, match="mooncake-transfer-engine"):
        synced(CASE, Fleet(CASE), over=OVER)


@given(st.binary(max_size=99), st.integers(0, 2**64 - 1))
def test_a_device_sums_as_numpy_does(data, before):
    data += b"\xff" * (-len(data) % 8)
    tensor = torch.frombuffer(bytearray(data or b"\x00" * 8), dtype=torch.uint8)
    assert checksum_of_words(tensor, before) == checksum_of(memoryview(data or b"\x00" * 8), before)


PIECES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 700), st.sampled_from(["float32", "bfloat16"])), min_size=1
)


@given(PIECES, st.sampled_from([8, 512, 4096]))
def test_bundles_hold_every_piece_once_apart_and_aligned(sizes, slot):
    pieces = [["p", [rows, columns], [0, 0], [rows, columns], dtype] for rows, columns, dtype in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "_SLOT_BYTES", slot)
        slot_bytes, bundles = packed(pieces)
    assert [index for bundle in bundles for index, _ in bundle] == list(range(len(pieces)))
    for bundle in bundles:
        end = 0
        for index, at in bundle:
            assert at % 8 == 0 and at >= end
            rows, columns, dtype = sizes[index]
            end = at + rows * columns * (4 if dtype == "float32" else 2)
        assert end <= loader.bundle_bytes(pieces, bundle) <= slot_bytes


def test_memory_that_mooncake_registers_is_in_no_expandable_segment(monkeypatch):
    """Elsewhere segments stay expandable, with all else that a person had set."""
    settings, seen = "max_split_size_mb:64,expandable_segments:True", []
    engine = SimpleNamespace(initialize=lambda *a: 0, get_rpc_port=lambda: 1, register_memory=lambda *a: 0)
    package, module = ModuleType("mooncake"), ModuleType("mooncake.engine")
    module.TransferEngine = lambda: engine
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    zeros = torch.zeros

    def allocating(*arguments, **options):
        seen.append(torch._C._accelerator_getAllocatorSettings())
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", allocating)
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(settings)
    try:
        loader.Engine("127.0.0.1", "rdma").take(64, torch.device("cpu"))
        after = torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings(f"{before},expandable_segments:False".lstrip(","))
    assert seen == [f"{settings},expandable_segments:False"] and after == settings
