"""Rewrites golds and answers into one notation before they are compared or parsed.

Both sides pass through the same rewriting, so it cannot favour one of them. Equations and inequalities are split into
chains, named values and alternatives; what has none of these forms is left as it is. Pure text, linear, no sympy.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_DELIMITERS = re.compile(r"\\\(|\\\)|\\\[(?!\d+(?:pt|em|ex))|(?<!\\)\\\]|(?<!\\)\$+")
_DOLLARS = re.compile(r"(?<!\\)\$+")
_SIZES = re.compile(r"\\(?:left|right|mleft|mright|[bB]igg?[lr]?)(?![a-zA-Z])\.?")
_STYLES = re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])")
_THIN = re.compile(r"\\[!]\s*")
_SPACES = re.compile(r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s)+")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
# The constants in upright letters: in bold they are vectors, and a text of more letters is a word.
_UPRIGHT = re.compile(
    r"\\(?:mathrm|text|textrm|textnormal|mbox|mathnormal|operatorname)\s*\{\s*([ei])\s*\}"
    r"|\{\s*\\rm\s*([ei])\s*\}|\\(?:mathrm|rm)\s+([ei])(?![a-zA-Z])"
)
_ALTERNATIVE = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])|\u2228")
_E_NOTATION = re.compile(r"(?<![\w.\\}])([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)(?![\w.])")
_POINT_NO_DIGITS = re.compile(r"(?<=\d)\.(?=\s*[/*+)\-^]|\s*$)")
_CODE_PREFIX = re.compile(r"\b(?:np|numpy|math|sp|sympy)\.")
_CODE_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|log|ln|exp|sqrt)\s*(?=\()"
)
_CODE_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SINGLE = re.compile(r"([_^])\s*\{\s*([A-Za-z0-9])\s*\}")
_FRAC_SINGLE = re.compile(r"\\frac\s*\{\s*([A-Za-z0-9])\s*\}\s*\{\s*([A-Za-z0-9])\s*\}")
_WORD_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|rm|bf)\s*\{([^{}]*)\}")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))")
_RATIO = re.compile(r"([-+]?)\s*(?:\\frac\s*\{\s*([-+]?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+))")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,^_])\d{1,3}(?: \d{3})+(?![\d,])(?! \d)")
_LEADING_RELATION = re.compile(r"^\s*=\s*(?=[^\s=])")
_ROOT = re.compile(r"\\sqrt\s*(?:\(([^()]*)\))")
_FRAC_BARE = re.compile(
    r"\\frac\s*(\\(?!sqrt|frac|text|math)[a-zA-Z]+|\{(?:[^{}]|\{[^{}]*\})*\}|\w)"
    r"\s*(\\(?!sqrt|frac|text|math)[a-zA-Z]+|\{(?:[^{}]|\{[^{}]*\})*\}|\w)"
)
_BARE_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}|\\varnothing(?![a-zA-Z])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])\s*(?:\^\s*(?:\{[^{}]*\}|\w)\s*)?")
_DEGREES = re.compile(r"(\d+\.?\d*|\\?[a-zA-Z]+)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f]+")
_LOWERED = re.compile("[\u2080-\u208b]+")
_PERCENT = re.compile(r"(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|(?<=[\d\s])percent)$")
_RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|lt|gt|neq?|in)(?![a-zA-Z])")
_MAX_EXPONENT = 9_999
_MAX_PERIOD = 60
_SYNONYMS = (
    ("\\geqslant", "\\geq"),
    ("\\leqslant", "\\leq"),
    ("\\lbrace", "\\{"),
    ("\\rbrace", "\\}"),
    ("\\lbrack", "["),
    ("\\rbrack", "]"),
    ("\u2212", "-"),
    ("\u2264", "\\leq "),
    ("\u2265", "\\geq "),
    ("\u221e", "\\infty "),
    ("\u222a", "\\cup "),
    ("\u03c0", "\\pi "),
    ("\u00b0", "^{\\circ}"),
    ("\u2260", "\\neq "),
    ("\u2208", "\\in "),
    ("\u2229", "\\cap "),
    ("\u2205", "\\emptyset "),
    ("\u2248", "="),
    ("\\approx", "="),
    ("\u00d7", "\\times "),
    ("\u00f7", "\\div "),
    ("\u00b7", "\\cdot "),
    ("\u22c5", "\\cdot "),
    ("\u2013", "-"),
    ("\u2044", "/"),
    ("\u221a", "\\sqrt "),
    ("\u2147", " e "),
    ("\u2148", " i "),
    ("{,}", ""),
    ("\\$", ""),
)


def canonical(text: str) -> str:
    """Write an answer in one notation: without LaTeX's delimiters, sizes and spaces; e-notation, numpy calls, floats
    such as `1.` and thousands separators are rewritten.

    Args:
        text: content of a box, or a gold.

    Returns: LaTeX without `$`. Never raises.
    """
    for old, new in _SYNONYMS:
        text = text.replace(old, new)
    text = _alternatives(_UPRIGHT.sub(lambda m: f" {m.group(1) or m.group(2) or m.group(3)} ", text))
    # In a matrix `\\\\[2pt]` is a line end, not a delimiter.
    text = (_DOLLARS if "\\\\" in text else _DELIMITERS).sub("", text)
    text = _STYLES.sub("", _SIZES.sub("", _THIN.sub("", text if text.isascii() else _ascii_digits(text))))
    text = _FRACTIONS.sub(r"\\frac", _SPACES.sub(" ", text)).strip()
    text = _FRAC_BARE.sub(_braced_fraction, text)
    text = _CODE_PREFIX.sub("", text).replace("**", "^")
    text = _CODE_FUNCTIONS.sub(lambda m: "\\" + _CODE_NAMES.get(m.group(1), m.group(1)), text)
    text = _E_NOTATION.sub(lambda m: f"{m.group(1)} \\times 10^{{{int(m.group(2)[:9])}}}", text)
    text = _EMPTY_SET.sub(r"\\emptyset ", _BARE_PI.sub(r"\\pi ", _ROOT.sub(r"\\sqrt{\1}", text))).strip()
    text = _in_radians(text) if "\\circ" in text else text
    text = _REPEATING.sub(_repeating_decimal, _LEADING_RELATION.sub("", text))
    text = _SPACED_THOUSANDS.sub(lambda m: m.group().replace(" ", ""), text)
    text = _POINT_NO_DIGITS.sub("", text.rstrip(" ,;")).rstrip(". ")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _alternatives(text: str) -> str:
    """Write the `\\lor` between equations or inequalities as a word; between statements it is logic, and stays."""
    parts = _ALTERNATIVE.split(text)
    return " \\text{ or } ".join(parts) if len(parts) > 1 and all(map(_RELATION.search, parts)) else text


def _ascii_digits(text: str) -> str:
    """Write raised, lowered and full-width digits and fractions of one character, in LaTeX."""
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m.group())}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m.group())}}}", text)
    return "".join(_ascii(char) for char in text).replace("\u2212", "-")


def _ascii(char: str) -> str:
    kind, _, parts = unicodedata.decomposition(char).partition(" ")
    if kind == "<wide>":
        return unicodedata.normalize("NFKC", char)
    if kind != "<fraction>":
        return char
    above, _, below = "".join(chr(int(code, 16)) for code in parts.split()).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if below else char


def _braced_fraction(match: re.Match[str]) -> str:
    """Write `\\frac\\pi3` with the braces that LaTeX does not need."""
    above, below = (part.removeprefix("{").removesuffix("}") for part in match.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def _in_radians(text: str) -> str:
    """Write degrees in the argument of a trigonometric function in radians; elsewhere they are a unit."""
    parts, done = [], 0
    for match in _TRIGONOMETRIC.finditer(text):
        start = match.end()
        if start < done:
            continue
        degrees = _DEGREES.match(text, start)
        end = degrees.end() if degrees else _end_of_brackets(text, start)
        parts += [text[done:start], _DEGREES.sub(r"(\\frac{\1 \\pi }{180})", text[start:end])]
        done = end
    return "".join(parts) + text[done:]


def _end_of_brackets(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; `start` if there is none, or it is not
    closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({[") - (text[index] in ")}]")
        if depth == 0:
            return index + 1 if index > start else start
    return start


def _repeating_decimal(match: re.Match[str]) -> str:
    """Write `0.1\\overline{36}` as the fraction that it is: (136 - 1) / 990."""
    whole, fixed, period = match.group(1), match.group(2), match.group(3) or match.group(4)
    if len(whole + fixed + period) > _MAX_PERIOD:
        return match.group()
    value = int(whole + fixed + period) - int((whole + fixed) or "0")
    return f"\\frac{{{value}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def key(text: str) -> str:
    """Return a text by which equal canonical forms are recognised without parsing: no spaces (except between digits),
    no braces around single characters, one spelling of text wrappers.

    Two answers with the same key are the same LaTeX, so the same answer; the reverse does not hold.
    """
    text = _SINGLE.sub(r"\1\2", _FRAC_SINGLE.sub(r"\\frac\1\2", text))
    text = _WORD_WRAPPER.sub(lambda m: f"\\text{{{m.group(1).strip()}}}", text)
    return re.sub(r"(?<=\d) (?=\d)", "\x00", text).replace(" ", "").replace("\x00", " ")


def words(text: str) -> str | None:
    """Return the lower-case words of an answer that is a word or a choice letter; None when it is mathematics.

    A choice letter needs a text wrapper or brackets: a bare `m` is a symbol.
    """
    wrapped = _WORD_WRAPPER.search(text) is not None
    plain = _WORD_WRAPPER.sub(r"\1", text).strip().strip("().: ")
    if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", plain):
        return None
    letters = plain.replace(" ", "").replace("-", "")
    if len(letters) == 1:
        return plain if wrapped or text.strip().startswith("(") else None
    return plain.lower() if wrapped or len(letters) > 2 else None


_WRAPPED = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{"
_CHOICE = re.compile(
    rf"(?:{_WRAPPED}\s*(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:])\s*\}}|\(\s*{_WRAPPED}\s*([A-J])\s*\}}\s*\)"
    r"|\(([A-J])\)\s|([A-J])[).:]\s)\s*(?=\S)"
)


def without_choices(gold: str, answer: str) -> tuple[str, str]:
    """Return what is to be compared where a side is a choice with its value, as `\\textbf{(C)} 14`.

    The letters, if both sides have one and these differ or one side is a letter alone; else the values.

    Args:
        gold, answer: canonical texts.
    """
    (gold_letter, gold_value), (letter, value) = _choice(gold), _choice(answer)
    labelled = gold_letter or letter or words(answer)
    gold_letter, letter = gold_letter or _lone_letter(gold), letter or _lone_letter(answer)
    if not labelled:
        return gold, answer
    by_letter = gold_letter and letter and (gold_letter != letter or gold_value is None or value is None)
    return (f"\\text{{{gold_letter}}}", f"\\text{{{letter}}}") if by_letter else (gold_value or gold, value or answer)


def value_of_choice(text: str) -> str:
    """Return the value of a labelled choice, `14` of `\\textbf{(C)} 14`; any other canonical text as it is."""
    return _choice(text)[1] or text


def _choice(text: str) -> tuple[str, str | None]:
    """Return letter and value of a labelled choice; an empty letter and None if it is none."""
    match = _CHOICE.match(text)
    if match is None:
        return "", None
    return next(letter for letter in match.groups() if letter), text[match.end() :].strip()


def _lone_letter(text: str) -> str:
    plain = _WORD_WRAPPER.sub(r"\1", text).strip().strip("().: ")
    return plain if re.fullmatch(r"[A-J]", plain) else ""


def number(text: str) -> Decimal | Fraction | None:
    """Return the value of a literal: decimal, `a \\times 10^{n}`, `\\frac{a}{b}` or `a/b` of integers, with or
    without `\\%`.

    Returns: Decimal for decimals and scientific notation, Fraction for ratios, None for anything else.
    """
    text = text.strip()
    percent = _PERCENT.search(text)
    value = _literal(text[: percent.start()].rstrip() if percent else text)
    return value / 100 if percent and value is not None else value


def _literal(text: str) -> Decimal | Fraction | None:
    try:
        if _DECIMAL.fullmatch(text):
            return Decimal(text)
        scientific = _SCIENTIFIC.fullmatch(text)
        if scientific:
            exponent = int((scientific.group(2) or scientific.group(3))[:12])
            return Decimal(scientific.group(1)).scaleb(exponent) if abs(exponent) <= _MAX_EXPONENT else None
        ratio = _RATIO.fullmatch(text)
        if ratio:
            value = Fraction(int(ratio.group(2) or ratio.group(4)), int(ratio.group(3) or ratio.group(5)))
            return -value if ratio.group(1) == "-" else value
    except (InvalidOperation, ZeroDivisionError, ValueError):
        return None
    return None


_NAME = re.compile(r"\\?[A-Za-z]+(?:\s*_\s*(?:\{[^{}]*\}|\w))?'?")
_VALUE = r"([^<>=,]+?)"
_LESS, _MORE = r"(<|\\(?:lt|leq?)(?![a-zA-Z]))", r"(>|\\(?:gt|geq?)(?![a-zA-Z]))"
_OR = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z]))\s*")
_BELOW = re.compile(rf"\s*{_NAME.pattern}\s*{_LESS}\s*{_VALUE}\s*")
_ABOVE = re.compile(rf"\s*{_NAME.pattern}\s*{_MORE}\s*{_VALUE}\s*")
_BETWEEN = re.compile(rf"\s*{_VALUE}\s*{_LESS}\s*{_NAME.pattern}\s*{_LESS}\s*{_VALUE}\s*")
_LT, _GT = "\\lt", "\\gt"
_SPLIT = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)


def chain(text: str) -> list[str]:
    """Return the parts between `=` signs that stand outside brackets; one part when there is none."""
    parts, depth, begin = [], 0, 0
    for match in _SPLIT.finditer(text):
        token = match.group()
        depth += token in "{([" or token in ("\\{", "\\begin")
        depth -= token in "})]" or token in ("\\}", "\\end")
        if token == "=" and depth <= 0:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def is_name(text: str) -> bool:
    """Whether a text is one symbol, with a subscript or without."""
    return _NAME.fullmatch(text.strip()) is not None


def assignments(parts: tuple[str, ...]) -> dict[str, str] | None:
    """Return name -> value of several parts such as `x=2` and `y=12`; None unless each has a name of its own."""
    values: dict[str, str] = {}
    for part in parts:
        sides = chain(part)
        if len(sides) != 2 or not is_name(sides[0]) or re.sub(r"[\s{}]", "", sides[0]) in values:
            return None
        values[re.sub(r"[\s{}]", "", sides[0])] = sides[1]
    return values if len(values) > 1 else None


def in_order(named: dict[str, str]) -> tuple[str, ...]:
    """Return the values as coordinates: letters in the order of the alphabet, other names as they stand."""
    letters = all(len(name) == 1 for name in named)
    return tuple(named[name] for name in (sorted(named) if letters else named))


def as_union(text: str) -> str | None:
    """Write `x<0 or x>3` as a union of intervals; None for anything else."""
    parts = _OR.split(text)
    intervals = [_interval(part) for part in parts]
    return " \\cup ".join(part for part in intervals if part) if len(parts) > 1 and all(intervals) else None


def _interval(text: str) -> str | None:
    between = _BETWEEN.fullmatch(text)
    if between:
        low, left, right, high = between.groups()
        return f"{'(' if left in ('<', _LT) else '['}{low},{high}{')' if right in ('<', _LT) else ']'}"
    below = _BELOW.fullmatch(text)
    if below:
        return f"(-\\infty,{below.group(2)}{')' if below.group(1) in ('<', _LT) else ']'}"
    above = _ABOVE.fullmatch(text)
    if above:
        return f"{'(' if above.group(1) in ('>', _GT) else '['}{above.group(2)},\\infty)"
    return None
