"""The results of the lab: rows of Parquet, and the statistics made of them.

Place in the data flow: runs -> `curves.parquet` (accuracy at each evaluation) and `details.parquet` (difficulty, pass@k
and weights at a few) -> intervals over seeds, steps to the baseline's final accuracy. Refuses folders without results.
Numbers are stored with four digits. Arms of one seed share problems and first policy, so differences are paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.errors import DataError

CURVES, DETAILS = "curves.parquet", "details.parquet"
LEVEL = 0.05
"""The level of significance, for p values."""
_DETAILED = ("bands", "pass_at", "weights", "trained_accuracy", "extra_wrong", "extra_right")
_KEYS = ("kind", "world", "arm", "purpose", "seed", "learning_rate")
# Two-sided 95 % points of Student's t, by degrees of freedom; beyond the table the normal distribution's is used.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, slots=True)
class Job:
    """One run: kind "closed", "tiny" or "smollm2", purpose "tune" or "compare"."""

    kind: str
    world: str
    arm: str
    purpose: str
    seed: int
    learning_rate: float

    @property
    def key(self) -> tuple[Any, ...]:
        """The values that identify it in the results."""
        return tuple(getattr(self, name) for name in _KEYS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job gave: its evaluations, and why it ended early (or ""); the CPU seconds it took, 0 if not known."""

    job: Job
    records: list[dict[str, Any]]
    ended: str
    cpu_seconds: float = 0.0

    @property
    def final(self) -> float:
        """Held-out accuracy after the last step; nan for a run that ended early."""
        return math.nan if self.ended else self.records[-1]["accuracy"]

    @property
    def status(self) -> str:
        """Empty, or what went wrong: it diverged, or it ended below where it began."""
        if self.ended:
            return "diverged"
        return "worse than before training" if self.final < self.records[0]["accuracy"] else ""

    def steps_to(self, accuracy: float, axis: str = "step") -> float:
        """Return where the curve first reaches an accuracy, linear between evaluations; infinite if never.

        Args:
            accuracy: to reach. axis: "step", or "answers" or "tokens" for all that were sampled, with filtered ones.
        """
        before: dict[str, Any] | None = None
        for record in self.records:
            if record["accuracy"] >= accuracy:
                if before is None:
                    return float(record[axis])
                share = (accuracy - before["accuracy"]) / (record["accuracy"] - before["accuracy"])
                return before[axis] + share * (record[axis] - before[axis])
            before = record
        return math.inf

    def mean_accuracy(self, budget: float, axis: str) -> float:
        """Return the accuracy averaged over an axis from the start to `budget`, linear between evaluations; nan for a
        run that ended early.

        Args:
            budget: above 0, at most the last record's. axis: as in `steps_to`.
        """
        if self.ended:
            return math.nan
        area = 0.0
        for before, after in pairwise(self.records):
            start, end = before[axis], min(after[axis], budget)
            if end <= start:
                continue
            slope = (after["accuracy"] - before["accuracy"]) / (after[axis] - start)
            area += (end - start) * (before["accuracy"] + slope * (end - start) / 2)
        return area / budget


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95 % interval (Student's t); both ends are nan for a single seed."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of some values."""
        mean = fmean(values) if values else math.nan
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, math.nan, math.nan)
        degrees = len(values) - 1
        reach = (_T95[degrees - 1] if degrees <= len(_T95) else 1.96) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - reach, mean + reach)


