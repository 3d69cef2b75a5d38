"""Texts that no verifier was written for, grown from the pairs of answers that the tests know.

Pieces of LaTeX, Unicode and noise are inserted, repeated, cut and spliced; the same for the same seed.
"""

from __future__ import annotations

import random

from answer_classes import RIGHT, WRONG

CORPUS = sorted({text for pairs in (*RIGHT.values(), *WRONG.values()) for pair in pairs for text in pair})
LATEX = r"""
\\ \boxed{ \fbox{ \frac \frac{ \sqrt \sqrt[3]{ \sum_{k=1}^{n} \int_0^1 \lim_{x\to0} \binom{ \text{ \mathrm{ \left(
\right) \left\{ \right\} \cup \cap \in \leq \geq \neq \infty \pm \mp \cdot \times \div \% \circ \overline{ \bar{ \vec{
\pi \theta \sin \log_2 \arcsin \lfloor \rfloor \mod \approx \ldots \quad \, \! \text{\ or\ } e10 1,000 0. 999999999
^{99} !! ** // Answer: #### \begin{pmatrix} \end{pmatrix} \begin{cases} \end{cases} \begin{array}{c} \end{array} ½ ² ₁
√ ∞ ≤ ∑ ٣ İ ５ 😀
"""
PIECES = [*"{}[]()^_!=<>,;:%$&|'./+-*~ 0123456789abcdeinxyzABKTX\n\t\\\x00\ud800\u2028\u202e", *LATEX.split()]
PIECES += [" or ", " and ", " cm", "10 000"]


def mutated(rng: random.Random, text: str) -> str:
    """A text a few steps away from another."""
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(6)
        if kind <= 1:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at + rng.randrange(1, 6) :]
        elif kind == 3:
            text = text[:at] + rng.choice(PIECES) * rng.choice((2, 3, 8, 40, 1100)) + text[at:]
        elif kind == 4:
            other = rng.choice(CORPUS)
            text = text[:at] + other[rng.randrange(len(other) + 1) :]
        else:
            end = rng.randrange(at, len(text) + 1)
            text = text[:at] + text[at:end] * rng.choice((2, 3, 10)) + text[end:]
    return text[:5000]


def pair(rng: random.Random) -> tuple[str, str]:
    """(answer text, gold): mostly boxed, mostly of related making, sometimes noise."""
    gold = rng.choice(CORPUS)
    answer = mutated(rng, gold if rng.random() < 0.5 else rng.choice(CORPUS))
    if rng.random() < 0.1:
        answer = "".join(rng.choice(PIECES) for _ in range(rng.randrange(40)))
    if rng.random() < 0.1:
        gold = mutated(rng, gold)
    box = rng.random()
    text = f"so \\boxed{{{answer}}}" if box < 0.9 else f"Answer: {answer}" if box < 0.95 else answer
    return text, gold
