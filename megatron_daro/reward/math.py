"""Mathematical answers: extraction, pre-filter, outer shape, then math-verify for the leaves.

`screen` runs in the pool's own process, cheap and bounded, and yields a Verdict or a Job; `judge`, which a run calls in
a worker process, decides the job; it and `gold_problem` import math-verify and sympy. Units and words after a value are
cut off if they do not change it; words that scale a number (`million`) are a factor, and those that hedge (`maybe not`)
or join (`or six`) make it another value, or none. With `strict` an answer that merely restates the problem, such as the
unevaluated sum it asks for, is refused before any algebra, which would do the missing work; what the gold itself
contains is never refused.

Rejects golds that are empty or not text (`gold_empty`, `gold_not_text`). A gold that the grammar does not take is
matched literally, and a mismatch then says `gold_unparsed`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from megatron_daro.boxed import last_box
from megatron_daro.reward.base import Job, VerifierSpec, check_text
from megatron_daro.reward.extraction import trailing_number
from megatron_daro.reward.normal_form import (
    as_union,
    assignments,
    canonical,
    chain,
    in_order,
    is_name,
    key,
    number,
    value_of_choice,
    without_choices,
    words,
)
from megatron_daro.reward.screening import Shape, is_region, named_value, refusal, shape_of
from megatron_daro.types import Verdict

_UNIT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf)\s*\{\s*([A-Za-z][A-Za-z .'/-]*?)\s*\}\s*(\^\s*\{?\d\}?)?\s*$")
# Without a text wrapper only words that cannot be a product of symbols in an answer, after a digit or a brace.
_BARE_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:cm|mm|km|kg|inch(?:es)?|feet|foot|meters?|metres?|miles?|degrees?|cents?|dollars?|hours?|minutes?"
    r"|seconds?|days?|years?|units?|square (?:units|inches|feet|cm|meters))\s*(?:\^\s*\{?[23]\}?)?\s*$"
)
_MAX_WORDS = 3
_NOT_A_UNIT = re.compile(
    r"\b(?:a(?!\.)|about|almost|an|and|approximately|approx|around|at|base|be|billion|but|by|cannot|could|does|"
    r"doubtful|dozen|eight|eleven|exactly|except|false|few|five|four|guess|half|hardly|hundred|i|if|"
    r"incorrect|is|it|just|least|less|likely|may|maybe|might|million|mod|modulo|more|most|nearly|negative|"
    r"never|nine|no|nope|none|nor|not|of|off|one|or|otherwise|perhaps|plus|minus|possibly|possible|"
    r"probably|quarter|roughly|seven|several|six|some|sure|ten|then|third|thirds|thousand|three|times|to|"
    r"trillion|true|twelve|twenty|twice|two|uncertain|undefined|unknown|unless|unsure|until|up|when|where|"
    r"wrong|zero)\b"
)


_SCALES = {
    "dozen": "12",
    "hundred": "10^{2}",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
}
_SCALED = re.compile(
    rf"(.+?)\s*(?:\\(?:text|mbox|mathrm|textrm|textbf)\s*\{{\s*)?({'|'.join(_SCALES)})s?(?![a-zA-Z])\s*([^{{}}]*)\}}?"
)


def scaled(text: str) -> str:
    """Write `1.5 \\text{ million miles}` as `1.5 \\times 10^{6} \\text{miles}`, where a literal number is scaled."""
    match = _SCALED.fullmatch(text)
    value = canonical(match[1]) if match else ""
    if match is None or number(value) is None:
        return text
    return rf"{value} \times {_SCALES[match[2]]}" + (rf" \text{{{match[3]}}}" if match[3] else "")


def without_unit(text: str) -> str:
    """Return the text without a unit at its end; unchanged when nothing else would be left."""
    match = _UNIT.search(text) or _BARE_UNIT.search(text)
    return text if match is None or not text[: match.start()].strip() else text[: match.start()].strip()


def unit(text: str) -> str | None:
    """Return the unit of a value that is written as text, in one spelling; None without one."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return None
    return match.group(1).lower().replace(".", "").rstrip("s") + re.sub(r"[{}\s]", "", match.group(2) or "")


