"""Each row of the panel and the plain line, word for word; the bounds at which their form changes."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from megatron_daro.observe import progress
from megatron_daro.observe.progress import Progress, ProgressState, plain_line, sparkline


def state_of(
    metrics: dict[str, float | None], *, k: int = 4, step: int = 3, active: tuple[str, ...] = ()
) -> ProgressState:
    now = iter([0.0, 10.0, *[14.0] * 9])
    state = ProgressState(10, k, 2, "title", lambda: next(now), lambda: active)
    state.add(step, metrics)
    return state


def test_the_clock_row():
    row = progress._clock_row(state_of({}, active=("sync", "train")))
    assert row.plain == "3/10   elapsed 0:14   ETA 1:10   now: sync, train"
    assert progress._clock_row(state_of({}, step=12)).plain == "12/10   elapsed 0:14   ETA 0:00"


def test_the_rows_of_numbers():
    assert (
        progress._loss_row(state_of({"loss/total": 2.0, "loss/grad_norm": 0.5})).plain
        == "2.000  grad norm 0.500  entropy -"
    )
    both = {"loss/policy": 1.0, "loss/total": 2.0, "policy/entropy": 3.0}
    assert progress._loss_row(state_of(both)).plain == "1.000  grad norm -  entropy 3.000"
    row = progress._length_row(state_of({"response/length_mean": 1234.4, "reward/mean": 1.0}))
    assert row.plain == "1,234 tokens  reward 1.000"
    for cut, style in ((0.1, "dim"), (0.11, "yellow")):
        row = progress._length_row(state_of({"response/truncated_fraction": cut}))
        assert row.plain == f"-  {cut:.0%} cut off  reward -" and row.spans[0].style == style


@pytest.mark.parametrize(("width", "drawn"), [(200, 40), (50, 16), (36, 2), (20, 0)])
def test_the_accuracy_row_has_as_much_history_as_fits(width, drawn):
    state = state_of({"accuracy/mean": 0.25})
    state.accuracy.extend(i / 100 for i in range(60))
    row = progress._accuracy_row(state, width, progress._BLOCKS).plain
    assert sum(c in progress._BLOCKS for c in row) == drawn and row.startswith("0.250")
    assert drawn == 0 or row.endswith(f"  0.{60 - drawn:02d}0..0.590")


def test_the_pass_rate_row():
    groups = {f"difficulty/groups/{i}": n for i, n in enumerate((2, 0, 4, 8, 1)) if n}
    row = progress._pass_rate_row(state_of(groups), 100, progress._BLOCKS)
    assert row.plain == "0 ▂ ▄█▁ 1  15 groups, 3 all or none right"
    assert progress._pass_rate_row(state_of({}), 100, progress._BLOCKS).plain == "-"
    assert progress._pass_rate_row(state_of(groups), 20, progress._BLOCKS).plain.startswith("0 ▂▄█ 1")
    none = {f"difficulty/groups/{i}": 0 for i in range(5)}
    assert progress._pass_rate_row(state_of(none), 100, progress._BLOCKS).plain.startswith("0       1  0 groups")


def test_the_weights_row_is_logarithmic_over_a_factor_of_two_at_least():
    def row(*weights: float, **more: float) -> str:
        named = {f"difficulty/weight/{i}": w for i, w in enumerate(weights, 1)}
        return progress._weights_row(state_of(named | more, k=len(weights) + 1), 100, progress._BLOCKS).plain

    assert row(1.0, 1.0) == "  ▄▄    1.00..1.00" and row(0.5, 1.0, 2.0) == "  ▁▄█    0.50..2.00"
    assert row(1.0, 1.2) == "  ▃▆    1.00..1.20" and row(0.0, 1.0) == "  ▁█    0.00..1.00"
    clamped = {"difficulty/clamped": 2.0}
    assert row(1.0, 1.0, **clamped).endswith("1.00  2 at a clamp")
    assert progress._weights_row(state_of({}), 100, progress._BLOCKS).plain == "-"
    many = {f"difficulty/weight/{i}": float(i) for i in range(1, 9)}
    narrow = progress._weights_row(state_of(many, k=9), 40, progress._BLOCKS).plain
    assert sum(c in progress._BLOCKS for c in narrow) == 4 and narrow.endswith("1.00..8.00")


TIMES = {
    "timing/a_s": 1.0,
    "timing/b_s": 3.0,
    "timing/c_s": 0.0,
    "timing/d_s": 0.05,
    "timing/step_s": 9.0,
    "timing/x": 5.0,
}
TIMES |= {"timing/forward_backward_s": 2.0, "other_s": 4.0}


def test_the_rows_of_times():
    state = state_of(TIMES)
    assert state.phase_times() == [("b", 3.0), ("a", 1.0), ("d", 0.05)]
    bar = progress._time_bar(state, 40, True)
    assert bar.plain == "1" * 30 + "2" * 10 and progress._time_bar(state, 40, False).plain == "█" * 40
    assert [span.style for span in bar.spans] == ["cyan", "magenta"]
    assert progress._time_legend(state, 40).plain == "b 3.0 s  a 1.0 s  d 50 ms"
    assert progress._time_legend(state, 16).plain == "b 3.0 s  a 1.0 s\nd 50 ms"
    assert progress._time_legend(state, 15).plain == "b 3.0 s\na 1.0 s\nd 50 ms"
    assert (
        progress._time_bar(state_of({}), 40, True).plain == "-" and progress._time_legend(state_of({}), 40).plain == ""
    )
    assert progress._phase_style(8) == progress._phase_style(0)
    ten = state_of({f"timing/p{i}_s": 1.0 for i in range(11)})
    assert progress._time_bar(ten, 11, True).plain == "12345678901"


def test_the_plain_line():
    metrics = {
        "accuracy/mean": 0.5,
        "reward/mean": 1.0,
        "loss/total": 2.0,
        "loss/grad_norm": 3.0,
        "response/length_mean": 4.0,
    }
    assert plain_line(state_of(metrics)) == (
        "step 3/10  accuracy 0.500  reward 1.000  loss 2.000  grad_norm 3.000  length 4.000  step_s 10.000  eta 1:10"
    )
    weights = {
        "difficulty/weight/0": 9.0,
        "difficulty/weight/1": 1.0,
        "difficulty/weight/3": 2.0,
        "difficulty/weight/4": 9.0,
    }
    assert "  weights 1.00..2.00  step_s" in plain_line(state_of(weights | {"loss/policy": 7.0}))


def test_time_to_go_is_from_the_median_of_the_last_twenty_steps():
    now = [0.0]
    state = ProgressState(100, 4, 0, "", lambda: now[0], tuple)
    assert state.step_s is None and state.eta_s is None
    for step in range(1, 26):
        now[0] += 100.0 if step <= 5 else 2.0 if step % 2 else 4.0
        state.add(step, {"accuracy/mean": step / 100})
    assert len(state.step_ends) == 21 and state.step_s == 3.0 and state.eta_s == 225.0 and state.elapsed_s == now[0]
    for step in range(26, 600):
        state.add(step, {"accuracy/mean": 0.5})
    assert len(state.accuracy) == 512 and state.accuracy.maxlen == 512


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (1000.0, "1,000"), (999.94, "999.9"), (-1234.5, "-1,234"), (100.0, "100.0"), (99.9, "99.900"),
        (0.01, "0.010"), (0.0099, "9.90e-03"), (0.0, "0.000"), (-0.001, "-1.00e-03"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert progress._number(value) == text


def test_times_are_short():
    assert (progress._seconds(0.1), progress._seconds(0.0999)) == ("0.1 s", "100 ms")
    assert [progress._duration(s) for s in (None, 0.4, 59.6, 3599, 3600, 7325)] == [
        "-", "0:00", "1:00", "59:59", "1:00:00", "2:02:05",
    ]  # fmt: skip


def test_blocks_follow_the_values():
    assert sparkline([1.0, 1.0]) == "▅▅" and sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert progress._bars([0.0, 0.01, 0.125, 0.126, 1.0, 2.0, -1.0], 1.0, progress._BLOCKS) == " ▁▁▂██ "
    assert progress._merge([1, 2, 3], 3, sum) == [1, 2, 3] and progress._merge([1, 2, 3, 4, 5], 2, sum) == [3, 12]


@pytest.mark.parametrize(("width", "lines"), [(80, 11), (5, 11)])
def test_the_panel_has_a_title_and_a_bar(width, lines):
    state = state_of(TIMES)
    state.title = ""
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    console.print(progress.ProgressView(state))
    drawn = console.export_text()
    assert width < 80 or ("megatron-daro" in drawn and "━" in drawn and "pass rate" in drawn)
    assert drawn.count("\n") >= lines


class Recorded:
    """A console that is no terminal, and what was written to it."""

    def __init__(self, **options: object) -> None:
        self.console = Console(record=True, file=io.StringIO(), **options)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        return self.console.export_text(clear=False)


def test_a_message_is_marked_as_a_warning_and_kept_short():
    recorded = Recorded(width=40)
    shown = Progress(total_steps=1, rollouts_per_prompt=4, mode="plain", console=recorded.console)
    shown.notice("a\nb")
    shown.warn("x" * 4001)
    assert recorded.text == f"a\nb\nwarning: {'x' * 4000}… (+1 characters)\n"
    assert shown.width == 160
    terminal = Recorded(width=77, force_terminal=True)
    assert Progress(total_steps=1, rollouts_per_prompt=4, mode="plain", console=terminal.console).width == 77


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_steps_and_messages_go_to_the_runs_log_where_there_is_one(caplog, mode):
    recorded, handler = Recorded(width=300), logging.NullHandler()
    shown = Progress(total_steps=5, rollouts_per_prompt=4, mode=mode, console=recorded.console, start_step=2)
    logger = logging.getLogger("megatron_daro")
    with caplog.at_level(logging.INFO, logger="megatron_daro"):
        shown.step(3, {"accuracy/mean": 0.5})
        shown.notice("first")
        assert [record.getMessage() for record in caplog.records] == (["first"] if mode == "off" else [])
        caplog.clear()
        logger.addHandler(handler)
        try:
            shown.step(4, {"accuracy/mean": 0.5})
            shown.warn("second")
        finally:
            logger.removeHandler(handler)
        assert [(r.levelno, r.getMessage()[:12]) for r in caplog.records] == [(20, "step 4/5  ac"), (30, "second")]
    assert recorded.text.count("step ") == 2 * (mode == "plain")


def test_drawing_starts_once_and_ends_once():
    recorded = Recorded(width=80, force_terminal=True)
    with Progress(total_steps=1, rollouts_per_prompt=4, mode="live", console=recorded.console) as shown:
        live = shown._live
        assert live is not None and shown.start() is shown and shown._live is live and live.is_started
        assert live.refresh_per_second == 4 and not live.transient
        shown.step(1, {"accuracy/mean": 0.125})
    assert shown._live is None and not live.is_started and "0.125" in recorded.text
    shown.stop()
    plain = Progress(total_steps=1, rollouts_per_prompt=4, mode="plain", console=recorded.console).start()
    assert plain._live is None


def test_what_the_terminal_cannot_write_becomes_a_code(tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        console = Console(file=file, width=80)
        shown = Progress(total_steps=1, rollouts_per_prompt=4, mode="plain", title="é\n", console=console)
        shown.notice("漢")
        assert shown._state.title == "\\xe9\\n"
    assert (tmp_path / "out").read_text() == "\\u6f22\n"


PANEL = """\
╭─ title ──────────────────────────────────────────────────╮
│ ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ │
│ step      3/10   elapsed 0:14   ETA 1:10                 │
│ accuracy  0.500                                          │
│ loss      2.000  grad norm -  entropy -                  │
│ length    -  reward -                                    │
│ pass rate -                                              │
│ weights   -                                              │
│ time      ██████████████████████████████████████████████ │
│           a 1.0 s                                        │
╰──────────────────────────────────────────────────────────╯
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_panel_line_by_line(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(width=60, force_terminal=True, file=file, record=True)
    console.print(progress.ProgressView(state_of({"accuracy/mean": 0.5, "loss/total": 2.0, "timing/a_s": 1.0})))
    drawn = console.export_text()
    if encoding == "ascii":
        assert drawn.isascii() and "| time      " + "1" * 46 + " |" in drawn and drawn.startswith("+- title --")
        assert drawn.count("\n") == PANEL.count("\n")
    else:
        assert drawn == PANEL


def test_a_row_that_is_too_wide_ends_in_an_ellipsis():
    console = Console(width=40, force_terminal=True, file=io.StringIO(), record=True)
    console.print(progress.ProgressView(state_of({}, active=("a long phase", "another"))))
    (row,) = (line for line in console.export_text().splitlines() if "step" in line)
    assert row == "│ step      3/10   elapsed 0:14   ETA… │"
