"""The page of an analysis, cell by cell, and rows of a dump at their bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze import page, rows
from megatron_daro.workshop.analyze.behaviour import Reflection, ending_of, has_code, reflects
from megatron_daro.workshop.analyze.rows import Columns, choose_columns, files_of, open_dump, rollouts_of, rows_of
from megatron_daro.workshop.analyze.views import BinSums, Dump, View, infer_rollouts_per_prompt, read_dump

K = 4


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


NAN = float("nan")


def view(**changes) -> View:
    """Of five bins, in which 100 tokens of 400 taught nothing."""
    fields = {
        "pass_rate": numbers(0, 0.25, 0.5, 0.75, 1),
        "groups": numbers(2, 1, 4, 2, 1),
        "tokens": numbers(60, 100, 100, 100, 40),
        "right_length": numbers(NAN, 10, 10, 13, 20),
        "wrong_length": numbers(30, 14, 12, 11, NAN),
        "loss": numbers(NAN, 0.5, -0.25, 0.125, NAN),
        "weight_learnt": numbers(1, 2, 3, 4, 1),
        "weight_rest": numbers(1, 0.5, 0.25, 2, 1),
        "shares": {"grpo, other": numbers(0, 0.25, 0.45, 0.3, 0), "daro": numbers(0, 0.3, 0.3, 0.4, 0)},
        "wasted_tokens": 100.0,
    }
    return View(**fields | changes)


def test_the_tables_of_the_page():
    bins = page._bins_table(view(), K, "tokens")
    assert bins.header == [
        "pass rate",
        "groups",
        "tokens",
        "tokens of right",
        "of wrong",
        "loss",
        "weight learnt",
        "at rest",
    ]
    assert bins.rows == [
        ["0/4", "2", "60", "", "30", "", "", ""],
        ["1/4", "1", "100", "10", "14", "0.500", "2.000", "0.500"],
        ["2/4", "4", "100", "10", "12", "-0.250", "3.000", "0.250"],
        ["3/4", "2", "100", "13", "11", "0.125", "4.000", "2.000"],
        ["4/4", "1", "40", "20", "", "", "", ""],
    ]
    assert bins.number_columns == 7
    empty = page._bins_table(view(tokens=numbers(60, 0, 100, 100, 40)), K, "tokens").rows[1]
    assert empty[2:] == ["0", "10", "14", "", "", ""]
    shares = page._shares_table(view(), K)
    assert (shares.header, shares.number_columns) == (["pass rate", "grpo, other", "daro"], 2)
    assert shares.rows == [["1/4", "25.0%", "30.0%"], ["2/4", "45.0%", "30.0%"], ["3/4", "30.0%", "40.0%"]]


def test_the_cards_of_the_page():
    assert page._cards(view(), "tokens", 8.0) == [
        ("tokens that taught nothing", "25.0%", "12.5 GPU-hours"),
        ("groups with signal", "70.0%", "both right and wrong answers"),
        ("never solved", "20.0%", "of the groups"),
        ("always solved", "10.0%", "of the groups"),
    ]
    assert page._cards(view(), "tokens", None)[0][2] == "in groups at 0 or 1"
    none = view(groups=numbers(0, 0, 0, 0, 0), tokens=numbers(0, 0, 0, 0, 0), wasted_tokens=0.0)
    assert [card[1] for card in page._cards(none, "tokens", None)] == ["0.0%", "100.0%", "0.0%", "0.0%"]


def test_the_plots_of_the_page():
    spent, paid, lengths, weights = page._plots(view(), K, "tokens")
    assert [trace["name"] for trace in spent.traces] == ["rollout tokens", "GRPO's gradient", "DARO's gradient"]
    assert [trace["type"] for trace in spent.traces] == ["bar"] * 3 and spent.layout["barmode"] == "group"
    assert spent.traces[0]["y"] == [0.15, 0.25, 0.25, 0.25, 0.1] and spent.traces[0]["x"] == [0, 1, 2, 3, 4]
    assert spent.traces[1]["y"] == [0, 0.25, 0.45, 0.3, 0] and len({str(t["marker"]) for t in spent.traces}) == 3
    assert spent.layout["yaxis"] == {"title": {"text": "share"}, "tickformat": ".0%", "rangemode": "tozero"}
    assert spent.layout["xaxis"]["title"] == {"text": "pass rate (right / rollouts)"} and len(spent.layout["xaxis"]) > 1
    assert [(t["name"], t["x"], t["y"]) for t in paid.traces] == [
        ("grpo, other", [1, 2, 3], [0.25, 0.45, 0.3]), ("daro", [1, 2, 3], [0.3, 0.3, 0.4]),
    ]  # fmt: skip
    assert [(t["name"], t["y"]) for t in lengths.traces] == [
        ("right", [None, 10, 10, 13, 20]), ("wrong", [30, 14, 12, 11, None]),
    ]  # fmt: skip
    assert [(t["name"], t["x"], t["y"]) for t in weights.traces] == [
        ("at rest", [1, 2, 3], [0.5, 0.25, 2]), ("learnt", [1, 2, 3], [2, 3, 4]),
    ]  # fmt: skip
    assert lengths.layout["yaxis"]["title"]["text"] == "tokens" and weights.layout["yaxis"]["rangemode"] == "tozero"
    first, ninth = (page._line([1], numbers(1 / 3), "x", i) for i in (0, len(page.COLOURS)))
    assert (first["line"]["dash"], ninth["line"]["dash"], first["y"]) == ("solid", "dot", [0.33333])
    assert first["line"]["color"] == ninth["line"]["color"] != page._line([1], numbers(1), "x", 1)["line"]["color"]
    assert (first["mode"], first["type"], first["line"]["width"]) == ("lines+markers", "scatter", 2)


def test_the_page_says_what_was_read_and_left_out():
    dump = Dump(BinSums(K), steps=[BinSums(K)] * 3, rollouts=1234, unverified=2, unreadable=0, incomplete=1)
    found = page.analysis_page(Path("/a/run\n"), dump, view(), "tokens", None)
    assert found.title == "What these rollouts teach: run\\n"
    assert found.subtitle == (
        "1,234 rollouts, 10 whole groups of 4 from 3 files. "
        "Left out: 1 incomplete groups, 2 rollouts without a verdict."
    )
    assert found.values["unit"] == "tokens" and found.values["rollouts_per_prompt"] == K
    whole = page.analysis_page(Path("/a"), Dump(BinSums(K)), view(), "tokens", None)
    assert whole.subtitle.endswith("Left out: nothing.") and whole.template == "analysis.html.j2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": numbers(60, 100, 100, 100, 60)}, []),
        ({"tokens": numbers(70, 80, 80, 80, 90)}, ["Leave out", "18% went into problems that were never", "22% went"]),
        ({"tokens": numbers(60, 340, 0, 0, 0)}, ["15% went into problems that were never"]),
        ({"tokens": numbers(0, 340, 0, 0, 60)}, ["15% went into problems that were always"]),
        ({"tokens": numbers(59, 300, 0, 0, 41)}, []),
        ({"shares": {"grpo": numbers(0, 0.25, 0.25, 0.5, 0)}}, ["GRPO would give one pass rate 2.0 times"]),
        ({"shares": {"grpo": numbers(0, 0.26, 0.25, 0.49, 0)}}, []),
        (
            {"wrong_length": numbers(1, 14, 14, 18.2, 9), "right_length": numbers(1, 10, 10, 13, 9)},
            ["Wrong answers are 1.4"],
        ),
        ({"wrong_length": numbers(9, 12, 13, 13, 9), "right_length": numbers(1, 10, 10, 13, 9)}, []),
        ({"groups": numbers(1, 0, 0, 0, 1)}, []),
    ],
)
def test_advice_begins_at_its_bounds(changes, words):
    calm = {"tokens": numbers(50, 100, 100, 100, 50), "shares": {"grpo": numbers(0, 0.3, 0.4, 0.3, 0)}}
    found = page.advice(view(**calm | changes), K)
    expected = words or ["Nothing stands out"]
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


def test_the_mean_length_counts_groups_with_signal():
    assert page._mean_length(numbers(99, 10, 20, NAN, 99), view(), K) == (10 + 80) / 7
    assert page._mean_length(numbers(1, 1, 1, 1, 1), view(groups=numbers(1, 0, 0, 0, 1)), K) == 0.0


def test_the_largest_part_is_most_of_it_beyond_a_half():
    half = view(shares={"dapo, grpo": numbers(0, 0.5, 0.3, 0.2, 0)})
    assert "; 50%, the largest part, of GRPO's gradient comes from problems that were solved 1 of 4" in page.headline(
        half, K, "x"
    )
    assert "; most of GRPO's" in page.headline(view(shares={"grpo": numbers(0, 0.51, 0.3, 0.19, 0)}), K, "x")


def test_how_an_answer_ends_and_reflects():
    assert [ending_of(*one) for one in ((True, False), (True, True), (False, True), (False, False))] == [
        "answered", "ran on", "cut off", "without answer",
    ]  # fmt: skip
    assert reflects("I RECHECK") and not reflects("check") and has_code("a ```output") and not has_code("```")
    counted = Reflection()
    assert (counted.share, counted.accuracy_with, counted.accuracy_without) == (0.0, None, None)
    for reflecting, right in ((True, True), (True, False), (True, False), (False, True)):
        counted.add(reflecting, right)
    assert counted == Reflection(3, 1, 1, 1) and counted.share == 0.75
    assert (counted.accuracy_with, counted.accuracy_without) == (1 / 3, 1.0)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_only_rollouts_of_training_are_read_in_the_order_of_their_numbers(tmp_path):
    for name in ("10.jsonl", "9.jsonl", "eval_1.jsonl", "skipped_1.parquet", "notes.txt", "a/2_3.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in files_of(tmp_path)] == ["2_3.pt", "9.jsonl", "10.jsonl"]
    assert files_of(tmp_path / "9.jsonl") == [tmp_path / "9.jsonl"]
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(DataError, match=r"has no file of \.parquet, \.jsonl, \.pt"):
        files_of(tmp_path)


def test_the_usual_size_of_a_group_is_inferred():
    def size(*groups: int) -> int:
        return infer_rollouts_per_prompt(rows.Row(group, 1, True) if group else None for group in groups)

    assert size(1, 1, 1, 2, 2, 3, 3, 4, 0, 0) == 2 and size(1, 1, 1, 2, 2) == 3 and size(1, 1, 2, 3, 4) == 2
    with pytest.raises(DataError, match="no prompt has more than one rollout"):
        size(1, 2)
    with pytest.raises(DataError, match="no prompt has more than one rollout"):
        size()
    many = (rows.Row(i // (2 if i < 20_000 else 4), 1, True) for i in range(80_000))
    assert infer_rollouts_per_prompt(many) == 2 and next(many).group == 5000


def test_a_group_may_open_again_after_it_was_whole():
    some = [rows.Row(1, 2, True, reflects=True), None, rows.Row(1, 3, False, reflects=False), rows.Row(1, 5, True)]
    dump = read_dump([iter(some), iter([rows.Row(2, 1, None), rows.Row(3, 1, False), rows.Row(4, 1, False)])], 2)
    assert (dump.rollouts, dump.unreadable, dump.unverified, dump.incomplete, dump.most_open) == (6, 1, 1, 3, 2)
    assert dump.total.groups.tolist() == [0, 1, 0] and dump.total.right_tokens.tolist() == [0, 2, 0]
    assert dump.total.wrong_tokens.tolist() == [0, 3, 0] == dump.steps[0].wrong_tokens.tolist()
    assert dump.reflection == [Reflection(1, 1, 1, 0), Reflection()] and dump.steps[1].groups.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 0, 1]], "rewards": [0.5]}, (1, 0.5)),
        ({"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 0, 0]], "rewards": [1.0], "input_lengths": [2]}, (0, 1.0)),
        ({"token_ids": [1, 2], "token_loss_mask": [1, 1], "rewards": 1.0, "filtered_rewards": 0.0}, (2, 0.0)),
        ({"token_ids": None, "token_loss_mask": [[1]], "rewards": [1.0]}, None),
        ({"token_ids": [[1]], "token_loss_mask": None, "rewards": [1.0]}, None),
    ],
)
def test_a_line_of_nemo_rl_is_a_rollout(record, found):
    (one,) = rollouts_of(record, "x")
    assert (one and (one["trained_tokens"], one["reward"])) == (found or {})


def test_rollouts_of_one_prompt_are_a_group_in_nemo_rl():
    def group(tokens, mask, **more):
        record = {"token_ids": [tokens], "token_loss_mask": [mask], "rewards": [1.0], **more}
        return next(rollouts_of(record, "x"))["prompt_tokens"]

    assert (
        group([1, 2, 3], [0, 0, 1])
        == group([1, 2, 4, 5], [0, 0, 1, 1])
        == group([1, 2, 9], [0, 0, 0], input_lengths=[2])
    )
    assert group([1, 2, 3], [0, 0, 1]) != group([1, 3, 3], [0, 0, 1]) and group([1, 2], [0, 0]) == group(
        [1, 2, 3], [0, 0, 1]
    )
    assert len(group([1], [1])) == 32


def test_a_line_of_roll_is_a_step_of_columns():
    step = {"global_step": [1], "responses": ["a", "b"], "scores": [1, 0], "prompt": "x", "id": [7, 8]}
    assert list(rollouts_of(step, "x")) == [
        {"id": 7, "responses": "a", "scores": 1, "prompt": "7"},
        {"id": 8, "responses": "b", "scores": 0, "prompt": "8"},
    ]  # fmt: skip
    assert list(rollouts_of({**step, "id": 1}, "x")) == [
        {"responses": "a", "scores": 1},
        {"responses": "b", "scores": 0},
    ]
    other = {"global_step": 1, "responses": "a", "scores": 1}
    assert list(rollouts_of(other, "x")) == [other]


def test_dropped_rollouts_are_left_out_and_lengths_of_texts_are_characters(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"input": 1, "output": "abc", "acc": True, "score": 0},
        {"input": 1, "output": "x", "acc": 0, "used": "dropped"},
        {"input": [1], "output": None, "acc": 1}, {"input": {"b": 1}, "output": "", "acc": None},
    )  # fmt: skip
    columns = choose_columns(path, {}, None, texts=True)
    assert columns == Columns("input", "output", "acc", is_text=True, text="output") and columns.unit == "characters"
    assert columns.names == ["input", "output", "acc", "output"]
    assert list(rows_of(path, columns)) == [
        rows.Row(1, 3.0, True, reports=[], reflects=False), None,
        rows.Row('{"b": 1}', 0.0, None, reports=[], reflects=False),
    ]  # fmt: skip
    plain = choose_columns(path, {"length": "len(input)"}, 0.5, "k")
    assert plain == Columns("input", "input", "acc", is_text=True, correct_above=0.5, reward_key="k")
    assert not choose_columns(path, {"length": "output"}, None).is_text


@pytest.mark.parametrize(
    ("verdict", "above", "right"),
    [(1, None, True), (0, None, False), (-1, None, False), (1.0, 1.0, False), (1.1, 1.0, True), ("1", None, True)],
)
def test_verdicts_are_numbers(verdict, above, right):
    assert rows._right(verdict, Columns("g", "n", "r", correct_above=above), Path("p")) is right


@pytest.mark.parametrize("verdict", ["x", [1], 0.5, 2, float("nan")])
def test_a_verdict_that_says_nothing_is_refused(verdict):
    with pytest.raises(DataError, match="dump: p, r: got "):
        rows._right(verdict, Columns("g", "n", "r"), Path("p"))
    assert rows._right({"k": 1}, Columns("g", "n", "r", reward_key="k"), Path("p")) is True


def test_sizes_have_no_sign_and_an_end():
    columns = Columns("g", "n", "r")
    assert [rows._size(size, columns, Path("p")) for size in (0, 2.5, [], (1, 2), "7")] == [0, 2.5, 0, 2, 7]
    for wrong in (float("inf"), float("nan"), -0.5, None, "abc", False):
        with pytest.raises(DataError, match=r"dump: p, n: got .*len\(n\)"):
            rows._size(wrong, columns, Path("p"))


def test_turns_are_those_of_this_package_only():
    turn = {"observed": 1, "generated": 2}
    assert rows._turns([turn]) == [turn] and rows._turns([]) == []
    for other in (None, "x", [turn, {"observed": 1}], [1], [{**turn, "more": 1}]):
        assert rows._turns(other) == ()


def test_a_dump_is_opened_file_by_file(tmp_path):
    first = write(tmp_path / "1.jsonl", {"group_id": 1, "length": 5, "correct": True})
    second = write(tmp_path / "2.jsonl", {"input": 1, "output": "ab", "score": 1})
    empty = write(tmp_path / "3.jsonl")
    opened = open_dump([first, second], {})
    columns, found = next(opened)
    assert columns.unit == "tokens" and list(found) == [rows.Row(1, 5.0, True, reports=[])]
    with pytest.raises(
        DataError, match=r"1\.jsonl has lengths in tokens, .*2\.jsonl in characters; allowed is one unit"
    ):
        next(opened)
    with pytest.raises(DataError, match=r"3\.jsonl has the columns none; needed are a group"):
        next(open_dump([empty], {}))
    with pytest.raises(
        DataError, match=r"1\.jsonl has the columns correct, group_id, length; --reflection needs answers"
    ):
        next(open_dump([first], {}, texts=True))


def test_nothing_stands_for_an_object_that_is_not_loaded(tmp_path):
    stands = rows.Placeholder(1, a=2)
    stands.append(1)
    stands.extend([1])
    stands[1] = 2
    stands.__setstate__({"a": 1})
    assert not vars(stands)


def test_means_and_losses_of_a_bin_are_written_out():
    """Two groups at pass rate 1/4: one right answer of 10 tokens, and three wrong ones of 30 in all."""
    from megatron_daro.config.algorithm import DaroSection
    from megatron_daro.workshop.analyze.views import token_loss_sums, view_of

    sums = BinSums(K)
    for _ in range(2):
        sums.add(1, 10.0, 30.0)
    sums.add(0, 0.0, 8.0)
    found = view_of(Dump(sums, steps=[sums]), DaroSection())
    assert (float(found.right_length[1]), float(found.wrong_length[1]), float(found.wrong_length[0])) == (
        10.0,
        10.0,
        2.0,
    )
    assert found.wasted_tokens == 8.0 and found.groups.tolist() == [1, 2, 0, 0, 0]
    std = (0.25 * 0.75) ** 0.5
    losses, sizes = token_loss_sums(sums)
    assert losses.tolist() == pytest.approx([0, (0.25 * 60 - 0.75 * 20) / std, 0, 0, 0])
    assert sizes.tolist() == pytest.approx([0, (0.25 * 60 + 0.75 * 20) / std, 0, 0, 0])
    assert all(share.tolist() == pytest.approx([0, 1, 0, 0, 0]) for share in found.shares.values())
    both = BinSums(K)
    both += sums
    both += sums
    assert both.tokens.tolist() == (2 * sums.tokens).tolist() and both.groups.tolist() == [2, 4, 0, 0, 0]
