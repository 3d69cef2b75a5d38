"""What a person sees in the terminal while a run goes on.

The controller calls `step(step, metrics)` once per optimizer step and `notice`/`warn` for messages. On a terminal a
live panel is drawn (`ProgressView`, by rich); elsewhere (CI, a log file) each step is one plain line. Messages and
steps also go to the run's log. Text may hold model output: control characters are made visible and nothing is read as
markup. Missing metrics are left out, never an error.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_daro.observe.logs import safe_text
from megatron_daro.observe.metrics import Phases

_HISTORY_STEPS = 512
_ETA_STEPS = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.:-=+*#"
_PHASE_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_NO_VALUE = "-"


@dataclass(slots=True)
class ProgressState:
    """What the panel needs to know. `active` names the phases that run now, `stages` what the run waits for before its
    first step."""

    total_steps: int
    rollouts_per_prompt: int
    title: str
    clock: Callable[[], float]
    active: Callable[[], Sequence[str]]
    step: int = 0
    stages: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    accuracy: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY_STEPS))
    started_at: float = field(init=False)
    step_ends: deque[float] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS + 1))

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self.step_ends.append(self.started_at)

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take in one finished step; values that are no finite number count as missing."""
        self.step = step
        self.stages.clear()
        self.metrics = {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)}
        now = self.clock()
        if len(self.step_ends) == 1 and "timing/step_s" in self.metrics:
            self.step_ends[0] = now - self.metrics["timing/step_s"]  # what came before was starting processes
        self.step_ends.append(now)
        if "accuracy/mean" in self.metrics:
            self.accuracy.append(self.metrics["accuracy/mean"])

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process started the run."""
        return self.clock() - self.started_at

    @property
    def step_s(self) -> float | None:
        """Median seconds of the last steps; None before the first step is done."""
        ends = list(self.step_ends)
        return median(b - a for a, b in itertools.pairwise(ends)) if len(ends) > 1 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to go, from the median of the last steps; None before the first step is done."""
        remaining = max(0, self.total_steps - self.step)
        return None if self.step_s is None else remaining * self.step_s

    def by_bin(self, family: str, bins: Sequence[int]) -> list[float | None]:
        """`{family}/{k}` for each bin; None where missing."""
        return [self.metrics.get(f"{family}/{k}") for k in bins]

    def phase_times(self) -> list[tuple[str, float]]:
        """(phase, seconds) of the last step, longest first, without phases that took no time."""
        skipped = {"timing/step_s", "timing/forward_backward_s"}  # the whole, and a part of another phase
        keys = [k for k in self.metrics if k.startswith("timing/") and k.endswith("_s") and k not in skipped]
        times = [(k.removeprefix("timing/").removesuffix("_s"), self.metrics[k]) for k in keys]
        return sorted(((n, t) for n, t in times if t > 0), key=lambda item: -item[1])


class ProgressView:
    """The live panel; draws the state as it is at that moment, in whatever width there is."""

    def __init__(self, state: ProgressState) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = not (console.encoding or "utf-8").lower().startswith("utf")
        width = max(20, options.max_width - 4)
        yield _panel(self._state, width, ascii_only)


def _panel(state: ProgressState, width: int, ascii_only: bool) -> Panel:
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=9, style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
    bar_width = width - 10
    rows = [
        ("step", _clock_row(state)),
        ("accuracy", _accuracy_row(state, bar_width, blocks)),
        ("loss", _loss_row(state)),
        ("length", _length_row(state)),
        ("pass rate", _pass_rate_row(state, bar_width, blocks)),
        ("weights", _weights_row(state, bar_width, blocks)),
    ]
    for name, row in rows:
        grid.add_row(name, row)
    grid.add_row("time", _time_bar(state, bar_width, ascii_only))
    grid.add_row("", _time_legend(state, bar_width))
    title = Text(state.title or "megatron-daro", style="bold")
    outer = Table.grid(expand=True)
    outer.add_row(ProgressBar(total=max(1, state.total_steps), completed=state.step))
    outer.add_row(grid)
    return Panel(outer, title=title, title_align="left", box=box.ASCII if ascii_only else box.ROUNDED, padding=(0, 1))