def changes_value(text: str) -> bool:
    """Whether the words after a value are more than a unit: too many, or one that hedges, joins or scales."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return False
    words = match.group(1).lower()
    return len(words.split()) > _MAX_WORDS or _NOT_A_UNIT.search(words) is not None


# Families: a gold with one member allows the others.
_OPERATORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\\sum(?![a-zA-Z])|\u2211",
        r"\\prod(?![a-zA-Z])|\u220f",
        r"\\(?:i{0,3}|o|id)int(?![a-zA-Z])|[\u222b-\u222e]",
        r"\\(?:lim|limsup|liminf|varlimsup|varliminf|overline\s*\{\s*\\lim|underline\s*\{\s*\\lim)(?![a-zA-Z])",
        r"\\(?:max|min|sup|inf|argmax|argmin)(?![a-zA-Z])",
        r"(?<![a-zA-Z])\\?(?:gcd|lcm|hcf|gcf)(?![a-zA-Z])",
        r"\\det(?![a-zA-Z])|vmatrix|\\(?:rank|tr|dim|ker|deg)(?![a-zA-Z])",
        r"\\(?:p|b)?mod(?![a-zA-Z])",
        r"\\frac\s*\{?\s*(?:d|\\partial)\s*(?:\^\s*\{?\d\}?\s*)?\}?\s*\{\s*(?:d|\\partial)",
        r"\\(?:[lr]?floor|[lr]?ceil)(?![a-zA-Z])|[\u2308-\u230b]",
    )
)
# Only where the gold is one value: n(n-1)/2 may be written as a binomial, \sinh x in exponentials.
_OPERATORS_OF_VALUES = (
    re.compile(r"\\[dt]?(?:binom|choose|nCr)(?![a-zA-Z])|!"),
    re.compile(
        r"\\?(?<![a-zA-Z])(?:arc|a)?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|lg)(?![a-zA-Z])"
        r"|\\(?:Re|Im|arg)(?![a-zA-Z])"
    ),
)
_NAME_WRAPPER = re.compile(r"\\(?:operatorname|mathop)\*?\s*\{\s*([a-zA-Z]+)\s*\}")
_COMMAND = re.compile(r"\\(?!pi(?![a-zA-Z]))[a-zA-Z]+")
_ORDER = re.compile(r"<|>|\\(?:leq?|geq?|lt|gt)(?![a-zA-Z])")


def unevaluated(answer: str, gold: str) -> bool:
    """Whether a canonical answer holds an operator that the canonical gold does not.

    Sums, products, integrals, limits, derivatives, extrema, gcd and lcm, determinants, remainders, floors always;
    binomials, factorials, logarithms and trigonometric functions where the gold is one exact value without them. Only
    what follows the last `=` counts.
    """
    if _unsolved(answer, gold):
        return True
    value = answer if "=" in gold else chain(answer)[-1]
    answer, gold = _plain_names(value), _plain_names(gold)
    if any(operator.search(answer) and not operator.search(gold) for operator in _OPERATORS):
        return True
    if "." in gold or re.search(r"[a-zA-Z]", _COMMAND.sub("", gold).replace("\\pi", "")):
        return False
    return any(operator.search(answer) and not operator.search(gold) for operator in _OPERATORS_OF_VALUES)


def _unsolved(answer: str, gold: str) -> bool:
    """Whether the answer is an inequality, or an equation for one number, that the gold has solved for a symbol."""
    if _ORDER.search(answer):
        return not any(map(is_name, _ORDER.split(answer))) and ("(" in gold or "[" in gold or _solved(_ORDER, gold))
    gold_sides, sides = chain(gold), chain(answer)
    of_number = len(gold_sides) == 2 and is_name(gold_sides[0]) and number(gold_sides[1]) is not None
    return of_number and len(sides) > 1 and not any(map(is_name, sides))


def _solved(relation: re.Pattern[str], text: str) -> bool:
    return relation.search(text) is not None and any(map(is_name, relation.split(text)))


def _plain_names(text: str) -> str:
    """Write `\\operatorname{gcd}` as `\\gcd`."""
    return _NAME_WRAPPER.sub(lambda m: f"\\{m.group(1)} ", text)


MAX_DEPTH = 6
# Longer answers and golds are decided in a worker from the start, whatever the limits of the screen are.
QUICK_CHARS = 1000
_BASED = re.compile(r"(?<![\w}])\(?([0-9][0-9A-Fa-f]*)\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_ARITHMETIC = re.compile(
    r"(?:[\d\s.,+\-*/^(){}!%|]|\\(?:frac|sqrt|cdot|times|div|pi|binom|sin|cos|tan|log|ln)(?![a-zA-Z]))+"
)
_UNORDERED = ("set", "list")


class MathVerifier:
    """Equality of mathematical answers. `verify` runs everything in the calling process; RewardPool does not."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec

    def verify(self, answer_text: str, gold: str) -> Verdict:
        """Compare; unbounded in time on hostile text that passes the screen."""
        screened = self.screen(answer_text, gold)
        return screened if isinstance(screened, Verdict) else self.judge(screened)

    def screen(self, answer_text: str, gold: str, statement: str = "") -> Verdict | Job:
        """Decide what needs no algebra: not text, no answer, literal equality, too big, two literal numbers.

        Linear in the texts; beyond finding the answer, it looks at QUICK_CHARS characters of each at most.

        Args:
            answer_text: what the model wrote, whole.
            gold: the gold answer, not wrapped.
            statement: not read; a user's own verifier gets it.

        Returns: a verdict, or the pair for `judge`.
        """
        refused = check_text(self._spec, answer_text, gold)
        if refused is not None:
            return refused
        answer = self._found(answer_text)
        if not answer:
            return self._spec.verdict(False, "no_answer")
        if len(answer) > self._spec.limits.max_chars:
            same = answer.strip() == gold.strip()
            return self._spec.verdict(same, "match" if same else "too_long")
        if max(len(answer), len(gold)) > QUICK_CHARS:
            return Job(answer, gold)
        outcome = self._quick(answer, gold)
        return Job(answer, gold) if outcome is None else self._spec.verdict(outcome == "match", outcome)

    def judge(self, job: Job) -> Verdict:
        """Decide the rest with math-verify. Raises MemoryError when the process runs out of it."""
        outcome = self._quick(job.answer, job.gold)
        if outcome is None:
            outcome = compare(*_canonical_pair(job.gold, job.answer), 0)
        return self._spec.verdict(outcome == "match", outcome)

    def gold_problem(self, gold: str) -> str | None:
        """Return `gold_not_text`, `gold_empty`, `gold_unparsed` (matched literally only), or None for a usable gold."""
        from megatron_daro.reward.symbolic import parsed

        refused = check_text(self._spec, "", gold)
        if refused is not None:
            return refused.reason
        canonical_gold = value_of_choice(canonical(_last_box_or_all(gold)))
        if not canonical_gold:
            return "gold_empty"
        if refusal(canonical_gold, self._spec.limits) is not None:
            return "gold_unparsed"
        if number(canonical_gold) is not None or words(canonical_gold) is not None:
            return None
        shape = shape_of(canonical_gold)
        leaves = shape.items or (shape.text,)
        return None if all(number(leaf) is not None or parsed(leaf) is not None for leaf in leaves) else "gold_unparsed"

    def answer_of(self, answer_text: str) -> str | None:
        """Return the final answer in one notation, equal for equal LaTeX; None where there is none."""
        answer = self._found(answer_text)
        if not answer:
            return None
        return key(canonical(answer)) if len(answer) <= self._spec.limits.max_chars else answer

    def _found(self, answer_text: str) -> str | None:
        text = self._spec.answer_part(answer_text)
        boxed = last_box(text)
        return boxed if boxed or self._spec.strict else trailing_number(text)

    def _quick(self, found: str, gold: str) -> str | None:
        """Return the outcome of an extracted answer if no algebra is needed to know it, else None."""
        too_much = refusal(found, self._spec.limits)
        if too_much is not None:
            return "match" if found.strip() == gold.strip() else too_much
        canonical_gold, answer = _canonical_pair(gold, found)
        if self._spec.strict and key(canonical_gold) != key(answer) and unevaluated(answer, canonical_gold):
            return "unevaluated"
        return quick_equal(canonical_gold, answer)


