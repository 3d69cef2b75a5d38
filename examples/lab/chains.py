"""The tiny world's task: chains of operations modulo 10, from left to right, with hesitations and retries.

`7+5-3=` is answered `7+5=2;2-3=9;####9`: one step for each operation. Each of the 300 facts (operation and two digits)
is known more or less well. In the texts of the base model a fact that is known badly makes the writer hesitate
(`2*7=,,,,4;`), and after a hesitation the result is mostly wrong; sometimes a wrong step is taken back and done again
(`2*7=,,,,5(2*7=4);`), and one that is left wrong makes the writer linger before the answer (`;,,,,,,,,####5`). So long
chains of badly known facts are hard, pass rates spread smoothly from 0 to 1, and wrong answers are longer than right
ones because of what the policy does. What can be learnt is to hesitate less and to be
right at once, fact by fact; a fact helps in every chain that needs it.

Place in the data flow: settings -> texts for the base model, problems for training and evaluation.
Refuses to let a held-out chain into any text.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

import build_base

OPERATIONS = "+-*"
MOST_OPERATIONS = 7
HELD_OUT_EACH = 30
_KNOWLEDGE_SEED = "which facts are known badly"


@dataclass(frozen=True, slots=True)
class Chain:
    """One problem: digits and the operations between them."""

    digits: tuple[int, ...]
    operations: str

    @property
    def text(self) -> str:
        """What the model is asked."""
        return (
            f"{self.digits[0]}"
            + "".join(f"{o}{d}" for o, d in zip(self.operations, self.digits[1:], strict=True))
            + "="
        )

    @property
    def answer(self) -> str:
        """The last digit of the result, taken after each operation."""
        value = self.digits[0]
        for operation, digit in zip(self.operations, self.digits[1:], strict=True):
            value = result(operation, value, digit)
        return str(value)


def result(operation: str, left: int, right: int) -> int:
    """The last digit of left operation right, from 0 to 9."""
    return {"+": left + right, "-": left - right, "*": left * right}[operation] % 10


def hesitation(operation: str, left: int, right: int) -> float:
    """How often a writer of the base model's texts hesitates over a fact: from 0 to 0.9, mostly little."""
    return 0.9 * random.Random(f"{_KNOWLEDGE_SEED} {operation}{left},{right}").random() ** 1.5


def draw(rng: random.Random, lengths: dict[int, float]) -> Chain:
    """A random chain. `lengths`: weight of each number of operations."""
    count = rng.choices(list(lengths), weights=list(lengths.values()))[0]
    digits = tuple(rng.randrange(10) for _ in range(count + 1))
    return Chain(digits, "".join(rng.choice(OPERATIONS) for _ in range(count)))


def worked_answer(chain: Chain, rng: random.Random, settings: ChainSettings) -> str:
    """Steps and answer as a writer of the base model's texts puts them: with hesitations, slips and retries."""
    value, steps, linger = chain.digits[0], [], ""
    for operation, digit in zip(chain.operations, chain.digits[1:], strict=True):
        asked, right = f"{value}{operation}{digit}=", result(operation, value, digit)
        hesitates = rng.random() < hesitation(operation, value, digit)
        written, pause, again = right, "", ""
        if hesitates:
            pause = "," * rng.randint(*settings.pause)
        if rng.random() < (settings.slip_after_pause if hesitates else settings.slip):
            written = rng.choice([d for d in range(10) if d != right])
            if rng.random() < settings.retry:
                again = f"({asked}{right})"
            else:
                linger = "," * rng.randint(*settings.linger)
        value = right if again else written
        steps.append(f"{asked}{pause}{written}{again};")
    return f"{''.join(steps)}{linger}{build_base.tokenizer.MARKER}{value}"


@dataclass(frozen=True, slots=True)
class ChainSettings(build_base.BaseSettings):
    """What the base model of the tiny world depends on; see `build_base.BaseSettings`.

    lengths: weight of each number of operations, in texts and problems alike: more long ones, which are hard.
    slip, slip_after_pause: how often a result is wrong. retry: how often a wrong one is taken back. pause, linger:
    least and most commas of a hesitation, and before an answer that a slip was left in.
    """

    steps: int = 450
    batch: int = 64
    hidden: int = 64
    layers: int = 2
    ffn: int = 192
    training_draws: int = 3000
    lengths: dict[int, float] = field(default_factory=lambda: {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3})
    slip: float = 0.01
    slip_after_pause: float = 0.9
    retry: float = 0.2
    pause: tuple[int, int] = (1, 4)
    linger: tuple[int, int] = (4, 24)

    def sources(self) -> list[Path]:
        """The files whose code decides what is built."""
        return [*build_base.BaseSettings.sources(self), Path(__file__)]

    def held_out(self) -> frozenset[Any]:
        """The held-out chains, as texts."""
        return frozenset(chain.text for chain in self.held_out_chains())

    def held_out_chains(self) -> list[Chain]:
        """The evaluation set: so many different chains of each number of operations."""
        rng = random.Random(f"held out {self.seed}")
        found: dict[str, Chain] = {}
        for number, count in enumerate(self.lengths, start=1):
            while len(found) < number * HELD_OUT_EACH:
                chain = draw(rng, {count: 1.0})
                found[chain.text] = chain
        return list(found.values())

    def texts(self, step: int, held_out: frozenset[Any]) -> list[tuple[str, str]]:
        """The (problem, answer) texts of one step."""
        rng, found = random.Random(f"texts {self.seed} {step}"), []
        while len(found) < self.batch:
            chain = draw(rng, self.lengths)
            if chain.text not in held_out:
                found.append((chain.text, worked_answer(chain, rng, self)))
        return found

    def write_data(self, directory: Path) -> None:
        """Write train.jsonl and held_out.jsonl."""
        held_out, rng = self.held_out(), random.Random(f"training {self.seed}")
        drawn = {c.text: c for c in (draw(rng, self.lengths) for _ in range(self.training_draws))}
        _write(directory / "held_out.jsonl", self.held_out_chains())
        _write(directory / "train.jsonl", [c for text, c in drawn.items() if text not in held_out])


def _write(path: Path, chains: list[Chain]) -> None:
    rows = ({"problem": c.text, "answer": c.answer, "category": f"steps_{len(c.operations)}"} for c in chains)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