def _clock_row(state: ProgressState) -> Text:
    row = Text.assemble((f"{state.step}/{state.total_steps}", "bold"))
    row.append(f"   elapsed {_duration(state.elapsed_s)}")
    if state.eta_s is not None:
        row.append(f"   ETA {_duration(state.eta_s)}")
    active = ", ".join(state.stages.values() or state.active())
    if active:
        row.append("   now: ", style="dim").append(active, style="cyan")
    return row


def _accuracy_row(state: ProgressState, width: int, blocks: str) -> Text:
    row = Text.assemble((_number(state.metrics.get("accuracy/mean")), "bold green"))
    recent = list(state.accuracy)[-max(1, min(40, width - 34)) :]
    if len(recent) > 1:
        row.append("  ").append(sparkline(recent, blocks), style="green")
        row.append(f"  {min(recent):.3f}..{max(recent):.3f}", style="dim")
    return row


def _loss_row(state: ProgressState) -> Text:
    m = state.metrics
    row = Text(_number(m.get("loss/policy", m.get("loss/total"))))
    row.append("  grad norm ", style="dim").append(_number(m.get("loss/grad_norm")))
    return row.append("  entropy ", style="dim").append(_number(m.get("policy/entropy")))


def _length_row(state: ProgressState) -> Text:
    m = state.metrics
    length = m.get("response/length_mean")
    row = Text(_NO_VALUE if length is None else f"{length:,.0f} tokens")
    cut = m.get("response/truncated_fraction")
    if cut is not None:
        row.append(f"  {cut:.0%} cut off", style="yellow" if cut > 0.1 else "dim")
    return row.append("  reward ", style="dim").append(_number(m.get("reward/mean")))


def _pass_rate_row(state: ProgressState, width: int, blocks: str) -> Text:
    bins = range(state.rollouts_per_prompt + 1)
    groups = state.by_bin("difficulty/groups", bins)
    if all(g is None for g in groups):
        return Text(_NO_VALUE)
    counts = [g or 0.0 for g in groups]
    total = sum(counts)
    merged = _merge(counts, max(3, width - 32), sum)
    row = (
        Text("0 ", style="dim")
        .append(_bars(merged, max(merged) or 1.0, blocks), style="cyan")
        .append(" 1", style="dim")
    )
    useless = counts[0] + counts[-1]
    return row.append(f"  {total:,.0f} groups, {useless:,.0f} all or none right", style="dim")


def _weights_row(state: ProgressState, width: int, blocks: str) -> Text:
    bins = range(1, state.rollouts_per_prompt)
    weights = [w for w in state.by_bin("difficulty/weight", bins) if w is not None]
    if not weights:
        return Text(_NO_VALUE)
    merged = _merge(weights, max(3, width - 36), lambda part: sum(part) / len(part))
    # Weights are multiplicative, so heights are logarithmic: centred on their own middle, over at least a factor of 2.
    logs = [math.log(max(w, 1e-9)) for w in merged]
    middle = (max(logs) + min(logs)) / 2
    span = max(math.log(2), max(logs) - min(logs))
    heights = [max(1e-6, (x - middle) / span + 0.5) for x in logs]
    row = Text("  ").append(_bars(heights, 1.0, blocks), style="magenta")
    row.append(f"    {min(weights):.2f}..{max(weights):.2f}", style="dim")
    clamped = state.metrics.get("difficulty/clamped", 0.0)
    return row.append(f"  {clamped:.0f} at a clamp", style="yellow") if clamped else row


