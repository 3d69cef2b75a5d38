"""The file of recorded rollouts as other readers see it: names, kinds, what may be null, how it is compressed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from group_forms import plain_rollout, through_parquet
from loop_fakes import make_rollout

from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import SCHEMA, RecordedGroup, decode, encode
from megatron_daro.rollout.recorder import (
    RecordedMiniBatch,
    Recorder,
    read_groups,
    read_recorded,
    read_step,
    read_waiting,
    recorded_steps,
    write_groups,
    write_waiting,
)
from megatron_daro.routed_experts import ExpertsFolder, Part, StoredExperts
from megatron_daro.types import Group, Prompt, TurnReport, Verdict

PROMPT = Prompt("p", "4", "unit", text="2+2?", tokens=(7, 8, 9))
NEVER_NULL = (
    *("group_id", "prompt_id", "source", "category", "answer", "prompt_tokens", "tokens", "logprobs", "version_spans"),
)


def group(group_id=5, *, prompt=PROMPT, right=(True, False), **changes) -> Group:
    rollouts = tuple(replace(make_rollout(group_id, 1, i, prompt, version=3), **changes) for i in range(len(right)))
    return Group(group_id, prompt, rollouts, tuple(Verdict(one, 0.5, "match") for one in right))


def one_step(step: int) -> RecordedMiniBatch:
    """Of a batch that is one step."""
    return RecordedMiniBatch(step, step, 1, (), True)


def rows(*records: RecordedGroup) -> list[dict]:
    return encode(records).to_pylist()


def test_what_may_be_null_is_said_by_the_schema():
    assert tuple(name for name in SCHEMA.names if not SCHEMA.field(name).nullable) == NEVER_NULL
    for name in SCHEMA.names:
        kind = SCHEMA.field(name).type
        if pa.types.is_list(kind):
            inner = kind.value_field
            fields = [inner] + [inner.type.field(i) for i in range(inner.type.num_fields)]
            assert inner.name == "element" and not any(field.nullable for field in fields), name


def test_numbers_have_the_kinds_that_docs_say():
    kinds = {name: str(SCHEMA.field(name).type) for name in SCHEMA.names}
    assert {name for name, kind in kinds.items() if kind == "int64"} == {"group_id", "weight_version"}
    assert {name for name, kind in kinds.items() if kind == "int32"} == {"index", "attempt", "length"}
    assert (kinds["correct"], kinds["reward"]) == ("bool", "double")
    lists = {"tokens": "int32", "prompt_tokens": "int32", "logprobs": "float", "loss_mask": "uint8"}
    assert {name: str(SCHEMA.field(name).type.value_type) for name in lists} == lists


def test_a_file_is_compressed_and_checked_and_has_no_statistics(tmp_path):
    path = write_groups(
        tmp_path / "a.parquet", [RecordedGroup(group(teacher_logprobs=np.ones(3, np.float32)), "trained")]
    )
    row_group = pq.read_metadata(path).row_group(0)
    columns = {one.path_in_schema: one for one in map(row_group.column, range(row_group.num_columns))}
    assert {one.compression for one in columns.values()} == {"ZSTD"}
    assert not any(one.is_stats_set for one in columns.values())
    split = {name for name, one in columns.items() if "BYTE_STREAM_SPLIT" in one.encodings}
    assert split == {f"{name}.list.element" for name in ("tokens", "logprobs", "teacher_logprobs")}
    repeated = {name for name, one in columns.items() if "RLE_DICTIONARY" in one.encodings}
    words = {"used", "prompt_id", "source", "category", "prompt", "messages", "answer", "alternatives"}
    assert repeated == words | {"finish_reason", "reason", "loss_mask.list.element"}
    metadata = pq.read_metadata(path).metadata
    assert metadata[b"megatron_daro.rollouts"] == b"2" and b"ARROW:schema" not in metadata


def length_of(count: int) -> dict:
    """Changes that make a rollout so many tokens long."""
    return {
        "tokens": np.arange(7, 10 + count, dtype=np.int32), "loss_mask": np.ones(count, np.uint8),
        "logprobs": np.zeros(count, np.float32),
    }  # fmt: skip


def test_a_row_says_what_people_look_for():
    chat = replace(
        PROMPT,
        text=None,
        messages=({"role": "system", "content": "s"}, {"role": "user"}),
        alternatives=("5",),
        category="c",
    )
    one = group(prompt=chat, **length_of(2), text="hm", version_spans=((3, 1), (4, 1)), turns=((1, 1),))
    one = replace(one, verdicts=(Verdict(True, 2.0, "match", (("form", 0.5),)), one.verdicts[1]))
    report = TurnReport(1.0, 2, 3, 4.0)
    one = replace(one, rollouts=(replace(one.rollouts[0], reports=(report,)), replace(one.rollouts[1], turns=())))
    first, second = rows(RecordedGroup(one, "trained"))
    assert (first["prompt"], json.loads(first["messages"])) == ("s\n", [dict(message) for message in chat.messages])
    assert json.loads(first["alternatives"]) == ["5"] and (first["category"], first["used"]) == ("c", "trained")
    assert (first["index"], second["index"], first["attempt"], first["length"], first["text"]) == (0, 1, 1, 2, "hm")
    assert first["version_spans"] == [{"weight_version": 3, "tokens": 1}, {"weight_version": 4, "tokens": 1}]
    assert first["turns"] == [{"observed": 1, "generated": 1}] and second["turns"] is None
    assert first["reports"] == [{"reward": 1.0, "tool_calls": 2, "tool_errors": 3, "seconds": 4.0}]
    assert (
        second["reports"] is None and first["rewards"] == [{"name": "form", "value": 0.5}] and second["rewards"] is None
    )
    assert (first["reward"], first["reason"], second["correct"]) == (2.0, "match", False)
    assert first["teacher_logprobs"] is None and first["experts"] is None and first["experts_shape"] is None
    (empty,) = rows(RecordedGroup(Group(8, PROMPT, (), ()), "dropped"))
    assert (
        empty["index"] is None and empty["tokens"] == [] and empty["alternatives"] is None and empty["prompt"] == "2+2?"
    )


def test_a_mask_of_ones_is_null_and_another_one_is_there():
    one = group(**length_of(2))
    mixed = replace(one, rollouts=(one.rollouts[0], replace(one.rollouts[1], loss_mask=np.array([1, 0], np.uint8))))
    assert [row["loss_mask"] for row in rows(RecordedGroup(mixed, "trained"))] == [None, [1, 0]]


def test_what_a_teacher_said_comes_back_in_memory_of_its_own():
    one = group(**length_of(2))
    first = replace(one.rollouts[0], teacher_logprobs=np.array([-1, -2], np.float32))
    taught = replace(one, rollouts=(first, one.rollouts[1]))
    (back,) = through_parquet([RecordedGroup(taught, "trained")])
    assert [plain_rollout(r) for r in back.group.rollouts] == [plain_rollout(r) for r in taught.rollouts]
    back.group.rollouts[0].teacher_logprobs[0] = 0
    assert back.group.rollouts[1].teacher_logprobs is None


def test_experts_in_the_run_are_named_from_there_and_others_by_their_whole_path(tmp_path):
    run = tmp_path / "run"
    parts = (Part(str(run / "experts/a.npy"), 0, 3), Part(str(tmp_path / "b.npy"), 1, 1))
    one = group(**length_of(2), routed_experts=StoredExperts(parts, (5, 2, 3)))
    row = encode([RecordedGroup(one, "trained")], run).to_pylist()[0]
    assert [part["file"] for part in row["experts"]] == ["experts/a.npy", str(tmp_path / "b.npy")]
    assert [(part["first"], part["rows"]) for part in row["experts"]] == [(0, 3), (1, 1)]
    assert row["experts_shape"] == [2, 3]
    (back,) = decode([encode([RecordedGroup(one, "trained")], run)], run)
    assert back.group.rollouts[0].routed_experts == one.rollouts[0].routed_experts
    assert encode([RecordedGroup(one, "trained")]).to_pylist()[0]["experts"][0]["file"] == parts[0].path


def edited(record: RecordedGroup, **changes) -> pa.RecordBatch:
    """The rows of a group, in which columns have other values; a list for both rows."""
    batch = encode([record])
    for name, values in changes.items():
        place, field = SCHEMA.get_field_index(name), SCHEMA.field(name)
        column = pa.array(values, field.type)
        batch = pa.RecordBatch.from_arrays(
            [*batch.columns[:place], column, *batch.columns[place + 1 :]], schema=batch.schema
        )
    return batch


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"length": [2, 3]}, "rollout 1.* 3 long"),
        ({"loss_mask": [None, [1]]}, "rollout 1.*loss_mask"),
        ({"teacher_logprobs": [[1.0], None]}, "rollout 0.*teacher_logprobs"),
        ({"turns": [None, [{"observed": 1, "generated": 0}]]}, r"rollout 1.*turns"),
        (
            {"experts": [[{"file": "x", "first": 0, "rows": 6}], None], "experts_shape": [[1, 1], None]},
            "rollout 0.*experts",
        ),
        ({"finish_reason": ["stop", "end"]}, "finish_reason.*'end'"),
        ({"used": ["lost", "lost"]}, "used.*'lost'"),
    ],
)
def test_a_row_that_contradicts_itself_is_named(changes, named):
    batch = edited(RecordedGroup(group(**length_of(2)), "trained"), **changes)
    with pytest.raises(ValueError, match=named):
        list(decode([batch]))


def test_a_group_that_waits_comes_back_from_a_checkpoint(tmp_path):
    folder = ExpertsFolder(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_000001.tmp"
    checkpoint.mkdir(parents=True)
    write_waiting(checkpoint, ())
    assert read_waiting(checkpoint) == [] and not list(checkpoint.iterdir())
    one = group(**length_of(2))
    stored = folder.store((5, 0, 0), np.zeros((4, 1, 1)), 5)
    rest = replace(one.rollouts[0], index=2, finish_reason="abort", routed_experts=stored)
    write_waiting(checkpoint, [RecordedGroup(one, None, (rest,))])
    moved = checkpoint.rename(checkpoint.with_name("step_000001"))
    (back,) = read_waiting(moved)
    assert back.used is None and [r.index for r in back.partial] == [2] and len(back.group.rollouts) == 2
    assert back.partial[0].routed_experts == stored
    with pytest.raises(DataError, match=r"waiting\.parquet"):
        read_groups(moved / "waiting.parquet")
    write_groups(tmp_path / "used.parquet", [RecordedGroup(one, "trained", (rest,))])
    with pytest.raises(DataError, match=r"used\.parquet"):
        read_groups(tmp_path / "used.parquet")


def test_steps_are_found_by_number_and_whatever_else_is_there_is_left(tmp_path):
    recorder = Recorder(tmp_path)
    for step in (1_000_000, 2, 30):
        recorder.write_step(step, {"trained": [group(step)]}, one_step(step))
    folder = tmp_path / "rollouts"
    for name in ("notes.txt", "step_12.parquet", "step_000002.parquet.bak"):
        (folder / name).write_text("x")
    (folder / "step_000099.parquet.tmp").write_text("half")
    assert recorded_steps(tmp_path) == [2, 30, 1_000_000]
    assert recorder.truncate_after(2) == 2 and recorded_steps(tmp_path) == [2]
    assert {path.name for path in folder.iterdir()} == {
        "notes.txt", "step_12.parquet", "step_000002.parquet.bak", "step_000002.parquet",
    }  # fmt: skip


def test_a_file_of_another_format_is_refused_with_what_it_says(tmp_path):
    path = write_groups(tmp_path / "a.parquet", [], metadata={"megatron_daro.rollouts": "1"})
    with pytest.raises(DataError, match=r"a\.parquet.*megatron_daro\.rollouts.*'1'"):
        read_recorded(path)


def test_a_column_of_another_kind_is_named(tmp_path):
    path = Recorder(tmp_path).write_step(1, {"trained": [group(**length_of(2))]}, one_step(1))
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata
    table = table.set_column(table.schema.get_field_index("index"), "index", table["index"].cast(pa.int64()))
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    with pytest.raises(DataError, match=r"index.*int64"):
        read_step(tmp_path, 1)
