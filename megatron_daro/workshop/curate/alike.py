"""Whether two statements are one problem, and whether one stands in the other; and the pairs worth asking about.

A few words may differ; a number, an operator, a symbol, a negation or a word that makes another problem (odd for
even) may not. Candidates come from n-grams and MinHash signatures of the tokens, computed with numpy as a function of
the texts alone, so two runs find the same. Not datasketch, whose index cannot be asked for equal numbers.

Shapes: D statements, T their tokens end to end, H hash functions, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from megatron_daro.workshop.curate.statements import MEANING, NEGATIONS, Statement

BANDS, BAND_ROWS = 40, 3
"""Two sets of tokens with Jaccard 0.6 meet in some band with probability 0.9999, with 0.45 0.98, with 0.2 0.27."""
_LEAST_AGREEMENT = 0.3
_WHOLE_BUCKET = 48
_MIX = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_TOKENS = 200_000


class Ragged:
    """Hashed tokens of all statements end to end: `values` uint64 [T], `offsets` int64 [D + 1]."""

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        """Hash every distinct token once.

        Args:
            rows: the tokens of each statement.
        """
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        known: dict[str, int] = {}
        for row in rows:
            for token in row:
                if token not in known:
                    known[token] = token_hash(token)
        flat = (known[token] for row in rows for token in row)
        self.values = np.fromiter(flat, dtype=np.uint64, count=int(self.offsets[-1]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def rows_T(self) -> np.ndarray:
        """int64 [T], the statement of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))


