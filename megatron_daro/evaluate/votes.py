r"""Votes: the answers of a problem's samples put into classes of equal answers, for maj@k.

Place in the data flow: texts and verdicts of a problem -> a class for each sample. Right answers are one class: each
was verified against a gold. The others are equal where their normal form is, or where the verifier calls one right with
the other as gold (`\frac12` and `0.5`). That is asked for the most frequent forms of a problem only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from megatron_daro.config.sections import RewardSection
from megatron_daro.reward.base import StagedVerifier, VerifierSpec
from megatron_daro.reward.factory import verifier_of
from megatron_daro.rollout.protocol import Scorer

MOST_COMPARED = 32
"""Different wrong answers of a problem that are compared with each other; rarer ones count as different."""
_BOXED = "math"


@dataclass(frozen=True, slots=True)
class Sample:
    """What of an answer decides its vote. answer: its normal form, None where it has none."""

    answer: str | None
    correct: bool


@dataclass(frozen=True, slots=True)
class Votes:
    """classes: of each sample, -1 without an answer. right: the class of right ones, None where there is none. answer:
    the form of each class."""

    classes: tuple[int, ...]
    right: int | None
    answers: tuple[str, ...]


def answer_reader(section: RewardSection) -> StagedVerifier:
    """Return the verifier, which also says what an answer's final form is."""
    found = verifier_of(VerifierSpec(section.verifier, section.strict, marker=section.marker))
    assert isinstance(found, StagedVerifier)
    return found


async def votes_of(problems: Sequence[Sequence[Sample]], scorer: Scorer, *, verifier: str) -> list[Votes]:
    """Return the votes of each problem.

    Args:
        problems: the samples of each. scorer: says whether two wrong answers are the same. verifier: its name; only
            `math` knows more than the normal form.
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