def _time_bar(state: ProgressState, width: int, ascii_only: bool) -> Text:
    times = state.phase_times()
    total = sum(t for _, t in times)
    row = Text()
    if total <= 0:
        return Text(_NO_VALUE)
    edge = 0.0
    for index, (_, t) in enumerate(times):
        start, edge = edge, edge + t
        cells = round(edge / total * width) - round(start / total * width)
        row.append((f"{index + 1}"[-1] if ascii_only else "█") * cells, style=_phase_style(index))
    return row


def _time_legend(state: ProgressState, width: int) -> Text:
    """Phase names with their times, wrapped between phases only."""
    row = Text()
    used = 0
    for index, (name, t) in enumerate(state.phase_times()):
        entry = f"{name} {_seconds(t)}"
        gap = "" if index == 0 else "  " if used + 2 + len(entry) <= width else "\n"
        used = len(entry) if gap != "  " else used + 2 + len(entry)
        row.append(gap).append(entry, style=_phase_style(index))
    return row


def plain_line(state: ProgressState) -> str:
    """One step as one line of ASCII text, for logs."""
    m = state.metrics
    parts = [
        f"step {state.step}/{state.total_steps}",
        f"accuracy {_number(m.get('accuracy/mean'))}",
        f"reward {_number(m.get('reward/mean'))}",
        f"loss {_number(m.get('loss/policy', m.get('loss/total')))}",
        f"grad_norm {_number(m.get('loss/grad_norm'))}",
        f"length {_number(m.get('response/length_mean'))}",
    ]
    weights = [w for w in state.by_bin("difficulty/weight", range(1, state.rollouts_per_prompt)) if w is not None]
    if weights:
        parts.append(f"weights {min(weights):.2f}..{max(weights):.2f}")
    parts += [f"step_s {_number(state.step_s)}", f"eta {_duration(state.eta_s)}"]
    return "  ".join(parts)


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """One block per value, lowest to highest over their own range; a constant row is drawn at mid height."""
    low, high = min(values), max(values)
    if high - low <= 0:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[round((v - low) / (high - low) * (len(blocks) - 1))] for v in values)


def _bars(values: Sequence[float], top: float, blocks: str) -> str:
    """One block per value from 0 to `top`; zero is a space."""
    last = len(blocks) - 1
    return "".join(" " if v <= 0 else blocks[min(last, math.ceil(v / top * len(blocks)) - 1)] for v in values)


def _merge(values: Sequence[float], most: int, join: Callable[[Sequence[float]], float]) -> list[float]:
    """At most `most` values: neighbours are joined, evenly."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [join(values[a:b]) for a, b in itertools.pairwise(edges)]


def _phase_style(index: int) -> str:
    return _PHASE_STYLES[index % len(_PHASE_STYLES)]


def _number(value: float | None) -> str:
    if value is None:
        return _NO_VALUE
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.01 or size == 0 else f"{value:.2e}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NO_VALUE
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


Mode = Literal["auto", "live", "plain", "off"]
_logger = logging.getLogger("megatron_daro")
_MESSAGE_LIMIT = 4000
_LOG_WIDTH = 160


class _Terminal(Console):
    """A console that may lose its reader (`| head`, a closed terminal): the run goes on without one."""

    def on_broken_pipe(self) -> None:
        """Rich would end the program here."""
        self._go_on_unread("its reader is gone")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a terminal that was closed, a log file on a full disk
            self._go_on_unread(error.strerror or str(error))

    def _go_on_unread(self, why: str) -> None:
        self.quiet = True
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), self.file.fileno())  # what is buffered would fail again at the end
        with suppress(OSError):
            print(
                f"warning: stdout cannot be written ({why}); the run goes on, its numbers are in metrics.jsonl",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def _without_echo_of_ctrl_c() -> Iterator[None]:
    """Keep a terminal from writing `^C` into the panel, which rich would then redraw a line too low."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):  # closed, or no terminal
        yield
        return
    flags = 3
    changed = [*before[:flags], before[flags] & ~termios.ECHOCTL, *before[flags + 1 :]]
    with suppress(termios.error):
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)


