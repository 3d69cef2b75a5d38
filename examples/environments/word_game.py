"""A word is guessed in several turns: the model is told which letters are in place, and earns its reward at the end.

python examples/environments/word_game.py 1000 > words.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from megatron_daro.environments import Step
from megatron_daro.types import Prompt

RIGHT, ELSEWHERE, NOWHERE = "+", "~", "-"


class WordGame:
    """environment.kind: word_game:WordGame. The gold answer of a problem is the word."""

    def __init__(self, *, guesses: int = 6, early: float = 0.05, shown: str = "\n{marks}\n") -> None:
        """
        Args:
            guesses: how many there are. early: reward on top of 1 for each that is left. shown: text around the marks.
        """
        self._guesses, self._early, self._shown = guesses, early, shown

    def reset(self, prompt: Prompt) -> Step:
        """Begin; the state is the word and the guesses so far."""
        return Step(state={"word": prompt.answer, "guessed": 0})

    def step(self, state: dict[str, Any], answer: str) -> Step:
        """Mark a guess. Text that is shorter than the word costs a guess too."""
        word, guessed = state["word"], state["guessed"] + 1
        guess = answer.strip()[-len(word) :]
        if guess == word:
            return Step(done=True, correct=True, reward=1.0 + self._early * (self._guesses - guessed), reason="guessed")
        if guessed == self._guesses:
            return Step(done=True, reward=0.0, reason="not_guessed")
        return Step(self._shown.format(marks=marks(word, guess)), {"word": word, "guessed": guessed})


def marks(word: str, guess: str) -> str:
    """Mark each letter of a guess; a letter is found elsewhere at most as often as the word has it."""
    if len(guess) != len(word):
        return NOWHERE * len(word)
    rest = [w for w, g in zip(word, guess, strict=True) if w != g]
    found = []
    for w, g in zip(word, guess, strict=True):
        found.append(RIGHT if w == g else ELSEWHERE if g in rest else NOWHERE)
        if w != g and g in rest:
            rest.remove(g)
    return "".join(found)


def problems(count: int, seed: int = 0, letters: str = "abcdef", length: int = 4) -> list[dict[str, str]]:
    """Return games with words of the letters, the same for a seed."""
    rng = random.Random(seed)
    rules = f"Guess the word: {length} letters of {letters}. {RIGHT} stands right, {ELSEWHERE} stands elsewhere.\n"
    return [
        {"id": f"word-{seed}-{i}", "problem": f"Game {i}. {rules}", "answer": "".join(rng.choices(letters, k=length))}
        for i in range(count)
    ]


if __name__ == "__main__":
    for game in problems(int(sys.argv[1])):
        print(json.dumps(game))
