"""Terminal progress: the live panel at several widths, the plain lines, and hostile or missing input."""

from __future__ import annotations

import io
import logging
import math
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from synthetic_run import HOSTILE_TEXTS, write_synthetic_run

from megatron_daro.observe import Phases, Progress, read_metrics
from megatron_daro.observe.progress import ProgressState, ProgressView, _time_bar, sparkline


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    run = write_synthetic_run(tmp_path_factory.mktemp("run"), steps=30, with_rollouts=False)
    return [r for r in read_metrics(run) if r["step"] > 0]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _progress(width=80, *, terminal=True, encoding="utf-8", **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=file, width=width, height=24, force_terminal=terminal, color_system=None, _environ={})
    progress = Progress(total_steps=200, rollouts_per_prompt=8, console=console, **options)
    return progress, lambda: raw.getvalue().decode(encoding)


def _panel(progress, width):
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True, _environ={})
    console.print(ProgressView(progress._state))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_panel_fits_its_width_and_a_small_screen(rows, width):
    progress, _ = _progress(width, title="runs/quickstart")
    for row in rows:
        progress.step(int(row["step"]), row)
    lines = _panel(progress, width)
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) <= (16 if width < 80 else 13)


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_says_what_a_person_looks_for(rows, width):
    phases = Phases()
    progress, _ = _progress(width, phases=phases)
    for row in rows:
        progress.step(int(row["step"]), row)
    with phases.measure("rollout"):
        text = "\n".join(_panel(progress, width))
    last = rows[-1]
    assert "30/200" in text and "ETA" in text and "now: rollout" in text
    for key in ("accuracy/mean", "reward/mean", "policy/entropy"):
        assert f"{last[key]:.3f}" in text, key
    for word in ("accuracy", "loss", "grad norm", "length", "pass rate", "weights", "train 1", "sync 80 ms"):
        assert word in text, word


def test_weights_are_drawn_by_bin(rows):
    progress, _ = _progress()
    weights = {f"difficulty/weight/{k}": w for k, w in enumerate([1, 0.1, 0.2, 0.5, 1, 2, 5, 10, 1])}
    progress.step(1, weights)
    line = next(x for x in _panel(progress, 80) if "weights" in x)
    bars = [c for c in line if c in "▁▂▃▄▅▆▇█"]
    assert len(bars) == 7, "bins 1 to 7; 0 and 8 carry no signal"
    assert bars == sorted(bars) and bars[0] == "▁" and bars[-1] == "█"
    assert "0.10..10.00" in line


def test_the_pass_rate_histogram_follows_the_counts():
    progress, _ = _progress()
    progress.step(1, {f"difficulty/groups/{k}": n for k, n in enumerate([8, 0, 1, 2, 4, 6, 7, 3, 5])})
    line = next(x for x in _panel(progress, 80) if "pass rate" in x)
    assert "0 █ ▁▂▄▆▇▃▅ 1" in line
    assert "36 groups, 13 all or none right" in line


def test_many_bins_still_fit():
    progress, _ = _progress()
    progress._state.rollouts_per_prompt = 128
    progress.step(1, {f"difficulty/{f}/{k}": 1.0 + k for f in ("groups", "weight") for k in range(129)})
    lines = _panel(progress, 80)
    assert {cell_len(line) for line in lines} == {80}
    assert "8,385 groups" in "\n".join(lines)


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


def test_eta_counts_only_the_steps_of_this_process():
    clock = Clock()
    progress, _ = _progress(start_step=100, clock=clock)
    for step in range(101, 111):
        clock.now += 3
        progress.step(step, {})
    assert progress._state.step_s == 3
    assert progress._state.eta_s == 90 * 3
    assert "ETA 4:30" in "\n".join(_panel(progress, 80))


def test_the_accuracy_of_each_step_that_has_one_is_kept_for_the_curve():
    progress, _ = _progress()
    for step, metrics in enumerate([{"accuracy/mean": 0.25}, {}, {"accuracy/mean": math.nan}, {"accuracy/mean": 0.5}]):
        progress.step(step + 1, metrics)
    assert list(progress._state.accuracy) == [0.25, 0.5]


def test_the_first_step_does_not_count_the_time_that_processes_took_to_start():
    clock = Clock()
    progress, _ = _progress(clock=clock)
    clock.now += 60
    progress.step(1, {"timing/step_s": 2.0})
    assert progress._state.step_s == 2


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


def test_messages_stand_above_the_panel():
    progress, output = _progress()
    with progress:
        progress.notice("checkpoint saved")
        progress.step(1, {"accuracy/mean": 0.25})
    text = output()
    assert text.index("checkpoint saved") < text.rindex("0.250")


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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_sparkline_has_one_block_per_value_in_their_order(values):
    blocks = "▁▂▃▄▅▆▇█"
    drawn = [blocks.index(c) for c in sparkline(values)]
    assert len(drawn) == len(values)
    ordered = [d for _, d in sorted(zip(values, drawn, strict=True))]
    assert ordered == sorted(ordered)


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
    warning = (
        "warning: stdout cannot be written (its reader is gone); the run goes on, its numbers are in metrics.jsonl"
    )
    assert capsys.readouterr().err.splitlines() == [warning]


@pytest.mark.parametrize(("term", "mode"), [("dumb", "plain"), ("unknown", "plain"), ("xterm", "live")])
def test_a_terminal_that_cannot_draw_gets_a_line_a_step(monkeypatch, term, mode):
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), force_terminal=True)
    assert Progress(total_steps=3, rollouts_per_prompt=4, console=console).mode == mode


def test_a_step_without_times_is_shown_as_unknown():
    state = ProgressState(2, 4, 0, "run", lambda: 0.0, tuple)
    state.metrics = {"timing/step_s": 3.0}
    assert _time_bar(state, 20, ascii_only=False).plain == "-"
    state.metrics = {"timing/train_s": 3.0, "timing/sync_s": 1.0}
    assert _time_bar(state, 20, ascii_only=True).plain == "1" * 15 + "2" * 5
