"""The report's plots of a critic: how well its values fit, and what advantages come of them.

Runs without a critic have no such section, and nothing about it is listed as missing.
"""

from __future__ import annotations

from megatron_daro.workshop.report.by_pass_rate import bin_means, by_bin, dots_and_rings, pass_rate_layout, quarters
from megatron_daro.workshop.report.page import COLOURS, Line, Plot, Section, Trace, layout, lines
from megatron_daro.workshop.report.run_data import RunData

_TENTHS = 10


def critic_section(run: RunData) -> list[Section]:
    """Return the section, or nothing for a run without a critic."""
    if "critic/value_mean" not in run.keys:
        return []
    makers = {
        "explained variance": _explained,
        "values by pass rate (critic/value/{k})": _by_pass_rate,
        "values by position (critic/value_right/{i})": _by_position,
        "advantages by pass rate (critic/advantage/{k})": _advantages,
    }
    plots = {name: make(run) for name, make in makers.items()}
    return [Section("Critic", [p for p in plots.values() if p], [name for name, plot in plots.items() if plot is None])]


def _explained(run: RunData) -> Plot | None:
    traces = lines(run, [Line("critic/explained_variance", "explained variance")])
    if not traces:
        return None
    caption = (
        "How much of the variance of its targets the critic's values explain. 1 is perfect; 0 is no better than one "
        "number for all tokens, so that it takes nothing from the advantages' noise; below 0 it adds to it."
    )
    return Plot("Explained variance of the values", caption, traces, layout("1 - var(target - value) / var(target)"))


def _by_pass_rate(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        colour = COLOURS[index]
        values, targets = bin_means(run, "critic/value", rows), bin_means(run, "critic/target", rows)
        traces += dots_and_rings((f"value, {when}", values), (f"target, {when}", targets), colour)
    if not traces:
        return None
    caption = (
        "Mean value over the tokens of answers in groups of each pass rate; the rings are the mean targets. A critic "
        "that knows how hard a prompt is rises with the rings; a level line knows only the average."
    )
    return Plot("Value by pass rate", caption, traces, pass_rate_layout(run, "value (reward)"))


def _by_position(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        for side, dash in (("right", "solid"), ("wrong", "dot")):
            if means := bin_means(run, f"critic/value_{side}", rows):
                line = {"color": COLOURS[index], "width": 2, "dash": dash}
                traces.append(by_bin(means, f"{side} answers, {when}", COLOURS[index], line=line))
    if not traces:
        return None
    tenths = range(0, _TENTHS, 2)
    ticks = {"tickvals": list(tenths), "ticktext": [f"{100 * i // _TENTHS} %" for i in tenths]}
    axis = {"title": {"text": "position in the answer (tenths of its trained tokens)"}} | ticks
    caption = (
        "Mean value over each tenth of right and of wrong answers. At the start it is the prompt's (right answers are "
        "more often of easy ones); where the lines part, the critic has seen which way the answer goes. Level lines "
        "mean that all tokens of an answer get much the same advantage, as without a critic."
    )
    look = {"xaxis": axis, "yaxis": {"title": {"text": "value (reward)"}}, "hovermode": "x unified"}
    return Plot("Value by position in the answer", caption, traces, look)


def _advantages(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(quarters(run)):
        if means := bin_means(run, "critic/advantage", rows):
            traces.append(by_bin(means, f"mean, {when}", COLOURS[index], marker={"size": 8}))
        if sizes := bin_means(run, "critic/advantage_abs", rows):
            line = {"color": COLOURS[index], "width": 2, "dash": "dash"}
            traces.append(by_bin(sizes, f"mean size, {when}", COLOURS[index], line=line))
    if not traces:
        return None
    caption = (
        "Mean advantage per token in groups of each pass rate, and mean absolute advantage (dashed), as the policy is "
        "trained with them. A line that rises from below 0 means that the critic cannot tell hard prompts from easy "
        "ones: it pushes down what the model wrote on hard prompts and up what it wrote on easy ones."
    )
    return Plot("Advantage by pass rate", caption, traces, pass_rate_layout(run, "advantage per token"))
