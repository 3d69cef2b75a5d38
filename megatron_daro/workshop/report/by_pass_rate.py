"""The report's plots by pass rate: what each bin contributed, its weight, and its measured loss against the on-policy
L_k of docs/algorithms.md, which the run records as `difficulty/predicted_loss/{k}`.

A plot is left out, and named, if none of its metrics was recorded. Nothing is fitted here.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from megatron_daro.workshop.report.page import (
    COLOURS,
    DIVERGING,
    PERCENT,
    SEQUENTIAL,
    Line,
    Plot,
    Section,
    Trace,
    heat_map,
    layout,
    lines,
    pass_rate_ticks,
    short,
)
from megatron_daro.workshop.report.run_data import RunData

Table = dict[int, list[float | None]]


def difficulty_section(run: RunData) -> Section:
    """Return every plot by pass-rate bin that the recorded metrics allow."""
    makers = {
        "loss by pass rate (difficulty/loss/{k})": _loss_map,
        "weight by pass rate (difficulty/weight/{k})": _weight_map,
        "token share by pass rate (difficulty/tokens/{k})": _token_map,
        "group share by pass rate (difficulty/groups/{k})": _group_map,
        "measured against predicted loss (difficulty/loss/{k})": _measured_against_predicted,
        "weighted loss (difficulty/weight/{k} and difficulty/loss/{k})": _equilibrium,
        "length against pass rate (difficulty/length_right/{k} or difficulty/tokens/{k})": _length_by_pass_rate,
        "weights at a clamp (difficulty/clamped)": _clamped,
    }
    plots, missing = [], []
    for name, make in makers.items():
        plot = make(run)
        if plot is None:
            missing.append(name)
        else:
            plots.append(plot)
    return Section("Difficulty: pass-rate bins", plots, missing)


def _table(run: RunData, family: str) -> tuple[list[int], Table]:
    """Return (steps, bin -> values) over the steps at which any bin of the family was recorded."""
    bins = run.bins(family)
    points = [p for p in run.points if any(p.get(f"{family}/{k}") is not None for k in bins)]
    return [int(p["step"] or 0) for p in points], {k: [p.get(f"{family}/{k}") for p in points] for k in bins}


def _trained(run: RunData, table: Table) -> Table:
    """Return the table without bins 0 and K, which carry no signal."""
    return {k: v for k, v in table.items() if 0 < k < (run.rollouts_per_prompt or math.inf)}


def _shares(table: Table) -> Table:
    totals = [sum(v or 0.0 for v in column) for column in zip(*table.values(), strict=True)]
    return {
        k: [None if v is None or t == 0 else v / t for v, t in zip(row, totals, strict=True)]
        for k, row in table.items()
    }


def _loss_map(run: RunData) -> Plot | None:
    steps, table = _table(run, "difficulty/loss")
    table = _trained(run, table)
    if not table:
        return None
    sizes = sorted(abs(v) for row in table.values() for v in row if v is not None)
    reach = sizes[int(0.98 * (len(sizes) - 1))] or 1.0
    return heat_map(
        run,
        table,
        steps,
        title="Loss L_k by pass rate",
        unit="mean token loss L_k",
        colorscale=DIVERGING,
        zmid=0,
        zmin=-short(reach),  # type: ignore[operator]
        zmax=short(reach),
        caption="Each column is a step, each row a pass rate. Grey is zero, where right and wrong answers are equally "
        "long; warm is positive (wrong answers longer), cool negative. Empty: no group of that pass rate in the step. "
        "The colour range leaves out the outermost 2 % of the cells.",
    )


def _weight_map(run: RunData) -> Plot | None:
    steps, table = _table(run, "difficulty/weight")
    table = _trained(run, table)
    if not table:
        return None
    logs: Table = {k: [None if not v or v <= 0 else math.log2(v) for v in row] for k, row in table.items()}
    reach = max([1.0, *(abs(v) for row in logs.values() for v in row if v is not None)])
    powers = range(-math.ceil(reach), math.ceil(reach) + 1)
    return heat_map(
        run,
        logs,
        steps,
        title="Weight w_k by pass rate",
        unit="weight w_k",
        number=":.2f",
        colorscale=DIVERGING,
        zmid=0,
        zmin=-short(reach),  # type: ignore[operator]
        zmax=short(reach),
        colorbar={"tickvals": list(powers), "ticktext": [f"{2.0**p:.3g}" for p in powers]},
        customdata=[[short(v) for v in table[k]] for k in sorted(table)],
        hovertemplate="step %{x}<br>%{y} correct<br>weight w_k: %{customdata:.3g}<extra></extra>",
        caption="DARO's learned weight of each pass rate, on a logarithmic colour scale. Grey is 1 (the start), warm "
        "weighs the bin up, cool down. A row that reaches 0.1 or 10 sits at the default clamp.",
    )


def _share_map(run: RunData, family: str, *, title: str, unit: str, caption: str) -> Plot | None:
    steps, table = _table(run, family)
    if not table:
        return None
    return heat_map(
        run,
        _shares(table),
        steps,
        title=title,
        unit=unit,
        caption=caption,
        number=":.1%",
        colorbar={"tickformat": PERCENT},
        colorscale=SEQUENTIAL,
        zmin=0,
    )


def _token_map(run: RunData) -> Plot | None:
    return _share_map(
        run,
        "difficulty/tokens",
        title="Token share by pass rate",
        unit="share of the step's tokens",
        caption="How the trained tokens of a step divide over the pass rates; a column adds up to 100 %. With a plain "
        "token mean this is how much say each difficulty has in the gradient; DARO's weights undo it.",
    )


def _group_map(run: RunData) -> Plot | None:
    return _share_map(
        run,
        "difficulty/groups",
        title="Group share by pass rate",
        unit="share of the step's groups",
        caption="How the prompts of a step divide over the pass rates. Learning moves the bright band upwards; much at "
        "the lowest row means too hard, at the highest row too easy.",
    )


def bin_means(run: RunData, key: str, rows: list[dict[str, float | None]]) -> Table:
    """Return k -> [mean over the rows] of a metric `{key}/{k}`, for each k with a recorded value."""
    means: Table = {}
    for k in run.bins(key):
        values = [v for r in rows if (v := r.get(f"{key}/{k}")) is not None]
        if values:
            means[k] = [fmean(values)]
    return means


def quarters(run: RunData) -> list[tuple[str, list[dict[str, float | None]]]]:
    """Return the steps to compare, as (name, rows): the first and the last quarter, or all if fewer than 8."""
    rows = run.train_rows
    size = max(1, len(rows) // 4)
    return [("all steps", rows)] if len(rows) < 8 else [("first quarter", rows[:size]), ("last quarter", rows[-size:])]


def by_bin(means: Table, name: str, colour: str, **look: object) -> Trace:
    """Return a line through the means of `bin_means`; `look` has plotly's options of a trace."""
    bins = sorted(means)
    trace: Trace = {"type": "scatter", "x": bins, "y": [short(means[k][0]) for k in bins], "name": name}
    return trace | {"mode": "lines+markers", "line": {"color": colour, "width": 2}} | look


