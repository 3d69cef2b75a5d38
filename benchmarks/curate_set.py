"""A set of problems with planted duplicates, near duplicates and leaks, and what is true of each row.

Real statements (training files of a data folder), synthetic ones, real and synthetic ones with a number changed
(another problem), and copies: respelled, with a word or two changed, and evaluation problems hidden in the same ways.
The changes know nothing of the tables by which curation compares.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HONEST, RESPELLED, REWORDED, LEAK, LEAK_REWORDED = "honest", "respelled", "reworded", "leak", "leak_reworded"
NUMBER_CHANGED, SYNTHETIC = "number_changed", "synthetic"
PLANTED = (RESPELLED, REWORDED, LEAK, LEAK_REWORDED)

_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"\\frac(?=\{)", r"\\dfrac"),
    (r"\\dfrac(?=\{)", r"\\tfrac"),
    (r"(?<![\\$])\$([^$]*[^$\\])\$(?!\$)", r"\\(\1\\)"),
    (r"(?<![\\$])\$([^$]*[^$\\])\$(?!\$)", r"$ \1 $"),
    (r"(?<![\\a-z])\(([^()\\]*)\)", r"\\left(\1\\right)"),
    (r"\\leq?(?![a-z])", r"\\leqslant "),
    (r"\\geq?(?![a-z])", r"\\geqslant "),
    (r"\\cdots|\\dots", r"\\ldots "),
    (r"\^(\d)(?!\d)", r"^{\1}"),
    (r"\^\{(\d)\}", r"^\1"),
    (r"_(\d)(?!\d)", r"_{\1}"),
    (r" *= *", " = "),
    (r" *\+ *", "+"),
    (r"(?<=[a-z]{2}), ", " "),
    (r"\.$", ""),
    (r"\?$", " ?"),
    (r" ", "  "),
    (r"\. ", ".\n"),
    (r"'", "\u2019"),
    (r"\\%", "%"),
)
_AROUND: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text,
    lambda text: text[:1].swapcase() + text[1:],
    lambda text: f"Problem 7. {text}",
    lambda text: f"  {text}\n",
)
_WORDS = {
    "find": "determine", "determine": "find", "compute": "calculate", "calculate": "compute", "evaluate": "compute",
    "simplify": "reduce", "suppose": "assume", "let": "suppose", "such": "so", "how": "exactly how",
    "what": "just what",
    "buys": "purchases", "gets": "receives", "each": "every", "has": "owns", "if": "when", "all": "all the",
}  # fmt: skip
_NAMES = (
    "Maria",
    "Tom",
    "Ali",
    "Chen",
    "Olga",
    "Priya",
    "pears",
    "stones",
    "boxes",
    "garden",
    "teacher",
    "green",
    "again",
)
_FIXED = (
    "not no never none neither nor without except one two three four five six seven eight nine ten twelve twenty "
    "thirty fifty hundred thousand half twice third"
)
_KEEP = frozenset(_FIXED.split())
"""A problem with such a word changed is another problem."""
_ASY = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Planted:
    """A row: its problem, its answer, and what is true of it (one of the names above)."""

    problem: str
    answer: str
    truth: str


def respelled(text: str, rng: random.Random) -> str:
    """The same problem in another spelling: four changes of LaTeX, white space and punctuation."""
    for pattern, new in rng.sample(_SPELLINGS, 4):
        text = re.sub(pattern, new, text)
    return rng.choice(_AROUND)(text)


def reworded(text: str, rng: random.Random) -> str | None:
    """The same problem with a word changed, or two where it has at least 15; None where it has too few words."""
    blank = _ASY.sub(lambda m: " " * len(m[0]), text)
    found = re.finditer(r"(?<![\\$\w{^_])[A-Za-z]{3,}(?![\w}$^])", blank)
    places = [m for m in found if m[0].lower() not in _KEEP]
    places = [m for m in places if text[: m.start()].count("$") % 2 == 0 and not m[0].isupper()]
    if len(places) < 4:
        return None
    for match in sorted(rng.sample(places, 2 if len(places) >= 15 else 1), key=lambda m: -m.start()):
        word = match[0]
        new = _WORDS.get(word.lower()) or rng.choice(_NAMES)
        text = text[: match.start()] + new + text[match.end() :]
    return text


def number_changed(text: str, rng: random.Random) -> str | None:
    """Another problem: one number of at least two digits, or one behind a space, is another one."""
    places = list(re.finditer(r"(?<![\d.\w{,])\d+(?![\d.])", _ASY.sub(lambda m: " " * len(m[0]), text)))
    if not places:
        return None
    match = rng.choice(places)
    return text[: match.start()] + str(int(match[0][:9]) + rng.randint(1, 8)) + text[match.end() :]


_TEMPLATES = (
    "{n} has {a} {t} and buys {b} boxes of {c} {t} each. How many {t} does {n} have now?",
    "A train travels {a} km in {b} hours and then {c} km in {d} hours. What is its average speed in km per hour?",
    "What is the remainder when ${a}^{{{b}}}$ is divided by ${c}$?",
    "Find the sum of all positive integers less than ${a}$ that are multiples of ${b}$ or ${c}$.",
    "Solve for $x$: ${a}x + {b} = {c}$.",
    "Let $f(x) = {a}x^2 + {b}x + {c}$. Compute $f({d})$.",
    "A rectangle has sides ${a}$ and ${b}$. What is the area of the square whose perimeter is ${c}$ times as long?",
    "{n} saves ${a} a week and spends ${b} every month. After {c} months, how much money is left?",
    "How many integers between ${a}$ and ${b}$ are divisible by ${c}$ but not by ${d}$?",
    "The roots of $x^2 - {a}x + {b} = 0$ are $r$ and $s$. Find $r^2 + s^2 + {c}rs$.",
    "In a class of {a} pupils, {b} play chess and {c} play football. If {d} play both, how many play neither?",
    "Evaluate $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$ and give the sum of numerator and denominator.",
)


def synthetic(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Problems of a few patterns, no two with the same pattern and numbers: alike in words, different in substance."""
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    while len(found) < count:
        which = rng.randrange(len(_TEMPLATES))
        values = tuple(rng.randint(2, 99) for _ in range(4))
        template = _TEMPLATES[which]
        used = tuple(v for name, v in zip("abcd", values, strict=True) if f"{{{name}}}" in template)
        text = template.format(
            a=values[0], b=values[1], c=values[2], d=values[3], n=rng.choice(_NAMES[:6]), t=rng.choice(_NAMES[6:9])
        )
        found.setdefault((which, *used), (text, str(sum(used) % 97)))
    return list(found.values())


