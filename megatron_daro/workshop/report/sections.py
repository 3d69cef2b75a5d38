"""The report's plots over time: which sections there are, what each shows and how to read it.

A plot none of whose metrics was recorded is left out and named. The pass-rate section shows what each bin
contributed, weighed and measured, against docs/algorithms.md's on-policy L_k, which the run records as
`difficulty/predicted_loss/{k}`; nothing is fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from statistics import fmean
from typing import Any

from megatron_daro.workshop.report.page import (
    COLOURS,
    DIVERGING,
    SEQUENTIAL,
    Line,
    Plot,
    Section,
    Trace,
    heat_map,
    layout,
    lines,
    pass_rate_ticks,
    percent,
    short,
)
from megatron_daro.workshop.report.run_data import RunData

Table = dict[int, list[float | None]]


def difficulty_section(run: RunData) -> Section:
    """Every plot by pass-rate bin that the recorded metrics allow."""
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
    """Without bins 0 and K, which carry no signal."""
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
        colorbar={"tickformat": ".0%"},
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


def _bin_means(run: RunData, key: str, rows: list[dict[str, float | None]]) -> Table:
    """bin -> [mean over the rows], for bins with a value in them."""
    means: Table = {}
    for k in run.bins(key):
        values = [v for r in rows if (v := r.get(f"{key}/{k}")) is not None]
        if values:
            means[k] = [fmean(values)]
    return means


def _quarters(run: RunData) -> list[tuple[str, list[dict[str, float | None]]]]:
    rows = run.train_rows
    size = max(1, len(rows) // 4)
    return [("all steps", rows)] if len(rows) < 8 else [("first quarter", rows[:size]), ("last quarter", rows[-size:])]


def _by_bin(means: Table, name: str, colour: str, **look: object) -> Trace:
    bins = sorted(means)
    trace: Trace = {"type": "scatter", "x": bins, "y": [short(means[k][0]) for k in bins], "name": name}
    return trace | {"mode": "lines+markers", "line": {"color": colour, "width": 2}} | look


def _pass_rate_layout(run: RunData, y_title: str, **y_axis: object) -> dict[str, Any]:
    bins = range((run.rollouts_per_prompt or 1) + 1)
    axis = {"title": {"text": "pass rate (correct / rollouts)"}} | pass_rate_ticks(bins, run.rollouts_per_prompt or 1)
    return {"xaxis": axis, "yaxis": {"title": {"text": y_title}} | y_axis, "hovermode": "x unified"}


def _measured_against_predicted(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(_quarters(run)):
        colour = COLOURS[index]
        measured = _trained(run, _bin_means(run, "difficulty/loss", rows))
        predicted = _trained(run, _bin_means(run, "difficulty/predicted_loss", rows))
        if measured:
            traces.append(_by_bin(measured, f"measured, {when}", colour, marker={"size": 8}))
        if predicted:
            ring = {"size": 15, "symbol": "circle-open", "color": colour, "line": {"width": 2}}
            traces.append(_by_bin(predicted, f"predicted, {when}", colour, mode="markers", marker=ring))
    if not traces:
        return None
    caption = (
        "Mean loss of each pass rate. The rings are what the mean lengths of right and wrong answers predict for "
        "on-policy data: sqrt(mu(1-mu)) (l_wrong - l_right) / (mu l_right + (1-mu) l_wrong). A gap means that the data "
        "is not on-policy or that length and verdict relate otherwise within groups."
    )
    return Plot("Measured against predicted L_k", caption, traces, _pass_rate_layout(run, "mean token loss L_k"))


def _equilibrium(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(_quarters(run)):
        weight, loss = _bin_means(run, "difficulty/weight", rows), _bin_means(run, "difficulty/loss", rows)
        shared = _trained(run, {k: [abs(weight[k][0] * loss[k][0])] for k in weight.keys() & loss.keys()})  # type: ignore[operator]
        if shared:
            traces.append(_by_bin(shared, when, COLOURS[index], marker={"size": 8}))
    if not traces:
        return None
    caption = (
        "How strongly each pass rate pulls after weighting: mean weight times mean loss. DARO's rest point is the same "
        "height everywhere, so that no difficulty dominates; a flatter line means nearer to it."
    )
    plot_layout = _pass_rate_layout(run, "|w_k L_k|", rangemode="tozero")
    return Plot("Weighted loss |w_k L_k| by pass rate", caption, traces, plot_layout)


def _length_by_pass_rate(run: RunData) -> Plot | None:
    traces: list[Trace] = []
    for index, (when, rows) in enumerate(_quarters(run)):
        means = _lengths(run, rows)
        if means:
            traces.append(_by_bin(means, f"all, {when}", COLOURS[index], marker={"size": 8}))
    when, rows = _quarters(run)[-1]
    for side, dash, colour in (("right", "dash", COLOURS[2]), ("wrong", "dot", COLOURS[7])):
        means = _bin_means(run, f"difficulty/length_{side}", rows)
        if means:
            line = {"color": colour, "width": 2, "dash": dash}
            traces.append(_by_bin(means, f"{side} answers, {when}", colour, line=line))
    if not traces:
        return None
    caption = (
        "Mean trained tokens per answer in groups of each pass rate, and of right and wrong answers apart. It usually "
        "falls to the right: what the model finds hard it answers at length, so token-mean losses give hard prompts "
        "more say than their number. The gap between right and wrong is what makes L_k positive."
    )
    plot_layout = _pass_rate_layout(run, "length (tokens per answer)", rangemode="tozero")
    return Plot("Length against pass rate", caption, traces, plot_layout)


def _lengths(run: RunData, rows: list[dict[str, float | None]]) -> Table:
    """bin -> [mean tokens per answer]: from the recorded lengths, elsewhere from token and group counts."""
    per_prompt = run.rollouts_per_prompt or 1
    right, wrong = (_bin_means(run, f"difficulty/length_{side}", rows) for side in ("right", "wrong"))
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


_Maker = Callable[[RunData], Plot | None]


def build_sections(run: RunData) -> list[Section]:
    """Every section in page order; a section without any plot still says what was missing."""
    return [
        _section(run, "Accuracy and reward", {"accuracy": _accuracy, "reward": _reward, "evaluation": _evaluation}),
        difficulty_section(run),
        _section(run, "Length", {"response length": _length, "truncation": _truncation}),
        _section(run, "Loss and optimizer", {"losses": _losses, "gradient norm": _grad_norm, "learning rate": _rate}),
        _section(
            run,
            "Policy health",
            {
                "clip fractions": _clip,
                "entropy": _entropy,
                "mismatch of rollout and training log-probabilities": _mismatch,
                "KL estimates": _kl,
                "staleness": _staleness,
            },
        ),
        _section(run, "Groups", {"group ledger": _ledger}),
        _section(run, "Time", {"time per phase": _time, "throughput": _throughput}),
    ]


def _section(run: RunData, title: str, makers: dict[str, _Maker]) -> Section:
    plots = {name: make(run) for name, make in makers.items()}
    return Section(title, [p for p in plots.values() if p], [name for name, plot in plots.items() if plot is None])


def _plot(
    run: RunData, title: str, caption: str, wanted: list[Line], look: dict, *, smoothed: bool = True
) -> Plot | None:
    traces = lines(run, wanted, smoothed=smoothed)
    return Plot(title, caption, traces, look) if traces else None


def _evaluation_names(run: RunData) -> list[str]:
    """Names of evaluation sets: keys `eval/{name}/accuracy`."""
    keys = [k.split("/") for k in run.under("eval/")]
    return list(dict.fromkeys(k[1] for k in keys if len(k) >= 3 and k[2] == "accuracy"))


def _accuracy(run: RunData) -> Plot | None:
    wanted = [Line("accuracy/mean", "training rollouts")]
    wanted += [Line(f"eval/{n}/accuracy", f"evaluation: {n}", "dash") for n in _evaluation_names(run)]
    return _plot(
        run,
        "Accuracy",
        "Share of correct answers among the rollouts of each step (faint: every step; bold: moving mean), and on "
        "held-out problems where evaluated. Training prompts change between steps: trust the evaluation for the level.",
        wanted,
        percent("correct answers (%)"),
    )


def _reward(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Reward",
        "Mean reward per rollout. It differs from accuracy where rewards are shaped, such as by the overlong penalty.",
        [Line("reward/mean", "mean reward")],
        layout("reward (per rollout)"),
    )


def _evaluation(run: RunData) -> Plot | None:
    wanted = [
        Line(key, key.removeprefix("eval/").replace("/accuracy/", ", difficulty "), dash)
        for name, dash in zip(_evaluation_names(run), cycle(("solid", "dash", "dot", "dashdot")), strict=False)
        for key in run.under(f"eval/{name}/accuracy/")
    ]
    return _plot(
        run,
        "Evaluation by difficulty",
        "Accuracy on held-out problems, one line per difficulty level of the evaluation set. Lines that rise together "
        "show learning across difficulties; one that falls shows a difficulty paying for another.",
        wanted,
        percent("correct answers (%)"),
        smoothed=False,
    )


def _length(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Response length",
        "Mean tokens per response. Wrong answers longer than right ones make L_k positive (see the pass-rate section).",
        [
            Line("response/length_mean", "all"),
            Line("derived/length_right", "right, in trained groups", "dash"),
            Line("derived/length_wrong", "wrong, in trained groups", "dot"),
        ],
        layout("length (tokens)", rangemode="tozero"),
    )


def _truncation(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Truncated responses",
        "Share of responses cut off at the length limit. They are scored as they stand, so a high share hides what the "
        "model could do with more tokens.",
        [Line("response/truncated_fraction", "truncated")],
        percent("truncated responses (%)"),
    )


def _losses(run: RunData) -> Plot | None:
    named = [Line("loss/policy", "policy"), Line("loss/total", "total", "dash")]
    known = {"loss/policy", "loss/total", "loss/grad_norm"}
    named += [Line(k, k.removeprefix("loss/"), "dot") for k in run.under("loss/") if k not in known]
    return _plot(
        run,
        "Losses",
        "The policy loss is the weighted surrogate; the total adds what the configuration adds (KL, entropy, -ln w). "
        "Neither needs to fall in reinforcement learning: watch for jumps and for drift far from its start.",
        named,
        layout("loss"),
    )


def _grad_norm(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Gradient norm",
        "L2 norm of the gradient before clipping. Occasional spikes are ordinary; a rising floor is not.",
        [Line("loss/grad_norm", "gradient norm")],
        layout("gradient norm (L2)", rangemode="tozero"),
    )


def _rate(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Learning rate",
        "What the optimizer used in each step: warm-up, then the configured schedule.",
        [Line("optimizer/learning_rate", "learning rate")],
        layout("learning rate", rangemode="tozero", exponentformat="e"),
        smoothed=False,
    )


def _clip(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Clip fractions",
        "Share of trained tokens whose importance ratio was clipped, by side, or changed by the off-policy "
        "correction. Zero with one update per batch on fresh rollouts; a few percent with reuse; tens of percent mean "
        "that steps are too large or data too old.",
        [
            Line("ratio/clip_fraction_high", "above 1 + eps_high"),
            Line("ratio/clip_fraction_low", "below 1 - eps_low"),
            Line("ratio/dual_clip_fraction", "dual clip", "dash"),
            Line("mismatch/corrected_fraction", "off-policy correction", "dot"),
        ],
        layout("clipped tokens (%)", tickformat=".2~%", rangemode="tozero"),
    )


def _entropy(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Entropy",
        "Mean entropy of the policy's next-token distribution. A fast fall to zero means that exploration is over.",
        [Line("policy/entropy", "entropy")],
        layout("entropy (nats per token)", rangemode="tozero"),
    )


def _mismatch(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Mismatch of rollout and training log-probabilities",
        "Absolute difference between the log-probability the engine reported and the one the actor computes, on a "
        "logarithmic scale. Rounding noise in fp32 is near 1e-6; 0.01 and above asks for a correction.",
        [Line("mismatch/logprob_abs_mean", "mean"), Line("mismatch/logprob_abs_max", "maximum", "dash")],
        layout("|difference| (nats)", type="log", exponentformat="e"),
    )


def _kl(run: RunData) -> Plot | None:
    return _plot(
        run,
        "KL estimates",
        "Estimated divergence per token: of the actor from the rollout engine, and from the reference policy (zero "
        "where none is configured). The first should stay near zero; the second shows how far training has moved.",
        [Line("mismatch/kl", "rollout engine"), Line("policy/kl_reference", "reference policy", "dash")],
        layout("KL (nats per token)", exponentformat="e"),
    )


def _staleness(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Staleness",
        "How many batches old the generating policy was, on average over the trained groups: the unit of "
        "rollout.max_staleness. Zero in synchronous training.",
        [Line("rollout/staleness_mean", "mean staleness")],
        layout("age (batches)", rangemode="tozero"),
    )


def _ledger(run: RunData) -> Plot | None:
    parts = ("trained", "filtered", "dropped", "outstanding")
    traces = []
    for index, part in enumerate(parts):
        steps, values = run.series(f"rollout/groups_{part}")
        if steps:
            colour = COLOURS[(2, 0, 7, 8)[index]]
            traces.append(_area(steps, values, part, colour))
    steps, values = run.series("rollout/groups_admitted")
    if steps:
        look = {"line": {"color": "@text", "width": 1.5, "dash": "dot"}, "mode": "lines"}
        traces.append({"type": "scatter", "x": steps, "y": values, "name": "admitted"} | look)
    if not traces:
        return None
    caption = (
        "What became of every group that was admitted, added up since the start. The areas must fill up to the dotted "
        "line: admitted = trained + filtered + dropped + outstanding. Filtered groups (all or none correct) cost "
        "generation and train nothing."
    )
    return Plot("Group ledger", caption, traces, layout("groups (cumulative count)", rangemode="tozero"))


def _area(steps: list[int], values: list[float], name: str, colour: str) -> dict:
    return {
        "type": "scatter",
        "x": steps,
        "y": [short(v) for v in values],
        "name": name,
        "mode": "lines",
        "stackgroup": "all",
        "line": {"width": 0.5, "color": colour},
        "fillcolor": f"{colour}b0",
    }


def _time(run: RunData) -> Plot | None:
    # The whole step, and a part of the train phase, do not stand beside the phases.
    nested = ("timing/step_s", "timing/forward_backward_s")
    keys = [k for k in run.under("timing/") if k.endswith("_s") and k not in nested]
    keys.sort(key=lambda k: -run.total(k))
    traces = []
    for index, key in enumerate(keys):
        steps, values = run.series(key)
        name = key.removeprefix("timing/").removesuffix("_s")
        traces.append(_area(steps, values, name, COLOURS[index % len(COLOURS)]))
    steps, values = run.series("timing/step_s")
    if steps:
        look = {"line": {"color": "@text", "width": 1.5, "dash": "dot"}, "mode": "lines"}
        traces.append({"type": "scatter", "x": steps, "y": [short(v) for v in values], "name": "whole step"} | look)
    if not traces:
        return None
    caption = (
        "Wall time of each phase, stacked, longest at the bottom; dotted: the whole step. Areas above the dotted line "
        "mean that phases overlapped (reward runs within rollout); 'other' is time in which no phase ran."
    )
    return Plot("Time per phase", caption, traces, layout("time (s per step)", rangemode="tozero"))


def _throughput(run: RunData) -> Plot | None:
    names = {k: k.removeprefix("throughput/").removesuffix("_tokens_per_s") for k in run.under("throughput/")}
    return _plot(
        run,
        "Throughput",
        "Tokens per second of each phase while it ran: generated tokens for rollout, trained tokens for train.",
        [Line(k, n) for k, n in names.items() if k.endswith("_tokens_per_s")],
        layout("throughput (tokens/s)", rangemode="tozero"),
    )
