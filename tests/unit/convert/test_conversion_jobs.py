"""What the jobs of a conversion are made of: hashes, windows of rows, casts, records, and cards that are read again."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch
from hf_checkpoints import record, sha

from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.workshop.convert import conversion, jobs
from megatron_daro.workshop.convert.jobs import Card, FileRecord, Row, RowHash, Scratch, cast, windows


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1), (), (1, 0), (0, 2), (0, 1, 1)])
def test_a_hash_is_of_all_rows_in_order_whatever_came_first(order):
    values, asked = torch.arange(12, dtype=torch.int16).reshape(6, 2), []
    places = [(0, 1), (1, 3), (3, 4), (4, 6)]
    found = RowHash()
    for i in order:
        found.add(places[i][0], values[slice(*places[i])])

    def read(start, stop):
        asked.append((start, stop))
        return values[start:stop]

    assert found.digest([(0, 2), (2, 4), (4, 6)], read) == sha(values)
    whole = [(0, 2), (2, 4), (4, 6)]
    expected = {(0, 1, 2, 3): [], (0, 1): [(3, 4), (4, 6)], (): whole, (1, 0): whole, (0, 2): whole, (0, 1, 1): whole}
    assert asked == expected[order]


def test_a_hash_may_begin_behind_rows_that_were_taken():
    values = torch.arange(6, dtype=torch.int16).reshape(3, 2)
    taken = hashlib.sha256(values[:2].view(torch.uint8).numpy().tobytes())
    found = RowHash(2, taken)
    found.add(2, values[2:])
    assert found.digest([(0, 3)], lambda start, stop: values[start:stop]) == sha(values)


def test_memory_grows_to_the_largest_piece_only():
    scratch = Scratch(8)
    first = scratch.shaped((2, 2), torch.bfloat16)
    assert first.shape == (2, 2) and scratch.shaped((4,), torch.int16).data_ptr() == first.data_ptr()
    assert scratch.shaped((2, 3), torch.float32).shape == (2, 3) and len(scratch._bytes) == 24
    assert scratch.shaped((1,), torch.float32).numel() == 1 and len(scratch._bytes) == 24


@pytest.mark.parametrize(
    ("shape", "most", "found"),
    [((5, 2), 8, [(0, 2), (2, 4), (4, 5)]), ((5, 2), 7, [(i, i + 1) for i in range(5)]), ((2, 9), 1, [(0, 1), (1, 2)]),
     ((3,), 100, [(0, 3)]), ((2, 0), 8, [(0, 2)]), ((0, 2), 8, [])],
)  # fmt: skip
def test_rows_come_in_windows_of_a_size(shape, most, found):
    assert list(windows(shape, torch.bfloat16, most)) == found


def test_a_cast_makes_no_finite_number_infinite():
    half = torch.empty(2, dtype=torch.float16)
    for value in (65504.0, -65504.0, 65519.0):
        assert cast(torch.tensor([value, 1.0]), half, "w").isfinite().all()
    for value in (65520.0, -65520.0):
        with pytest.raises(
            ModelError, match=r"w holds 6.552e\+04, and the largest number of float16 is 6.55e\+04: the cast"
        ):
            cast(torch.tensor([value, float("inf")]), half, "w")
    assert cast(torch.tensor([float("inf"), float("nan")]), half, "w").isinf().tolist() == [True, False]
    wide = torch.empty(1)
    assert cast(torch.tensor([3e38], dtype=torch.bfloat16), wide, "w") is wide and float(wide) > 2.9e38


@pytest.mark.parametrize(
    ("hf", "change"),
    [
        ((record(digest="1"),), "same bytes"),
        ((record(digest="2"),), "padded"),
        ((record(digest="2"), record(digest="1")), "rows rearranged"),
        ((record(digest="1"), record(dtype="float32")), "cast"),
    ],
)
def test_what_a_conversion_changes_is_told_by_the_hashes(hf, change):
    assert jobs._change(record(), hf) == change


def test_a_card_has_a_line_for_each_kind_of_parameter():
    rows = [Row(record(f"layers[{i}]"), (record(),), "padded", "hashed") for i in range(3)]
    card = Card("/s", "daro", 7, (*rows, Row(record("out", (4,)), (), "cast", "hashed")), ("x",))
    assert card.summary() == [
        ("layers", 3, "2 x 3", "bfloat16", "padded", "hashed"), ("out", 1, "4", "bfloat16", "cast", "hashed"),
    ]  # fmt: skip
    assert card.as_json()["kind"] == "megatron-daro conversion 1" and card.as_json()["ignored"] == ("x",)


def test_hashes_of_a_card_are_read_and_a_torn_one_is_named(tmp_path):
    assert jobs.read_hashes(tmp_path) == {}
    card = Card("/s", "daro", 7, (Row(record("m"), (record("h"), record("k")), "padded", "hashed"),), ())
    file = tmp_path / "conversion.json"
    file.write_text(json.dumps(card.as_json()))
    assert jobs.read_hashes(tmp_path) == {"h": record("h"), "k": record("k")}
    file.write_text(json.dumps(card.as_json() | {"kind": "other"}))
    assert jobs.read_hashes(tmp_path) == {}
    for text in ("{", "[]", "{}", '{"kind": "megatron-daro conversion 1", "rows": [{"hf": [{"name": "h"}]}]}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"conversion\.json cannot be read: .*remove it to convert without"):
            jobs.read_hashes(tmp_path)


def test_only_the_same_tensor_with_another_hash_is_damaged(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    card = Card("/s", "daro", 7, (Row(record("m"), (record("h"),), "padded", "hashed"),), ())
    (tmp_path / "conversion.json").write_text(json.dumps(card.as_json()))
    megatron = SimpleNamespace(source=folder, source_format="megatron")
    for other in (
        record("x", digest="2"),
        record("h"),
        record("h", digest="2", dtype="f"),
        record("h", (6,), digest="2"),
    ):
        jobs._compare_with_source(megatron, {other.name: other})
    damaged = {"h": record("h", digest="2")}
    with pytest.raises(CheckpointError, match=r"h in .*deep is not what conversion\.json says was written there"):
        jobs._compare_with_source(megatron, damaged)
    jobs._compare_with_source(SimpleNamespace(source=folder, source_format="hf"), damaged)


def test_records_of_parts_are_those_of_the_file():
    parts = [FileRecord("f", 1, [record("a")], [record("b")], ["s"], ["c"]), FileRecord("f", 2, [record("d")])]
    assert jobs.joined(parts, 9) == FileRecord("f", 9, [record("a"), record("d")], [record("b")], ["s"], ["c"])
    assert conversion._written_dtype([FileRecord("f", 1, hf=[record(), record()])]) == "bfloat16"
    assert conversion._written_dtype([FileRecord("f", 1, hf=[record(), record(dtype="float32")])]) is None
