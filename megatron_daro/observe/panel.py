"""The state of a run that the panel and the plain lines show, and how it is drawn.

Missing metrics are drawn as missing, and are never an error. The caller makes texts safe before passing them in.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_daro.observe.phases import phase_keys

_HISTORY_STEPS = 40
_ETA_STEPS = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_NO_VALUE = "-"


@dataclass(slots=True)
class ProgressState:
    """The data of the panel. active: returns the phases that run now. stages: what the run waits for before its first
    step, by name."""

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
        """Take in one finished step; values that are not finite numbers count as missing."""
        self.step = step
        self.stages.clear()
        self.metrics = {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)}
        now = self.clock()
        if len(self.step_ends) == 1 and "timing/step_s" in self.metrics:
            self.step_ends[0] = now - self.metrics["timing/step_s"]  # the time before was the start of processes
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
        """Return `{family}/{k}` for each bin; None if missing."""
        return [self.metrics.get(f"{family}/{k}") for k in bins]

    def weights(self) -> list[float]:
        """Return DARO's weights of the pass rates that were recorded."""
        weights = self.by_bin("difficulty/weight", range(1, self.rollouts_per_prompt))
        return [w for w in weights if w is not None]

    def phase_times(self) -> list[tuple[str, float]]:
        """Return (phase, seconds) of the last step, longest first, without phases that took less than a hundredth of
        it."""
        times = [(k.removeprefix("timing/").removesuffix("_s"), self.metrics[k]) for k in phase_keys(self.metrics)]
        least = self.metrics.get("timing/step_s", 0.0) / 100
        return sorted(((n, t) for n, t in times if t > least), key=lambda item: -item[1])


def draw_panel(state: ProgressState, width: int) -> Panel:
    """Return the panel for the present state, for a terminal of `width` columns."""
    bars = max(3, width // 2 - 8)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=9, style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_row("step", _step_row(state))
    grid.add_row("accuracy", _accuracy_row(state, bars))
    grid.add_row("loss", _loss_row(state.metrics))
    grid.add_row("length", _length_row(state.metrics))
    grid.add_row("pass rate", _pass_rate_row(state, bars))
    grid.add_row("weights", _weights_row(state, bars))
    grid.add_row("time", "  ".join(f"{name} {_seconds(t)}" for name, t in state.phase_times()) or _NO_VALUE)
    outer = Table.grid(expand=True)  # a bar outside a table would not end its line
    outer.add_row(ProgressBar(total=max(1, state.total_steps), completed=state.step))
    outer.add_row(grid)
    title = Text(state.title or "megatron-daro", style="bold")
    return Panel(outer, title=title, title_align="left", padding=(0, 1))


def _step_row(state: ProgressState) -> Text:
    row = Text.assemble((f"{state.step}/{state.total_steps}", "bold"), f"   elapsed {_duration(state.elapsed_s)}")
    if state.eta_s is not None:
        row.append(f"   ETA {_duration(state.eta_s)}")
    if active := ", ".join(state.stages.values() or state.active()):
        row.append("   now: ", style="dim").append(active, style="cyan")
    return row


def _accuracy_row(state: ProgressState, most: int) -> Text:
    row = Text.assemble((_number(state.metrics.get("accuracy/mean")), "bold green"))
    recent = list(state.accuracy)[-most:]
    if len(recent) > 1:
        low, high = min(recent), max(recent)
        row.append(f"  {_bars(recent, low, high)}", style="green").append(f"  {low:.3f}..{high:.3f}", style="dim")
    return row.append("  reward ", style="dim").append(_number(state.metrics.get("reward/mean")))


def _loss_row(m: Mapping[str, float]) -> Text:
    row = Text(_number(m.get("loss/policy", m.get("loss/total"))))
    row.append("  grad norm ", style="dim").append(_number(m.get("loss/grad_norm")))
    return row.append("  entropy ", style="dim").append(_number(m.get("policy/entropy")))


def _length_row(m: Mapping[str, float]) -> Text:
    length, cut = m.get("response/length_mean"), m.get("response/truncated_fraction")
    row = Text(_NO_VALUE if length is None else f"{length:,.0f} tokens")
    if cut is not None:
        row.append(f"  {cut:.0%} cut off", style="yellow" if cut > 0.1 else "dim")
    return row


def _pass_rate_row(state: ProgressState, most: int) -> Text:
    groups = state.by_bin("difficulty/groups", range(state.rollouts_per_prompt + 1))
    if all(g is None for g in groups):
        return Text(_NO_VALUE)
    counts = [g or 0.0 for g in groups]
    merged = _merge(counts, most, sum)
    row = Text.assemble(("0 ", "dim"), (_bars(merged, 0.0, max(merged) or 1.0), "cyan"), (" 1", "dim"))
    return row.append(f"  {sum(counts):,.0f} groups, {counts[0] + counts[-1]:,.0f} all or none right", style="dim")


def _weights_row(state: ProgressState, most: int) -> Text:
    weights = state.weights()
    if not weights:
        return Text(_NO_VALUE)
    # Weights are multiplicative, so heights are logarithmic: centred on the middle of the weights, and spanning a
    # factor of 2 or more.
    logs = [math.log(max(w, 1e-9)) for w in _merge(weights, most, lambda part: sum(part) / len(part))]
    middle, reach = (max(logs) + min(logs)) / 2, max(math.log(2), max(logs) - min(logs)) / 2
    row = Text.assemble("  ", (_bars(logs, middle - reach, middle + reach), "magenta"))
    row.append(f"    {min(weights):.2f}..{max(weights):.2f}", style="dim")
    clamped = state.metrics.get("difficulty/clamped", 0.0)
    return row.append(f"  {clamped:.0f} at a clamp", style="yellow") if clamped else row


def plain_line(state: ProgressState) -> str:
    """Return one step as one line of ASCII text, for logs."""
    m = state.metrics
    parts = [
        f"step {state.step}/{state.total_steps}",
        f"accuracy {_number(m.get('accuracy/mean'))}",
        f"reward {_number(m.get('reward/mean'))}",
        f"loss {_number(m.get('loss/policy', m.get('loss/total')))}",
        f"grad_norm {_number(m.get('loss/grad_norm'))}",
        f"length {_number(m.get('response/length_mean'))}",
    ]
    if weights := state.weights():
        parts.append(f"weights {min(weights):.2f}..{max(weights):.2f}")
    parts += [f"step_s {_number(state.step_s)}", f"eta {_duration(state.eta_s)}"]
    return "  ".join(parts)


def _bars(values: Sequence[float], low: float, high: float) -> str:
    """Return one block per value; a constant row is drawn at mid height."""
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2] * len(values)
    return "".join(_BLOCKS[round((v - low) / (high - low) * (len(_BLOCKS) - 1))] for v in values)


def _merge(values: Sequence[float], most: int, join: Callable[[Sequence[float]], float]) -> list[float]:
    """Return at most `most` values, by joining neighbours evenly."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [join(values[a:b]) for a, b in itertools.pairwise(edges)]


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
