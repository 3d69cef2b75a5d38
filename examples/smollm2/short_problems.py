"""Problems of thirteen kinds for a language model of 135 million parameters: short, and from nearly impossible to easy.

    6+2=8
    5+9=

One solved problem comes before the question, in the same words: it shows what an answer looks like. How often the model
is right before any training differs by kind and by number, from never to always, which is what difficulty weighting is
about. Each kind has several wordings; one is never trained on, and neither are the numbers of the held-out problems.

Place in the data flow: seed -> train.jsonl, numbers.jsonl (trained wordings, new numbers), wordings.jsonl (both new).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHOTS = 1
NUM_TRAIN, NUM_HELD_OUT = 3000, 200
Problem = tuple[tuple[int, ...], int]
"""The numbers of a question, and its answer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem. draw: makes one. wordings: with places for the numbers; the last one is held out."""

    name: str
    draw: Callable[[random.Random], Problem]
    wordings: tuple[str, ...]


def _sum(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 19), rng.randint(1, 9)
    return (a, b), a + b


def _difference(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return (a + b, b), a


def _product(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return (a, b), a * b


def _larger(rng: random.Random) -> Problem:
    a, b = rng.sample(range(1, 100), 2)
    return (a, b), max(a, b)


def _smaller(rng: random.Random) -> Problem:
    a, b = rng.sample(range(1, 100), 2)
    return (a, b), min(a, b)


def _sequence(rng: random.Random) -> Problem:
    start, step = rng.randint(1, 40), rng.randint(1, 5)
    return (start, start + step, start + 2 * step), start + 3 * step


def _counting(rng: random.Random) -> Problem:
    a = rng.randint(1, 60)
    return (a, a + 1, a + 2), a + 3


def _repeat(rng: random.Random) -> Problem:
    a = rng.randint(1, 99)
    return (a, a), a


def _successor(rng: random.Random) -> Problem:
    a = rng.randint(1, 98)
    return (a,), a + 1


def _metres(rng: random.Random) -> Problem:
    a = rng.randint(1, 30)
    return (a,), 100 * a


def _last_digit(rng: random.Random) -> Problem:
    a = rng.randint(10, 999)
    return (a,), a % 10


def _half(rng: random.Random) -> Problem:
    a = rng.randint(1, 25)
    return (2 * a,), a


KINDS = (
    Kind("sum", _sum, ("{}+{}=", "{} + {} = ", "{} plus {}: ", "sum of {} and {}: ")),
    Kind("difference", _difference, ("{}-{}=", "{} - {} = ", "{} minus {}: ", "take {1} from {0}: ")),
    Kind("product", _product, ("{}*{}=", "{} x {} = ", "{} times {}: ", "product of {} and {}: ")),
    Kind(
        "larger", _larger, ("larger of {} and {}: ", "max({}, {}) = ", "{} or {}, the larger: ", "bigger, {} or {}: ")
    ),
    Kind(
        "smaller", _smaller, ("smaller of {} and {}: ", "min({}, {}) = ", "{} or {}, the smaller: ", "less, {} or {}: ")
    ),
    Kind("sequence", _sequence, ("{}, {}, {}, ", "{} {} {} ", "{}; {}; {}; ", "next of {}, {}, {}: ")),
    Kind("counting", _counting, ("{}, {}, {}, ", "{} {} {} ", "{}; {}; {}; ", "count: {}, {}, {}, ")),
    Kind("repeat", _repeat, ("{}, {}, ", "{} {} ", "{}; {}; ", "again: {}, {}, ")),
    Kind("successor", _successor, ("after {} comes ", "{} then ", "{} and one more: ", "one above {}: ")),
    Kind("metres", _metres, ("{} m in cm: ", "{} metres are, in cm, ", "cm in {} m: ", "{} m is this many cm: ")),
    Kind("last_digit", _last_digit, ("last digit of {}: ", "{} ends in ", "final digit, {}: ", "{}, its last digit: ")),
    Kind(
        "word_problem",
        _sum,
        (
            "Tom has {} apples and gets {} more. Apples: ",
            "{} birds sit, {} join. Birds: ",
            "{} cars park, {} arrive. Cars: ",
            "Ann reads {} pages, then {}. Pages: ",
        ),
    ),
    Kind("half", _half, ("half of {}: ", "{} / 2 = ", "{} shared by two: ", "{} halved: ")),
)


def question(kind: Kind, wording: str, problems: list[Problem]) -> str:
    """Return the prompt: solved problems, a line each, and the last one open."""
    lines = [wording.format(*numbers) + str(answer) for numbers, answer in problems[:-1]]
    return "\n".join([*lines, wording.format(*problems[-1][0])])


def is_held_out(kind: Kind, problem: Problem) -> bool:
    """Return whether these numbers are kept for evaluation: an eighth of a kind's, the same in every wording."""
    return random.Random(f"{kind.name} {problem}").random() < 1 / 8


def rows(
    rng: random.Random, number: int, *, held_out_numbers: bool, held_out_wordings: bool
) -> Iterator[dict[str, str]]:
    """Yield problems, kinds in turn; no question twice."""
    seen: set[str] = set()
    index = 0
    while len(seen) < number:
        kind = KINDS[index % len(KINDS)]
        wordings = kind.wordings[-1:] if held_out_wordings else kind.wordings[:-1]
        problem = _drawn(rng, kind, held_out=held_out_numbers)
        shots: list[Problem] = []
        while len(shots) < SHOTS:
            shot = _drawn(rng, kind, held_out=False)
            if shot not in (problem, *shots):
                shots.append(shot)
        text = question(kind, rng.choice(wordings), [*shots, problem])
        index += 1
        if text not in seen:
            seen.add(text)
            yield {"problem": text, "answer": str(problem[1]), "category": kind.name}


def _drawn(rng: random.Random, kind: Kind, *, held_out: bool) -> Problem:
    while True:
        problem = kind.draw(rng)
        if is_held_out(kind, problem) == held_out:
            return problem


def write(directory: Path, seed: int = 0) -> None:
    """Write the three sets. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    sets = {
        "train": (NUM_TRAIN, False, False),
        "numbers": (NUM_HELD_OUT, True, False),
        "wordings": (NUM_HELD_OUT, True, True),
    }
    for name, (number, numbers, wordings) in sets.items():
        made = rows(random.Random(f"{seed} {name}"), number, held_out_numbers=numbers, held_out_wordings=wordings)
        text = "".join(json.dumps(row) + "\n" for row in made)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
