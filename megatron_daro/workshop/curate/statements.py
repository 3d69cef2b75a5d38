"""A problem's text as tokens that are the same for every spelling of the same problem.

White space, LaTeX spelling, punctuation, capitals, thousands separators and number words do not count; numbers,
operators, symbols and brackets do. Tables of words say which synonyms become one token, and which words make two
statements that differ in them two problems. The normal form is for comparison only, not for training. Time is linear in
the text's length.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NUMBERS = {
    **{word: str(value) for value, word in enumerate([*_UNITS.split(), "seventeen", "eighteen", "nineteen"])},
    **{word: str(value) for word, value in _TENS.items()},
    "hundred": "100",
    "thousand": "1000",
}
"""Number word -> digits. A `one` that is not a number (one of them) is replaced in both texts alike."""
TENS = {word: str(value) for word, value in _TENS.items()}

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt gcd lcm max min det lim pi"
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Functions that are written with and without a backslash; the normal form has the command."""

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
"""Words that cannot stand for each other: two statements that differ in them are two problems."""
NEGATIONS = frozenset(["not", "no", "never", "none", "neither", "nor", "except", "cannot", "不", "非", "无", "没"])
"""Words that reverse a statement wherever they are added or removed."""


_NUMBER = re.compile(r"\d|\.\d")
_BROKEN = str.maketrans({"\x0c": "\\f", "\x08": "\\b", "\x07": "\\a", "\x0b": "\\v"})
"""In files that went through a string literal, control characters replace a backslash and a letter."""
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2014": " ", "\u2018": "'", "\u2019": "'", "\u00d7": "*", "\u00b7": "*",
    "\u22c5": "*", "\u00f7": "/", "\u2044": "/", "\u2264": "<=", "\u2265": ">=", "\u2260": "!=", "\u03c0": " \\pi ",
    "\u221e": " \\infty ", "\u00b0": " degrees ", "\u221a": " \\sqrt ", "\u2026": "...", "\u2208": " \\in ",
    "\u2220": " \\angle ", "\u25b3": " \\triangle ", "\uff1f": " ", "\u3002": " ", "\uff0c": " ", "\u3001": " ",
}  # fmt: skip
_TRANSLATED = str.maketrans(_SIGNS)
_FIGURE = re.compile(r"\[asy\].*?\[/asy\]|\\begin\{(?:asy|tikzpicture)\}.*?\\end\{(?:asy|tikzpicture)\}", re.DOTALL)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<image\w*>|\[img\].*?\[/img\]|\\includegraphics(?:\[[^\]]*\])?\{[^}]*\}")
_ENUMERATION = re.compile(
    r"\s*(?:(?:problem|example|exercise|question|q)\s*\d+\s*[.:)]|\d{1,3}\s*[.)]\s(?=\D)|\(\d+\s*points?\))\s*", re.I
)
_LAYOUT = re.compile(
    r"\\(?:left|right|mleft|mright|[bB]igg?[lr]?|displaystyle|textstyle|scriptstyle|limits|nolimits|quad|qquad|hspace"
    r"|vspace|text(?:bf|it|rm|normal|tt|sf|up)?|math(?:rm|bf|it|bb|cal|sf|frak|scr|normal)|mbox|hbox|operatorname|bf|rm"
    r"|it|em|emph|underline|label|tag|nonumber|newline|par|item|noindent|begin|end|ensuremath)(?![a-zA-Z])\*?"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]+\}(?:\[[^\]]*\]|\{[lcr|]+\})?")
_LINE_END = re.compile(r"\\\\(?:\[[\d.]+(?:pt|em|ex|cm|mm)\])?")
_THIN = re.compile(r"\\[,;:! ]|~|&")
_MATH = re.compile(r"\\[()\[\]]|\\?\$")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_ARGUMENT = re.compile(r"(\\(?![dtc]?frac)[a-zA-Z]+\s*(?:\[[^\]\[{}]*\])?|[\^_])\s*\{([^{}]*)\}")
_SET = re.compile(r"\\[{}]")
_OVER = re.compile(r"\\(?:over|div)(?![a-zA-Z])")
_DEGREE = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_HYPHEN = re.compile(r"(?<=[a-zA-Z]{2})-(?=[a-zA-Z]{2})|(?<=\d)-(?=[a-zA-Z]{2})|(?<=\d )-(?=[a-zA-Z]{2})")
_APOSTROPHE = re.compile(r"(?<=[a-zA-Z])'(?=[a-zA-Z])|(?<=[a-zA-Z]{2})'")
_ARTICLE = re.compile(r"\bA(?=\s+[a-z]{2})")
_TENS_UNITS = re.compile(rf"\b({'|'.join(TENS)})[- ](one|two|three|four|five|six|seven|eight|nine)\b", re.I)
_COMMANDS = {
    "cdot": "*", "times": "*", "ast": "*", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=",
    "geqslant": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "dots": "...", "ldots": "...", "cdots": "...",
    "vdots": "...", "dotsc": "...", "dotsb": "...", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "to": "->",
    "rightarrow": "->", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "implies": "->",
    "circ": "degrees", "degree": "degrees",
    "colon": "", "overline": "\\bar", "widehat": "\\hat", "varphi": "\\phi", "varepsilon": "\\epsilon", "prime": "'",
}  # fmt: skip
_TOKEN = re.compile(
    r"\d+\.\d+|\.\d+|\d+|\\[a-zA-Z]+|\.\.\.|<=|>=|!=|->"
    r"|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+|(?<=[\w)\]])!|'|[-+*/^=<>|%()\[\]]"
)
_ASKED_FORM = re.compile(
    r"(?:(?:the|your|if\s+the)\s+)?(?:(?:final|original)\s+)?answers?\s+(?:is\s+in|should\s+be|can\s+be|will\s+be|must\s+be|is\s+of)"
    r"|(?:express|give|write|report|enter|submit|round|leave|state)\s+\w+\s+(?:final\s+)?answers?\b"
    r"|please\s+(?:give|provide|find|express)|put\s+your\s+(?:final\s+)?answer|(?:\u539f\u59cb|\u6700\u7ec8|\u6700\u540e)?\u7b54\u6848(?:\u7684|\u662f|\u4e3a|\u5f62\u5f0f|\u5206\u522b)|\u8bf7\u7ed9\u51fa",
    re.I,
)
_DEEPEST, _LONGEST_NAME = 8, 5
_LEAST_CORE, _LONGEST_FORM = 8, 60
_SHARED_ROWS, _SHARED_PART = 10, 0.2


