"""The plot of a scaling simulation: one HTML page without network.

Place in the data flow: Size records -> file. Throughput against GPUs with the ideal beside it, and what a step waits
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_daro.plan.scaling import Size, stops_at


def write_plot(sizes: Sequence[Size], target: Path, title: str) -> None:
    """Write the page."""
    gpus = [size.gpus for size in sizes]
    first = sizes[0]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=("tokens a second", "share of a step"))
    figure.add_scatter(x=gpus, y=[size.tokens_per_s for size in sizes], name="simulated", mode="lines+markers")
    ideal = [first.tokens_per_s * n / first.gpus for n in gpus]
    figure.add_scatter(x=gpus, y=ideal, name=f"as {first.gpus} GPUs", line={"dash": "dot"})
    for part in dict.fromkeys(name for size in sizes for name in size.parts):
        shares = [size.parts.get(part, 0.0) / sum(size.parts.values()) for size in sizes]
        figure.add_trace(go.Bar(x=gpus, y=shares, name=part), row=2, col=1)
    end = stops_at(sizes)
    words = f"; stops to scale at {end.gpus} GPUs, bound by {end.bound_by}" if end else "; scales to the end"
    figure.update_layout(barmode="stack", title=title + words, height=800, template="plotly_white")
    figure.update_xaxes(type="log", title_text="GPUs", tickvals=gpus, row=2, col=1)
    figure.update_xaxes(type="log", tickvals=gpus, row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=1)
    target.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
