"""`megatron-daro analyze`: each cell of its tables, and what its options become."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megatron_daro.cli import main
from megatron_daro.commands import analyze
from megatron_daro.workshop.analyze import rows as reading
from megatron_daro.workshop.analyze import views
from megatron_daro.workshop.report.conversations import TurnSums

VIEW = SimpleNamespace(
    groups=torch.tensor([1.0, 2.0, 3.0, 0.0]),
    tokens=torch.tensor([10.0, 200.0, 0.0, 40.0]),
    right_length=torch.tensor([math.nan, 5.4, 6.0, 7.0]),
    wrong_length=torch.tensor([8.0, 9.0, math.nan, math.nan]),
    loss=torch.tensor([9.0, 0.1234, 0.5, 9.0]),
    weight_learnt=torch.tensor([9.0, 1.5, 2.5, 9.0]),
    weight_rest=torch.tensor([9.0, 0.75, 2.5, 9.0]),
    shares={"grpo": torch.tensor([0.9, 0.25, 0.75, 0.9]), "daro": torch.tensor([0.9, 0.5, 0.123, 0.9])},
    wasted_tokens=50.0,
)


def dump(**changes):
    fields = {"rollouts": 20, "steps": [1, 2], "incomplete": 3, "unverified": 4, "unreadable": 5, "turns": []}
    fields |= {"total": SimpleNamespace(rollouts_per_prompt=3), "reflection": []}
    return SimpleNamespace(**{**fields, **changes})


def printed(call, *given) -> list[str]:
    console = Console(width=200, highlight=False, record=True, file=io.StringIO())
    call(console, *given)
    return console.export_text().splitlines()


def cells(lines) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in lines
        if line[:1] in "│┃" and line
    ]


def test_the_tables_have_a_row_for_each_pass_rate():
    lines = printed(analyze._print, dump(), VIEW, "tokens", 100.0)
    assert lines[0] == (
        "20 rollouts in 2 files, 6 whole groups of 3; left out: 3 incomplete groups, 4 rollouts without a verdict, 5 "
        "records without a length"
    )
    assert cells(lines) == [
        ["pass rate", "groups", "tokens", "right", "wrong", "loss", "weight learnt", "at rest"],
        ["0/3", "1", "10", "", "8", "", "", ""],
        ["1/3", "2", "200", "5", "9", "0.123", "1.500", "0.750"],
        ["2/3", "3", "0", "6", "", "", "", ""],
        ["3/3", "0", "40", "7", "", "", "", ""],
        ["pass rate", "grpo", "daro"],
        ["1/3", "25.0 %", "50.0 %"],
        ["2/3", "75.0 %", "12.3 %"],
    ]
    words = [line for line in lines if line and line[0].isalpha()]
    assert words == [
        "right, wrong: mean length in tokens; loss: L_k of a first update; weights: DARO's, per difficulty",
        "Share of the gradient's mass per pass rate",
    ]
    assert lines[-1] == "50 tokens (20.0 %, 0.5 GPU-hours) went into groups without signal (0/3, 3/3)"


def test_without_a_speed_there_is_no_cost_and_without_tokens_no_part():
    empty = SimpleNamespace(**{**vars(VIEW), "tokens": torch.zeros(4), "wasted_tokens": 0.0})
    last = printed(analyze._print, dump(), empty, "characters", None)[-1]
    assert last == "0 characters (0.0 %) went into groups without signal (0/3, 3/3)"


def test_conversations_have_a_table_of_turns():
    lines = printed(analyze._print, dump(turns=[TurnSums(2, 0, 10, 2, 0, 0.5, 1.0)] * 2), VIEW, "tokens", None)
    at = lines.index("Means per turn; lengths above are of generated tokens")
    assert lines[at - 1] == "" and len(cells(lines[at:])) == 3 and cells(lines[at:])[1][0] == "1"
    assert not any("Means per turn" in line for line in printed(analyze._print_turns, dump()))


def test_reflection_has_a_row_for_each_file():
    some = SimpleNamespace(reflecting=1, other=3, share=0.25, accuracy_with=0.5, accuracy_without=None)
    none = SimpleNamespace(reflecting=0, other=2, share=0.0, accuracy_with=None, accuracy_without=0.125)
    lines = printed(analyze._print_reflection, dump(reflection=[some, none]), ["a", "b"])
    assert cells(lines) == [
        ["file", "answers", "reflecting", "accuracy of these", "of the others"],
        ["a", "4", "25.0%", "50.0%", ""],
        ["b", "2", "0.0%", "", "12.5%"],
    ]
    assert lines[:2] == ["", "Answers with a word of self-reflection (recheck, reconsider, think again, ...)"]
    with pytest.raises(ValueError, match="longer than"):
        printed(analyze._print_reflection, dump(reflection=[some, none]), ["a"])


@pytest.fixture
def read(monkeypatch):
    """What is read and shown, in place of files."""
    calls = {}
    columns = SimpleNamespace(unit="tokens")
    opened = [(columns, iter("ab")), (columns, iter("cd"))]
    monkeypatch.setattr(reading, "files_of", lambda path: [path / "x", path / "y"])
    monkeypatch.setattr(reading, "open_dump", lambda *given: calls.update(opened=given) or iter(opened))
    monkeypatch.setattr(views, "infer_rollouts_per_prompt", lambda rows: calls.update(probe=list(rows)) or 4)
    monkeypatch.setattr(
        views, "read_dump", lambda files, k: calls.update(files=[list(rows) for rows in files], k=k) or "dump"
    )
    monkeypatch.setattr(views, "view_of", lambda recorded, daro: calls.update(daro=daro) or "view")
    monkeypatch.setattr(analyze, "_print", lambda console, *given: calls.update(console=console, shown=given))
    monkeypatch.setattr(analyze, "_print_reflection", lambda console, *given: calls.update(reflection=given))
    calls["unit"] = columns
    return calls


def test_a_group_is_as_large_as_the_first_file_says(read, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["analyze", str(tmp_path)]) == 0
    assert read["opened"] == ([tmp_path / "x", tmp_path / "y"], {}, None, None, False)
    assert read["probe"] == ["a", "b"] and read["files"] == [["a", "b"], ["c", "d"]] and read["k"] == 4
    assert read["shown"] == ("dump", "view", "tokens", None) and "reflection" not in read
    assert read["console"].width == 150 and read["daro"].magnitude == "abs"


def test_options_reach_the_reader(read, tmp_path):
    options = ["--columns", "group=q,length=len(x=y),nothing", "--reward-key", "acc", "--correct-above", "0.5"]
    more = ["--rollouts-per-prompt", "8", "--daro", "magnitude=token scale=mean", "--tokens-per-gpu-hour", "5"]
    assert main(["analyze", str(tmp_path), *options, *more, "--reflection"]) == 0
    assert read["opened"][1:] == ({"group": "q", "length": "len(x=y)"}, 0.5, "acc", True)
    assert read["k"] == 8 and "probe" not in read and read["shown"][3] == 5.0
    assert (read["daro"].magnitude, read["daro"].scale) == ("token", "mean")
    assert read["reflection"] == ("dump", ["x", "y"])


def test_a_cost_needs_lengths_in_tokens(read, tmp_path, capsys):
    read["unit"].unit = "characters"
    assert main(["analyze", str(tmp_path), "--tokens-per-gpu-hour", "5"]) == 2
    assert "got 5 for a dump with lengths in characters; allowed with lengths in tokens" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path)]) == 0 and read["shown"][2] == "characters"


def test_a_page_is_written_where_one_says(read, tmp_path, monkeypatch, capsys):
    from megatron_daro.workshop.analyze import page
    from megatron_daro.workshop.report import page as writing

    monkeypatch.setattr(page, "analysis_page", lambda *given: given)
    written = []
    monkeypatch.setattr(writing, "write_page", lambda *given, **named: written.append((given, named)))
    assert main(["analyze", str(tmp_path), "--html", "p.html", "--tokens-per-gpu-hour", "5"]) == 0
    given = (tmp_path, "dump", "view", "tokens", 5.0)
    assert written == [((given, Path("p.html")), {"what": "page", "option": "--html"})]
    assert capsys.readouterr().out == "p.html\n"