@dataclass(frozen=True, slots=True)
class Statement:
    """A problem in its normal form.

    tokens: of the problem itself. form: of the request for a form of the answer (give m + n where ...), with which the
    same problem can have another gold. numbers: the numbers among `tokens`, in order.
    """

    tokens: tuple[str, ...]
    form: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


def statement_of(text: str) -> Statement:
    """Return the normal form of a problem's text. Never raises."""
    text = _IMAGE.sub(" ", text)
    numbered = _ENUMERATION.match(text)
    text = text[numbered.end() :] if numbered else text
    for match in _ASKED_FORM.finditer(text):
        rest = text[match.start() :]
        figures = " ".join(_FIGURE.findall(rest))
        core, form = tokens_of(f"{text[: match.start()]} {figures}"), tokens_of(_FIGURE.sub(" ", rest))
        if len(core) >= _LEAST_CORE and len(form) <= _LONGEST_FORM:
            return _statement(core, form)
    return _statement(tokens_of(text), ())


def without_figures(text: str) -> str:
    """Return the text without drawings in Asymptote or TikZ, if enough is left to recognize the problem."""
    plain = _FIGURE.sub(" ", text)
    return plain if plain != text and len(plain.split()) >= 2 * _LEAST_CORE else text


def tokens_of(text: str) -> tuple[str, ...]:
    r"""Return the tokens of a text: numbers, words in lower case, `\command`s, operators, brackets, single letters."""
    return tuple(token for raw in _TOKEN.findall(_plain(text)) for token in _written(raw))


def shared_lines(texts: Sequence[str]) -> frozenset[str]:
    """Return first and last lines that many problems of a file share: instructions around the problem.

    Args:
        texts: the problems of one file.

    Returns:
        Stripped lines that begin or end at least ten problems and a fifth of all, counting only problems of two or more
        lines. `without_lines` removes them.
    """
    ends: Counter[str] = Counter()
    for text in texts:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if len(lines) > 1:
            ends.update({lines[0], lines[-1]})
    least = max(_SHARED_ROWS, _SHARED_PART * len(texts))
    return frozenset(line for line, count in ends.items() if count >= least)


def without_lines(text: str, shared: frozenset[str]) -> str:
    """Return the text without those lines, or unchanged where nothing else would be left."""
    if not shared:
        return text
    rest = "\n".join(line for line in text.splitlines() if line.strip() not in shared)
    return rest if rest.strip() else text


def _statement(tokens: tuple[str, ...], form: tuple[str, ...]) -> Statement:
    return Statement(tokens, form, tuple(token for token in tokens if _NUMBER.match(token)))


def _plain(text: str) -> str:
    """Return the text with one spelling of LaTeX, signs, fractions and numbers; braces are gone."""
    text = text.translate(_BROKEN)
    if not text.isascii():
        text = _RAISED.sub(lambda m: "^" + unicodedata.normalize("NFKC", m.group()), text)
        text = unicodedata.normalize("NFKC", text.translate(_TRANSLATED)).translate(_TRANSLATED)
    text = _LINE_END.sub(" ", text)
    text = _THIN.sub(lambda m: "" if m.group() in ("\\!", "\\,") else " ", text)
    text = _SET.sub(" ", _ENVIRONMENT.sub(" ", _MATH.sub(" ", text)))
    text = _DEGREE.sub(" degrees ", _THOUSANDS.sub("", text))
    for _ in range(_DEEPEST):
        text, arguments = _ARGUMENT.subn(r"\1 \2 ", text)
        text, fractions = _FRACTION.subn(_as_quotient, text)
        if not arguments + fractions:
            break
    text = _OVER.sub("/", _LAYOUT.sub(" ", text))
    text = _TENS_UNITS.sub(lambda m: str(int(TENS[m[1].lower()]) + int(NUMBERS[m[2].lower()])), text)
    text = _ARTICLE.sub("a", text)
    return _APOSTROPHE.sub("", _HYPHEN.sub(" ", text)).replace("''", " ")


def _as_quotient(match: re.Match[str]) -> str:
    above, below = match[1] or match[2] or "", match[3] or match[4] or ""
    return f" {above} / {below} "


def _written(token: str) -> Sequence[str]:
    """Return the tokens that one match stands for: none, one, or the letters of a name such as ABC."""
    if token.startswith("\\"):
        name = _COMMANDS.get(token[1:], token)
        return (name,) if name else ()
    if not token[0].isalpha():
        return (("0" + token) if token.startswith(".") and len(token) > 1 and token[1].isdigit() else token,)
    if len(token) == 1:
        return (token,)
    if token.isupper() and token.isascii():
        return tuple(token) if len(token) <= _LONGEST_NAME else (token,)  # a triangle ABC is also written A B C
    word = token.lower()
    word = NUMBERS.get(word) or SYNONYMS.get(word) or word
    return (f"\\{word}" if word in FUNCTIONS else word,)