def dots_and_rings(dots: tuple[str, Table], rings: tuple[str, Table], colour: str) -> list[Trace]:
    """Return a line of dots for measured values and rings for the values to compare them with. Each is given as (name,
    means), and left out if there are no means."""
    ring = {"size": 15, "symbol": "circle-open", "color": colour, "line": {"width": 2}}
    traces = [by_bin(means, name, colour, marker={"size": 8}) for name, means in (dots,) if means]
    return traces + [by_bin(means, name, colour, mode="markers", marker=ring) for name, means in (rings,) if means]


def pass_rate_layout(run: RunData, y_title: str, **y_axis: object) -> dict[str, Any]:
    """Return the layout of a plot over pass rates; `y_axis` has plotly's options of that axis."""
    bins = range((run.rollouts_per_prompt or 1) + 1)
    axis = {"title": {"text": "pass rate (correct / rollouts)"}} | pass_rate_ticks(bins, run.rollouts_per_prompt or 1)
    return {"xaxis": axis, "yaxis": {"title": {"text": y_title}} | y_axis, "hovermode": "x unified"}


def _measured_against_predicted(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        colour = COLOURS[index]
        measured = _trained(run, bin_means(run, "difficulty/loss", rows))
        predicted = _trained(run, bin_means(run, "difficulty/predicted_loss", rows))
        traces += dots_and_rings((f"measured, {when}", measured), (f"predicted, {when}", predicted), colour)
    if not traces:
        return None
    when, rows = quarters(run)[-1]
    if approximated := _authors_approximation(run, rows):
        line = {"color": COLOURS[7], "width": 2, "dash": "dot"}
        traces.append(by_bin(approximated, f"the authors' approximation, {when}", COLOURS[7], line=line))
    caption = (
        "Mean loss of each pass rate. The rings are what the mean lengths of right and wrong answers predict for "
        "on-policy data: sqrt(mu(1-mu)) (l_wrong - l_right) / (mu l_right + (1-mu) l_wrong). A gap means that the data "
        "is not on-policy or that length and verdict relate otherwise within groups. Dotted: what DARO's authors take "
        "for it, sqrt(mu(1-mu)) (mu l_right - (1-mu) l_wrong) / (mu l_right + (1-mu) l_wrong)."
    )
    return Plot("Measured against predicted L_k", caption, traces, pass_rate_layout(run, "mean token loss L_k"))


def _authors_approximation(run: RunData, rows: list[dict[str, float | None]]) -> Table:
    """Return L_k by the authors' formula. Source: the summary of arXiv 2510.09001 by its authors, Figure 2 there."""
    right, wrong = (bin_means(run, f"difficulty/length_{side}", rows) for side in ("right", "wrong"))
    size = run.rollouts_per_prompt or 1
    losses: Table = {}
    for k in right.keys() & wrong.keys():
        mu, of_right, of_wrong = k / size, right[k][0], wrong[k][0]
        if of_right is not None and of_wrong is not None and 0 < mu < 1:
            tokens = mu * of_right + (1 - mu) * of_wrong
            losses[k] = [(mu * (1 - mu)) ** 0.5 * (mu * of_right - (1 - mu) * of_wrong) / tokens]
    return losses


def _equilibrium(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        weight, loss = bin_means(run, "difficulty/weight", rows), bin_means(run, "difficulty/loss", rows)
        shared = _trained(run, {k: [abs(weight[k][0] * loss[k][0])] for k in weight.keys() & loss.keys()})  # type: ignore[operator]
        if shared:
            traces.append(by_bin(shared, when, COLOURS[index], marker={"size": 8}))
    if not traces:
        return None
    caption = (
        "How strongly each pass rate pulls after weighting: mean weight times mean loss. DARO's rest point is the same "
        "height everywhere, so that no difficulty dominates; a flatter line means nearer to it."
    )
    plot_layout = pass_rate_layout(run, "|w_k L_k|", rangemode="tozero")
    return Plot("Weighted loss |w_k L_k| by pass rate", caption, traces, plot_layout)


def _length_by_pass_rate(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        means = _lengths(run, rows)
        if means:
            traces.append(by_bin(means, f"all, {when}", COLOURS[index], marker={"size": 8}))
    when, rows = quarters(run)[-1]
    for side, dash, colour in (("right", "dash", COLOURS[2]), ("wrong", "dot", COLOURS[7])):
        means = bin_means(run, f"difficulty/length_{side}", rows)
        if means:
            line = {"color": colour, "width": 2, "dash": dash}
            traces.append(by_bin(means, f"{side} answers, {when}", colour, line=line))
    if not traces:
        return None
    caption = (
        "Mean trained tokens per answer in groups of each pass rate, and of right and wrong answers apart. It usually "
        "falls to the right: what the model finds hard it answers at length, so token-mean losses give hard prompts "
        "more say than their number. The gap between right and wrong is what makes L_k positive."
    )
    plot_layout = pass_rate_layout(run, "length (tokens per answer)", rangemode="tozero")
    return Plot("Length against pass rate", caption, traces, plot_layout)


def _lengths(run: RunData, rows: list[dict[str, float | None]]) -> Table:
    """Return bin -> [mean tokens per answer], from recorded lengths if there are any, else from tokens and groups."""
    per_prompt = run.rollouts_per_prompt or 1
    right, wrong = (bin_means(run, f"difficulty/length_{side}", rows) for side in ("right", "wrong"))
    means: Table = {}
    for k in range(per_prompt + 1):
        pairs = [(r.get(f"difficulty/tokens/{k}"), r.get(f"difficulty/groups/{k}")) for r in rows]
        tokens = sum(t for t, g in pairs if t is not None and g)
        groups = sum(g for t, g in pairs if t is not None and g)
        if k in right and k in wrong:
            means[k] = [(k * right[k][0] + (per_prompt - k) * wrong[k][0]) / per_prompt]  # type: ignore[operator]
        elif tokens and groups:
            means[k] = [tokens / groups / per_prompt]
    return means


def _clamped(run: RunData) -> Plot | None:
    traces = lines(run, [Line("difficulty/clamped", "bins at a clamp")], smoothed=False)
    if not traces:
        return None
    caption = (
        "How many pass rates have a weight at its lower or upper limit. Zero is healthy; see the weight map for which."
    )
    return Plot("Weights at a clamp", caption, traces, layout("bins (count)", rangemode="tozero"))
