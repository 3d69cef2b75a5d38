"""Two evaluations of the same problems: the difference of each problem, its mean, an interval, a test, and a page.

Everything is paired by problem, since problems differ far more than models do. The page shows where B won and lost
against A, with the answers side by side; it is one file that needs no network, and all text of models, problems and
paths is escaped. Rejects directories that share no problem, and unfinished evaluations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.errors import DataError
from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.evaluate import answers, identity
from megatron_daro.workshop.evaluate.intervals import bootstrap_means, interval
from megatron_daro.workshop.evaluate.results import PROBLEMS_FILE
from megatron_daro.workshop.report.page import COLOURS, Page, Plot, Section, Table, Trace, write_page

FLIPS = 10_000
_EXACT = 12
_COMPARED = (
    *("max_response_tokens", "stop_token_ids", "stop", "repetition", "seed", "engine", "verifier", "tokenizer"),
    "template_date",
)
_OF_SET = ("file", "template", "temperature", "top_p", "samples")


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem in both evaluations: rows of problems.parquet."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]

    @property
    def difference(self) -> float:
        """Pass rate of B less that of A."""
        return float(self.b["correct"] / self.b["samples"] - self.a["correct"] / self.a["samples"])


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one set. a, b: means over problems; low, high: 95 % interval of b - a, paired bootstrap over
    problems; p: two-sided sign-flip permutation test of b = a; won, lost: problems where b is above, below a."""

    set: str
    metric: str
    problems: int
    a: float
    b: float
    low: float
    high: float
    p: float
    won: int
    lost: int

    @property
    def difference(self) -> float:
        """b - a."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class Comparison:
    """a, b: the directories. pairs: by set. remarks: what else differs, and what was left out."""

    a: Path
    b: Path
    pairs: Mapping[str, Sequence[Pair]]
    lines: Sequence[Line]
    remarks: Sequence[str]


def compare(a: Path, b: Path, *, seed: int = 0) -> Comparison:
    """Compare two evaluations.

    Args:
        a, b: directories that `megatron-daro eval` wrote. seed: of bootstrap and flips.

    Raises:
        DataError: one is no evaluation or is unfinished, or they have no problem in common.
    """
    summaries, rows = [identity.read(one) for one in (a, b)], [_problems(one) for one in (a, b)]
    common = rows[0].keys() & rows[1].keys()
    if not common:
        raise DataError(
            f"--compare: {a} (sets {', '.join(summaries[0]['sets'])}) and {b} (sets {', '.join(summaries[1]['sets'])}) "
            "have no problem in common; allowed: evaluations of the same sets, under the same names"
        )
    pairs: dict[str, list[Pair]] = {}
    for key in rows[0]:
        if key in common:
            pairs.setdefault(key[0], []).append(Pair(rows[0][key], rows[1][key]))
    lines = []
    for metric, value in (("avg", _rate), ("maj", _majority)):
        values = {name: _values(some, value) for name, some in pairs.items()}
        lines += [_line(name, metric, {name: both}, seed) for name, both in values.items()]
        if len(values) > 1:
            lines.append(_line("mean of sets", metric, values, seed))
    left_out = [f"{len(one.keys() - common)} problems stand in {d} only" for one, d in zip(rows, (a, b), strict=True)]
    remarks = [text for text in left_out if not text.startswith("0 ")]
    return Comparison(a, b, pairs, lines, [*remarks, *_other_ways(summaries[0], summaries[1], list(pairs))])


def sign_flip_p(differences: Sequence[np.ndarray], *, seed: int) -> float:
    """Return the two-sided p of the hypothesis that the mean difference is zero, under which each problem's difference
    is equally likely to have the other sign.

    With up to 12 nonzero differences all flips are counted; with more, 10,000 seeded ones, with 1 added to both counts
    so that p is never 0 (Phipson and Smyth, 2010).

    Args:
        differences: of each set, float64 [P]; the statistic is the mean of the sets' means.
    """
    scaled = np.concatenate([values / len(values) for values in differences]) / len(differences)
    scaled = scaled[scaled != 0]
    observed, count = abs(scaled.sum()), len(scaled)
    if not count:
        return 1.0
    margin = observed * (1 - 1e-12)  # sums that differ only by rounding count as equal
    if count <= _EXACT:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return float((np.abs(signs @ scaled) >= margin).mean())
    rng, beyond = np.random.default_rng(seed), 0
    for _ in range(10):
        signs = 1 - 2 * rng.integers(0, 2, (FLIPS // 10, count), dtype=np.int8)
        beyond += int((np.abs(signs @ scaled) >= margin).sum())
    return (beyond + 1) / (FLIPS + 1)


def _line(name: str, metric: str, values: Mapping[str, tuple[np.ndarray, np.ndarray]], seed: int) -> Line:
    differences = {one: b - a for one, (a, b) in values.items()}
    means_B = np.mean([bootstrap_means(d, seed=seed, name=one) for one, d in differences.items()], axis=0)
    low, high = interval(means_B)
    every = np.concatenate(list(differences.values()))
    return Line(
        set=name,
        metric=metric,
        problems=len(every),
        a=float(np.mean([a.mean() for a, _ in values.values()])),
        b=float(np.mean([b.mean() for _, b in values.values()])),
        low=low,
        high=high,
        p=sign_flip_p(list(differences.values()), seed=seed),
        won=int((every > 0).sum()),
        lost=int((every < 0).sum()),
    )


def _values(pairs: Sequence[Pair], value: Callable[[Mapping[str, Any]], float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([value(pair.a) for pair in pairs]), np.array([value(pair.b) for pair in pairs])


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["correct"] / row["samples"])


def _majority(row: Mapping[str, Any]) -> float:
    return float(row["majority_right"])


def _problems(out: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    try:
        rows = pq.read_table(out / PROBLEMS_FILE).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"--compare: {out} has no scores yet ({error}); its own command, given again, finishes it"
        ) from error
    return {(row["set"], row["problem"]): row for row in rows}


def _other_ways(a: Mapping[str, Any], b: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
    """Return what differs between the evaluations besides the weights, and may therefore explain their difference."""
    differences = [f"{key}: A {a.get(key)}, B {b.get(key)}" for key in _COMPARED if a.get(key) != b.get(key)]
    for name in sets:
        was, is_ = a["sets"][name], b["sets"][name]
        differences += [f"{name} {key}: A {was[key]}, B {is_[key]}" for key in _OF_SET if was.get(key) != is_.get(key)]
    return differences


MOST_SHOWN = 40
"""The most won, and the most lost, problems of a set on the page, the largest differences first."""
_COLUMNS = ("source", "prompt_id", "text", "correct", "reason", "length", "finish_reason")
_STATEMENT, _ANSWER = 3000, 6000
_BINS = 20
_Key = tuple[str, str]

HEAD = ["set", "metric", "problems", "A", "B", "B - A", "95 % interval", "p", "won", "lost"]


def line_cells(line: Line) -> list[str]:
    """Return a line of the table as text."""
    return [
        *(line.set, line.metric, str(line.problems), f"{line.a:.1%}", f"{line.b:.1%}"),
        *(f"{100 * line.difference:+.1f}", f"{100 * line.low:+.1f} to {100 * line.high:+.1f}"),
        *(f"{line.p:.4f}", str(line.won), str(line.lost)),
    ]


def write_comparison(comparison: Comparison, target: Path) -> None:
    """Write the page. Raises DataError where answers cannot be read or the page cannot be written."""
    write_page(_page(comparison), target, what="page", option="--out")


def _page(comparison: Comparison) -> Page:
    chosen = {name: _chosen(pairs) for name, pairs in comparison.pairs.items()}
    wanted = {(name, pair.a["problem"]) for name, pairs in chosen.items() for pair in pairs}
    shown = [_answers_of(out, wanted) for out in (comparison.a, comparison.b)]
    a, b = (safe_text(one.resolve().name, 80, one_line=True) for one in (comparison.a, comparison.b))
    return Page(
        title=f"A {a} · B {b}",
        subtitle=f"A: {safe_text(comparison.a, 200)} · B: {safe_text(comparison.b, 200)}",
        sections=[Section(safe_text(name, 80), _plots(pairs)) for name, pairs in comparison.pairs.items()],
        template="comparison.html.j2",
        values={
            "lines": Table(HEAD, [[safe_text(cell, 80) for cell in line_cells(line)] for line in comparison.lines], 8),
            "remarks": comparison.remarks,
            "sets": [_set_values(name, chosen[name], shown) for name in comparison.pairs],
            "statement_characters": _STATEMENT,
            "answer_characters": _ANSWER,
        },
    )


def _chosen(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the problems that are shown: won ones, then lost ones."""
    won = sorted((pair for pair in pairs if pair.difference > 0), key=lambda pair: -pair.difference)
    lost = sorted((pair for pair in pairs if pair.difference < 0), key=lambda pair: pair.difference)
    return [*won[:MOST_SHOWN], *lost[:MOST_SHOWN]]