def write(folder: Path, outcomes: Iterable[Outcome], note: Mapping[str, str]) -> None:
    """Write both files; `note` becomes their metadata (the command, versions, settings)."""
    curves: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    for outcome in outcomes:
        named = dict(zip(_KEYS, outcome.job.key, strict=True))
        comparing = outcome.job.purpose == "compare"
        records = outcome.records if comparing else outcome.records[-1:]
        for index, record in enumerate(records):
            row = named | {"ended": outcome.ended}
            plain = {k: v for k, v in record.items() if k not in _DETAILED}
            curves.append(row | {k: _rounded(v) for k, v in plain.items()})
            if comparing and (index % max(1, (len(records) - 1) // 6) == 0 or index == len(records) - 1):
                details.append(
                    named | {"step": record["step"]} | {k: _rounded(record[k]) for k in _DETAILED if k in record}
                )
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((CURVES, curves), (DETAILS, details)):
        # Without names Arrow takes the columns of the first row, and drops those that only other rows have.
        columns = dict.fromkeys(name for row in rows for name in row)
        table = pa.Table.from_pydict({c: [row.get(c) for row in rows] for c in columns})
        table = table.replace_schema_metadata(dict(note))
        pq.write_table(table, folder / name, compression="zstd", compression_level=19)


def read(folder: Path) -> tuple[list[Outcome], dict[str, str]]:
    """Return what `write` wrote: outcomes and the note.

    Raises:
        DataError: a file is missing, or is not Parquet.
    """
    try:
        curves, details = (pq.read_table(folder / name) for name in (CURVES, DETAILS))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{folder}: no results of the lab here ({error}); make them with examples/lab/run.sh"
        ) from error
    more = {(*_key(row), row["step"]): row for row in details.to_pylist()}
    found: dict[tuple[Any, ...], Outcome] = {}
    for row in curves.to_pylist():
        key = _key(row)
        outcome = found.setdefault(key, Outcome(Job(*key), [], row["ended"]))
        extra = more.get((*key, row["step"]), {})
        record = {k: v for k, v in row.items() if k not in (*_KEYS, "ended") and v is not None}
        outcome.records.append(record | {k: extra[k] for k in _DETAILED if extra.get(k) is not None})
    note = {k.decode(): v.decode() for k, v in (curves.schema.metadata or {}).items()}
    return list(found.values()), note


def best_rates(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], float]:
    """Return (world, arm) -> the learning rate with the highest mean final accuracy over the tuning seeds.

    A rate at which any tuning run diverged is excluded; if all are, the smallest is taken, and the comparison shows it.
    """
    finals: dict[tuple[str, str], dict[float, list[float]]] = {}
    for outcome in outcomes:
        job = outcome.job
        if job.purpose == "tune":
            finals.setdefault((job.world, job.arm), {}).setdefault(job.learning_rate, []).append(outcome.final)
    best = {}
    for where, by_rate in finals.items():
        means = {rate: fmean(values) for rate, values in by_rate.items() if not any(map(math.isnan, values))}
        best[where] = max(sorted(means), key=means.__getitem__) if means else min(by_rate)
    return best


def compared(outcomes: Iterable[Outcome], world: str) -> dict[str, dict[int, Outcome]]:
    """Return arm -> seed -> outcome of the comparison in one world."""
    table: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        if outcome.job.world == world and outcome.job.purpose == "compare":
            table.setdefault(outcome.job.arm, {})[outcome.job.seed] = outcome
    return table


def final_accuracy(runs: Mapping[int, Outcome]) -> Interval:
    """Return the final held-out accuracy over the seeds; nan if one diverged."""
    return Interval.of([o.final for o in runs.values()])


def differences(runs: Mapping[int, Outcome], other: Mapping[int, Outcome], measure: str) -> list[float]:
    """Return one arm less another, for each seed that both have.

    Args:
        measure: "final" for the final accuracy, or "tokens" or "answers" for accuracy averaged over these up to where
            the first of the two ends.
    """
    pairs = [(runs[seed], other[seed]) for seed in sorted(runs.keys() & other.keys())]
    if measure == "final":
        return [own.final - others.final for own, others in pairs]
    budgets = [min(outcome.records[-1][measure] for outcome in pair) for pair in pairs]
    return [
        own.mean_accuracy(budget, measure) - others.mean_accuracy(budget, measure)
        for (own, others), budget in zip(pairs, budgets, strict=True)
    ]


def difference(runs: Mapping[int, Outcome], other: Mapping[int, Outcome]) -> Interval:
    """Return the final accuracy of one arm less another's, with its interval over the seeds."""
    return Interval.of(differences(runs, other, "final"))


def difference_over_tokens(runs: Mapping[int, Outcome], other: Mapping[int, Outcome]) -> Interval:
    """Return the same for accuracy averaged over the tokens generated."""
    return Interval.of(differences(runs, other, "tokens"))


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p of a mean of 0, by Student's t with one degree of freedom less than there are values."""
    degrees = len(values) - 1
    t = abs(fmean(values)) / (stdev(values) / math.sqrt(len(values)))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    # Simpson's rule over x = sqrt(degrees) tan(a), which maps the whole line to a finite interval.
    end, parts = math.atan(t / math.sqrt(degrees)), 400
    heights = [math.cos(end * i / parts) ** (degrees - 1) for i in range(parts + 1)]
    inner = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return max(0.0, 1 - 2 * scale * math.sqrt(degrees) * inner * end / parts / 3)


def benjamini_hochberg(ps: Sequence[float]) -> list[float]:
    """Return adjusted p values, in the order given. Source: Benjamini and Hochberg 1995."""
    adjusted, most = [0.0] * len(ps), 1.0
    for rank, i in sorted(enumerate(sorted(range(len(ps)), key=ps.__getitem__), start=1), reverse=True):
        most = min(most, len(ps) / rank * ps[i])
        adjusted[i] = most
    return adjusted


def ratios_to_baseline(runs: Mapping[int, Outcome], baseline: Mapping[int, Outcome], axis: str = "step") -> list[float]:
    """Return for each seed the steps (or answers) to the baseline's final accuracy, over those of the baseline."""
    found = []
    for seed in sorted(runs.keys() & baseline.keys()):
        mark = baseline[seed].final
        own = baseline[seed].steps_to(mark, axis)
        found.append(runs[seed].steps_to(mark, axis) / own if own else math.nan)
    return found


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEYS)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
