"""The task of examples/tool_use: products of whole numbers, with a Python tool, and a base model that uses it badly.

`34*567=` is asked; a model that uses the tool well writes a block of code, `print(34*567)`, is shown what was printed,
and answers `####19278`. In the base model's texts many answers are guesses without a call, and calls have slips: a
wrong operator or digit, no `print`, an output that is copied wrong. Reinforcement learning sees only whether the answer
is right.

Place in the data flow: settings -> conversations for the base model, problems for training and evaluation.
Refuses to let a held-out product (in either order of its numbers) into any text.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

import build_base
import problems
from tokenizer import MARKER, SPECIAL, Characters

HELD_OUT = {2: 50, 3: 50, 4: 50}
"""Held-out products per number of digits of the longer number."""
BEGIN, END, SHOWN = "```python\n", "```", "\n```output\n{output}\n```\n"
"""Defaults of examples/environments/python_tool.py."""
CHAT = Characters(
    string.digits + string.ascii_letters + string.punctuation + " \n",
    (MARKER, BEGIN, END, "print", "\n```output\n", "\n```\n"),
    (*SPECIAL, "<user>", "<assistant>", "<tool>"),
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
)
"""Tokenizer with a chat template that knows the role tool."""


@dataclass(frozen=True, slots=True)
class Product(problems.Sum):
    """One problem: left * right, both from 0."""

    @property
    def text(self) -> str:
        """What the model is asked."""
        return f"{self.left}*{self.right}="

    @property
    def answer(self) -> str:
        """The gold answer."""
        return str(self.left * self.right)


@dataclass(frozen=True, slots=True)
class Habits:
    """How the tool is used in the base model's texts; each in [0, 1].

    guess: answers without a call, by digits of the longer number. operator: a call adds instead. silent: a call prints
    nothing. again: the tool is then called once more, else a guess follows. call_digit, answer_digit: each digit that
    is copied into a call, or out of an output, becomes another one.
    """

    guess: Mapping[int, float] = field(default_factory=lambda: {2: 0.65, 3: 0.5, 4: 0.3})
    operator: float = 0.1
    silent: float = 0.1
    again: float = 0.5
    call_digit: float = 0.01
    answer_digit: float = 0.02


def conversation(problem: problems.Sum, rng: random.Random, habits: Habits) -> Iterator[tuple[str, str]]:
    """Yield the messages after the problem as (role, text): answers of the model, and what the tool shows."""
    output = ""
    if rng.random() >= habits.guess[problem.digits]:
        silent = rng.random() < habits.silent
        for prints in [False, True] if silent and rng.random() < habits.again else [not silent]:
            left, right = (slipped(str(number), habits.call_digit, rng) for number in (problem.left, problem.right))
            operator = "+" if rng.random() < habits.operator else "*"
            call = f"{left}{operator}{right}"
            yield "assistant", f"{BEGIN}{f'print({call})' if prints else call}\n{END}"
            if prints:
                output = str(int(left) + int(right) if operator == "+" else int(left) * int(right))
            yield "tool", SHOWN.format(output=output)
    yield "assistant", MARKER + (slipped(output, habits.answer_digit, rng) if output else guess(problem.answer, rng))


def slipped(number: str, rate: float, rng: random.Random) -> str:
    """Return the number with some digits replaced; the first one never by 0, which Python refuses there."""
    digits = [
        rng.choice([other for other in string.digits[not place :] if other != digit]) if rng.random() < rate else digit
        for place, digit in enumerate(number)
    ]
    return "".join(digits)


def guess(answer: str, rng: random.Random) -> str:
    """Return a number that looks like the answer: with its length, first digit and last digit."""
    inner = "".join(rng.choices(string.digits, k=max(0, len(answer) - 2)))
    return answer[:1] + inner + answer[1:][-1:]


@dataclass(frozen=True, slots=True)
class ToolSettings(build_base.BaseSettings):
    """What the base model depends on; see `build_base.BaseSettings`."""

    steps: int = 600
    batch: int = 64
    positions: int = 192
    shares: dict[int, float] = field(default_factory=lambda: {2: 1.0, 3: 1.0, 4: 1.0})
    training_shares: dict[int, float] = field(default_factory=lambda: {2: 1.0, 3: 1.0, 4: 1.0})
    habits: Habits = field(default_factory=Habits)

    @property
    def vocabulary(self) -> Characters:
        """The tokens of the model and its texts."""
        return CHAT

    def sources(self) -> list[Path]:
        """Return the files whose code decides what is built."""
        return [*build_base.BaseSettings.sources(self), Path(__file__)]

    def held_out_problems(self) -> list[problems.Sum]:
        """Return the evaluation set."""
        return problems.held_out_problems(self.seed, HELD_OUT, Product)

    def held_out(self) -> frozenset[Any]:
        """Return the keys of the problems that no text may be about."""
        return frozenset(problem.key for problem in self.held_out_problems())

    def samples(self, step: int, held_out: frozenset[Any]) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the samples of one step: prompt ids, ids after them, and 1 for each of these that the model says."""
        rng = random.Random(f"texts {self.seed} {step}")
        rows: list[tuple[list[int], list[int], list[int]]] = []
        while len(rows) < self.batch:
            problem = problems.draw(rng, self.shares, Product)
            if problem.key not in held_out:
                rows.append(self._sample(problem, rng))
        return rows

    def _sample(self, problem: problems.Sum, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
        ids, encode = CHAT.ids, CHAT.encode
        prompt = [ids["<bos>"], ids["<user>"], *encode(problem.text), ids["<eos>"], ids["<assistant>"]]
        behind: list[int] = []
        learnt: list[int] = []
        for role, text in conversation(problem, rng, self.habits):
            content = [*encode(text), ids["<eos>"]]
            says = role == "assistant"
            new = content if says else [ids[f"<{role}>"], *content, ids["<assistant>"]]
            behind += new
            learnt += [int(says)] * len(new)
        return prompt, behind, learnt

    def write_data(self, directory: Path) -> None:
        """Write train.jsonl and held_out.jsonl."""
        held_out = self.held_out_problems()
        problems.write_problems(directory / "held_out.jsonl", held_out)
        training = problems.training_problems(self.seed, self.training_draws, self.training_shares, held_out, Product)
        problems.write_problems(directory / "train.jsonl", training)


if __name__ == "__main__":
    build_base.main(ToolSettings(), Path("runs/tool_use-base"))
