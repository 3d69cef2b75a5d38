"""Whether two statements are one problem, and whether one contains the other.

A few words may differ; a number, an operator, a symbol, a negation or a word that makes another problem (odd for
even) may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from megatron_daro.workshop.curate.statements import MEANING, NEGATIONS, Statement

LEAST_ALIKE = 0.8
"""Part of the tokens that must agree, in order."""
_ARTICLES = frozenset({"a", "A", "I"})
_FIRST_CJK = "\u3040"
_STRAY, _STRAY_GAP = 3, 6
"""At most so many tokens in common, further than the gap from all others, are chance."""
_Block = tuple[int, int, int]
"""A run of tokens in common: its start in one statement, its start in the other, and its length."""


def same_problem(first: Statement, second: Statement, least: float = LEAST_ALIKE) -> bool:
    """Return whether two statements differ in a few words only.

    Args:
        first: one statement. second: the other. The answer's form is not compared.
        least: lower bound on twice the tokens in common, in order, over the tokens of both.
    """
    if first.numbers != second.numbers:
        return False
    a, b = first.tokens, second.tokens
    if a == b:
        return True
    if 2 * min(len(a), len(b)) < least * (len(a) + len(b)):
        return False
    blocks = _blocks(a, b)
    if 2 * sum(size for _, _, size in blocks) < least * (len(a) + len(b)):
        return False
    edges: list[_Block] = [(0, 0, 0), *blocks, (len(a), len(b), 0)]
    return _gaps_say_the_same(a, b, edges)


def contained_part(inner: Statement, outer: Statement) -> float:
    """Return how much of a statement another one contains, in order, if nothing but a few words differs.

    Args:
        inner: the shorter one, of an evaluation set.
        outer: the text that may contain it; what is before and after it does not count.

    Returns:
        The part of the tokens of `inner`: 1 where `outer` contains all of it, 0 where it contains less than
        LEAST_ALIKE, or more than words differ.
    """
    a, b = inner.tokens, outer.tokens
    if len(b) < LEAST_ALIKE * len(a) or not _is_subsequence(inner.numbers, outer.numbers):
        return 0.0
    blocks = _without_strays(_blocks(a, b))
    part = sum(size for _, _, size in blocks) / max(1, len(a))
    if not blocks or part < LEAST_ALIKE:
        return 0.0
    (first_a, _, _), (last_a, _, last_size) = blocks[0], blocks[-1]
    outside = (*a[:first_a], *a[last_a + last_size :])
    return 0.0 if _fixed(outside) or not _gaps_say_the_same(a, b, blocks) else part


def _blocks(a: Sequence[str], b: Sequence[str]) -> list[_Block]:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks() if block.size]


def _without_strays(blocks: list[_Block]) -> list[_Block]:
    """Return the blocks without short ones far away from the rest: an `of the` in a text around the problem."""
    while len(blocks) > 1:
        (_, b0, n0), (_, b1, _) = blocks[0], blocks[1]
        (_, y0, m0), (_, y1, m1) = blocks[-2], blocks[-1]
        if n0 <= _STRAY and b1 - (b0 + n0) > _STRAY_GAP:
            blocks = blocks[1:]
        elif m1 <= _STRAY and y1 - (y0 + m0) > _STRAY_GAP:
            blocks = blocks[:-1]
        else:
            break
    return blocks


def _gaps_say_the_same(a: Sequence[str], b: Sequence[str], blocks: Sequence[_Block]) -> bool:
    """Return whether the tokens between neighbouring blocks differ only in words that may differ."""
    for (a0, b0, n), (a1, b1, _) in pairwise(blocks):
        left, right = a[a0 + n : a1], b[b0 + n : b1]
        if _fixed(left) != _fixed(right):
            return False
        mine, theirs = MEANING.intersection(left), MEANING.intersection(right)
        if mine and theirs and mine != theirs:
            return False
    return True


def _fixed(tokens: Sequence[str]) -> list[str]:
    """Return the tokens that may not be added, removed or changed: negations, and all but words and `MEANING`."""
    return [token for token in tokens if token in NEGATIONS or not (_is_word(token) or token in MEANING)]


def _is_word(token: str) -> bool:
    """Return whether a token is a word: a single letter is a symbol (but not in Chinese or Japanese), TARTAR a name."""
    is_name = len(token) == 1 or token.isupper()
    return token in _ARTICLES or (token.isalpha() and (token >= _FIRST_CJK or not is_name))


def _is_subsequence(short: Sequence[str], long: Sequence[str]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)
