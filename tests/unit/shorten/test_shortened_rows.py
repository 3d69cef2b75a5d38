"""Shortest right answers at the edges: ties, order, what is left out, the file's form and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_daro.cli import main
from megatron_daro.commands.shorten import _tokenizer_of
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop import shorten as module
from megatron_daro.workshop.shorten import Rules, recorded_files, shorten

RULES = Rules(prompt_text=lambda ids: "".join(map(str, ids)))


def row(group, index, length, *, right=True, stop="stop", used="trained", **more):
    return {
        "group_id": group, "index": index, "used": used, "length": length, "finish_reason": stop, "correct": right,
        "turns": [], "prompt_id": f"p{group}", "prompt": f"q{group}", "messages": None, "prompt_tokens": [group, 9],
        "text": f"{group}.{index}", **more,
    }  # fmt: skip


def recorded(path: Path, *rows, without=()) -> Path:
    table = pa.Table.from_pylist([{k: v for k, v in one.items() if k not in without} for one in rows])
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(table, path)
    return path


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs(tmp_path, *rows, rules=RULES) -> tuple[list[tuple[str, str]], object]:
    out = tmp_path / "out.jsonl"
    counts = shorten([recorded(tmp_path / "a.parquet", *rows)], out, rules)
    return [(one["chosen"], one["rejected"]) for one in written(out)], counts


def test_of_answers_as_long_the_first_is_chosen_and_the_longest_rejected_first(tmp_path):
    rows = [
        row(0, 3, 10, right=False),
        row(0, 2, 4),
        row(0, 1, 4),
        row(0, 0, 10, right=False),
        row(0, 4, 11, right=False),
    ]
    found, counts = pairs(tmp_path, *rows)
    assert found == [("0.1", "0.4"), ("0.1", "0.0"), ("0.1", "0.3")]
    assert (counts.chosen_tokens, counts.rejected_tokens, counts.rows) == (12, 31, 3)


@pytest.mark.parametrize(
    ("answer", "rejected"),
    [
        (row(0, 1, 6), True),  # 1.5 times as long
        (row(0, 1, 5), False),
        (row(0, 1, 5, right=False), True),
        (row(0, 1, 4, right=False), False),
        (row(0, 1, 6, stop="length"), True),
        (row(0, 1, 5, stop="length"), False),
    ],
)
def test_a_wrong_answer_is_rejected_if_it_is_longer_and_a_right_one_by_the_factor(tmp_path, answer, rejected):
    found, _ = pairs(tmp_path, row(0, 0, 4), answer, row(1, 0, 2), row(1, 1, 3, right=False))
    assert found == [("0.0", "0.1")] * rejected + [("1.0", "1.1")]


def test_what_is_left_out_is_counted(tmp_path):
    rows = [
        row(0, 0, 4, used="dropped"), row(1, 0, 4, right=None), row(2, 0, 4, turns=[1, 2]), row(3, 0, 4, turns=[1]),
        row(3, 1, 9, right=False, turns=None), row(4, 0, 4, stop="length"), row(5, 0, 4), row(None, None, None),
    ]  # fmt: skip
    found, counts = pairs(tmp_path, *rows)
    assert found == [("3.0", "3.1")]
    assert (counts.groups, counts.skipped, counts.without_right, counts.without_longer) == (3, 2, 1, 1)


def test_a_chat_is_written_as_messages(tmp_path):
    chat = [{"role": "user", "content": "é"}]
    rows = [row(0, 0, 4, messages=json.dumps(chat)), row(1, 0, 4)]
    shorten([recorded(tmp_path / "a.parquet", *rows)], tmp_path / "out.jsonl", Rules("sft"))
    answer = [{"role": "assistant", "content": "0.0"}]
    assert written(tmp_path / "out.jsonl") == [
        {"prompt": chat, "completion": answer, "prompt_id": "p0"},
        {
            "prompt": [{"role": "user", "content": "q1"}],
            "completion": [{**answer[0], "content": "1.0"}],
            "prompt_id": "p1",
        },
    ]
    assert "é" in (tmp_path / "out.jsonl").read_text()


def test_a_prompt_is_the_text_of_its_tokens(tmp_path):
    shorten([recorded(tmp_path / "a.parquet", row(7, 0, 4))], tmp_path / "out.jsonl", Rules("sft", prompt_text=str))
    assert written(tmp_path / "out.jsonl") == [{"prompt": "[7, 9]", "completion": "7.0", "prompt_id": "p7"}]


def test_many_rows_are_written_in_groups_of_some_hundred(tmp_path):
    rows = [row(group, 0, 4) for group in range(1025)]
    counts = shorten([recorded(tmp_path / "a.parquet", *rows)], tmp_path / "new" / "out.parquet", Rules("sft"))
    file = pq.ParquetFile(tmp_path / "new" / "out.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [512, 512, 1]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD" and counts.rows == counts.groups == 1025
    assert [one["prompt_id"] for one in file.read().to_pylist()] == [f"p{group}" for group in range(1025)]


def test_groups_of_several_files_are_put_together_as_they_come(tmp_path):
    one = recorded(tmp_path / "1.parquet", row(0, 0, 4), row(1, 0, 3), row(1, 1, 8, right=False))
    two = recorded(tmp_path / "2.parquet", row(0, 1, 9, right=False), row(2, 0, 1))
    counts = shorten([one, two], tmp_path / "out.jsonl", RULES)
    assert [(line["prompt"], line["rejected"]) for line in written(tmp_path / "out.jsonl")] == [
        ("19", "1.1"),
        ("09", "0.1"),
    ]
    assert counts.without_longer == 1


def test_a_file_without_a_column_is_named_with_it(tmp_path):
    path = recorded(tmp_path / "b.parquet", row(0, 0, 4), without=["index", "text"])
    with pytest.raises(DataError, match=r"b.parquet: is no file of recorded rollouts: it has no column index$"):
        shorten([path], tmp_path / "b.jsonl", Rules("sft"))


def test_a_flipped_byte_is_seen(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([row(group, 0, 4) for group in range(50)])
    pq.write_table(
        table, path, compression="none", use_dictionary=False, write_page_checksum=True, write_statistics=False
    )
    content = bytearray(path.read_bytes())
    content[content.index(b"trained") + 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet: cannot be read: .*restore the file or leave it out"):
        shorten([path], tmp_path / "out.jsonl", Rules("sft"))


def test_nothing_to_write_says_how_many_groups_there_were(tmp_path):
    rows = [row(0, 0, 4), row(1, 0, 4, right=False), row(2, 0, 3, right=False)]
    with pytest.raises(
        DataError, match="of 3 groups 2 have no right answer that ended by itself, and 1 no answer that is"
    ):
        pairs(tmp_path, *rows)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_file_is_whole_before_it_has_its_name_and_a_failure_leaves_none(tmp_path, monkeypatch, name):
    def fail(path):
        assert path.name == f"{name}.tmp"
        assert len(written(path) if name == "out.jsonl" else pq.read_table(path)) == 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.durable, "sync", fail)
    files = [recorded(tmp_path / "a.parquet", row(0, 0, 4), row(0, 1, 9))]
    with pytest.raises(OSError, match="No space"):
        shorten(files, tmp_path / name, RULES)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("folder", ["rollouts", "answers", "."])
def test_files_are_found_in_a_run_an_evaluation_or_a_folder(tmp_path, folder):
    names = [recorded(tmp_path / folder / name, row(0, 0, 1)) for name in ("b.parquet", "a.parquet")]
    (tmp_path / folder / "x.txt").touch()
    assert recorded_files(tmp_path) == sorted(path.resolve() for path in names)
    assert recorded_files(names[0]) == [names[0]]


@pytest.mark.parametrize("where", ["run", "run/rollouts", "run/rollouts/a.parquet"])
@pytest.mark.parametrize("evaluation", [False, True])
def test_the_tokenizer_is_that_of_the_run_or_the_evaluation(tmp_path, where, evaluation):
    path = tmp_path / where
    recorded(tmp_path / "run/rollouts/a.parquet", row(0, 0, 1))
    if evaluation:
        (tmp_path / "run/evaluation.json").write_text('{"notes": {"model": "/m"}}')
    else:
        (tmp_path / "run/config.yaml").write_text("model: {path: /m}")
    assert _tokenizer_of(path) == Path("/m")


def test_without_either_a_tokenizer_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match=rf"^--tokenizer: {tmp_path} does not say with which tokenizer"):
        _tokenizer_of(tmp_path)


def test_the_command_counts_what_it_wrote(tmp_path, capsys):
    path = recorded(
        tmp_path / "a.parquet", row(0, 0, 4), row(0, 1, 9), row(0, 2, 7), row(1, 0, 3), row(2, 0, 3, right=None)
    )
    out = tmp_path / "out.jsonl"
    assert main(["shorten", str(path), "--out", str(out), "--messages", "--longer", "2", "--most", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 rows from 2 groups; 0 without a right answer that ended by itself, 1 without a longer one; 1 answers left "
        "out (several turns, or no verdict)",
        f"mean tokens of chosen answers 4.0, of rejected ones 9.0; written: {out}",
    ]
    out = tmp_path / "sft.jsonl"
    assert main(["shorten", str(path), "--out", str(out), "--messages", "--for", "sft"]) == 0
    assert capsys.readouterr().out.endswith(f"mean tokens of chosen answers 3.5; written: {out}\n")
    assert main(["shorten", str(path), "--out", "x.jsonl", "--messages", "--tokenizer", "t"]) == 2
    assert "--tokenizer: got one with --messages" in capsys.readouterr().err


def test_the_command_reads_prompts_with_the_tokenizer_it_is_given(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from megatron_daro.data import tokenizer

    asked = []

    def decode(ids, skip_special_tokens):
        return f"{ids} {skip_special_tokens}"

    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda path: asked.append(path) or SimpleNamespace(decode=decode))
    path, out = recorded(tmp_path / "a.parquet", row(0, 0, 4), row(0, 1, 6)), tmp_path / "out.jsonl"
    assert main(["shorten", str(path), "--out", str(out), "--tokenizer", "some/dir"]) == 0
    assert asked == [Path("some/dir")] and written(out)[0]["prompt"] == "[0, 9] False"
