"""What a person sees before the first step, and what Ctrl-C leaves on the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_daro.observe import Progress


def shown(progress: Progress, file: io.StringIO) -> str:
    file.seek(0)
    file.truncate()
    with progress:
        pass
    return file.getvalue()


@pytest.fixture
def live():
    """A panel on a terminal of 100 columns, the time that it sees, and its text as it is now."""
    now, file = [0.0], io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None, _environ={})
    progress = Progress(total_steps=20, rollouts_per_prompt=8, mode="live", console=console, clock=lambda: now[0])
    return progress, now, lambda: shown(progress, file)


def test_the_panel_names_what_the_start_waits_for(live):
    progress, now, panel = live
    progress.stage("start", "starting Ray")
    now[0] = 65
    assert "0/20   elapsed 1:05   now: starting Ray" in panel() and "ETA" not in panel()
    progress.stage("start")
    progress.stage("ranks", "ranks load")
    progress.stage("engine", "server 1 of 2 loads")
    assert "now: ranks load, server 1 of 2 loads" in panel()
    progress.step(1, {"timing/step_s": 2.0})
    assert "1/20   elapsed 1:05   ETA 0:38" in panel() and "now:" not in panel(), "the first step ends every stage"


def test_a_resumed_run_is_shown_where_it_goes_on(live):
    progress, _, panel = live
    progress.resume(20)
    assert "step      20/20" in panel()


def test_without_a_terminal_each_stage_is_a_line():
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, width=80, force_terminal=False)
    progress = Progress(total_steps=20, rollouts_per_prompt=8, console=console, clock=lambda: now[0])
    for text in ("starting Ray", "starting Ray", "starting Ray, second try", ""):
        progress.stage("start", text)
        now[0] += 12
    assert file.getvalue().splitlines() == ["[  0 s] starting Ray", "[ 24 s] starting Ray, second try"]