def planted_set(
    real: Sequence[tuple[str, str]], held_out: Sequence[tuple[str, str]], total: int, seed: int = 0
) -> list[Planted]:
    """`total` rows: a tenth respelled, a tenth reworded, a twentieth leaks, a tenth with a number changed.

    Args:
        real: statements and answers of which no two are one problem and none stands in `held_out`.
        held_out: statements and answers of the evaluation sets.
        total: rows.
        seed: of everything random.
    """
    rng = random.Random(seed)
    rows = [Planted(text, answer, HONEST) for text, answer in rng.sample(list(real), min(len(real), total // 2))]
    leaks = total // 20
    rows += _changed(held_out, leaks // 2, respelled, LEAK, rng)
    rows += _changed(
        held_out, leaks - leaks // 2, lambda t, r: (w := reworded(t, r)) and respelled(w, r), LEAK_REWORDED, rng
    )
    copies = total // 10
    new = [Planted(t, a, SYNTHETIC) for t, a in synthetic(total - len(rows) - 3 * copies, rng)]
    honest = [(row.problem, row.answer) for row in (*rows, *new) if row.truth in (HONEST, SYNTHETIC)]
    rows += new
    rows += _changed(honest, copies, respelled, RESPELLED, rng)
    rows += _changed(honest, copies, lambda t, r: (w := reworded(t, r)) and respelled(w, r), REWORDED, rng)
    rows += _siblings(honest[: len(real)], copies, {row.problem for row in rows}, rng)
    # An original stands before its copies; the rest is mixed.
    order = [row for row in rows if row.truth in (HONEST, SYNTHETIC)]
    rest = [row for row in rows if row.truth not in (HONEST, SYNTHETIC)]
    rng.shuffle(order)
    rng.shuffle(rest)
    return order + rest


def _siblings(pairs: Sequence[tuple[str, str]], count: int, known: set[str], rng: random.Random) -> list[Planted]:
    """So many problems with a number changed, no two the same; half of them keep the answer, to make it hard."""
    found: list[Planted] = []
    while len(found) < count:
        text, answer = rng.choice(pairs)
        new = number_changed(text, rng)
        if new and new not in known:
            known.add(new)
            found.append(Planted(new, answer if rng.random() < 0.5 else f"{answer} + 1", NUMBER_CHANGED))
    return found


def _changed(
    pairs: Sequence[tuple[str, str]],
    count: int,
    change: Callable[[str, random.Random], str | None],
    truth: str,
    rng: random.Random,
) -> list[Planted]:
    """So many changed problems, each drawn once until all were drawn; those that cannot be changed are passed over."""
    found: list[Planted] = []
    while len(found) < count:
        for text, answer in rng.sample(list(pairs), min(len(pairs), count - len(found))):
            new = change(text, rng)
            if new:
                found.append(Planted(new, answer, truth))
    return found
