"""`megatron-daro shorten`: the shortest right answers, pairs of them with longer ones, and the forms that TRL reads."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_daro import durable
from megatron_daro.cli import main
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.recorder import write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict

ANSWERS = [(8, True), (5, True), (7, True), (6, False), (4, False), (9, False)]
"""Lengths and verdicts of the answers to one problem: number 1 is the shortest right one."""


def group(group_id, answers, *, finish="stop", turns=()):
    prompt = Prompt(id=f"p{group_id}", answer="1", source="s", text=f"What is {group_id}?", tokens=(1, 2, group_id))
    rollouts = tuple(
        Rollout(
            prompt_id=prompt.id, group_id=group_id, attempt=0, index=i,
            tokens=np.array([*prompt.tokens, *range(length)], np.int32), prompt_length=3,
            loss_mask=np.ones(length, np.uint8), logprobs=np.zeros(length, np.float32), finish_reason=finish,
            weight_version=0, text=f"{group_id}.{i} of {length}", turns=turns,
        )
        for i, (length, _) in enumerate(answers)
    )  # fmt: skip
    verdicts = tuple(Verdict(right, float(right), "match") for _, right in answers)
    return RecordedGroup(Group(group_id, prompt, rollouts, verdicts), "trained")


def joined(first, second):
    """One group of the answers of two; the second's come after the first's."""
    rollouts = [*first.group.rollouts, *second.group.rollouts]
    rollouts = tuple(replace(rollout, index=i) for i, rollout in enumerate(rollouts))
    verdicts = (*first.group.verdicts, *second.group.verdicts)
    return replace(first, group=replace(first.group, rollouts=rollouts, verdicts=verdicts))


@pytest.fixture
def run_dir(tmp_path):
    """A run of two steps: five groups that were trained, of which two give pairs."""
    wrong = [(length, False) for length, _ in ANSWERS]
    steps = [
        [group(0, ANSWERS), group(1, wrong), group(2, [(3, True), (4, True)])],
        [group(3, ANSWERS, finish="length"), group(4, ANSWERS), replace(group(5, ANSWERS), used="dropped")],
    ]
    for number, groups in enumerate(steps, 1):
        write_groups(tmp_path / "run" / "rollouts" / f"step_{number:06d}.parquet", groups)
    return tmp_path / "run"


def shorten(path, out, *options, messages=True):
    return main(["shorten", str(path), "--out", str(out), *["--messages"] * messages, *options])


def rows_of(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


def pairs(tmp_path, *groups):
    """(chosen, rejected) of the rows for groups in one file."""
    write_groups(tmp_path / "a.parquet", groups)
    assert shorten(tmp_path / "a.parquet", tmp_path / "pairs.jsonl") == 0
    rows = rows_of(tmp_path / "pairs.jsonl")
    return [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.jsonl"])
def test_the_shortest_right_answer_is_preferred_to_longer_ones(run_dir, tmp_path, capsys, name):
    assert shorten(run_dir, tmp_path / name) == 0
    printed = capsys.readouterr().out
    # Rows, groups, groups without a right answer, groups without a longer one; then mean lengths.
    assert re.findall(r"\d+", printed)[:4] == ["6", "5", "2", "1"] and {"5.0", "7.7"} <= set(
        re.findall(r"\d+\.\d", printed)
    )
    rows = rows_of(tmp_path / name)
    assert [row["prompt_id"] for row in rows] == ["p0"] * 3 + ["p4"] * 3
    # Wrong ones of more than 5 tokens, and the right one of 8, which is 1.6 times as long; 7 is 1.4 times.
    assert [row["rejected"][0]["content"] for row in rows[:3]] == ["0.5 of 9", "0.0 of 8", "0.3 of 6"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is 0?"}]
    assert rows[0]["chosen"] == [{"role": "assistant", "content": "0.1 of 5"}]


def test_the_shortest_right_answer_alone(run_dir, tmp_path):
    assert shorten(run_dir, tmp_path / "sft.jsonl", "--for", "sft") == 0
    rows = rows_of(tmp_path / "sft.jsonl")
    assert [row["prompt_id"] for row in rows] == ["p0", "p2", "p4"]
    assert rows[1]["completion"] == [{"role": "assistant", "content": "2.0 of 3"}] and "rejected" not in rows[1]


def test_most_and_longer(run_dir, tmp_path):
    assert shorten(run_dir, tmp_path / "a.jsonl", "--most", "1") == 0
    assert [row["rejected"][0]["content"] for row in rows_of(tmp_path / "a.jsonl")] == ["0.5 of 9", "4.5 of 9"]
    assert shorten(run_dir, tmp_path / "b.jsonl", "--longer", "1.0") == 0
    assert len(rows_of(tmp_path / "b.jsonl")) == 9  # the 7 and, of p2, the 4 too


@pytest.mark.parametrize(
    ("length", "right", "finish", "rejected"),
    [
        (6, True, "stop", True),  # 1.5 times as long
        (5, True, "stop", False),
        (5, False, "stop", True),
        (4, False, "stop", False),
        (6, True, "length", True),  # cut off
        (5, True, "length", False),
    ],
)
def test_a_wrong_answer_is_rejected_if_it_is_longer_and_a_right_one_by_the_factor(
    tmp_path, length, right, finish, rejected
):
    other = joined(group(0, [(4, True)]), group(0, [(length, right)], finish=finish))
    sure = group(1, [(2, True), (3, False)])
    expected = [("0.0 of 4", f"0.0 of {length}")] * rejected + [("1.0 of 2", "1.1 of 3")]
    assert pairs(tmp_path, other, sure) == expected


def test_of_answers_as_long_the_first_is_chosen_and_the_longest_rejected_first(tmp_path):
    answers = [(10, False), (4, True), (4, True), (10, False), (11, False)]
    rejected = ["0.4 of 11", "0.0 of 10", "0.3 of 10"]
    assert pairs(tmp_path, group(0, answers)) == [("0.1 of 4", one) for one in rejected]


def test_answers_of_a_group_that_lie_in_several_files_belong_together(tmp_path):
    """As an evaluation writes them."""
    whole = group(0, ANSWERS).group
    for i, rollout in enumerate(whole.rollouts):
        one = replace(whole, rollouts=(rollout,), verdicts=(whole.verdicts[i],))
        write_groups(tmp_path / "evals" / "answers" / f"part_{i:06d}.parquet", [RecordedGroup(one, "trained")])
    assert shorten(tmp_path / "evals", tmp_path / "a.jsonl") == 0 and len(rows_of(tmp_path / "a.jsonl")) == 3


def test_conversations_of_several_turns_are_left_out(tmp_path):
    found = pairs(tmp_path, group(0, ANSWERS), group(1, ANSWERS, turns=((0, 2), (1, 2))))
    assert len(found) == 3 and {chosen for chosen, _ in found} == {"0.1 of 5"}


def test_what_is_refused_leaves_no_file(run_dir, tmp_path, capsys):
    out = tmp_path / "none.jsonl"

    def refused(path, out, named, *options, code=1, **given):
        assert shorten(path, out, *options, **given) == code
        assert named in capsys.readouterr().err

    refused(run_dir, tmp_path / "pairs.csv", "--out", code=2)
    (tmp_path / "there.jsonl").touch()
    refused(run_dir, tmp_path / "there.jsonl", "there.jsonl", code=2)
    refused(run_dir, out, "--tokenizer", messages=False, code=2)  # this run does not say whose tokens they are
    refused(run_dir, out, "--tokenizer", "--tokenizer", "t", code=2)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", out, str(tmp_path / "empty"))
    write_groups(tmp_path / "wrong.parquet", [group(0, [(4, False)] * 2)])
    refused(tmp_path / "wrong.parquet", out, "1 groups")
    assert shorten(run_dir, tmp_path / "pairs.parquet") == 0
    refused(tmp_path / "pairs.parquet", out, "group_id")
    (torn, _) = sorted((run_dir / "rollouts").iterdir())
    torn.write_bytes(torn.read_bytes()[:-9])
    refused(run_dir, out, torn.name)
    assert not out.exists() and not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_leaves_no_file(run_dir, tmp_path, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync", fail)
    assert shorten(run_dir, tmp_path / "a.parquet") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("whose", ["run", "evaluation", "option"])
def test_prompts_are_written_as_the_policy_read_them(run_dir, tmp_path, whose):
    import tiny_task

    from megatron_daro.data.tokenizer import load_tokenizer

    model, options = tmp_path / "model", []
    model.mkdir()
    tiny_task.save_tokenizer(model, tiny_task.SYMBOLS)
    if whose == "run":
        (run_dir / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    elif whose == "evaluation":
        (run_dir / "evaluation.json").write_text(json.dumps({"notes": {"model": str(model)}}))
    else:
        options = ["--tokenizer", str(model)]
    assert shorten(run_dir, tmp_path / "pairs.parquet", *options, messages=False) == 0
    first = rows_of(tmp_path / "pairs.parquet")[0]
    assert first["prompt"] == load_tokenizer(model).decode([1, 2, 0]) and first["chosen"] == "0.1 of 5"


@pytest.mark.parametrize("messages", [False, True])
def test_trl_reads_them_as_they_are(run_dir, tmp_path, messages):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import tiny_task

    (tmp_path / "model").mkdir()
    tiny_task.save_tokenizer(tmp_path / "model", tiny_task.SYMBOLS)
    options = [] if messages else ["--tokenizer", str(tmp_path / "model")]
    assert shorten(run_dir, tmp_path / "pairs.parquet", *options, messages=messages) == 0
    data = str(tmp_path / "pairs.parquet")
    loaded = datasets.load_dataset("parquet", data_files=data, split="train", cache_dir=str(tmp_path / "cache"))
    assert trl.is_conversational(loaded[0]) is messages
    assert {"prompt", "chosen", "rejected"} <= set(loaded.column_names) and len(loaded) == 6