def _canonical_pair(gold: str, found: str) -> tuple[str, str]:
    return without_choices(canonical(_last_box_or_all(gold)), canonical(found))


def _last_box_or_all(gold: str) -> str:
    return last_box(gold) or gold


def quick_equal(gold: str, answer: str) -> str | None:
    """Return the outcome for two canonical texts if it needs no parsing, else None."""
    if key(gold) == key(answer):
        return "match"
    if not answer:
        return "no_answer"
    if bool(_BASED.search(gold)) or bool(_BASED.search(answer)):
        same = _bases(gold) == _bases(answer) and key(_BASED.sub("", gold)) == key(_BASED.sub("", answer))
        return "match" if same else "no_match"
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None and answer_words is not None:
        return "match" if gold_words == answer_words else "no_match"
    if gold_words is not None and len(gold_words) == 1:
        return "match" if answer.strip() == gold_words else "no_match"
    if answer_words is not None and len(answer_words) == 1 and len(gold.strip()) == 1:
        return "match" if gold.strip() == answer_words else "no_match"
    return _quick_numbers(number(gold), number(answer))


def _quick_numbers(gold: Decimal | Fraction | None, answer: Decimal | Fraction | None) -> str | None:
    if gold is None or answer is None:
        return None
    if type(gold) is type(answer):
        return "match" if gold == answer else "no_match"
    ratio, decimal = (gold, answer) if isinstance(gold, Fraction) else (answer, gold)
    assert isinstance(decimal, Decimal)
    if ratio == Fraction(decimal):
        return "match"
    # 0.333333 stands for 1/3 when it has six digits or more: leave that to the tolerance of math-verify.
    return None if len(decimal.as_tuple().digits) >= 6 else "no_match"


