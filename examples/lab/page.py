"""The lab's page: one HTML file that needs no network, in the look of `megatron-daro report`.

Place in the data flow: RESULTS/*.parquet -> tables (`findings`) and plots -> lab.html. Numbers are computed by
`results` and `findings`, as for the other pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import findings
import results
from arms import BASELINE, is_control, is_daro
from closed_run import BANDS, PASS_AT
from results import Outcome
from tiny_run import ModelDials
from worlds import WORLDS

from megatron_daro.workshop.report.page import COLOURS, Page, Plot, Section, Table, Trace, layout, render

Runs = Mapping[int, Outcome]
_SHOWN = 4
PUBLISHED = "daro"
_BASELINE_LOOK = {"color": "#1f2430", "width": 3, "dash": "dash"}


def write_page(folder: Path, target: Path) -> Path:
    """Write the page of a folder of results. Return the file."""
    outcomes, note = results.read(folder)
    worlds = list(dict.fromkeys(o.job.world for o in outcomes))
    tables = {world: results.compared(outcomes, world) for world in worlds}
    seeds = max((len(runs) for table in tables.values() for runs in table.values()), default=0)
    page = Page(
        title="Lab: DARO and its rivals",
        subtitle=f"{len(worlds)} worlds, up to {seeds} seeds. {note.get('command', '')}",
        sections=[_section(world, table) for world, table in tables.items()],
        template="lab.html.j2",
        values=_head(outcomes, tables) | _tail(outcomes, note),
        folder=Path(__file__).parent,
    )
    target.write_text(render(page), encoding="utf-8")
    return target


def _head(outcomes: list[Outcome], tables: Mapping[str, Mapping[str, Runs]]) -> dict[str, Any]:
    rates = findings.searched_rates(outcomes)
    header, differences = findings.matrix(tables)
    header = [name.replace("_", "_\u200b") for name in header]  # so that names can break and all columns fit
    verdicts = [findings.verdict(world, table) for world, table in tables.items()]
    worlds = [
        (f"{world}: {_about(world)}", Table(findings.HEADER, findings.table(table, rates[world]), number_columns=8))
        for world, table in tables.items()
    ]
    return {
        "verdicts": Table(findings.VERDICT_HEADER, verdicts, number_columns=0),
        "matrix": Table(header, differences, number_columns=len(header) - 1),
        "worlds": worlds,
    }


def _section(world: str, table: Mapping[str, Runs]) -> Section:
    plots = [
        _curves(table),
        *([_curves(table, "tokens")] if findings.is_by_tokens(world) else []),
        _finals(table),
        _by_difficulty(world, table),
        *_pass_at(world, table),
        *_weights(table),
    ]
    return Section(f"{world}: {_about(world)}", plots)


def _model_dials(world: str) -> ModelDials | None:
    """Return the dials of a world with a language model; None for another world."""
    dials = WORLDS[world].dials if world in WORLDS else None
    return dials if isinstance(dials, ModelDials) else None


def _about(world: str) -> str:
    return WORLDS[world].about if world in WORLDS else ""


def _ranked(table: Mapping[str, Runs]) -> list[str]:
    """Return the arms by mean final accuracy, the baseline first; those that diverged last."""
    means = {arm: results.final_accuracy(runs).mean for arm, runs in table.items()}
    order = sorted(table, key=lambda arm: -means[arm] if means[arm] == means[arm] else 9.0)
    return [arm for arm in table if arm == BASELINE] + [arm for arm in order if arm != BASELINE]


def _drawn(table: Mapping[str, Runs]) -> list[str]:
    """Return the arms whose curves are drawn: the best of the others, DARO as published and its best variants, and the
    baseline, which is drawn last, above those that nearly equal it."""
    ranked = [arm for arm in _ranked(table) if not is_control(arm)]
    variants = [arm for arm in ranked if is_daro(arm)]
    variants = [arm for arm in variants if arm == PUBLISHED or arm in variants[:_SHOWN]]
    others = [arm for arm in ranked if not is_daro(arm) and arm != BASELINE][: _SHOWN - 1]
    return [*others, *variants, *([BASELINE] if BASELINE in ranked else [])]


def _line(arm: str, index: int) -> dict[str, Any]:
    return _BASELINE_LOOK if arm == BASELINE else {"color": COLOURS[index % len(COLOURS)], "width": 2}


def _whole(runs: Runs) -> list[Outcome]:
    return [o for o in runs.values() if not o.ended]


def _curves(table: Mapping[str, Runs], axis: str = "step") -> Plot:
    traces: list[Trace] = []
    for index, arm in enumerate(_drawn(table)):
        whole = _whole(table[arm])
        if not whole:
            continue
        places = [round(fmean(o.records[i][axis] for o in whole)) for i in range(len(whole[0].records))]
        points = [results.Interval.of([o.records[i]["accuracy"] for o in whole]) for i in range(len(places))]
        look = {"legendgroup": arm, "x": places, "type": "scatter"}
        colour = COLOURS[index % len(COLOURS)]
        edge = look | {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        if len(whole) > 1:
            traces.append(edge | {"y": [_short(p.low) for p in points]})
            fill = {"fill": "tonexty", "fillcolor": _faint(colour)}
            traces.append(edge | fill | {"y": [_short(p.high) for p in points]})
        traces.append(
            look | {"mode": "lines", "name": arm, "line": _line(arm, index), "y": [_short(p.mean) for p in points]}
        )
    caption = (
        f"Mean over seeds with its 95 % interval: the baseline (dashed), the {_SHOWN - 1} best of its rivals, "
        f"{PUBLISHED} and the {_SHOWN} best variants of DARO by final accuracy; the others are in the table. A click "
        "on a name hides an arm."
    )
    axes = layout("accuracy", tickformat=".0%")
    if axis == "step":
        return Plot("Held-out accuracy", caption, traces, axes)
    axes["xaxis"] = {"title": {"text": f"{axis} generated"}}
    return Plot(f"Held-out accuracy by {axis} generated", caption, traces, axes)


def _finals(table: Mapping[str, Runs]) -> Plot:
    names, middle, reach = [], [], []
    for arm in _ranked(table):
        found = results.difference(table[arm], table[BASELINE])
        if found.mean == found.mean:
            names.append(arm)
            middle.append(_short(100 * found.mean))
            reach.append(_short(100 * (found.high - found.mean)) if found.high == found.high else 0)
    trace: Trace = {"type": "scatter", "mode": "markers", "x": names, "y": middle, "marker": {"size": 8}}
    trace |= {"error_y": {"type": "data", "array": reach}, "name": "difference", "showlegend": False}
    ticks = {"title": {"text": ""}, "tickangle": -60, "tickfont": {"size": 10}, "type": "category"}
    axes = {"xaxis": ticks, "yaxis": {"title": {"text": f"points above {BASELINE}"}}}
    caption = (
        "Final accuracy less the baseline's, paired by seed, with 95 % intervals. An interval that holds 0 says that "
        "the two cannot be told apart."
    )
    return Plot("Final accuracy against the baseline", caption, [trace], axes)


def _last_details(runs: Runs, name: str) -> list[list[float]]:
    return [o.records[-1][name] for o in _whole(runs) if o.records[-1].get(name)]


def _profile(table: Mapping[str, Runs], name: str, labels: list[str], caption: str, title: str, y_title: str) -> Plot:
    traces: list[Trace] = []
    for index, arm in enumerate(_drawn(table)):
        rows = _last_details(table[arm], name)
        if not rows:
            continue
        means = [_short(fmean(column)) for column in zip(*rows, strict=True)]
        look: Trace = {"type": "scatter", "x": labels[: len(means)], "y": means, "name": arm, "mode": "lines+markers"}
        traces.append(look | {"line": _line(arm, index)})
    axes = {"xaxis": {"title": {"text": y_title}, "type": "category"}, "yaxis": {"title": {"text": "accuracy"}}}
    return Plot(title, caption, traces, axes)


def _by_difficulty(world: str, table: Mapping[str, Runs]) -> Plot:
    labels, axis = [f"{low:g} to {high:g}" for low, high in pairwise(BANDS)], "pass rate before training"
    caption = "Final held-out accuracy by difficulty, the hardest on the left; mean over seeds."
    if dials := _model_dials(world):
        labels, axis = list(dials.bands.values()), dials.bands_are
        caption = f"Final held-out accuracy by {axis}; mean over seeds."
    return _profile(table, "bands", labels, caption, "Accuracy by difficulty", axis)


def _pass_at(world: str, table: Mapping[str, Runs]) -> list[Plot]:
    if not any(len(row) > 1 for runs in table.values() for row in _last_details(runs, "pass_at")):
        return []
    source = "from exact pass rates of the last policy"
    if _model_dials(world):
        source = "estimated from the answers of the last evaluation"
    caption = f"Chance that one of k answers to a held-out problem is right, {source}; mean over seeds."
    return [_profile(table, "pass_at", [str(k) for k in PASS_AT], caption, "pass@k", "k")]


def _weights(table: Mapping[str, Runs]) -> list[Plot]:
    """Plot the weights over time of each arm that learns some: one line for each bin."""
    plots = []
    for arm in _ranked(table):
        whole = [o for o in _whole(table[arm]) if o.records[-1].get("weights")]
        if not whole:
            continue
        records = [[r for r in o.records if r.get("weights")] for o in whole]
        steps = [int(r["step"]) for r in records[0]]
        size = len(records[0][0]["weights"]) - 1
        bins = [k for k in range(1, size) if size <= 16 or k % (size // 8) == 0 or k == 1]
        traces: list[Trace] = []
        for index, k in enumerate(bins):
            means = [_short(fmean(rows[i]["weights"][k] for rows in records)) for i in range(len(steps))]
            line = {"color": COLOURS[index % len(COLOURS)], "width": 2}
            traces.append({"type": "scatter", "x": steps, "y": means, "name": f"{k}/{size}", "line": line})
        ticks = {"type": "log", "tickvals": [0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10]}
        caption = "Mean over seeds of the learned weight of each pass rate k/K; a line at 10 or 0.1 sits at the clamp."
        plots.append(Plot(f"Weights of {arm}", caption, traces, layout("weight", **ticks)))
    return plots


def _tail(outcomes: list[Outcome], note: Mapping[str, str]) -> dict[str, Table]:
    odd = [[f"{_named(o)}: {o.status}. {o.ended}"] for o in outcomes if o.status]
    dials: dict[str, Any] = json.loads(note.get("dials", "{}"))
    names = list(dict.fromkeys(name for values in dials.values() for name in values if name != "base"))
    rows = [[world, *(str(values.get(name, "")) for name in names)] for world, values in dials.items()]
    return {"odd": Table(["run"], odd, number_columns=0), "dials": Table(["world", *names], rows, number_columns=0)}


def _short(value: float) -> float | None:
    """Return a number with five digits, as many as a screen can show; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _named(outcome: Outcome) -> str:
    job = outcome.job
    return f"{job.world}, {job.arm}, {job.purpose}, rate {job.learning_rate:g}, seed {job.seed}"


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
