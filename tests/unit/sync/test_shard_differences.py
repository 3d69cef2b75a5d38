"""Differences in place of weights, from shards to shards over TCP: both real ends in threads, and what they are made
of. With SGLang around the receiving end: tests/sglang."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from heavy_cases import mostly_heavy
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_cases import CASES, checkpoint
from shard_fleets import CASE, SECONDS, Fleet, fails_alone, failures, has_everything, synced

from megatron_daro.errors import EngineError
from megatron_daro.sync import shard_differences, shard_tcp
from megatron_daro.sync.in_server import megatron_daro_shards
from megatron_daro.sync.in_server.megatron_daro_shards import (
    BITS,
    GAPS,
    SAME,
    WHOLE,
    header_of,
    places_of,
    sum_of,
    sum_of_tensor,
)
from megatron_daro.sync.plan import SendReport
from megatron_daro.sync.shard_differences import SentPieces, change
from megatron_daro.sync.shard_tcp import ShardSender

HEADER = len(header_of(SAME, 0, 0))


def changed(weights, share, seed=0):
    """Other weights: this share of the entries of each tensor, at least one of some, has another last bit."""
    generator, bits = torch.Generator().manual_seed(seed), {2: torch.int16, 4: torch.int32}
    return {
        name: (v.view(bits[v.element_size()]) ^ (torch.rand(v.shape, generator=generator) < share)).view(v.dtype)
        for name, v in weights.items()
    }


class Run:
    """Ranks of a trainer that sync a fleet again and again, always with differences."""

    def __init__(self, case, fleet=None, dtype=torch.float32):
        self.case, self.fleet = case, fleet or Fleet(case, dtype=dtype)
        self.senders = [ShardSender("127.0.0.1", self.fleet.calls) for _ in range(case.trainer_layout.world_size)]
        self.weights = {name: values.to(dtype) for name, values in checkpoint(case).items()}
        self._updates = itertools.count(1)

    def sync(self, weights=None, *, servers=None, timeout_s=SECONDS):
        """The reports. servers: those that take part, if not all."""
        self.weights = weights or self.weights
        targets = tuple(self.fleet.targets[server] for server in servers) if servers is not None else None
        update = f"update {next(self._updates)}"
        arguments = {"weights": self.weights, "senders": self.senders, "update": update, "targets": targets}
        return synced(self.case, self.fleet, timeout_s=timeout_s, **arguments)

    def sync_all(self, weights=None, *, servers=None):
        """(bytes that were sent, bytes of all weights): nothing failed, and whoever took part has everything."""
        reports = self.sync(weights, servers=servers)
        assert failures(reports) == {}
        for server in range(self.case.servers) if servers is None else servers:
            assert has_everything(self.case, self.fleet, server, self.weights)
        report = functools.reduce(SendReport.beside, reports)
        return report.num_bytes, report.whole_bytes

    def pieces(self):
        """How many pieces a sync of all has."""
        world, plan = self.case.trainer_layout.world_size, self.case.plan(4)
        size = next(iter(self.weights.values())).element_size()
        return sum(len(list(shard_tcp._pieces(w, size))) for rank in range(world) for w in plan.writes(rank))


DEAREST = {"etp", "fewer_groups_than_both", "virtual_stages"}
"""Two fifths of the seconds of all cases; whole weights go through them in test_shard_tcp.py."""


@pytest.mark.parametrize(
    "case", mostly_heavy(CASES, *(case for case in CASES if case.name not in DEAREST)), ids=lambda case: case.name
)
def test_three_updates_are_bit_for_bit_what_was_sent(case, monkeypatch):
    monkeypatch.setattr(shard_tcp, "_PIECE_BYTES", 2048)  # tensors of this size are cut in pieces, too
    run = Run(case)
    sent, whole = run.sync_all()
    assert sent == whole + HEADER * run.pieces()
    for seed, share in ((1, 0.02), (2, 0.2)):
        sent, whole = run.sync_all(changed(run.weights, share, seed))
        assert 0 < sent < (0.2 + share) * whole


def test_pieces_that_did_not_change_are_not_sent():
    run = Run(CASE)
    run.sync_all()
    sent, _ = run.sync_all(changed(run.weights, 0))
    assert sent == HEADER * run.pieces()


def test_where_everything_changed_everything_is_sent_at_the_cost_of_headers():
    run = Run(CASE)
    run.sync_all()
    sent, whole = run.sync_all(changed(run.weights, 2))
    assert sent == whole + HEADER * run.pieces()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_of_two_bytes_go_as_those_of_four(dtype):
    run = Run(CASE, dtype=dtype)
    run.sync_all()
    sent, whole = run.sync_all(changed(run.weights, 0.05))
    assert sent < 0.4 * whole


def test_a_server_with_another_dtype_always_gets_everything():
    run = Run(CASE, Fleet(CASE, dtype=torch.float32), dtype=torch.bfloat16)
    for seed in range(3):
        sent, whole = run.sync_all(changed(run.weights, 0.05, seed))
        assert sent == whole + HEADER * run.pieces()


def test_a_server_that_missed_an_update_gets_everything_and_the_others_what_changed():
    run = Run(CASE)
    run.sync_all()
    run.sync_all(changed(run.weights, 0.02, 1), servers=[0, 2])
    sent, whole = run.sync_all(changed(run.weights, 0.02, 2))
    assert whole / 3 < sent < whole / 2
    sent, whole = run.sync_all(changed(run.weights, 0.02, 3))
    assert sent < 0.2 * whole


@pytest.mark.parametrize(
    ("trainer", "least", "most"),
    [
        ({"tensor": 2}, 1 / 6, 0.3),  # one copy serves all, and is of a later update; what is frozen is not sent
        ({"tensor": 2, "data": 3}, 0.0, 0.1),  # ranks that serve that server alone have what it has
    ],
)
def test_a_server_that_was_left_out_is_sent_what_changed_where_its_bytes_are_known(trainer, least, most):
    run = Run(replace(CASE, trainer=trainer))
    frozen = {name: values for name, values in run.weights.items() if "mlp" in name}
    run.sync_all()
    run.fleet.refusing[1] = EngineError("busy")
    weights = {**changed(run.weights, 0.02, 1), **frozen}
    fails_alone(run.fleet, run.sync(weights), "unanswered", "busy", weights=weights)
    run.fleet.refusing.clear()
    sent, whole = run.sync_all({**changed(weights, 0.02, 2), **frozen})
    assert least * whole < sent < most * whole


def test_a_server_that_broke_off_in_the_middle_fails_alone_and_gets_everything_next(monkeypatch):
    run, put, calls = Run(CASE), megatron_daro_shards._Receipt._change, itertools.count(1)
    run.sync_all()

    def breaks(self, *arguments):
        victim = self._parameters["model.norm.weight"] is run.fleet.modules[1, 3].held["model.norm.weight"]
        if victim and next(calls) == 5:
            raise RuntimeError("out of memory")
        return put(self, *arguments)

    monkeypatch.setattr(megatron_daro_shards._Receipt, "_change", breaks)
    weights = changed(run.weights, 0.02, 1)
    fails_alone(run.fleet, run.sync(weights), "group", "rank 3: from 127.0.0.1", weights=weights)
    assert next(calls) > 5
    assert run.fleet.modules[1, 3].megatron_daro_update is None
    sent, whole = run.sync_all(changed(weights, 0.02, 2))
    assert whole / 24 < sent < whole / 4, "one of its eight ranks has nothing to build on"


def test_a_server_whose_loader_crashed_builds_on_nothing(monkeypatch):
    run = Run(CASE)
    run.sync_all()

    def crashes(self, connection):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(megatron_daro_shards._Receipt, "_tell", crashes)
        run.sync(changed(run.weights, 0.02), timeout_s=3.0)  # the other end waits for what is never told
    assert {module.megatron_daro_update for module in run.fleet.modules.values()} == {None}


def test_a_server_that_was_started_again_gets_everything():
    run = Run(CASE)
    run.sync_all()
    run.fleet.start(1)
    sent, whole = run.sync_all(changed(run.weights, 0.02))
    assert whole / 3 < sent < whole / 2


def test_a_server_that_comes_back_between_two_updates_costs_the_others_no_full_one():
    run = Run(CASE)
    run.sync_all()
    run.fleet.start(2)
    sent, whole = run.sync_all(servers=[2])
    assert sent > whole
    sent, whole = run.sync_all(changed(run.weights, 0.02))
    assert sent < whole / 2


@pytest.mark.parametrize("rank", [0, 7])
def test_one_bit_that_changed_in_a_server_meanwhile_is_noticed_and_everything_sent_next(rank):
    run = Run(CASE)
    run.sync_all()
    weight = run.fleet.modules[1, rank].held["model.layers.2.mlp.down_proj.weight"]
    with torch.no_grad():
        weight.view(torch.int32)[-1, -1] ^= 1
    weights = changed(run.weights, 0)
    text = "put beside changed in this server since its last update"
    fails_alone(run.fleet, run.sync(weights), "group", text, weights=weights)
    sent, whole = run.sync_all(changed(weights, 0.02))
    assert whole / 24 < sent < whole / 4


def test_weights_that_are_those_of_an_earlier_update_again_arrive():
    run = Run(CASE)
    first = run.weights
    run.sync_all()
    run.sync_all(changed(first, 0.02))
    sent, whole = run.sync_all(first)
    assert sent < 0.2 * whole


def test_as_many_servers_as_there_are_each_time_have_everything():
    run, kept = Run(CASE), []
    for seed, servers in enumerate([None, [0, 2], [1], None, [1, 2], None, None]):
        sent, whole = run.sync_all(changed(run.weights, 0.02, seed), servers=servers)
        kept.append(sum(sender._sent.num_bytes for sender in run.senders))
    assert sent < 0.2 * whole
    assert max(kept) <= whole, "some is kept twice"


def test_one_copy_serves_all_servers():
    run = Run(replace(CASE, trainer={"tensor": 2}))
    _, whole = run.sync_all()
    plan = run.case.plan(4)
    boxes = {(rank, write.source, write.source_box): write.entries for rank in range(2) for write in plan.writes(rank)}
    assert sum(sender._sent.num_bytes for sender in run.senders) == 4 * sum(boxes.values()) < whole / 3


def test_a_sender_that_was_closed_keeps_nothing_and_sends_everything():
    run = Run(CASE)
    run.sync_all()
    for sender in run.senders:
        sender.close()
    assert sum(sender._sent.num_bytes for sender in run.senders) == 0
    sent, whole = run.sync_all(changed(run.weights, 0.02))
    assert sent == whole + HEADER * run.pieces()


def test_without_the_option_nothing_is_kept():
    fleet = Fleet(CASE)
    senders = [ShardSender("127.0.0.1", fleet.calls) for _ in range(CASE.trainer_layout.world_size)]
    for _ in range(2):
        reports = synced(CASE, fleet, senders=senders)
        assert failures(reports) == {}
        assert sum(r.num_bytes for r in reports) == sum(r.whole_bytes for r in reports)
    assert sum(sender._sent.num_bytes for sender in senders) == 0


# What the copy knows -------------------------------------------------------------------------------------------------

BOX = (0,), (4,)


def taken(sent, content, held, box=BOX):
    """(kind, sum) of what one gets who has an update, in one of its own; content: uint8."""
    number = sent.begin(f"update {sent._last + 1}")
    data = np.array(content, np.uint8)
    found, total = sent.take(number, "w", box, 1, lambda: memoryview(data), held)
    sent.end()
    return found.kind, total


def test_a_difference_is_from_an_update_at_which_the_bytes_are_known():
    sent = SentPieces()
    assert taken(sent, [1, 2, 3, 4], None) == (WHOLE, 10)
    assert taken(sent, [1, 2, 3, 4], "update 1") == (SAME, 10)
    assert taken(sent, [1, 2, 3, 9], "update 1") == (BITS, 15), "it was the same at both"
    assert taken(sent, [1, 2, 3, 8], "update 2") == (WHOLE, 14), "it was another one"
    assert taken(sent, [1, 2, 3, 8], "another run's") == (WHOLE, 14)
    assert taken(sent, [1, 2, 3, 8], "") == (WHOLE, 14)


def test_a_box_that_was_not_looked_at_may_have_been_another():
    sent = SentPieces()
    taken(sent, [1, 2, 3, 4], None)
    taken(sent, [1, 2, 3, 4], None, ((8,), (4,)))
    assert taken(sent, [1, 2, 3, 4], "update 2") == (WHOLE, 10), "the receiver has what others sent it then"
    taken(sent, [1, 2, 3, 4], None, ((8,), (4,)))
    assert taken(sent, [1, 2, 3, 4], "update 3") == (SAME, 10)
    assert taken(sent, [1, 2, 3, 4], "update 3") == (WHOLE, 10), "nobody knows what it was at the fourth"


def test_all_that_ask_in_one_update_get_the_same_and_it_is_read_once():
    sent, reads = SentPieces(), []
    taken(sent, [1, 2, 3, 4], None)

    def read():
        reads.append(None)
        return memoryview(np.array([1, 2, 3, 5], np.uint8))

    number = sent.begin("update 2")
    kinds = [sent.take(number, "w", BOX, 1, read, held)[0].kind for held in ("update 1", None, "update 1")]
    assert (kinds, len(reads)) == ([BITS, WHOLE, BITS], 1)
    sent.end()
    with pytest.raises(ConnectionError, match="the update has ended"):
        sent.take(number, "w", BOX, 1, read, "update 1")
    other = sent.begin("update 3")
    with pytest.raises(ConnectionError, match="the update has ended"):
        sent.take(number, "w", BOX, 1, read, "update 1")
    assert sent.take(other, "w", BOX, 1, read, "update 2")[0].kind == SAME


def test_boxes_that_others_have_taken_the_place_of_are_let_go():
    sent = SentPieces()
    taken(sent, [1, 2, 3, 4], None, ((0, 0), (4, 1)))
    taken(sent, [1, 2, 3, 4], None, ((4, 0), (4, 1)))
    taken(sent, [1, 2, 3, 4], None, ((0, 1), (4, 1)))
    assert sent.num_bytes == 12
    taken(sent, [3, 4], None, ((7, 0), (2, 1)))
    assert sent.num_bytes == 10
    assert set(sent._kept["w"]) == {((0, 0), (4, 1)), ((0, 1), (4, 1)), ((7, 0), (2, 1))}


def test_names_of_updates_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(shard_differences, "_MOST_UPDATES", 2)
    sent = SentPieces()
    for _ in range(2):
        taken(sent, [1, 2, 3, 4], None)
    assert taken(sent, [1, 2, 3, 4], "update 2") == (SAME, 10)
    assert taken(sent, [1, 2, 3, 4], "update 2") == (WHOLE, 10), "two later ones are known"


# A change ------------------------------------------------------------------------------------------------------------


def applied(old, found):
    """What a receiver makes of a change."""
    places = places_of(found.kind, np.frombuffer(found.places, np.uint8))
    new = old.copy()
    new[places] = np.frombuffer(found.values, old.dtype)
    return new


@settings(max_examples=300)
@given(st.data(), st.sampled_from([np.uint8, np.uint16, np.uint32]))
def test_every_change_arrives_in_fewer_bytes_than_all(draw, kind):
    size = draw.draw(st.integers(1, 2000))
    share = draw.draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.125, 0.2, 0.5, 0.9, 1.0]))
    random = np.random.default_rng(draw.draw(st.integers(0, 2**32)))
    old = random.integers(0, np.iinfo(kind).max, size, kind)
    new = old + (random.random(size) < share).astype(kind)
    held = old.copy()
    found = change(held, new)
    assert np.array_equal(held, new)
    if found.kind == WHOLE:
        assert (found.values, found.places) == (b"", b"")
    else:
        assert len(found.values) + len(found.places) < new.nbytes
        assert np.array_equal(applied(old, found), new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 5000])
def test_gaps_around_one_byte(gap):
    old = np.zeros(2 * gap + 40, np.uint16)
    new = old.copy()
    new[[gap, 2 * gap + 1]] = 7
    found = change(old.copy(), new)
    assert found.kind == GAPS
    assert len(found.places) == 2 * (1 + gap // 255)
    assert np.array_equal(applied(old, found), new)


@pytest.mark.parametrize(("changes", "kind", "places"), [(0, SAME, 0), (2, GAPS, 2), (3, BITS, 2), (14, BITS, 2)])
def test_the_shorter_way_to_tell_places_is_taken(changes, kind, places):
    old = np.zeros(16, np.uint16)
    new = (np.arange(16) < changes).astype(np.uint16)
    found = change(old, new)
    assert (found.kind, len(found.values), len(found.places)) == (kind, 2 * changes, places)


def test_what_would_be_no_shorter_goes_whole():
    assert change(np.zeros(16, np.uint16), (np.arange(16) < 15).astype(np.uint16)).kind == WHOLE
    assert change(np.zeros(16, np.uint16), (np.arange(16) < 14).astype(np.uint16)).kind == BITS
    assert change(np.zeros(8, np.uint8), (np.arange(8) < 7).astype(np.uint8)).kind == WHOLE, "as many bytes"
    assert change(np.zeros(1, np.uint16), np.ones(1, np.uint16)).kind == WHOLE


@given(st.binary(max_size=100), st.integers(0, 9))
def test_both_ends_sum_alike(data, start):
    tensor = torch.frombuffer(bytearray(bytes(start) + data + b"x"), dtype=torch.uint8)[start : start + len(data)]
    assert sum_of_tensor(tensor) % 2**64 == sum_of(memoryview(data)) % 2**64


# A receiver that is sent what cannot be ------------------------------------------------------------------------------


def test_a_change_that_does_not_fit_its_piece_is_refused():
    receipt = megatron_daro_shards._Receipt({"w": torch.zeros(4, 3)}, {})
    piece = ["w", [4, 3], [1, 0], [2, 3], "float32"]
    with pytest.raises(ValueError, match=r"w: 4 bytes at 1 places do not fit \(2, 3\)"):
        receipt._change(piece, torch.zeros(4, dtype=torch.uint8), np.array([6]))
    with pytest.raises(ValueError, match="w: 8 bytes at 1 places do not fit"):
        receipt._change(piece, torch.zeros(8, dtype=torch.uint8), np.array([5]))
    with pytest.raises(ValueError, match="a change of the kind 4; allowed: 0 to 3"):
        places_of(4, np.zeros(0, np.uint8))
    receipt._change(piece, torch.ones(1).view(torch.uint8), np.array([5]))
    assert receipt._parameters["w"].flatten().tolist() == [0.0] * 8 + [1.0] + [0.0] * 3


def test_a_change_longer_than_its_piece_is_refused_before_it_is_read(monkeypatch):
    run = Run(CASE)
    run.sync_all()
    monkeypatch.setattr(shard_differences, "header_of", lambda kind, values, places: header_of(kind, 2**31, 0))
    found = failures(run.sync(changed(run.weights, 0.02)))
    assert len(found) == 3
    assert all("bytes; allowed:" in failure.text for failure in found.values())


@pytest.mark.parametrize("name", ["contiguous", "columns"])
def test_a_change_reaches_boxes_of_any_shape(name):
    weight = torch.arange(20.0).view(4, 5)
    receipt = megatron_daro_shards._Receipt({"w": weight}, {})
    offset, shape = ([1, 0], [2, 5]) if name == "contiguous" else ([0, 1], [4, 3])
    piece = ["w", [4, 5], offset, shape, "float32"]
    box = weight[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]]
    expected = box.clone()
    expected.view(-1)[[2, 7]] = torch.tensor([-1.0, -2.0])
    data = torch.tensor([-1.0, -2.0]).view(torch.uint8)
    now = receipt._change(piece, data, np.array([2, 7]))
    assert torch.equal(box, expected)
    assert torch.equal(now.view(torch.float32).view(shape), expected)
    assert sum_of_tensor(now) % 2**64 == sum_of(memoryview(expected.view(-1).view(torch.uint8).numpy())) % 2**64
    box.fill_(0.0)
    rest = torch.arange(20.0).view(4, 5)
    rest[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]] = 0.0
    assert torch.equal(weight, rest), "nothing beside it changed"
