"""Files as strangers bring them: packed, torn, of another kind, in another encoding; and a search for neighbours."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_daro.data.containers import RowProblem, WrittenNumber, read_rows
from megatron_daro.data.prompts import load_problems
from megatron_daro.errors import DataError

ROWS = [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(2500)]


def lines(rows=ROWS) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows=ROWS, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def arrow(rows, new_writer) -> bytes:
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with new_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:  # stored: its bytes hold the lines as they are
        archive.writestr("rows.jsonl", content)
    return sink.getvalue()


PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}
CONTAINERS = {"lines": lines, "array": lambda rows=ROWS: json.dumps(rows).encode(), "parquet": parquet}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_container_is_read_in_every_packing_whatever_its_name(tmp_path, container, packing):
    path = tmp_path / "rows.txt"
    path.write_bytes(PACKINGS[packing](CONTAINERS[container]()))
    found = list(read_rows(path))
    assert [row for _, row in found] == ROWS
    assert [number for number, _ in found] == list(range(1, len(ROWS) + 1))
    assert [number for number, _ in read_rows(path, ends=2)] == [1, 2, 2499, 2500]
    assert [row for _, row in read_rows(path, ends=1500)] == ROWS


def test_packed_members_one_after_the_other_are_one_file(tmp_path):
    for name in ("gzip", "zstd"):
        path = tmp_path / name
        path.write_bytes(b"".join(PACKINGS[name](lines(part)) for part in (ROWS[:5], ROWS[5:9])))
        assert [row for _, row in read_rows(path)] == ROWS[:9]


@pytest.mark.parametrize("groups", [1, 3, 1000, 2500])
def test_the_ends_of_a_parquet_file_are_those_of_the_whole(tmp_path, groups):
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet(row_group_size=groups))
    assert [row for _, row in read_rows(path, ends=4)] == ROWS[:4] + ROWS[-4:]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (zipped(lines(ROWS[:20])), "zip"),
        (zipped(b"")[-22:], "zip"),
        (lzma.compress(lines()), "xz"),
        (bz2.compress(lines()), "bzip2"),
        (arrow(ROWS, pa.ipc.new_file), "Arrow"),
        (arrow(ROWS, pa.ipc.new_stream), "Arrow"),
        (lines().decode().encode("utf-16"), "UTF-16"),
        (lines().decode().encode("utf-16-be"), "binary"),
        (b"\x80\x04\x95\x00" + lines(), "binary"),
        (gzip.compress(zipped(lines())), "zip"),
        (gzip.compress(b"  \n"), "empty"),
        (gzip.compress(lines())[:-7], "gzip"),
        (zstandard.compress(lines())[:-7], "zstd"),
        (gzip.compress(parquet()[:-9]), "Parquet"),
        (parquet()[:4000], "Parquet"),
        (parquet([]), "no rows"),
        (b"problem,answer\n1 + 1?,2\n", "JSON"),
        (lines([{"instruction": "1+1?", "output": "2"}]), "instruction, output"),
        (lines([{"q": {"text": "1+1?"}, "a": 2}]), "q.text"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "file"
    ),  # a gzip file holds the time: no id for two processes
)
def test_what_is_not_read_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.jsonl: ") as caught:
        load_problems([path])
    assert says in str(caught.value)


def test_a_row_that_python_cannot_hold_does_not_cost_the_others(tmp_path):
    broken = pa.array([b"1+1?", b"\xff\xfe", b"2+2?"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.table({"problem": broken, "answer": [2, 3, 4]})
    pq.write_table(table, tmp_path / "rows.parquet")
    prompts, report = load_problems([tmp_path / "rows.parquet"])
    assert [p.answer for p in prompts] == ["2", "4"]
    assert list(report.dropped.values()) == [["rows.parquet:2"]]


def test_numbers_stand_as_they_were_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [6.02e23, 27.0, 12345678901234567890, ' + "9" * 5000 + "]}\n")
    ((_, row),) = read_rows(path)
    assert row["x"][:3] == [WrittenNumber("6.02e23"), WrittenNumber("27.0"), 12345678901234567890]
    assert row["x"][3] == WrittenNumber("9" * 5000)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["problem", "question", "prompt", "messages", "answer", "final_answer", "solution", "reward_model", "level"]
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": json_values}), max_size=2
)
foreign_rows = st.dictionaries(st.sampled_from(FIELDS), json_values | chats | chats.map(json.dumps), max_size=5)


@st.composite
def foreign_files(draw) -> bytes:
    """Rows of odd values in one of the containers, in some encoding and packing, then cut, damaged or left whole."""
    rows = draw(st.lists(foreign_rows, max_size=4))
    good = [{"problem": "1+1?", "answer": 2}] if draw(st.booleans()) else []
    kind = draw(st.sampled_from(["lines", "array", "parquet", "csv"]))
    if kind == "parquet":
        texts = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
        content = parquet(texts + [{"problem": "1+1?", "answer": "2"}])
    elif kind == "csv":
        content = "\n".join(",".join(map(str, row.values())) for row in rows).encode("utf-8", "surrogatepass")
    else:
        content = CONTAINERS[kind](rows + good)
        content = content.decode().encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1"])))
    content = PACKINGS[draw(st.sampled_from(sorted(PACKINGS)))](content)
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    if content and draw(st.booleans()):
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + draw(st.binary(min_size=1, max_size=4)) + content[place + 1 :]
    return content


@settings(max_examples=60, deadline=None)
@given(foreign_files())
@example(b'{"problem": "\\ud800", "answer": "1"}\n')
@example(b'{"problem": "a?", "answer": 1e99999999999999999999}\n')
@example(b'{"problem": "a?", "answer": 1e9999999}\n')
@example(b'{"problem": "a?", "answer": -1e-9999999}\n')
def test_a_foreign_file_gives_prompts_or_a_sentence(tmp_path_factory, content):
    """Never another exception; and what is kept can be written as UTF-8 and is counted."""
    path = foreign_path(tmp_path_factory)
    path.write_bytes(content)
    try:
        prompts, report = load_problems([path], repeats="keep")
    except DataError as error:
        assert str(path) in str(error)
        return
    assert report.rows == report.kept + report.num_dropped and report.kept == len(prompts)
    for prompt in prompts:
        text = prompt.text if prompt.text is not None else "".join(m["content"] for m in prompt.messages)
        assert text.strip() and all(gold.strip() for gold in prompt.answers)
        "".join([text, *prompt.answers, prompt.source, prompt.category]).encode()


def foreign_path(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp() / "foreign.jsonl"


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 12), ends=st.integers(0, 8), kind=st.sampled_from(sorted(CONTAINERS)))
def test_both_ends_are_part_of_the_whole(tmp_path_factory, rows, ends, kind):
    path = foreign_path(tmp_path_factory)
    if rows == 0:
        return
    path.write_bytes(CONTAINERS[kind](ROWS[:rows]))
    whole = list(read_rows(path))
    assert list(read_rows(path, ends=ends)) == [e for i, e in enumerate(whole) if i < ends or i >= rows - ends]
    assert not any(isinstance(row, RowProblem) for _, row in whole)
