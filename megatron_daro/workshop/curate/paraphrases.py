"""Problems that say the same in other words: neighbours in TF-IDF vectors, with equal numbers and equal answers.

Beside alike.py, which finds problems that differ in a few words: a paraphrase may share half of them. Words are
weighed by how rare they are in the set, so that what is compared is the problem's own vocabulary. Two
problems are one only where their numbers are the same, in any order, and so are their golds; a paraphrase that writes
a number in another way (a dozen) is not found. Needs scikit-learn (the extra `curate`).

Shapes: D statements, B of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_daro.errors import ConfigError
from megatron_daro.workshop.curate.leaks import same_answers
from megatron_daro.workshop.curate.rows import Decisions, Row
from megatron_daro.workshop.curate.statements import MEANING, NEGATIONS

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import TfidfVectorizer

ALIKE = 0.4
"""Least cosine. Of 78 planted rewordings it finds 77 %, and takes nothing else for one (docs/benchmarks.md)."""
_AT_ONCE = 512


def drop_paraphrases(rows: Sequence[Row], decisions: Decisions, alike: float = ALIKE) -> None:
    """Drop rows that an earlier one says in other words.

    Args:
        rows: every row that was read. decisions: what was dropped so far; written to. alike: least cosine.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    kept = decisions.kept()
    for earlier, later, cosine in similar([rows[index] for index in kept], alike):
        first, second = kept[earlier], kept[later]
        if first in decisions.dropped or second in decisions.dropped:
            continue
        if same_answers(rows[first], rows[second]):
            decisions.drop(second, "paraphrase", f"cosine {cosine:.2f}", rows[first].place)


def similar(rows: Sequence[Row], alike: float) -> Iterator[tuple[int, int, float]]:
    """Yield (earlier, later, cosine) of rows with equal numbers, as many negations, and no words of another meaning
    (odd for even), in the order of the later."""
    if len(rows) < 2:
        return
    vectors = _vectorizer().fit_transform([" ".join(row.statement.tokens) for row in rows])
    numbers = [tuple(sorted(row.statement.numbers)) for row in rows]
    negations = [sum(token in NEGATIONS for token in row.statement.tokens) for row in rows]
    meanings = [MEANING.intersection(row.statement.tokens) for row in rows]
    for start in range(0, len(rows), _AT_ONCE):
        cosines_BD = (vectors[start : start + _AT_ONCE] @ vectors.T).tocoo()
        close = np.flatnonzero(cosines_BD.data >= alike)
        found = zip(cosines_BD.row[close] + start, cosines_BD.col[close], cosines_BD.data[close], strict=True)
        pairs = [(int(earlier), int(later), float(cosine)) for later, earlier, cosine in found if earlier < later]
        for earlier, later, cosine in sorted(pairs, key=lambda pair: (pair[1], -pair[2], pair[0])):
            mine, theirs = meanings[earlier], meanings[later]
            same = numbers[earlier] == numbers[later] and negations[earlier] == negations[later]
            if same and (mine <= theirs or theirs <= mine):
                yield earlier, later, cosine


def _vectorizer() -> TfidfVectorizer:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise ConfigError(
            "--paraphrases: scikit-learn is not installed; allowed: an environment with it; fix: pip install "
            "'megatron_daro[curate]'"
        ) from None
    return TfidfVectorizer(tokenizer=str.split, token_pattern=None, lowercase=False, sublinear_tf=True)
