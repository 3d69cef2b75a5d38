"""The table before and after, and the script's checks of its arguments."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import summary

ROOT = Path(__file__).resolve().parents[3]


def write_run(directory: Path, *lines: dict) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def evaluation(step: int, **accuracies: float) -> dict:
    return {"step": step} | {f"eval/sums/accuracy{key}": value for key, value in accuracies.items()}


def test_first_and_last_evaluation_are_compared(tmp_path, capsys):
    run = write_run(
        tmp_path / "run",
        {"step": 0, "eval/sums/accuracy": 0.25, "eval/sums/accuracy/digits_1": 0.5, "eval/[b]x/accuracy": 0.1}
        | {"eval/sums/tool_calls_mean": 0.5, "eval/sums/turns_mean": 1.5},
        {"step": 1, "loss/policy": 1.0},
        {"step": 2, "eval/sums/accuracy": 0.3, "eval/sums/accuracy/digits_1": 0.9},
        {"step": 4, "eval/sums/accuracy": 0.75, "eval/sums/accuracy/digits_1": 1.0, "eval/[b]x/accuracy": 0.2}
        | {"eval/sums/tool_calls_mean": 1.25, "eval/sums/turns_mean": 2.25},
    )
    assert summary.main([str(run)]) == 0
    out = capsys.readouterr().out
    rows = [re.findall(r"[+-]?\d\.\d{3}", line) for line in out.splitlines()]
    assert [row for row in rows if row] == [
        ["0.100", "0.200", "+0.100"],
        ["0.500", "1.000", "+0.500"],
        ["0.250", "0.750", "+0.500"],
        ["0.500", "1.250", "+0.750"],
    ]
    assert "[b]x" in out and "digits_1" in out


def test_a_run_without_two_evaluations_says_so(tmp_path, capsys):
    run = write_run(tmp_path / "run", {"step": 0, "eval/sums/accuracy": 0.25}, {"step": 1})
    assert summary.main([str(run)]) == 0
    assert "1 evaluations" in capsys.readouterr().out


def test_a_missing_or_torn_file_is_an_error(tmp_path, capsys):
    assert summary.main([str(tmp_path / "nothing")]) == 1
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 0')
    assert summary.main([str(run)]) == 1
    errors = capsys.readouterr().err
    assert str(tmp_path / "nothing") in errors and str(run) in errors


def test_the_script_explains_itself_and_refuses_options_of_its_own():
    script = ROOT / "examples/quickstart/run.sh"
    shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, timeout=60, cwd="/")
    assert shown.returncode == 0 and "trainer.steps=5" in shown.stdout
    refused = subprocess.run(["bash", str(script), "--resume"], capture_output=True, text=True, timeout=60, cwd="/")
    assert refused.returncode == 2 and "--resume" in refused.stderr
