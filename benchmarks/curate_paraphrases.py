"""Precision and recall of MinHash and of TF-IDF vectors on planted paraphrases.

    python benchmarks/curate_paraphrases.py                # a table over least cosines

Each problem comes in several wordings with the same numbers and answer, beside problems that sound like it: other
numbers, or the same numbers with another question. A pair counts as found where the later row was dropped as that of an
earlier one; recall is over rows that repeat a problem, precision over rows that were dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "curate")]

from megatron_daro.workshop.curate.leaks import drop_near  # noqa: E402
from megatron_daro.workshop.curate.paraphrases import drop_paraphrases  # noqa: E402
from megatron_daro.workshop.curate.rows import Decisions, Row  # noqa: E402

_Wordings = tuple[tuple[str, ...], Callable[[int, int], object]]
_MADE: tuple[_Wordings, ...] = (
    (
        (
            "A bag holds {a} red marbles and {b} blue marbles. How many marbles does it hold altogether?",
            "There are {a} red and {b} blue marbles in a bag. Find the total number of marbles in the bag.",
            "In a bag lie marbles of two colours, {a} of them red and {b} blue. How many are in it?",
        ),
        lambda a, b: a + b,
    ),
    (
        (
            "A bag holds {a} red marbles and {b} blue marbles. How many more red than blue marbles does it hold?",
            "There are {a} red and {b} blue marbles in a bag. By how many do the red ones exceed the blue ones?",
        ),
        lambda a, b: a - b,
    ),
    (
        (
            "A train travels {a} kilometres in {b} hours. What is its constant speed in kilometres per hour?",
            "It takes a train {b} hours to cover a distance of {a} kilometres. If it moves at constant speed, how many "
            "kilometres does it travel each hour?",
            "Moving at constant speed, a train needs {b} hours for {a} kilometres. Determine the speed of the train in "
            "kilometres per hour.",
        ),
        lambda a, b: f"{a}/{b}",
    ),
    (
        (
            "The sides of a rectangle are {a} and {b}. Find the area of the rectangle.",
            "A rectangle has length {a} and width {b}. What is its area?",
            "Determine the area enclosed by a rectangle whose length is {a} and whose width is {b}.",
        ),
        lambda a, b: a * b,
    ),
    (
        (
            "The sides of a rectangle are {a} and {b}. Find the perimeter of the rectangle.",
            "A rectangle has length {a} and width {b}. What is its perimeter?",
        ),
        lambda a, b: 2 * (a + b),
    ),
    (
        (
            "What is the remainder when {a} is divided by {b}?",
            "Find the remainder that is left if one divides {a} by {b}.",
            "When {a} is divided by {b}, a remainder is left. Determine this remainder.",
        ),
        lambda a, b: a % b,
    ),
    (
        (
            "A committee of {b} people is chosen from a club of {a} members. How many committees are possible?",
            "A club has {a} members. In how many ways can a committee of {b} people be chosen from them?",
            "How many possible committees with {b} people can a club of {a} members form?",
        ),
        lambda a, b: f"C({a},{b})",
    ),
    (
        (
            "An arithmetic sequence begins with {a} and has common difference {b}. What is its tenth term?",
            "Find the tenth term of the arithmetic sequence with first term {a} and common difference {b}.",
        ),
        lambda a, b: a + 9 * b,
    ),
)
_NUMBERS = ((47, 6), (53, 8), (61, 9), (75, 4), (88, 7), (92, 11))


def planted(rows_of: Callable[..., list[Row]]) -> tuple[list[Row], list[int]]:
    """Return the rows, and of each the number of its problem.

    Args:
        rows_of: (text, answer) pairs -> rows.
    """
    cases, origin = [], []
    for made, (wordings, answer) in enumerate(_MADE):
        for number, (a, b) in enumerate(_NUMBERS):
            for text in wordings:
                cases.append((text.format(a=a, b=b), str(answer(a, b))))
                origin.append(made * len(_NUMBERS) + number)
    return rows_of(*cases), origin


def precision_and_recall(decisions: Decisions, origin: Sequence[int]) -> tuple[float, float]:
    """Return (precision, recall) of what was dropped. Args: origin: of `planted`."""
    right = sum(origin[int(one.other.rpartition(":")[2]) - 1] == origin[row] for row, one in decisions.dropped.items())
    repeats = len(origin) - len(set(origin))
    return (right / len(decisions.dropped) if decisions.dropped else 1.0), right / repeats


def main() -> None:
    """Print the table."""
    from conftest import row_of

    rows, origin = planted(lambda *cases: [row_of(*case, number=i) for i, case in enumerate(cases, start=1)])
    print(f"{len(rows)} rows of {len(set(origin))} problems")
    near = Decisions(len(rows))
    drop_near(rows, near)
    print("MinHash, a few words  precision {:.3f} recall {:.3f}".format(*precision_and_recall(near, origin)))
    for alike in (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7):
        found = Decisions(len(rows))
        drop_paraphrases(rows, found, alike)
        scores = precision_and_recall(found, origin)
        print("TF-IDF, cosine {:.2f}   precision {:.3f} recall {:.3f}".format(alike, *scores))


if __name__ == "__main__":
    main()