def token_hash(token: str) -> int:
    """Return 64 bits of a token that are the same on every machine."""
    return int.from_bytes(blake2b(token.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def sequence_hash(tokens: Sequence[str]) -> int:
    """Return 64 bits of a sequence of tokens."""
    return token_hash("\0".join(tokens))


def ngrams(ragged: Ragged, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every run of n tokens within a statement.

    Returns:
        uint64 [G] hashes and int64 [G] statements, in order; statements of fewer tokens have none.
    """
    count = len(ragged.values) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    rows_T = ragged.rows_T
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes = (hashes ^ ragged.values[i : i + count]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    whole = rows_T[:count] == rows_T[n - 1 : n - 1 + count]
    return hashes[whole], rows_T[:count][whole]


def signatures(ragged: Ragged) -> np.ndarray:
    """Return the MinHash signature of each statement's set of tokens: uint32 [D, H]; all ones without tokens."""
    functions = np.random.PCG64(np.random.SeedSequence(20250917)).random_raw(2 * BANDS * BAND_ROWS).astype(np.uint64)
    factors_H, shifts_H = functions[: BANDS * BAND_ROWS] | np.uint64(1), functions[BANDS * BAND_ROWS :]
    smallest = np.full((len(ragged), BANDS * BAND_ROWS), np.iinfo(np.uint32).max, np.uint32)
    filled = np.flatnonzero(np.diff(ragged.offsets))
    start = 0
    while start < len(filled):
        end = int(np.searchsorted(ragged.offsets[filled], ragged.offsets[filled[start]] + _CHUNK_TOKENS, side="left"))
        rows = filled[start : max(end, start + 1)]
        low, high = ragged.offsets[rows[0]], ragged.offsets[rows[-1] + 1]
        tokens, cuts = ragged.values[low:high], ragged.offsets[rows] - low
        for h in range(BANDS * BAND_ROWS):
            hashed = ((tokens * factors_H[h] + shifts_H[h]) >> np.uint64(32)).astype(np.uint32)
            smallest[rows, h] = np.minimum.reduceat(hashed, cuts)
        start = max(end, start + 1)
    return smallest


def similar_pairs(signatures_DH: np.ndarray, keys_D: np.ndarray) -> tuple[np.ndarray, int]:
    """Return pairs that share a band of their signatures and their key.

    Args:
        signatures_DH: of `signatures`.
        keys_D: uint64; only statements with the same key can make a pair (the hash of their numbers).

    Returns:
        int64 [P, 2] pairs (earlier, later) in order of the later, then the earlier; and how many buckets were so full
        that each statement was paired with some of the others only.
    """
    pairs: list[np.ndarray] = []
    crowded = 0
    for band in range(BANDS):
        mixed = keys_D
        for h in range(band * BAND_ROWS, (band + 1) * BAND_ROWS):
            mixed = (mixed ^ signatures_DH[:, h].astype(np.uint64)) * _MIX
            mixed ^= mixed >> np.uint64(31)
        order = np.argsort(mixed, kind="stable")
        ordered = mixed[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        sizes = np.diff(np.concatenate([starts, [len(order)]]))
        for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            crowded += size > _WHOLE_BUCKET
            pairs.append(_within(order[start : start + size]))
    if not pairs:
        return np.empty((0, 2), np.int64), 0
    joined = np.concatenate(pairs)
    codes = np.unique(joined[:, 1] * np.int64(len(keys_D)) + joined[:, 0])
    later, earlier = np.divmod(codes, np.int64(len(keys_D)))
    agreement = np.concatenate(
        [
            (signatures_DH[later[i : i + 50_000]] == signatures_DH[earlier[i : i + 50_000]]).mean(axis=1)
            for i in range(0, len(codes), 50_000)
        ]
    )
    close = agreement >= _LEAST_AGREEMENT
    return np.stack([earlier[close], later[close]], axis=1), crowded


def _within(bucket: np.ndarray) -> np.ndarray:
    """Pairs of a bucket (ascending): all of a small one; in a large one each with the first and the nearest before."""
    size = len(bucket)
    if size <= _WHOLE_BUCKET:
        later, earlier = np.tril_indices(size, -1)
    else:
        reach = np.arange(1, _WHOLE_BUCKET // 2 + 1)
        later = np.repeat(np.arange(size), 2 * len(reach))
        near = np.arange(size)[:, None] - reach[None, :]
        first = np.broadcast_to(reach[None, :] - 1, near.shape)
        earlier = np.concatenate([near, first], axis=1).ravel()
        real = (earlier >= 0) & (earlier < later)
        later, earlier = later[real], earlier[real]
    return np.stack([bucket[earlier], bucket[later]], axis=1).astype(np.int64)


LEAST_ALIKE = 0.8
"""Part of the tokens that must agree, in order."""
_ARTICLES = frozenset({"a", "A", "I"})
_FIRST_CJK = "\u3040"
_STRAY, _STRAY_GAP = 3, 6
_Block = tuple[int, int, int]


def same_problem(first: Statement, second: Statement, least: float = LEAST_ALIKE) -> bool:
    """Return whether two statements differ in a few words only.

    Args:
        first: one statement. second: the other. The answer's form is not compared.
        least: twice the tokens in common, in order, over the tokens of both, at least this.
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


def part_found(inner: Statement, outer: Statement, least: float = LEAST_ALIKE) -> float:
    """Return how much of a statement stands in another one, in order, if nothing but a few words differs.

    Args:
        inner: the shorter one, of an evaluation set.
        outer: the text in which it may stand; what stands before and behind it does not count.
        least: less than this part of the tokens of `inner` counts as nothing.

    Returns:
        The part of the tokens of `inner`: 1 where it stands there as it is, 0 where it does not.
    """
    a, b = inner.tokens, outer.tokens
    if len(b) < least * len(a) or not _is_subsequence(inner.numbers, outer.numbers):
        return 0.0
    blocks = _without_strays(_blocks(a, b))
    part = sum(size for _, _, size in blocks) / max(1, len(a))
    if not blocks or part < least:
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
    """Return whether what stands between neighbouring blocks differs in words that may differ."""
    for (a0, b0, n), (a1, b1, _) in pairwise(blocks):
        left, right = a[a0 + n : a1], b[b0 + n : b1]
        if _fixed(left) != _fixed(right):
            return False
        mine, theirs = MEANING.intersection(left), MEANING.intersection(right)
        if mine and theirs and mine != theirs:
            return False
    return True


def _fixed(tokens: Sequence[str]) -> list[str]:
    """Return the tokens that may neither come, go nor change: all but words and articles."""
    return [token for token in tokens if token in NEGATIONS or not (_is_word(token) or token in MEANING)]


def _is_word(token: str) -> bool:
    """Return whether it is a word: a single letter is a symbol (not in Chinese, Japanese and Korean), TARTAR a name."""
    is_name = len(token) == 1 or token.isupper()
    return token in _ARTICLES or (token.isalpha() and (token >= _FIRST_CJK or not is_name))


def _is_subsequence(short: Sequence[str], long: Sequence[str]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)