def _bases(text: str) -> list[tuple[str, str]]:
    return [(digits.upper().lstrip("0"), base) for digits, base in _BASED.findall(text)]


def compare(gold: str, answer: str, depth: int) -> str:
    """Compare two canonical texts by shape, and leaf by leaf.

    Args:
        gold, answer: canonical texts.
        depth: how many brackets were already opened.

    Returns: `match`, `no_match`, `gold_unparsed`, `answer_unparsed`, `compare_failed` or `too_complex`.
    """
    if depth > MAX_DEPTH:
        return "too_complex"
    gold, answer = scaled(gold), scaled(answer)
    quick = quick_equal(gold, answer)
    if quick is not None:
        return quick
    gold_shape, answer_shape = _paired_shapes(gold, answer)
    named = _compare_named(gold_shape, answer_shape, depth)
    if named is not None:
        return named
    kinds = {gold_shape.kind, answer_shape.kind}
    if kinds == {"leaf"}:
        return _compare_leaves(gold_shape.text, answer_shape.text)
    if "leaf" in kinds:
        leaf = gold_shape if gold_shape.kind == "leaf" else answer_shape
        other = answer_shape if leaf is gold_shape else gold_shape
        union = as_union(other.text) if other.kind == "list" else None
        if union is not None:
            return _compare_leaves(*((gold, union) if leaf is gold_shape else (union, answer)))
        comparable = is_region(leaf.text) or (other.kind == "list" and is_region(other.text))
        return _compare_leaves(gold_shape.text, answer_shape.text) if comparable else "no_match"
    if len(gold_shape.items) != len(answer_shape.items):
        return "no_match"
    if kinds <= set(_UNORDERED):
        return _compare_unordered(gold_shape.items, answer_shape.items, depth)
    if len(kinds) == 1 or kinds in ({"round", "column"}, {"round", "row"}):
        return _compare_ordered(gold_shape.items, answer_shape.items, depth)
    return "no_match"