def _answers_of(out: Path, wanted: set[_Key]) -> dict[_Key, dict[bool, Mapping[str, Any]]]:
    """Return a right and a wrong answer of each wanted problem, where there are such answers."""
    found: dict[_Key, dict[bool, Mapping[str, Any]]] = defaultdict(dict)
    for row in answers.rows(out, _COLUMNS):
        key = (row["source"], row["prompt_id"])
        if key in wanted:
            found[key].setdefault(row["correct"], row)
    return found


def _plots(pairs: Sequence[Pair]) -> list[Plot]:
    counts = Counter((_rate(pair.a), _rate(pair.b)) for pair in pairs)
    points: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [a for a, _ in counts],
        "y": [b for _, b in counts],
        "marker": {"size": [6 + 4 * count**0.5 for count in counts.values()], "color": COLOURS[0], "opacity": 0.7},
        "text": [f"{count} problems" for count in counts.values()],
        "hovertemplate": "A %{x:.0%}, B %{y:.0%}: %{text}<extra></extra>",
        "showlegend": False,
    }
    diagonal: Trace = {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "showlegend": False}
    diagonal |= {"line": {"color": COLOURS[-1], "width": 1, "dash": "dot"}, "hoverinfo": "skip"}
    shown = {"tickformat": ".0%", "dtick": 0.25, "range": [-0.05, 1.05]}
    axes = {name: {"title": {"text": f"pass rate of {who}"}, **shown} for name, who in _AXES}
    scatter = Plot(
        "Pass rate of each problem",
        "One point a pair of pass rates, larger where more problems share it. Above the line B is better.",
        [diagonal, points],
        axes | {"hovermode": "closest"},
    )
    histogram: Trace = {
        "type": "histogram",
        "x": [pair.difference for pair in pairs],
        "xbins": _bins(pairs),
        "marker": {"color": COLOURS[1]},
        "name": "problems",
    }
    spread = Plot(
        "Differences",
        "How many problems differ by how much; right of 0 B is better.",
        [histogram],
        {
            "xaxis": {"title": {"text": "B - A"}, "tickformat": "+.0%", "dtick": 0.25, "range": [-1.1, 1.1]},
            "yaxis": {"title": {"text": "problems"}},
        },
    )
    return [scatter, spread, *_level_plot(pairs)]


