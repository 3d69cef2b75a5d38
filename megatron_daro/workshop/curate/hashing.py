"""Which pairs of statements are worth comparing: n-grams and MinHash signatures of their tokens, with numpy.

The pairs depend on the texts alone, so two runs find the same ones. datasketch is not used, since its index cannot ask
for equal numbers.

Shapes: D statements, T their tokens end to end, H hash functions, G n-grams, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

BANDS, BAND_ROWS = 40, 3
"""Two sets of tokens share a band with probability 0.9999 at a Jaccard similarity of 0.6, 0.98 at 0.45, 0.27 at 0.2."""
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
    """Return the MinHash signature of each statement's set of tokens: uint32 [D, H]; without tokens all bits are 1."""
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
    """Return pairs of the same key whose signatures share a band and are equal in at least 30 % of their values.

    Args:
        signatures_DH: of `signatures`.
        keys_D: uint64; only statements with the same key can make a pair (the hash of their numbers).

    Returns:
        int64 [P, 2] pairs (earlier, later) in order of the later, then the earlier; and how many buckets were so full
        that each statement was paired with only some of the others.
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
    """Return pairs of a bucket (ascending): all of a small one, else each with the first 24 and the 24 before it."""
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
