"""Means over problems with 95 % intervals, by bootstrap over problems.

Shape letters: P problems, B bootstrap resamples.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its interval; in [0, 1] for scores."""

    mean: float
    low: float
    high: float


def bootstrap_means(values_P: np.ndarray, *, seed: int, name: str, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the means of resampled problems, float64 [B]: the same for the same seed, name and values.

    Args:
        values_P: one number per problem. name: of the set, so that sets are resampled independently.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    size, means = len(values_P), []
    step = max(1, _AT_ONCE // size)
    for start in range(0, resamples, step):
        chosen = rng.integers(0, size, (min(step, resamples - start), size))
        means.append(values_P[chosen].mean(axis=1))
    return np.concatenate(means)


def interval(means_B: np.ndarray) -> tuple[float, float]:
    """Return the ends of the central 95 % of resampled means (percentile bootstrap)."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means_B, [tail, 100 - tail])
    return float(low), float(high)


def estimate(values_P: Sequence[float], *, seed: int, name: str) -> Estimate:
    """Return the mean over problems and its 95 % interval."""
    values = np.asarray(values_P, dtype=np.float64)
    return Estimate(float(values.mean()), *interval(bootstrap_means(values, seed=seed, name=name)))


def estimate_of_sets(values_of_sets: dict[str, Sequence[float]], *, seed: int) -> Estimate:
    """Return the mean of the sets' means with its 95 % interval; all sets count the same, each resampled by itself."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in values_of_sets.items()}
    means_B = np.mean([bootstrap_means(array, seed=seed, name=name) for name, array in arrays.items()], axis=0)
    return Estimate(float(np.mean([array.mean() for array in arrays.values()])), *interval(means_B))
