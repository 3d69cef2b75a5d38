"""Recorded rollouts come back bit for bit; damaged files are named."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from group_forms import plain_group, plain_rollout, through_parquet
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from loop_fakes import K, make_rollout

from megatron_daro.errors import DataError
from megatron_daro.rollout.group_columns import RecordedGroup, blocks, decode, encode
from megatron_daro.rollout.recorder import (
    MINIBATCH,
    RecordedMiniBatch,
    Recorder,
    read_groups,
    read_minibatch,
    read_step,
    recorded_steps,
    write_groups,
)
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.types import Group, Prompt, Verdict


def make_group(group_id=5, correct=(True, False, True, False), prompt=None) -> Group:
    prompt = prompt or Prompt(f"p{group_id}", "4", "unit", text="2+2?", tokens=(7, 8, 9))
    rollouts = tuple(make_rollout(group_id, 0, i, prompt, version=3) for i in range(len(correct)))
    return Group(group_id, prompt, rollouts, tuple(Verdict(c, float(c), "match") for c in correct))


def one_step(step: int) -> RecordedMiniBatch:
    """Of a batch that is one step."""
    return RecordedMiniBatch(step, step, 1, (), True)


def same(a: Group, b: Group) -> bool:
    return plain_group(a) == plain_group(b)


anything = st.text(st.characters(exclude_categories=[]))


@given(
    logprobs=arrays(np.float32, st.integers(1, 30), elements=st.floats(width=32)),
    text=anything,
    answer=anything,
    alternatives=st.lists(st.text(), max_size=2).map(tuple),
    category=anything,
    chat=st.booleans(),
    reward=st.floats(allow_nan=False),
    mask_seed=st.integers(0, 3),
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
    unfinished=st.booleans(),
)
def test_round_trip_is_exact(
    logprobs, text, answer, alternatives, category, chat, reward, mask_seed, spans, unfinished
):
    said = {"messages": ({"role": "user", "content": "a\nb"},)} if chat else {"text": text}
    prompt = Prompt("p", answer, "unit", tokens=(1, 2), category=category, alternatives=alternatives, **said)
    mask = (np.arange(len(logprobs)) % 4 >= mask_seed).astype(np.uint8)
    rollout = replace(
        make_rollout(9, 2, 0, prompt, version=4, length=len(logprobs)),
        logprobs=logprobs,
        text=text,
        loss_mask=mask,
        version_spans=tuple(spans),
    )
    group = Group(9, prompt, (rollout,), (Verdict(True, reward, "match"),))
    rest = (replace(rollout, index=1, finish_reason="abort"),) if unfinished else ()
    (back,) = through_parquet([RecordedGroup(group, "filtered", rest)])
    assert back.used == "filtered"
    assert same(group, back.group)
    assert [plain_rollout(r) for r in back.partial] == [plain_rollout(r) for r in rest]


def test_lone_surrogates_are_shown_as_replacement_characters_and_come_back(tmp_path):
    prompt = Prompt("p\ud800", "4\udfff", "unit", text="\ud83d\ude00?", tokens=(1,))
    group = make_group(prompt=prompt)
    path = write_groups(tmp_path / "a.parquet", [RecordedGroup(group, "trained")])
    assert pq.read_table(path)["answer"][0].as_py() == "4\ufffd"
    assert same(read_groups(path)[0][0], group)


def test_a_group_is_never_split_over_row_groups():
    groups = [RecordedGroup(make_group(i), "trained") for i in range(20)]
    batches = list(blocks(groups, block_tokens=40))
    assert 3 < len(batches) < 20
    ids = [set(batch.column("group_id").to_pylist()) for batch in batches]
    assert sum(map(len, ids)) == 20
    assert [plain_group(g.group) for g in decode(batches)] == [plain_group(g.group) for g in groups]
    assert all(same(a.group, b.group) for a, b in zip(decode(batches), groups, strict=True))


def test_groups_are_found_again_whatever_the_row_groups_are(tmp_path):
    groups = [make_group(i) for i in range(5)]
    path = Recorder(tmp_path).write_step(1, {"trained": groups}, one_step(1))
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table, row_group_size=3)
        writer.add_key_value_metadata(metadata)
    assert pq.read_metadata(path).num_row_groups == 7
    assert all(same(a, b) for a, (b, _) in zip(groups, read_step(tmp_path, 1), strict=True))


def test_what_is_read_stands_in_memory_of_its_own(tmp_path):
    Recorder(tmp_path).write_step(1, {"trained": [make_group(1)]}, one_step(1))
    rollout = read_step(tmp_path, 1)[0][0].rollouts[0]
    for array in (rollout.tokens, rollout.logprobs, rollout.loss_mask):
        array[0] = 0  # a view of the file's memory would refuse


def with_experts(group, folder):
    """The group with experts of every token but the last, of all rollouts but the first."""
    told = [None]
    for r in group.rollouts[1:]:
        experts_TLK = np.arange((len(r.tokens) - 1) * 6).reshape(-1, 2, 3)
        told.append(folder.store((group.group_id, 0, r.index), experts_TLK, len(r.tokens)))
    return replace(
        group, rollouts=tuple(replace(r, routed_experts=e) for r, e in zip(group.rollouts, told, strict=True))
    )


def test_experts_are_found_from_a_record_also_when_the_run_was_moved(tmp_path):
    run, other = tmp_path / "run", ExpertsFolder(tmp_path / "other")
    group, far = with_experts(make_group(1), ExpertsFolder(run)), with_experts(make_group(2), other)
    want = [r.routed_experts.read() for r in (*group.rollouts[1:], *far.rollouts[1:])]
    Recorder(run).write_step(1, {"trained": [group, far, make_group(3)]}, one_step(1))
    run.rename(tmp_path / "moved")
    (back, _), (far, _), (plain, _) = read_step(tmp_path / "moved", 1)
    assert back.rollouts[0].routed_experts is None and plain.rollouts[3].routed_experts is None
    for rollout, experts_TLK in zip((*back.rollouts[1:], *far.rollouts[1:]), want, strict=True):
        np.testing.assert_array_equal(rollout.routed_experts.read(), experts_TLK)


def test_order_and_outcomes_come_back_and_a_row_is_a_rollout(tmp_path):
    trained, filtered, dropped = [make_group(4), make_group(2)], [make_group(3)], [make_group(1)]
    path = Recorder(tmp_path).write_step(
        20, {"trained": trained, "filtered": filtered, "dropped": dropped}, one_step(20)
    )
    assert path == tmp_path / "rollouts" / "step_000020.parquet"
    back = read_step(tmp_path, 20)
    assert [used for _, used in back] == ["trained", "trained", "filtered", "dropped"]
    assert all(same(a, b) for a, (b, _) in zip([*trained, *filtered, *dropped], back, strict=True))
    rows = pq.read_table(path).to_pylist()
    assert [row["group_id"] for row in rows] == [i for i in (4, 2, 3, 1) for _ in range(K)]
    first, rollout = rows[0], trained[0].rollouts[0]
    assert first["tokens"] == rollout.tokens[3:].tolist() and first["prompt_tokens"] == [7, 8, 9]
    assert first["logprobs"] == rollout.logprobs.tolist() and first["loss_mask"] is None
    assert (first["correct"], first["reward"], first["reason"]) == (True, 1.0, "match")


def test_the_same_groups_are_the_same_bytes(tmp_path):
    paths = [
        Recorder(tmp_path / name).write_step(1, {"trained": [make_group(i) for i in range(9)]}, one_step(1))
        for name in "ab"
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_an_incomplete_group_can_be_recorded(tmp_path):
    empty = Group(8, make_group().prompt, (), ())
    Recorder(tmp_path).write_step(1, {"dropped": [empty]}, one_step(1))
    assert same(read_step(tmp_path, 1)[0][0], empty)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    """(path, content, groups) of a recorded file."""
    groups = [make_group(1), Group(8, make_group().prompt, (), ())]
    path = Recorder(tmp_path_factory.mktemp("small")).write_step(1, {"trained": groups}, one_step(1))
    return path, path.read_bytes(), groups


def read_or_refused(path, groups):
    """Whether reading gave the groups; it may refuse the file by its name, and nothing else."""
    try:
        back = read_groups(path)
    except DataError as error:
        assert str(path) in str(error)
        return False
    assert [plain_group(group) for group, _ in back] == [plain_group(group) for group in groups]
    return True


def test_a_torn_file_is_refused_wherever_it_ends(small_file):
    path, data, groups = small_file
    for length in range(0, len(data), 23):
        path.write_bytes(data[:length])
        assert not read_or_refused(path, groups)


def test_a_flipped_bit_is_never_read_as_something_else(small_file):
    path, data, groups = small_file
    outcomes = []
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        outcomes.append(read_or_refused(path, groups))
    assert outcomes.count(False) > len(outcomes) / 2


def test_a_missing_file_and_one_of_another_kind_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"step_000001\.parquet"):
        read_step(tmp_path, 1)
    path = tmp_path / "rollouts" / "step_000001.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"group_id": [1]}), path)
    with pytest.raises(DataError, match=r"step_000001\.parquet"):
        read_step(tmp_path, 1)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("length", 99, "row 5 .* 99 long"),
        ("used", "lost", "row 5 .*used.*'lost'"),
        ("answer", None, "answer.*string"),
        ("attempt", None, "attempt.*int32"),  # the last column is of this type too
        ("teacher_logprobs", None, "teacher_logprobs.*list"),
    ],
)
def test_edited_rows_are_named(tmp_path, column, value, message):
    path = Recorder(tmp_path).write_step(1, {"trained": [make_group(1), make_group(2)]}, one_step(1))
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata
    place = table.schema.get_field_index(column)
    if value is None:
        table = table.remove_column(place)
    else:
        values = table[column].to_pylist()
        values[4] = value
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + message):
        read_step(tmp_path, 1)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    recorder = Recorder(tmp_path)
    path = recorder.write_step(1, {"trained": [make_group(1)]}, one_step(1))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match="File too large"):
            recorder.write_step(1, {"trained": [make_group(i) for i in range(20)]}, one_step(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 128 KiB, and the command that makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk]).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk, ["mount", "-o", "remount,size=8m", disk]
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_named_and_what_was_written_stays(small_disk):
    disk, enlarge = small_disk
    recorder = Recorder(disk)
    path = recorder.write_step(1, {"trained": [make_group(1)]}, one_step(1))
    before = path.read_bytes()
    prompt = make_group().prompt
    long = tuple(make_rollout(2, 0, i, prompt, version=1, length=5000) for i in range(8))
    many = [Group(2, prompt, long, (Verdict(True, 1.0, "match"),) * 8)]
    with pytest.raises(DataError, match=r"step_000002\.parquet.*No space left"):
        recorder.write_step(2, {"trained": many}, one_step(2))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    subprocess.run(enlarge, check=True)
    recorder.write_step(2, {"trained": many}, one_step(2))
    assert all(same(a, b) for a, (b, _) in zip(many, read_step(disk, 2), strict=True))


def test_skipped_batches_have_files_of_their_own_until_the_step_is_recorded(tmp_path):
    recorder = Recorder(tmp_path)
    for step in (3, 5):
        path = recorder.write_untrainable(step, {"filtered": [make_group(step)]})
        assert path == tmp_path / "rollouts" / f"untrainable_{step:06d}.parquet" and same(
            read_groups(path)[0][0], make_group(step)
        )
    assert recorded_steps(tmp_path) == []
    recorder.write_step(3, {"trained": [make_group(9)]}, one_step(3))
    assert {path.name for path in path.parent.iterdir()} == {"untrainable_000005.parquet", "step_000003.parquet"}
    recorder.truncate_after(4)
    assert [path.name for path in path.parent.iterdir()] == ["step_000003.parquet"]


@pytest.mark.parametrize(
    "torn", ["no JSON", '{"step": 7}', '{"step":8,"first_step":5,"epoch":2,"group_ids":[9],"applied":true}', "[]"]
)
def test_what_a_step_was_made_of_comes_back_and_a_torn_record_is_named(tmp_path, torn):
    recorder, minibatch = Recorder(tmp_path), RecordedMiniBatch(7, 5, 2, (9, 4), False)
    path = recorder.write_step(7, {}, minibatch)
    assert read_minibatch(tmp_path, 7) == minibatch and read_step(tmp_path, 7) == []
    write_groups(path, (), metadata={MINIBATCH: torn})
    with pytest.raises(DataError, match=r"step_000007\.parquet"):
        read_minibatch(tmp_path, 7)


def test_failed_batches_keep_nan(tmp_path):
    group = make_group()
    bad = replace(group.rollouts[0], logprobs=np.full_like(group.rollouts[0].logprobs, np.nan))
    path = Recorder(tmp_path).write_failed(7, [replace(group, rollouts=(bad, *group.rollouts[1:]))])
    assert path == tmp_path / "failed" / "step_000007.parquet"
    assert np.isnan(read_groups(path)[0][0].rollouts[0].logprobs).all()
    assert len(group.rollouts) == K


def test_what_has_no_token_comes_back_too():
    """An empty list is not a missing one: columns that are null mean something else."""
    prompt = Prompt("p", "4", "unit", text="", tokens=())
    rollout = make_rollout(9, 0, 0, prompt, version=4, length=0)
    group = Group(9, prompt, (rollout,), (Verdict(False, 0.0, "no_answer"),))
    (found,) = through_parquet([RecordedGroup(group)])
    assert same(found.group, group)


def test_a_null_among_numbers_is_refused_and_not_read_as_a_number():
    batch = encode([RecordedGroup(make_group())])
    holed = pa.array([[0.5, None], *batch.column("logprobs").to_pylist()[1:]], pa.list_(pa.float32()))
    columns = {name: holed if name == "logprobs" else batch.column(name) for name in batch.schema.names}
    with pytest.raises(ValueError, match="null"):
        list(decode([pa.RecordBatch.from_pydict(columns)]))