def _bins(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return histogram bins placed so that all hold equally many of the possible differences."""
    step = 1 / lcm(*(row["samples"] for pair in pairs for row in (pair.a, pair.b)))
    width = step * max(1, round(2 / _BINS / step))
    return {"start": -1 - width / 2, "end": 1 + width, "size": width}


_AXES = (("xaxis", "A"), ("yaxis", "B"))


def _level_plot(pairs: Sequence[Pair]) -> list[Plot]:
    levels: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.a["level"]:
            levels[str(pair.a["level"])].append(pair)
    if not levels:
        return []
    names = sorted(levels)
    bars: list[Trace] = [
        {
            "type": "bar",
            "x": [safe_text(name, 40) for name in names],
            "y": [fmean(_rate(getattr(pair, which)) for pair in levels[name]) for name in names],
            "name": which.upper(),
            "marker": {"color": colour},
        }
        for which, colour in (("a", COLOURS[0]), ("b", COLOURS[1]))
    ]
    layout = {"xaxis": {"title": {"text": "level"}, "type": "category"}, "barmode": "group"}
    return [
        Plot(
            "Accuracy by level",
            "The set's own difficulty.",
            bars,
            layout | {"yaxis": {"title": {"text": "accuracy"}, "tickformat": ".0%", "rangemode": "tozero"}},
        )
    ]


def _set_values(
    name: str, pairs: Sequence[Pair], shown: Sequence[Mapping[_Key, Mapping[bool, Any]]]
) -> tuple[str, list[Any], list[Any]]:
    """Return the set's name, the problems that B won, and those that it lost."""
    won = [_problem_values(name, pair, shown) for pair in pairs if pair.difference > 0]
    lost = [_problem_values(name, pair, shown) for pair in pairs if pair.difference < 0]
    return name, won, lost


def _problem_values(name: str, pair: Pair, shown: Sequence[Mapping[_Key, Mapping[bool, Any]]]) -> dict[str, Any]:
    key = (name, pair.a["problem"])
    # A right answer of the better side and a wrong one of the other, where there are such answers.
    wanted = (pair.difference < 0, pair.difference > 0)
    return {
        "rates": " → ".join(f"{row['correct']}/{row['samples']}" for row in (pair.a, pair.b)),
        "points": f"{100 * pair.difference:+.0f}",
        "line": " ".join(str(pair.a["statement"]).split()),
        "level": pair.a["level"],
        "statement": pair.a["statement"],
        "gold": pair.a["gold"],
        "sides": [
            _side_values(letter, row, _picked(found.get(key, {}), right))
            for letter, row, found, right in zip("AB", (pair.a, pair.b), shown, wanted, strict=True)
        ],
    }


def _side_values(letter: str, row: Mapping[str, Any], answer: Mapping[str, Any] | None) -> dict[str, Any]:
    facts = (
        f"verdict {answer['reason']} · {answer['length']} tokens · finish {answer['finish_reason']}" if answer else ""
    )
    of_problem = {name: row[name] for name in ("correct", "samples", "majority")}
    return {"letter": letter, "answer": answer, "facts": facts, **of_problem}


def _picked(by_verdict: Mapping[bool, Any], right: bool) -> Mapping[str, Any] | None:
    return by_verdict.get(right) or by_verdict.get(not right)
