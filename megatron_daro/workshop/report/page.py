"""The page of a report: layout, colours and the script that draws, all in one file that needs no network.

Values and `Section`s -> a template (assets/*.html.j2, which escape every text) -> one HTML document. A content security
policy allows exactly the page's own two scripts (by hash) and no connection at all, so text from a model could do
nothing even if escaping failed. A `Plot` is plain data (plotly.js JSON, no plotly objects); colours that depend on
light or dark are names (`@sequential`, `@diverging`) that the page's script replaces.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_daro.errors import DataError
from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.report.run_data import RunData, smooth

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Page:
    """What a page consists of.

    template: name of a file in `folder` or assets/ that extends page.html.j2; its blocks `head` and `tail` come before
    and after the plots. values: what the template shows; all text among them is escaped.
    """

    title: str
    subtitle: str
    sections: list[Section]
    template: str
    values: Mapping[str, Any]
    folder: Path = _ASSETS


@dataclass(frozen=True)
class Table:
    """Cells as text, a list per row. number_columns: how many, from the right, are aligned as numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    number_columns: int


def write_page(page: Page, target: Path, *, what: str, option: str) -> None:
    """Write the document whole or not at all, and create missing folders.

    Args:
        what, option: for the message: what the page is, and the option that names another place.

    Raises:
        DataError: it cannot be written.
    """
    text = render(page)
    temporary = target.with_name(f"{target.name}.tmp{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{target}: the {what} could not be written: {error}; give another {option}") from error


