"""Majority votes: which of a problem's answers are the same, and how often the most frequent one is right (maj@k).

Correct answers are one class, since each was verified against a gold. Other answers are the same if their normal forms
are equal, or if the verifier accepts one with the other as gold (`\\frac12` and `0.5`); it is asked only about the most
frequent forms. Shape letters: n samples of a problem, D draws, C classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megatron_daro.errors import DataError
from megatron_daro.rollout.protocol import Scorer

DRAWS = 400
MOST_COMPARED = 32
"""The most wrong answers of a problem that are compared with each other; rarer ones count as different."""
_BOXED = "math"


@dataclass(frozen=True, slots=True)
class Sample:
    """What decides an answer's vote. answer: its normal form; None if it has none."""

    answer: str | None
    correct: bool


@dataclass(frozen=True, slots=True)
class Votes:
    """classes: of each sample; -1 without an answer. right: the class of right answers; None if there are none.
    answers: the form of each class."""

    classes: tuple[int, ...]
    right: int | None
    answers: tuple[str, ...]


async def votes_of(problems: Sequence[Sequence[Sample]], scorer: Scorer, *, verifier: str) -> list[Votes]:
    """Return the votes of each problem.

    Args:
        problems: the samples of each. scorer: says whether two wrong answers are the same. verifier: its name; except
            for `math`, only normal forms are compared.
    """
    asked = [_pairs(samples) if verifier == _BOXED else [] for samples in problems]
    flat = [(f"\\boxed{{{b}}}", a, "") for pairs in asked for a, b in pairs]
    verdicts = iter(await scorer.score_async(flat) if flat else [])
    same = [[pair for pair in pairs if next(verdicts).correct] for pairs in asked]
    return [_votes(samples, pairs) for samples, pairs in zip(problems, same, strict=True)]


def _pairs(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    forms = Counter(one.answer for one in samples if one.answer and not one.correct)
    return list(combinations([form for form, _ in forms.most_common(MOST_COMPARED)], 2))


def _votes(samples: Sequence[Sample], same: Sequence[tuple[str, str]]) -> Votes:
    parent: dict[str, str] = {}

    def root(form: str) -> str:
        while parent.setdefault(form, form) != form:
            form = parent[form]
        return form

    for a, b in same:
        parent[root(b)] = root(a)
    numbers: dict[tuple[bool, str], int] = {}
    names: list[str] = []
    classes = []
    for one in samples:
        if one.answer is None and not one.correct:
            classes.append(-1)
            continue
        name = (True, "") if one.correct else (False, root(one.answer or ""))
        if name not in numbers:
            numbers[name] = len(numbers)
            names.append(one.answer or "")
        classes.append(numbers[name])
    return Votes(tuple(classes), numbers.get((True, "")), tuple(names))


def majority_at_k(votes: Sequence[int], right: int | None, k: int, *, seed: int, draws: int = DRAWS) -> float:
    """Return the probability that the most frequent answer among k of the samples is the right one.

    For k = n the result is exact; for a smaller k it is the mean over `draws` random subsets (seeded). Answers that tie
    share the vote: a right one among t tied ones counts 1 / t, the expectation of breaking the tie by lot. Samples
    without an answer have no vote; if no sample votes the result is 0.

    Args:
        votes: the class of each sample's answer; -1 if there is none.
        right: the class of the right answers; None if no sample is right.
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
