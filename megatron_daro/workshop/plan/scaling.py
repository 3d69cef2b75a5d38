"""Where a recipe stops scaling, and why: simulates thousands of steps on more and more GPUs, with long tails and
failures.

Workload, Gpu -> the best layout at each size -> simulated steps -> Size records -> plot. The batch stays that of the
recipe. Each step draws the sum and the maximum of its answers' lengths. GPUs fail at random; a failure costs a restart
and the work since the last checkpoint.
The plot is one HTML page that needs no network: throughput against GPUs beside the ideal, and what a step waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import Gpu
from megatron_daro.workshop.plan.search import Choice, search
from megatron_daro.workshop.plan.times import Constants
from megatron_daro.workshop.plan.workload import Workload

STEPS = 2000
SLOWING = 0.5
"""Doubling the GPUs should double the throughput; a recipe stops scaling where it gains less than this share of it."""


@dataclass(frozen=True, slots=True)
class Failures:
    """mtbf_hours: mean time between failures of one GPU (default: 419 interruptions in 54 days on 16,384 GPUs, Llama 3,
    arXiv 2407.21783). restart_s: until training continues. save_every: batches between checkpoints."""

    mtbf_hours: float = 50_000.0
    restart_s: float = 600.0
    save_every: int = 20


@dataclass(frozen=True, slots=True)
class Size:
    """What was simulated at one number of GPUs. Seconds are means of a batch; tokens_per_s includes what failures cost.

    parts: seconds by what a step waits for: generation at full width, its tail (when at most a tenth of the answers
    still run), training, its bubble and communication, sync, fixed, failures.
    """

    gpus: int
    choice: Choice
    step: float
    tokens_per_s: float
    parts: dict[str, float]

    @property
    def bound_by(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)


def simulate(
    workload: Workload, gpu: Gpu, sizes: Sequence[int], failures: Failures, *, constants: Constants | None = None,
    steps: int = STEPS, seed: int = 0,
) -> list[Size]:  # fmt: skip
    """Simulate a run of `steps` batches at each number of GPUs; sizes at which nothing fits are left out.

    Raises:
        ConfigError: nothing fits at any size.
    """
    rng, known = np.random.default_rng(seed), constants or Constants()
    rows = []
    for gpus in sizes:
        try:
            choice = search(workload, gpu, gpus, constants=known, best=1).choices[0]
        except ConfigError as error:
            refused = error
            continue
        rows.append(_simulated(workload, gpus, choice, failures, steps, rng))
    if not rows:
        raise refused
    return rows


def doublings(first: int, last: int) -> list[int]:
    """Return first, 2 * first, ... and `last` at the end."""
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return [*sizes, last] if sizes[-1] < last else sizes


def stops_at(sizes: Sequence[Size]) -> Size | None:
    """Return the last size before more GPUs gain less than SLOWING of what they should; None if that never happens."""
    for before, after in pairwise(sizes):
        gain = after.tokens_per_s / before.tokens_per_s - 1
        if gain < SLOWING * (after.gpus / before.gpus - 1):
            return before
    return None


def _simulated(
    workload: Workload, gpus: int, choice: Choice, failures: Failures, steps: int, rng: np.random.Generator
) -> Size:
    times, generation = choice.trainers.times, choice.servers.generation
    tail = generation * _tail_share(workload)
    tail_S, sum_S = _drawn(workload, steps, rng)
    generation_S = tail * tail_S + (generation - tail) * sum_S
    train_S = times.total * sum_S
    overlapped = choice.batches_ahead > 0
    step_S = np.maximum(generation_S, train_S) if overlapped else generation_S + train_S
    step_S = step_S + choice.sync + choice.fixed + choice.offload
    lost = _lost_s(step_S, gpus, failures, rng)
    waits_for_training = overlapped and times.total > generation
    parts = {"sync": choice.sync, "fixed": choice.fixed, "offload": choice.offload, "failures": lost / steps}
    if not waits_for_training:
        parts |= {"generation": generation - tail, "generation's tail": tail}
    if waits_for_training or not overlapped:
        parts |= {"training": times.compute + times.turns + times.logprobs, "pipeline bubble": times.bubble}
        parts |= {"communication": times.communication}
    seconds = float(step_S.sum()) + lost
    return Size(gpus, choice, float(step_S.mean()), steps * workload.tokens / seconds, parts)


def _tail_share(workload: Workload) -> float:
    """Return the share of the decoding steps in which at most a tenth of the answers still run."""
    lengths = workload.response_Q
    return float(1 - np.quantile(lengths, 0.9) / lengths.max())


def _drawn(workload: Workload, steps: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the longest answer and the sum of lengths of each step, as multiples of the values in the plan."""
    lengths, count = workload.response_Q, workload.generated
    longest_S = np.quantile(lengths, rng.random(steps) ** (1 / count)) / lengths.max()
    mean = lengths.mean()
    sum_S = 1 + rng.standard_normal(steps) * lengths.std() / mean / np.sqrt(count)
    return longest_S, np.maximum(sum_S, 0.1)


def _lost_s(step_S: np.ndarray, gpus: int, failures: Failures, rng: np.random.Generator) -> float:
    """Return the seconds that failures cost: each costs a restart and repeats the steps since the last checkpoint."""
    rate = gpus / (failures.mtbf_hours * 3600)
    lost = 0.0
    for index in _failed_steps(step_S, rate, rng):
        since = index % failures.save_every
        lost += float(step_S[index - since : index].sum() + step_S[index] * rng.random()) + failures.restart_s
    return lost


def _failed_steps(step_S: np.ndarray, rate: float, rng: np.random.Generator) -> Iterator[int]:
    counts = rng.poisson(step_S * rate)
    for index in np.flatnonzero(counts):
        for _ in range(counts[index]):
            yield int(index)


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
    words = f"; stops scaling at {end.gpus} GPUs, bound by {end.bound_by}" if end else "; scales to the end"
    figure.update_layout(barmode="stack", title=title + words, height=800, template="plotly_white")
    figure.update_xaxes(type="log", title_text="GPUs", tickvals=gpus, row=2, col=1)
    figure.update_xaxes(type="log", tickvals=gpus, row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=1)
    target.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
