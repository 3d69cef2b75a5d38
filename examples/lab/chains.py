"""The tiny world's task: sums as chains of single additions, with slips, retries and lingering.

`47+85=` is answered `7+5=12;4+8+1=13;####132`, as in the quickstart. Here each of the 200 facts (two digits and a
carry) is known more or less well: in the texts of the base model a badly known one mostly goes wrong. Sometimes the
step is done again at once (`7+5=11;7+5=12;`); where it is left wrong, the writer lingers before the answer
(`;,,,,,,,,####131`). So long sums of badly known facts are hard, pass rates spread smoothly from 0 to 1, and wrong
answers are longer than right ones because of what the policy does. What can be learnt is to be right at once, fact by
fact; a fact helps in every sum that needs it.

Place in the data flow: settings -> texts for the base model, problems for training and evaluation.
Refuses to let a held-out sum into any text.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

import build_base
import problems
from problems import MARKER, MAX_DIGITS, Sum

_KNOWLEDGE_SEED = "which facts are known badly"


def slip_rate(a: int, b: int, carry: int) -> float:
    """Return how often a fact goes wrong in the base model's texts: from 0 to 0.8, mostly seldom."""
    return 0.8 * random.Random(f"{_KNOWLEDGE_SEED} {a}+{b}+{carry}").random() ** 2


def worked_answer(problem: Sum, rng: random.Random, settings: ChainSettings) -> str:
    """Return steps and answer as in the base model's texts: with slips, retries and lingering."""
    width, carry, steps, low_digits, linger = problem.digits, 0, [], "", ""
    left, right = (str(n).zfill(width) for n in (problem.left, problem.right))
    for a, b in zip(reversed(left), reversed(right), strict=True):
        asked, total = f"{a}+{b}{'+1' if carry else ''}=", int(a) + int(b) + carry
        written, again = total, ""
        if rng.random() < slip_rate(int(a), int(b), carry):
            written = max(0, total + rng.choice((-2, -1, 1, 2)))
            if rng.random() < settings.retry:
                again = f"{asked}{total};"
            else:
                linger = "," * rng.randint(*settings.linger)
        result = total if again else written
        steps.append(f"{asked}{written};{again}")
        low_digits, carry = str(result % 10) + low_digits, int(result > 9)
    return f"{''.join(steps)}{linger}{MARKER}{f'{carry or str()}{low_digits}'.lstrip('0') or '0'}"


@dataclass(frozen=True, slots=True)
class ChainSettings(build_base.BaseSettings):
    """What the base model of the tiny world depends on; see `build_base.BaseSettings`.

    shares, training_shares: more long sums, which are hard. retry: how often a slip is done again at once.
    linger: least and most commas before an answer in which a slip was left.
    """

    seed: int = 1000
    steps: int = 500
    batch: int = 64
    learning_rate: float = 3e-3
    shares: dict[int, float] = field(default_factory=lambda: {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 3.0})
    training_draws: int = 3000
    training_shares: dict[int, float] = field(default_factory=lambda: {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0})
    retry: float = 0.15
    linger: tuple[int, int] = (6, 24)

    def sources(self) -> list[Path]:
        """Return the files whose code decides what is built."""
        return [*build_base.BaseSettings.sources(self), Path(__file__)]

    def texts(self, step: int, held_out: frozenset[Any]) -> list[tuple[str, str]]:
        """Return the (problem, answer) texts of one step."""
        rng = random.Random(f"texts {self.seed} {step}")
        texts: list[tuple[str, str]] = []
        while len(texts) < self.batch:
            problem = problems.draw(rng, self.shares)
            if problem.key not in held_out:
                texts.append((problem.text, worked_answer(problem, rng, self)))
        return texts


DIGITS = tuple(range(MAX_DIGITS, 0, -1))
"""Digits of a problem, the hardest first."""
