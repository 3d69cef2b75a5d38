"""Shortest right answers and pairs with longer ones, against the rule written out, and in the forms that TRL reads."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_daro.cli import main
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.rollout.group_columns import RecordedGroup
from megatron_daro.rollout.recorder import write_groups
from megatron_daro.types import Group, Prompt, Rollout, Verdict
from megatron_daro.workshop.shorten import Rules, recorded_files, shorten

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


@pytest.fixture
def run_dir(tmp_path):
    """A run of two steps: five groups, of which two give pairs."""
    wrong = [(length, False) for length, _ in ANSWERS]
    steps = [
        [group(0, ANSWERS), group(1, wrong), group(2, [(3, True), (4, True)])],
        [group(3, ANSWERS, finish="length"), group(4, ANSWERS), replace(group(5, ANSWERS), used="dropped")],
    ]
    for number, groups in enumerate(steps, 1):
        write_groups(tmp_path / "run" / "rollouts" / f"step_{number:06d}.parquet", groups)
    return tmp_path / "run"


def rows_of(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.jsonl"])
def test_the_shortest_right_answer_is_preferred_to_longer_ones(run_dir, tmp_path, name):
    counts = shorten(recorded_files(run_dir), tmp_path / name, Rules())
    assert (counts.groups, counts.without_right, counts.without_longer, counts.rows) == (5, 2, 1, 6)
    rows = rows_of(tmp_path / name)
    assert [row["prompt_id"] for row in rows] == ["p0"] * 3 + ["p4"] * 3
    # Wrong ones of more than 5 tokens, and the right one of 8, which is 1.6 times as long; 7 is 1.4 times.
    assert [row["rejected"][0]["content"] for row in rows[:3]] == ["0.5 of 9", "0.0 of 8", "0.3 of 6"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is 0?"}]
    assert rows[0]["chosen"] == [{"role": "assistant", "content": "0.1 of 5"}]
    assert (counts.chosen_tokens, counts.rejected_tokens) == (6 * 5, 2 * (9 + 8 + 6))


def test_the_shortest_right_answer_alone(run_dir, tmp_path):
    counts = shorten(recorded_files(run_dir), tmp_path / "sft.jsonl", Rules("sft", prompt_text=str))
    assert (counts.rows, counts.without_right) == (3, 2)
    assert rows_of(tmp_path / "sft.jsonl")[1] == {"prompt": "[1, 2, 2]", "completion": "2.0 of 3", "prompt_id": "p2"}


def test_most_and_longer(run_dir, tmp_path):
    assert shorten(recorded_files(run_dir), tmp_path / "a.jsonl", Rules(most=1)).rows == 2
    assert shorten(recorded_files(run_dir), tmp_path / "b.jsonl", Rules(longer=1.0)).rows == 9  # 7 and, of p2, 4 too


def test_answers_of_a_group_that_lie_in_several_files_belong_together(tmp_path):
    """As an evaluation writes them."""
    whole = group(0, ANSWERS).group
    for i, rollout in enumerate(whole.rollouts):
        one = replace(whole, rollouts=(rollout,), verdicts=(whole.verdicts[i],))
        write_groups(tmp_path / "evals" / "answers" / f"part_{i:06d}.parquet", [RecordedGroup(one, "trained")])
    assert shorten(recorded_files(tmp_path / "evals"), tmp_path / "a.jsonl", Rules()).rows == 3


def test_conversations_of_several_turns_are_left_out(tmp_path):
    write_groups(tmp_path / "a.parquet", [group(0, ANSWERS), group(1, ANSWERS, turns=((0, 2), (1, 2)))])
    counts = shorten([tmp_path / "a.parquet"], tmp_path / "out.jsonl", Rules())
    assert (counts.groups, counts.skipped, counts.rows) == (1, 6, 3)


def test_what_is_refused(run_dir, tmp_path, capsys):
    files = recorded_files(run_dir)
    with pytest.raises(ConfigError, match=r"--out: got '.*pairs.csv'; allowed: a file that ends in .parquet or .jsonl"):
        shorten(files, tmp_path / "pairs.csv", Rules())
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(ConfigError, match="is there already"):
        shorten(files, tmp_path / "there.jsonl", Rules())
    with pytest.raises(DataError, match="has no recorded rollouts"):
        recorded_files(tmp_path)
    write_groups(tmp_path / "wrong.parquet", [group(0, [(4, False)] * 2)])
    with pytest.raises(DataError, match="nothing to write: of 1 groups 1 have no right answer"):
        shorten([tmp_path / "wrong.parquet"], tmp_path / "none.jsonl", Rules())
    shorten(files, tmp_path / "pairs.parquet", Rules())
    with pytest.raises(DataError, match="is no file of recorded rollouts: it has no column group_id"):
        shorten([tmp_path / "pairs.parquet"], tmp_path / "none.jsonl", Rules())
    files[0].write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        shorten(files, tmp_path / "none.jsonl", Rules())
    assert not (tmp_path / "none.jsonl").exists() and not list(tmp_path.glob("*.tmp"))
    assert main(["shorten", str(run_dir), "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "does not say with which tokenizer it was recorded" in capsys.readouterr().err


def test_the_command_writes_prompts_as_the_policy_read_them(run_dir, tmp_path, capsys):
    import tiny_task

    (tmp_path / "model").mkdir()
    tiny_task.save_tokenizer(tmp_path / "model", tiny_task.SYMBOLS)
    (run_dir / "config.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    out = tmp_path / "pairs.parquet"
    assert main(["shorten", str(run_dir), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (
        "6 rows from 5 groups; 2 without a right answer" in shown
        and "chosen answers 5.0, of rejected ones 7.7" in shown
    )
    from megatron_daro.data.tokenizer import load_tokenizer

    assert rows_of(out)[0]["prompt"] == load_tokenizer(tmp_path / "model").decode([1, 2, 0])


@pytest.mark.parametrize("messages", [False, True])
def test_trl_reads_them_as_they_are(run_dir, tmp_path, messages):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    out = tmp_path / "pairs.parquet"
    shorten(recorded_files(run_dir), out, Rules(prompt_text=None if messages else str))
    loaded = datasets.load_dataset("parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert trl.is_conversational(loaded[0]) is messages
    assert {"prompt", "chosen", "rejected"} <= set(loaded.column_names) and len(loaded) == 6
