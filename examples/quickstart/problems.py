"""The quickstart's task: sums of two numbers, answered digit by digit with carries.

`47+85=` is answered `7+5=12;4+8+1=13;####132`: one step per digit, so the number of digits (the category) decides both
how long and how hard an answer is. Texts for the base model contain slips; a slip is carried on consistently into the
answer, so what reinforcement learning has to remove is the slip itself.

Place in the data flow: seeds -> JSON lines for training and evaluation, and texts for the base model.
Refuses to let a held-out sum (in either order of its numbers) into any training text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = "####"
MAX_DIGITS = 5
HELD_OUT = {1: 20, 2: 45, 3: 45, 4: 45, 5: 45}
"""Held-out sums per number of digits; few of one digit, because there are only 55 of them."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One problem: left + right, both from 0."""

    left: int
    right: int

    @property
    def text(self) -> str:
        """What the model is asked."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The gold answer."""
        return str(self.left + self.right)

    @property
    def digits(self) -> int:
        """Digits of the longer number: the number of steps."""
        return max(len(str(self.left)), len(str(self.right)))

    @property
    def key(self) -> tuple[int, int]:
        """The same for a+b and b+a."""
        return min(self.left, self.right), max(self.left, self.right)


@dataclass(frozen=True, slots=True)
class Slips:
    """How often a step of a training text goes wrong, each in [0, 1].

    forget: a carry is left out. digit: the step's sum is off by one. skip: the step is missing. repeat: the step is
    written twice, which only makes the answer longer.
    """

    forget: float = 0.0
    digit: float = 0.0
    skip: float = 0.0
    repeat: float = 0.0


def draw(rng: random.Random, shares: Mapping[int, float], kind: type[Sum] = Sum) -> Sum:
    """Return a random problem. `shares`: weight of each number of digits. The other number has at most as many."""
    digits = rng.choices(list(shares), weights=list(shares.values()))[0]
    numbers = [_number(rng, digits), _number(rng, rng.randint(1, digits))]
    rng.shuffle(numbers)
    return kind(*numbers)


def worked_answer(problem: Sum, rng: random.Random | None = None, slips: Slips | None = None) -> str:
    """Return the steps and the answer as text; without `slips` it is right."""
    rng, slips = rng or random.Random(0), slips or Slips()
    width, carry, steps, low_digits = problem.digits, 0, [], ""
    left, right = (str(n).zfill(width) for n in (problem.left, problem.right))
    for a, b in zip(reversed(left), reversed(right), strict=True):
        if carry and rng.random() < slips.forget:
            carry = 0
        if rng.random() < slips.skip:
            continue
        total = int(a) + int(b) + carry
        if rng.random() < slips.digit:
            total = max(0, total + rng.choice((-1, 1)))
        step = f"{a}+{b}{'+1' if carry else ''}={total};"
        steps.append(step * (2 if rng.random() < slips.repeat else 1))
        low_digits, carry = str(total % 10) + low_digits, total // 10
    written = f"{carry or ''}{low_digits}".lstrip("0") or "0"
    return f"{''.join(steps)}{MARKER}{written}"


def held_out_problems(seed: int, counts: Mapping[int, int] = HELD_OUT, kind: type[Sum] = Sum) -> list[Sum]:
    """Return the evaluation set: `counts` problems per number of digits, of which no two differ only in order."""
    rng = random.Random(f"held out {seed}")
    found: dict[tuple[int, int], Sum] = {}
    for digits, count in counts.items():
        wanted = len(found) + count
        for problem in _draws(rng, {digits: 1.0}, 1000 * count, kind):
            found.setdefault(problem.key, problem)
            if len(found) == wanted:
                break
        else:
            raise ValueError(f"{count} different sums of {digits} digits were asked for; there are not so many")
    return list(found.values())


def training_problems(
    seed: int, draws: int, shares: Mapping[int, float], held_out: Iterable[Sum], kind: type[Sum] = Sum
) -> list[Sum]:
    """Return the different problems among `draws` random ones, in random order, without those held out."""
    keys = {problem.key for problem in held_out}
    found = _draws(random.Random(f"training {seed}"), shares, draws, kind)
    return list(dict.fromkeys(problem for problem in found if problem.key not in keys))


def write_problems(path: Path, problems: Iterable[Sum]) -> None:
    """Write JSON lines of problem, answer and category."""
    rows = ({"problem": p.text, "answer": p.answer, "category": f"digits_{p.digits}"} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _draws(rng: random.Random, shares: Mapping[int, float], count: int, kind: type[Sum]) -> Iterator[Sum]:
    return (draw(rng, shares, kind) for _ in range(count))
