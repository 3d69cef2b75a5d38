"""The cheap pre-filter: refuses answers that would keep a computer algebra system busy for minutes.

Place in the data flow: extracted answer -> (this) -> normal form -> comparison. Runs in the calling process, linear in
the text, parses nothing. It is a courtesy to throughput, not the guard: the worker's hard limits are the guard.
"""

from __future__ import annotations

import math
import re

from megatron_daro.reward.base import ScreenLimits

_OPEN_ROUND, _CLOSE_ROUND = "([", ")]"
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{([^{}]*)\}|\\choose")
_DIGITS = re.compile(r"\d+")
_POWER = re.compile(r"\^|\*\*")
# Bounds end here, so that a limit of 10^300 means no limit.
_LARGEST_LOG10 = 300.0
_PLAIN_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def refusal(text: str, limits: ScreenLimits) -> str | None:
    """Why an extracted answer is refused unparsed.

    Args:
        text: the extracted answer.
        limits: what is allowed.

    Returns: `too_long`, `too_complex`, or None when it may be parsed.
    """
    if len(text) > limits.max_chars:
        return "too_long"
    if any(len(run) > limits.max_digits for run in _DIGITS.findall(text)):
        return "too_long"
    if _too_nested(text, limits):
        return "too_complex"
    if any(_too_big(text, match.end(), limits) for match in _POWER.finditer(text)):
        return "too_complex"
    if _factorial_too_big(text, limits) or _binomial_too_big(text, limits):
        return "too_complex"
    return None


def _too_nested(text: str, limits: ScreenLimits) -> bool:
    curly = rounded = 0
    for char in text:
        if char == "{":
            curly += 1
        elif char == "}":
            curly -= 1
        elif char in _OPEN_ROUND:
            rounded += 1
        elif char in _CLOSE_ROUND:
            rounded -= 1
        if curly > limits.max_nesting or rounded > limits.max_round_nesting:
            return True
    return False


def _operand(text: str, start: int) -> str:
    """Return the exponent that begins at `start`: a bracketed group without its brackets, or a run up to an operator.

    A power behind the exponent belongs to it, as in 9^9^9.
    """
    while start < len(text) and text[start] in " -+":
        start += 1
    end = start
    if start < len(text) and text[start] in "{([":
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] in "{([") - (text[end] in "})]")
            if depth == 0:
                break
        end += 1
    else:
        while end < len(text) and (text[end].isalnum() or text[end] in ".\\"):
            end += 1
    tail = _POWER.match(text, end)
    return text[start:] if tail else text[start:end].strip("{}()[] ")


def _too_big(text: str, start: int, limits: ScreenLimits) -> bool:
    """Whether the exponent at `start` is, or may evaluate to, more than the limit."""
    return _log10_bound(_operand(text, start), limits.max_tower) > math.log10(limits.max_exponent)


def _log10_bound(text: str, levels: int) -> float:
    """log10 of a generous bound on the value of a small numeric expression; symbols count as 1.

    Sums and products are bounded by the product of their numbers, a power by base bound times exponent bound.
    Infinite when powers stand in exponents more than `levels` deep.
    """
    if levels < 0:
        return math.inf
    total = 0.0
    position = 0
    previous = 0.0
    while position < len(text):
        power = _POWER.match(text, position)
        number = _PLAIN_NUMBER.match(text, position)
        if power:
            inner = _operand(text, power.end())
            exponent = _log10_bound(inner, levels - 1)
            if exponent == math.inf:
                return math.inf
            total += max(previous, 0.0) * (10 ** min(exponent, 12.0))
            position = power.end() + max(1, len(inner))
        elif number:
            previous = math.log10(max(1.0, abs(float(number.group()))))
            total += 0.0 if text[:position].rstrip().endswith("/") else previous
            position = number.end()
        else:
            if text[position] == "!":
                total += (10**previous) * max(previous, 1.0)
            position += 1
    return min(total, _LARGEST_LOG10)


def _factorial_too_big(text: str, limits: ScreenLimits) -> bool:
    """n! with n above the limit, or a factorial of a power, a product or another factorial of numbers."""
    for match in re.finditer("!", text):
        before = text[: match.start()].rstrip()
        if before.endswith("!"):
            return True
        if before and before[-1] in ")}]":
            group = _group_before(before)
            if before[: -len(group)].rstrip().endswith("^"):
                return True
            if "!" in group or _log10_bound(group, limits.max_tower) > math.log10(limits.max_factorial):
                return True
            continue
        digits = re.search(r"\d+$", before)
        if digits and (int(digits.group()) > limits.max_factorial or before[: digits.start()].rstrip().endswith("^")):
            return True
    return False


def _group_before(text: str) -> str:
    depth = 0
    for start in range(len(text) - 1, -1, -1):
        depth += (text[start] in ")}]") - (text[start] in "({[")
        if depth == 0:
            return text[start:]
    return text


def _binomial_too_big(text: str, limits: ScreenLimits) -> bool:
    return any(
        _log10_bound(match.group(1) or text, limits.max_tower) > math.log10(limits.max_factorial)
        for match in _BINOMIAL.finditer(text)
    )
