"""Reads a run directory for the report: metrics, configuration, and what is worth knowing about both.

RUN/metrics.jsonl and RUN/config.yaml -> `RunData` -> plots and tables. It copes with a run that is still going, with
missing metric families, and with long runs (it averages neighbouring steps).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megatron_daro.errors import DataError
from megatron_daro.observe.metrics import FILE_NAME, read_metrics

MOST_POINTS = 1500
_SECRET = re.compile(r"(?im)^(\s*[\w-]*(?:api_?key|secret|password|credential|auth_token)[\w-]*\s*:)[ \t]*\S.*$")

Row = Mapping[str, float | None]


@dataclass(frozen=True)
class RunData:
    """What one run recorded. `rows` is every step; `points` at most `MOST_POINTS`, each the mean of `window` steps."""

    run_dir: Path
    rows: list[dict[str, float | None]]
    points: list[dict[str, float | None]]
    window: int
    config_text: str | None
    config: Mapping[str, Any]

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every metric key with at least one finite value."""
        return frozenset(k for row in self.rows for k, v in row.items() if v is not None and k != "step")

    def setting(self, *path: str) -> object:
        """Return a value of the configuration by path, or None."""
        value: object = self.config
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one metric for drawing, where it was recorded."""
        pairs = [(p["step"], p[key]) for p in self.points if p.get(key) is not None]
        return [int(s) for s, _ in pairs], [v for _, v in pairs]  # type: ignore[arg-type,misc]

    def values(self, key: str) -> list[float]:
        """Return every recorded value of one metric, unaveraged."""
        return [v for row in self.rows if (v := row.get(key)) is not None]

    def total(self, key: str) -> float:
        """Return the sum of a metric over all steps."""
        return math.fsum(self.values(key))

    def under(self, prefix: str) -> list[str]:
        """Return the keys that start with `prefix`, in order."""
        return sorted(k for k in self.keys if k.startswith(prefix))

    def bins(self, family: str) -> list[int]:
        """Return the k for which `{family}/{k}` was recorded, in order."""
        names = (k.removeprefix(f"{family}/") for k in self.under(f"{family}/"))
        return sorted(int(k) for k in names if k.isascii() and k.isdigit())

    @cached_property
    def rollouts_per_prompt(self) -> int | None:
        """K, from the configuration or else from the highest bin; None if neither has it."""
        configured = self.setting("rollout", "rollouts_per_prompt")
        if isinstance(configured, int) and configured >= 1:
            return configured
        highest = max((max(b) for f in ("groups", "tokens") if (b := self.bins(f"difficulty/{f}"))), default=None)
        return highest or None

    @property
    def train_rows(self) -> list[dict[str, float | None]]:
        """The rows of optimizer steps (an evaluation before training has step 0)."""
        return [r for r in self.rows if (r["step"] or 0) > 0]


def load_run(run_dir: Path) -> RunData:
    """Read a run directory.

    Args:
        run_dir: the directory that holds metrics.jsonl.

    Raises:
        DataError: there is no metrics.jsonl, or it is damaged before its last line.
    """
    run_dir = Path(run_dir)
    if not (run_dir / FILE_NAME).is_file():
        raise DataError(
            f"{run_dir}: no {FILE_NAME} here; give the directory of a run (trainer.run_dir) that has started"
        )
    return run_of_rows(run_dir, read_metrics(run_dir), *_read_config(run_dir / "config.yaml"))


def run_of_rows(
    run_dir: Path,
    rows: list[dict[str, float | None]],
    config_text: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunData:
    """Return a run from its metrics: one row per step, in order, each with its "step"."""
    window = math.ceil(len(rows) / MOST_POINTS)
    rich = [row | mean_lengths(row) for row in rows]
    points = rich if window <= 1 else [_average(rich[i : i + window]) for i in range(0, len(rows), window)]
    return RunData(run_dir, rows, points, max(1, window), config_text, config or {})


def mean_lengths(row: Row) -> dict[str, float | None]:
    """Return the mean trained tokens of right and wrong answers over a step's bins, as `derived/length_{right,wrong}`.

    A bin with g groups holds g * k right answers and g * (K - k) wrong ones.
    """
    groups = {int(k.rpartition("/")[2]): v for k, v in row.items() if k.startswith("difficulty/groups/") and v}
    size = max((int(k.rpartition("/")[2]) for k in row if k.startswith("difficulty/groups/")), default=0)
    derived: dict[str, float | None] = {}
    for side, share in (("right", lambda k: k), ("wrong", lambda k: size - k)):
        pairs = [(row.get(f"difficulty/length_{side}/{k}"), g * share(k)) for k, g in groups.items()]
        known = [(length, count) for length, count in pairs if length is not None and count]
        if known:
            total = sum(count for _, count in known)
            derived[f"derived/length_{side}"] = sum(length * count for length, count in known) / total
    return derived


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the centred moving mean over up to `2 * reach + 1` values (fewer at the ends)."""
    return [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def ends_of(values: Sequence[float]) -> tuple[float, float, int]:
    """Return (mean of the first values, mean of the last, how many): a tenth of them each, but between 1 and 10."""
    count = max(1, min(10, len(values) // 10))
    return fmean(values[:count]), fmean(values[-count:]), count


def _average(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return one row for several: the means of the recorded values, at the step of the last row."""
    keys = dict.fromkeys(k for row in rows for k in row if k != "step")
    merged: dict[str, float | None] = {"step": rows[-1]["step"]}
    for key in keys:
        values = [v for row in rows if (v := row.get(key)) is not None]
        merged[key] = fmean(values) if values else None
    return merged


def _read_config(path: Path) -> tuple[str | None, Mapping[str, Any]]:
    """Return the file's text (secrets blanked) and its content, which is empty if the file is no YAML mapping."""
    if not path.is_file():
        return None, {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        content = None
    return _SECRET.sub(r"\1 (hidden)", text), content if isinstance(content, Mapping) else {}
