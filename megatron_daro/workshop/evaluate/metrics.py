"""Scores of sampled answers: avg@k, pass@k, maj@k, and intervals by bootstrap over problems.

Right answers and votes of each problem -> one number a problem -> mean and interval. Pure
numpy. Refuses k larger than the samples.

Shape letters: P problems, n samples of a problem, D draws, B bootstrap resamples.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_daro.errors import DataError

RESAMPLES = 10_000
DRAWS = 400
LEVEL = 0.95
_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its interval, both in [0, 1] for scores."""

    mean: float
    low: float
    high: float


def majority_at_k(votes: Sequence[int], right: int | None, k: int, *, seed: int, draws: int = DRAWS) -> float:
    """Return the probability that the most frequent answer among k of the samples is the right one.

    With all samples it is exact; for fewer, the mean over `draws` random subsets (seeded). Answers that tie share the
    vote: a right one among t tied ones counts 1 / t, the expectation of breaking the tie by lot. Samples without an
    answer have no vote; where nobody votes it is 0.

    Args:
        votes: the class of each sample's answer, -1 where there is none.
        right: the class of the right answers; None where no sample is right.
        k: how many vote.

    Raises:
        DataError: k is not between 1 and the number of votes.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise DataError(f"maj@{k}: got {n} samples of a problem; allowed: 1 to {n}; ask for more samples")
    if right is None:
        return 0.0
    votes_n = np.asarray(votes, dtype=np.int64)
    if k == n:
        drawn_Dk = votes_n[None]
    else:
        order_Dn = np.random.default_rng(seed).random((draws, n)).argsort(axis=1)
        drawn_Dk = votes_n[order_Dn[:, :k]]
    counts_DC = (drawn_Dk[:, :, None] == np.arange(votes_n.max() + 1)).sum(axis=1)
    most_D = counts_DC.max(axis=1)
    tied_D = (counts_DC == most_D[:, None]).sum(axis=1)
    wins_D = (counts_DC[:, right] == most_D) & (most_D > 0)
    return float((wins_D / tied_D).mean())


def bootstrap_means(values_P: np.ndarray, *, seed: int, name: str, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the means of resampled problems, float64 [B]: the same for the same seed, name and values.

    Args:
        values_P: one number a problem. name: of the set, so that sets are resampled independently.
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
    """Return the mean of the sets' means, each set counting the same, resampled within each set."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in values_of_sets.items()}
    means_B = np.mean([bootstrap_means(array, seed=seed, name=name) for name, array in arrays.items()], axis=0)
    return Estimate(float(np.mean([array.mean() for array in arrays.values()])), *interval(means_B))
