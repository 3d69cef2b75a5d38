"""What kind of problem a row is: one that asks for a proof, one with a sentence as answer, its language, its topic.

Rules on the text alone: words and scripts, no model. A proof is no answer that a verifier can check, and a sentence is
right only where it is repeated word for word; languages that are not asked for and topics of which there are too many
go. Where a rule cannot tell, the row stays.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.curate.rows import Decisions, Row

_PROOF_GOLD = re.compile(
    r"(?:see\s+(?:the\s+)?)?(?:proof|solution|explanation|above|below)|(?:it\s+is\s+)?prove[nd]|q\.?\s*e\.?\s*d\.?"
    r"|(?:the\s+)?(?:statement|claim|assertion|inequality|equality|result)\s+(?:is\s+(?:true|proven?|proved)|holds)"
    r"|(?:\u89c1)?(?:\u8bc1\u660e|\u89e3\u6790)(?:\u89c1\u89e3\u6790|\u7565)?|\u7565",
    re.I,
)
_ASKS_PROOF = re.compile(
    r"\b(?:prove|show|demonstrate|verify|establish|justify)\b(?:\s+that\b|\s+the\s+(?:following|identity|inequality)|:"
    r"|\s*\\)|\b(?:prove|disprove)\b|\u6c42\u8bc1|\u8bc1\u660e",
    re.I,
)
_ASKS_ANSWER = re.compile(
    r"\?|\uff1f|\b(?:find|determine|compute|calculate|evaluate|solve|simplify|express|give|what|which|how\s+many|how\s+much"
    r"|list|write|state|estimate|deduce\s+the)\b|\u6c42(?!\u8bc1)|\u591a\u5c11|\u51e0|\u8ba1\u7b97",
    re.I,
)
_SPACE = re.compile(r"[\s.:!\u3002]+")


def is_proof(statement: str, answers: Sequence[str]) -> bool:
    """Return whether a problem asks for a proof: its gold says so, or it asks to prove and for nothing else."""
    if any(_PROOF_GOLD.fullmatch(_SPACE.sub(" ", answer).strip()) for answer in answers):
        return True
    return bool(_ASKS_PROOF.search(statement)) and not _ASKS_ANSWER.search(statement)


def drop_proofs(rows: Sequence[Row], decisions: Decisions) -> None:
    """Drop rows that ask for a proof."""
    for row in decisions.kept():
        prompt = rows[row].prompt
        if is_proof(prompt.statement, prompt.answers):
            decisions.drop(row, "proof", f"gold: {prompt.answer}")


_MATHS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def words_of(answer: str) -> int:
    """Return how many words of a language stand in an answer; of Chinese, Japanese and Korean two characters are one.

    Formulas, commands of LaTeX and single letters are none.
    """
    text = _TEXT.sub(r" \1 ", answer)
    text = _COMMAND.sub(" ", _MATHS.sub(" ", text))
    ideographs = len(_IDEOGRAPH.findall(text))
    return len(_WORD.findall(_IDEOGRAPH.sub(" ", text))) + math.ceil(ideographs / 2)


def drop_sentences(rows: Sequence[Row], decisions: Decisions, most_words: int) -> None:
    """Drop rows of which every gold has more words than this: free text, right only where it is repeated."""
    for row in decisions.kept():
        answers = rows[row].prompt.answers
        if all(words_of(answer) > most_words for answer in answers):
            decisions.drop(row, "free_text", f"{words_of(answers[0])} words: {answers[0]}")


_SCRIPTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ja", re.compile("[\u3040-\u30ff]")),
    ("ko", re.compile("[\u1100-\u11ff\uac00-\ud7af]")),
    ("zh", re.compile("[\u3400-\u9fff]")),
    ("ru", re.compile("[\u0400-\u04ff]")),
    ("ar", re.compile("[\u0600-\u06ff]")),
    ("el", re.compile("[\u0370-\u03ff]{2,}")),
    ("hi", re.compile("[\u0900-\u097f]")),
    ("th", re.compile("[\u0e00-\u0e7f]")),
    ("he", re.compile("[\u0590-\u05ff]")),
)
_COMMON = {
    "en": "the of and is in to that what are how find for with if be each many on there by",
    "fr": "le la les des et est une dans que pour sont avec du au quel quelle soit combien",
    "de": "der die das und ist ein eine von mit den wie sind f\u00fcr auf zu wenn werden",
    "es": "el la los las de y es una en que por para con son cu\u00e1ntos cu\u00e1l si",
    "it": "il la le di e \u00e8 una che per con sono quanti quale trovare nel della",
    "pt": "o a os as de e \u00e9 uma em que para com s\u00e3o quantos qual se",
    "vi": "c\u1ee7a l\u00e0 v\u00e0 c\u00e1c m\u1ed9t c\u00f3 cho trong s\u1ed1 v\u1edbi t\u00ednh",
    "pl": "jest i w z na \u017ce si\u0119 do ile oraz dla liczba",
    "tr": "ve bir bu i\u00e7in ile ka\u00e7 olan say\u0131s\u0131",
    "nl": "de het een en van is dat met hoeveel zijn voor",
}
_WORDS = {name: frozenset(words.split()) for name, words in _COMMON.items()}
LANGUAGES = tuple(dict.fromkeys((*(name for name, _ in _SCRIPTS), *_COMMON)))
"""ISO 639-1 codes of what `language_of` tells apart."""
_LEAST_SCRIPT, _LEAST_WORDS = 0.1, 2


def language_of(text: str) -> str | None:
    """Return the language of a problem's text as a code of LANGUAGES; None where nothing tells it: a formula, say.

    A script is told by its letters, a language in Latin letters by its most frequent words.
    """
    plain = _COMMAND.sub(" ", _MATHS.sub(" ", text)).lower()
    letters = sum(character.isalpha() for character in plain)
    for name, script in _SCRIPTS:
        if letters and sum(map(len, script.findall(plain))) >= _LEAST_SCRIPT * letters:
            return name
    words = Counter(re.findall(r"[^\W\d_]+", plain))
    scores = {name: sum(words[word] for word in common) for name, common in _WORDS.items()}
    best = max(scores, key=lambda name: scores[name])
    ties = sum(score == scores[best] for score in scores.values())
    return best if scores[best] >= _LEAST_WORDS and ties == 1 else None


def drop_languages(rows: Sequence[Row], decisions: Decisions, kept: Sequence[str]) -> None:
    """Drop rows in another language than these; one whose language nothing tells stays."""
    for row in decisions.kept():
        language = language_of(rows[row].prompt.statement)
        if language is not None and language not in kept:
            decisions.drop(row, "language", language)


TOPICS: dict[str, list[str]] = {
    "geometry": [
        "triangle",
        "circle",
        "angle",
        "square",
        "rectangle",
        "polygon",
        "perpendicular",
        "radius",
        "diameter",
        "area",
        "perimeter",
        "volume",
        "sphere",
        "cube",
        "tangent",
        "chord",
        "inscribed",
        "circumscribed",
        "bisector",
        "median",
        "altitude",
        "parallelogram",
        "trapezoid",
        "hexagon",
        "vertex",
        "vertices",
        "cone",
        "cylinder",
        "\\triangle",
        "\\angle",
        "\\perp",
        "\\parallel",
        "三角形",
        "圆",
        "面积",
    ],
    "number theory": [
        "divisible",
        "divisor",
        "divisors",
        "prime",
        "primes",
        "remainder",
        "modulo",
        "congruent",
        "gcd",
        "lcm",
        "\\gcd",
        "\\lcm",
        "\\pmod",
        "\\bmod",
        "digit",
        "digits",
        "multiple",
        "multiples",
        "integer",
        "integers",
        "coprime",
        "factorization",
        "整数",
        "质数",
        "余数",
    ],
    "counting and probability": [
        "probability",
        "ways",
        "choose",
        "arrange",
        "arrangements",
        "permutation",
        "permutations",
        "combinations",
        "random",
        "randomly",
        "dice",
        "die",
        "coin",
        "expected",
        "subsets",
        "committee",
        "\\binom",
        "distinct",
        "tournament",
        "coloring",
        "概率",
        "排列",
    ],
    "calculus": [
        "derivative",
        "integral",
        "limit",
        "\\int",
        "\\lim",
        "\\frac{d",
        "converges",
        "diverges",
        "differentiable",
        "maclaurin",
        "taylor",
        "\\partial",
        "导数",
        "积分",
    ],
    "algebra": [
        "equation",
        "polynomial",
        "roots",
        "root",
        "function",
        "sequence",
        "sum",
        "product",
        "solve",
        "real",
        "solutions",
        "coefficient",
        "matrix",
        "logarithm",
        "\\log",
        "quadratic",
        "inequality",
        "arithmetic",
        "geometric",
        "expression",
        "simplify",
        "\\sqrt",
        "方程",
        "函数",
    ],
}
"""Topic -> words that speak for it."""
OTHER = "other"
_TOKENS = re.compile(r"\\[a-zA-Z]+|[^\W\d_]+")


def topic_of(row: Row) -> str:
    """Return the topic of a problem: its category where the file has one, else that for which most of its words
    speak."""
    if row.prompt.category:
        return row.prompt.category
    statement = row.prompt.statement.lower()
    words = Counter(_TOKENS.findall(statement))
    scores = {
        topic: sum(words[word] if word.isascii() else statement.count(word) for word in marks)
        for topic, marks in TOPICS.items()
    }
    best = max(scores, key=lambda topic: scores[topic])
    return best if scores[best] else OTHER


def drop_surplus_topics(rows: Sequence[Row], decisions: Decisions, most: float) -> None:
    """Drop rows so that no topic has more than a share of what is left; which of a topic follows from the texts alone.

    Args:
        most: the largest share, above 0 and up to 1.

    Raises:
        ConfigError: there are too few topics for it.
    """
    of_topic: dict[str, list[int]] = defaultdict(list)
    for row in decisions.kept():
        of_topic[topic_of(rows[row])].append(row)
    if not of_topic:
        return
    sizes = {topic: len(members) for topic, members in of_topic.items()}
    cap = largest_cap(list(sizes.values()), most)
    if cap == 0:
        raise ConfigError(
            f"--most-per-topic: got {most:g} with {len(sizes)} topics ({', '.join(sorted(sizes))}); allowed: at least "
            f"{1 / len(sizes):.2g}; fix: raise it, or leave it out"
        )
    for topic, members in of_topic.items():
        ordered = sorted(members, key=lambda row: (_hash(rows[row]), row))
        for row in ordered[cap:]:
            decisions.drop(row, "topic", f"{topic}: {sizes[topic]} of {sum(sizes.values())}")


def largest_cap(sizes: Sequence[int], most: float) -> int:
    """Return the largest c for which min(size, c) of each topic leaves none above its share; 0: there is none."""
    low, high = 0, max(sizes)
    if high <= most * sum(sizes):
        return high
    for cap in range(high, low, -1):
        left = [min(size, cap) for size in sizes]
        if max(left) <= most * sum(left):
            return cap
    return 0


def _hash(row: Row) -> bytes:
    return blake2b(row.prompt.statement.encode("utf-8", "surrogatepass"), digest_size=8).digest()
