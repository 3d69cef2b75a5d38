"""The page of an analysis: one sentence, plots, tables, what the words mean, and what to try.

Dump and View -> `Page` of the run's report (workshop/report/page.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.analyze.dump import Dump
from megatron_daro.workshop.analyze.tables import bins_table, shares_table
from megatron_daro.workshop.analyze.views import View
from megatron_daro.workshop.report.conversations import turns_table
from megatron_daro.workshop.report.page import COLOURS, Page, Plot, Section, Trace, pass_rate_ticks

_MOST_WASTED = 0.3
"""Share of tokens without signal that makes a change of data or sampling worthwhile."""
_UNEVEN = 2.0
"""The gradient counts as uneven if its largest share is at least this many times the smallest."""
_LONGER = 1.3


def analysis_page(path: Path, dump: Dump, view: View, unit: str, tokens_per_gpu_hour: float | None) -> Page:
    """Return the page.

    Args:
        path: of the dump. unit: of lengths, tokens or characters. tokens_per_gpu_hour: for the cost of tokens that
            taught nothing; None: the cost is not shown.
    """
    k = dump.total.rollouts_per_prompt
    name = safe_text(path.resolve().name, 80, one_line=True)
    left_out = [
        f"{count:,} {words}"
        for count, words in (
            (dump.incomplete, "incomplete groups"),
            (dump.unverified, "rollouts without a verdict"),
            (dump.unreadable, "records without a group or a length"),
        )
        if count
    ]
    groups = f"{float(view.groups.sum()):,.0f} whole groups of {k} from {len(dump.steps)} files"
    return Page(
        title=f"What these rollouts teach: {name}",
        subtitle=f"{dump.rollouts:,} rollouts, {groups}. Left out: {', '.join(left_out) or 'nothing'}.",
        sections=[Section("By pass rate", _plots(view, unit))],
        template="analysis.html.j2",
        values={
            "headline": headline(view, unit),
            "cards": _cards(view, unit, tokens_per_gpu_hour),
            "advice": advice(view),
            "bins": bins_table(view, unit),
            "shares": shares_table(view),
            "turns": turns_table(dump.turns),
            "rollouts_per_prompt": k,
            "unit": unit,
        },
    )


def headline(view: View, unit: str) -> str:
    """Return one sentence that sums up the dump."""
    k = view.rollouts_per_prompt
    wasted = f"{view.wasted_share:.1%} of your {unit} taught nothing"
    share = _share(view, "grpo")
    if not float(share.sum()):
        return f"{wasted}: no group has both right and wrong answers."
    top = int(share.argmax())
    amount = "most" if float(share[top]) > 0.5 else f"{float(share[top]):.0%}, the largest part,"
    return f"{wasted}; {amount} of GRPO's gradient comes from problems that were solved {top} of {k} times."


def advice(view: View) -> list[str]:
    """Return what to try, from these numbers alone."""
    lines, k = [], view.rollouts_per_prompt
    tokens, total = view.tokens, max(float(view.tokens.sum()), 1.0)
    never, always = float(tokens[0]) / total, float(tokens[-1]) / total
    if never + always >= _MOST_WASTED:
        lines.append(
            "Leave out groups without signal and ask for others instead (dynamic sampling: algorithms daro and dapo, "
            "or algorithm.filter: pass_rate); it does not save what was generated."
        )
    if never >= _MOST_WASTED / 2:
        lines.append(
            f"{never:.0%} went into problems that were never solved: take easier ones first (data.order), or more "
            "answers to each."
        )
    if always >= _MOST_WASTED / 2:
        lines.append(
            f"{always:.0%} went into problems that were always solved: drop them by measured pass rate (megatron-daro "
            "curate --pass-rate :0.95)."
        )
    inner = [float(x) for x in _share(view, "grpo")[1:k] if float(x) > 0]
    if inner and max(inner) >= _UNEVEN * min(inner):
        lines.append(
            f"GRPO would give one pass rate {max(inner) / min(inner):.1f} times the gradient of another; the plot of "
            "shares shows who gives them more alike (daro with magnitude token: equal by construction)."
        )
    right, wrong = _mean_length(view.right_length, view), _mean_length(view.wrong_length, view)
    if right and wrong and wrong >= _LONGER * right:
        lines.append(
            f"Wrong answers are {wrong / right:.1f} times as long as right ones: a mean over each answer's own tokens "
            "(grpo_sequence) punishes a long wrong answer less per token; compare grpo, dr_grpo and daro."
        )
    return lines or ["Nothing stands out: tokens and gradient are spread over the pass rates."]


def _share(view: View, algorithm: str) -> Tensor:
    return next(share for names, share in view.shares.items() if algorithm in names.split(", "))


def _mean_length(lengths: Tensor, view: View) -> float:
    """Return the mean over the pass rates with signal, weighted by groups; 0 if there are no groups."""
    inner = slice(1, view.rollouts_per_prompt)
    groups = view.groups[inner]
    return float((lengths[inner].nan_to_num() * groups).sum() / groups.sum()) if float(groups.sum()) else 0.0


def _cards(view: View, unit: str, tokens_per_gpu_hour: float | None) -> list[tuple[str, str, str]]:
    whole = float(view.groups.sum())
    never, always = float(view.groups[0]), float(view.groups[-1])
    cost = (
        f"{view.wasted_tokens / tokens_per_gpu_hour:,.1f} GPU-hours" if tokens_per_gpu_hour else "in groups at 0 or 1"
    )
    return [
        (f"{unit} that taught nothing", f"{view.wasted_share:.1%}", cost),
        ("groups with signal", f"{1 - (never + always) / max(whole, 1):.1%}", "both right and wrong answers"),
        ("never solved", f"{never / max(whole, 1):.1%}", "of the groups"),
        ("always solved", f"{always / max(whole, 1):.1%}", "of the groups"),
    ]


def _plots(view: View, unit: str) -> list[Plot]:
    k = view.rollouts_per_prompt
    bins = list(range(k + 1))
    axis = {"title": {"text": "pass rate (right / rollouts)"}} | pass_rate_ticks(bins, k)
    tokens = view.tokens / view.tokens.sum().clamp(min=1)
    parts = [
        ("rollout " + unit, tokens),
        ("GRPO's gradient", _share(view, "grpo")),
        ("DARO's gradient", _share(view, "daro")),
    ]
    spent: list[Trace] = [
        {"type": "bar", "x": bins, "y": _numbers(values), "name": name, "marker": {"color": colour}}
        for (name, values), colour in zip(parts, COLOURS, strict=False)
    ]
    share_axis = {"title": {"text": "share"}, "tickformat": ".0%", "rangemode": "tozero"}
    inner = bins[1:k]
    algorithms = [_line(inner, share[1:k], names, i) for i, (names, share) in enumerate(view.shares.items())]
    lengths = [_line(bins, view.right_length, "right", 2), _line(bins, view.wrong_length, "wrong", 7)]
    weights = [_line(inner, view.weight_rest[1:k], "at rest", 0), _line(inner, view.weight_learnt[1:k], "learnt", 1)]
    return [
        Plot(
            f"Where {unit} and gradient go",
            f"Bars of one colour add up to all {unit}, or to the whole gradient. Groups at 0 and 1 cost {unit} and "
            "have no gradient.",
            spent,
            {"xaxis": axis, "yaxis": share_axis, "barmode": "group"},
        ),
        Plot(
            "What each algorithm would pay",
            "Share of the gradient per pass rate, with default options. Algorithms of equal shares are one line.",
            algorithms,
            {"xaxis": axis, "yaxis": share_axis},
        ),
        Plot(
            "Length by pass rate",
            f"Mean {unit} of right and of wrong answers.",
            lengths,
            {"xaxis": axis, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}},
        ),
        Plot(
            "DARO's weights",
            "Where they settle on these rollouts, and where one update for each file leaves them.",
            weights,
            {"xaxis": axis, "yaxis": {"title": {"text": "weight"}, "rangemode": "tozero"}},
        ),
    ]


def _line(x: Sequence[int], values: Tensor, name: str, colour: int) -> Trace:
    dash = "solid" if colour < len(COLOURS) else "dot"
    line = {"color": COLOURS[colour % len(COLOURS)], "width": 2, "dash": dash}
    return {"type": "scatter", "mode": "lines+markers", "x": list(x), "y": _numbers(values), "name": name, "line": line}


def _numbers(values: Tensor) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
