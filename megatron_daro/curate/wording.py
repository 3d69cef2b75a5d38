"""Words that change a problem, and words that say the same: what two statements may differ in.

Place in the data flow: statements writes number words and synonyms in one way by these tables; alike asks whether the
words in which two statements differ make another problem.
"""

from __future__ import annotations

_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NUMBERS = {word: str(value) for value, word in enumerate([*_UNITS.split(), "seventeen", "eighteen", "nineteen"])}
NUMBERS |= {word: str(value) for word, value in _TENS.items()} | {"hundred": "100", "thousand": "1000"}
"""Number word -> digits. A `one` that is no number (one of them) is in both texts alike."""
TENS = {word: str(value) for word, value in _TENS.items()}

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt gcd lcm max min det lim pi"
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Functions that people write with and without a backslash: in a statement they are commands."""

_SAME = {
    "\\max": ("maximum", "maximal", "largest", "greatest", "biggest", "highest", "most", "maximize", "maximise"),
    "\\min": ("minimum", "minimal", "smallest", "least", "lowest", "fewest", "minimize", "minimise"),
    "%": ("percent", "percents"),
    "degrees": ("degree",),
    "distinct": ("different",),
}
_OPPOSITES = (
    "odd even prime composite",
    "positive negative nonnegative nonpositive nonzero",
    "increasing decreasing ascending descending",
    "more less fewer greater smaller larger exceed",
    "sum product difference quotient ratio remainder",
    "area perimeter volume radius diameter circumference length width height side diagonal",
    "inside outside inscribed circumscribed",
    "first second third fourth fifth last",
    "double triple half twice thrice quarter",
    "clockwise counterclockwise",
    "rational irrational real complex imaginary integer integers",
    "distinct identical distinguishable indistinguishable same",
    "with without",
    "row rows column columns",
    "mean median mode range variance",
    "sine cosine tangent",
    "horizontal vertical",
    "before after",
    "left right above below",
    "triangle square rectangle circle pentagon hexagon octagon cube sphere cone cylinder",
    "seconds minutes hours days weeks months years",
    "monday tuesday wednesday thursday friday saturday sunday",
    "closed open",
    "true false",
    "arithmetic geometric harmonic",
    "\u5947 \u5076",  # odd, even; the next lines: positive, negative; large, small; many, few
    "\u6b63 \u8d1f",
    "\u5927 \u5c0f",
    "\u591a \u5c11",
)
SYNONYMS = {word: name for name, words in _SAME.items() for word in words}
"""Word -> the token that stands for it."""
MEANING = frozenset(word for line in _OPPOSITES for word in line.split()) | {"\\max", "\\min"}
"""Words of which one cannot stand for another: where two statements differ in them, they are two problems."""
NEGATIONS = frozenset(["not", "no", "never", "none", "neither", "nor", "except", "cannot", "不", "非", "无", "没"])
"""Words that turn a statement around wherever they come or go."""
