"""Terminal progress: the live panel at several widths, the plain lines, and hostile or missing input."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic_run import HOSTILE_TEXTS, write_synthetic_run

from megatron_daro.observe import Phases, Progress, read_metrics


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    run = write_synthetic_run(tmp_path_factory.mktemp("run"), steps=30, with_rollouts=False)
    return [r for r in read_metrics(run) if r["step"] > 0]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _progress(width=80, *, terminal=True, encoding="utf-8", rollouts_per_prompt=8, **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=file, width=width, height=24, force_terminal=terminal, color_system=None, _environ={})
    progress = Progress(total_steps=200, rollouts_per_prompt=rollouts_per_prompt, console=console, **options)
    return progress, lambda: raw.getvalue().decode(encoding)


def _screen(output: str) -> str:
    """What was drawn, without the codes of the terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_its_terminal(rows, width):
    progress, output = _progress(width, title="runs/quickstart")
    with progress:
        for row in rows:
            progress.step(int(row["step"]), row)
    assert max(cell_len(line) for line in re.split(r"[\r\n]+", _screen(output()))) <= width


def test_the_panel_has_the_numbers_of_the_last_step_and_what_runs_now(rows):
    phases, last = Phases(), rows[-1]
    progress, output = _progress(phases=phases)
    with progress, phases.measure("rollout"):
        for row in rows:
            progress.step(int(row["step"]), row)
    text = _screen(output())
    facts = ["30/200", "now: rollout", *(f"{last[key]:.3f}" for key in ("accuracy/mean", "reward/mean"))]
    assert [fact for fact in facts if fact not in text] == []


def test_many_rollouts_of_a_prompt_still_fit():
    progress, output = _progress(rollouts_per_prompt=128)
    with progress:
        progress.step(1, {f"difficulty/{f}/{k}": 1.0 + k for f in ("groups", "weight") for k in range(129)})
    assert max(cell_len(line) for line in re.split(r"[\r\n]+", _screen(output()))) <= 80


def test_plain_mode_prints_one_line_per_step_without_escapes(rows):
    progress, output = _progress(40, terminal=False)
    assert progress.mode == "plain"
    with progress:
        for row in rows[:3]:
            progress.step(int(row["step"]), row)
    lines = output().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/200", "step 2/200", "step 3/200"]
    assert f"accuracy {rows[1]['accuracy/mean']:.3f}" in lines[1]
    assert "\x1b" not in output() and output().isascii()


def test_time_to_go_counts_only_the_steps_of_this_process_and_not_its_start():
    clock = Clock()
    progress, output = _progress(terminal=False, clock=clock)
    progress.resume(100)
    clock.now += 60
    with progress:
        for step in range(101, 111):
            clock.now += 3
            progress.step(step, {"timing/step_s": 3.0})
    assert all("step_s 3.000" in line for line in output().splitlines()) and "eta 4:30" in output().splitlines()[-1]


def test_a_long_message_is_cut_and_says_so():
    progress, output = _progress(terminal=False)
    progress.warn("x" * 4007)
    assert "x" * 4000 in output() and "x" * 4001 not in output() and "+7 characters" in output()


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"accuracy/mean": None},
        {"accuracy/mean": math.nan, "timing/train_s": math.inf},
        {"difficulty/weight/3": 0.0},
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_missing_null_and_nan_metrics_are_drawn_as_missing(metrics, terminal):
    progress, output = _progress(terminal=terminal)
    with progress:
        progress.step(1, metrics)
        progress.step(2, metrics)
    assert "2/200" in output()
    assert "nan" not in output().lower()


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_text_neither_acts_on_the_terminal_nor_is_read_as_markup(text, terminal):
    quiet, quiet_output = _progress(200, terminal=terminal)
    with quiet:
        quiet.notice("hello")
        quiet.warn("hello")
    progress, output = _progress(200, terminal=terminal, title=text)
    with progress:
        progress.notice(text)
        progress.warn(text)
    allowed = {c for c in quiet_output() if ord(c) < 32}
    assert {c for c in output() if ord(c) < 32 or c in "\u202e\u2028"} <= allowed
    assert "\x1b[2J" not in output() and "\x1b]" not in output() and "\x1b[31m" not in output()
    if "[red]" in text:
        assert "[red]not red[/red]" in output()


def test_off_prints_nothing_and_hands_messages_to_logging(caplog):
    progress, output = _progress(mode="off")
    with caplog.at_level(logging.INFO, "megatron_daro"), progress:
        progress.step(1, {"accuracy/mean": 0.5})
        progress.notice("noted")
        progress.warn("a\x1b[31mb")
    assert output() == ""
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "noted"), ("WARNING", "a\\x1b[31mb")]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_without_unicode_is_served_in_ascii(rows, terminal):
    progress, output = _progress(terminal=terminal, encoding="ascii", title="läuft")
    with progress:
        progress.warn("größer → ∞")
        for row in rows:
            progress.step(int(row["step"]), row)
    assert "gr\\xf6\\xdfer" in output()
    assert "30/200" in output()


def test_stop_gives_the_terminal_back_when_the_run_fails():
    progress, output = _progress()
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    assert "\x1b[?25h" in output(), "the cursor is shown again"


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_reader_that_goes_away_does_not_end_the_run(monkeypatch, capsys, mode):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with Progress(total_steps=3, rollouts_per_prompt=4, mode=mode) as progress:
            progress.notice("one")
            progress.step(1, {"reward/mean": 0.5})
            progress.warn("two")
    (warning,) = capsys.readouterr().err.splitlines()
    assert "stdout" in warning and "metrics.jsonl" in warning


@pytest.mark.parametrize(("term", "mode"), [("dumb", "plain"), ("unknown", "plain"), ("xterm", "live")])
def test_a_terminal_that_cannot_draw_gets_a_line_a_step(monkeypatch, term, mode):
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), force_terminal=True)
    assert Progress(total_steps=3, rollouts_per_prompt=4, console=console).mode == mode