class Progress:
    """Live progress of one run; a context manager."""

    def __init__(
        self,
        *,
        total_steps: int,
        rollouts_per_prompt: int,
        mode: Mode = "auto",
        title: str = "",
        phases: Phases | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print nothing until `start` (or `with`).

        Args:
            total_steps: optimizer steps of the whole run.
            rollouts_per_prompt: K, the number of rollouts per prompt.
            mode: "auto" is "live" on a terminal that can draw (TERM not dumb), else "plain"; "off" prints nothing.
            title: the panel's title, such as the run directory.
            phases: asked for the phase that runs now.
            console: where to draw; stdout if None.
            clock: seconds, for elapsed time and ETA.
        """
        self._console = console or _Terminal(highlight=False)
        can_draw = self._console.is_terminal and not self._console.is_dumb_terminal
        self.mode: Mode = ("live" if can_draw else "plain") if mode == "auto" else mode
        title = self._encodable(safe_text(title, 200, one_line=True))
        self._state = ProgressState(
            total_steps=total_steps,
            rollouts_per_prompt=rollouts_per_prompt,
            title=title,
            clock=clock,
            active=phases.active if phases else tuple,
        )
        self._live: Live | None = None
        self._terminal = ExitStack()

    def start(self) -> Progress:
        """Start drawing; a second call does nothing."""
        if self.mode == "live" and self._live is None:
            view = ProgressView(self._state)
            self._terminal.enter_context(_without_echo_of_ctrl_c())
            self._live = Live(view, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def stop(self) -> None:
        """Leaves the last panel on the screen and gives the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._terminal.close()

    def resume(self, step: int) -> None:
        """Count from a step that an earlier process of the run has done."""
        self._state.step = step

    def stage(self, name: str, text: str = "") -> None:
        """Show what the start waits for; the first step ends every stage.

        Args:
            name: of the stage; several may run at once.
            text: what happens; empty ends the stage.
        """
        if not text:
            self._state.stages.pop(name, None)
        elif text != self._state.stages.get(name):
            self._state.stages[name] = text
            line = f"[{self._state.elapsed_s:3.0f} s] {text}"
            if _logger.handlers:
                _logger.info("%s", line)
            if self.mode == "plain":
                self._print(Text(line))

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a finished step.

        Args:
            step: optimizer step, counted from 1.
            metrics: the step's metrics by key path (docs/metrics.md); any of them may be missing, null or NaN.
        """
        self._state.add(step, metrics)
        if _logger.handlers:
            _logger.info("%s", plain_line(self._state))
        if self._live is not None:
            self._live.refresh()
        elif self.mode == "plain":
            self._print(Text(plain_line(self._state)))

    @property
    def width(self) -> int:
        """Columns that a table may have: those of the terminal, else of a wide log line."""
        return self._console.width if self._console.is_terminal else _LOG_WIDTH

    def notice(self, text: str) -> None:
        """Print a message above the panel."""
        self._message(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Print a warning above the panel; when off, it goes to the logger `megatron_daro`."""
        self._message(text, logging.WARNING)

    def __enter__(self) -> Progress:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _message(self, text: str, level: int) -> None:
        clean = self._encodable(safe_text(text, _MESSAGE_LIMIT))
        if self.mode == "off" or _logger.handlers:
            _logger.log(level, "%s", clean)
        if self.mode == "off":
            return
        if level >= logging.WARNING:
            self._print(Text.assemble(("warning: ", "bold yellow"), clean))
        else:
            self._print(Text(clean))

    def _print(self, text: Text) -> None:
        # A log line stays one line, however narrow rich believes a pipe to be.
        self._console.print(text, soft_wrap=not self._console.is_terminal, highlight=False)

    def _encodable(self, text: str) -> str:
        """Text that the terminal's encoding can express; what it cannot becomes a visible code."""
        encoding = self._console.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)