def render(page: Page) -> str:
    """Return the whole document as text (UTF-8, about 2 MB, nearly all of it plotly.js, which the page unpacks)."""
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    script = (_ASSETS / "report.js").read_text(encoding="utf-8")
    plots = [plot for section in page.sections for plot in section.plots]
    figures = [{"id": f"plot-{i}", "data": plot.traces, "layout": plot.layout} for i, plot in enumerate(plots)]
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        f"script-src {_hash(library)} {_hash(script)}"
    )
    environment = Environment(
        loader=FileSystemLoader([page.folder, _ASSETS]), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["safe_text"] = safe_text
    return environment.get_template(page.template).render(
        page.values,
        title=page.title,
        subtitle=page.subtitle,
        sections=page.sections,
        plot_ids=[figure["id"] for figure in figures],
        policy=policy,
        style=Markup((_ASSETS / "report.css").read_text(encoding="utf-8")),
        figures=Markup(script_json(figures)),
        library=base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        script=Markup(script),
    )


def script_json(value: object) -> str:
    """Return JSON that is safe inside a `<script>` element: no character can end the element or start a comment.

    Args:
        value: what `json.dumps` accepts; NaN and infinity are refused.

    Returns:
        ASCII-only JSON text without `<`, `>` and `&`.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Mid tones: at least 3:1 against both backgrounds of the page.
COLOURS = ("#2f7ed8", "#d9730d", "#2a9d68", "#c9408f", "#8466d6", "#a98200", "#1796a8", "#d64545", "#7c8798")
SEQUENTIAL = "@sequential"
DIVERGING = "@diverging"
PERCENT = ".2~%"
"""Two decimals without trailing zeros: ticks of small shares differ, and those of large shares stay short."""
_FEW_POINTS = 20

Trace = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One plot: heading, how to read it, plotly.js traces and layout."""

    title: str
    caption: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def unchanged(self) -> str:
        """The constant values of a plot over steps, in words, if none of its lines ever changes; else empty."""
        if self.layout.get("xaxis") != x_steps() or any(trace["type"] != "scatter" for trace in self.traces):
            return ""
        named = [trace for trace in self.traces if trace.get("showlegend", True)]
        if any(len(set(trace["y"])) > 1 for trace in self.traces) or all(len(trace["y"]) < 2 for trace in named):
            return ""
        return f"{self.title}: " + ", ".join(f"{trace['name']} {trace['y'][0]:g}" for trace in named)


@dataclass(frozen=True)
class Section:
    """A heading with its plots; `missing` says what was left out and why."""

    title: str
    plots: list[Plot]
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """One metric to draw as a line."""

    key: str
    name: str
    dash: str = "solid"


def short(value: float | None) -> float | None:
    """Round to five significant digits: what a screen can show, in a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")


def lines(run: RunData, wanted: Sequence[Line], *, smoothed: bool = True) -> list[Trace]:
    """Return traces of the metrics that were recorded; smoothed ones have a faint raw line and a moving mean on top.

    Args:
        run: the run.
        wanted: what to draw; keys that were not recorded are left out. Lines whose colour repeats are dashed.
        smoothed: draw the moving mean if there are at least 20 points.
    """
    traces: list[Trace] = []
    for index, line in enumerate(wanted):
        steps, values = run.series(line.key)
        if steps:
            again = index >= len(COLOURS) and line.dash == "solid"
            drawn = replace(line, dash="dash") if again else line
            traces += _line(steps, values, drawn, COLOURS[index % len(COLOURS)], smoothed)
    return traces


def _line(steps: list[int], values: list[float], line: Line, colour: str, smoothed: bool) -> list[Trace]:
    few = len(steps) < _FEW_POINTS
    raw: Trace = {
        "type": "scatter",
        "x": steps,
        "y": [short(v) for v in values],
        "name": line.name,
        "mode": "lines+markers" if few else "lines",
        "line": {"color": colour, "width": 2, "dash": line.dash},
    }
    if few or not smoothed:
        return [raw]
    mean = [short(v) for v in smooth(values, max(1, len(values) // 50))]
    faint = raw | {
        "line": {"color": colour, "width": 1},
        "opacity": 0.35,
        "showlegend": False,
        "name": f"{line.name}, raw",
    }
    return [faint | {"legendgroup": line.key}, raw | {"y": mean, "legendgroup": line.key}]


def x_steps() -> dict[str, Any]:
    """Return the step axis."""
    return {"title": {"text": "optimizer step"}}


def layout(y_title: str, **more: object) -> dict[str, Any]:
    """Return the layout of a plot over steps. `y_title` has the unit; `more` has plotly's options of the y axis."""
    return {"xaxis": x_steps(), "yaxis": {"title": {"text": y_title}} | more, "hovermode": "x unified"}


def percent(y_title: str, **more: object) -> dict[str, Any]:
    """Return the layout of a plot of fractions, drawn as percent."""
    return layout(y_title, tickformat=PERCENT, rangemode="tozero", **more)


def pass_rate_ticks(bins: Sequence[int], rollouts_per_prompt: int) -> dict[str, Any]:
    """Return the ticks of an axis of pass-rate bins: at most nine labels k/K."""
    stride = max(1, -(-len(bins) // 9))
    shown = list(bins)[::stride]
    return {"tickvals": shown, "ticktext": [f"{k}/{rollouts_per_prompt}" for k in shown]}


def heat_map(
    run: RunData,
    rows: dict[int, list[float | None]],
    steps: list[int],
    *,
    title: str,
    caption: str,
    unit: str,
    number: str = ":.3g",
    colorbar: Mapping[str, object] = {},
    **colour: object,
) -> Plot:
    """Return a heat map with a column per step and a row per pass-rate bin.

    Args:
        run: gives K for the labels.
        rows: for each bin k, one value per step; None leaves the cell empty.
        steps: the optimizer steps.
        title: heading of the plot.
        caption: how to read it. unit: of the colour bar. number: format of a cell's value.
        colorbar, colour: plotly's heat map options, such as `colorscale`, `zmid`, `zmin`.
    """
    bins = sorted(rows)
    per_prompt = run.rollouts_per_prompt or max(bins)
    bar = {"title": {"text": unit, "side": "right"}, "thickness": 12, "len": 1.0, **colorbar}
    trace: Trace = {
        "type": "heatmap",
        "x": steps,
        "y": bins,
        "z": [[short(v) for v in rows[k]] for k in bins],
        "hoverongaps": False,
        "colorbar": bar,
        "hovertemplate": f"step %{{x}}<br>%{{y}} of {per_prompt} correct<br>{unit}: %{{z{number}}}<extra></extra>",
    }
    axis = {"title": {"text": "pass rate (correct / rollouts)"}} | pass_rate_ticks(bins, per_prompt)
    return Plot(title, caption, [trace | colour], {"xaxis": x_steps(), "yaxis": axis})
