"""Words that differ from each other, and a stand-in for scikit-learn's counts of words."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


def named(count: int, first: int = 0) -> tuple[str, ...]:
    """Words that differ."""
    return tuple("w" + chr(97 + i // 26) + chr(97 + i % 26) for i in range(first, first + count))


class Matrix:
    """Of scipy.sparse.csr_matrix what is used: slices of rows, `.T`, `@`, and `tocoo` with the cells that are not 0."""

    def __init__(self, values):
        self.values = values

    @property
    def T(self):
        return Matrix(self.values.T)

    def __getitem__(self, rows):
        return Matrix(self.values[rows])

    def __matmul__(self, other):
        return Matrix(self.values @ other.values)

    def tocoo(self):
        row, col = np.nonzero(self.values)
        return SimpleNamespace(row=row, col=col, data=self.values[row, col])


class Counting:
    """In the place of TfidfVectorizer: counts of words, each row of length 1 (its `norm="l2"`), all words alike."""

    def fit_transform(self, texts):
        words = {word: i for i, word in enumerate(dict.fromkeys(" ".join(texts).split()))}
        counts = np.zeros((len(texts), len(words)))
        for row, text in enumerate(texts):
            for word in text.split():
                counts[row, words[word]] += 1
        return Matrix(counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9))
