"""Two evaluations of the same problems: the difference of each problem, its mean, an interval and a test.

Place in the data flow: OUT of two evaluations -> pairs of problems -> Comparison -> a table and a page
(compare_page.py). Everything is paired by problem, since problems differ far more than models do. Refuses directories
that share no problem, and evaluations that did not end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro.errors import DataError
from megatron_daro.evaluate import made_of
from megatron_daro.evaluate.metrics import bootstrap_means, interval
from megatron_daro.evaluate.results import PROBLEMS_FILE

FLIPS = 10_000
_EXACT = 12
_COMPARED = ("max_response_tokens", "stop_token_ids", "seed", "engine", "verifier", "tokenizer")
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
        DataError: one is no evaluation or did not end, or they have no problem in common.
    """
    made, rows = [made_of.read(one) for one in (a, b)], [_problems(one) for one in (a, b)]
    common = rows[0].keys() & rows[1].keys()
    if not common:
        raise DataError(
            f"--compare: {a} (sets {', '.join(made[0]['sets'])}) and {b} (sets {', '.join(made[1]['sets'])}) have no "
            "problem in common; allowed: evaluations of the same sets, under the same names"
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
    return Comparison(a, b, pairs, lines, [*remarks, *_other_ways(made[0], made[1], list(pairs))])


def sign_flip_p(differences: Sequence[np.ndarray], *, seed: int) -> float:
    """Return the two-sided p of the mean difference being zero: under that, each problem's difference could as well
    have the other sign.

    With up to 12 differences that are not zero all flips are counted, else 10,000 seeded ones, with 1 added to both
    counts so that p is never 0 (Phipson and Smyth, 2010).

    Args:
        differences: of each set, float64 [P]; the statistic is the mean of the sets' means.
    """
    scaled = np.concatenate([values / len(values) for values in differences]) / len(differences)
    scaled = scaled[scaled != 0]
    observed, count = abs(scaled.sum()), len(scaled)
    if not count:
        return 1.0
    margin = observed * (1 - 1e-12)  # sums that are equal but for rounding count as equal
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
    """Return what, beside the weights, is not the same: the difference may come from there."""
    found = [f"{key}: A {a.get(key)}, B {b.get(key)}" for key in _COMPARED if a.get(key) != b.get(key)]
    for name in sets:
        was, is_ = a["sets"][name], b["sets"][name]
        found += [f"{name} {key}: A {was[key]}, B {is_[key]}" for key in _OF_SET if was.get(key) != is_.get(key)]
    return found