def _paired_shapes(gold: str, answer: str) -> tuple[Shape, Shape]:
    """Return both shapes. `S = \\{1,2\\}` and `(x,y) = (1,2)` lose their names, but not if the gold names a tuple and
    the answer has another name."""
    gold_named, answer_named = named_value(gold), named_value(answer)
    if gold_named and answer_named and key(gold_named[0]) != key(answer_named[0]) and "," in gold_named[0]:
        return Shape("leaf", gold), Shape("leaf", answer)
    return shape_of(gold_named[1] if gold_named else gold), shape_of(answer_named[1] if answer_named else answer)


def _compare_ordered(gold: Sequence[str], answer: Sequence[str], depth: int) -> str:
    for gold_item, answer_item in zip(gold, answer, strict=True):
        outcome = compare(gold_item, answer_item, depth + 1)
        if outcome != "match":
            return outcome
    return "match"


def _compare_unordered(gold: Sequence[str], answer: Sequence[str], depth: int) -> str:
    """Match each gold item with an answer item of its own. Equal texts come first, since the rest is quadratic."""
    left = list(answer)
    unmatched = []
    for item in gold:
        twin = next((other for other in left if key(other) == key(item)), None)
        if twin is None:
            unmatched.append(item)
        else:
            left.remove(twin)
    for item in unmatched:
        worst = "no_match"
        for other in left:
            outcome = compare(item, other, depth + 1)
            if outcome == "match":
                left.remove(other)
                break
            worst = outcome if outcome == "gold_unparsed" else worst
        else:
            return worst
    return "match"


def _compare_named(gold: Shape, answer: Shape, depth: int) -> str | None:
    """Return the outcome if a side is `x=2, y=12`: by name, or as the coordinates (2,12); None for other forms."""
    gold_named = assignments(gold.items) if gold.kind == "list" else None
    answer_named = assignments(answer.items) if answer.kind == "list" else None
    if gold_named and answer_named:
        if set(gold_named) != set(answer_named):
            return "no_match"
        return _compare_ordered(list(gold_named.values()), [answer_named[name] for name in gold_named], depth)
    named, other = (gold_named, answer) if gold_named else (answer_named, gold)
    if not named or other.kind not in ("round", "column", "row") or len(named) != len(other.items):
        return None
    values = in_order(named)
    return _compare_ordered(*((values, other.items) if gold_named else (other.items, values)), depth)


def _compare_leaves(gold: str, answer: str) -> str:
    from megatron_daro.reward.symbolic import equal

    answer_parts = chain(answer)
    if len(answer_parts) > 1 and len(chain(gold)) == 1 and not is_region(gold):
        return _compare_chain(gold, answer_parts)
    if changes_value(answer) != changes_value(gold):
        return "no_match"
    if _percent(gold) != _percent(answer):
        gold, answer = _as_fraction_of_100(gold), _as_fraction_of_100(answer)
    gold_unit, answer_unit = unit(gold), unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return "no_match"
    gold, answer = without_unit(gold), without_unit(answer)
    # The algebra system reads a time of day as a ratio, and 12:00 as a division by 0.
    return "match" if key(gold) == key(answer) else equal(gold, answer)


def _compare_chain(gold: str, parts: Sequence[str]) -> str:
    """Compare an answer such as `x=5` or `2^3=8` with a gold that is no equation: its last part counts, if the numbers
    before it agree."""
    *before, value = [part for part in parts if part] or [""]
    if before and is_name(value) and not is_name(before[0]):
        before, value = [value], before[0]
    if any(_ARITHMETIC.fullmatch(part) and _compare_leaves(value, part) != "match" for part in before):
        return "no_match"
    return compare(gold, value, MAX_DEPTH)


def _percent(text: str) -> bool:
    return text.rstrip().endswith("%")


def _as_fraction_of_100(text: str) -> str:
    return f"\\frac{{{text.rstrip().rstrip('%').rstrip(chr(92))}}}{{100}}" if _percent(text) else text
